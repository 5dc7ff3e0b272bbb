"""The bytes of a step: derived by hand, held against real tensors, and never more than a real step moves."""

import math
from collections import Counter
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.count import Workload
from headway.errors import UsageError
from headway.meter.memory_traffic import mbu
from headway.meter.model_traffic import state_bytes, traffic_of
from headway.tracing import trace
from headway.tracing.build import model_class, preset_config, with_layers
from helpers.models import tiny_model

TOKENS = 67
# of the tiny language models: hidden size, heads x head size, key-value heads x head size, MLP size, vocabulary, layers
H, Q, KV, INNER, V, LAYERS = 32, 32, 16, 48, 160, 2


def tiny(family, dtype=torch.bfloat16, attention="sdpa"):
    return tiny_model(family, attn_implementation=attention, dtype=dtype).train()


def llama_parameters():
    """Elements of what products read, and of all: embedding and head, four projections, three of the MLP, norms."""
    products = V * H + LAYERS * (2 * H * Q + 2 * H * KV + 3 * H * INNER)
    return products, products + V * H + (2 * LAYERS + 1) * H


def perceptron():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 6))


def rows(workload):
    return (torch.zeros(1, workload.tokens, 8),)


def test_a_perceptron_by_hand():
    model = perceptron()
    traffic = traffic_of(model, torch.optim.AdamW(model.parameters()), inputs=rows)
    step = traffic.bytes_of(Workload([10, 20]))
    parameters = 8 * 32 + 32 + 32 * 6 + 6
    assert step.weights == 4 * (8 * 32 + 32 * 6) + 4 * 32 * 6  # the batch needs no gradient: no dgrad of the first
    assert step.gradients == 2 * 4 * parameters  # written, and read by the update
    assert step.optimizer == 2 * 4 * 3 * parameters  # the parameter and two moments, each read and written
    assert step.activations == 2 * 4 * 30 * 32  # what the ReLU gives is all that is kept, once
    assert step.total == step.weights + step.gradients + step.optimizer + step.activations


def test_accumulation_moves_weights_and_gradients_again_and_the_optimizer_once():
    model = perceptron()
    traffic = traffic_of(model, torch.optim.SGD(model.parameters(), momentum=0.9), inputs=rows)
    once, four = traffic.bytes_of(Workload([40])), traffic.bytes_of(Workload([10] * 4), num_batches=4)
    gradients = sum(p.nbytes for p in model.parameters())
    assert four.weights == 4 * once.weights
    assert once.gradients == 2 * gradients
    assert four.gradients == once.gradients + 3 * 2 * gradients  # each later one reads the sum and writes it
    assert four.optimizer == once.optimizer == 2 * 2 * gradients
    assert four.activations == once.activations


def test_steps_add_up_and_a_skipped_one_updates_nothing():
    model = perceptron()
    traffic = traffic_of(model, torch.optim.AdamW(model.parameters()), inputs=rows)
    one = traffic.bytes_of(Workload([40]), num_batches=2)
    three = traffic.bytes_of(Workload([40] * 3), num_batches=6, num_steps=3)
    assert three.total == 3 * one.total
    skipped = traffic.bytes_of(Workload([40] * 3), num_batches=6, num_steps=3, num_skipped=1)
    assert three.optimizer - skipped.optimizer == one.optimizer
    assert three.gradients - skipped.gradients == sum(p.nbytes for p in model.parameters())


def test_a_forward_alone_reads_the_weights_once():
    traffic = traffic_of(perceptron(), inputs=rows)
    step = traffic.bytes_of(Workload([40]))
    with_reference = traffic.bytes_of(Workload([40]), num_forward_only=1)
    assert with_reference.weights - step.weights == 4 * (8 * 32 + 32 * 6)
    assert with_reference.total - step.total == with_reference.weights - step.weights


def test_without_an_optimizer_gradients_are_only_written():
    model = perceptron()
    step = traffic_of(model, inputs=rows).bytes_of(Workload([40]))
    assert (step.gradients, step.optimizer) == (sum(p.nbytes for p in model.parameters()), 0)


