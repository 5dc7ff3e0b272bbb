"""Name each operation's component from what it does, not from what a model family calls it.

Vision is what patches drive, outside the modules in which text attends; a merger is what stands outside the blocks that
repeat in its tower; attention and recurrences are what their seams recorded; projections are the linear layers
and convolutions inside such a module; experts are grouped products, the router its sibling with one output per expert;
the head is the model's output embedding.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, CheckpointWrapper

from headway.count import drivers
from headway.count.modalities import media_towers
from headway.errors import UsageError
from headway.tracing.fit import DriverFit
from headway.tracing.operation import Operation
from headway.tracing.unwrap import lies_within, plain_path


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _head_path(model: Any) -> str | None:
    """Find the path of the output embedding, or of a reward model's head, where the model says which module that is."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None and hasattr(model, "get_output_embeddings"):
        head = getattr(model, "score", None)  # name of the head in transformers' models for sequence classification
    return next((path for path, module in model.named_modules() if module is head), None) if head is not None else None


def components(
    model: nn.Module, operations: Sequence[Operation], fitted: Sequence[DriverFit], *, only: str = ""
) -> list[str]:
    """Name the component of each operation; DESIGN's names, such as `language.mlp` and `vision.merger`.

    A model that is one tower has the name `only` in place of those of text and vision: `denoiser.attention`, or
    `other.attention` where it is not known what the model sees, as of one example of floats.
    """
    # modules that attend or carry a state, mixtures of experts, and the output embedding
    attending = {op.module for op in operations if op.kind == "attention"}
    attending |= {_mixer(model, op.module) for op in operations if op.kind == "recurrence"}
    experts = {_parent(op.module): op.weight[0] for op in operations if op.kind == "experts" and op.weight}
    head = _head_path(model)

    # the tower of each module, and the blocks in which text, or what is seen, attends
    towers = _towers(operations, fitted)
    spoken = {op.module for op in operations if op.kind == "attention" and towers[op.module] == "language"}
    speaking = {_repeated(path) for path in spoken} - {""}
    seeing = {_repeated(path) for path in attending if towers.get(path) == "vision"} - {""}

    # the first part that an operation fits, from the most certain on
    names = []
    for op in operations:
        is_spoken = lies_within(op.module, spoken) or _repeated(op.module) in speaking
        tower = "language" if is_spoken else towers[op.module]
        mixture = next((root for root in experts if lies_within(op.module, [root])), None)
        if op.kind in ("attention", "recurrence"):
            part = op.kind
        elif isinstance(model.get_submodule(op.module), nn.RNNBase | nn.RNNCellBase):
            part = "recurrence"
        elif head is not None and lies_within(op.module, [head]):
            part = "head"
        elif tower != "language" and op.from_input:
            part = "embed"
        elif lies_within(op.module, attending):
            part = "projections"
        elif tower == "vision" and seeing and _repeated(op.module) not in seeing:
            part = "merger"
        elif op.kind == "experts":
            part = "experts"
        elif mixture is not None:
            part = "router" if op.weight and op.weight[-1] in (experts[mixture], 1) else "experts"
        else:
            part = "mlp"
        names.append(f"{tower}.{part}")
    # work on weights belongs where the weights are used
    names = [
        _nearest(op.module, operations, fitted, names) if fit.driver == "packs" else name
        for op, fit, name in zip(operations, fitted, names, strict=True)
    ]
    if only:
        return [_in_tower(only, op, name) for op, name in zip(operations, names, strict=True)]
    return names


def _in_tower(tower: str, operation: Operation, name: str) -> str:
    part = name.rpartition(".")[2]
    part = "mlp" if part == "merger" else part
    return f"{tower}.{'convolution' if part == 'mlp' and operation.kind == 'convolution' else part}"


