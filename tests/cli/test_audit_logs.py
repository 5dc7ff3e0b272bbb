"""Lines as the tools' own code writes them, with FLOPs by their own functions or by hand."""

import json
from pathlib import Path

import pytest

from headway.audit.formats import FORMATS

RECORD = json.loads(next(Path("benchmarks/results").glob("their_rules_*.json")).read_text(encoding="utf-8"))
THEIRS = {rule["convention"]: rule["flops"] for rule in RECORD["rules"]}
H100 = 989.4e12


@pytest.fixture
def audit(headway, tmp_path):
    """Write a log, audit it, return the JSON record, or the error: audit(text, *options, code=0, name="train.log")."""

    def run(text, *options, code=0, name="train.log"):
        log = tmp_path / name
        log.write_text(text, encoding="utf-8")
        result = headway("audit", log, *options, "--json")
        assert result.code == code, result.err
        return json.loads(result.out) if code == 0 else " ".join(result.err.split())

    return run


def useful(headway, model, *options):
    result = headway("flops", model, *options, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)["flops"]["total"]


def megatron(per_step, ranks, seconds=(10.0, 10.5), batch=128):
    """Lines of Megatron-LM's training_log, with --log-throughput."""
    return "".join(
        f" [2026-08-22 10:00:0{i}.123456] iteration {i:8d}/     100 | consumed samples: {batch * i:12d} | elapsed time "
        f"per iteration (ms): {1000 * s:.1f} | throughput per GPU (TFLOP/s/GPU): {per_step / s / ranks / 1e12:.1f} | "
        f"learning rate: 1.000000E-05 | global batch size: {batch:5d} | lm loss: 1.0E+01 | loss scale: 1.0 |\n"
        for i, s in enumerate(seconds, 1)
    )


@pytest.mark.parametrize("ranks", [[], ["--ranks", 16]])
def test_megatron_lm_bills_no_windows(audit, headway, ranks):
    # by its own function: three rows of 8192 of gpt-oss-20b, whose every second layer has a window of 128
    text = megatron(128 / 3 * THEIRS["megatron-lm"]["gpt-oss-20b"]["rows"], 16)
    data = audit(text, "--model", "gpt-oss-20b", "--seq-len", 8192, "--device", "H100", *ranks)
    assert data["identified"]["convention"] == "megatron-lm"
    mean = 2 * 128 * useful(headway, "gpt-oss-20b", "--segments", 8192) / 20.5 / 16 / H100
    assert data["useful_mfu_mean"] == pytest.approx(mean, rel=2e-3)


def test_megatron_lms_packs_are_billed_by_real_tokens(audit, headway):
    # by its own function: packs of 3000 and 500 tokens in two rows of 4096
    text = megatron(64 * THEIRS["megatron-lm"]["llama-3.1-8b"]["padded packs"], 8)
    packs = ("--segments", "3000,500", "--slots", 8192)
    data = audit(text, "--model", "llama-3.1-8b", "--seq-len", 4096, *packs, "--device", "H100", "--ranks", 8)
    assert data["identified"]["convention"] == "megatron-lm"
    work = useful(headway, "llama-3.1-8b", "--segments", "3000,500")
    assert data["useful_mfu_mean"] == pytest.approx(2 * 64 * work / 20.5 / 8 / H100, rel=1e-3)
    assert data["ratio"] == pytest.approx(1, rel=1e-3)  # but for the diagonal


def test_a_log_of_megatron_bridge_is_its_own(audit):
    rate = 128 * THEIRS["megatron-bridge"]["gemma-3-4b"]["row"] / 10 / 16 / 1e12
    lines = megatron(16e12, 16, (10.0,)).replace("throughput per GPU (TFLOP/s/GPU): ", "ignored: ")
    text = f"Step Time : 10.00s GPU utilization: {rate:.1f}MODEL_TFLOP/s/GPU\n{lines}"
    data = audit(text, "--model", "gemma-3-4b", "--seq-len", 4096, "--device", "H100", "--ranks", 16)
    assert (data["tool"], data["identified"]["convention"]) == ("Megatron-Bridge", "megatron-bridge")


