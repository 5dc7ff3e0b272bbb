"""Recomputed blocks: which are chosen, that nothing changes, and that what runs again is what is billed."""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from headway.count import Workload
from headway.count.recompute import as_choice, recomputed_blocks
from headway.errors import ConfigError
from headway.models.attention import use_attention
from headway.models.attention.ragged import varlen_attention
from headway.models.blocks import blocks
from headway.models.compiling import CompileWatch, compile_blocks
from headway.models.lora import adapter_modules, add_adapters, initialise_adapters
from headway.models.recompute import _ATTENTION, checkpointed, checkpointed_but, recompute_blocks
from headway.predict.activations import block_bytes
from headway.tracing.activations import saved_by_block
from helpers import models
from helpers.counter import attention_calls
from helpers.models import tiny_ledger


def model_of(family, **changes):
    config = models.tiny_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    kind = AutoModelForImageTextToText if family in models.VISION_FAMILIES else AutoModelForCausalLM
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
        ("full,-attention", ["vision.0", "vision.1", "vision.2", "text.0", "text.1"]),
        ("every:2,-attention", ["vision.1", "text.1"]),
        ("vision:full", ["vision.0", "vision.1", "vision.2"]),
        ("language:full,-attention", ["text.0", "text.1"]),
        ("vision:every:2,language:every:2,-attention", ["vision.1", "text.1"]),
    ],
)
def test_a_choice_is_the_same_blocks_for_the_model_and_for_its_ledger(choice, expected):
    cost_model = tiny_ledger("qwen3_vl")
    names = recompute_blocks(model_of("qwen3_vl"), choice, cost_model.block_towers)
    short = [n.replace("model.visual.blocks", "vision").replace("model.language_model.layers", "text") for n in names]
    assert sorted(short) == sorted(expected)
    workload = Workload([50], images=[(1, 8, 8)])
    billed = cost_model.count(workload, recompute=choice).recompute
    spelled = as_choice(dict.fromkeys(names, {"attention"} if choice.endswith("-attention") else ()))
    assert billed == cost_model.count(workload, recompute=spelled).recompute
    assert (billed > 0) == bool(names)


def test_a_choice_of_no_block_is_an_error():
    with pytest.raises(ConfigError, match=r"'every:7' chooses none of the model's 2 blocks. The longest tower has 2"):
        recompute_blocks(model_of("qwen3"), "every:7")


def test_a_tower_that_the_model_has_not_is_an_error():
    towers = tiny_ledger("qwen3").block_towers
    with pytest.raises(ConfigError, match=r"'vision:full': the model has no vision tower .* Its towers are language"):
        recompute_blocks(model_of("qwen3"), "vision:full", towers)


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
    return sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if str(op).startswith(("aten.mm", "aten.addmm"))
    )


@pytest.mark.parametrize(
    ("choice", "num_blocks", "compiled"),
    [
        ("full", 2, False),
        ("every:2", 1, False),
        ("model.layers.0", 1, False),
        pytest.param("every:2", 1, True, marks=pytest.mark.slow),
        pytest.param("full", 2, True, marks=pytest.mark.slow),
    ],
)
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
    billed = tiny_ledger("qwen3").count(Workload([20, 13, 7]), recompute=f"{choice},-attention")
    assert billed.recompute == num_blocks * each


def test_blocks_are_found_where_the_ledger_has_them():
    for family in ("qwen3", "qwen3_moe", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"):
        names = {block.name for block in blocks(model_of(family))}
        assert {row.block for row in tiny_ledger(family).rows if row.block} == names


def with_images(inputs, grids, generator):
    """A pack with images in its first segment."""
    patches = sum(h * w for h, w in grids)
    inputs["input_ids"][0, : patches // 4] = models.SPECIAL_TOKENS["image_token_id"]
    inputs["pixel_values"] = torch.randn(patches, 3 * 2 * models.PATCH**2, generator=generator)
    inputs["image_grid_thw"] = torch.tensor([(1, h, w) for h, w in grids])
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == models.SPECIAL_TOKENS["image_token_id"]).int()
    inputs["position_ids"] = inputs["position_ids"].expand(3, 1, -1)
    return inputs


def backward_under(family, choice, batch, *, compiled):
    """Loss and gradients of a step, and the forwards of attention that its backward ran."""
    torch._dynamo.reset()
    model = model_of(family)
    recompute_blocks(model, choice, tiny_ledger(family).block_towers)
    if compiled:
        compile_blocks(model, CompileWatch(is_strict=True), backend="aot_eager_decomp_partition")
    loss = model(**batch).logits.logsumexp(-1).sum()
    with attention_calls(compiled=compiled) as calls:
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], calls.count


