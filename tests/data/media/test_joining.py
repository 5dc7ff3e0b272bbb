"""Tensors of samples join as they were seen to join."""

import pytest
import torch

from headway.data.media.joining import Joining, joining_of, pack_tensor
from headway.errors import DataError

ONE, TWO = torch.arange(1.0, 7).reshape(1, 2, 3), torch.arange(7.0, 15).reshape(2, 2, 2)


def filled(part, value, *shape):
    whole = torch.full(shape, value)
    whole[tuple(slice(side) for side in part.shape)] = part
    return whole


@pytest.mark.parametrize(
    ("parts", "whole", "rule"),
    [
        ([ONE, ONE], torch.cat([ONE, ONE]), Joining(0)),
        ([ONE, ONE + 1], torch.cat([ONE, ONE + 1], dim=2), Joining(2)),
        ([ONE, TWO], torch.cat([ONE, filled(TWO, -1.0, 2, 2, 3)]), Joining(0, -1.0)),
        ([torch.tensor([3]), torch.tensor([3])], torch.tensor([3]), Joining(None)),
        ([torch.tensor(2.0), torch.tensor(2.0)], torch.tensor(2.0), Joining(None)),
        ([ONE, ONE + 1], torch.cat([ONE + 1, ONE]), None),  # another order
        ([ONE, TWO], ONE.sum(), None),
    ],
)
def test_the_rule_is_the_one_that_makes_the_whole(parts, whole, rule):
    assert joining_of(parts, whole) == rule
    if rule is not None:
        assert torch.equal(pack_tensor(parts, rule), whole)


def test_what_was_not_seen_to_be_filled_up_is_refused():
    with pytest.raises(DataError, match=r"shapes \[\(1, 2, 3\), \(2, 2, 2\)\].*samples_per_pack: 1"):
        pack_tensor([ONE, TWO], Joining(0))


def test_what_samples_share_must_stay_the_same():
    with pytest.raises(DataError, match="another value of what all samples shared"):
        pack_tensor([torch.tensor([3]), torch.tensor([4])], Joining(None))
