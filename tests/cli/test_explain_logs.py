"""Logs of eight tools in the form in which each prints its lines: the first thing that a person reads of each.

Sources of the lines, November 2026: torchtitan's metrics.py, Megatron-LM's training_log, verl's LocalLogger, TRL's
asynchronous trainers, Lightning's CSVLogger with ThroughputMonitor, transformers' TrainerState and nanochat's
base_train.py.
"""

import json
import math
import re

import pytest

from headway.audit.formats import FORMATS, read_losses

NAN = float("nan")


def torchtitan(*, is_stamped, nan_from=math.inf, slow_from=61):
    """Lines of 120 steps of 8,192 tokens; the logger's prefix has the stamp, which a terminal's copy may lack."""
    text, now_s = "", 36_000.0
    for step in range(1, 121):
        tps = 310 if step == 1 else 5800 if step < slow_from else 4060
        now_s += 8192 / tps
        loss = NAN if step >= nan_from else 12.25 - 0.05 * step
        clock = (
            f"{int(now_s // 3600):02d}:{int(now_s // 60 % 60):02d}:{int(now_s % 60):02d},{int(now_s * 1000 % 1000):03d}"
        )
        text += f"[titan] 2026-03-04 {clock} - root - INFO - " if is_stamped else ""
        text += (
            f"\x1b[31mstep: {step:2}  \x1b[32mloss: {loss:8.5f}  \x1b[38;2;180;60;0mgrad_norm: {2.1:7.4f}  "
            f"\x1b[36mmemory: 47.65GiB(60.27%)  \x1b[34mtps: {tps:,}  \x1b[36mtflops: {tps * 0.0579:,.2f}  "
            f"\x1b[35mmfu: {tps * 0.0579 / 9.89:.2f}%\x1b[39m\n"
        )
    return text


def megatron(*, nan_from=math.inf, skipped_from=math.inf):
    """Lines of every tenth iteration; a loss that is NaN is left out, and its iterations are counted."""
    text = ""
    for step in range(10, 410, 10):
        is_nan = step >= nan_from
        text += (
            f" [2026-03-04 11:{step // 60:02d}:{step % 60:02d}.123456] iteration {step:8d}/  500000 | consumed "
            f"samples: {step * 1024:12d} | elapsed time per iteration (ms): {5210 + step % 7:.1f} | throughput per "
            f"GPU (TFLOP/s/GPU): {590.1:.1f} | learning rate: {1.5e-4:.6E} | global batch size: {1024:5d} |"
            f"{'' if is_nan else f' lm loss: {10 - 7 * (step / (step + 120)):.6E} |'} loss scale: {1:.1f} | grad norm: "
            f"{NAN if is_nan else 0.423:.3f} | number of skipped iterations: {3 if step >= skipped_from else 0:3d} | "
            f"number of nan iterations: {10 if is_nan else 0:3d} |\n"
        )
    return text


def verl():
    return "".join(
        f"\x1b[36m(TaskRunner pid=4711)\x1b[0m step:{step} - global_seqlen/mean:442300.0 - actor/entropy:0.42 - "
        f"actor/pg_loss:np.float64({0.02 - step * 1e-4}) - actor/grad_norm:0.2 - perf/mfu/actor:0.412 - "
        f"perf/mfu/actor_infer:0.44 - response_length/mean:1400.2 - response_length/max:8192.0 - "
        f"response_length/min:12.0 - prompt_length/mean:210.0 - prompt_length/max:512.0 - prompt_length/min:60.0 - "
        f"timing_s/gen:90.0 - timing_s/reward:1.2 - timing_s/old_log_prob:14.1 - timing_s/ref:13.8 - timing_s/adv:0.4"
        f" - timing_s/update_actor:41.3 - timing_s/step:161.2 - perf/total_num_tokens:3538400 - "
        f"perf/time_per_step:161.2 - perf/throughput:{3538400 / 8 / 161.2}\n"
        for step in range(1, 31)
    )


