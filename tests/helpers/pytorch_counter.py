"""PyTorch's own counter on a real step of a tiny eager model, and what a ledger says that it should see.

FlopCounterMode sees every product of an eager model on the CPU. Three of its habits are derived here by hand:
attention runs the whole square of scores whatever the mask allows; rotary angles are an outer product, which the
convention does not count; and experts run as one product per expert over the rows that visit it, which add up to
tokens x top-k whatever the routing.
"""

from collections import Counter

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from headway.count import CostModel, Workload, drivers
from headway.count.recompute import run_again
from headway.tracing import trace
from headway.tracing.build import model_class
from helpers.tiny_models import PATCH, VISION_FAMILIES, tiny_config

IMAGES = [(1, 4, 6), (2, 8, 4)]  # 24 + 64 patches, 22 tokens
LENGTH = 67


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = tiny_config(family)
    model = model_class(config)._from_config(config, attn_implementation="eager", dtype=torch.float32)
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
        units = drivers.parse(row.driver)(workload(family, rows))
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
        units = executed.get(row.driver, drivers.parse(row.driver)(work)) * (wasted if row.op == "experts" else 1)
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


def enable_checkpointing(model: nn.Module, *, reentrant: bool = False) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if not reentrant:  # transformers asks for the gradient of the embeddings, which only reentrant checkpoints need
        for part in model.modules():
            if hasattr(part, "disable_input_require_grads"):
                part.disable_input_require_grads()
    return model


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
            extra += per_score * sum(squares) - drivers.parse(row.driver)(workload(family)) * row.forward
    recompute = cost.count(workload(family), recompute=choice).recompute
    assert recompute > 0
    assert sum((after - before).elements()) == recompute + extra
