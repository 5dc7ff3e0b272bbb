"""Activations that autograd saves for the backward of a model, in bytes per unit of a driver, read off its forward.

The model runs as for its ledger, on shapes, but with its own dtypes and with the parameters that it really trains, so
that what is saved is what a real step saves. Each storage counts once, however many operations save it or views of it.

Saved bytes are of the whole model, or of each block, as plain operations save them and as fused ones do. Fused
operations - a compiled block, or one of fused kernels - keep what matrix products and attention read, and what they
made where an elementwise operation's backward needs it; what is elementwise is computed again from those.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from headway.count.activations import SavedActivations, SavedBlock
from headway.count.workload import Workload
from headway.tracing import build
from headway.tracing.arguments import in_dtype, phantoms
from headway.tracing.classify import checkpointable_blocks, finder_of_blocks, wraps_a_layer
from headway.tracing.fit import candidates, proportional, strided_drivers, sum_of_drivers
from headway.tracing.inputs.model_inputs import call, inputs_for
from headway.tracing.launches import LaunchCounter, RunningCode
from headway.tracing.operation import Operation
from headway.tracing.phantom import Phantom, Stays, aten, root
from headway.tracing.record import Recorder
from headway.tracing.repeats import are_alike
from headway.tracing.results import Results, reached, start_backward, trained_results
from headway.tracing.stand_ins import recording
from headway.tracing.unwrap import replaced

# a gather writes what it picks: no elementwise kernel takes it up
_PICKS = {aten.index, aten.index_select, aten.gather, aten.embedding}
_View = tuple[int, tuple[tuple[int, int], ...]]  # offset, then (stride, size) of each direction, inner ones first


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes that autograd saves of a forward."""

    rows: tuple[tuple[str, Fraction], ...]  # driver and bytes per unit of it
    reached: int  # bit i set when parameter i gets a gradient
    left_out: tuple[str, ...]  # modules whose saved bytes no driver explains; they are missing in `rows`


def saved_activations(
    model: nn.Module,
    *,
    inputs: Any = None,
    dtypes: Mapping[int, torch.dtype] | None = None,
    autocast: torch.dtype | None = None,
    products_only: bool = False,
    results: Results = None,
) -> SavedBytes:
    """Count the bytes of activations that autograd saves for backward.

    These are floats that the forward makes from the batch. Not among them: parameters and what is made of them alone,
    the batch's own tensors, tables that depend on positions alone, integers and booleans (indices, masks), what does
    not grow with the batch, and the statistics of attention, which is taken to run as a flash kernel.

    Args:
        model: as it trains: its dtypes and `requires_grad` count.
        inputs: as for `trace`.
        dtypes: by the id of a parameter, the dtype in which forward sees it; its own where it is not named.
        autocast: dtype of `torch.autocast` around the forward.
        products_only: count what matrix products and attention read, and leave out what only elementwise operations
            saved: a compiler or a fused kernel may compute that again, or cast once what autocast casts for each
            product.
        results: as for `trace`.

    Raises:
        TraceError: the model cannot be traced.
    """
    # the model on shapes, with the dtypes in which a real step sees its parameters
    dtype_of = dict(dtypes or {})
    if products_only and autocast is not None:
        dtype_of, autocast = {id(p): autocast for p in model.parameters()}, None
    run = _Runs.of(
        model,
        lambda tensor: dtype_of.get(id(tensor), tensor.dtype),
        lambda twin: SavedRecorder(twin, lambda _: ""),
        nullcontext if autocast is None else lambda: torch.autocast("cpu", autocast),
        inputs,
    )
    starts = trained_results(run.output, run.twin, results)
    # bytes that each module saves, on workloads of unlike proportions
    sizes = [recorder.by_module(products_only=products_only) for recorder in run.recorders]

    # bytes per unit of the drivers that explain them, summed over modules
    names = [*run.inputs.drivers]
    if run.inputs.strided and are_alike(run.recorders):
        operations = [recorder.operations for recorder in run.recorders]
        names += strided_drivers(operations, run.workloads, run.inputs.strided)
    modules, left_out = _fit_drivers(sizes, candidates(run.workloads, names))
    rows: dict[str, Fraction] = {}
    for of_module in modules.values():
        _add(rows, of_module)
    trained = sum(1 << i for i, p in enumerate(run.twin.parameters()) if p.requires_grad)
    return SavedBytes(tuple(rows.items()), reached(starts) & trained, left_out)


