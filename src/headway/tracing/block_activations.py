"""Activations that autograd saves, block by block, as plain operations save them and as fused ones do.

Fused operations - a compiled block, or one of fused kernels - keep what matrix products and attention read, and what
they made where an elementwise operation's backward needs it; what is elementwise is computed again from those.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.integrations import moe

from headway.count.activations import SavedActivations, SavedBlock
from headway.tracing import build
from headway.tracing.activations import SavedRecorder, fit_drivers
from headway.tracing.arguments import in_dtype, phantoms
from headway.tracing.classify import checkpointable_blocks, finder_of_blocks
from headway.tracing.fit import candidates
from headway.tracing.inputs.model_inputs import call, inputs_for
from headway.tracing.phantom import Phantom, Stays, aten, root
from headway.tracing.stand_ins import recording

# a gather writes what it picks: no elementwise kernel takes it up
_PICKS = {aten.index, aten.index_select, aten.gather, aten.embedding}


def saved_by_block(model: nn.Module, *, autocast: torch.dtype | None = None) -> SavedActivations:
    """Count the bytes of activations that autograd saves for backward, by the block that saves them first.

    Not among them are what `saved_activations` leaves out and, of fused operations, the statistics of normalisations.

    Args:
        model: as it trains: its dtypes and `requires_grad` count.
        autocast: dtype of `torch.autocast` around the forward.

    Raises:
        TraceError: the model cannot be traced.
    """
    twin = build.twin_of_model(model, lambda tensor: tensor.dtype)
    build.prepare_twin(twin)
    model_inputs = inputs_for(twin, None)
    workloads = model_inputs.workloads()
    floats = next((p.dtype for p in twin.parameters() if p.is_floating_point()), torch.get_default_dtype())
    blocks = checkpointable_blocks(twin)
    of = finder_of_blocks(blocks)
    runs: list[_BlockRecorder] = []
    for workload in workloads:
        arguments = in_dtype(model_inputs.arguments(workload), floats)
        run = _BlockRecorder(twin, of, blocks=blocks)
        with recording(twin, run), _autocast(autocast):
            call(twin, arguments)
        run.forget([*twin.parameters(), *phantoms(arguments)])
        runs.append(run)
    driver_units = candidates(workloads, [*model_inputs.drivers])
    plain, left_out = fit_drivers([run.by_module(products_only=False) for run in runs], driver_units)
    fused, _ = fit_drivers([run.fused_by_module() for run in runs], driver_units)
    entry, _ = fit_drivers([run.entry for run in runs], driver_units)
    attention, _ = fit_drivers([run.attention for run in runs], driver_units)
    parts = [_by_block(rows, of) for rows in (plain, fused, entry, attention)]
    names = ["", *(name for name, _ in twin.named_modules() if name in blocks)]
    saved_blocks = {name: SavedBlock(*(part.get(name, {}) for part in parts)) for name in names}
    return SavedActivations(saved_blocks, left_out)


def saved_of_config(config: Any, precision: str) -> SavedActivations:
    """Count the saved activations of a transformers model in training, from its configuration alone.

    Args:
        config: a transformers configuration.
        precision: one of `headway.count.activations.PRECISIONS`.

    Raises:
        TraceError: the model cannot be traced.
    """
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = build.model_on_shapes(config, dtype)
    return saved_by_block(model, autocast=torch.bfloat16 if precision == "bfloat16-autocast" else None)


@contextmanager
def _autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Enter autocast as training on CUDA has it; None for none.

    A trace runs on a CPU, whose autocast leaves two things in the dtype in which they come: layer norms, which CUDA's
    computes in float32, and grouped products, to which `headway.models.experts` gives autocast's dtype.

    Source: docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32".
    """
    if dtype is None:
        yield
        return
    grouped, norm = moe._grouped_mm, F.layer_norm

    def in_dtype(rows: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        product: torch.Tensor = grouped(rows.to(dtype), weight.to(dtype), *args, **kwargs)
        return product

    def in_float32(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return norm(x.float(), *args, **kwargs)

    replaced = ((moe, "_grouped_mm", grouped, in_dtype), (F, "layer_norm", norm, in_float32))
    with torch.autocast("cpu", dtype):
        for module, name, _, stand_in in replaced:
            setattr(module, name, stand_in)
        try:
            yield
        finally:
            for module, name, own, _ in replaced:
                setattr(module, name, own)


def _by_block(
    modules: Mapping[str, Mapping[str, Fraction]], block_of: Callable[[str], str]
) -> dict[str, dict[str, Fraction]]:
    blocks: dict[str, dict[str, Fraction]] = {}
    for module, rows in modules.items():
        sums = blocks.setdefault(block_of(module), {})
        for driver, factor in rows.items():
            sums[driver] = sums.get(driver, Fraction(0)) + factor
    return blocks


@dataclass
class _BlockRecorder(SavedRecorder):
    """Records the tensors that autograd saves, and the tensors that elementwise operations made them from."""

    blocks: set[str] = field(default_factory=set)  # paths of the blocks
    entry: Counter[str] = field(default_factory=Counter)  # bytes that enter each block
    attention: Counter[str] = field(default_factory=Counter)  # bytes that attention's kernels give, by module
    # by the id of a storage's first tensor, the ids of those that elementwise operations made it of; a product's
    # result, what was picked and what enters or leaves a block are made of themselves
    origins: dict[int, frozenset[int]] = field(default_factory=dict)
    tensors: dict[int, Phantom] = field(default_factory=dict)  # by id; held, so that an id stays its own

    def __enter__(self) -> "_BlockRecorder":
        super().__enter__()
        self._hooks.append(register_module_forward_pre_hook(self._enter_block))
        self._hooks.append(register_module_forward_hook(self._leave_block))
        return self

    def _enter_block(self, module: nn.Module, args: Any) -> None:
        if (path := self.path_of(module)) in self.blocks:
            self.entry[path] += self._at_the_border(args)

    def _leave_block(self, module: nn.Module, _args: Any, output: Any) -> None:
        if self.path_of(module) in self.blocks:
            self._at_the_border(output)

    def _at_the_border(self, value: Any) -> int:
        """Take tensors that enter or leave a block, a graph of its own, as made of themselves; return their bytes."""
        crossing = [tensor for tensor in phantoms(value) if tensor.fed and tensor.constant is None]
        for tensor in crossing:
            storage = root(tensor)
            self.tensors[id(storage)] = storage
            self.origins[id(storage)] = frozenset([id(storage)])
        return sum(tensor.nbytes for tensor in crossing)

    def attends(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Note the output of attention's kernel; heads of two sizes are padded to the larger one."""
        query, *_, value = operands = super().attends(*operands)
        head = max(query.shape[-1], value.shape[-1])
        rows = query.shape[:-1].numel()  # a query of a head each
        if torch.is_grad_enabled():
            self.attention[self.module] += rows * (head * query.element_size() + torch.float32.itemsize)
        return operands

    def _on_result(self, packet: Any, args: tuple[Any, ...], out: Phantom) -> Stays:
        if packet not in _PICKS:
            parts = [part for part in phantoms(args) if part.fed and part.constant is None]
            origins = frozenset[int]().union(*(self._origins(root(part)) for part in parts))
            if origins:
                self.tensors[id(root(out))] = root(out)
                self.origins[id(root(out))] = origins
        return super()._on_result(packet, args, out)

    def _origins(self, storage: Phantom) -> frozenset[int]:
        self.tensors[id(storage)] = storage
        return self.origins.get(id(storage), frozenset([id(storage)]))

    def forget(self, tensors: Any) -> None:
        """Leave out tensors that the forward was given: parameters and inputs."""
        tensors = [*tensors]
        super().forget(tensors)
        self._inputs = {id(root(tensor)) for tensor in tensors}

    def fused_by_module(self) -> Counter[str]:
        """Add up the bytes that fused operations would save, by the module that needs them first."""
        sizes: Counter[str] = Counter()
        counted = set(self._inputs)
        for key, (storage, module, views) in self.storages.items():
            if key in self.factors and key not in counted:
                counted.add(key)
                sizes[module] += self.touched_bytes(storage, views)
            elif key not in self.factors:
                for origin in self._origins(storage) - counted:
                    counted.add(origin)
                    sizes[module] += self.tensors[origin].nbytes
        return sizes
