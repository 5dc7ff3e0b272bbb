import json
import math

import pytest

# Lines of TorchTitan's Qwen3-VL-30B-A3B experiments on 8 H200, December 2025: C4 text at 4 x 12288, VQAv2 at 1 x 8192.
PREFIX = "[rank0]:[titan] 2025-12-17 "
TEXT = f"""
{PREFIX}01:18:34,942 - root - INFO - step:  2  loss: 12.3984  grad_norm:  8.0045  memory: 116.16GiB(83.14%)  tps: 5,970  tflops: 301.33  mfu: 30.47%
{PREFIX}01:18:42,407 - root - INFO - step:  3  loss: 12.3513  grad_norm:  7.9040  memory: 116.16GiB(83.14%)  tps: 6,585  tflops: 332.35  mfu: 33.60%
{PREFIX}01:18:49,878 - root - INFO - step:  4  loss: 12.3057  grad_norm:  8.1505  memory: 116.41GiB(83.32%)  tps: 6,580  tflops: 332.11  mfu: 33.58%
{PREFIX}01:18:57,341 - root - INFO - step:  5  loss: 12.2364  grad_norm:  8.0841  memory: 116.41GiB(83.32%)  tps: 6,586  tflops: 332.44  mfu: 33.61%
"""  # noqa: E501
IMAGES = f"""
{PREFIX}18:17:00,445 - root - INFO - step:  3  loss: 11.5645  grad_norm: 20174.4258  memory: 102.83GiB(73.60%)  tps: 833  tflops: 33.98  mfu: 3.44%
{PREFIX}18:17:10,540 - root - INFO - step:  4  loss: 16.1480  grad_norm: 4221.2612  memory: 102.83GiB(73.60%)  tps: 792  tflops: 32.33  mfu: 3.27%
{PREFIX}18:18:20,413 - root - INFO - step:  9  loss:  8.3097  grad_norm: 55.0017  memory: 103.50GiB(74.08%)  tps: 443  tflops: 18.07  mfu: 1.83%
{PREFIX}18:18:24,978 - root - INFO - step: 10  loss:  6.8966  grad_norm: 53.4530  memory: 103.50GiB(74.08%)  tps: 1,764  tflops: 71.98  mfu: 7.28%
"""  # noqa: E501

# Qwen3-30B-A3B's language model, which Qwen3-VL-30B-A3B shares: matrix elements that one token meets.
LANGUAGE = 48 * (2048 * (4096 + 2 * 512) + 4096 * 2048 + 8 * 3 * 2048 * 768 + 2048 * 128) + 2048 * 151936


def useful_per_token(seq_len):
    return 6 * LANGUAGE + 12 * 48 * 4096 * (seq_len + 1) / 2


@pytest.fixture
def audit(headway, tmp_path):
    """Write a log, audit it, return the JSON record: audit(text, *options) -> dict."""

    def run(text, *options, code=0):
        log = tmp_path / "train.log"
        log.write_text(text, encoding="utf-8")
        result = headway("audit", log, *options, "--json")
        assert result.code == code, result.err
        return json.loads(result.out) if code == 0 else " ".join(result.err.split())

    return run


TITAN = ("--model", "qwen3-vl-30b-a3b")


def product(data):
    return math.prod(factor["ratio"] for factor in data["factors"])


def test_torchtitans_text_run(audit):
    data = audit(TEXT, *TITAN, "--seq-len", 12288, "--device", "H200")
    assert data["identified"]["convention"] == "torchtitan-2025-12-vlm"
    # 332.44 / 6586 and its neighbours, within the last printed digits
    low, high = data["identified"]["flops_per_token"]
    assert 50.46e9 < low < 50.474e9 < high < 50.49e9
    low, high = data["identified"]["peak_flops_per_s"]
    assert low < 989e12 < high
    assert high < 989.4e12  # 33.60 % of 332.35 excludes the datasheet's 989.4
    assert data["identified"]["peak"] == 989e12
    per_token = useful_per_token(12288)
    for row in data["rows"]:
        assert row["useful"]["flops_per_token"] == pytest.approx(per_token, rel=1e-9)
        assert row["useful"]["mfu"] == pytest.approx(row["reported"]["tokens_per_s"] * per_token / 989.4e12)
    assert data["rows"][1]["reported"] == {"mfu": 0.336, "tflops": 332.35, "tokens_per_s": 6585}
    seconds = [4 * 12288 / row["reported"]["tokens_per_s"] for row in data["rows"]]
    mean = 4 * 4 * 12288 / sum(seconds) * per_token / 989.4e12
    assert data["useful_mfu_mean"] == pytest.approx(mean, rel=1e-3)
    assert product(data) == pytest.approx(data["ratio"], rel=0.005)
    assert product(data) == pytest.approx(50.474e9 / per_token * 989.4 / 989, rel=1e-4)
    factors = {factor["name"]: factor["ratio"] for factor in data["factors"]}
    assert set(factors) == {"causal", "vision", "other weights", "peak"}
    assert factors["other weights"] == pytest.approx(1, abs=1e-4)  # the norms
    # 6 FLOPs for each of the tower's 538.6 million parameters and each text token; none of them at work
    assert factors["vision"] == pytest.approx(1 + 6 * 538_631_408 / per_token, rel=1e-3)


