"""Two processes train as one: the same losses as one process that accumulates twice the packs."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml

from headway.config import ParallelConfig, load_config, parse_config
from headway.errors import ConfigError, RankLostError, UsageError
from headway.models.parallel.ranks import Ranks, agree_on_meeting, join_ranks
from headway.train.prepare import make_mesh
from headway.train.run import train
from helpers.processes import TRAIN, free_port, run_processes
from helpers.runs import read_metrics


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


def meet(store, size):
    """The names that processes which start together agree on, each a thread here."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: agree_on_meeting(store, rank, size, 60.0), range(size)))


def test_ranks_that_were_restarted_agree_on_another_name_than_those_before_them():
    """torchrun keeps the store, with all that the dead have left there."""
    store = torch.distributed.HashStore()
    names = []
    for size in (3, 3, 2, 4):
        found = meet(store, size)
        assert len(set(found)) == 1
        names.append(found[0])
        for rank in range(1, size):  # of an attempt in which they died before the first rank heard them
            store.set(f"headway/here/{rank}", f"dead-{len(names)}-{rank}")
    assert len(set(names)) == len(names)


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(RankLostError, match=r"2 of 3 ranks have not come within 0.05 s, the first of them rank 1"):
        agree_on_meeting(torch.distributed.HashStore(), 0, 3, 0.05)


LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WORLD_SIZE", "abc", "WORLD_SIZE is 'abc', but a whole number from 1"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is '0', but a whole number from 1"),
        ("WORLD_SIZE", "-2", "WORLD_SIZE is '-2', but"),
        ("RANK", "x", "RANK is 'x', but a whole number from 0 to 1"),
        ("RANK", "2", "RANK is '2', but a whole number from 0 to 1"),
        ("RANK", None, "RANK is not set, but a whole number from 0 to 1"),
        ("MASTER_PORT", "99999", "MASTER_PORT is '99999', but a whole number from 1 to 65535"),
        ("MASTER_PORT", "", "MASTER_PORT is '', but"),
        ("MASTER_PORT", None, "MASTER_PORT is not set, but"),
        ("MASTER_ADDR", None, "MASTER_ADDR is not set, but the name or address of the first rank's machine"),
    ],
)
def test_a_launchers_variable_is_refused_by_its_name_and_value(monkeypatch, name, value, message):
    for variable, usual in (LAUNCHED | {name: value}).items():
        monkeypatch.delenv(variable, raising=False) if usual is None else monkeypatch.setenv(variable, usual)
    with pytest.raises(UsageError, match=message):
        join_ranks(torch.device("cpu"))


def test_a_wait_for_other_ranks_is_told_and_ends_with_the_address(monkeypatch, capfd):
    port = str(free_port())
    for variable, usual in (LAUNCHED | {"MASTER_PORT": port}).items():
        monkeypatch.setenv(variable, usual)
    monkeypatch.setattr("headway.models.parallel.ranks._SILENT_S", 0.01)
    with pytest.raises(RankLostError, match=rf"rank 0 could not meet the other ranks at 127\.0\.0\.1:{port} \(MASTER"):
        join_ranks(torch.device("cpu"), watchdog_s=0.5)
    assert f"rank 0 waits for the other ranks at 127.0.0.1:{port}" in capfd.readouterr().err


def test_what_the_first_rank_alone_does_is_told_to_all(monkeypatch):
    first, other = Ranks(0, 2), Ranks(1, 2)
    told = []

    def refuse():
        raise ConfigError("the folder is taken")

    monkeypatch.setattr(Ranks, "gather_all", lambda _, value: told.append(value) or [told[0], None])
    for ranks in (first, other):
        with pytest.raises(ConfigError, match="the folder is taken"):
            ranks.by_first(refuse)
    told.clear()
    assert [first.by_first(lambda: "resumed"), other.by_first(refuse)] == ["resumed", "resumed"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.long
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
    ended = run_processes([*TRAIN, path, "--set", f"run.folder={folder}", "--set", "optim.accumulation=2"], 2)
    assert not any("view tensor" in process.stderr for process in ended)  # FSDP2's warning, which only frightens
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
