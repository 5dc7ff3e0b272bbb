"""Counts of real steps that use nothing of the tracer: by PyTorch's own counter, by operation, and by hand.

FlopCounterMode sees every product of an eager model on the CPU. Three of its habits are derived here by hand:
attention runs the whole square of scores whatever the mask allows; rotary angles are an outer product, which the
convention does not count; and experts run as one product per expert over the rows that visit it, which add up to
tokens x top-k whatever the routing.

EagerCounter sees each operation as it is dispatched. A product of [m, k] and [k, n] is 2 m k n FLOPs; a convolution 2
FLOPs for each weight and position (output positions, input ones when transposed), and as many for each gradient that
its backward is asked for, which holds for grouped ones too. Attention runs by its math backend, whose products are seen
singly, so that pairs which a mask forbids are counted too. An outer product (k = 1) in which nothing requires a
gradient, as rotary angles are made, is elementwise work written as a product, and left out.
"""

import dataclasses
import importlib
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.library import Library
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from headway.count import CostModel, Workload, drivers
from headway.count.recompute import run_again
from headway.errors import TraceError
from headway.tracing import trace
from helpers.models import PATCH, VISION_FAMILIES, tiny_model

IMAGES = [(1, 4, 6), (2, 8, 4)]  # 24 + 64 patches, 22 tokens
LENGTH = 67


