"""What is read off a model besides its operations."""

import pytest
from torch import nn

from headway.errors import UsageError
from headway.tracing.classify import checkpointing_of
from helpers.counter import gpt2
from helpers.models import enable_checkpointing


def test_what_checkpointing_runs_again_is_read_off_the_model():
    model = gpt2()
    assert checkpointing_of(model) == checkpointing_of(nn.Linear(2, 2)) == "none"
    enable_checkpointing(model, reentrant=None)
    assert checkpointing_of(model) == "full"
    model.transformer.h[0].gradient_checkpointing = False
    assert checkpointing_of(model) == "transformer.h.1"
    enable_checkpointing(model, reentrant=True)
    assert checkpointing_of(model) == "reentrant"
    model.transformer.h[0].gradient_checkpointing = False
    with pytest.raises(UsageError, match="1 of 2 blocks are checkpointed with use_reentrant=True"):
        checkpointing_of(model)
