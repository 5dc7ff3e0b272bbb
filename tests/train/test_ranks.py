"""Two processes train as one: the same losses as one process that accumulates twice the packs."""

from pathlib import Path

import pytest
import torch
import yaml

from headway.errors import ConfigError
from headway.train.config import ParallelConfig, load_config, parse_config
from headway.train.loop import train
from headway.train.prepare import make_mesh
from headway.train.ranks import Ranks
from headway.train.record import read_metrics
from processes import TRAIN, run_processes


def test_one_process_sums_to_itself():
    ranks = Ranks(0, 1)
    assert ranks.gather("one") == ["one"]
    assert ranks.is_first
    tensor = torch.tensor(2.0)
    ranks.sum_(tensor)
    assert tensor == 2.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sequence": 2}, "does not divide the 1 process"),
        ({"shard": 4}, "but this run has 1 process"),
        ({"offload": True}, "parallel.offload has no effect on one process"),
        ({"reduce_dtype": "bfloat16", "reshard": False}, "parallel.reduce_dtype has no effect on one process"),
    ],
)
def test_a_lone_process_refuses_what_needs_more(raw, settings, said):
    with pytest.raises(ConfigError, match=said):
        train(parse_config(raw | {"parallel": settings}))


def test_offloading_from_a_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"parallel\.offload has no effect on a CPU"):
        make_mesh(ParallelConfig(offload=True), Ranks(0, 2), torch.device("cpu"))


def test_groups_that_share_packs_are_counted_once():
    ranks = [Ranks(rank, 6, sequence=2) for rank in range(6)]
    assert [each.data_rank for each in ranks] == [0, 0, 1, 1, 2, 2]
    assert {each.num_data_ranks for each in ranks} == {3}


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one_with_twice_the_accumulation(raw, digits, tmp_path):
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    raw["eval"] = {"every": 3}
    raw["checkpoint"] = {"every": 3}
    raw["optim"]["accumulation"] = 4
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    train(load_config(path))
    alone = read_metrics(Path(raw["run"]["folder"]) / "metrics.jsonl")

    folder = tmp_path / "two"
    run_processes([*TRAIN, path, "--set", f"run.folder={folder}", "--set", "optim.accumulation=2"], 2)
    together = read_metrics(folder / "metrics.jsonl")

    assert [(r["kind"], r["step"]) for r in together] == [(r["kind"], r["step"]) for r in alone]
    for one, two in zip(alone, together, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        if one["kind"] == "step":
            assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
            assert two["tokens"] == one["tokens"]
            assert two["flops"] == one["flops"]
            assert two["world_size"] == 2
        else:
            assert two["samples"] == one["samples"]