def _encoder(operations: Sequence[Operation], fitted: Sequence[DriverFit]) -> str | None:
    """Find the outermost module of an encoder that reads sources as floats, hence speech; None if it reads tokens."""
    sources = [op for op, fit in zip(operations, fitted, strict=True) if fit.driver.startswith("source")]
    others = {op.module for op in operations} - {op.module for op in sources}
    path = next((op.module for op in sources if op.from_input), None)
    while path and not any(lies_within(other, [_parent(path)]) for other in others):
        path = _parent(path)
    return path


def _towers(operations: Sequence[Operation], fitted: Sequence[DriverFit]) -> dict[str, str]:
    """Map each module to its tower: `language` where an operation of it works on text, else `vision`, else `audio`."""
    by_module: dict[str, set[str]] = {}
    for op, fit in zip(operations, fitted, strict=True):
        tower = "language" if fit.driver.startswith("pairs:") else drivers.tower(fit.driver)
        by_module.setdefault(op.module, set()).add(tower)
    order = ("language", *media_towers(), "latents")
    encoder = _encoder(operations, fitted)
    if encoder is not None:
        by_module |= {path: {"audio"} for path in by_module if lies_within(path, [encoder])}
    return {path: next((tower for tower in order if tower in towers), "language") for path, towers in by_module.items()}


def _repeated(path: str) -> str:
    """Cut a path to the outermost item of a list that holds the module; "" where none does."""
    block = re.match(r".*?\.\d+(?=\.|$)", path)
    return block.group() if block is not None else ""


def _mixer(model: nn.Module, path: str) -> str:
    """Find the module that projects to and from a recurrence: its own, or the nearest around it with linear layers."""
    mixer = path
    while mixer and not any(isinstance(m, nn.Linear) for m in model.get_submodule(mixer).modules()):
        mixer = _parent(mixer)
    return mixer or path


def _nearest(path: str, operations: Sequence[Operation], fitted: Sequence[DriverFit], names: Sequence[str]) -> str:
    """Name the component of the first operation on activations in the innermost module around a path that has one."""
    while True:
        for op, fit, name in zip(operations, fitted, names, strict=True):
            if fit.driver != "packs" and lies_within(op.module, [path]):
                return name
        if not path:
            return "other"
        path = _parent(path)


def parameter_components(operations: Sequence[Operation], names: Sequence[str], parameters: Sequence[str]) -> list[str]:
    """Name the component of each parameter: its own operations', else the nearest enclosing module's.

    Norms and embeddings have no operation; where the enclosing modules hold several components they are `TOWER.other`.
    """
    under: dict[str, set[str]] = {}
    for op, name in zip(operations, names, strict=True):
        path = op.module
        while True:
            under.setdefault(path, set()).add(name)
            if not path:
                break
            path = _parent(path)
    homes = []
    for parameter in parameters:
        path = _parent(parameter)
        while path and path not in under:
            path = _parent(path)
        enclosing = under.get(path, {"other"})
        towers = {name.partition(".")[0] for name in enclosing}
        if len(enclosing) == 1:
            homes.append(next(iter(enclosing)))
        else:
            homes.append(f"{next(iter(towers))}.other" if len(towers) == 1 else "other")
    return homes


def expert_shares(operations: Sequence[Operation], fitted: Sequence[DriverFit]) -> dict[str, tuple[int, int]]:
    """Map the path of each expert module to (experts that a token visits, experts)."""
    shares: dict[str, tuple[int, int]] = {}
    for op, fit in zip(operations, fitted, strict=True):
        if op.kind == "experts" and op.weight and fit.per_unit.denominator == 1:
            shares[op.module] = (int(fit.per_unit), op.weight[0])
    return shares


def members(path: str, module: nn.Module) -> dict[str, nn.Module]:
    """Map the path of each item with weights in a list or dictionary of modules to it; empty for another module."""
    items = module.named_children() if isinstance(module, nn.ModuleList | nn.ModuleDict) else ()
    return {f"{path}.{name}": item for name, item in items if any(True for _ in item.parameters())}


def unvisited_experts(model: nn.Module, shares: dict[str, tuple[int, int]]) -> set[str]:
    """Name the expert modules that one token is not routed to: the last ones stand for any."""
    unvisited: list[str] = []
    for path, (visited, _) in shares.items():
        unvisited += list(members(path, model.get_submodule(path)))[visited:]
    return set(unvisited)


