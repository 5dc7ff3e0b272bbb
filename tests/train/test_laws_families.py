"""Every family trains on packs as on samples alone: losses, gradients, lengths and FLOPs.

`tools/trainable.py` runs the same laws for the page docs/models.md.
"""

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


def _sign_of_attention(pair):
    """Sign of counted less computed FLOPs of attention, and the one that is known of the family."""
    counted, computed = pair.attended_flops()
    sign, *_ = COUNTED_OTHERWISE.get(pair.family, (0,))
    return np.sign(counted - computed) == sign


LAWS = {
    "a pack has the losses and gradients of its samples alone": lambda pair: (
        pair.packing_error() < TOLERANCES.get(pair.family, CLOSE)
    ),
    "a sample changes no other sample's loss": lambda pair: pair.leak() < 1e-6,
    "the index knows the encoded lengths": lambda pair: pair.wrong_lengths() == [],
    "the pack's FLOPs are those that PyTorch counts of its samples": lambda pair: pair.unexplained_flops() == [],
    "attention is counted under the masks that are computed": _sign_of_attention,
}


@pytest.mark.parametrize(
    "family",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.long if name in LONG else pytest.mark.slow)
        for name in VLM_FOLDERS
    ],
)
def test_the_laws_of_packs_hold(family, tmp_path):
    """In one test for each family, whose two models take longer to make than a law to look at."""
    pair = FamilyPair(family, tmp_path)
    assert [law for law, holds in LAWS.items() if not holds(pair)] == []