def test_the_row_length_is_found_when_it_is_not_given(audit):
    data = audit(TEXT, *TITAN)
    assert data["identified"]["seq_len"] == 12288
    assert data["peak_flops_per_s"] == 989e12


def test_torchtitans_image_run(audit):
    data = audit(IMAGES, *TITAN, "--seq-len", 8192, "--device", "H200")
    assert data["identified"]["convention"] == "torchtitan-2025-12-vlm"
    low, high = data["identified"]["flops_per_token"]
    assert low < 40.8103e9 < high
    assert data["useful_mfu_mean"] < data["reported_mfu_mean"] / 1.4
    assert product(data) == pytest.approx(data["ratio"], rel=0.005)


def test_samples_and_images_change_the_attribution(audit):
    whole = audit(IMAGES, *TITAN, "--seq-len", 8192, "--device", "H200")
    options = ("--seq-len", 8192, "--device", "H200", "--images", "1x26x40*8")
    packed = audit(IMAGES, *TITAN, *options, "--mean-segment", 512)
    listed = audit(IMAGES, *TITAN, *options, "--segments", "512*16")
    assert packed["rows"] == listed["rows"]
    factors = {factor["name"]: factor["ratio"] for factor in packed["factors"]}
    assert factors["document mask"] > 1.5
    assert factors["vision"] < {f["name"]: f["ratio"] for f in whole["factors"]}["vision"]
    assert product(packed) == pytest.approx(packed["ratio"], rel=0.005)
    assert packed["useful_mfu_mean"] < whole["useful_mfu_mean"]


def test_padding_is_a_factor(audit):
    data = audit(IMAGES, *TITAN, "--seq-len", 8192, "--segments", "6144", "--slots", 8192, "--device", "H200")
    factors = {factor["name"]: factor["ratio"] for factor in data["factors"]}
    assert factors["padding"] == pytest.approx(8192 / 6144)
    total = 40.8103e9 * 6144  # billed for the real tokens, with attention over 8192 instead of 6144
    billed_less = 12 * 48 * 4096 * 6144 * (8192 - 6144)
    assert factors["document mask"] == pytest.approx(total / (total - billed_less), rel=1e-3)
    assert product(data) == pytest.approx(data["ratio"], rel=0.005)


def test_frozen_weights_are_a_factor(audit):
    options = ("--seq-len", 12288, "--device", "H200")
    data = audit(TEXT, *TITAN, *options, "--freeze", "language.experts")
    factors = {factor["name"]: factor["ratio"] for factor in data["factors"]}
    # the experts' weight gradients are 2 of their 6 FLOPs per element
    experts = 48 * 8 * 3 * 2048 * 768
    per_token = useful_per_token(12288)
    assert factors["frozen"] == pytest.approx(per_token / (per_token - 2 * experts))
    assert product(data) == pytest.approx(data["ratio"], rel=0.005)


# Llama-3.1-8B, sequences of 8192: FLOPs per token by MaxText's rule since July 2025, and before.
LLAMA = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
HALF = 6 * LLAMA + 6 * 32 * 4096 * 8192
SQUARE = HALF + 6 * 32 * 4096 * 8192


def maxtext(per_token, tokens_per_s=(4000.0, 4100.0)):
    return "".join(
        f"completed step: {step}, seconds: {4 * 8192 / rate:.3f}, TFLOP/s/device: {rate * per_token / 1e12:.3f}, "
        f"Tokens/s/device: {rate:.3f}, total_weights: 32768, loss: 10.86\n"
        for step, rate in enumerate(tokens_per_s)
    )


