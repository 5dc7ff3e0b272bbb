import pytest

from headway.devices import datasheet_peak, lookup, named_peak, peak_for, weighted_peak
from headway.devices.lookup import peak_elsewhere
from headway.errors import UnknownDeviceError, UsageError

pytestmark = pytest.mark.own_peak

# What drivers print, and the dense rate that one device has in bf16 (fp16 where a V100 or T4 has no bf16) [TFLOP/s].
# Beside each, what some other table takes for it: the sparse figure, the shaders' rate, a neighbour that the name
# contains, the card instead of the die, the chip that the bus reports.
REAL_NAMES = {
    "NVIDIA H100 80GB HBM3": (989.4, 1979),
    "NVIDIA H100 PCIe": (756.0, 989.4),
    "NVIDIA H100 NVL": (835.5, 1978.8),
    "NVIDIA H200": (989.4, 148),
    "NVIDIA H200 NVL": (835.5, 989.4),
    "NVIDIA H20": (148.0, 989.4),
    "NVIDIA H20-3e": (148.0, 989.4),
    "NVIDIA H800": (989.4, 756),
    "NVIDIA H800 PCIe": (756.0, 989),
    "NVIDIA A100-SXM4-80GB": (312.0, 624),
    "NVIDIA A100 80GB PCIe": (312.0, 624),
    "NVIDIA A100-PCIE-40GB": (312.0, 624),
    "NVIDIA A800-SXM4-80GB": (312.0, 624),
    "NVIDIA A40": (149.7, 37.4),
    "NVIDIA A10G": (70.0, 125),
    "NVIDIA A10": (125.0, 312),
    "NVIDIA A30": (165.0, 312),
    "NVIDIA L4": (121.0, 242),
    "NVIDIA L40": (181.05, 121),
    "NVIDIA L40S": (362.05, 121),
    "NVIDIA L20": (119.5, 312),
    "NVIDIA GH200 480GB": (989.4, 1979),
    "NVIDIA GH200 144G HBM3e": (989.4, 989.4 / 8),
    "NVIDIA B100": (1750.0, 3500),
    "NVIDIA B200": (2250.0, 4500),
    "NVIDIA GB200": (2500.0, 2250),
    "NVIDIA B300 SXM6 AC": (2250.0, 312),
    "NVIDIA GB300": (2500.0, 2250),
    "NVIDIA RTX A6000": (154.8, 38.7),
    "NVIDIA RTX A4000": (76.68, 149.7),
    "NVIDIA RTX 6000 Ada Generation": (364.4, 91.1),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (503.8, 364),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": (438.9, 503.8),
    "NVIDIA GeForce RTX 3090": (71.0, 35.6),
    "NVIDIA GeForce RTX 4080": (97.5, 48.7),
    "NVIDIA GeForce RTX 4090": (165.2, 82.6),
    "NVIDIA GeForce RTX 5090": (209.5, 419),
    "AMD Instinct MI210": (181.0, 191.5),
    "AMD Instinct MI250X": (191.5, 383),
    "AMD Instinct MI300X": (1307.4, 1336),
    "AMD Instinct MI300A": (980.6, 1307.4),
    "AMD Instinct MI325X": (1307.4, 1300),
    "AMD Instinct MI350X": (2306.9, 4613),
    "AMD Instinct MI355X": (2516.6, 5033),
    "TPU v4": (275.0, 137.5),
    "TPU v5 lite": (197.0, 459),
    "TPU v5p": (459.0, 197),
    "TPU v6 lite": (918.0, 197),
    "TPU7x": (1153.5, 2307),
    "GAUDI2": (432.0, 1835),
    "GAUDI3": (1835.0, 432),
}
FP16_ONLY = {
    "Tesla T4": (65.0, 8.1),
    "Tesla V100-SXM2-16GB": (125.0, 112),
    "Tesla V100-PCIE-32GB": (112.0, 125),
    "Tesla V100S-PCIE-32GB": (130.0, 125),
}


@pytest.mark.parametrize(("name", "rates"), REAL_NAMES.items())
def test_a_reported_name_has_its_own_dense_peak_and_no_other_tables(name, rates):
    peak = datasheet_peak(name, "bf16")
    assert peak.flops_per_s == rates[0] * 1e12
    assert peak.flops_per_s != rates[1] * 1e12
    assert (peak.name, peak.dtype, peak.kind) == (name, "bf16", "datasheet")
    assert ", read 2026-" in peak.source