def test_a_llama_by_hand():
    model = tiny("llama")
    step = traffic_of(model, torch.optim.AdamW(model.parameters())).bytes_of(Workload([TOKENS]))
    products, everything = llama_parameters()
    assert everything == sum(p.numel() for p in model.parameters())
    norm = 4 * H + 4 + 2 * H  # its input in fp32, one number a token, and what the scale multiplies
    layer = 2 * (norm + 2 * H) + 2 * (Q + 2 * KV) + 2 * Q + 4 * 2 * INNER  # gate, SiLU of it, up, and their product
    assert step.weights == 2 * 2 * products  # every product's input has a gradient: embeddings are trained
    assert step.gradients == 2 * 2 * everything
    assert step.optimizer == 2 * 2 * 3 * everything
    assert step.activations == 2 * TOKENS * (LAYERS * layer + norm + 2 * H)


def test_a_gpt2_by_hand():
    model = tiny("gpt2")
    step = traffic_of(model).bytes_of(Workload([TOKENS]))
    inner = 4 * H
    norm = 2 * H + 2 * 4  # its input, mean and inverse deviation in fp32
    gelu = 4 * 2 * inner  # tanh's polynomial: its argument, powers and factors
    layer = 2 * (norm + 2 * H) + 3 * 2 * H + 2 * H + gelu + 2 * inner
    assert step.activations == 2 * TOKENS * (LAYERS * layer + norm + 2 * H)
    assert step.weights == 2 * 2 * (V * H + LAYERS * (4 * H * H + 2 * H * inner))  # positions are looked up


def test_a_compiled_model_keeps_what_products_and_attention_read():
    layer = 2 * (2 * H + Q + 2 * KV + Q + INNER)  # both norms' results, queries, keys, values, attention, the MLP's
    expected = 2 * TOKENS * (LAYERS * layer + 2 * H)
    whole, block = torch.compile(tiny("llama"), backend="eager"), tiny("llama")
    block.model.layers[0].compile(backend="eager")
    for compiled in (whole, block):
        assert traffic_of(compiled).bytes_of(Workload([TOKENS])).activations == expected
    mixed = traffic_of(tiny("llama", torch.float32), autocast=torch.bfloat16, compiled=True)
    assert mixed.bytes_of(Workload([TOKENS])).activations == expected


def test_qwen3_0_6b_with_three_layers_by_hand():
    config = with_layers(preset_config("qwen3-0.6b"), 3)
    with torch.device("meta"):
        model = model_class(config)._from_config(config, dtype=torch.bfloat16)
    hidden, q, kv, inner, layers, vocabulary = 1024, 16 * 128, 8 * 128, 3072, 3, 151936
    traffic = traffic_of(model, torch.optim.AdamW(model.parameters()), compiled=True)
    step = traffic.bytes_of(Workload([4096] * 2))
    products = vocabulary * hidden + layers * hidden * (2 * q + 2 * kv + 3 * inner)
    everything = products + hidden + layers * (2 * hidden + 2 * 128)  # the embedding is tied to the head
    assert step.weights == 2 * 2 * products
    assert step.gradients == 2 * 2 * everything
    assert step.optimizer == 2 * 2 * 3 * everything
    assert step.activations == 2 * 8192 * 2 * (layers * (2 * hidden + 2 * q + 2 * kv + inner) + hidden)


def test_recomputation_reads_the_blocks_weights_once_more():
    model = tiny("llama")
    plain, full = (traffic_of(model, recompute=choice).bytes_of(Workload([TOKENS])) for choice in ("none", "full"))
    again = LAYERS * (2 * H * Q + 2 * H * KV + 2 * H * INNER)  # it stops before a block's closing projection
    assert full.weights - plain.weights == 2 * again
    assert full.activations == plain.activations  # kept while the block's backward runs