def trl():
    """The console of an asynchronous trainer, whose dictionaries have no step and whose numbers are strings."""
    return "".join(
        f"{{'loss': '{0.5 - i * 0.01:.4g}', 'grad_norm': '0.31', 'learning_rate': '1e-06', "
        f"'perf/mfu_wall_clock': '12.3', 'perf/forwarded_tok_s_wall_clock': '41234.5', 'perf/step_s': '8.21', "
        f"'epoch': '0.1'}}\n"
        for i in range(30)
    )


def lightning(*, counts_flops=True):
    rates = ",train|device|mfu,train|device|flops_per_sec,train|device|items_per_sec" if counts_flops else ""
    text = f"epoch,step,train_loss,val_loss{rates}\n"
    for step in range(9, 200, 10):
        text += f"0,{step},{2.5 - step / 200},{',0.41,4.05e14,12000.0' if counts_flops else ''}\n"
    return text + f"0,199,,1.9{',,,' if counts_flops else ''}\n"


def trainer_state(*, is_over=True):
    history = [
        {"epoch": step / 500, "grad_norm": 1.5, "learning_rate": 2e-5, "loss": 1.9 - step / 1000, "step": step}
        for step in range(10, 501, 10)
    ]
    history.insert(25, {"epoch": 0.5, "eval_loss": 0.01, "eval_runtime": 3.0, "step": 250})
    if is_over:
        history.append({"epoch": 1.0, "step": 500, "total_flos": 4.81e18, "train_loss": 1.4, "train_runtime": 21044.1})
    state = {"best_metric": None, "epoch": 1.0, "global_step": 500, "logging_steps": 10, "max_steps": 500}
    return json.dumps({**state, "total_flos": 4.81e18 if is_over else 0, "log_history": history}, indent=2)


def nanochat():
    return "".join(
        f"step {step:05d}/{21400:05d} ({step / 214:.2f}%) | loss: {11 - 3 * step / (step + 40):.6f} | lrm: 1.00 | dt: "
        f"{431.2 + step % 5:.2f}ms | tok/sec: {1215000:,} | bf16_mfu: 48.12 | epoch: 1 | total time: 1.00m\n"
        for step in range(120)
    )