def swift(step, mfu):
    """A line of ms-swift's logging.jsonl: add_train_message and PerfMetricsLogCallback."""
    named = {"loss": 1.25, "grad_norm": 0.7, "learning_rate": 1e-5, "epoch": 0.1}
    timed = {"elapsed_time": "1m 3s", "remaining_time": "2m", "memory(GiB)": 60.1, "train_speed(s/it)": 1.234567}
    return {**named, **({} if mfu is None else {"MFU": mfu}), "global_step/max_steps": f"{step}/100", **timed}


@pytest.mark.parametrize("console", [False, True])
def test_ms_swift(audit, headway, console):
    # the Trainer's 6 N per input position, over a measured peak; each MFU is the mean since the start
    rows = [swift(5, 0.11), swift(10, 0.29), swift(15, 0.31)]
    text = "\n".join(str(row) if console else json.dumps(row) for row in rows)
    last = '\n{"last_model_checkpoint": "output/checkpoint-100", "memory": 60.1}\n'
    data = audit(text + last, "--model", "qwen3-8b", "--seq-len", 4096, "--device", "H100", name="logging.jsonl")
    assert data["tool"] == "ms-swift"
    assert [row["step"] for row in data["rows"]] == [15]
    per_token = 6 * (36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288 + 2 * 4096 + 256) + 4096 + 4096 * 151936)
    ratio = useful(headway, "qwen3-8b", "--segments", 4096) / 4096 / per_token
    assert data["useful_mfu_mean"] == pytest.approx(0.31 * ratio)
    assert any("divides by a peak that it measures" in note for note in data["notes"])
    assert sum(data["skipped"].values()) == 2


def nemo_rl(step, seconds, flops, ranks, *, tokens=None, peak=989.5e12):
    """What NeMo RL prints of a step: sft.py's, and of print_performance_metrics with tokens."""
    rate = flops / seconds / 1e12
    marker = f"\n{'=' * 25} Step {step}/100 {'=' * 25}\n"
    speed = f"    - Policy Training (Tokens/sec/gpu): {tokens / seconds / ranks:.2f}\n" if tokens else ""
    return (
        f"{marker}📊 Training Results:\n  • Loss: 1.2345\n{speed}  • Training FLOPS: {rate:.2f} TFLOPS "
        f"({rate / ranks:.2f} TFLOPS per rank)\n  • Training Model Floating Point Utilization: "
        f"{100 * rate * 1e12 / ranks / peak:.2f}%\n⏱️  Timing:\n  • Total step time: {2 * seconds:.2f}s\n"
        f"  • policy_training: {seconds:.2f}s (50.0%)\n"
    )


@pytest.mark.parametrize("tokens", [None, 32 * 8192])
def test_nemo_rl(audit, headway, tokens):
    flops = 32 * THEIRS["nemo-rl"]["llama-3.1-8b"]["pack"]  # by its own function: 6000, 1500 and 692 tokens
    text = "".join(nemo_rl(step, seconds, flops, 8, tokens=tokens) for step, seconds in ((1, 3.0), (2, 4.0)))
    sizes = ("--segments", "6000,1500,692", "--seq-len", 8192)
    data = audit(text + nemo_rl(3, 3.0, 0, 8).partition("  • Training FLOPS")[0], "--model", "llama-3.1-8b", *sizes)
    assert data["tool"] == "NeMo RL"
    # FLOP/s and MFU alone fix the peak, and no rule: its own is taken
    assert data["identified"]["convention"] == ("nemo-rl" if tokens else None)
    assert [candidate["convention"] for candidate in data["identified"]["candidates"]] == ["nemo-rl"]
    assert data["identified"]["peak"] == 989.5e12
    assert [row["step"] for row in data["rows"]] == [1, 2]
    assert sum(data["skipped"].values()) == 1
    work = 32 * useful(headway, "llama-3.1-8b", "--segments", "6000,1500,692")
    assert data["useful_mfu_mean"] == pytest.approx(2 * work / 7 / 8 / 989.5e12, rel=1e-3)


