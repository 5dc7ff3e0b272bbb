"""Weights in bytes among several processes: a torch whose FSDP2 shards floats alone is told of before it fails."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from headway.errors import ConfigError
from headway.models.parallel.shard import _refuse_bytes


@pytest.mark.parametrize(("version", "refused"), [("2.11.0+cu130", True), ("2.13.0", False)])
def test_bytes_are_refused_by_a_torch_that_cannot_shard_them(version, refused):
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    with patch.object(torch, "__version__", version):
        _refuse_bytes(nn.Linear(2, 2))
        if not refused:
            _refuse_bytes(model)
            return
        with pytest.raises(ConfigError, match=r"needs torch 2.13 or later, but this is torch 2.11.0\+cu130"):
            _refuse_bytes(model)