def batch_of(family):
    torch.manual_seed(1)
    batch = pack([40, 13, 7])
    if family in models.VISION_FAMILIES:
        batch = with_images(batch, [(4, 6), (8, 8)], torch.Generator().manual_seed(2))
    return batch


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss_sinks", "mistral_sliding", "qwen3_vl", "qwen2_5_vl"])
def test_attention_that_is_kept_never_runs_again(family):
    batch = batch_of(family)
    plain, none = backward_under(family, "none", batch, compiled=False)
    _, full = backward_under(family, "full", batch, compiled=False)
    kept, again = backward_under(family, "full,-attention", batch, compiled=False)
    assert (none, again) == (0, 0)
    assert full > 0
    assert all(map(torch.equal, kept, plain))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_the_blocks_of_one_tower_run_again_alone_and_change_no_gradient(family):
    batch = batch_of(family)
    plain, _ = backward_under(family, "none", batch, compiled=False)
    _, of_all = backward_under(family, "full", batch, compiled=False)
    again = {}
    for tower, other in (("vision", "language"), ("language", "vision")):
        gradients, again[tower] = backward_under(family, f"{tower}:full", batch, compiled=False)
        assert all(
            (mine - theirs).norm() <= 1e-6 * theirs.norm() for mine, theirs in zip(gradients, plain, strict=True)
        )
        _, beside_kept = backward_under(family, f"{other}:full,-attention,{tower}:full", batch, compiled=False)
        assert beside_kept == again[tower] > 0
    assert sum(again.values()) == of_all


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "gpt_oss_sinks",
        "mistral_sliding",
        "qwen3_vl",
        "qwen2_5_vl",
    ],
)
def test_compiled_attention_that_is_kept_never_runs_again(family):
    batch = batch_of(family)
    plain, _ = backward_under(family, "none", batch, compiled=True)
    kept, again = backward_under(family, "full,-attention", batch, compiled=True)
    assert again == 0
    for mine, theirs in zip(kept, plain, strict=True):
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.slow
def test_compiled_attention_that_is_not_kept_is_seen_to_run_again():
    _, full = backward_under("qwen3", "full", batch_of("qwen3"), compiled=True)
    assert full > 0


def products_again(family, choice, batch, *, compiled=False):
    """FLOPs of products that a choice adds to a backward, and the norms of what it changes of loss and gradients."""
    runs = []
    for chosen in ("none", choice):
        torch._dynamo.reset()
        model, ledger = model_of(family), tiny_ledger(family)
        recompute_blocks(model, chosen, ledger.block_towers, ledger.rows)
        if compiled:
            compile_blocks(model, CompileWatch(is_strict=True), backend="aot_eager_decomp_partition")
            backward_products(model, batch)  # compiles
            model.zero_grad()
        flops = backward_products(model, batch)
        runs.append((flops, [p.grad for p in model.parameters() if p.grad is not None]))
    (plain, gradients), (again, others) = runs
    return again - plain, [(mine - one).norm() / one.norm() for mine, one in zip(others, gradients, strict=True)]


KEPT = ("full,-attention", "full,-attention,-projections", "full,-attention,-mlp", "full,-attention,-projections,-mlp")


@pytest.mark.parametrize(
    ("family", "choice", "compiled"),
    [
        *((f, c, False) for f in ("qwen3", "gpt2", "gemma3_sliding", "qwen3_vl", "qwen2_5_vl") for c in KEPT),
        ("qwen3_moe", "full,-attention,-projections", False),
        *(pytest.param(f, KEPT[2], True, marks=pytest.mark.slow) for f in ("qwen3", "qwen3_vl")),
    ],
)
def test_the_products_that_are_not_kept_run_again_as_billed(family, choice, compiled):
    batch = batch_of(family)
    again, errors = products_again(family, choice, batch, compiled=compiled)
    images = [(1, 4, 6), (1, 8, 8)] if family in models.VISION_FAMILIES else []
    billed = tiny_ledger(family).count(Workload([40, 13, 7], images=images), recompute=choice)
    assert again == sum(row.recompute for row in billed.rows if not row.name.endswith(".experts"))
    assert max(errors) <= (1e-6 if compiled else 0)


