"""Ledgers against PyTorch's own counter on the real eager models, module by module, forward and backward.

FlopCounterMode sees every product of an eager model on the CPU. Three of its habits are derived here by hand:
attention runs the whole square of scores whatever the mask allows; rotary angles are an outer product, which the
convention does not count; and experts run as one product per expert over the rows that visit it, which add up to
tokens x top-k whatever the routing.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from headway.count import Workload, drivers, trace
from headway.count.tracing.build import model_class
from tiny_models import FAMILIES, PATCH, VISION_FAMILIES, tiny_config

WORKLOAD = Workload([67], images=[(1, 4, 6), (2, 8, 4)])  # 24 + 64 patches, 22 of the tokens


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = tiny_config(family)
    model = model_class(config)._from_config(config, attn_implementation="eager", dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    return model.train()


def inputs(model: nn.Module, family: str) -> dict:
    ids = torch.randint(10, 160, (1, WORKLOAD.tokens))
    batch = {"input_ids": ids, "position_ids": torch.arange(WORKLOAD.tokens)[None], "use_cache": False}
    if family in VISION_FAMILIES:
        ids[:, 5:27] = model.config.image_token_id
        batch["pixel_values"] = torch.randn(WORKLOAD.patches, 3 * 2 * PATCH * PATCH)
        batch["image_grid_thw"] = torch.tensor(WORKLOAD.images.copy())
        batch["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    return batch


def workload(family: str) -> Workload:
    return WORKLOAD if family in VISION_FAMILIES else Workload(WORKLOAD.segments)


class Products(TorchDispatchMode):
    """PyTorch's own FLOPs of every operation it has a formula for, one entry an operation."""

    def __init__(self):
        super().__init__()
        self.flops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.flops.append(flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out))
        return out


def counted(model: nn.Module, family: str) -> tuple[Counter, Counter]:
    """Count forward FLOPs by module, and backward FLOPs operation by operation."""
    counter, backward = FlopCounterMode(display=False), Products()
    with counter:
        logits = model(**inputs(model, family)).logits
    sums = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    root = type(model).__name__
    own = Counter(
        {name.removeprefix(root).removeprefix("."): flops for name, flops in sums.items() if name != "Global"}
    )
    inclusive = dict(own)
    for path, flops in inclusive.items():
        around = [p for p in inclusive if p != path and (not p or path.startswith(p + "."))]
        if around:
            own[max(around, key=len)] -= flops
    own = Counter({path: flops for path, flops in own.items() if flops})
    with backward:
        logits.sum().backward()
    return own, Counter(backward.flops)


def eager_attention(model: nn.Module, path: str) -> tuple[int, list[int]]:
    """Derive what eager attention runs: FLOPs per score for both products of forward, and the squares of scores.

    Forward is 2 heads (qk + v) a score. Vision attends frame by frame, or window by window; text over the whole square.
    """
    config = model.get_submodule(path).config
    if "visual" in path:
        frames = [(h, w) for t, h, w in WORKLOAD.images.tolist() for _ in range(t)]
        squares = [(h * w) ** 2 for h, w in frames]
        if hasattr(config, "fullatt_block_indexes") and int(path.split(".")[3]) not in config.fullatt_block_indexes:
            # windows of 4 x 4 patches: 4x6 gives one of 4x4 and one of 4x2, each frame of 8x4 gives two of 4x4
            squares = [16**2, 8**2, 16**2, 16**2, 16**2, 16**2]
        return 2 * config.num_heads * 2 * (config.hidden_size // config.num_heads), squares
    heads = config.num_attention_heads
    qk = v = getattr(config, "head_dim", None) or config.hidden_size // heads
    if hasattr(config, "kv_lora_rank"):
        qk, v = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return 2 * heads * (qk + v), [WORKLOAD.tokens**2]


def check(model: nn.Module, family: str) -> None:
    cost = trace(model)
    assert cost.unknown == ()
    trained = sum(1 << i for i, p in enumerate(cost.parameters) if p.trainable)
    forward, backward, experts = Counter(), Counter(), 0
    for row in cost.rows:
        units = drivers.parse(row.driver)(workload(family))
        needed = [g for g in row.gradients if g.needs & trained]
        if row.op == "attention":
            per_score, squares = eager_attention(model, row.module)
            assert row.forward == per_score
            forward[row.module] += per_score * sum(squares)
            for g in needed:  # dV, dP, dQ, dK: each as large as the forward product of its size
                backward += Counter(per_score * square * g.flops // row.forward for square in squares)
        else:
            forward[row.module] += units * row.forward
            products = Counter(units * g.flops for g in needed)
            if row.op == "experts":
                experts += sum(flops * n for flops, n in products.items())
            else:
                backward += products
    seen_forward, seen_backward = counted(model, family)
    for path in [p for p in seen_forward if p.endswith("rotary_emb")]:
        del seen_forward[path]  # an outer product of positions and frequencies
    assert seen_forward == forward
    assert not backward - seen_backward
    rest = seen_backward - backward
    assert sum(flops * n for flops, n in rest.items()) == experts
    assert experts or not rest


@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_counts_what_pytorch_dispatches(family):
    check(build(family), family)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_frozen_vision_tower_counts_what_pytorch_dispatches(family):
    model = build(family)
    model.model.visual.requires_grad_(False)
    check(model, family)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_trained_merger_before_a_frozen_language_model_counts_what_pytorch_dispatches(family):
    model = build(family).requires_grad_(False)
    model.model.visual.merger.requires_grad_(True)
    check(model, family)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_tied", "qwen3_moe"])
def test_training_only_the_last_layer_counts_what_pytorch_dispatches(family):
    model = build(family).requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    check(model, family)


def test_a_wrong_coefficient_would_be_seen(monkeypatch):
    honest = trace

    def tampered(model):
        cost = honest(model)
        return replace(cost, rows=(*cost.rows[:-1], replace(cost.rows[-1], forward=cost.rows[-1].forward + 2)))

    model = build("qwen3")
    monkeypatch.setitem(globals(), "trace", tampered)
    with pytest.raises(AssertionError):
        check(model, "qwen3")


# the method has two names: the old one is all that transformers 5.17 has, the new one the only one without a warning
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_sliding", "qwen2", "qwen3_vl", "qwen2_5_vl"])
def test_checkpointing_recomputes_what_pytorch_dispatches(family):
    model = build(family)
    plain = counted(model, family)[1]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = counted(model, family)[1]
    cost = trace(build(family))
    recompute, eager_extra = cost.count(workload(family), recompute="full").recompute, 0
    for row in cost.rows:
        if row.op == "attention" and row.recomputed:
            per_score, squares = eager_attention(model, row.module)
            eager_extra += per_score * sum(squares) - drivers.parse(row.driver)(workload(family)) * row.forward
    assert sum((again - plain).elements()) == recompute + eager_extra
    assert not plain - again
