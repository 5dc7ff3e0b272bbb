"""What blocks save, against real forwards: plain ones and compiled ones, byte for byte or nearly."""

from fractions import Fraction

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from headway.config import ModelConfig
from headway.count import Workload
from headway.count.activations import (
    PRECISIONS,
    SavedActivations,
    SavedBlock,
    bytes_of,
    from_lists,
    shipped_activations,
    to_lists,
)
from headway.count.models import presets, shipped_models
from headway.errors import CostModelError
from headway.optim import freeze, put_adapters
from headway.tracing import trace
from headway.tracing.activations import saved_by_block, saved_of_config
from headway.tracing.build import preset_config, with_layers
from helpers.models import tiny_config, tiny_model
from tools.shipped_models import trace_activations

TOKENS = 67
H, INNER, LAYERS = 32, 48, 2  # of the tiny models


def tiny(family, dtype):
    return tiny_model(family, attn_implementation="sdpa", dtype=dtype).train()


def really_saved(run, leave_out):
    """Bytes of the distinct storages that autograd saves while something runs; shapes of small numbers aside."""
    seen, given = {}, {t.untyped_storage().data_ptr() for t in leave_out}

    def pack(tensor):
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in given:
            seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return seen.values()


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_blocks_of_a_real_forward_save_what_is_traced(family, dtype):
    model = tiny(family, dtype)
    ids = torch.randint(7, 160, (1, TOKENS))
    keeps = []  # what is saved is freed with the graph, and its memory would be given to others
    found = really_saved(lambda: keeps.append(model(input_ids=ids, use_cache=False).logits), list(model.parameters()))
    heads, tables = LAYERS * 4 * 4 * TOKENS, 2 * 8 * dtype.itemsize * TOKENS  # log-sum-exps; cosines and sines
    saved = saved_by_block(model)
    total = sum(bytes_of(block.plain, Workload([TOKENS])) for block in saved.blocks.values())
    assert saved.left_out == ()
    assert total == sum(t.untyped_storage().nbytes() for t in found) - heads - tables


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_compiled_block_saves_about_what_fused_operations_are_said_to(family):
    model = tiny(family, torch.bfloat16)
    layer = torch.compile(model.model.layers[1])
    x = torch.randn(1, TOKENS, H, dtype=torch.bfloat16, requires_grad=True)
    angles = model.model.rotary_emb(x, torch.arange(TOKENS)[None])
    keeps = []
    found = really_saved(
        lambda: keeps.append(layer(x, position_embeddings=angles, attention_mask=None)),
        [*model.parameters(), *angles],
    )
    rows = [t for t in found if t.shape[-1] > 1 and t.dtype == torch.bfloat16]  # statistics aside
    real = sum(t.nbytes for t in rows)
    block = saved_by_block(model).blocks["model.layers.1"]
    said = bytes_of(block.fused, Workload([TOKENS]))
    assert said == pytest.approx(real, rel=0.03)
    assert said < bytes_of(block.plain, Workload([TOKENS]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own uses
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_compiled_blocks_never_keep_more_than_plain_ones(family, rank):
    """PyTorch's partitioner decides what a compiled graph keeps; nothing is compiled to code."""

    def learning():
        model = tiny(family, torch.bfloat16)
        if rank:
            learns = ModelConfig(path="x", lora={"rank": rank})
            put_adapters(model, freeze(model, trace(model), learns.freeze), learns)
            for module in model.modules():  # adapters are shapes until their values are loaded or drawn
                for name, parameter in module.named_parameters(recurse=False):
                    if parameter.is_meta:
                        module.register_parameter(name, torch.nn.Parameter(torch.zeros_like(parameter, device="cpu")))
        return model

    torch.compiler.reset()  # torch stops compiling a layer's code after eight other models of it
    kept = []
    for is_compiled in (False, True):
        model = learning()
        for path in filter(None, saved_by_block(model).blocks if is_compiled else ()):
            model.get_submodule(path).compile(backend="aot_eager_decomp_partition")
        storages = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        seen = {}

        def pack(tensor, seen=seen, storages=storages):
            storage = tensor.untyped_storage()
            if tensor.is_floating_point() and storage._cdata not in storages:
                seen[storage._cdata] = storage  # held: an address stays its own
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False)
        kept.append(sum(storage.nbytes() for storage in seen.values()))
    assert 0 < kept[1] <= kept[0]
    saved = saved_by_block(learning()).blocks.values()
    assert all(
        bytes_of(block.fused, Workload([TOKENS])) <= bytes_of(block.plain, Workload([TOKENS])) for block in saved
    )
    # statistics of norms and of attention are small, but these models are narrow
    assert sum(bytes_of(block.fused, Workload([TOKENS])) for block in saved) == pytest.approx(kept[1], rel=0.2)


def test_a_recomputed_block_keeps_its_input_alone():
    model = tiny("llama", torch.float32)
    saved = saved_by_block(model)
    layer = model.model.layers[0]
    x = torch.randn(1, TOKENS, H, requires_grad=True)
    angles = model.model.rotary_emb(x, torch.arange(TOKENS)[None])
    held = []

    def run(hidden):
        return layer(hidden, position_embeddings=angles, attention_mask=None)

    found = really_saved(lambda: held.append(checkpoint(run, x, use_reentrant=False)), [*model.parameters(), *angles])
    assert [tuple(t.shape) for t in found if t.numel()] in ([], [(1, TOKENS, H)])  # its graph holds x, and no more
    entries = {name: block.entry for name, block in saved.blocks.items() if name}
    assert entries == {name: {"tokens": Fraction(4 * H)} for name in entries}
    assert len(entries) == LAYERS


def test_a_block_by_hand():
    """A Llama layer, in bfloat16, by fused operations.

    Products read: two normalised inputs, queries, keys and values, attention's output and the gated middle; they made
    what enters norms and gates: the layer's input, the output projection's result, gate and up.
    """
    block = saved_by_block(tiny("llama", torch.bfloat16)).blocks["model.layers.1"]
    read = H + (H + 2 * 16) + H + H + INNER
    made = H + H + 2 * INNER
    assert dict(block.fused) == {"tokens": 2 * (read + made)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_gives_its_output_and_a_sum_for_each_head(dtype):
    model = tiny("qwen3", dtype)
    attention = saved_by_block(model).blocks["model.layers.1"].attention
    q, k = torch.randn(1, 4, TOKENS, 8, dtype=dtype), torch.randn(1, 4, TOKENS, 8, dtype=dtype)
    given = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, True)
    assert attention == {"tokens": Fraction(sum(t.nbytes for t in given), TOKENS)}


def test_vision_blocks_save_by_the_patch_and_text_blocks_by_the_token():
    saved = saved_of_config(tiny_config("qwen3_vl"), "bfloat16")
    assert set(saved.blocks["model.visual.blocks.0"].plain) == {"patches"}
    assert set(saved.blocks["model.language_model.layers.1"].plain) == {"tokens"}
    assert set(saved.blocks[""].plain) == {"patches", "tokens"}


def test_autocast_keeps_what_flows_between_blocks_in_float32():
    mixed, half = (saved_of_config(tiny_config("qwen3"), p).blocks["model.layers.1"] for p in PRECISIONS[1::-1])
    assert mixed.entry["tokens"] == 2 * half.entry["tokens"] == 4 * H


def test_what_ships_reads_back_as_it_was_written():
    rows = {"tokens": Fraction(7, 2)}
    saved = SavedActivations({"": SavedBlock(rows, rows, {}, {})} | {
        f"model.layers.{i}": SavedBlock(rows, {}, {"patches": Fraction(i // 2)}, rows) for i in range(4)
    })  # fmt: skip
    lists = to_lists(saved)
    assert len(lists) == 3  # outside, and two kinds of layers
    assert from_lists(lists) == saved


def test_every_shipped_model_has_its_activations():
    for name in shipped_models():
        layers = [block for block in shipped_activations(name, "bfloat16").blocks if block]
        config = presets()[name].get("text_config", presets()[name])
        depth = config.get("num_hidden_layers") or config["n_layer"]
        tower = presets()[name].get("vision_config", {})
        assert len(layers) == depth + tower.get("depth", tower.get("num_hidden_layers", 0))
    with pytest.raises(CostModelError, match="no saved activations of 'nothing'"):
        shipped_activations("nothing", "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", pytest.param("qwen3-vl-2b", marks=pytest.mark.slow)])
def test_what_ships_is_what_is_traced(name):
    for precision, traced in trace_activations(name).items():
        assert from_lists(traced) == shipped_activations(name, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["gpt2", pytest.param("qwen3-vl-2b", marks=pytest.mark.slow)])
def test_the_first_blocks_of_what_ships_are_what_is_traced(name, precision):
    traced = saved_of_config(with_layers(preset_config(name), 2), precision).blocks
    shipped = shipped_activations(name, precision).blocks
    blocks = [block for block in traced if block]
    assert len(blocks) == (2 if name == "gpt2" else 4)
    assert [traced[block] for block in blocks] == [shipped[block] for block in blocks]