@pytest.fixture
def read(headway, tmp_path):
    """Write a log, explain it, and return the first paragraph, the findings' titles, all of the text, and the JSON."""

    def run(text, name="train.log"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        shown, record = headway("explain", path), headway("explain", path, "--json")
        assert (shown.code, record.code) == (0, 0), shown.err
        first, *rest = shown.out.split("\n\n")
        titles = [part.splitlines()[0] for part in rest if re.match(r"\d\. ", part)]
        return first, titles, shown.out, json.loads(record.out)

    return run


CASES = {
    "torchtitan with stamps": (
        torchtitan(is_stamped=True),
        "Loss 12.2 at step 1, 6.25 at step 120; gradient norm 2.1 (me",
    ),
    "torchtitan without": (
        torchtitan(is_stamped=False, nan_from=100),
        "Loss 12.2 at step 1, NaN at step 120, lowest 7.3 at",
    ),
    "Megatron with NaN": (megatron(nan_from=380), "Loss 9.462 at step 10, NaN at step 400, lowest 4.714 at step 370"),
    "verl": (verl(), "Loss 0.0199 at step 1, 0.017 at step 30; gradient norm 0.2"),
    "TRL": (trl(), "Loss 0.5 at step 1, 0.21 at step 30; gradient norm 0.31"),
    "Lightning": (lightning(), "Loss 2.455 at step 9, 1.505 at step 199."),
    "Lightning without FLOPs": (lightning(counts_flops=False), "Loss 2.455 at step 9, 1.505 at step 199."),
    "trainer_state": (trainer_state(), "Loss 1.89 at step 10, 1.4 at step 500; gradient norm 1.5"),
    "a checkpoint's trainer_state": (trainer_state(is_over=False), "Loss 1.89 at step 10, 1.4 at step 500;"),
    "nanochat": (nanochat(), "Loss 11 at step 0, 8.755 at step 119."),
}
TIMED = {"torchtitan with stamps", "Megatron with NaN", "verl", "TRL", "nanochat"}


@pytest.mark.parametrize("log", CASES)
def test_the_loss_comes_first_and_no_time_is_invented(read, log):
    text, beginning = CASES[log]
    first, _, shown, record = read(text, "trainer_state.json" if "state" in log else "train.log")
    assert first.startswith(beginning)
    assert record["learning"].capitalize() == " ".join(first.split()).capitalize()
    times = [record["mean"]["duration_ns"], *(step["duration_ns"] for step in record["steps"])]
    assert all((ns is not None) == (log in TIMED) for ns in times)
    if log not in TIMED:
        assert not re.search(r"\bms\b", shown)
        assert {finding["ns"] for finding in record["findings"]} <= {0}


@pytest.mark.parametrize("log", CASES)
def test_a_report_has_the_losses_of_the_log(headway, tmp_path, log):
    path = tmp_path / ("trainer_state.json" if "state" in log else "train.log")
    path.write_text(CASES[log][0], encoding="utf-8")
    result = headway("report", path, "--md")
    assert result.code == 0, result.err
    assert "| Loss |" in result.out
    assert "show another" not in result.out
    assert headway("report", path, "-o", tmp_path / "r.html").code == 0
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Loss" in page


def test_what_keeps_a_run_from_learning_comes_before_what_makes_it_slow(read):
    _, titles, shown, _ = read(torchtitan(is_stamped=True, nan_from=100))
    assert titles[0] == "1. loss-not-finite: from step 100 on"
    assert titles[1].startswith("2. changed-speed: up to 17.")
    assert "Loss is NaN from step 100 on, to step 120, the last." in shown
    _, titles, shown, _ = read(megatron(nan_from=380))
    assert titles[0] == "1. loss-not-finite: from step 380 on"
    assert not [title for title in titles if "gradients" in title]  # they are those of the loss
    _, titles, shown, _ = read(megatron(skipped_from=360))
    assert titles == ["1. skipped-updates: 15 times, first by step 360"]
    assert "15 updates left out" in shown


@pytest.mark.parametrize("log", [log for log in CASES if "NaN" not in log and "without" not in log])
def test_a_loss_that_falls_has_no_finding(read, log):
    _, titles, _, _ = read(CASES[log][0], "trainer_state.json" if "state" in log else "train.log")
    assert not [title for title in titles if re.search("loss|gradients|updates", title)]


def test_a_step_of_verl_is_its_own_timing_with_its_phases(read):
    _, titles, shown, record = read(verl())
    assert titles == ["1. generation: up to 55.8 % of the time"]
    assert "its mean answer had 1,400 tokens" in " ".join(shown.split())
    assert "the longest of its answers (8,192 tokens)" in " ".join(shown.split())
    assert {step["duration_ns"] for step in record["steps"]} == {161_200_000_000}
    phases = {phase["name"]: phase for phase in record["mean"]["phases"]}
    assert {name: round(phase["share"], 3) for name, phase in phases.items()} == {
        "gen": 0.558, "reward": 0.007, "old_log_prob": 0.087, "ref": 0.086, "adv": 0.002, "update_actor": 0.256,
        "rest": 0.002,
    }  # fmt: skip
    assert (phases["update_actor"]["mfu"], phases["old_log_prob"]["mfu"]) == (0.412, 0.44)
    assert record["mean"]["mfu"] is None  # that of the update is not the step's
    assert "phases for which verl prints an MFU" in " ".join(shown.split())


# A line of each tool, or the lines of a step, with the loss and the norm that stand in them.
LINES = {
    "torchtitan": (
        "step:  4  loss: 16.1480  grad_norm: 4221.2612  memory: 102.83GiB(73.60%)  tps: 792",
        4,
        16.148,
        4221.2612,
    ),
    "MaxText": (
        "completed step: 5, seconds: 8.000, TFLOP/s/device: 2.1, total_weights: 32768, loss: 10.86",
        5,
        10.86,
        None,
    ),
    "Primus": (
        "iteration 7/ 50 | elapsed time per iteration (ms): 9.0 | lm loss: 1.189062E+01 | grad norm: 3.4 |",
        7,
        11.89062,
        3.4,
    ),
    "Megatron": ("iteration        7/      50 | lm loss: NAN | loss scale: 1.0 | grad norm: INF |", 7, NAN, math.inf),
    "Megatron-Bridge": (
        "iteration 7/ 50 | lm loss: 1.5E+00 | load_balancing_loss: 9.9E+00 | loss scale: 1.0 |",
        7,
        1.5,
        None,
    ),
    "nanoGPT": ("iter 100: loss 2.9123, time 95.12ms, mfu 30.11%", 100, 2.9123, None),
    "nanochat": (
        "step 00012/21400 (0.06%) | loss: 9.123456 | lrm: 1.00 | dt: 431.20ms | tok/sec: 1,215,000",
        12,
        9.123456,
        None,
    ),
    "OLMo-core": (
        "[step=10/740000,epoch=1]\n    optim/total grad norm=0.5321\n    train/CE loss=7.532",
        10,
        7.532,
        0.5321,
    ),
    "llm-foundry": ("[batch=20/3200]:\n         Train loss/train/total: 8.9210", 20, 8.921, None),
    "NeMo RL": ("========================= Step 7/100 =========================\n  • Loss: -0.0123", 7, -0.0123, None),
    "slime": ("step 3: {'train/loss': -1.5e-05, 'train/grad_norm': 0.2}", 3, -1.5e-5, 0.2),
    "miles": ("step 3: {'train/loss': 0.25, 'train/grad_norm': 0.2}", 3, 0.25, 0.2),
    "prime-rl": (
        "SUCCESS Step 7 | Time: 12.10s | Loss: 0.0021 | Grad. Norm: 0.1234 | Throughput: 4 tokens/s",
        7,
        0.0021,
        0.1234,
    ),
    "OpenRLHF": (
        "Global step 3: {'policy_loss': -0.01, 'actor_grad_norm': 0.3, 'timing/ppo_train': 60.0}",
        3,
        -0.01,
        0.3,
    ),
    "NeMo Automodel": (
        '{"step": 5, "epoch": 0, "loss": 2.31, "grad_norm": 1.2, "tps_per_gpu": 9.0, "mfu": 1}',
        5,
        2.31,
        1.2,
    ),
    "ms-swift": ("{'loss': 1.23, 'grad_norm': 0.5, 'MFU': 0.31, 'global_step/max_steps': '5/100'}", 5, 1.23, 0.5),
    "verl": ("step:3 - actor/pg_loss:np.float64(0.02) - actor/grad_norm:0.2 - critic/score/mean:0.1", 3, 0.02, 0.2),
    "LMMs-Engine": ("step:3 - train/loss:1.1 - perf/global_seq_len_avg:81920.0 - train/mfu:0.520", 3, 1.1, None),
    "TRL": ("{'loss': '0.4321', 'grad_norm': '0.31', 'perf/mfu_wall_clock': '12.3'}", 1, 0.4321, 0.31),
    "diffusers": ("Steps:  22%|##  | 2/9 [00:07<00:17,  2.50s/it, step_loss=0.4, lr=0.0001]", 2, 0.4, None),
}


@pytest.mark.parametrize("tool", LINES)
def test_the_loss_and_the_norm_of_every_tools_lines_are_read(tool):
    text, step, loss, norm = LINES[tool]
    (row,) = read_losses(text.splitlines())
    assert (row.step, row.loss, row.grad_norm) == pytest.approx((step, loss, norm), nan_ok=True)
    assert {form.tool for form in FORMATS} == LINES.keys() | {"Lightning"}  # whose losses stand in columns


@pytest.mark.parametrize(
    "line",
    [
        "validate step:  5  loss: 12.2000  memory: 116.41GiB(83.32%)  tps: 24,000",
        "step 2000: train loss 2.3, val loss 2.4",
        '{"eval_loss": 0.1, "step": 5}',
        "step:  5  loss: -1.00000  memory: 9.00GiB(9.66%)  tps: 10",  # of a rank without the pipeline's last stage
        "{'train_runtime': 100.0, 'train_loss': 1.4, 'step': 5}",
        "iteration 5/ 10 | loss scale: 1.0 | validation loss at iteration 5: 3.0",
        "loss 1.0",
    ],
)
def test_other_losses_are_none_of_a_training_step(line):
    assert read_losses([line]) == ()
