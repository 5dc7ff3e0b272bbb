"""What is read off a model besides its operations."""

import pytest
from torch import nn

from headway.errors import UsageError
from headway.tracing.classify import checkpointing_of
from helpers import checkpointing
from helpers.tiny_gpt2 import gpt2


def test_what_checkpointing_runs_again_is_read_off_the_model():
    model = gpt2()
    assert checkpointing_of(model) == checkpointing_of(nn.Linear(2, 2)) == "none"
    checkpointing.enable(model)
    assert checkpointing_of(model) == "full"
    model.transformer.h[0].gradient_checkpointing = False
    assert checkpointing_of(model) == "transformer.h.1"
    checkpointing.enable(model, {"use_reentrant": True})
    assert checkpointing_of(model) == "reentrant"
    model.transformer.h[0].gradient_checkpointing = False
    with pytest.raises(UsageError, match="1 of 2 blocks are checkpointed with use_reentrant=True"):
        checkpointing_of(model)
