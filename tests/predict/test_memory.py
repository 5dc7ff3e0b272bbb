"""Memory plans: derived by hand, and held against real tensors of real optimizers and of processes that share."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from headway.config.optim import OptimConfig
from headway.count import Workload, load_cost_model
from headway.count.activations import shipped_activations
from headway.optim import make_optimizer
from headway.predict.memory import plan_memory
from headway.predict.recipe import Sharing, State
from headway.tracing import trace
from headway.tracing.activations import saved_by_block
from headway.tracing.build import model_class
from helpers.models import tiny_config, tiny_model
from helpers.processes import run_processes

PARAMS = 7_615_616_512  # of Qwen2.5-7B, as published
H, V, LAYERS = 3584, 152_064, 28
TOKENS = 8192
LAYER = 4 * H + 2 * H * H + 2 * 512 * H + 3584 + 1024 + 3 * H * 18944 - 2 * H  # norms; q, o; k, v; biases; MLP


def qwen(state=None, sharing=None):
    state, sharing = state or State(), sharing or Sharing()
    saved = shipped_activations("qwen2.5-7b", "bfloat16" if sharing.gathers else "bfloat16-autocast")
    return plan_memory(load_cost_model("qwen2.5-7b"), saved, Workload([TOKENS]), state, sharing)


def test_a_lone_device_holds_everything_and_casts_what_products_read():
    plan = qwen()
    assert LAYERS * LAYER + 2 * V * H + H == PARAMS
    assert plan.weights == plan.gradients == 4 * PARAMS
    assert plan.optimizer == 2 * 4 * PARAMS
    vectors = LAYERS * (2 * H + 3584 + 1024) + H  # norms and biases
    biases = LAYERS * (3584 + 1024)  # which autocast casts with their matrices
    assert plan.casts in (2 * (PARAMS - V * H - vectors), 2 * (PARAMS - V * H - vectors + biases))
    assert (plan.gathered, plan.reducing, plan.average, plan.host) == (0, 0, 0, 0)


def test_backward_casts_one_recomputed_block_at_a_time():
    none, full = (qwen(State(recompute=r, chunk=1024)) for r in ("none", "full"))
    matrices = LAYER - 2 * H  # with biases, whether or not they are cast
    assert none.casts == full.casts
    assert none.at("backward").parts["casts"] == none.casts - 2 * V * H  # the head made its gradients in forward
    assert full.at("backward").parts["casts"] == pytest.approx(2 * matrices, rel=1e-3)
    # two more of the MLP's width in bfloat16, and the residual stream's gradient in float32
    assert full.passing == (2 * 2 * 18944 + 4 * H) * TOKENS


def test_experts_cast_their_own_weights_which_a_recomputed_block_does_not_keep():
    saved = shipped_activations("qwen3-30b-a3b", "bfloat16-autocast")
    none, full = (
        plan_memory(
            load_cost_model("qwen3-30b-a3b"), saved, Workload([TOKENS]), State(recompute=r, chunk=64), Sharing()
        )
        for r in ("none", "full")
    )
    layer = 128 * 3 * 2048 * 768
    assert none.casts - full.casts == 2 * 48 * layer
    assert full.casts < 2 * 6 * layer  # what attention and the head multiply by


def test_shards_divide_what_is_held_and_gather_two_blocks():
    plan = qwen(State(recompute="full", averaged=True, chunk=64), Sharing(shards=32, gathers=True))
    assert plan.weights == plan.gradients == plan.average == -(-4 * PARAMS // 32)
    assert plan.optimizer == 2 * plan.weights
    assert plan.casts == 0
    # in forward the last norm, the head, and the buffer that it was gathered in
    assert plan.at("forward").parts["gathered"] == 2 * (H + V * H + V * H)
    backward = plan.at("backward").parts
    # in backward the last norm, the last layer and the one before; the head's gradients are on their way
    assert backward["gathered"] == 2 * (H + LAYER + LAYER)
    assert backward["reducing"] == 4 * V * H
    outside = 28_676 * TOKENS  # the last norm: its input in float32 twice over, its output, and one number a token
    assert plan.activations == LAYERS * 2 * H * TOKENS + outside


def test_recomputing_every_second_block_keeps_half_of_them_whole():
    none, full, half = (qwen(State(recompute=r), Sharing(shards=8, gathers=True)) for r in ("none", "full", "every:2"))
    assert none.recomputing == 0
    assert half.recomputing == full.recomputing > 0
    assert half.activations - full.activations == pytest.approx((none.activations - full.activations) / 2, rel=0.01)
    assert full.peak < half.peak < none.peak


def test_kept_attention_is_its_output_and_a_sum_for_each_head():
    none, full, kept = (
        qwen(State(recompute=r), Sharing(shards=8, gathers=True)) for r in ("none", "full", "full,-attention")
    )
    attention = TOKENS * (2 * H + 4 * 28)  # in bfloat16; 28 heads, float32
    assert kept.activations - full.activations == LAYERS * attention
    assert full.recomputing - kept.recomputing == attention
    assert full.peak < kept.peak < none.peak


def test_the_head_holds_a_chunk_of_logits_instead_of_all():
    whole, chunked = (qwen(State(chunk=c), Sharing(shards=8, gathers=True)) for c in (None, 1024))
    # in backward log-probabilities, their gradients and those of the logits, in float32
    assert whole.head == (4 + 4 + 4) * TOKENS * V
    # a chunk's logits in bfloat16, in float32 for log-softmax, and its result; the weight's gradient summed in float32,
    # and the gradient of the hidden states
    assert chunked.head == (2 + 4 + 4) * 1024 * V + 4 * V * H + 2 * TOKENS * H


def test_processes_that_share_a_pack_hold_a_share_of_its_activations():
    one, two = (qwen(State(chunk=1024), Sharing(shards=8, gathers=True, sequence=s)) for s in (1, 2))
    assert two.activations == pytest.approx(one.activations / 2, rel=1e-6)
    assert one.head - two.head == 2 * TOKENS * H // 2
    assert two.weights == one.weights


def test_offloading_moves_what_is_held_to_the_host():
    on, off = (qwen(sharing=Sharing(shards=8, gathers=True, offload=o)) for o in (False, True))
    always = on.weights + on.base + on.optimizer + on.average
    assert off.weights == off.base == off.optimizer == off.average == off.gradients == 0
    assert off.host == always + on.gradients
    assert on.peak - off.peak >= always


def test_whole_gradients_wait_only_where_they_are_summed_once_a_step():
    sharing = Sharing(shards=8, gathers=True)
    each = qwen(State(accumulates=True), sharing)
    once = qwen(State(accumulates=True), replace(sharing, reduce_each_pack=False))
    assert once.gradients == 4 * PARAMS
    assert each.gradients == 4 * PARAMS // 8
    assert once.at("update").parts["gradients"] == each.gradients
    assert qwen(State(), replace(sharing, reduce_each_pack=False)).gradients == each.gradients
    assert each.at("forward").total - qwen(State(), sharing).at("forward").total == each.gradients


def test_a_frozen_model_with_adapters_has_gradients_and_moments_of_them_alone():
    model = load_cost_model("qwen2.5-7b").lora(8)
    saved = shipped_activations("qwen2.5-7b", "bfloat16")
    plan = plan_memory(model, saved, Workload([TOKENS]), State(), Sharing(shards=4, gathers=True))
    adapters = LAYERS * 8 * (2 * (H + H) + 2 * (H + 512) + 3 * (H + 18944))
    assert plan.gradients == 4 * adapters // 4
    assert plan.optimizer == 2 * plan.gradients
    assert (
        plan.weights == (2 * PARAMS + 4 * adapters) // 4
    )  # FSDP2 gathers in bfloat16, and so the frozen ones are held


def test_experts_over_processes_are_gathered_by_their_share():
    model = load_cost_model("qwen3-30b-a3b")
    saved = shipped_activations("qwen3-30b-a3b", "bfloat16")
    one, four = (
        plan_memory(
            model,
            saved,
            Workload([TOKENS]),
            State(recompute="full", chunk=64),
            Sharing(shards=8, gathers=True, expert=e),
        )
        for e in (1, 4)
    )
    experts = 128 * 3 * 2048 * 768
    whole, quarter = (plan.at("backward").parts for plan in (one, four))
    assert whole["gathered"] > 2 * 2 * experts  # two layers
    assert quarter["gathered"] < 2 * 2 * experts / 2
    assert one.weights == four.weights
    assert whole["reducing"] > 4 * experts > quarter["reducing"]


@pytest.mark.parametrize(
    ("settings", "state"),
    [
        ({}, State()),
        ({"name": "muon"}, State(rule="muon")),
        ({"state": "bfloat16"}, State(moment_bytes=2.0)),
        ({"state": "8bit"}, State(moment_bytes=1 + 4 / 256)),
    ],
    ids=["adamw", "muon", "bfloat16", "8bit"],
)
def test_the_moments_of_real_optimizers_are_as_large(settings, state):
    torch.manual_seed(0)
    config = tiny_config("qwen3", vocabulary=4096)
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 512, 64
    model = model_class(config)._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    cost = trace(model)
    optim = OptimConfig(steps=2, lr=1e-3, **settings)
    optimizer = make_optimizer(model, optim, cost)
    model(input_ids=torch.arange(9)[None]).logits.square().mean().backward()
    optimizer.step()
    held = sum(t.nbytes for entry in optimizer.state.values() for t in entry.values() if t.dim())
    plan = plan_memory(cost, saved_by_block(model), Workload([9]), replace(state, compute_bytes=4), Sharing())
    # 8-bit moments of small tensors, norms here, stay in float32
    assert held == pytest.approx(plan.optimizer, rel=0.01 if settings.get("state") == "8bit" else 0)


_SHARE = """
import json, sys, torch
from torch.distributed.tensor import DTensor
from headway.models.load import load_model
from headway.packing.mesh import MeshShape
from headway.models.parallel.mesh import build_mesh
from headway.models.parallel.shard import shard_model
from headway.models.parallel.ranks import join_ranks
from helpers.models import tiny_config
join_ranks(torch.device("cpu"))
config = tiny_config("qwen3")
model = load_model(config, device="meta", random_init=True)
shard_model(model, build_mesh(MeshShape.of(2), "cpu"), compute_dtype=torch.float32)
model.to_empty(device="cpu")
optimizer = torch.optim.AdamW(model.parameters())
out = model(input_ids=torch.arange(8)[None], attention_mask=None, use_cache=False).logits
torch.nn.init.zeros_(next(iter(model.buffers())))
out.nan_to_num().sum().backward()
optimizer.step()
def held(tensors):
    storages = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())
