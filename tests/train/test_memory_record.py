"""What a run records of its memory, and what a later dry run reads of it."""

import json
from types import SimpleNamespace

import pytest
import torch

from headway.config import parse_config
from headway.count import load_cost_model
from headway.train import memory
from headway.train.memory import FILE_NAME, last_residual, record_memory


@pytest.fixture
def recorded(raw, tmp_path, monkeypatch):
    """A run on a pretended CUDA device whose tensors held 2 GiB more than was predicted."""
    raw["model"] = {"path": "Qwen/Qwen2.5-0.5B-Instruct"}
    raw["run"] |= {"device": "auto", "folder": str(tmp_path)}
    config = parse_config(raw)
    cuda = {
        "mem_get_info": lambda _: (60 << 30, 80 << 30),
        "memory_reserved": lambda _: 17 << 30,
        "get_device_name": lambda _: "NVIDIA H100 80GB HBM3",
    }
    for name, answer in cuda.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(memory, "held_bytes", lambda _: {"weights": 5, "optimizer": 7})
    run = SimpleNamespace(
        device=torch.device("cuda", 0),
        trained=SimpleNamespace(cost_model=load_cost_model("qwen2.5-0.5b")),
        ranks=SimpleNamespace(size=1),
    )
    path = record_memory(run, config, 0)
    predicted = json.loads(path.read_text())["predicted"]["peak"]
    assert record_memory(run, config, predicted + (2 << 30)) == path == tmp_path / FILE_NAME
    return path


def test_what_was_predicted_and_measured_is_recorded_by_part(recorded):
    record = json.loads(recorded.read_text())
    assert record["measured"] | {"peak": 0} == {
        "weights": 5, "optimizer": 7, "peak": 0, "reserved": 17 << 30, "outside": 3 << 30
    }  # fmt: skip
    assert record["predicted"]["weights"] == 4 * load_cost_model("qwen2.5-0.5b").params.total
    assert set(record["predicted"]["moments"]) >= {"built", "first update", "backward"}


def test_a_later_dry_run_reads_by_how_much_it_was_off(recorded):
    names = ["NVIDIA H100 80GB HBM3"]
    assert last_residual(recorded.parent, names)["more"] == 2 << 30
    assert last_residual(recorded.parent, ["NVIDIA A100-SXM4-80GB"]) is None
    assert last_residual(recorded.parent / "elsewhere", names) is None
    record = json.loads(recorded.read_text())
    recorded.write_text(json.dumps({**record, "torch": "1.0"}))
    assert last_residual(recorded.parent, names) is None


@pytest.mark.parametrize("damaged", ["", "{", "[]", "[" * 100_000, "{}", '{"device": [], "torch": 3}'])
def test_a_record_that_is_not_whole_is_none(recorded, damaged):
    recorded.write_text(damaged)
    assert last_residual(recorded.parent, ["NVIDIA H100 80GB HBM3"]) is None


def test_a_cpu_has_nothing_to_record(raw, tmp_path):
    raw["run"]["folder"] = str(tmp_path)
    run = SimpleNamespace(device=torch.device("cpu"))
    assert record_memory(run, parse_config(raw), 2**30) is None
    assert not (tmp_path / FILE_NAME).exists()
