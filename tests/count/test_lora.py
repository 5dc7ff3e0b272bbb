"""Adapters on a stored cost model against real ones that peft put into a real model."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from headway.count import Workload, trace
from headway.count.tracing.build import model_class
from tiny_models import VISION_FAMILIES, tiny_config

# Without targets both adapt all linear modules but the head. (On text mixtures of experts peft's all-linear also adapts
# the router and the experts' tensors, which are no linear modules; ours does not.)
CASES = [
    *((family, None) for family in ("qwen3", "gemma3_sliding", *VISION_FAMILIES)),
    *((family, ["q_proj", "v_proj"]) for family in ("qwen3", "gemma3_sliding", "qwen3_moe", *VISION_FAMILIES)),
    ("qwen3", ["down_proj"]),
    ("deepseek_v3", ["q_b_proj", "o_proj"]),
    ("qwen3_vl", ["linear_fc2"]),
    ("qwen2_5_vl", ["qkv"]),
]


def adapted(family, targets):
    config = tiny_config(family)
    model = model_class(config)._from_config(config, dtype=torch.float32)
    adapters = LoraConfig(r=4, lora_dropout=0.0, target_modules=targets or "all-linear")
    return get_peft_model(model, adapters).base_model.model


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(("family", "targets"), CASES)
def test_adapters_on_a_stored_cost_model_cost_what_pefts_do(family, targets):
    images = [(1, 4, 6)] if family in VISION_FAMILIES else []
    step = Workload([50, 33], images=images)
    real, stored = trace(adapted(family, targets)), trace(tiny_config(family)).lora(4, targets)
    a, b = real.count(step), stored.count(step)
    assert (a.forward, a.dgrad, a.wgrad) == (b.forward, b.dgrad, b.wgrad)
    assert real.params == stored.params