@pytest.mark.parametrize(
    ("per_token", "name", "ratio"), [(HALF, "maxtext", 1.0), (SQUARE, "maxtext-2025-06", SQUARE / HALF)]
)
def test_maxtext(audit, per_token, name, ratio):
    data = audit(maxtext(per_token), "--model", "llama-3.1-8b", "--seq-len", 8192, "--device", "459e12")
    assert data["identified"]["convention"] == name
    assert data["identified"]["peak_flops_per_s"] is None
    assert data["reported_mfu_mean"] is None
    assert data["ratio"] == pytest.approx(ratio, rel=1e-4)  # but for the diagonal
    mean = 8192 / (4096 / 4000 + 4096 / 4100) * HALF / 459e12
    assert data["useful_mfu_mean"] == pytest.approx(mean, rel=1e-3)


def megatron(ranks, per_token, batch=128, seconds=(10.0, 10.5)):
    return "".join(
        f" [2026-01-01 10:00:0{i}] iteration {i:8d}/     100 | consumed samples: {batch * i:12d} | elapsed time per "
        f"iteration (ms): {1000 * s:.1f} | throughput per GPU (TFLOP/s/GPU): "
        f"{batch * 8192 * per_token / s / ranks / 1e12:.1f} | learning rate: 1.0E-05 | "
        f"global batch size: {batch:5d} | lm loss: 1.0E+01 |\n"
        for i, s in enumerate(seconds, 1)
    )


def test_megatron_with_and_without_the_number_of_devices(audit):
    # 128256 is a multiple of 128, so that the padded vocabulary is the vocabulary
    options = ("--model", "llama-3.1-8b", "--seq-len", 8192, "--device", "H100")
    searched = audit(megatron(16, HALF), *options)
    assert searched["identified"]["ranks"] == 16
    low, high = searched["identified"]["flops_per_token"]
    assert low < HALF < high
    given = audit(megatron(16, HALF), *options, "--ranks", 16)
    assert given["identified"]["convention"] == "megatron-lm"
    assert {"megatron-bridge", "megatron-bridge-2025"} < set(given["identified"]["same_number"])
    low, high = given["identified"]["flops_per_token"]
    assert low < HALF < high
    mean = 2 * 128 * 8192 * HALF / 20.5 / 16 / 989.4e12
    assert given["useful_mfu_mean"] == pytest.approx(mean, rel=1e-3)
    assert searched["useful_mfu_mean"] == pytest.approx(given["useful_mfu_mean"])


def test_megatron_bridges_own_line(audit):
    text = megatron(16, HALF).replace("throughput per GPU (TFLOP/s/GPU)", "ignored")
    rate = 128 * 8192 * HALF / 10 / 16 / 1e12
    text = f"Step Time : 10.00s GPU utilization: {rate:.1f}MODEL_TFLOP/s/GPU\n" + text.splitlines()[0]
    data = audit(text, "--model", "llama-3.1-8b", "--seq-len", 8192, "--device", "H100", "--ranks", 16)
    assert len(data["rows"]) == 1
    assert data["identified"]["convention"] == "megatron-bridge"


def test_packs_that_megatron_billed_as_whole_rows(audit):
    # Before May 2026: rows of 8192 billed whole, though they hold samples of 512 tokens.
    options = ("--model", "llama-3.1-8b", "--seq-len", 8192, "--device", "H100", "--ranks", 16, "--mean-segment", 512)
    data = audit(megatron(16, HALF), *options)
    assert data["identified"]["convention"] == "megatron-lm-2026-05"
    factors = {factor["name"]: factor["ratio"] for factor in data["factors"]}
    attention = 6 * 32 * 4096 * 8192
    assert factors["document mask"] == pytest.approx(HALF / (HALF - attention * 15 / 16), rel=1e-4)


# GPT-2: 12 layers of 768, 1024 positions, vocabulary 50257; nanoGPT's 6 N + 12 L H Q T with N without positions.
GPT2 = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024


def test_nanogpt(audit):
    rows = 480  # sequences of 1024 per iteration and device
    text = "iter 0: loss 10.9, time 9000.00ms, mfu -100.00%\n" + "".join(
        f"iter {10 * i}: loss 3.2, time 3000.00ms, mfu {rows * 1024 * GPT2 / 3 / 312e12:.2%}\n" for i in range(1, 4)
    )
    data = audit(text, "--model", "gpt2", "--seq-len", 1024, "--device", "H100")
    assert data["identified"]["convention"] == "palm"
    assert len(data["rows"]) == 3
    linear = 12 * (4 * 768**2 + 2 * 4 * 768**2) + 768 * 50257
    useful = 6 * linear + 12 * 12 * 768 * 1025 / 2
    mean = rows * 1024 * useful / 3 / 989.4e12  # the tool took an H100 for an A100
    assert data["useful_mfu_mean"] == pytest.approx(mean, rel=1e-3)
    assert product(data) == pytest.approx(data["ratio"], rel=0.005)


