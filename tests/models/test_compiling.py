"""Compiled blocks: one compilation for packs of every size, the same numbers, and recompilations named."""

import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from headway.errors import TrainingError
from headway.models.attention import use_attention
from headway.models.compiling import CompileWatch, WarmUp, compile_blocks
from headway.models.recompute import recompute_blocks
from helpers import models
from helpers.counter import attention_calls
from helpers.processes import run_processes

PACKS = ([31], [20, 13, 7], [5, 5], [2, 40, 3, 9, 16])


@pytest.fixture(autouse=True)
def _compile_afresh():
    torch._dynamo.reset()
    counters.clear()


def model_of(family):
    config = models.tiny_config(family)
    kind = AutoModelForImageTextToText if family in models.VISION_FAMILIES else AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(config).train()
    use_attention(model)
    return model


def pack(lengths, grids=()):
    """Random tokens in segments; the images of a vision model stand in the first one."""
    generator = torch.Generator().manual_seed(sum(lengths))
    lengths = [lengths[0] + sum(h * w // 4 for h, w in grids), *lengths[1:]]
    ids = torch.randint(7, 150, (1, sum(lengths)), generator=generator)
    inputs = {
        "pack_cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "pack_max_seqlen": max(lengths),
        "use_cache": False,
    }
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    if grids:
        num_patches = sum(h * w for h, w in grids)
        ids[0, : num_patches // 4] = models.SPECIAL_TOKENS["image_token_id"]
        inputs["pixel_values"] = torch.randn(num_patches, 3 * 2 * models.PATCH**2, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([(1, h, w) for h, w in grids])
        inputs["mm_token_type_ids"] = (ids == models.SPECIAL_TOKENS["image_token_id"]).int()
        positions = positions.expand(3, 1, -1)
    return {"input_ids": ids, "position_ids": positions, **inputs}


def gradients(model, inputs):
    model.zero_grad()
    out = model(**inputs).logits
    out.logsumexp(-1).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check_packs(family, packs, num_graphs):
    plain, compiled, watch = model_of(family), model_of(family), CompileWatch(is_strict=True)
    compile_blocks(compiled, watch, backend="aot_eager")
    for inputs in packs:
        for mine, theirs in zip(gradients(compiled, inputs), gradients(plain, inputs), strict=True):
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
        assert not watch.since().guards
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_graphs"),
    [
        ("gpt_oss_sinks", 2),
        *((family, 1) for family in ("qwen3", "qwen3_moe", "gpt2", "mistral_sliding")),
    ],
)
def test_each_kind_of_layer_compiles_once_for_packs_of_every_size(family, num_graphs):
    check_packs(family, [pack(lengths) for lengths in PACKS], num_graphs)


@pytest.mark.slow
def test_sums_over_few_and_over_many_slots_share_their_code():
    """Inductor's code for a CPU adds more than 4,096 values in cascades; with 4 heads that is 1,024 slots."""
    plain, compiled, watch = model_of("qwen3"), model_of("qwen3"), CompileWatch(is_strict=True)
    compile_blocks(compiled, watch)
    for slots in (300, 900, 1500, 3000, 5000, 200):
        inputs = pack([100] * (slots // 100))
        for mine, theirs in zip(gradients(compiled, inputs), gradients(plain, inputs), strict=True):
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
        assert not watch.since().guards


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe"],
)
def test_each_tower_compiles_once_for_images_of_every_number_and_size(family):
    images = ([(2, 2)], [(4, 6), (2, 8)], [(8, 8), (2, 4), (6, 2)])
    packs = [pack(lengths, grids) for lengths, grids in zip(PACKS[1:], images, strict=True)]
    check_packs(family, [packs[0], pack(PACKS[0]), *packs[1:]], num_graphs=2)


@pytest.fixture
def compiled():
    """A compiled model that is warm, and its watch."""

    def build(**options):
        model, watch = model_of("qwen3"), CompileWatch(**options)
        compile_blocks(model, watch, backend="eager")
        for lengths in PACKS[:2]:
            gradients(model, pack(lengths))
        return model, watch

    return build


def test_a_recompilation_is_counted_and_named_once(compiled):
    model, watch = compiled()
    first = watch.since()
    assert first.happened
    assert not first.guards
    gradients(model.double(), pack([20, 13]))
    again = watch.since()
    assert again.happened
    assert len(again.guards) == len(again.news) == 1
    assert again.guards[0].startswith("forward: tensor")
    assert "dtype mismatch. expected Float, actual Double" in again.guards[0]
    gradients(model, pack([20, 13]))
    assert watch.since() == (False, (), ())


@pytest.mark.slow
def test_where_there_are_two_kinds_of_layers_the_guards_of_both_are_named():
    model, watch = model_of("gpt_oss_sinks"), CompileWatch()
    compile_blocks(model, watch, backend="eager")
    for lengths in PACKS[:2]:
        gradients(model, pack(lengths))
    assert not watch.since().guards
    gradients(model.double(), pack([20, 13]))
    guards = watch.since().guards
    assert len(guards) == 2
    assert all("dtype mismatch. expected Float, actual Double" in guard for guard in guards)
    assert any(" and " in guard for guard in guards)


@pytest.mark.parametrize(
    ("sizes", "num_before"),
    [([8, 9, 8], 2), ([8, 8, 8, 9, 8, 9, 10], 3), ([8, 9, 10, 8], 2)],
)
def test_two_forwards_and_the_first_of_another_size_are_the_warm_up(sizes, num_before):
    warm_up = WarmUp()
    assert sum(not warm_up.is_over(size) for size in sizes) == num_before


def test_a_recompilation_is_an_error_where_it_is_said_to_be(compiled):
    model, watch = compiled(is_strict=True)
    watch.since()
    model.double()
    gradients(model, pack([20, 13]))
    with pytest.raises(TrainingError, match=r"1 recompilations after the warm-up.*dtype mismatch.*recompiles=warn"):
        watch.since()


def test_the_first_evaluation_may_compile(compiled):
    model, watch = compiled()
    watch.since()
    model.eval()
    for lengths in PACKS:
        with torch.no_grad():
            model(**pack(lengths))
    assert watch.since() == (True, (), ())


def test_giving_up_on_a_function_is_named_even_in_the_warm_up():
    model, watch = model_of("gpt_oss_sinks"), CompileWatch()  # two kinds of layers: one too many
    compile_blocks(model, watch, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        model(**pack([20, 13]))
    (guard,) = watch.since().guards
    assert "it now runs uncompiled, because torch's recompile limit is reached" in guard
    assert CompileWatch(is_strict=True).since() == (False, (), ())  # of another run in the same process


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "num_graphs"),
    [
        ("every:2,-attention", 2),
        *(pytest.param(*row, marks=pytest.mark.long) for row in (("none", 1), ("every:2", 2), ("full,-attention", 1))),
    ],
)
def test_sharded_blocks_compile_the_same(recompute, num_graphs):
    ended = run_processes([sys.executable, Path(__file__), recompute, "aot_eager"], 2)
    for process in ended:
        assert process.stdout.split() == ["same", str(num_graphs)]


@pytest.mark.dist
@pytest.mark.slow
def test_sharded_blocks_keep_attention_uncompiled():
    for process in run_processes([sys.executable, Path(__file__), "full,-attention", ""], 2):
        assert process.stdout.split() == ["same", "0"]


def _sharded(recompute, backend):
    """One of the processes of the test before."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard

    init_process_group("gloo")
    plain, model = model_of("qwen3"), model_of("qwen3")
    recompute_blocks(model, recompute)
    watch = CompileWatch(is_strict=True)
    if backend:
        compile_blocks(model, watch, backend=backend)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for lengths in PACKS:
        whole = gradients(plain, pack(lengths))
        model.zero_grad()
        out = model(**pack(lengths)).logits
        with attention_calls(compiled=bool(backend)) as calls:
            out.logsumexp(-1).sum().backward()
        assert (calls.count == 0) == (recompute == "none" or recompute.endswith("-attention"))
        slices = [p.grad for p in model.parameters() if p.grad is not None]
        for mine, theirs in zip([out, *(part.full_tensor() for part in slices)], whole, strict=True):
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
        watch.since()
    sys.stdout.write(f"same {counters['stats']['unique_graphs']}")
    destroy_process_group()


if __name__ == "__main__":
    _sharded(*sys.argv[1:])
