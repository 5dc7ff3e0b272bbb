"""Inputs of recomputed blocks in the host's memory: nothing changes, and only they go there."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from headway.errors import ConfigError
from headway.models.attention import use_attention
from headway.models.compiling import CompileWatch, compile_blocks
from headway.models.lora import adapter_modules, add_adapters, initialise_adapters
from headway.models.offload import InputStore, offload_inputs
from headway.models.recompute import recompute_blocks
from helpers import models
from helpers.models import tiny_ledger

BLOCKS = {"qwen3": 2, "qwen3_vl": 5, "qwen2_5_vl": 5, "qwen3_moe": 2}


def model_of(family, choice, *, lora=False, offloads=False, compiled=False):
    """A model whose blocks are recomputed; whether their inputs are stored too."""
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if family in models.VISION_FAMILIES else AutoModelForCausalLM
    model, ledger = kind.from_config(models.tiny_config(family)).train(), tiny_ledger(family)
    use_attention(model)
    if lora:
        add_adapters(model, adapter_modules(ledger, ["q_proj", "up_proj"]), rank=4, alpha=4, dropout=0, base="")
        initialise_adapters(model, 0, torch.device("cpu"))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora" in name)
            parameter.data += 0.01 * ("lora" in name)
    recompute_blocks(model, choice, ledger.block_towers, ledger.rows)
    if compiled:
        torch._dynamo.reset()
        compile_blocks(model, CompileWatch(is_strict=True), backend="aot_eager_decomp_partition")
    if offloads:
        assert offload_inputs(model) == BLOCKS[family]
    return model


def pack_of(family, lengths=(40, 13, 7)):
    torch.manual_seed(1)
    pack = {
        "input_ids": torch.randint(7, 150, (1, sum(lengths))),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "pack_cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "pack_max_seqlen": max(lengths),
        "use_cache": False,
    }
    if family in models.VISION_FAMILIES:
        pack["input_ids"][0, :16] = models.SPECIAL_TOKENS["image_token_id"]
        pack["pixel_values"] = torch.randn(64, 3 * 2 * models.PATCH**2)
        pack["image_grid_thw"] = torch.tensor([(1, 8, 8)])
        pack["mm_token_type_ids"] = (pack["input_ids"] == models.SPECIAL_TOKENS["image_token_id"]).int()
        pack["position_ids"] = pack["position_ids"].expand(3, 1, -1)
    return pack


def step(model, packs):
    """Losses of some packs, and the gradients that they add up to."""
    losses = []
    for pack in packs:
        loss = model(**pack).logits.logsumexp(-1).sum()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def stored(monkeypatch):
    """Bytes of each input that is stored, in the order in which they are."""
    sizes, make = [], InputStore._store

    def store(self, tensor):
        sizes.append(tensor.nbytes)
        return make(self, tensor)

    monkeypatch.setattr(InputStore, "_store", store)
    return sizes


CASES = [
    ("qwen3", "full", False, False),
    ("qwen3", "full,-attention,-mlp", False, False),
    ("qwen3", "full", True, False),
    ("qwen3_moe", "full", False, False),
    ("qwen3_vl", "full,-attention", False, False),
    ("qwen2_5_vl", "full", False, False),
    ("qwen3", "full", False, True),
    pytest.param("qwen3", "full,-attention", True, True, marks=pytest.mark.slow),
    pytest.param("qwen3_vl", "full,-attention", False, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "choice", "lora", "compiled"), CASES)
def test_losses_and_gradients_are_the_same_bits(family, choice, lora, compiled, stored):
    packs = [pack_of(family), pack_of(family, (30, 20)), pack_of(family)]
    plain, again = (
        step(model_of(family, choice, lora=lora, offloads=offloads, compiled=compiled), packs)
        for offloads in (False, True)
    )
    assert len(plain) == len(again) > 5
    assert all(map(torch.equal, again, plain))
    assert len(stored) == 3 * BLOCKS[family]
    assert len({*stored}) > 1  # packs of two sizes


def test_pages_serve_pack_after_pack_and_come_back_when_a_graph_is_dropped(monkeypatch):
    store, made = InputStore(page_bytes=1000), []
    page = store._page
    monkeypatch.setattr(store, "_page", lambda device: made.append(page(device)) or made[-1])
    block = store.around(torch.tanh, learns=True)

    def forward():
        x = torch.linspace(-1, 1, 1234).requires_grad_()
        return x, block(block(x) + 1).sum()

    x, out = forward()
    assert len(made) == 2 * 5  # 4,936 bytes are five pages
    assert not store.free
    out.backward(retain_graph=True)
    first = x.grad.clone()
    out.backward()  # what was handed out comes from its pages again
    assert torch.equal(x.grad, 2 * first)
    del out
    forward()  # its graph is dropped
    x, kept = forward()
    assert kept.grad_fn is not None
    assert len(made) == len(store.free) + 2 * 5 == 2 * 5
    with torch.no_grad():
        block(x)
    assert not store.free


def test_an_input_that_is_hidden_from_the_checkpoint_is_an_error():
    """As blocks that are called by name have it, transformers binds it before it recomputes."""
    with pytest.raises(ConfigError, match="gives the input by name"):
        InputStore().around(lambda run: run(), learns=True)(lambda: torch.ones(3))
