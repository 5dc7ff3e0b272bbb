"""Activations that autograd saves for the backward of a model, in bytes per unit of a driver, read off its forward.

The model runs as for its ledger, on shapes, but with its own dtypes and with the parameters that it really trains, so
that what is saved is what a real step saves. Each storage counts once, however many operations save it or views of it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import nn

from headway.tracing import build
from headway.tracing.arguments import in_dtype, phantoms
from headway.tracing.fit import candidates, proportional, strided_drivers, sum_of_drivers
from headway.tracing.inputs.model_inputs import call, inputs_for
from headway.tracing.operation import Operation
from headway.tracing.phantom import Phantom, root
from headway.tracing.record import Recorder
from headway.tracing.repeats import are_alike
from headway.tracing.results import Results, reached, trained_results
from headway.tracing.stand_ins import recording

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
    twin = build.twin_of_model(model, lambda tensor: dtype_of.get(id(tensor), tensor.dtype))
    build.prepare_twin(twin)
    model_inputs = inputs_for(twin, inputs)
    workloads = model_inputs.workloads()
    context = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    floats = next((p.dtype for p in twin.parameters() if p.is_floating_point()), torch.get_default_dtype())

    # bytes that each module saves, on workloads of unlike proportions
    runs: list[SavedRecorder] = []
    sizes: list[Counter[str]] = []
    for workload in workloads:
        arguments = in_dtype(model_inputs.arguments(workload), floats)
        run = SavedRecorder(twin, lambda _: "")
        with recording(twin, run), context:
            starts = trained_results(call(twin, arguments), twin, results)
        run.forget([*twin.parameters(), *phantoms(arguments)])
        runs.append(run)
        sizes.append(run.by_module(products_only=products_only))

    # bytes per unit of the drivers that explain them, summed over modules
    names = [*model_inputs.drivers]
    if model_inputs.strided and are_alike(runs):
        names += strided_drivers([run.operations for run in runs], workloads, model_inputs.strided)
    modules, left_out = fit_drivers(sizes, candidates(workloads, names))
    rows: dict[str, Fraction] = {}
    for module in modules.values():
        for driver, factor in module.items():
            rows[driver] = rows.get(driver, Fraction(0)) + factor
    trained = sum(1 << i for i, p in enumerate(twin.parameters()) if p.requires_grad)
    return SavedBytes(tuple(rows.items()), reached(starts) & trained, left_out)


def fit_drivers(
    runs: Sequence[Mapping[str, int]], driver_units: Mapping[str, Sequence[int]]
) -> tuple[dict[str, dict[str, Fraction]], tuple[str, ...]]:
    """Find the drivers of each module's bytes, with bytes per unit of each, and name the modules that have none.

    Args:
        runs: bytes by module in each run.
        driver_units: units of each driver in each run.
    """
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

    def _on_save(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Phantom) and tensor.fed and tensor.constant is None:
            storage = root(tensor)
            _, _, views = self.storages.setdefault(id(storage), (storage, self.module, set()))
            views.add(_view(tensor))
        return tensor

    def _on_dispatch(self, func: Any, args: tuple[Any, ...], out: Any) -> Operation | Literal[False] | None:
        product = super()._on_dispatch(func, args, out)
        if product is not None:
            self.factors.update((id(root(t)), root(t)) for t in phantoms(args))
        return product

    def attends(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Note the inputs of attention, in the dtype that autocast hands to its kernel."""
        if torch.is_autocast_enabled("cpu"):
            operands = tuple(t.to(torch.get_autocast_dtype("cpu")) for t in operands)
        self.factors.update((id(root(t)), root(t)) for t in operands if isinstance(t, Phantom))
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
