"""Weights over several processes: drawn or read in slices, they are those of one process; norms are of the whole."""

import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from headway.models.load import load_model
from helpers.models import tiny_config
from helpers.processes import run_processes

PROCESS = Path(__file__).with_name("sharded_process.py")
FEW = ("gpt2", "qwen3_tied", "gpt_oss_sinks", "qwen2_5_vl", "qwen3_vl_moe")
FAMILIES = (*FEW, "qwen3", "qwen3_moe", "qwen3_vl")
# 3 cut nothing into equal parts
COUNTS = [
    pytest.param(3, ("qwen3_vl_moe",), id="3, one"),
    pytest.param(3, FEW, marks=pytest.mark.slow, id="3, few"),
    *(pytest.param(count, FAMILIES, marks=pytest.mark.long, id=str(count)) for count in (2, 3)),
]


def run(count, check, *arguments):
    return run_processes([sys.executable, PROCESS, check, *arguments], count)


@pytest.mark.dist
@pytest.mark.parametrize(("count", "families"), COUNTS)
def test_random_weights_are_those_of_one_process(count, families):
    run(count, "drawn", *families)


@pytest.mark.dist
@pytest.mark.parametrize(("count", "families"), COUNTS)
def test_saved_weights_are_read_in_slices(count, families, tmp_path):
    for family in families:
        model = load_model(tiny_config(family), random_init=True)
        model.save_pretrained(tmp_path / family, max_shard_size="60KB")
    run(count, "read", *(tmp_path / family for family in families))


@pytest.mark.dist
def test_the_gradient_norm_is_that_of_the_whole_on_any_mesh():
    run(4, "clipped")


@pytest.mark.dist
def test_a_tower_that_one_process_has_no_use_for_counts_as_zero_there():
    run(2, "unused")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("count", "options"), [(3, ()), pytest.param(2, ("compiled",), marks=pytest.mark.slow)], ids=["3", "2, compiled"]
)
def test_float8_weights_are_gathered_as_bytes_of_their_last_values(count, options):
    run(count, "float8", *options)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model of about 400 MB, and how much its parameters take [bytes]."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 7, "num_attention_heads": 8}
    model = load_model(LlamaConfig(**sizes, vocab_size=8000, tie_word_embeddings=False), random_init=True)
    model.save_pretrained(folder, max_shard_size="200MB")
    return folder, sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.dist
@pytest.mark.parametrize("way", ["draw", pytest.param("read", marks=pytest.mark.slow)])
def test_no_process_ever_holds_the_whole_model(large, way):
    folder, weight_bytes = large
    assert weight_bytes > 400e6
    for process in run(4, "memory", way, folder):
        # A quarter to keep, and beside it pages of the mapped files, or one whole parameter (33 MB at most).
        assert int(process.stdout) < 0.75 * weight_bytes