def test_frozen_weights_are_read_and_get_no_gradient():
    model = tiny("llama").requires_grad_(False)
    down = model.model.layers[1].mlp.down_proj.weight.requires_grad_(True)
    step = traffic_of(model, torch.optim.AdamW([down])).bytes_of(Workload([TOKENS]))
    products, _ = llama_parameters()
    assert step.weights == 2 * products + 2 * V * H  # backward goes through the head alone
    assert step.gradients == 2 * down.nbytes
    assert step.optimizer == 2 * 3 * down.nbytes
    # the projection's input; the last norm's own input, inverse deviation and scale's gradient is not needed
    assert step.activations == 2 * TOKENS * (2 * INNER + 4 * H + 4)


def test_of_experts_those_that_a_token_visits_are_read():
    model = tiny("qwen3_moe")
    step = traffic_of(model, torch.optim.AdamW(model.parameters())).bytes_of(Workload([TOKENS]))
    config = model.config
    one = 3 * H * config.moe_intermediate_size
    products = V * H + LAYERS * (2 * H * Q + 2 * H * KV + H * 4 + config.num_experts_per_tok * one)
    everything = sum(p.numel() for p in model.parameters())
    assert step.weights == 2 * 2 * products
    assert step.gradients == 2 * 2 * everything  # their gradients are one dense tensor
    assert step.optimizer == 2 * 2 * 3 * everything


def test_a_tower_moves_nothing_in_micro_batches_without_images():
    model = tiny("qwen3_vl")
    cost = trace(model)
    traffic = traffic_of(model, torch.optim.AdamW(model.parameters()), cost_model=cost)
    text = traffic.bytes_of(Workload([TOKENS]))
    assert text.optimizer == 2 * 3 * sum(p.nbytes for p in model.model.language_model.parameters()) + (
        2 * 3 * model.lm_head.weight.nbytes
    )
    pictures = Workload([TOKENS], images=[(1, 4, 6)])
    both = traffic.bytes_of(pictures)
    assert both.optimizer == 2 * 3 * sum(p.nbytes for p in model.parameters())
    mixed = traffic.bytes_of(Workload([TOKENS]) + pictures, num_batches=2)
    assert mixed.weights == text.weights + both.weights
    two = traffic.bytes_of(pictures + pictures, num_batches=2, num_with_towers=2)
    assert two.weights == 2 * both.weights


def _saved_by_autograd(model, batch, context):
    """Add up the floating-point storages that autograd really saves, without parameters and the batch's own."""
    storages = {}

    def note(tensor):
        if tensor.is_floating_point():
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), context:
        logits = model(**batch, use_cache=False).logits
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    weights |= {b.untyped_storage().data_ptr() for b in model.buffers()}
    return logits, sum(s.nbytes() for pointer, s in storages.items() if pointer not in weights)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *[(family, torch.bfloat16) for family in ("gpt2", "llama", "qwen3", "qwen3_tied", "qwen3_moe")],
        ("llama", torch.float32),
        *[
            pytest.param(family, torch.float32, marks=pytest.mark.slow)
            for family in ("gpt2", "qwen3", "qwen3_tied", "qwen3_moe")
        ],
    ],
)
def test_a_real_forward_saves_what_the_trace_says(family, dtype):
    model = tiny(family, dtype)
    batch = {"input_ids": torch.randint(10, 160, (2, TOKENS))}
    _, saved = _saved_by_autograd(model, batch, nullcontext())
    traced = traffic_of(model).bytes_of(Workload([TOKENS] * 2)).activations
    # beside it, attention's log-sum-exp: 4 bytes a token and head; and tables of cosines and sines, by position
    heads = model.config.num_attention_heads
    statistics = model.config.num_hidden_layers * 4 * heads * 2 * TOKENS
    if family != "gpt2":
        beside = 2 * TOKENS * dtype.itemsize * Q // heads
    else:  # on the CPU, its norms' mean and inverse deviation are of the input's dtype; elsewhere, and here, fp32
        beside = -(2 * LAYERS + 1) * 2 * 2 * TOKENS * (4 - dtype.itemsize)
    assert saved == traced // 2 + statistics + beside