@pytest.mark.parametrize(("name", "rates"), FP16_ONLY.items())
def test_a_device_without_bf16_has_none(name, rates):
    assert datasheet_peak(name, "fp16").flops_per_s == rates[0] * 1e12
    with pytest.raises(UnknownDeviceError, match=r"no dense bf16 figure. Its datasheet gives fp16, fp32"):
        datasheet_peak(name, "bf16")


# SMs, dense bf16 FLOPs per SM and clock, and the boost clock of the tensor cores [Hz]. GA100 does 2,048 and GH100 4,096
# (NVIDIA's architecture whitepapers), GA102 and AD102 1,024 on workstation cards and half of it, in fp32 accumulation,
# on a GeForce; CDNA 2, 3 and 4 do 1,024, 2,048 and 4,096 (ROCm documentation), a TPU v5e's four arrays of 128 x 128
# multiply-adds 131,072.
UNITS = {
    "NVIDIA H100 80GB HBM3": (132, 4096, 1.830e9),
    "NVIDIA H100 PCIe": (114, 4096, 1.620e9),
    "NVIDIA A100-SXM4-80GB": (108, 2048, 1.410e9),
    "NVIDIA A100-PCIE-40GB": (108, 2048, 1.410e9),
    "NVIDIA A40": (84, 1024, 1.740e9),
    "NVIDIA RTX A6000": (84, 1024, 1.800e9),
    "NVIDIA GeForce RTX 3090": (82, 512, 1.695e9),
    "NVIDIA GeForce RTX 4090": (128, 512, 2.520e9),
    "NVIDIA GeForce RTX 5090": (170, 512, 2.407e9),
    "AMD Instinct MI250X": (110, 1024, 1.700e9),
    "AMD Instinct MI300X": (304, 2048, 2.100e9),
    "AMD Instinct MI355X": (256, 4096, 2.400e9),
    "TPU v5e": (1, 131072, 1.500e9),
}


@pytest.mark.parametrize(("name", "units"), UNITS.items())
def test_bf16_peaks_are_units_times_rate_times_clock(name, units):
    num_sms, flops_per_clock, clock_hz = units
    assert datasheet_peak(name, "bf16").flops_per_s == pytest.approx(num_sms * flops_per_clock * clock_hz, rel=3e-3)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H200", "fp8", 1978.9),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("NVIDIA B200", "fp4", 9000.0),
        ("NVIDIA B300", "int8", 150.0),  # Blackwell Ultra gave its int8 units up
        ("NVIDIA L40S", "fp8", 733.0),
        ("AMD Instinct MI300X", "fp8", 2614.9),
        ("TPU7x", "fp8", 2307.0),
    ],
)
def test_other_dtypes_have_their_own_peak(name, dtype, tflops):
    assert datasheet_peak(name, dtype).flops_per_s == tflops * 1e12


def test_a_dtype_without_a_figure_is_refused():
    with pytest.raises(UnknownDeviceError, match=r"no dense fp8 figure. Its datasheet gives bf16, fp16"):
        datasheet_peak("NVIDIA A100-SXM4-80GB", "fp8")
    with pytest.raises(UnknownDeviceError, match="Dtypes are called bf16, fp16"):
        datasheet_peak("NVIDIA H100 PCIe", "bfloat")


def test_the_override_is_used_and_named(monkeypatch):
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "123e9")
    peak = peak_for("cpu", "bf16")
    assert peak.flops_per_s == 123e9
    assert peak.kind == "override"
    assert peak.source == "HEADWAY_PEAK_FLOPS=123e9"


@pytest.mark.parametrize("text", ["", "fast", "0", "-1e12", "nan", "inf"])
def test_an_override_that_is_no_rate_is_refused(monkeypatch, text):
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", text)
    with pytest.raises(UsageError, match="HEADWAY_PEAK_FLOPS") as caught:
        peak_for("cpu", "fp32")
    assert repr(text) in str(caught.value)


def test_a_device_that_says_nothing_of_itself_is_refused():
    with pytest.raises(UnknownDeviceError, match="'meta'"):
        peak_for("meta", "bf16")


def test_fp32_on_cuda_means_tf32_when_torch_may_use_it():
    import torch

    from headway.devices.lookup import dtype_label

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert dtype_label(torch.float32, torch.device("cuda")) == "fp32"
        torch.set_float32_matmul_precision("high")
        assert dtype_label(torch.float32, torch.device("cuda")) == "tf32"
        assert dtype_label(torch.float32, torch.device("cpu")) == "fp32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_dtype_nobody_has_a_peak_for_is_refused():
    import torch

    with pytest.raises(UnknownDeviceError, match=r"torch\.float64"):
        peak_for("cpu", torch.float64)


