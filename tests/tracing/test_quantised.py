"""Bases in 4 and 8 bits, with adapters: billed to the FLOP as the model that they stand for."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

from headway import Workload, trace
from headway.devices import Peak
from headway.meter import Meter
from helpers.models import tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated:UserWarning"),  # nothing is merged here
]

WORKLOAD = Workload([12, 5])
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


class PackedLinear(nn.Linear):
    """A weight as bitsandbytes and others keep it: bytes of a shape that is not the product's."""

    def __init__(self, like):
        super().__init__(like.in_features, like.out_features, bias=like.bias is not None, dtype=like.weight.dtype)
        self.unpacked = [like.weight.detach().clone()]
        packed = torch.zeros((like.weight.numel() + 1) // 2, 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.unpacked[0], self.bias)


class PackedEmbedding(nn.Embedding):
    """The same for a table of embeddings."""

    def __init__(self, like):
        super().__init__(like.num_embeddings, like.embedding_dim, dtype=like.weight.dtype)
        self.unpacked = [like.weight.detach().clone()]
        packed = torch.zeros(like.weight.numel(), 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, ids):
        return nn.functional.embedding(ids, self.unpacked[0])


def plain():
    """Build a model whose base is frozen, as a quantised one is."""
    return tiny_model("qwen3", dtype=torch.bfloat16).requires_grad_(False)


def is_inner(module, path):
    return isinstance(module, nn.Linear) and "lm_head" not in path


def packed():
    model = plain()
    for path, module in [*model.named_modules()]:
        if is_inner(module, path):
            model.set_submodule(path, PackedLinear(module))
    model.model.embed_tokens = PackedEmbedding(model.model.embed_tokens)
    return model


def by_torchao(config):
    model = plain()
    quantize_(model, config, filter_fn=is_inner)
    return model


BASES = {
    "packed": packed,
    "int8": lambda: by_torchao(Int8WeightOnlyConfig()),
    "int8 products": lambda: by_torchao(Int8DynamicActivationInt8WeightConfig()),
    "float8": lambda: by_torchao(Float8WeightOnlyConfig()),
}


@pytest.mark.parametrize("base", BASES)
def test_adapters_on_a_quantised_base_cost_what_they_cost_on_the_plain_one(base):
    expected = trace(get_peft_model(plain(), LoraConfig(**LORA)))
    model = get_peft_model(BASES[base](), LoraConfig(**LORA))
    cost = trace(model)
    assert cost.count(WORKLOAD).rows == expected.count(WORKLOAD).rows
    assert cost.params == expected.params
    assert "billed as the floats" in cost.source["quantised"]
    assert "quantised" not in expected.source


def test_a_step_on_a_quantised_base_is_metered():
    model = get_peft_model(packed(), LoraConfig(**LORA)).train()
    meter = Meter(model, peak=Peak("test", 1e12, "bf16", "made up for a test"), log_every=1)
    batch = {"input_ids": torch.full((2, 12), 7)}
    meter.count(batch)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    window = meter.step()
    plain_lora = get_peft_model(plain(), LoraConfig(**LORA))
    assert (window.flops.total, window.tokens) == (trace(plain_lora).count(Workload([12, 12])).total, 24)


def test_the_model_itself_keeps_its_packed_weights():
    model = packed()
    before = dict(model.named_parameters())
    trace(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
