import datetime
import itertools

import pytest

from headway.devices import datasheet_peak, named_device, named_peak, peak_for
from headway.devices.names import cpu_name
from headway.devices.table import all_devices, shipped_devices, user_file
from headway.errors import ConfigError

pytestmark = pytest.mark.own_peak

SHIPPED = {device.key: device for device in shipped_devices()}
GOOD = """
[lab-card]
names = ["Lab Card 1"]
aliases = ["lab"]
tflops = { bf16 = 12.5, fp32 = 3 }
source = "the lab's own datasheet"
read_on = 2026-11-21
"""


@pytest.mark.parametrize("key", SHIPPED)
def test_every_entry_says_where_it_stands(key):
    device = SHIPPED[key]
    assert len(device.source) > 20
    assert device.read_on >= datetime.date(2026, 1, 1)
    assert device.is_shipped
    assert all(len(text) > 10 for text in device.disagreements)


# Tensor cores do the same or twice the work from one dtype to the next narrower one. Known exceptions: a GeForce halves
# fp8 in fp32 accumulation but not fp4; Blackwell Ultra has half as many fp4 units again, and hardly any for int8; and
# Trainium3 has MXFP8 units of their own (2,517 and 671 TFLOP/s a chip).
STEPS = {("rtx-50", "fp4"): 4, ("b300", "fp4"): 2.92, ("gb300", "fp4"): 3, ("trainium3", "fp8"): 3.75}
FEW_INT8 = ("b300", "gb300")


@pytest.mark.parametrize("key", SHIPPED)
def test_every_entry_is_dense(key):
    """A sparse figure or a shader rate that slipped in is off by 2 or 4 and breaks one of these laws."""
    device = SHIPPED[key]
    rate = device.peak_flops_per_s
    if key.startswith("apple"):
        assert set(rate) == {"fp32"}
        return
    if key == "gb10":  # of which NVIDIA gives no more
        assert rate["fp4"] == pytest.approx(16 * rate["fp32"], rel=0.03)
        return
    bits16 = rate.get("bf16", rate.get("fp16"))
    assert bits16 == rate.get("fp16", bits16)
    chain = [dtype for dtype in ("tf32", "bf16", "fp8", "fp4") if dtype in rate]
    for wider, dtype in itertools.pairwise(chain):
        exception = [step for (start, what), step in STEPS.items() if key.startswith(start) and what == dtype]
        step = rate[dtype] / rate[wider]
        assert any(step == pytest.approx(allowed, rel=0.03) for allowed in exception or (1, 2))
    if "fp32" in rate:
        assert 1.9 < bits16 / rate["fp32"] < 32
    if "int8" in rate:
        step = rate["int8"] / bits16
        assert (step < 0.1) if key in FEW_INT8 else any(step == pytest.approx(x, rel=0.03) for x in (1, 2, 4))
    for dtype, faster in device.fp16_accumulate_flops_per_s.items():
        assert faster == pytest.approx(2 * rate[dtype], rel=1e-3)


@pytest.mark.parametrize("key", SHIPPED)
def test_memory_and_power_have_the_right_unit(key):
    device = SHIPPED[key]
    assert device.memory_bytes is None or 8e9 <= device.memory_bytes <= 300e9
    assert device.memory_bytes_per_s is None or 60e9 <= device.memory_bytes_per_s <= 8e12
    assert device.board_power_w is None or 50 <= device.board_power_w <= 1500
    if device.memory_bytes and device.memory_bytes_per_s:
        slowest_s = 0.5 if key == "gb10" else 0.12  # which shares its host's LPDDR5X
        assert 1e-3 < device.memory_bytes / device.memory_bytes_per_s < slowest_s  # to read all of it


def test_devices_of_one_name_are_told_apart():
    for first, second in itertools.combinations(SHIPPED.values(), 2):
        if set(first.names) & set(second.names):
            sizes = [device.memory_bytes or 0 for device in (first, second)]
            assert first.num_sms != second.num_sms or max(sizes) > 1.3 * min(sizes)


