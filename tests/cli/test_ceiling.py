import dataclasses
import json

import pytest
import torch

from headway.devices import named_device
from headway.devices.measure import TimeBudget


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Measure small shapes, few times, into a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("headway.devices.ceilings._BUDGET", TimeBudget(0.0, 60.0, 3))
    monkeypatch.setattr("headway.devices.ceilings._SHAPES", {"cpu": ((32, 16, 8), (64, 64, 64))})
    monkeypatch.setattr("headway.devices.ceilings._SIZES", {"cpu": (2**20,)})
    monkeypatch.setattr("headway.devices.measure._UNDISTURBED", 0.0)  # whatever else this machine does
    monkeypatch.setattr("headway.devices.measure._AGREEMENT", float("inf"))


def test_the_ceiling_is_measured_and_then_read(headway):
    first = headway("ceiling", "--device", "cpu", "--json")
    assert (first.code, first.err) == (0, "")
    data = json.loads(first.out)
    assert data["schema_version"] == 1
    assert (data["device"]["type"], data["device"]["torch"]) == ("cpu", torch.__version__)
    assert data["device"]["threads"] == torch.get_num_threads()
    assert [found["dtype"] for found in data["matmul"]] == ["fp32", "bf16", "fp16"]
    for found in data["matmul"]:
        assert 0 < found["min_flops_per_s"] <= found["median_flops_per_s"] <= found["flops_per_s"]
        assert found["flops_per_s"] == max(shape["flops_per_s"] for shape in found["shapes"])
        assert [shape["shape"] for shape in found["shapes"]] == [[32, 16, 8], [64, 64, 64]]
        assert found["repeats"] == 3
        assert found["datasheet_flops_per_s"] is None
        assert not found["cached"]
    assert 0 < data["copy"]["min_bytes_per_s"] <= data["copy"]["bytes_per_s"]
    again = json.loads(headway("ceiling", "--device", "cpu", "--json").out)
    assert all(found.pop("cached") for found in (*again["matmul"], again["copy"]))
    assert not any(found.pop("cached") for found in (*data["matmul"], data["copy"]))
    assert again == data


def test_the_table_shows_spread_and_age(headway):
    result = headway("ceiling", "--device", "cpu", "--dtype", "fp32")
    assert result.code == 0
    assert " ".join(result.out.splitlines()[0].split()) == "what shape best median slowest repeats of datasheet"
    assert "FLOP/s" in result.out
    assert "1 MiB" in result.out
    assert "GB/s" in result.out
    assert "UTC, just now" in result.out
    assert "from the cache; --refresh measures again" in headway("ceiling", "--device", "cpu", "--dtype", "fp32").out
    assert "just now" in headway("ceiling", "--device", "cpu", "--dtype", "fp32", "--refresh").out


def test_the_datasheet_stands_beside_what_was_measured(headway, monkeypatch):
    known = dataclasses.replace(named_device("H100"), peak_flops_per_s={"fp32": 4e15}, memory_bytes_per_s=8e15)
    monkeypatch.setattr("headway.devices.device_at", lambda _: known)
    data = json.loads(headway("ceiling", "--device", "cpu", "--dtype", "fp32", "--json").out)
    assert data["matmul"][0]["datasheet_flops_per_s"] == 4e15
    assert data["copy"]["datasheet_bytes_per_s"] == 8e15
    table = headway("ceiling", "--device", "cpu", "--dtype", "fp32", "--dtype", "bf16").out
    shares = {line.split()[0]: line.split("  ")[-1].strip() for line in table.splitlines()[2:5]}
    assert shares["fp32"] == shares["copy"] == "0.0 %"  # 4 PFLOP/s and 8 PB/s: no CPU reaches a thousandth
    assert shares["bf16"] == "-"


def test_a_damaged_cache_is_a_warning(headway, tmp_path):
    headway("ceiling", "--device", "cpu", "--dtype", "fp32")
    for path in tmp_path.rglob("*.json"):
        path.write_text("{")
    result = headway("ceiling", "--device", "cpu", "--dtype", "fp32")
    assert result.code == 0
    assert result.err.count("Warning: The cached ceiling") == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--device", "tpu"], "'tpu' is none of cpu, cuda, mps"),
        (["--device", "cuda:x"], "'cuda:x' is none of"),
        (["--device", "cuda:99"], "PyTorch sees no such device here"),
        (["--device", "cpu", "--dtype", "fp8"], "Headway cannot measure the ceiling of cpu in 'fp8'"),
        (["--device", "cpu", "--dtype", "tf32"], "Headway cannot measure the ceiling of cpu in 'tf32'"),
    ],
)
def test_what_cannot_be_measured_exits_2(headway, arguments, told):
    result = headway("ceiling", *arguments)
    assert (result.code, result.out) == (2, "")
    assert told in " ".join(result.err.split())
