"""What speed.recompute does to a run: its blocks and its bill."""

import pytest

from headway.errors import PlanError
from headway.models.blocks import blocks
from headway.models.recompute import is_recomputed
from headway.train.config import parse_config
from headway.train.prepare import prepare


def prepared(raw, recompute):
    return prepare(parse_config({**raw, "speed": {"recompute": recompute}}), resume=False)


# The vision block holds 1424 bytes of each patch, 128 of them its input, the language block 2664 of each token, 128 of
# them its input. Without a budget of patches, 160 tokens may be 640 of them, as a picture of 26 x 26: 1,388,864 bytes
# in all; 983,104 with both recomputed, one after the other.
@pytest.mark.parametrize(("size", "num_blocks"), [("1.39 MB", 0), ("1MB", 2)])
def test_a_size_recomputes_the_blocks_that_bring_the_largest_pack_within_it(raw, size, num_blocks):
    run = prepared(raw, f"memory:{size}")
    chosen = [block.name for block in blocks(run.model) if is_recomputed(block.module)]
    assert len(chosen) == num_blocks
    assert run.meter.recompute == (",".join(chosen) or "none")


def test_a_size_that_is_too_small_is_an_error(raw):
    with pytest.raises(PlanError, match=r"still holds 960\.1 KiB of activations on a device, more than the 1\.0 KiB"):
        prepared(raw, "memory:1KiB")
