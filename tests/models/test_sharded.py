"""Weights over several processes: drawn or read in slices, they are those of one process; norms are of the whole."""

import sys
from pathlib import Path

import pytest

from headway.models.load import load_model
from processes import run_processes
from tiny_models import tiny_config

PROCESS = Path(__file__).with_name("sharded_process.py")
FAMILIES = ("gpt2", "qwen3", "qwen3_tied", "qwen3_moe", "gpt_oss_sinks", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")


def run(count, check, *arguments):
    return run_processes([sys.executable, PROCESS, check, *arguments], count)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])  # 3 cut nothing into equal parts
def test_random_weights_are_those_of_one_process(count):
    run(count, "drawn", *FAMILIES)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_saved_weights_are_read_in_slices(count, tmp_path):
    for family in FAMILIES:
        model = load_model(tiny_config(family), random_init=True)
        model.save_pretrained(tmp_path / family, max_shard_size="60KB")
    run(count, "read", *(tmp_path / family for family in FAMILIES))


@pytest.mark.dist
@pytest.mark.slow
def test_the_gradient_norm_is_that_of_the_whole_on_any_mesh():
    run(4, "clipped")