def test_no_alias_means_two_devices():
    for first, second in itertools.combinations(SHIPPED.values(), 2):
        shared = {text.lower() for text in first.spoken_names()} & {text.lower() for text in second.spoken_names()}
        # shared are only the names that drivers report for both, and the plain "RTX 3080" of two cards
        assert shared <= {name.lower() for name in first.names} | {"rtx 3080", "3080"}


def test_neighbours_whose_names_contain_each_other_are_distinct():
    for names in (["L4", "L40", "L40S"], ["A10", "A10G", "A100"], ["A40", "A4000"], ["H20", "H200"], ["B200", "GB200"]):
        assert len({named_device(name).key for name in names}) == len(names)


@pytest.fixture
def peaks_file(tmp_path, monkeypatch):
    """Write a file of devices and point HEADWAY_PEAKS at it."""

    def write(text):
        path = tmp_path / "lab.toml"
        path.write_text(text, encoding="utf-8")
        monkeypatch.setenv("HEADWAY_PEAKS", str(path))
        return path

    return write


def test_a_users_file_adds_devices(peaks_file):
    path = peaks_file(GOOD)
    peak = datasheet_peak("Lab Card 1", "bf16")
    assert peak.flops_per_s == 12.5e12
    assert peak.kind == "override"
    assert peak.source == f"the lab's own datasheet, read 2026-11-21, from {path}"
    assert named_peak("LAB", "fp32").flops_per_s == 3e12
    assert len(all_devices()) == len(SHIPPED) + 1


def test_a_user_may_state_the_peak_of_a_cpu(peaks_file):
    peaks_file(GOOD.replace("Lab Card 1", cpu_name()))
    peak = peak_for("cpu", "bf16")
    assert (peak.flops_per_s, peak.kind) == (12.5e12, "override")


def test_a_users_entry_replaces_the_shipped_one(peaks_file):
    peaks_file(GOOD.replace("Lab Card 1", "NVIDIA GH200 480GB"))
    assert datasheet_peak("NVIDIA GH200 480GB", "bf16").flops_per_s == 12.5e12
    peaks_file(GOOD.replace("lab-card", "h100-sxm"))
    assert named_device("h100-sxm").names == ("Lab Card 1",)


def test_a_users_alias_wins_over_a_shipped_one(peaks_file):
    peaks_file(GOOD.replace('"lab"', '"H100"'))
    assert named_device("h100").key == "lab-card"
    assert datasheet_peak("NVIDIA H100 80GB HBM3", "bf16").kind == "datasheet"


def test_a_file_that_changes_is_read_again(peaks_file):
    peaks_file(GOOD)
    assert datasheet_peak("Lab Card 1", "bf16").flops_per_s == 12.5e12
    peaks_file(GOOD.replace("12.5", "25.0"))
    assert datasheet_peak("Lab Card 1", "bf16").flops_per_s == 25e12


