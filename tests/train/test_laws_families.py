"""Every family trains on packs as on samples alone: losses, gradients, lengths and FLOPs.

`tools/trainable.py` runs the same laws for the page docs/models.md.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.folders import CLOSE, COUNTED_OTHERWISE, TOLERANCES, VLM_FOLDERS, FamilyPair

QUICK = ("llava", "gemma3")
LONG = ("aya_vision", "glm4v", "llava_next", "ovis2", "qwen2_vl", "qwen3_vl_moe")  # others keep the same laws likewise
LONG += ("glm4v_moe", "glm46v", "glm_ocr", "exaone4_5", "paddleocr_vl", "janus", "vipllava")
LONG += ("cohere2_vision", "granite4_vision", "lighton_ocr", "qianfan_ocr")
# transformers' PaliGemma makes labels of a tensor by numpy, which numpy 2 warns of
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pair_of():
    with tempfile.TemporaryDirectory() as folder:

        @functools.cache
        def build(family):
            (Path(folder) / family).mkdir()
            return FamilyPair(family, Path(folder) / family)

        yield build


def families(*quick):
    marks = {name: pytest.mark.long if name in LONG else pytest.mark.slow for name in VLM_FOLDERS}
    return [name if name in quick else pytest.param(name, marks=marks[name]) for name in VLM_FOLDERS]


@pytest.mark.parametrize("family", families(*QUICK))
def test_a_pack_has_the_losses_and_gradients_of_its_samples_alone(family, pair_of):
    assert pair_of(family).packing_error() < TOLERANCES.get(family, CLOSE)


@pytest.mark.parametrize("family", families(*QUICK))
def test_a_sample_changes_no_other_samples_loss(family, pair_of):
    assert pair_of(family).leak() < 1e-6


@pytest.mark.parametrize("family", families(*QUICK))
def test_the_index_knows_the_encoded_lengths(family, pair_of):
    assert pair_of(family).wrong_lengths() == []


@pytest.mark.parametrize("family", families("llava"))
def test_the_packs_flops_are_those_that_pytorch_counts_of_its_samples(family, pair_of):
    assert pair_of(family).unexplained_flops() == []


@pytest.mark.parametrize("family", families("llava"))
def test_attention_is_counted_under_the_masks_that_are_computed(family, pair_of):
    counted, computed = pair_of(family).attended_flops()
    sign, *_ = COUNTED_OTHERWISE.get(family, (0,))
    assert np.sign(counted - computed) == sign