@pytest.mark.parametrize(("family", "changes"), [("gemma2_softcap", {}), ("qwen3", {"attention_dropout": 0.1})])
def test_attention_without_a_kernel_cannot_be_kept(family, changes):
    model = model_of(family, **changes)
    if family == "qwen3":
        recompute_blocks(model, "full,-mlp", rows=tiny_ledger(family).rows)
        model(**pack([9]))
    recompute_blocks(model, "full")
    model(**pack([9]))
    recompute_blocks(model, "full,-attention")
    with pytest.raises(ConfigError, match=r"no kernel has .* Leave out ',-attention'"):
        model(**pack([9]))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("run", "again"), [(checkpointed, 1), (checkpointed_but(attention=True), 0)])
def test_the_kernel_of_cuda_is_kept_too(run, again, with_sinks):
    """On shapes alone, as the kernel itself has no CPU."""
    x = torch.zeros(20, 4, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    boundaries = torch.zeros(3, device="meta", dtype=torch.int32)
    sinks = torch.zeros(4, device="meta", requires_grad=True) if with_sinks else None

    def block(x):
        y = 2 * x
        return varlen_attention(y, y, y, boundaries, 12, True, None, 0.3, sinks).sin()

    out = run(block, x).sum()
    with attention_calls(compiled=False) as calls:
        out.backward()
    assert calls.count == again


def test_the_kernels_that_are_kept_exist():
    import torch.nn.attention.varlen

    known = set(torch._C._dispatch_get_all_op_names())
    assert {name for name in _ATTENTION if not name.startswith("flash_attn")} <= known


def held_after_forward(family, choice, batch, *, compiled):
    """Bytes of the storages of a graph that a forward leaves behind: what checkpoints hold, or compiled code saved."""
    torch._dynamo.reset()
    model, ledger, saved = model_of(family), tiny_ledger(family), {}
    recompute_blocks(model, choice, ledger.block_towers, ledger.rows)
    if compiled:
        compile_blocks(model, CompileWatch(is_strict=True), backend="aot_eager_decomp_partition")
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}

    def note(tensor):
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    gc.collect()
    before = {id(one) for one in gc.get_objects()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor) if compiled else nullcontext():
        logits = model(**batch).logits
    if not compiled:  # what checkpoints keep passes no hook
        for one in gc.get_objects():
            if isinstance(one, torch.Tensor) and id(one) not in before:
                note(one)
    del logits
    return sum(saved.values())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl"])
def test_what_is_kept_has_the_bytes_that_are_planned(family, compiled):
    batch, images = batch_of(family), [(1, 4, 6), (1, 8, 8)] if family in models.VISION_FAMILIES else []
    ledger, saved = tiny_ledger(family), saved_by_block(model_of(family))
    sizes = block_bytes(ledger, saved, Workload([40, 13, 7], images=images), fused=compiled, compute_bytes=4)
    full = held_after_forward(family, "full", batch, compiled=compiled)
    for choice in KEPT[-1:] if compiled else KEPT:
        kinds = recomputed_blocks(choice, list(sizes))
        planned = sum(size.kept(kinds[name]) - size.kept() for name, size in sizes.items())
        assert held_after_forward(family, choice, batch, compiled=compiled) - full == planned > 0


def test_adapters_run_again_beside_layers_that_are_kept():
    choice, batch, runs = KEPT[-1], pack([20, 13, 7]), []
    ledger = tiny_ledger("qwen3").lora(4, ["q_proj", "up_proj"])
    modules = adapter_modules(tiny_ledger("qwen3"), ["q_proj", "up_proj"])
    for chosen in ("none", choice):
        model = model_of("qwen3")
        add_adapters(model, modules, rank=4, alpha=4, dropout=0, base="")
        initialise_adapters(model, 0, torch.device("cpu"))
        recompute_blocks(model, chosen, ledger.block_towers, ledger.rows)
        runs.append(backward_products(model, batch))
    assert runs[1] - runs[0] == ledger.count(Workload([20, 13, 7]), recompute=choice).recompute > 0


def test_a_kind_that_the_blocks_have_not_is_an_error():
    with pytest.raises(ConfigError, match=r"no linear layers of mlp to keep. Leave out ',-mlp'"):
        recompute_blocks(model_of("qwen3_moe"), "full,-mlp", rows=tiny_ledger("qwen3_moe").rows)
