"""Recomputed blocks: which are chosen, that nothing changes, and that what runs again is what is billed."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import tiny_models
from headway.count import Workload, trace
from headway.errors import ConfigError
from headway.models.attention import use_attention
from headway.models.blocks import blocks
from headway.models.compiling import CompileWatch, compile_blocks
from headway.models.recompute import recompute_blocks


def model_of(family, **changes):
    config = tiny_models.tiny_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    kind = AutoModelForImageTextToText if family in tiny_models.VISION_FAMILIES else AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(config).train()
    use_attention(model)
    return model


def pack(lengths):
    return {
        "input_ids": torch.randint(7, 150, (1, sum(lengths))),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "pack_cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "pack_max_seqlen": max(lengths),
        "use_cache": False,
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", []),
        ("full", ["vision.0", "vision.1", "vision.2", "text.0", "text.1"]),
        ("every:1", ["vision.0", "vision.1", "vision.2", "text.0", "text.1"]),
        ("every:2", ["vision.1", "text.1"]),
        ("every:3", ["vision.2"]),
        ("model.language_model.layers.0,model.visual.blocks.2", ["vision.2", "text.0"]),
    ],
)
def test_a_choice_is_the_same_blocks_for_the_model_and_for_its_ledger(choice, expected):
    model = model_of("qwen3_vl")
    cost_model = trace(model)
    names = recompute_blocks(model, choice)
    short = [n.replace("model.visual.blocks", "vision").replace("model.language_model.layers", "text") for n in names]
    assert sorted(short) == sorted(expected)
    workload = Workload([50], images=[(1, 8, 8)])
    billed = cost_model.count(workload, recompute=choice).recompute
    assert billed == cost_model.count(workload, recompute=",".join(names) or "none").recompute
    assert (billed > 0) == bool(names)


def test_a_choice_of_no_block_is_an_error():
    with pytest.raises(
        ConfigError, match="recompute 'every:7' chooses none of the model's 2 blocks; the longest tower"
    ):
        recompute_blocks(model_of("qwen3"), "every:7")


@pytest.mark.parametrize("choice", ["full", "every:2"])
def test_recomputation_changes_no_gradient(choice):
    model, batch = model_of("qwen3"), pack([20, 13, 7])
    model(**batch).logits.logsumexp(-1).sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    recompute_blocks(model, choice)
    model(**batch).logits.logsumexp(-1).sum().backward()
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        assert torch.equal(parameter.grad, gradient)


def backward_products(model, batch):
    """FLOPs of matrix products in a backward, attention aside: PyTorch's counter sees those rightly."""
    loss = model(**batch).logits.logsumexp(-1).sum()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op).startswith("aten.mm"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("choice", "num_blocks"), [("full", 2), ("every:2", 1), ("model.layers.0", 1)])
def test_the_products_that_run_again_are_those_that_are_billed(choice, num_blocks, compiled):
    # Of a block's seven products all but the last, down_proj, are needed again: nothing in backward reads its result.
    # hidden 32, 4 query and 2 key/value heads of 8, inner 48
    each = 2 * 40 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 32 * 48)
    runs = []
    for chosen in ("none", choice):
        torch._dynamo.reset()
        model, batch = model_of("qwen3"), pack([20, 13, 7])
        recompute_blocks(model, chosen)
        if compiled:
            compile_blocks(model, CompileWatch(), backend="aot_eager_decomp_partition")
            backward_products(model, batch)  # compiles
        runs.append(backward_products(model, batch))
    assert runs[1] - runs[0] == num_blocks * each
    billed = trace(model_of("qwen3")).count(Workload([20, 13, 7]), recompute=f"{choice},-attention")
    assert billed.recompute == num_blocks * each


def test_blocks_are_found_where_the_ledger_has_them():
    for family in ("qwen3", "qwen3_moe", "qwen2_5_vl", "qwen3_vl_moe"):
        model = model_of(family)
        assert {row.block for row in trace(model).rows if row.block} == {block.name for block in blocks(model)}
