import tomllib
from importlib.resources import files

import pytest

from headway.devices import datasheet_peak, known_devices, named_peak, peak_for
from headway.errors import UnknownDeviceError, UsageError

ENTRIES = tomllib.loads((files("headway.devices") / "peaks.toml").read_text())

# SMs, dense bf16 FLOPs per SM and clock (2,048 in GA100, 4,096 in GH100: NVIDIA's architecture whitepapers) and the
# boost clock of the tensor cores.
UNITS = {
    "NVIDIA H100 80GB HBM3": (132, 4096, 1.830e9),
    "NVIDIA H100 PCIe": (114, 4096, 1.620e9),
    "NVIDIA A100-SXM4-80GB": (108, 2048, 1.410e9),
    "NVIDIA A100-PCIE-40GB": (108, 2048, 1.410e9),
}


@pytest.mark.parametrize(("name", "units"), UNITS.items())
def test_bf16_peaks_are_units_times_rate_times_clock(name, units):
    num_sms, flops_per_clock, clock_hz = units
    assert datasheet_peak(name, "bf16").flops_per_s == pytest.approx(num_sms * flops_per_clock * clock_hz, rel=2e-3)


@pytest.mark.parametrize("key", ENTRIES)
def test_every_entry_is_dense_and_has_a_source(key):
    entry = ENTRIES[key]
    tflops = entry["tflops"]
    # A sparse figure that slipped in is twice too high and breaks one of these ratios of the tensor cores.
    assert tflops["bf16"] == tflops["fp16"] == pytest.approx(2 * tflops["tf32"], rel=2e-3)
    assert tflops["int8"] == pytest.approx(2 * tflops["bf16"], rel=2e-3)
    if "fp8" in tflops:
        assert tflops["fp8"] == tflops["int8"]
    assert tflops["bf16"] / tflops["fp32"] < 17
    assert entry["source"].startswith("NVIDIA")
    assert entry["read_on"].year >= 2026
    assert 30 <= entry["memory_gb"] <= 200
    assert 1000 <= entry["memory_gb_per_s"] <= 5000


def test_no_name_stands_twice():
    names = [name for entry in ENTRIES.values() for name in entry["names"]]
    assert len(names) == len(set(names)) == len(known_devices())


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "fp8", 1978.9),
        ("NVIDIA H200 NVL", "fp16", 835.5),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
    ],
)
def test_known_devices_have_their_datasheet_peak(name, dtype, tflops):
    peak = datasheet_peak(name, dtype)
    assert peak.flops_per_s == tflops * 1e12
    assert (peak.name, peak.dtype, peak.kind) == (name, dtype, "datasheet")
    assert "Datasheet" in peak.source
    assert "read 2026-" in peak.source


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H20",
        "NVIDIA L40S",
        "NVIDIA A10G",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100",
        "",
    ],
)
def test_a_name_that_only_looks_alike_is_unknown(name):
    with pytest.raises(UnknownDeviceError) as caught:
        datasheet_peak(name, "bf16")
    assert repr(name) in str(caught.value)
    assert "HEADWAY_PEAK_FLOPS=" in str(caught.value)


def test_a_dtype_without_a_figure_is_refused():
    with pytest.raises(UnknownDeviceError, match="no dense fp8 figure; its datasheet gives bf16, fp16"):
        datasheet_peak("NVIDIA A100-SXM4-80GB", "fp8")


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


def test_a_device_that_is_neither_cuda_nor_cpu_is_refused():
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
    [("h200", "NVIDIA H200"), ("A800", "NVIDIA A800-SXM4-80GB"), ("h100-pcie", "NVIDIA H100 PCIe")],
)
def test_a_person_may_use_a_short_name(spoken, name):
    assert named_peak(spoken).name == name


def test_a_stated_rate_is_a_peak():
    assert named_peak("989.4e12").flops_per_s == 989.4e12


@pytest.mark.parametrize("text", ["0", "-1e12", "1e999", "3 TFLOPs"])
def test_a_stated_rate_must_be_a_positive_number(text):
    with pytest.raises(UsageError, match="is not a positive number"):
        named_peak(text)