def test_a_cut_out_of_nemo_rls_summary(audit, headway):
    # NVIDIA-NeMo/RL#632 quotes the line by itself
    text = "  • Training FLOPS: 774.91 TFLOPS (96.86 TFLOPS per rank)\n" * 2
    data = audit(text, "--model", "llama-3.1-8b", "--seq-len", 4096, "--device", "H100")
    assert [(row["step"], row["reported"]["tflops"]) for row in data["rows"]] == [(1, 96.86), (2, 96.86)]
    tool = THEIRS["nemo-rl"]["llama-3.1-8b"]["row"]
    share = useful(headway, "llama-3.1-8b", "--segments", 4096) / tool
    assert data["useful_mfu_mean"] == pytest.approx(96.86e12 * share / H100, rel=1e-4)


def test_nemo_automodel_counts_tokens_without_padding_and_bills_rows(audit, headway):
    # by its own function: two rows of 4096, which hold 3500 real tokens
    flops, seconds = THEIRS["nemo-automodel"]["qwen3-8b"]["padded packs"], 0.9
    text = "".join(
        json.dumps({
            "step": step, "epoch": 0, "timestamp": "2026-08-22T10:00:00.000Z", "loss": 1.5, "grad_norm": 0.5,
            "lr": 1e-5, "mem": 60.0, "tps": 8 * 3500 / seconds, "tps_per_gpu": 3500 / seconds, "mfu": mfu,
            "num_tokens_per_step": 28000, "num_label_tokens": 20000,
        }) + "\n"
        for step, mfu in ((0, None), (1, 100 * flops / seconds / 989e12), (2, 100 * flops / seconds / 989e12))
    )  # fmt: skip
    packs = ("--segments", "3000,500", "--slots", 8192, "--seq-len", 4096)
    data = audit(text, "--model", "qwen3-8b", *packs, "--device", "H100", name="training.jsonl")
    assert (data["tool"], data["identified"]["convention"]) == ("NeMo Automodel", "nemo-automodel")
    assert data["identified"]["peak"] == 989e12
    assert [row["step"] for row in data["rows"]] == [1, 2]
    work = useful(headway, "qwen3-8b", "--segments", "3000,500")
    assert data["useful_mfu_mean"] == pytest.approx(work / seconds / H100, rel=1e-3)


def test_nemo_automodels_benchmark(audit, headway):
    flops = THEIRS["nemo-automodel"]["qwen3-8b"]["row"]
    lines = "".join(
        f"2026-08-22 INFO Max iter time: {s:.6f} seconds\n2026-08-22 INFO MFU: {100 * flops / s / 989e12:.6f}%\n"
        for s in (0.5, 0.4)
    )
    data = audit(
        lines + "INFO Average MFU: 50.0% (all)\n", "--model", "qwen3-8b", "--seq-len", 4096, "--device", "H100"
    )
    assert [row["step"] for row in data["rows"]] == [1, 2]
    mean = 2 * useful(headway, "qwen3-8b", "--segments", 4096) / 0.9 / 989e12
    assert data["useful_mfu_mean"] == pytest.approx(mean, rel=2e-3)


LIGHTNING = (
    "epoch,step,train/batches,train/device/flops_per_sec,train/device/items_per_sec,train/device/mfu,train_loss\n"
)