@dataclass
class _Runs:
    """Forwards of a model on shapes, one for each workload."""

    twin: nn.Module
    inputs: Any
    workloads: Sequence[Workload]
    recorders: list[Any]
    output: Any  # output of the last forward
    counter: LaunchCounter | None = None  # launches of the first forward and its backward, if they are counted

    @classmethod
    def of(
        cls,
        model: nn.Module,
        dtype_of: Callable[[torch.Tensor], torch.dtype],
        make_recorder: Callable[[nn.Module], "SavedRecorder"],
        context: Callable[[], AbstractContextManager[Any]],
        inputs: Any = None,
        code: RunningCode | None = None,
    ) -> "_Runs":
        twin = build.twin_of_model(model, dtype_of)
        build.prepare_twin(twin)
        model_inputs = inputs_for(twin, inputs)
        runs = cls(twin, model_inputs, model_inputs.workloads(), [], None)
        floats = next((p.dtype for p in twin.parameters() if p.is_floating_point()), torch.get_default_dtype())
        for workload in runs.workloads:
            arguments = in_dtype(model_inputs.arguments(workload), floats)
            recorder = make_recorder(twin)
            tokens = max(workload.segments, default=0)
            counter = LaunchCounter(recorder, code, tokens) if code is not None and not runs.recorders else None
            runs.counter = counter or runs.counter
            with recording(twin, recorder, None if counter is None else counter.around), counter or nullcontext():
                with context():
                    runs.output = call(twin, arguments)
                if counter is not None:
                    start_backward(runs.output, twin)
            recorder.forget([*twin.parameters(), *phantoms(arguments)])
            runs.recorders.append(recorder)
        return runs


def _fit_drivers(
    runs: Sequence[Mapping[str, int]], driver_units: Mapping[str, Sequence[int]]
) -> tuple[dict[str, dict[str, Fraction]], tuple[str, ...]]:
    """Find the drivers of each module's bytes, with bytes per unit of each, and name the modules that have none."""
    modules: dict[str, dict[str, Fraction]] = {}
    left_out, terms = [], dict[tuple[int, ...], list[tuple[str, Fraction]] | None]()
    for module in runs[0]:
        sizes = tuple(run.get(module, 0) for run in runs)
        if sizes not in terms:
            terms[sizes] = _terms(sizes, driver_units)
        rows = modules[module] = {}
        for driver, factor in terms[sizes] or ():
            # in a pack, what is there once for a run of one segment is there once for all of them
            name = "packs" if driver == "segments" and len(runs) > 1 else driver
            rows[name] = rows.get(name, Fraction(0)) + factor
        if terms[sizes] is None:
            left_out.append(module or "(the model)")
    return modules, tuple(left_out)


def _add(sums: dict[str, Fraction], rows: Mapping[str, Fraction]) -> None:
    for driver, factor in rows.items():
        sums[driver] = sums.get(driver, Fraction(0)) + factor


def _terms(sizes: Sequence[int], driver_units: Mapping[str, Sequence[int]]) -> list[tuple[str, Fraction]] | None:
    """Find one driver, or a few whose sum explains sizes; none for what does not grow, None where nothing explains."""
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return []
    if matches := proportional(sizes, driver_units):
        return [min(matches, key=lambda match: match[1].denominator)]
    return sum_of_drivers(sizes, driver_units, squares=False) or None