def test_the_file_in_the_configuration_folder_is_read_after_the_variables(peaks_file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    user_file().parent.mkdir()
    user_file().write_text(GOOD + GOOD.replace("lab-card", "other-card").replace("Lab Card 1", "Lab Card 2"))
    assert datasheet_peak("Lab Card 2", "bf16").flops_per_s == 12.5e12
    peaks_file(GOOD.replace("12.5", "99"))
    assert datasheet_peak("Lab Card 1", "bf16").flops_per_s == 99e12
    assert datasheet_peak("Lab Card 2", "bf16").flops_per_s == 12.5e12


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("tflops =", "tflop =", r"\[lab-card\]: unknown key 'tflop'. Did you mean tflops"),
        ("tflops = { bf16 = 12.5, fp32 = 3 }", "", r"\[lab-card\]: tflops missing"),
        ('source = "the lab\'s own datasheet"', "", r"\[lab-card\]: source missing"),
        ("read_on = 2026-11-21", "", "read_on missing"),
        ("2026-11-21", '"2026-11-21"', "read_on = '2026-11-21' is no date. Write 2026-11-21, without quotes"),
        ('"the lab\'s own datasheet"', '" "', "source = ' ' is no text"),
        ("bf16 = 12.5", 'bf16 = "12.5"', r"\[lab-card\], tflops: bf16 = '12.5' is no positive number"),
        ("bf16 = 12.5", "bf16 = -1", "bf16 = -1 is no positive number"),
        ("bf16 = 12.5", "bf16 = true", "bf16 = True is no positive number"),
        ("bf16 = 12.5", "bfloat16 = 1", "tflops has an unknown dtype 'bfloat16'. Known dtypes are bf16, fp16"),
        ("{ bf16 = 12.5, fp32 = 3 }", "12.5", "tflops = 12.5 is no table of dense TFLOP/s"),
        ("{ bf16 = 12.5, fp32 = 3 }", "{}", "tflops = {} is no table of dense TFLOP/s"),
        ('["Lab Card 1"]', '"Lab Card 1"', "names = 'Lab Card 1' is no list of texts"),
        ('names = ["Lab Card 1"]', "", "the strings that its driver reports, or a title"),
        ('aliases = ["lab"]', "num_sms = 0", "num_sms = 0 is no count"),
        ('aliases = ["lab"]', "memory_gb = 0", "memory_gb = 0 is no positive number"),
        ('aliases = ["lab"]', "driver_mib = 81559", "driver_mib needs driver_source and driver_read_on beside it"),
        (
            'aliases = ["lab"]',
            "driver_mib = 79.6\ndriver_source = 'nvidia-smi'\ndriver_read_on = 2026-11-29",
            "driver_mib = 79.6 is no count of MiB",
        ),
        ("[lab-card]", "loose = 3\n[lab-card]", r"loose = 3 stands outside a table"),
        ("[lab-card]", "[lab-card", "is not TOML: .*line 2"),
    ],
)
def test_a_mistake_in_a_users_file_is_named(peaks_file, old, new, told):
    assert old in GOOD
    path = peaks_file(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=told) as caught:
        all_devices()
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWAY_PEAKS", str(tmp_path / "gone.toml"))
    with pytest.raises(ConfigError, match=r"HEADWAY_PEAKS='.*gone.toml' is not a file"):
        all_devices()


LINKS = """
link_gb_per_s = 450
devices_per_node = 8
link_source = "the lab's own wiring"
link_read_on = 2026-11-23
"""


def test_links_are_read_one_way(tmp_path, monkeypatch):
    path = tmp_path / "peaks.toml"
    path.write_text(GOOD + LINKS + "network_gb_per_s = 50\n")
    monkeypatch.setenv("HEADWAY_PEAKS", str(path))
    device = named_device("lab")
    assert (device.link_bytes_per_s, device.network_bytes_per_s, device.devices_per_node) == (450e9, 50e9, 8)
    assert device.link_read_on == datetime.date(2026, 11, 23)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("link_gb_per_s = 450", "needs devices_per_node and link_source and link_read_on"),
        (LINKS.replace("= 8", "= 0"), "devices_per_node = 0 is no count of devices"),
        (LINKS.replace("450", "-1"), "link_gb_per_s = -1 is no positive number"),
        (LINKS.replace("2026-11-23", "'today'"), "link_read_on = 'today' is no date"),
        (LINKS.replace("the lab's own wiring", " "), "is no text. Name the document that states link_gb_per_s"),
    ],
)
def test_links_without_their_source_are_refused(text, words, tmp_path, monkeypatch):
    path = tmp_path / "peaks.toml"
    path.write_text(GOOD + text)
    monkeypatch.setenv("HEADWAY_PEAKS", str(path))
    with pytest.raises(ConfigError) as refused:
        all_devices()
    assert words in str(refused.value)


# What nvidia-smi and rocm-smi print as a card's total: issues that users filed, and descriptions of systems that makers
# handed in to MLPerf Training 5.1. The table's entries name each.
DRIVERS_MIB = {
    "t4": 15360,
    "l4": 23034,
    "a10": 23028,
    "l40s": 46068,
    "a100-sxm-40gb": 40960,
    "a100-sxm-80gb": 81920,
    "h100-sxm": 81559,
    "h100-nvl": 95830,
    "h20-96gb": 97871,
    "h200-sxm": 143771,
    "b200": 183359,
    "gb200": 189471,
    "b300": 275040,
    "gb300": 284208,
    "rtx-3090": 24576,
    "rtx-5090": 32607,
    "mi300x": 206141652992 / 2**20,
}


