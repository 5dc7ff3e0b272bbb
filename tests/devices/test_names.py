import sys
from types import SimpleNamespace

import pytest
import torch

from headway.devices import datasheet_peak, device_at, known_devices, named_device, peak_for
from headway.devices.names import ReportedDevice, matches, report
from headway.errors import UnknownDeviceError

pytestmark = pytest.mark.own_peak

GIB = 2**30


# Memory as these drivers report it: a device query of a GH200 (97,280 MiB VRAM; 153,008,209,920 bytes for the large
# one), nvidia-smi of the H20 models (97,871 and 143,771 MiB), 9.78 and 11.76 GiB of the two RTX 3080.
@pytest.mark.parametrize(
    ("name", "num_sms", "memory_bytes", "key"),
    [
        ("NVIDIA GH200 480GB", 132, 97_280 * 2**20, "gh200-96gb"),
        ("NVIDIA GH200 480GB", 132, 153_008_209_920, "gh200-144gb"),
        ("NVIDIA H20", 78, 97_871 * 2**20, "h20-96gb"),
        ("NVIDIA H20", 78, 143_771 * 2**20, "h20-141gb"),
        ("NVIDIA GeForce RTX 3080", 68, int(9.78 * GIB), "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 3080", 70, int(11.76 * GIB), "rtx-3080-12gb"),
        ("AMD Instinct MI250X / MI250", 110, 64 * GIB, "mi250x"),
        ("AMD Instinct MI250X / MI250", 104, 64 * GIB, "mi250"),
        ("Intel(R) Data Center GPU Max 1550", 448, None, "max-1550-448eu"),
        ("Apple M1 Max", 32, None, "apple-m1-max-32"),
    ],
)
def test_properties_tell_cards_of_one_name_apart(name, num_sms, memory_bytes, key):
    assert [device.key for device in matches(ReportedDevice(name, num_sms, memory_bytes))] == [key]


# Total memory as PyTorch reports it on whole cards: 14.56 GiB of a T4 with ECC, 22.07 of an A10G, 39.39 of an A100 with
# 40 GB, 79.1 of an H100, 139.8 of an H200, 178.4 of a B200, 191.98 of an MI300X, 287.98 of an MI350X.
@pytest.mark.parametrize(
    ("name", "num_sms", "memory_gib"),
    [
        ("Tesla T4", 40, 14.56),
        ("Tesla V100-SXM2-16GB", 80, 15.77),
        ("NVIDIA A10G", 80, 22.07),
        ("NVIDIA L4", 58, 22.03),
        ("NVIDIA L40S", 142, 44.4),
        ("NVIDIA RTX A6000", 84, 47.4),
        ("NVIDIA A100-SXM4-40GB", 108, 39.39),
        ("NVIDIA H100 80GB HBM3", 132, 79.1),
        ("NVIDIA H200", 132, 139.8),
        ("NVIDIA B200", 148, 178.4),
        ("NVIDIA GeForce RTX 4090", 128, 23.5),
        ("AMD Instinct MI300X", 304, 191.98),
        ("AMD Instinct MI350X", 256, 287.98),
    ],
)
def test_a_whole_card_fits_its_entry_whatever_the_driver_keeps_back(name, num_sms, memory_gib):
    assert len(matches(ReportedDevice(name, num_sms, int(memory_gib * GIB)))) == 1


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb",
    ],
)
def test_a_slice_of_a_card_is_not_the_card(name):
    with pytest.raises(UnknownDeviceError, match="is a slice of a card") as caught:
        datasheet_peak(name, "bf16")
    assert "HEADWAY_PEAK_FLOPS=<dense FLOP/s of the slice>" in str(caught.value)


@pytest.mark.parametrize(
    ("reported", "told"),
    [
        (ReportedDevice("NVIDIA A100-SXM4-80GB", 14, 10 * GIB), "reports 14 multiprocessors and 10.74 GB"),
        (
            ReportedDevice("NVIDIA L40S", 142, 12 * GIB),
            "the known device of that name is l40s with 142 multiprocessors and 48 GB",
        ),
        (ReportedDevice("AMD Instinct MI300X", 38, 24 * GIB), "A partition, a virtual GPU or another card"),
        (ReportedDevice("NVIDIA H20", 78, 120 * GIB), "h20-96gb with 78 multiprocessors and 96 GB or h20-141gb with"),
    ],
)
def test_a_part_of_a_card_under_the_cards_name_is_refused(reported, told):
    with pytest.raises(UnknownDeviceError) as caught:
        matches(reported)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100",
        "NVIDIA L40S-48Q",
        "NVIDIA A4000",
        "NVIDIA RTX A3000 Laptop GPU",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "GH100 [H20]",
        "nvidia l40s",  # what a driver reports is compared letter by letter
        "TPU v4 lite",
        "",
    ],
)
def test_a_name_that_only_looks_alike_is_unknown(name):
    with pytest.raises(UnknownDeviceError) as caught:
        datasheet_peak(name, "bf16")
    text = str(caught.value)
    assert repr(name) in text
    assert "HEADWAY_PEAK_FLOPS=" in text
    assert "peaks.toml" in text
    assert "`headway devices`" in text
    assert len(text) < 700