def stacks_in_use(
    operations: Sequence[Operation], fitted: Sequence[DriverFit], shapes: Sequence[Sequence[int]]
) -> dict[int, int]:
    """Count the elements of each stack of matrices that one token uses, from its bill: 2 FLOPs each.

    Args:
        operations: what was run.
        fitted: the driver of each.
        shapes: of all parameters, by number; a stack has three dimensions or more.
    """
    used: dict[int, int] = {}
    for op, fit in zip(operations, fitted, strict=True):
        for phase, _, sources in op.products if op.kind in ("matmul", "experts") else ():
            number = sources.bit_length() - 1
            if phase == "wgrad" and sources == 1 << max(number, 0) and len(shapes[number]) > 2:
                used[number] = used.get(number, 0) + fit.forward // 2
    return used


def active(
    name: str, shape: Sequence[int], shares: dict[str, tuple[int, int]], unused: set[str], in_use: int | None = None
) -> int:
    """Count the elements of a parameter that one token uses."""
    path = _parent(name)
    while path and unused:
        if path in unused:
            return 0
        path = _parent(path)
    numel = math.prod(shape)
    if in_use is not None:
        return min(in_use, numel)
    visited, experts = shares.get(_parent(name), (1, 1))
    return numel * visited // experts if shape and shape[0] == experts else numel


def idle_modules(
    model: nn.Module, operations: Sequence[Operation], parameters: Sequence[str], parameters_read: int
) -> list[str]:
    """Name the outermost modules whose weights no operation used: towers whose inputs were not given.

    The weight of a linear layer or convolution is used by a product; a matrix that another module holds as its own
    parameter, as experts do, counts as used where any operation reads it.

    A layer of adapters counts as one with the layer that it wraps: peft leaves inactive adapters, and the frozen
    original of a module that is trained whole, out on purpose.

    Args:
        model: whose parameters are numbered.
        operations: what was run.
        parameters: names of the model's parameters, by number.
        parameters_read: source bits of those that any operation read.
    """
    number = {name: i for i, name in enumerate(parameters)}
    is_idle: dict[str, bool] = {}  # by the path of each module that holds a matrix

    # linear layers and convolutions: idle unless a gradient of some product reaches the weight
    multiplied = 0  # source bits
    for op in operations:
        for _, _, sources in op.products:
            multiplied |= sources
    layers = {
        path
        for path, module in model.named_modules()
        if is_linear(module) or isinstance(module, nn.modules.conv._ConvNd)
    }
    for path in layers:
        if (i := number.get(f"{path}.weight")) is not None:
            is_idle[path] = not multiplied >> i & 1

    # other modules with matrices of their own, such as stacks of experts: idle unless an operation reads one
    for path, module in model.named_modules():
        own = module.named_parameters(path, recurse=False)
        matrices = [number[name] for name, p in own if p.dim() > 1 and name in number]
        if path not in layers and matrices and not isinstance(module, nn.Embedding):
            is_idle[path] = not any(parameters_read >> i & 1 for i in matrices)

    # an adapter and the layer that it wraps rest together or not at all
    for wrapper in (path for path, module in model.named_modules() if wraps_a_layer(module)):
        wrapped = [path for path in is_idle if lies_within(path, [wrapper])]
        is_idle.update(dict.fromkeys(wrapped, all(is_idle[path] for path in wrapped)))

    # the outermost modules below which everything is idle
    idle: list[str] = []
    for path, _ in model.named_modules():
        below = [is_idle[other] for other in is_idle if lies_within(other, [path])]
        if path and below and all(below) and not lies_within(path, idle):
            idle.append(path)
    return idle


def is_linear(module: nn.Module) -> bool:
    """Say whether a module is a linear layer; transformers' Conv1D is one."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def wraps_a_layer(module: nn.Module) -> bool:
    """Say whether a module is peft's, around a layer that it adapts or trains whole."""
    is_peft = type(module).__module__.startswith("peft.")
    return is_peft and not {"base_layer", "original_module"}.isdisjoint(module._modules)


