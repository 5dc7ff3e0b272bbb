"""A model that is given room for weights has everything that no file of weights holds."""

import pytest
import torch

from headway.models.load import load_model
from headway.models.materialise import allocate
from helpers.models import FAMILIES, RECURRENT_FAMILIES, tiny_config


@pytest.mark.parametrize("family", FAMILIES + RECURRENT_FAMILIES)
def test_buffers_that_are_not_saved_are_those_of_a_whole_model(family):
    whole = load_model(tiny_config(family), random_init=True)
    roomy = load_model(tiny_config(family), random_init=True, device="meta")
    allocate(roomy, "cpu")
    assert [name for name, _ in roomy.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert not any(tensor.is_meta for tensor in (*roomy.parameters(), *roomy.buffers()))
    saved = set(whole.state_dict())
    for (name, expected), found in zip(whole.named_buffers(), roomy.buffers(), strict=True):
        assert name in saved or torch.equal(found, expected), name