def test_alike_names_are_offered():
    with pytest.raises(
        UnknownDeviceError, match=r"This is a common name of NVIDIA A100-SXM4-80GB, .*a driver reports\."
    ):
        datasheet_peak("A100", "bf16")
    with pytest.raises(UnknownDeviceError, match=r"Did you mean .*NVIDIA L40S.* similar names may have other peaks"):
        datasheet_peak("NVIDIA L40S-48Q", "bf16")


@pytest.mark.parametrize("name", ["NVIDIA P100", "MTT S5000", "NVIDIA H1000", "AMD Radeon Graphics"])
def test_another_cards_name_is_not_offered(name):
    with pytest.raises(UnknownDeviceError) as caught:
        datasheet_peak(name, "bf16")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "offered"), [("NVDIA L40S", "L40S"), ("h 100", "H100"), ("RTX4090", "RTX 4090"), ("A100-SXM", "A100 SXM")]
)
def test_a_misspelt_name_is_offered(name, offered):
    with pytest.raises(UnknownDeviceError, match=rf"Did you mean [^?]*{offered}"):
        named_device(name)


def test_a_whole_mi300x_of_a_virtual_machine_is_told_from_a_part():
    (whole,) = matches(ReportedDevice("AMD Instinct MI300X VF", num_sms=304, memory_bytes=206_141_652_992))
    assert whole.key == "mi300x"
    with pytest.raises(UnknownDeviceError, match=r"38 multiprocessors.* A partition"):
        matches(ReportedDevice("AMD Instinct MI300X VF", num_sms=38, memory_bytes=25_753_026_560))


def test_a_shared_name_has_a_peak_only_where_its_cards_agree():
    assert datasheet_peak("NVIDIA GH200 480GB", "fp8").flops_per_s == 1978.9e12
    with pytest.raises(UnknownDeviceError, match=r"2 different devices.*mi250x \(110 multi.*mi250 \(104 multi"):
        datasheet_peak("AMD Instinct MI250X / MI250", "bf16")
    with pytest.raises(UnknownDeviceError, match=r"rtx-3080-10gb .* or rtx-3080-12gb"):
        named_device("3080")
    assert named_device("RTX-3080-12GB").num_sms == 70


def test_known_names_are_listed_once():
    names = known_devices()
    assert len(names) == len(set(names)) > 80
    assert "NVIDIA H20" in names


@pytest.fixture
def cuda(monkeypatch):
    """Let PyTorch report a CUDA device with given properties, where there is none."""

    def pretend(name, num_sms, memory_bytes):
        found = SimpleNamespace(multi_processor_count=num_sms, total_memory=memory_bytes)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: found)

    return pretend


def test_the_driver_is_asked_for_what_tells_cards_apart(cuda):
    cuda("AMD Instinct MI250X / MI250", 104, 64 * GIB)
    assert peak_for("cuda", torch.bfloat16).flops_per_s == 181.05e12
    assert device_at("cuda").memory_bytes_per_s == 1.6e12
    cuda("NVIDIA A100-SXM4-80GB", 98, 80 * GIB)
    with pytest.raises(UnknownDeviceError, match="reports 98 multiprocessors"):
        peak_for("cuda:0", torch.bfloat16)


def test_a_name_that_the_report_leaves_open_has_no_single_device(cuda):
    cuda("NVIDIA GH200 480GB", 132, 0)
    assert peak_for("cuda", torch.bfloat16).flops_per_s == 989.4e12  # the same in both
    with pytest.raises(UnknownDeviceError, match="2 different devices"):
        device_at("cuda")


def test_fp32_is_fp32_on_a_device_without_tf32(cuda):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        cuda("Tesla V100-SXM2-32GB", 80, 32 * GIB)
        assert peak_for("cuda", torch.float32).dtype == "fp32"
        cuda("NVIDIA A40", 84, 48 * GIB)
        assert peak_for("cuda", torch.float32).dtype == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_other_devices_are_asked_in_their_own_way(monkeypatch):
    gaudi = SimpleNamespace(get_device_name=lambda *_: "GAUDI3")
    monkeypatch.setitem(sys.modules, "torch.hpu", gaudi)
    monkeypatch.setattr(torch, "hpu", gaudi, raising=False)
    assert peak_for("hpu", torch.bfloat16).flops_per_s == 1835e12
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M1 Max")
    monkeypatch.setattr(torch.backends.mps, "get_core_count", lambda: 24)
    assert device_at("mps").key == "apple-m1-max-24"
    assert report(torch.device("mps")) == ReportedDevice("Apple M1 Max", 24)
    assert peak_for("mps", torch.float32).flops_per_s == pytest.approx(24 * 128 * 2 * 1.296e9, rel=1e-3)
    found = SimpleNamespace(name="Intel(R) Data Center GPU Max 1550", max_compute_units=512, total_memory=64 * GIB)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda *_: found)
    assert peak_for("xpu", "bf16").flops_per_s == 419.4e12