def test_nanochat_finds_the_number_of_devices(audit):
    # Rows of 1024 on 8 devices of 989 TFLOP/s, by nanochat's own formula with gpt2's sizes
    per_token = 6 * (12 * (4 * 768**2 + 2 * 4 * 768**2) + 50257 * 768) + 12 * 12 * 768 * 1024
    rate = 5_000_000
    text = "".join(
        f"step {i:05d}/21400 ({i / 214:.2f}%) | loss: 3.1 | lrm: 1.00 | dt: {524288 / rate * 1000:.2f}ms | "
        f"tok/sec: {rate:,} | mfu: {100 * rate * per_token / 8 / 989e12:.2f} | epoch: 1 | total time: 1.00m\n"
        for i in range(3)
    )
    data = audit(text, "--model", "gpt2", "--seq-len", 1024, "--ranks", 8)
    assert data["identified"]["convention"] == "nanochat"
    low, high = data["identified"]["peak_flops_per_s"]
    assert low < 989e12 < high
    searched = audit(text, "--model", "gpt2", "--seq-len", 1024, "--device", "H100")
    assert searched["identified"]["ranks"] == 8
    low, high = searched["identified"]["flops_per_token"]
    assert low < per_token < high


# Qwen2.5-7B per token in samples of 1,024: LMMs-Engine bills the embedding as a second head, and the full square
LMMS_LINEAR, LMMS_HEAD = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944), 3584 * 152064
LMMS_TOOL = 6 * (LMMS_LINEAR + 2 * LMMS_HEAD) + 12 * 28 * 3584 * 1024
LMMS_USEFUL = 6 * (LMMS_LINEAR + LMMS_HEAD) + 12 * 28 * 3584 * 1025 / 2
LMMS = ("--model", "qwen2.5-7b", "--seq-len", 81920, "--device", "A800", "--mean-segment", 1024)


@pytest.mark.parametrize(
    "line",
    [
        "step:{step} - train/loss:1.1 - perf/global_seq_len_avg:81920.0 - train/mfu:0.520\n",
        "{{'mfu': 0.52, 'epoch': 0.{step}}}\n",  # of its Hugging Face trainer, every ten steps
    ],
)
def test_lmms_engine(audit, line):
    # It prints nothing but a rounded MFU: the rule is taken by the format, and the step's samples decide the ratio.
    data = audit("".join(line.format(step=step) for step in range(3)), *LMMS)
    assert data["identified"]["flops_per_token"] is None
    assert len(data["rows"]) == 3
    assert data["useful_mfu_mean"] == pytest.approx(0.52 * LMMS_USEFUL / LMMS_TOOL)
    assert product(data) == pytest.approx(LMMS_TOOL / LMMS_USEFUL, rel=1e-4)


def test_lmms_engines_lines_of_0_1_4(audit):
    # as its Tracking.log prints what calculate_training_metrics returns; 52.3 % of an A800
    rate = round(0.523 * 312e12 / LMMS_TOOL)
    text = "".join(
        f"{{'train/loss': 1.1, 'train/lr': 2e-05, 'train/grad_norm': 0.91, 'train/mfu': {mfu}, "
        "'perf/global_seq_len_avg': 81920.0, 'perf/global_seq_len_min': 81000.0, 'perf/global_seq_len_max': 81920.0, "
        f"'train/total_tokens': '1.2M', 'train/tokens_per_second': {8 * rate}, 'train/tokens_per_gpu': {rate}, "
        f"'train/epoch': 0.01}}, step={step}\n"
        for step, mfu in enumerate([0.0, 0.52, 0.52])
    )
    data = audit(text, *LMMS)
    assert [row["step"] for row in data["rows"]] == [1, 2]
    assert sum(data["skipped"].values()) == 1
    assert data["rows"][0]["reported"] == {"mfu": 0.52, "tflops": None, "tokens_per_s": rate}
    low, high = data["identified"]["peak_flops_per_s"]
    assert low < 312e12 < high
    assert data["useful_mfu_mean"] == pytest.approx(rate * LMMS_USEFUL / 312e12)