@pytest.mark.parametrize("key", DRIVERS_MIB)
def test_memory_is_what_the_driver_reports(key):
    assert SHIPPED[key].total_memory_bytes / 2**20 == pytest.approx(DRIVERS_MIB[key], abs=1)


@pytest.mark.parametrize("key", [key for key, device in SHIPPED.items() if device.driver_memory_bytes])
def test_what_a_driver_reports_has_a_source_and_is_the_printed_size(key):
    """A size of N GB is N x 10**9 bytes or N GiB, less what error correction and the driver keep."""
    device = SHIPPED[key]
    assert len(device.driver_source) > 20
    assert device.driver_read_on >= datetime.date(2026, 1, 1)
    assert 0.93 < device.driver_memory_bytes / device.memory_bytes < 2**30 / 1e9 + 0.001


@pytest.mark.parametrize("key", SHIPPED)
def test_links_have_a_source_and_are_slower_than_memory(key):
    """No device is without links, so that no plan over several takes exchanges as free."""
    device = SHIPPED[key]
    assert len(device.link_source) > 20
    assert device.link_read_on >= datetime.date(2026, 1, 1)
    assert device.devices_per_node >= 1
    assert 1e9 < device.link_bytes_per_s < (device.memory_bytes_per_s or 300e9)
    assert (device.network_bytes_per_s or 0) <= device.link_bytes_per_s
    if not key.startswith(("tpu", "gaudi", "trainium")):  # whose makers print no rate to their hosts
        assert 16e9 <= device.host_bytes_per_s <= (device.memory_bytes_per_s or 64e9)


GENERATIONS = (
    ("v100-sxm2-32gb", "a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200", "b300"),
    ("a800-sxm-80gb", "h800-sxm", "h20-96gb", "h20-141gb"),
    ("gh200-96gb", "gb200", "gb300"),
    ("v100-pcie-32gb", "a100-pcie-80gb", "h100-pcie", "h100-nvl", "h200-nvl"),
    ("t4", "a10", "l4"),
    ("a40", "l40", "l40s", "rtx-pro-6000-server"),
    ("rtx-3090", "rtx-4090", "rtx-5090"),
    ("rtx-a6000", "rtx-6000-ada", "rtx-pro-6000-ws"),
    ("mi250x", "mi300x", "mi325x", "mi350x", "mi355x"),
    ("tpu-v5e", "tpu-v6e"),
    ("tpu-v4", "tpu-v5p"),
    ("gaudi2", "gaudi3"),
    ("trainium1", "trainium2", "trainium3"),
)


@pytest.mark.parametrize("keys", GENERATIONS, ids=lambda keys: keys[-1])
def test_links_never_get_slower_from_one_generation_to_the_next(keys):
    for earlier, later in itertools.pairwise(SHIPPED[key] for key in keys):
        assert earlier.link_bytes_per_s <= later.link_bytes_per_s
        for rate in ("network_bytes_per_s", "host_bytes_per_s"):
            rates = getattr(earlier, rate), getattr(later, rate)
            assert None in rates or rates[0] <= rates[1], (earlier.key, later.key, rate)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("products = [0.6, 0.5, 0.4]", "products and attention need rates_source"),
        ('products = [0.4, 0.5, 0.6]\nrates_source = "mine"', "no list of three shares of the peak"),
        ('products = [0.6, 0.5]\nrates_source = "mine"', "no list of three shares of the peak"),
        ('attention = { fa2 = 1.5 }\nrates_source = "mine"', "no table of shares of the peak"),
    ],
)
def test_shares_of_a_peak_have_a_source_and_are_shares(lines, words, tmp_path, monkeypatch):
    path = tmp_path / "peaks.toml"
    path.write_text(f'[x]\nnames = ["X"]\ntflops = {{ bf16 = 1.0 }}\nsource = "s"\nread_on = 2026-11-26\n{lines}\n')
    monkeypatch.setenv("HEADWAY_PEAKS", str(path))
    with pytest.raises(ConfigError, match=words):
        all_devices()