@pytest.mark.parametrize("family", ["gemma2_softcap", "gemma3_sliding", "deepseek_v3", "mixtral"])
def test_a_real_forward_saves_no_less_than_the_trace_says(family):
    model = tiny(family, attention="eager" if family == "gemma2_softcap" else "sdpa")
    _, saved = _saved_by_autograd(model, {"input_ids": torch.randint(10, 160, (2, TOKENS))}, nullcontext())
    assert 0 < traffic_of(model).bytes_of(Workload([TOKENS] * 2)).activations // 2 <= saved


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_real_forward_under_autocast_saves_what_the_trace_says(family):
    model = tiny(family, torch.float32)
    batch = {"input_ids": torch.randint(10, 160, (1, TOKENS))}
    weights = Counter(p.numel() * 2 for p in model.parameters() if p.dim() > 1)
    _, saved = _saved_by_autograd(model, batch, torch.autocast("cpu", torch.bfloat16))
    traffic = traffic_of(model, autocast=torch.bfloat16)
    traced = traffic.bytes_of(Workload([TOKENS]))
    heads = model.config.num_attention_heads
    statistics = LAYERS * 4 * heads * TOKENS
    tables = 0 if family == "gpt2" else 2 * TOKENS * 4 * Q // heads
    looked_up = sum(size * n for size, n in weights.items()) - traced.weights // 2  # tables of embeddings
    cast = sum(size * n for size, n in weights.items()) - looked_up
    assert saved == traced.activations // 2 + statistics + tables + cast


class _Moved(TorchDispatchMode):
    """Adds up what the operations of a step read and write: each operand and result once, views nothing."""

    def __init__(self, products):
        super().__init__()
        self.products = products  # storages of weights
        self.total, self.weights = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func._overloadpacket is not torch.ops.aten.detach:
            looked_up = func._overloadpacket in (torch.ops.aten.embedding, torch.ops.aten._unsafe_view)
            read = [] if looked_up else [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            written = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            self.total += sum(t.nbytes for t in (*read, *written))
            if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                self.weights += sum(t.nbytes for t in read if t.untyped_storage().data_ptr() in self.products)
        return out


@pytest.mark.parametrize(
    ("family", "num_batches", "kind"),
    [
        *[(family, 3, torch.optim.AdamW) for family in ("gpt2", "llama", "qwen3_tied")],
        ("llama", 1, torch.optim.SGD),
        *[
            pytest.param(family, num_batches, kind, marks=pytest.mark.slow)
            for family in ("gpt2", "llama", "qwen3_tied")
            for num_batches, kind in ((1, torch.optim.SGD), (3, torch.optim.SGD), (1, torch.optim.AdamW))
            if (family, num_batches) != ("llama", 1) or kind is torch.optim.AdamW
        ],
    ],
)
def test_a_real_step_moves_no_less(family, num_batches, kind):
    model = tiny(family, torch.float32)
    optimizer = kind(model.parameters(), lr=0.1)
    with _Moved({p.untyped_storage().data_ptr() for p in model.parameters() if p.dim() > 1}) as moved:
        for _ in range(num_batches):
            model(torch.randint(10, 160, (1, 8)), use_cache=False).logits.sum().backward()
        optimizer.step()
    step = traffic_of(model, optimizer).bytes_of(Workload([8] * num_batches), num_batches=num_batches)
    assert moved.weights == step.weights  # products read each weight in forward and for their input's gradient
    assert step.total <= moved.total


_OPTIMIZERS = {
    # what is kept of a matrix (6, 4) and of a vector (5,), in numbers
    "SGD": ({}, 0, 0),
    "SGD with momentum": ({"momentum": 0.9}, 24, 5),
    "Adam": ({}, 48, 10),
    "Adam amsgrad": ({"amsgrad": True}, 72, 15),
    "AdamW": ({}, 48, 10),
    "AdamW fused": ({"fused": True}, 48, 10),
    "Adafactor": ({}, 6 + 4, 5),  # row and column factors of a matrix; a vector's whole
    "RMSprop": ({}, 24, 5),
    "RMSprop centered": ({"centered": True, "momentum": 0.9}, 72, 15),
    "Adagrad": ({}, 24, 5),
    "Muon": ({}, 24, None),  # takes matrices alone
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_optimizer_state_before_and_after_its_first_step(name):
    options, of_matrix, of_vector = _OPTIMIZERS[name]
    parameters = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(5))][: 1 + (of_vector is not None)]
    optimizer = getattr(torch.optim, name.split()[0])(parameters, **options)
    expected = [4 * n for n in (of_matrix, of_vector) if n is not None]
    assert [state_bytes(optimizer)[id(p)] for p in parameters] == expected
    if name != "Adagrad":  # which makes its state when it is made
        assert not any(optimizer.state.values())  # nothing of the user's was touched
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert [state_bytes(optimizer)[id(p)] for p in parameters] == expected
    real = [sum(t.nbytes for t in optimizer.state[p].values() if torch.is_tensor(t) and t.dim()) for p in parameters]
    assert real == expected