def test_trainer_state(audit):
    # 6 N per input slot over all devices: Llama-3.1-8B without its embedding
    parameters = LLAMA + 32 * 2 * 4096 + 4096
    state = {
        "global_step": 100,
        "total_flos": 6.0 * parameters * 1_000_000,
        "num_input_tokens_seen": 1_000_000,
        "log_history": [{"loss": 1.0, "step": 50}, {"train_runtime": 100.0, "total_flos": 6.0 * parameters * 1e6}],
    }
    options = ("--model", "llama-3.1-8b", "--seq-len", 2048, "--device", "H100", "--ranks", 4)
    data = audit(json.dumps(state), *options)
    assert data["identified"]["convention"] == "6nd"
    useful = 6 * LLAMA + 12 * 32 * 4096 * 2049 / 2
    assert data["useful_mfu_mean"] == pytest.approx(1e6 * useful / 100 / 4 / 989.4e12)
    assert {factor["name"] for factor in data["factors"]} >= {"causal"}


VALIDATION = f"""
{PREFIX}01:19:04,942 - root - INFO - validate step:  5  loss: 12.2000  memory: 116.41GiB(83.32%)  tps: 24,000
{PREFIX}01:19:05,000 - root - INFO - epoch 1, step: 12 of 13 shards read, tps: 5
"""


def test_torchtitans_validation_and_prose_are_no_steps(audit):
    options = (*TITAN, "--seq-len", 12288, "--device", "H200")
    plain, data = audit(TEXT, *options), audit(TEXT + VALIDATION, *options)
    assert data["rows"] == plain["rows"]
    assert data["useful_mfu_mean"] == plain["useful_mfu_mean"]
    assert data["skipped"] == {
        "validation, which trains nothing": 1, "text with tps in it that is no step's line": 1
    }  # fmt: skip
    assert "1 line is left out: validation, which trains nothing" in data["notes"]


@pytest.mark.parametrize("prefixed", [True, False])
def test_a_step_that_several_processes_print_is_one_step(audit, prefixed):
    options = (*TITAN, "--seq-len", 12288, "--device", "H200")
    lines = [line for line in TEXT.splitlines() if line]
    both = [line.replace("[rank0]", f"[rank{r}]" if prefixed else "") for line in lines for r in (1, 0)]
    data = audit("\n".join(both), *options)
    assert len(data["rows"]) == len(lines)
    assert data["skipped"] == {"a step's line of another process, while one stands for the step": 4}
    assert data["useful_mfu_mean"] == pytest.approx(audit(TEXT, *options)["useful_mfu_mean"], rel=1e-3)


def test_maxtexts_lines_of_before_july_2025(audit):
    line = "completed step: {}, seconds: 8.000, TFLOP/s: {:.3f}, loss: 2.191\n"
    text = "".join(line.format(step, 4 * 8192 * SQUARE / 8 / 1e12) for step in range(3))
    data = audit(text, "--model", "llama-3.1-8b", "--seq-len", 8192, "--device", "459e12")
    assert [c["convention"] for c in data["identified"]["candidates"]] == ["maxtext-2025-06"]
    assert data["useful_mfu_mean"] == pytest.approx(4 * 8192 * HALF / 8 / 459e12, rel=1e-3)


PRIMUS_RATES = ["throughput per GPU (TFLOP/s/GPU): {:.1f}/999.0", "compute per GPU (TFLOP/s/GPU): {:.1f} (avg 999.0)"]
TITAN_LLAMA = 6 * (LLAMA + 32 * 2 * 4096 + 4096) + 12 * 32 * 4096 * 8192  # torchtitan's rule at 8192, norms included


@pytest.mark.parametrize("rate", PRIMUS_RATES)
@pytest.mark.parametrize("mfu", ["", f" mfu: {9800.4 * TITAN_LLAMA / 2.5e15:.2%} |"])
def test_primus_prints_tokens_and_means_beside_the_steps_numbers(audit, rate, mfu):
    text = "".join(
        f"iteration {i:8d}/      50 | consumed samples: {128 * i:12d} | elapsed time per iteration (ms): 10698.6/9.0 | "
        f"{rate.format(9800.4 * TITAN_LLAMA / 1e12)} | tokens per GPU (tokens/s/GPU): 9800.4/9807.3 | "
        f"global batch size:   128 | lm loss: 1.189062E+01 |{mfu}\n"
        for i in range(1, 4)
    )
    data = audit(text, "--model", "llama-3.1-8b", "--device", "2.5e15", "--seq-len", 8192)
    assert data["useful_mfu_mean"] == pytest.approx(9800.4 * HALF / 2.5e15, rel=1e-3)
    if mfu:  # the torchtitan backend alone prints one
        assert (data["identified"]["convention"], data["identified"]["peak"]) == ("torchtitan", 2.5e15)
    else:
        assert data["identified"]["convention"] == "torchtitan"


