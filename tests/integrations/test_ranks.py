"""Two processes over gloo: what they compute together is, to the FLOP, what one computes alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway import Workload, trace
from helpers.loops import LENGTHS, tiny
from helpers.processes import PYTHONPATH

SCRIPT = Path(__file__).with_name("metered_ranks.py")
WAYS = ["ddp", "fsdp2", "accelerate", "transformers_trainer", "lightning_trainer"]

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "windows.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*command, str(SCRIPT), str(path)], check=False, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_cost_what_one_costs(measured, way):
    expected = trace(tiny()).count(Workload(LENGTHS))
    run = measured[way]
    assert (run["world_size"], run["num_steps"], run["num_batches"]) == (2, 1, 4)
    assert run["tokens"] == sum(LENGTHS)
    assert run["total"] == expected.total == sum(run["rank_flops"])
    assert run["components"] == expected.by_component()
    assert min(run["rank_flops"]) > 0
