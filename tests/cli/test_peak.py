import json

import pytest

# one run in three commands: a step of Qwen3-8B in a second, and a log of MaxText that says the same
LOG = "completed step: 5, seconds: 1.000, TFLOP/s/device: 100.000, Tokens/s/device: 4096.000, loss: 1.0\n"
COMMANDS = ("mfu", "compare", "audit")


@pytest.fixture
def peak(headway, tmp_path):
    """Give a command's peak [FLOP/s], or its error: peak(command, *options)."""
    (tmp_path / "train.log").write_text(LOG, encoding="utf-8")

    def run(command, *options, code=0):
        arguments = {
            "mfu": ("qwen3-8b", "--segments", 4096, "--step-time", 1, "--chips", 1),
            "compare": ("qwen3-8b", "--segments", 4096, "--step-time", 1),
            "audit": (tmp_path / "train.log", "--model", "qwen3-8b", "--seq-len", 8192),
        }[command]
        result = headway(command, *arguments, *options, "--json")
        assert result.code == code, result.err
        if code:
            return " ".join(result.err.split())
        data = json.loads(result.out)
        return (data.get("device") or data)["peak_flops_per_s"]

    return run


@pytest.mark.parametrize("command", ["mfu", "compare"])
@pytest.mark.parametrize(
    ("options", "flops_per_s"),
    [  # NVIDIA's datasheets: H100 SXM 989.4 in bf16 and twice that in fp8; HGX B200 2,250 and 4,500
        (("H100",), 989.4e12),
        (("H100", "--dtype", "fp8"), 2 * 989.4e12),
        (("H100", "--dtype", "bf16"), 989.4e12),
        # three quarters of the work at 4,500 and one at 2,250 take 1 / 6,000 + 1 / 9,000 = 1 / 3,600 a TFLOP
        (("B200", "--dtype", "fp8:3,bf16:1"), 3600e12),
        (("1e15",), 1e15),
    ],
)
def test_the_dtype_chooses_the_peak(peak, command, options, flops_per_s):
    assert peak(command, "--device", *options) == pytest.approx(flops_per_s, rel=1e-3)


def test_a_log_is_restated_for_the_peak_of_the_dtype(headway, tmp_path):
    per_token = 6 * (36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288) + 4096 * 151936) + 6 * 36 * 4096 * 8192
    (tmp_path / "fp8.log").write_text(LOG.replace("100.000", f"{4096 * per_token / 1e12:.3f}"), encoding="utf-8")
    options = ("--model", "qwen3-8b", "--seq-len", 8192, "--device", "H100", "--json")
    means = [
        json.loads(headway("audit", tmp_path / "fp8.log", *options, *dtype).out)["useful_mfu_mean"]
        for dtype in ((), ("--dtype", "fp8"))
    ]
    assert means[0] == pytest.approx(2 * means[1], rel=1e-3)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("options", "quoted"),
    [
        (("--device", "1e15", "--dtype", "fp8"), "--device 1e15 states the rate itself"),
        (("--device", "H100", "--dtype", "fp9"), "no dense fp9 figure. Its datasheet gives bf16"),
        (("--device", "A100", "--dtype", "fp8:1,bf16:1"), "no dense fp8 figure"),
        (("--device", "H100", "--dtype", "fp8,bf16"), "'fp8' is not a dtype with its share"),
        (("--device", "H100", "--dtype", "fp8:0.5,fp8:0.5"), "is not a dtype with its share"),
        (("--device", "H100", "--dtype", "fp8:-1,bf16:2"), "'fp8:-1' is not a dtype with its share"),
        (("--device", "H100", "--dtype", ""), "is not a dtype with its share"),
    ],
)
def test_a_dtype_that_cannot_be_is_quoted(peak, command, options, quoted):
    assert quoted in peak(command, *options, code=2)


@pytest.mark.parametrize("command", ["mfu", "audit"])
def test_a_dtype_without_a_device_cannot_take_effect(peak, command):
    assert "--dtype fp8 cannot take effect without --device" in peak(command, "--dtype", "fp8", code=2)
