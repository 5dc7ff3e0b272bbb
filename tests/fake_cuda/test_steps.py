"""Whole training steps of every recipe on a pretended CUDA device: the kernels are called, and no host waits."""

from collections import Counter
from unittest.mock import patch

import pytest

from fake_cuda.device import Stream
from fake_cuda.steps import RECIPES, recipe, run_step
from headway.models.offload import PAGE
from helpers.cases import some

LAYERS = 4  # three of Qwen3-VL's layers take features of the tower; what further layers do is the same again
# A step of each kind; the rest differ in size, which a slow test goes through. What sets the experiments of one recipe
# apart is for several processes, so one of them stands for all (benchmarks/waits_and_memory.py runs each).
OFTEN = ("qwen2.5-7b-text-81920", "qwen2.5-vl-7b-video-51200")
KINDS = (*OFTEN, "digits", "qwen3-vl-30b-a3b-vqa-8192-exp6")
NAMES = [name for name in RECIPES if name in KINDS or "-exp" not in name]
DIGITS_VOCABULARY = 337  # whose logits have odd rows, as do any model's whose vocabulary is odd


@pytest.mark.parametrize("name", some(NAMES, OFTEN.__contains__))
def test_a_step_of_a_recipe_does_not_wait_for_the_device(name):
    found = run_step(recipe(name), layers=None if name == "digits" else LAYERS)
    assert found.waits == ()
    assert not [shape for shape in found.narrow if DIGITS_VOCABULARY not in shape]
    assert found.ops["torch_attn::_varlen_attn"] > 0
    assert found.ops["torch_attn::_varlen_attn_backward"] > 0
    assert found.ops["aten::_fused_adamw_"] > 0
    assert (found.ops["aten::_grouped_mm"] > 0) == ("a3b" in name)
    assert (found.patches > 0) == ("text" not in name and not name.endswith("exp4"))


def test_products_and_attention_that_are_kept_run_once():
    """Of a tower with biases, whose MLPs compute in wider rows than they have, and of a language model."""
    choices = ("none", "full", "full,-attention,-projections,-mlp")
    plain, full, kept = (run_step(recipe(OFTEN[1], f"speed.recompute={choice}"), layers=2).ops for choice in choices)
    for operation in ("aten::mm", "aten::addmm", "torch_attn::_varlen_attn"):
        assert full[operation] > plain[operation] == kept[operation]


def test_inputs_go_to_the_host_and_back_beside_what_is_computed():
    """Nothing else is copied, no host waits, and streams wait for each other before and behind each copy."""
    choice, given = "speed.recompute=full,-attention", []
    log = {name: lambda *_, name=name: given.append(name) for name in ("wait_stream", "wait_event")}
    with patch.multiple(Stream, **log):
        found = run_step(recipe(OFTEN[0], choice, "speed.offload=inputs"), layers=LAYERS)
    plain = run_step(recipe(OFTEN[0], choice), layers=LAYERS)
    assert found.waits == ()
    # every input goes in pages, and all but the last come back
    copies, pages = 2 * LAYERS - 1, -(-found.slots * 3584 * 4 // PAGE)
    assert found.ops["aten::copy_"] - plain.ops["aten::copy_"] == copies * pages
    assert Counter(given) == {"wait_stream": copies, "wait_event": copies}
    # at its fullest, forward has let go of two of four inputs at least
    assert plain.peaks["forward"] - found.peaks["forward"] >= 2 * found.slots * 3584 * 4


# What transformers asks the device for where nobody answers ahead: 1 look at positions, or 1 check of numbers of tokens
# and 1 scatter that is undone, and for features of the tower in 3 layers 5 reads by a mask in each.
@pytest.mark.parametrize(
    ("name", "waits"),
    [
        pytest.param("qwen2.5-7b-text-81920", 1, marks=pytest.mark.slow),
        pytest.param("qwen2.5-vl-7b-video-51200", 2, marks=pytest.mark.slow),
        pytest.param("qwen3-vl-8b-image-61440", 17, marks=pytest.mark.slow),
        ("qwen3-vl-30b-a3b-vqa-8192", 17),
    ],
)
def test_without_answers_ahead_a_step_waits(name, waits):
    found = run_step(recipe(name), layers=LAYERS, ahead=False)
    assert len(found.waits) == waits, found.waits