def test_several_optimizers_share_the_parameters():
    model = perceptron()
    matrices = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
    vectors = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1])
    step = traffic_of(model, [matrices, vectors], inputs=rows).bytes_of(Workload([4]))
    assert step.optimizer == 2 * 4 * (2 * (8 * 32 + 32 * 6) + 3 * (32 + 6))


@pytest.fixture
def four_ranks():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    torch.distributed.destroy_process_group()


def test_fully_sharded_parameters_are_read_whole_and_updated_in_part(four_ranks):
    plain = tiny("llama", torch.float32)
    products, everything = llama_parameters()
    model = fully_shard(plain, mesh=four_ranks, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    step = traffic_of(model, optimizer).bytes_of(Workload([TOKENS] * 3), num_batches=3)
    own = everything // 4  # every first dimension divides by four
    assert step.weights == 3 * 2 * 2 * products  # gathered in bfloat16
    assert step.gradients == 3 * 2 * everything + 2 * 4 * own  # whole in each micro-batch; the shard's sum in fp32
    assert step.optimizer == 2 * 3 * 4 * own
    reference = traffic_of(tiny("llama")).bytes_of(Workload([TOKENS] * 3), num_batches=3)
    assert step.activations == reference.activations
    model(input_ids=torch.randint(10, 160, (1, 8)), use_cache=False).logits.sum().backward()
    optimizer.step()  # its state now is one rank's
    assert traffic_of(model, optimizer).bytes_of(Workload([TOKENS] * 3), num_batches=3) == step


def test_tensor_parallelism_is_refused(four_ranks):
    model = tiny("llama")
    parallelize_module(model, four_ranks, {"lm_head": ColwiseParallel()})
    with pytest.raises(UsageError, match=r"lm_head\.weight is split over ranks that share one product"):
        traffic_of(model)


def test_numbers_that_contradict_each_other_are_refused():
    traffic = traffic_of(perceptron(), inputs=rows)
    with pytest.raises(UsageError, match="a step has at least one micro-batch"):
        traffic.bytes_of(Workload([4]), num_batches=1, num_steps=2)
    with pytest.raises(UsageError, match="no more steps are skipped than there are"):
        traffic.bytes_of(Workload([4]), num_skipped=2)


def test_another_models_ledger_is_refused():
    with pytest.raises(UsageError, match="other parameters than the Sequential at hand"):
        traffic_of(perceptron(), cost_model=trace(nn.Sequential(nn.Linear(8, 3)), inputs=rows), inputs=rows)


def test_mbu_is_bytes_over_what_the_memory_could_have_moved():
    assert mbu(10**9, 0.5, 4e9) == 0.5
    assert math.isnan(mbu(10**9, 0.5, math.nan))
    with pytest.raises(UsageError, match="both must be above 0"):
        mbu(1, 0.0, 1e9)


def test_saved_bytes_are_whole_numbers_per_unit():
    traffic = traffic_of(tiny("qwen3_vl"))
    assert dict(traffic.saved).keys() == {"tokens", "patches"}
    assert all(isinstance(factor, Fraction) and factor.denominator == 1 for _, factor in traffic.saved)
    assert traffic.left_out == ()