def test_lightnings_throughput_monitor(audit, headway):
    # PyTorch's counter by hand, Qwen3-8B on a row of 4096: the full square, backward 2.5 times forward
    weights = 36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288) + 4096 * 151936
    per_token = 6 * weights + 14 * 36 * 4096 * 4096
    rates = [9000.5, 9100.25]
    text = LIGHTNING + "0,49,50,,,,\n0,49,,,,,2.5\n"
    text += "".join(
        f"0,{i},{i},{r * per_token!r},{r!r},{r * per_token / 989.5e12!r},\n" for i, r in enumerate(rates, 99)
    )
    data = audit(text, "--model", "qwen3-8b", "--seq-len", 4096, "--device", "H100", name="metrics.csv")
    assert (data["tool"], data["identified"]["convention"]) == ("Lightning", "flop-counter")
    assert [row["step"] for row in data["rows"]] == [99, 100]
    assert data["identified"]["peak_flops_per_s"] == pytest.approx([989.5e12] * 2, rel=1e-6)
    per_token = useful(headway, "qwen3-8b", "--segments", 4096) / 4096
    mean = 2 / (1 / 9000.5 + 1 / 9100.25) * per_token / H100
    assert data["useful_mfu_mean"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("name", ["training.jsonl", "logging.jsonl"])
def test_explain_takes_json_lines_of_other_tools_for_logs(headway, tmp_path, name):
    automodel = [{"step": i, "epoch": 0, "tps_per_gpu": 100.0, "mfu": 30.0 + i} for i in range(4)]
    rows = automodel if name == "training.jsonl" else [swift(i, 0.3) for i in range(1, 5)]
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = headway("explain", tmp_path / name)
    assert result.code == 0, result.err
    assert ("NeMo Automodel" if name == "training.jsonl" else "ms-swift") in result.out


CONSOLE = "{'loss': 2.31, 'grad_norm': 1.2, 'learning_rate': 1e-05, 'epoch': 0.1}\n"
WITHOUT_RATES = [
    (CONSOLE, "is what the Hugging Face Trainer prints, which has no FLOPs. Give the trainer_state.json"),
    (
        json.dumps(swift(5, None)) + "\n",
        "is a log of ms-swift without an MFU, which it writes with `--callbacks perf_log`",
    ),
    (
        "step 3 | epoch 0 | loss 1.5000 | grad_norm 0.5 | lr 1.00e-05 | mem 60.00 GiB | tps 800.00(100.00/gpu) | "
        "num_label_tokens 20000\n",
        "is the console of NeMo Automodel, which has no MFU. Give the training.jsonl",
    ),
    ('{"step": 1, "epoch": 0, "loss": 1.5, "tps_per_gpu": 100.0, "mfu": null}\n', "whose MFU is null or 0 throughout"),
    (f"{'=' * 25} Step 1/100 {'=' * 25}\n  • Loss: 1.2\n", "a log of NeMo RL without `Training FLOPS`"),
    ("epoch,step,train/device/batches_per_sec\n0,9,1.5\n", "a metrics.csv of Lightning without `device/flops_per_sec`"),
]


@pytest.mark.parametrize(("text", "quoted"), WITHOUT_RATES)
def test_a_known_tools_log_without_a_rate_says_what_is_wanted(audit, text, quoted):
    assert quoted in audit(text, "--model", "qwen3-8b", code=1)


@pytest.mark.parametrize("number", ["0", "1", "0.5e-1", "1e999", "9" * 400, "-0.1", "NaN", "null", "1.2.3"])
def test_numbers_that_no_step_has_are_no_rows_and_no_traceback(headway, tmp_path, number):
    texts = {
        "swift": json.dumps(swift(5, 0.25)).replace("0.25", number),
        "automodel": '{"step": 1, "epoch": 0, "tps": N, "tps_per_gpu": N, "mfu": N, "num_tokens_per_step": N, "x": 1}',
        "lightning": "step,train/device/flops_per_sec,train/device/mfu\n9,N,N\n",
        "rl": f"{'=' * 9} Step 1/9 {'=' * 9}\nTraining FLOPS: N TFLOPS (N TFLOPS per rank)\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace("N", number) + "\n", encoding="utf-8")
        result = headway(
            "audit", tmp_path / name, "--model", "qwen3-8b", "--seq-len", 4096, "--device", "H100", "--json"
        )
        assert result.code in (0, 1)  # a command's own errors; another one would come through the fixture
        assert result.code == 0 or result.err.startswith("Error: ")


def test_every_tool_whose_lines_are_read_is_named_in_the_error_the_help_and_the_docs(audit, headway):
    error = audit("nothing\n", "--model", "qwen3-8b", code=1)
    told = " ".join(headway("audit", "--help").out.replace("│", " ").split())
    page = Path("docs/conventions.md").read_text(encoding="utf-8").partition("## Logs that")[2]
    for form in FORMATS:
        assert f"{form.tool} (`{form.lines}`)" in error
        assert form.tool in told
        assert form.tool in page


@pytest.mark.parametrize(
    "text", [json.dumps(swift(5, 0.1)), nemo_rl(1, 1.0, 1e15, 8), LIGHTNING + "0,9,9,1.0,1.0,0.5,\n"]
)
def test_resumption_is_for_a_trainer_state(audit, text):
    message = audit(text, "--model", "qwen3-8b", "--seq-len", 8, "--resumed-at", 3, code=2)
    assert "--resumed-at 3 is for a trainer_state.json" in message


@pytest.mark.parametrize(("steps", "noted"), [((3, 4, 5), True), ((3, 4, 9), False)])
def test_tokens_of_a_step_are_noted_where_stamps_give_its_time(audit, steps, noted):
    # ten seconds a line at 100 tokens/s are 1,000 tokens; lines of several steps each stand for no step's time
    per_token = THEIRS["torchtitan-2026-06"]["qwen3-8b"]["row"] / 4096
    rates = f"memory: 1GiB(1%)  tps: 100.0  tflops: {100 * per_token / 1e12:.2f}  mfu: 0.5%"
    text = "".join(f"2025-12-17 01:18:{i}1,000 - step: {n}  loss: 1.0  {rates}\n" for i, n in enumerate(steps))
    notes = audit(text, "--model", "qwen3-8b", "--seq-len", 4096, "--device", "H100")["notes"]
    assert any("gives 1,000 tokens per step" in note for note in notes) is noted
    assert any("tokens per step" in note for note in notes) is noted


def test_a_line_of_megabytes_in_a_log_is_no_row_and_no_traceback(audit):
    rows = "0,99,,9e13,,0.5,\n" + "x" * 200_000 + ',1\n"' + "\n0,100,,9e13,,0.5,\n"
    data = audit(LIGHTNING + rows, "--model", "qwen3-8b", "--seq-len", 4096, "--device", "H100", name="metrics.csv")
    assert [row["step"] for row in data["rows"]] == [99, 100]


@pytest.mark.parametrize("form", ["state", "indented state", "console"])
def test_trls_asynchronous_trainers(audit, headway, form):
    # by its own function: a step of 8 rows of 4096 on 8 H100 in 12 s, of which forward and backward take 5 s
    flops, tokens = 8 * THEIRS["trl"]["qwen3-8b"]["row"], 8 * 4096
    entries = [
        {
            "step": step, "epoch": 0.1, "loss": 0.1, "perf/step_s": 12.0 + step, "perf/fwd_bwd_s": 5.0,
            "perf/forwarded_tok_s_wall_clock": tokens / (12 + step), "perf/forwarded_tok_s_fwd_bwd": tokens / 5,
            "perf/mfu_wall_clock": 100 * flops / (12 + step) / (8 * 989e12), "perf/mfu_fwd_bwd": 1.0,
        }
        for step in range(1, 7)
    ]  # fmt: skip
    state = {"log_history": entries, "global_step": 6, "total_flos": 0.0}
    text = json.dumps(state, indent=2 if form == "indented state" else None)
    if form == "console":  # without the step; the Trainer prints some numbers as strings
        text = "".join(f"{ {k: str(v) for k, v in entry.items() if k != 'step'} }\n" for entry in entries)
    data = audit(text, "--model", "qwen3-8b", "--seq-len", 4096, "--device", "H100", "--ranks", 8)
    assert data["identified"]["convention"] == "trl"
    assert [row["step"] for row in data["rows"]] == [1, 2, 3, 4, 5, 6]
    mean = 6 * 8 * useful(headway, "qwen3-8b", "--segments", 4096) / sum(range(13, 19)) / 8 / H100
    assert data["useful_mfu_mean"] == pytest.approx(mean, rel=1e-6)


def test_a_file_of_two_runs_says_so(audit):
    tflops = 5000 * THEIRS["torchtitan-2026-06"]["qwen3-8b"]["row"] / 4096 / 1e12
    rates = f"tps: 5,000  tflops: {tflops:.2f}  mfu: {tflops / 9.89:.2f}%"
    went_back = "steps go back once, first from 3 to 2. The file holds several runs, or a resumed run, and the means "
    for steps, notes in (((1, 2, 3, 2, 3), [went_back + "cover all of them"]), ((1, 2, 3, 4, 5), [])):
        text = "".join(f"step: {step:2d}  loss: 1.0  memory: 9.00GiB(9.66%)  {rates}\n" for step in steps)
        data = audit(text, "--model", "qwen3-8b", "--seq-len", 4096)
        assert [note for note in data["notes"] if note.startswith("steps go back")] == notes