weights = held(model.parameters())
gradients = held(p.grad for p in model.parameters())
moments = held(t for s in optimizer.state.values() for t in s.values() if t.dim())
print(json.dumps([weights, gradients, moments]))
"""


@pytest.mark.dist
def test_two_processes_really_hold_half_each():
    found = [json.loads(done.stdout.splitlines()[-1]) for done in run_processes([sys.executable, "-c", _SHARE], 2)]
    model = tiny_model("qwen3", dtype=torch.float32)
    plan = plan_memory(
        trace(model), saved_by_block(model), Workload([8]), State(compute_bytes=4), Sharing(shards=2, gathers=True)
    )
    for weights, gradients, moments in found:
        assert weights == gradients == pytest.approx(plan.weights, rel=0.02)  # dimensions that do not divide are padded
        assert moments == pytest.approx(plan.optimizer, rel=0.02)


def text_of_81920(**state):
    """The pack of the recipe for text on one device, as a H200 trained it (benchmarks/results/engine_gpu_*)."""
    state = State(**{"weight_bytes": 2, "moment_bytes": 2.0, "recompute": "full,-attention", "fused": True, **state})
    model, saved = load_cost_model("qwen2.5-7b"), shipped_activations("qwen2.5-7b", "bfloat16")
    return plan_memory(model, saved, Workload([81_920]), replace(state, chunk=1024), Sharing())


def test_gradients_of_a_gated_product_in_place_take_half_the_room():
    usual, in_place = text_of_81920(), text_of_81920(liger=True)
    assert usual.peak - in_place.peak == 2 * 18944 * 81_920
    assert usual.at("forward") == in_place.at("forward")
    assert in_place.peak == pytest.approx(96_324_063_232, rel=0.01)


def test_backward_lets_go_of_the_last_norm_before_its_blocks():
    plan = text_of_81920()
    outside = 28_676 * 81_920  # the last norm's, as above
    assert plan.at("forward").parts["activations"] - plan.at("backward").parts["activations"] == outside


def test_sums_of_cudnns_attention_are_padded_to_the_longest_segment():
    plain, padded = text_of_81920(), text_of_81920(padded=(72 * 12_968, 0))  # 72 segments of up to 12,968 tokens
    assert padded.peak - plain.peak == pytest.approx(101_923_185_664 - 96_324_063_232, rel=1e-3)
