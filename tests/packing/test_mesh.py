import pytest

from headway.errors import ConfigError
from headway.packing.mesh import MeshShape


@pytest.mark.parametrize(
    ("world_size", "given", "shape"),
    [
        (1, {}, (1, 1, 1, 1)),
        (8, {}, (1, 8, 1, 1)),
        (8, {"replicate": 2}, (2, 4, 1, 1)),
        (8, {"sequence": 4}, (1, 2, 4, 1)),
        (12, {"replicate": 2, "sequence": 3, "expert": 6}, (2, 2, 3, 6)),
        (6, {"replicate": 3, "shard": 1, "sequence": 2, "expert": 2}, (3, 1, 2, 2)),
    ],
)
def test_shard_takes_what_the_others_leave(world_size, given, shape):
    found = MeshShape.of(world_size, **given)
    assert (found.replicate, found.shard, found.sequence, found.expert) == shape
    assert found.world_size == world_size
    assert found.fsdp * found.replicate == world_size


@pytest.mark.parametrize(
    ("world_size", "given", "said"),
    [
        (4, {"sequence": 3}, r"replicate 1 x parallel.sequence 3 = 3 does not divide the 4 processes.*a multiple of 3"),
        (1, {"replicate": 2}, r"= 2 does not divide the 1 process of this run"),
        (4, {"shard": 8}, r"= 8 processes, but this run has 4 processes\. Start 8 .*parallel.shard=auto"),
        (128, {"shard": 8}, r"parallel\.shard=auto to use all processes, or set parallel\.replicate=16"),
        (4, {"shard": 1}, r"= 1 processes, but this run has 4 processes"),
        (8, {"sequence": 2, "expert": 3}, r"expert 3 .*the 8 processes .*one of 1, 2, 4, 8, or start a multiple of 3 "),
        (
            8,
            {"replicate": 4, "expert": 4},
            r"the 2 processes .*one of 1, 2, or start a multiple of 16 .*; devices in a dry",
        ),
    ],
)
def test_processes_that_do_not_fit_are_refused_with_what_to_do(world_size, given, said):
    with pytest.raises(ConfigError, match=said):
        MeshShape.of(world_size, **given)