def test_olmo_cores_blocks(audit):
    # Qwen3-8B in rows of 4096 by OLMo-core's formula, on an H100 of 989.5 TFLOP/s
    layer = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288
    per_token = 6 * (36 * (layer + 2 * 128) + 4096 + 4096 * 151936) + 12 * 36 * 4096 * 4096
    block = (
        "2026-06-22 10:00:0{0}.123\thost:0\tolmo_core.train.callbacks.console_logger:97\tINFO\t[step={0}/100,epoch=1,"
        "eta=0:10:00]\n    train/CE loss=2.345\n"
    )
    rates = "    throughput/device/TPS={:,d}\n    throughput/device/TPS (actual avg)=1\n"
    rates += "    throughput/device/flopsPS={:.1f}T\n    throughput/device/MFU={:.2f}\n"
    speed = (9000, 9000 * per_token / 1e12, 9000 * per_token / 989.5e12 * 100)
    text = block.format(1) + "".join(block.format(step) + rates.format(*speed) for step in (2, 3))
    data = audit(text, "--model", "qwen3-8b", "--seq-len", 4096, "--device", "H100")
    assert data["identified"]["convention"] == "olmo-core"
    assert data["identified"]["peak"] == 989.5e12
    assert [row["step"] for row in data["rows"]] == [2, 3]
    assert data["skipped"] == {"a step without a rate, such as the first one": 1}
    useful = 6 * (36 * layer + 4096 * 151936) + 12 * 36 * 4096 * 4097 / 2
    assert data["useful_mfu_mean"] == pytest.approx(9000 * useful / 989.4e12)


def test_llm_foundrys_blocks(audit):
    # gpt2's sizes: its own models have learned positions, which its N holds
    rate, flops = 12000.0, 12000.0 * (6 * 124_439_808 + 12 * 12 * 768 * 1024)
    text = "[batch=1/100]:\n\t Train time/batch: 0\n" + "".join(
        f"[batch={i}/100]:\n\t Train throughput/device/tokens_per_sec: {rate:.4f}\n"
        f"\t Train throughput/device/flops_per_sec: {flops:.4f}\n\t Train throughput/device/mfu: {flops / 312e12:.4f}\n"
        for i in (2, 3)
    )
    data = audit(text, "--model", "gpt2", "--seq-len", 1024, "--device", "A100")
    assert data["identified"]["convention"] == "llm-foundry"
    assert [row["step"] for row in data["rows"]] == [2, 3]


def test_verls_lines(audit):
    text = "".join(
        f"(TaskRunner pid=2860) step:{i} - global_seqlen/mean:37335.0 - timing_s/step:46.59 - perf/mfu/actor:{mfu}\n"
        for i, mfu in ((31, "np.float64(0.31)"), (32, "0.31"), (33, "0"))
    )
    data = audit(text, "--model", "qwen2.5-7b", "--seq-len", 4096, "--device", "H100", "--mean-segment", 1024)
    assert [row["step"] for row in data["rows"]] == [31, 32]
    assert data["skipped"] == {"an MFU of 0, which verl prints for what it does not know": 1}
    linear = 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    head, square = 3584 * 152064, 28 * 3584
    tool, useful = 6 * (linear + 2 * head) + 6 * square * 1024, 6 * (linear + head) + 12 * square * 1025 / 2
    # a log of shares alone fixes no peak: H100 divides it, and what verl bills more
    assert data["useful_mfu_mean"] == pytest.approx(0.31 * useful / tool, rel=1e-3)


def own_record(step, peak=989.4e12, **names):
    rates = {"flops_per_s_per_device": 4e14, "tokens_per_s_per_device": 8000.0, "wall_s": 1.0, "mfu": 4e14 / 989.4e12}
    said = {"convention": "useful/1", "peak_flops_per_s": peak, "peak_source": "datasheet", "world_size": 8}
    return json.dumps({"kind": "step", "step": step, **rates, **said, **names})


OWN = [own_record(1), own_record(2, flops_per_s_per_device=2e14, mfu=2e14 / 989.4e12, wall_s=3.0)]