@dataclass
class SavedRecorder(Recorder):
    """Records the tensors that autograd saves, beside the operations."""

    # by the id of a storage's first tensor: that tensor, the module that saved it, and the views saved
    storages: dict[int, tuple[Phantom, str, set[_View]]] = field(default_factory=dict)
    # by id, the first tensors of the storages that products and attention read
    factors: dict[int, Phantom] = field(default_factory=dict)
    readers: dict[int, str] = field(default_factory=dict)  # by the same id, the module that read it first

    def _on_save(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Phantom) and tensor.fed and tensor.constant is None:
            storage = root(tensor)
            _, _, views = self.storages.setdefault(id(storage), (storage, self.module, set()))
            views.add(_view(tensor))
        return tensor

    def _on_dispatch(self, func: Any, args: tuple[Any, ...], out: Any) -> Operation | Literal[False] | None:
        product = super()._on_dispatch(func, args, out)
        if product is not None:
            self._read(phantoms(args))
        return product

    def _read(self, tensors: Iterable[Phantom]) -> None:
        """Note the factors of a product or of attention."""
        for tensor in tensors:
            self.factors[id(root(tensor))] = root(tensor)
            self.readers.setdefault(id(root(tensor)), self.module)

    def attends(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Note the inputs of attention, in the dtype that autocast hands to its kernel."""
        if torch.is_autocast_enabled("cpu"):
            operands = tuple(t.to(torch.get_autocast_dtype("cpu")) for t in operands)
        self._read(t for t in operands if isinstance(t, Phantom))
        return operands

    def attended(self, out: torch.Tensor) -> None:
        """Keep the output of attention, which a flash kernel reads again in its backward.

        Source: FlashAttention-2 (Dao 2023), algorithm 2: D = rowsum(dO * O).
        """
        if out.requires_grad and isinstance(out, Phantom):
            self._on_save(out)
            self.factors[id(root(out))] = root(out)

    def forget(self, tensors: Iterable[Any]) -> None:
        """Leave out tensors that the forward was given: parameters and inputs."""
        for tensor in tensors:
            self.storages.pop(id(root(tensor)), None)

    def by_module(self, *, products_only: bool) -> Counter[str]:
        """Add up the bytes that each module saved first."""
        sizes: Counter[str] = Counter()
        for key, (storage, module, views) in self.storages.items():
            if key in self.factors or not products_only:
                sizes[module] += self.touched_bytes(storage, views)
        return sizes

    def touched_bytes(self, storage: Phantom, views: set[_View]) -> int:
        """Count the bytes of a storage that any of its saved views looks at."""
        return _touched(storage.numel(), frozenset(views)) * storage.element_size()


def _view(tensor: torch.Tensor) -> _View:
    """Describe which elements of its storage a tensor looks at, whatever the order of its dimensions."""
    directions: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if directions and directions[-1][0] * directions[-1][1] == stride:
            directions[-1] = (directions[-1][0], directions[-1][1] * size)
        else:
            directions.append((stride, size))
    scale = 2 if tensor.is_complex() else 1  # a view of pairs of floats
    return int(tensor.storage_offset()) * scale, tuple((stride * scale, size) for stride, size in directions)


@lru_cache(maxsize=256)  # layers repeat each other
def _touched(numel: int, views: frozenset[_View]) -> int:
    """Count the elements of a storage that any of its views looks at."""
    if any(directions == ((1, numel),) for _, directions in views):
        return numel
    touched = torch.zeros(numel, dtype=torch.bool)
    for offset, directions in views:
        index = torch.tensor([offset])
        for stride, size in directions:
            index = (index[:, None] + torch.arange(size) * stride).flatten()
        touched[index] = True
    return int(torch.count_nonzero(touched))


def saved_by_block(
    model: nn.Module, *, autocast: torch.dtype | None = None, code: RunningCode | None = None
) -> SavedActivations:
    """Count the bytes of activations that autograd saves for backward, by the block that saves them first.

    Not among them are what `saved_activations` leaves out and, of fused operations, the statistics of normalisations.

    Args:
        model: as it trains: its dtypes and `requires_grad` count.
        autocast: dtype of `torch.autocast` around the forward.
        code: that runs recurrent layers, with which launches are counted too; None to count none.

    Raises:
        TraceError: the model cannot be traced.
    """

    def recorder_of(twin: nn.Module) -> _BlockRecorder:
        blocks = checkpointable_blocks(twin)
        return _BlockRecorder(twin, finder_of_blocks(blocks), blocks=blocks)

    run = _Runs.of(model, lambda tensor: tensor.dtype, recorder_of, lambda: _autocast(autocast), code=code)
    blocks = checkpointable_blocks(run.twin)
    of = finder_of_blocks(blocks)
    driver_units = candidates(run.workloads, [*run.inputs.drivers])
    plain, left_out = _fit_drivers([r.by_module(products_only=False) for r in run.recorders], driver_units)
    fused, _ = _fit_drivers([r.fused_by_module() for r in run.recorders], driver_units)
    entry, _ = _fit_drivers([r.entry for r in run.recorders], driver_units)
    attention, _ = _fit_drivers([r.attention for r in run.recorders], driver_units)
    parts = [_by_block(rows, of) for rows in (plain, fused, entry, attention)]
    names = ["", *(name for name, _ in run.twin.named_modules() if name in blocks)]
    parts.append({} if run.counter is None else run.counter.by_block(of, run.recorders[0].fused_kernels(of)))
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
    autocast = torch.bfloat16 if precision == "bfloat16-autocast" else None
    return saved_by_block(model, autocast=autocast, code=RunningCode())


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
    from transformers.integrations import moe  # a model without experts may live without transformers

    grouped, norm = moe._grouped_mm, F.layer_norm

    def in_dtype(rows: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        product: torch.Tensor = grouped(rows.to(dtype), weight.to(dtype), *args, **kwargs)
        return product

    def in_float32(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return norm(x.float(), *args, **kwargs)

    changes = ((vars(moe), "_grouped_mm", in_dtype), (vars(F), "layer_norm", in_float32))
    with torch.autocast("cpu", dtype), replaced(changes):
        yield


def _by_block(
    modules: Mapping[str, Mapping[str, Fraction]], block_of: Callable[[str], str]
) -> dict[str, dict[str, Fraction]]:
    blocks: dict[str, dict[str, Fraction]] = {}
    for module, rows in modules.items():
        _add(blocks.setdefault(block_of(module), {}), rows)
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
        # an adapter's result is added to its host's, and backward needs the sum alone
        if self.path_of(module) in self.blocks or wraps_a_layer(module):
            self._at_the_border(output)

    def _at_the_border(self, value: Any) -> int:
        """Take tensors at the border of a block, a graph of its own, as made of themselves; return their bytes."""
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

    def fused_kernels(self, block_of: Callable[[str], str]) -> Counter[str]:
        """Count the tensors that elementwise operations make for products and for the next block, by block."""
        counts = Counter({block: 1 for block in self.blocks if block in self.handed})
        for key, module in self.readers.items():
            counts[block_of(module)] += self.origins.get(key, frozenset([key])) != {key}
        return counts