def finder_of_blocks(blocks: set[str]) -> Callable[[str], str]:
    """Return a function from a module's path to the path of the block that holds it, "" for none."""

    def find(path: str) -> str:
        while path and path not in blocks:
            path = _parent(path)
        return path

    return find


def _runs_itself_again(module: nn.Module) -> bool:
    """Say whether a module is one of transformers' layers, which run again where they are told so."""
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def checkpointable_blocks(model: nn.Module) -> set[str]:
    """Find the blocks that activation checkpointing wraps: transformers' own choice, else the items of module lists.

    A dictionary whose keys are numbers is a list too, as torchtitan's layers are.
    """
    chosen = [path for path, module in model.named_modules() if _runs_itself_again(module)]
    if not chosen:
        lists = [(p, m) for p, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.ModuleDict)]
        keys = [(path, key) for path, items in lists for key, _ in items.named_children() if key.isdigit()]
        chosen = [f"{path}.{key}" if path else key for path, key in keys]
    return {path for path in chosen if not lies_within(_parent(path), [c for c in chosen if c != path])}


def _holders(model: nn.Module) -> set[str]:
    """Name the modules that recompute the items of their lists, as modules of diffusers do."""
    modules = dict(model.named_modules())
    if any(map(_runs_itself_again, modules.values())):
        return set()
    return {
        path
        for path, module in modules.items()
        if getattr(module, "gradient_checkpointing", False)
        and any(isinstance(child, nn.ModuleList) for child in module.children())
    }


def checkpointing_of(model: nn.Module) -> str:
    """Read what activation checkpointing runs again, as transformers and diffusers switch it on.

    Returns:
        "none", "full", "reentrant" (full, each block to its end, as `use_reentrant=True` does), or the paths of some
        blocks, as `CostModel.count` takes them.

    Raises:
        UsageError: some blocks alone are run again to their ends, or checkpoints lie in each other, which none of these
            says.
    """
    paths = checkpointable_blocks(model)
    blocks = {path: module for path, module in model.named_modules() if path in paths}
    holders = _holders(model)
    if inner := next((path for path in sorted(holders) if lies_within(path, paths)), None):
        raise UsageError(
            f"{inner} checkpoints its own parts, which may hold checkpoints again (as in UNets of diffusers), so "
            "Headway cannot tell how often they run."
        )
    wrappers = {plain_path(path): m for path, m in model.named_modules() if isinstance(m, CheckpointWrapper)}
    if (part := min(wrappers.keys() - set(map(plain_path, paths)), default=None)) is not None:
        raise UsageError(
            f"{part or 'the model'} is checkpointed but is no block, so Headway cannot tell what it recomputes."
        )
    checkpointed = [
        path
        for path, block in blocks.items()
        if getattr(block, "gradient_checkpointing", False)
        or _parent(_parent(path)) in holders
        or plain_path(path) in wrappers
    ]
    modules = (*(blocks[path] for path in checkpointed), *(model.get_submodule(path) for path in holders))
    functions = (getattr(module, "_gradient_checkpointing_func", None) for module in modules)
    is_reentrant = any(getattr(function, "keywords", {}).get("use_reentrant", False) for function in functions)
    is_reentrant |= any(wrapper.checkpoint_impl is CheckpointImpl.REENTRANT for wrapper in wrappers.values())
    checkpointed = [*map(plain_path, checkpointed)]
    if len(checkpointed) not in (0, len(blocks)) and is_reentrant:
        raise UsageError(
            f"{len(checkpointed)} of {len(blocks)} blocks are checkpointed with use_reentrant=True, so Headway "
            "cannot tell what they recompute. Checkpoint with use_reentrant=False, or checkpoint all blocks."
        )
    if len(checkpointed) == len(blocks):
        return ("reentrant" if is_reentrant else "full") if blocks else "none"
    return ",".join(checkpointed) or "none"