def test_headways_own_records_are_useful_already_and_need_no_model(audit):
    text = "\n".join([OWN[0], '{"kind": "evaluation", "step": 1}', OWN[1], '{"kind": "st'])
    data = audit(text)
    assert (data["tool"], data["model"]) == ("Headway", None)
    assert (data["identified"]["convention"], data["identified"]["ranks"]) == ("useful/1", 8)
    assert (data["peak_flops_per_s"], data["peak_source"]) == (989.4e12, "datasheet")
    assert [row["useful"]["mfu"] for row in data["rows"]] == pytest.approx([4e14 / 989.4e12, 2e14 / 989.4e12])
    assert data["useful_mfu_mean"] == pytest.approx(2.5e14 / 989.4e12)
    assert data["reported_mfu_mean"] == pytest.approx(2.5e14 / 989.4e12)
    assert data["rows"][0]["useful"]["flops_per_token"] == pytest.approx(5e10)
    assert data["skipped"] == {"evaluation, which is no step": 1, "a line that a kill left unfinished": 1}
    other = audit(text, "--device", "A100")
    assert other["useful_mfu_mean"] == pytest.approx(2.5e14 / 312e12)
    assert product(other) == pytest.approx(312 / 989.4)


def test_a_run_folder_stands_for_its_records(headway, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("\n".join(OWN))
    result = headway("audit", tmp_path)
    assert result.code == 0, result.err
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[2] == "1 8,000 400.00 40.4 % 40.4 %"
    assert "recorded useful/1 on 8 devices" in lines
    assert "peak printed 989.40 TFLOP/s" in lines
    assert headway("audit", tmp_path / "none").code == 2


def test_records_of_a_run_without_a_peak_wait_for_a_device(audit):
    text = own_record(1, peak=None, mfu=None)
    assert audit(text)["useful_mfu_mean"] is None
    assert audit(text, "--device", "A100")["useful_mfu_mean"] == pytest.approx(4e14 / 312e12)


def test_records_that_no_run_wrote_or_of_several_devices_are_told(audit):
    data = audit("\n".join([own_record("x"), own_record(1), own_record(2, peak=312e12)]))
    assert data["skipped"] == {"a step whose numbers cannot be read": 1}
    assert [note for note in data["notes"] if "several peaks" in note]


@pytest.mark.parametrize("options", [("--model", "qwen3-8b"), ("--seq-len", 8), ("--freeze", "vision"), ("--ranks", 2)])
def test_what_describes_the_step_cannot_take_effect_on_own_records(audit, options):
    assert f"{options[0]} cannot take effect" in audit(OWN[0], *options, code=2)


def resumed(history):
    flops = 6.0 * (LLAMA + 32 * 2 * 4096 + 4096) * 1e6
    end = {"step": 100, "train_runtime": 50.0, "total_flos": flops}
    return json.dumps({"global_step": 100, "total_flos": flops, "log_history": [*history, end]})


def test_a_resumed_trainer_state(audit):
    options = ("--model", "llama-3.1-8b", "--seq-len", 2048, "--device", "H100", "--ranks", 1)
    whole = audit(resumed([]), *options)
    assert any("--resumed-at STEP" in note for note in whole["notes"])
    half = audit(resumed([]), *options, "--resumed-at", 40)
    assert half["useful_mfu_mean"] == pytest.approx(0.6 * whole["useful_mfu_mean"])
    assert audit(resumed([]), *options, "--resumed-at", 0)["notes"] == []
    # entries that carry the clock show the restart: it goes back after step 40
    clocked = [{"step": step, "train_runtime": clock} for step, clock in ((20, 30.0), (40, 60.0), (60, 15.0))]
    seen = audit(resumed(clocked), *options)
    assert seen["useful_mfu_mean"] == pytest.approx(half["useful_mfu_mean"])
    assert "taken as resumed at step 40" in seen["notes"][0]


def test_rates_of_a_whole_job_say_that_ranks_are_missing(audit):
    data = audit(resumed([]), "--model", "llama-3.1-8b", "--seq-len", 2048, "--device", "H100")
    assert data["rows"][0]["useful"]["mfu"] is None
    assert any("Give --ranks N to see the rates" in note for note in data["notes"])


def test_several_rules_that_rounding_does_not_tell_apart(audit):
    # One row with two digits: 10 % of slack hold the rule with the vision tower and the one without.
    text = "step:  1  loss: 1.0  grad_norm: 1.0  memory: 1GiB(1%)  tps: 10  tflops: 0.5  mfu: 0.05%\n"
    both = audit(text, "--model", "qwen3-vl-30b-a3b", "--seq-len", 12288, "--device", "H100")
    assert both["identified"]["convention"] is None
    assert {c["convention"] for c in both["identified"]["candidates"]} == {"torchtitan", "torchtitan-2025-12-vlm"}
    low, high = both["identified"]["flops_per_token"]
    assert low < 47.24e9
    assert high > 50.47e9


def test_rows_that_disagree_are_not_identified(audit):
    text = maxtext(HALF, (4000.0,)) + maxtext(SQUARE, (4000.0,)).replace("step: 0", "step: 1")
    data = audit(text, "--model", "llama-3.1-8b", "--seq-len", 8192, "--device", "459e12")
    assert data["identified"]["convention"] is None
    assert any("no single number of FLOPs per token" in warning for warning in data["warnings"])


def test_samples_bound_the_row_lengths_that_are_searched(audit):
    # In rows shorter than its samples no run can be; 12288 is found with samples of up to that length.
    data = audit(TEXT, *TITAN, "--mean-segment", 1000)
    assert data["identified"]["seq_len"] == 12288


def test_an_mfu_above_1_is_reported_and_not_clipped(audit, headway, tmp_path):
    text = maxtext(HALF, tokens_per_s=(40000.0, 41000.0))
    (tmp_path / "fast.log").write_text(text, encoding="utf-8")
    result = headway("audit", tmp_path / "fast.log", "--model", "llama-3.1-8b", "--seq-len", 8192, "--device", "H100")
    assert result.code == 0
    assert "which no device can reach" in result.err
    assert "Likely causes" in result.err
    assert audit(text, "--model", "llama-3.1-8b", "--seq-len", 8192, "--device", "H100")["useful_mfu_mean"] > 1


def test_a_device_that_the_log_did_not_divide_by(audit):
    data = audit(TEXT, *TITAN, "--seq-len", 12288, "--device", "A100")
    assert any("but NVIDIA A100-SXM4-80GB has 312.0" in " ".join(w.split()) for w in data["warnings"])


BAD = [
    ("loss 1.0\nloss 0.9\n", ["--model", "qwen3-8b"], 1, "has no line that Headway recognises"),
    (TEXT, ["--model", "qwen3-8b", "--seq-len", "4096"], 1, "no convention explains this torchtitan log"),
    (TEXT, [], 2, "--model is missing"),
    (TEXT, [*TITAN, "--segments", "8", "--mean-segment", "8"], 2, "contradict each other"),
    (TEXT, [*TITAN, "--seq-len", "64", "--mean-segment", "65"], 2, "--seq-len 64 contradicts samples of 65"),
    (TEXT, [*TITAN, "--seq-len", "12288", "--skip", "4"], 1, "no row is left"),
    ('{"log_history": [], "global_step": 1}', ["--model", "qwen3-8b"], 1, "without train_runtime"),
    ('{"log_history": [', ["--model", "qwen3-8b"], 1, "starts like JSON but is not"),
    ('{"log_history": ' + "[" * 5000, ["--model", "qwen3-8b"], 1, "starts like JSON but is not"),
    ('{"log_history": [{"train_runtime": "x", "total_flos": 1}]}', ["--model", "gpt2"], 1, "that no Trainer writes"),
    (f"completed step: {'9' * 5000}, seconds: 1.0, TFLOP/s/device: 1.0", ["--model", "gpt2"], 1, "no line that"),
    (
        "iter 10: loss 3.2, time 3000.00ms, mfu 30.00%\n", ["--model", "gpt2"], 2, "--seq-len is missing",
    ),
    (TEXT, [*TITAN, "--resumed-at", "3"], 2, "--resumed-at 3 is for a trainer_state.json"),
    (resumed([]), ["--model", "qwen3-8b", "--resumed-at", "100"], 2, "--resumed-at 100: the run has 100 steps"),
    (megatron(16, 1.07 * HALF), ["--model", "llama-3.1-8b", "--seq-len", "8192"], 1, "no convention explains"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "options", "code", "quoted"), BAD, ids=range(len(BAD)))
def test_a_mistake_is_quoted(audit, text, options, code, quoted):
    assert quoted in audit(text, *options, code=code)


def test_a_missing_file(headway, tmp_path):
    result = headway("audit", tmp_path / "none.log", "--model", "qwen3-8b")
    assert result.code == 2
    assert "cannot be read" in result.err


def test_the_table(headway, tmp_path):
    (tmp_path / "train.log").write_text(TEXT, encoding="utf-8")
    result = headway("audit", tmp_path / "train.log", *TITAN, "--device", "H200")
    assert (result.code, result.err) == (0, "")
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert lines[0] == "step tokens/s TFLOP/s MFU printed MFU useful"
    assert lines[2] == "2 5,970 301.33 30.5 % 19.8 %"
    assert any(line.startswith("identified torchtitan-2025-12-vlm/2025-12, 50.4740 GFLOP") for line in lines)
    assert any(line.startswith("product 1.54") for line in lines)
