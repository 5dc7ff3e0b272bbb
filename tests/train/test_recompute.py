"""What speed.recompute does to a run: its blocks and its bill."""

from pathlib import Path

import pytest

from headway.config import parse_config
from headway.count import Workload
from headway.errors import ConfigError, PlanError
from headway.models.blocks import blocks
from headway.models.recompute import checkpointed_but, is_recomputed
from headway.train.prepare import prepare
from headway.train.run_folder import RunFolder
from headway.train.watch import LoopPhase


def prepared(raw, recompute):
    config = parse_config({**raw, "speed": {"recompute": recompute}})
    with RunFolder(config.run.folder) as folder:
        return prepare(config, resume=False, phase=LoopPhase(), folder=folder)


def with_folder(raw, name):
    return {**raw, "run": {**raw["run"], "folder": str(Path(raw["run"]["folder"]) / name)}}


# The vision block holds 1424 bytes of each patch, 128 of them its input, the language block 2664 of each token, 128 of
# them its input. Without a budget of patches, 160 tokens may be 640 of them, as a picture of 26 x 26: 1,388,864 bytes
# in all; 983,104 with both recomputed, one after the other, and 23,040 more where what the language block's attention
# gave (4 heads of 8 values and a sum each) is kept. The vision block makes more again: to keep what its attention
# and projections (4 x 128 bytes a patch) gave costs nothing, until the language block makes as much.
VISION, TEXT = "model.visual.blocks.0", "model.language_model.layers.0"


@pytest.mark.parametrize(
    ("size", "choice"),
    [
        ("1.39 MB", "none"),
        ("1.01 MB", f"{VISION},-projections,{TEXT},-attention"),
        ("1MB", f"{VISION},-attention,-projections,{TEXT}"),
    ],
)
def test_a_size_recomputes_the_blocks_that_bring_the_largest_pack_within_it(raw, size, choice):
    run = prepared(raw, f"memory:{size}")
    assert run.meter.recompute == choice
    chosen = [block.name for block in blocks(run.model) if is_recomputed(block.module)]
    assert chosen == ([] if choice == "none" else [VISION, TEXT])


@pytest.mark.parametrize(("tower", "block"), [("vision", VISION), ("language", TEXT)])
def test_the_blocks_of_one_tower_are_recomputed_and_billed(raw, tower, block):
    run = prepared(raw, f"{tower}:full")
    assert [one.name for one in blocks(run.model) if is_recomputed(one.module)] == [block]
    again = run.meter.cost_model.count(Workload([60, 40], images=[(1, 4, 4)]), recompute=run.meter.recompute)
    assert {row.name.partition(".")[0] for row in again.rows if row.recompute} == {tower}


def test_a_tower_that_the_model_has_not_is_an_error(raw):
    with pytest.raises(
        ConfigError, match=r"'audio:full': the model has no audio tower .* Its towers are vision and language"
    ):
        prepared(raw, "audio:full")


def test_kept_attention_is_billed_as_it_runs(raw):
    full, kept = (
        prepared(with_folder(raw, name), choice) for name, choice in (("a", "full"), ("b", "full,-attention"))
    )
    work = Workload([60, 40], images=[(1, 4, 4)])
    again = [run.meter.cost_model.count(work, recompute=run.meter.recompute) for run in (full, kept)]
    attention = sum(row.recompute for row in again[0].rows if row.name.endswith(".attention"))
    assert again[0].recompute - again[1].recompute == attention > 0
    assert {block.module._gradient_checkpointing_func for block in blocks(kept.model)} == {
        checkpointed_but(True, frozenset())
    }


def test_a_size_that_is_too_small_is_an_error(raw):
    with pytest.raises(PlanError, match=r"still holds 960\.1 KiB of activations on a device, more than the 1\.0 KiB"):
        prepared(raw, "memory:1KiB")