def build(family: str) -> nn.Module:
    """Build a family's model whose attention and experts are eager, so that its products are seen."""
    model = tiny_model(family, attn_implementation="eager", dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    return model.train()


def inputs(model: nn.Module, family: str, rows: int = 1) -> dict:
    """Make a batch of `rows` sequences, with the images in the first."""
    ids = torch.randint(10, 160, (rows, LENGTH))
    batch = {"input_ids": ids, "position_ids": torch.arange(LENGTH)[None].expand(rows, -1), "use_cache": False}
    if family in VISION_FAMILIES:
        ids[0, 5:27] = model.config.image_token_id
        batch["pixel_values"] = torch.randn(88, 3 * 2 * PATCH * PATCH)
        batch["image_grid_thw"] = torch.tensor(IMAGES)
        batch["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    return batch


def workload(family: str, rows: int = 1) -> Workload:
    return Workload([LENGTH] * rows, images=IMAGES if family in VISION_FAMILIES else [])


class Products(TorchDispatchMode):
    """PyTorch's own FLOPs of every operation it has a formula for, with the innermost module of `model` that runs."""

    def __init__(self, model: nn.Module = None):
        super().__init__()
        self.paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
        self.running, self.seen = [""], []

    def __enter__(self):
        def enter(module, _args):
            self.running.append(self.paths.get(id(module), self.running[-1]))

        def leave(_module, _args, _output):
            self.running.pop()

        self.hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        for hook in self.hooks:
            hook.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
            self.seen.append((self.running[-1], flops))
        return out


def count_forward(model: nn.Module, batch: dict) -> tuple[torch.Tensor, Counter]:
    """Run the model and count its FLOPs by module; rotary angles are left out."""
    counter = FlopCounterMode(display=False)
    with counter, Products(model) as products:
        logits = model(**batch).logits
    assert counter.get_total_flops() == sum(flops for _, flops in products.seen)
    by_module = Counter()
    for path, flops in products.seen:
        if not path.endswith("rotary_emb"):  # an outer product of positions and frequencies
            by_module[path] += flops
    return logits, by_module


def count_backward(loss: torch.Tensor) -> Counter:
    """Run the backward and count its FLOPs operation by operation: how often each number of FLOPs occurs."""
    with Products() as products:
        loss.backward()
    return Counter(flops for _, flops in products.seen)


def eager_attention(model: nn.Module, path: str, rows: int = 1) -> tuple[int, list[int]]:
    """Derive what eager attention runs: FLOPs per score for both products of forward, and the squares of scores.

    Forward is 2 heads (qk + v) a score. Vision attends frame by frame, or window by window; text over the whole square
    of each row, all rows in one product.
    """
    config = model.get_submodule(path).config
    if "visual" in path:
        squares = [(h * w) ** 2 for t, h, w in IMAGES for _ in range(t)]
        if hasattr(config, "fullatt_block_indexes") and int(path.split(".")[3]) not in config.fullatt_block_indexes:
            # windows of 4 x 4 patches: 4x6 gives one of 4x4 and one of 4x2, each frame of 8x4 gives two of 4x4
            squares = [16**2, 8**2, 16**2, 16**2, 16**2, 16**2]
        return 2 * config.num_heads * 2 * (config.hidden_size // config.num_heads), squares
    heads = config.num_attention_heads
    qk = v = getattr(config, "head_dim", None) or config.hidden_size // heads
    if hasattr(config, "kv_lora_rank"):
        qk, v = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return 2 * heads * (qk + v), [rows * LENGTH**2]


def expect(model: nn.Module, cost: CostModel, family: str, rows: int = 1) -> tuple[Counter, Counter, int]:
    """Say what PyTorch's counter should see of a step, by the ledger.

    Returns:
        Forward FLOPs by module; backward FLOPs by operation; the backward FLOPs of experts, whose operations depend on
        the routing.
    """
    assert cost.unknown == ()
    forward, backward, experts = Counter(), Counter(), 0
    for row in cost.rows:
        units = drivers.parse_driver(row.driver)(workload(family, rows))
        needed = [g for g in row.gradients if g.runs(cost.trained)]
        if row.op == "attention":
            per_score, squares = eager_attention(model, row.module, rows)
            assert row.forward == per_score
            forward[row.module] += per_score * sum(squares)
            for g in needed:  # dV, dP, dQ, dK: each as large as the forward product of its size
                backward += Counter(per_score * square * g.flops // row.forward for square in squares)
        else:
            forward[row.module] += units * row.forward
            products = Counter(units * g.flops for g in needed)
            if row.op == "convolution":  # both gradients are one operation
                products = Counter({units * sum(g.flops for g in needed): 1}) if needed else Counter()
            if row.op == "experts":
                experts += sum(flops * n for flops, n in products.items())
            else:
                backward += products
    return forward, backward, experts


def check(model: nn.Module, family: str) -> None:
    """Hold a model's ledger against a real step: forward by module, backward by operation."""
    forward, backward, experts = expect(model, trace(model), family)
    logits, seen_forward = count_forward(model, inputs(model, family))
    seen_backward = count_backward(logits.sum())
    assert seen_forward == forward
    assert not backward - seen_backward
    rest = seen_backward - backward
    assert sum(flops * n for flops, n in rest.items()) == experts
    assert experts or not rest


def expected_step(cost: CostModel, work: Workload, executed: dict[str, int], wasted: int = 1) -> tuple[Counter, int]:
    """Say what PyTorch should count of a step: forward by module, and the whole backward.

    Args:
        cost: the ledger.
        work: what the step runs.
        executed: scores that each head really computes, for drivers of pairs that eager attention exceeds.
        wasted: how often experts multiply the rows that they need to.
    """
    assert cost.unknown == ()
    forward, backward = Counter(), 0
    for row in cost.rows:
        units = executed.get(row.driver, drivers.parse_driver(row.driver)(work)) * (
            wasted if row.op == "experts" else 1
        )
        forward[row.module] += units * row.forward
        backward += units * sum(g.flops for g in row.gradients if g.needs)
    return forward, backward


def real_step(model: nn.Module, arguments: dict) -> tuple[Counter, int]:
    """Run a step and count the FLOPs of its forward by module, and of its whole backward."""
    with Products(model) as products:
        out = model(**arguments)
    forward = Counter()
    for path, flops in products.seen:
        forward[path] += flops
    loss = (out if torch.is_tensor(out) else out.logits).sum()
    return forward, sum(flops * n for flops, n in count_backward(loss).items())


def check_recompute(plain: nn.Module, checkpointed: nn.Module, cost: CostModel, family: str, choice: str) -> None:
    """Hold what a checkpointed step dispatches on top of a plain one against the ledger's recomputation.

    Eager attention runs the whole square of scores again, where the ledger has the pairs of the mask.
    """
    before, after = (
        count_backward(count_forward(model, inputs(model, family))[0].sum()) for model in (plain, checkpointed)
    )
    assert not before - after
    extra = 0
    for i in run_again(cost.rows, cost.trained, choice, cost.name):
        row = cost.rows[i]
        if row.op == "attention":
            per_score, squares = eager_attention(plain, row.module)
            extra += per_score * sum(squares) - drivers.parse_driver(row.driver)(workload(family)) * row.forward
    recompute = cost.count(workload(family), recompute=choice).recompute
    assert recompute > 0
    assert sum((after - before).elements()) == recompute + extra


aten = torch.ops.aten
# products: which arguments are multiplied
PRODUCTS = {
    aten.mm: (0, 1), aten.bmm: (0, 1), aten.mv: (0, 1), aten.dot: (0, 1), aten.addmm: (1, 2), aten.baddbmm: (1, 2),
    aten.addmv: (1, 2),
}  # fmt: skip


class EagerCounter(TorchDispatchMode):
    """Adds up FLOPs while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in PRODUCTS:
            left, right = (args[place] for place in PRODUCTS[packet])
            is_outer = left.shape[-1] == 1 and not left.requires_grad and not right.requires_grad
            is_backward = torch._C._current_autograd_node() is not None
            rows = left.numel()  # m x k, for each of a batch
            self.flops += 0 if is_outer and not is_backward else 2 * rows * (right.shape[-1] if right.dim() > 1 else 1)
        elif packet is aten.convolution:
            self.flops += _convolved(args[0], args[1], out, transposed=args[6])
        elif packet is aten.convolution_backward:
            self.flops += _convolved(args[1], args[2], args[0], transposed=args[7]) * sum(args[10][:2])
        return out


def _convolved(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, transposed: bool) -> int:
    positions = x if transposed else y
    return 2 * weight.numel() * positions.shape[0] * math.prod(positions.shape[2:])


def counted_eagerly(model: nn.Module, arguments: Any) -> tuple[int, int]:
    """Run a real step: forward, and backward from the loss or from all that is returned.

    Args:
        model: a real one; its gradients are cleared.
        arguments: of its forward: a dictionary by name, or a tuple by position.

    Returns:
        FLOPs of forward and of backward.
    """
    forward, backward = EagerCounter(), EagerCounter()
    fused, *_ = torch.backends.mkldnn.set_flags(_enabled=False)  # fused recurrent kernels hide their products
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), forward:
            out = model(**arguments) if isinstance(arguments, dict) else model(*arguments)
        starts = [*differentiated(out)]
        if starts:
            with backward:
                torch.autograd.backward(starts, [torch.ones_like(t) for t in starts])
    finally:
        torch.backends.mkldnn.set_flags(_enabled=fused)
        torch.backends.mha.set_fastpath_enabled(fast)
        model.zero_grad(set_to_none=True)
    return forward.flops, backward.flops


def differentiated(output: Any) -> Iterator[torch.Tensor]:
    """Find what training starts from in a real output: the loss if there is one, else all that requires a gradient."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        yield loss
        return
    for leaf in tree_leaves(output):
        if dataclasses.is_dataclass(leaf):
            yield from differentiated({**vars(leaf)})
        elif isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            yield leaf


def dispatched(model: nn.Module, *args, **kwargs) -> tuple[int, int]:
    """Run a real step; returns the FLOPs of its forward and of its backward."""
    return counted_eagerly(model, kwargs or args)


def counted(cost: CostModel, workload: Workload | None = None) -> tuple[int, int]:
    """Count a workload's forward and backward; one call of an example where none is given."""
    count = cost.count(Workload([1]) if workload is None else workload)
    return count.forward, count.dgrad + count.wgrad


@dataclass(frozen=True)
class Example:
    """A small model of another library, or of one's own, and how it is called."""

    build: Callable[[], nn.Module]
    arguments: Callable[[], Any]  # a dictionary by name, or a tuple
    forbidden: int = 0  # FLOPs of forward over forbidden pairs; backward has twice as many
    refused: str = ""  # what the error says, where the model cannot be counted

    def check(self) -> None:
        """Hold the model's ledger against its real step, or see it refused for the reason that the table names."""
        torch.manual_seed(0)
        model, arguments = self.build().train(), self.arguments()
        if self.refused:
            with pytest.raises(TraceError, match=self.refused):
                trace(model, inputs=arguments)
            return
        forward, backward = counted_eagerly(model, arguments)
        cost = trace(model, inputs=arguments)
        assert counted(cost) == (forward - self.forbidden, backward - 2 * self.forbidden)
        assert {row.driver for row in cost.rows} <= {"segments", "packs"}  # of one example nothing more is known


_KERNELS = {"aten::_scaled_dot_product_flash_attention_for_cpu", "torch_attn::_varlen_attn"}


@contextmanager
def attention_calls(*, compiled):
    """Count while active: yields an object whose `count` says how many ran.

    Uncompiled, what a checkpoint answers from what it kept does not come as far as the operations that are counted. The
    backward of compiled code must not see such a mode (torch 2.11 would not run it), and calls Headway's own operator.
    """
    from headway.models.attention import segments

    calls = SimpleNamespace(count=0)

    def counted(*args, real=segments._kernel, **kwargs):
        calls.count += 1
        return real(*args, **kwargs)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.count += func._schema.name in _KERNELS
            return func(*args, **(kwargs or {}))

    with mock.patch.object(segments, "_kernel", counted) if compiled else Mode():
        yield calls


class StatedSpec:
    """What mfu-tracker's calls read of a device, with round numbers."""

    name = "test card"
    peak_memory_bandwidth_tbs = 0.1

    def peak_tflops(self, dtype):
        return {"fp32": 1e3, "bf16": 2e3}[dtype]


SPEC = StatedSpec()

# width 32, 2 layers: queries, keys and values, their output, the MLP up and down; a vocabulary of 160
_BLOCK = 32 * 96 + 32 * 32 + 32 * 128 + 128 * 32
_LAST_OF_BLOCK = 128 * 32
_HEAD = 32 * 160


def gpt2(seed=0):
    return tiny_model("gpt2", seed=seed).train()


def forward_flops(lengths):
    """2 FLOPs per weight and token, 4 per feature and causal pair."""
    pairs = sum(s * (s + 1) // 2 for s in lengths)
    return sum(lengths) * 2 * (2 * _BLOCK + _HEAD) + 2 * 4 * 32 * pairs


def step_flops(lengths):
    """Embeddings below every layer are trained, so that each product has both gradients."""
    return 3 * forward_flops(lengths)


def recomputed_flops(lengths):
    """Both blocks again, but for the product that each ends with: nothing in the backward needs what it makes."""
    pairs = sum(s * (s + 1) // 2 for s in lengths)
    return sum(lengths) * 2 * 2 * (_BLOCK - _LAST_OF_BLOCK) + 2 * 4 * 32 * pairs


def batch_of(lengths):
    """One row per length, padded on the right."""
    width = max(lengths)
    mask = torch.tensor([[1] * s + [0] * (width - s) for s in lengths])
    ids = torch.arange(mask.numel()).view(mask.shape) % 150 + 3
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def torchvision() -> Any:
    """Import torchvision, also where its kernels were built for another torch: no model here needs them."""
    for _ in range(4):
        try:
            return importlib.import_module("torchvision")
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            _stubs.define(f"{missing.group(1)}(Tensor x) -> Tensor")
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
    raise ImportError("torchvision does not load")


_stubs = Library("torchvision", "FRAGMENT")