@pytest.mark.gpu
def test_this_gpu_has_a_peak():
    import torch

    peak = peak_for("cuda", torch.bfloat16)
    assert peak.name == torch.cuda.get_device_name()
    assert peak.kind == "datasheet"


@pytest.mark.parametrize(
    ("spoken", "name"),
    [
        ("h200", "NVIDIA H200"),
        ("A800", "NVIDIA A800-SXM4-80GB"),
        ("h100-pcie", "NVIDIA H100 PCIe"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("MI300X", "AMD Instinct MI300X"),
        ("mi250x", "AMD Instinct MI250X (one GCD)"),
        ("B200", "NVIDIA B200"),
        ("TPU v5e", "TPU v5 lite"),
        ("Trainium2", "AWS Trainium2 (one logical NeuronCore, LNC=2)"),
    ],
)
def test_a_person_may_use_a_short_name(spoken, name):
    assert named_peak(spoken).name == name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "int8"])
def test_a_dtype_has_torchs_name_too(dtype):
    torch = pytest.importorskip("torch")
    short = lookup.dtype_label(getattr(torch, dtype), torch.device("cpu"))
    assert named_peak("H100", dtype).flops_per_s == named_peak("H100", short).flops_per_s
    if short in ("fp32", "bf16"):
        assert peak_for("cpu", dtype) == peak_for("cpu", short) == peak_for("cpu", getattr(torch, dtype))


def test_the_name_of_a_card_is_no_device_of_this_process():
    with pytest.raises(UsageError, match=r"'H100' is no device of this process.*named_peak\('H100', 'bf16'\)"):
        peak_for("H100", "bf16")


def test_a_stated_rate_is_a_peak():
    assert named_peak("989.4e12").flops_per_s == 989.4e12


@pytest.mark.parametrize("text", ["0", "-1e12", "1e999", "3 TFLOPs"])
def test_a_stated_rate_must_be_a_positive_number(text):
    with pytest.raises(UsageError, match="is not a positive number"):
        named_peak(text)


def test_the_number_of_an_unknown_card_is_not_taken_for_a_rate():
    with pytest.raises(UsageError, match="4060 FLOP/s would be slower than any computer"):
        named_peak("4060")


def test_a_mixture_takes_the_time_of_its_parts():
    # 9 PFLOP in fp8 take 2 s at 4.5 PFLOP/s, 4.5 PFLOP in bf16 take 2 s at 2.25: 13.5 in 4 s
    peak = weighted_peak({"fp8": 9e15, "bf16": 4.5e15}, "B200")
    assert peak.flops_per_s == pytest.approx(13.5e15 / 4)
    assert (peak.dtype, peak.kind) == ("fp8+bf16", "datasheet")
    assert "66.7% at 4500 TFLOP/s in fp8, 33.3% at 2250 TFLOP/s in bf16" in peak.source


def test_a_mixture_of_one_dtype_is_that_dtype():
    assert weighted_peak({"fp8": 0, "bf16": 3}, "A100") == named_peak("A100", "bf16")
    assert weighted_peak({"bf16": 2.0, "fp32": 0}, "4e13").flops_per_s == 4e13


def test_a_mixture_on_a_torch_device_is_found_as_peak_for_finds_it(monkeypatch):
    import torch

    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "1e12")
    peak = weighted_peak({"bf16": 1, "fp32": 3}, torch.device("cpu"))
    assert (peak.flops_per_s, peak.kind) == (1e12, "override")
    assert weighted_peak({"bf16": 1, "fp32": 3}, "cpu:0") == peak


@pytest.mark.parametrize("flops", [{}, {"bf16": 0}, {"bf16": -1, "fp8": 2}, {"bf16": float("nan")}])
def test_a_mixture_of_nothing_is_refused(flops):
    with pytest.raises(UsageError, match="holds no FLOPs to weight a peak with"):
        weighted_peak(flops, "B200")


def test_a_mixture_with_a_dtype_that_the_device_lacks_is_refused():
    with pytest.raises(UnknownDeviceError, match="no dense fp8 figure"):
        weighted_peak({"fp8": 1, "bf16": 1}, "A100")


def test_a_device_elsewhere_has_the_peak_that_is_stated_and_else_the_tables(monkeypatch):
    assert peak_elsewhere("NVIDIA H200", "bf16").flops_per_s == 989.4e12
    with pytest.raises(UnknownDeviceError, match="H2000"):
        peak_elsewhere("NVIDIA H2000", "bf16")
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "3e12")
    stated = peak_elsewhere("NVIDIA H2000", "bf16")
    assert (stated.name, stated.flops_per_s, stated.kind) == ("NVIDIA H2000", 3e12, "override")
