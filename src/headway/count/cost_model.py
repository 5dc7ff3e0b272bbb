"""Cost models: the cost of each operation of a model per unit of its driver, and the product with a workload.

A row's backward is stored with the parameters that make autograd compute it: the gradient of an input is needed when
any parameter upstream of it is trained, the gradient of a weight when that weight is. Freezing and LoRA are therefore
exact on a stored cost model, without tracing again.
"""

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from headway.count import drivers
from headway.count.adapters import reaching, targets_of, with_adapters
from headway.count.flop_count import FlopCount, FlopRow
from headway.count.modalities import MODALITIES
from headway.count.recompute import run_again, towers_of_blocks
from headway.count.rows import ParamCount, Parameter, Row
from headway.count.workload import Workload
from headway.errors import UsageError, WorkloadError
from headway.words import Argument

By = Literal["component", "module", "layer"]

SINGLE_FRAMES = {"frames": "1"}
"""In the source of a ledger that was traced on single frames: of a clip it knows nothing."""

PIXELS = "pixels"
"""In the source of a ledger of pictures alone: the side of those that it was traced on [pixels]."""

DENOISES = "denoises"
"""In the source of a ledger of a model of latents: the argument that carries them, their layout, and a patch's sides
over frames, height and width [pixels of the latents]."""

_MOST_VARIANTS = 1024  # variants of a ledger in memory: what it trains, which blocks it leaves out

# name, driver, the driver that is evaluated, then FLOPs per unit of forward, dgrad, wgrad, recompute
_Coefficients = list[tuple[str, str, str, int, int, int, int]]


_MIXING = ("language.attention", "language.recurrence")  # components in which tokens of the text meet


@dataclass(frozen=True, repr=False)
class CostModel:
    """The costs of a model's operations, per unit of their drivers.

    Attributes:
        name: of the model.
        rows: one per operation and module, in the order in which forward runs them.
        parameters: the model's parameters; `Gradient.needs` numbers them in this order.
        source: where the rows were read: model class and versions.
        unknown: work whose FLOPs are missing: modules with weights that never ran in the trace, since their inputs were
            not given; and what runs on rows that data choose.
    """

    name: str
    rows: tuple[Row, ...]
    parameters: tuple[Parameter, ...]
    source: dict[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Name the model with its sizes; the rows of a small one would fill pages."""
        params, unknown = f"{self.params.total:,}", f", unknown={list(self.unknown)}" if self.unknown else ""
        return f"CostModel({self.name!r}: {len(self.rows)} rows, {params} parameters{unknown})"

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields alone; properties that are derived from them are derived again."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @cached_property
    def params(self) -> ParamCount:
        """Numbers of parameters; tied weights count once."""
        return ParamCount(
            sum(p.numel for p in self.parameters),
            sum(p.active for p in self.parameters),
            sum(p.numel for p in self.parameters if p.trainable),
        )

    @cached_property
    def has_vision(self) -> bool:
        """True if any row counts patches."""
        return "vision" in self.towers

    @cached_property
    def towers(self) -> frozenset[str]:
        """Whose work the rows count: `language`, `vision`, `audio`, `latents`, `source` where an encoder is read."""
        return frozenset(drivers.tower(row.driver) for row in self.rows)

    @cached_property
    def has_latents(self) -> bool:
        """True if any row counts latent patches."""
        return "latents" in self.towers

    @cached_property
    def block_towers(self) -> dict[str, str]:
        """Tower of each block by the block's name: `language`, `vision` or `audio`."""
        return towers_of_blocks(self.rows)

    @cached_property
    def blocks_in_backward(self) -> frozenset[str]:
        """Blocks that backward passes, given what is trained; "" where it passes rows outside of blocks."""
        return frozenset(
            row.block for row in self.rows if any(gradient.runs(self.trained) for gradient in row.gradients)
        )

    @cached_property
    def merge_group(self) -> int:
        """Patches that become one token; 1 where nothing is merged."""
        groups = [int(row.driver.removeprefix("patches/")) for row in self.rows if row.driver.startswith("patches/")]
        return max(groups, default=1)

    @cached_property
    def trained(self) -> int:
        """Bit i set when parameter i is trained, as `Gradient.runs` takes it."""
        return sum(1 << i for i, p in enumerate(self.parameters) if p.trainable)

    @cached_property
    def _variants(self) -> "dict[Any, CostModel]":
        return {}

    @cached_property
    def _tables(self) -> dict[tuple[By, str, bool], _Coefficients]:
        return {}

    @cached_property
    def _reaching(self) -> "dict[tuple[str, ...], CostModel]":
        return {}

    @cached_property
    def _evaluators(self) -> dict[str, Callable[[Workload], int]]:
        names = dict.fromkeys(name for row in self.rows for name in (row.driver, _evaluated(row)))
        return {driver: drivers.parse_driver(driver) for driver in names}

    def count(
        self, workload: Workload, *, recompute: str = "none", forward_only: bool = False, by: By = "component"
    ) -> FlopCount:
        """Count the FLOPs of a step by the convention `useful/1`.

        Args:
            workload: what the step computes.
            recompute: activation checkpointing: `none`, `full`, or a choice of blocks and parts of them such as
                `every:2`, `vision:full` or `full,-attention`; see `headway.count.recompute`.
            forward_only: leave the backward out (evaluation, prefill, decode steps).
            by: one row per component, per module with layer numbers folded into `*`, or per module of each layer.

        Returns:
            FLOPs by name and driver; exact.

        Raises:
            WorkloadError: images or audio for a model without a tower for them, a grid that it cannot merge, no
                sources for a model that reads an encoder, or a past where backward is counted too.
            UsageError: a term of the recomputation matches nothing.
        """
        units = self._units(workload, forward_only)
        table = self._tables.get((by, recompute, forward_only))
        if table is None:
            table = self._tables[by, recompute, forward_only] = self._coefficients(by, recompute, forward_only)
        return _times(table, units)

    def _units(self, workload: Workload, forward_only: bool) -> dict[str, int]:
        if len(workload.past) and not forward_only:
            raise WorkloadError(
                f"The workload has {int(workload.past.sum())} past tokens, whose keys and values are cached. No "
                "gradient reaches these, so there is no training step to count. Count with forward_only, or leave "
                "the past out."
            )
        self._check_towers(workload)
        return {driver: evaluate(workload) for driver, evaluate in self._evaluators.items()}

    def _check_towers(self, workload: Workload) -> None:
        """Refuse a workload that holds what the model has no tower for, or that lacks what its encoder reads."""
        if not self.rows:  # a model that was not traced, of which nothing is counted
            return
        # images and videos, and clips of several frames
        if len(workload.grids) and not self.has_vision:
            raise WorkloadError(
                f"{self.name} has no vision tower, but the workload holds {workload.num_images} images and "
                f"{workload.num_videos} videos. Leave them out, or name a vision-language model."
            )
        if SINGLE_FRAMES.items() <= self.source.items() and (workload.grids[:, 0] > 1).any():
            grid = "x".join(map(str, workload.grids[workload.grids[:, 0] > 1][0].tolist()))
            raise WorkloadError(
                f"{self.name} was traced on single frames, because its code takes no whole clips, so the cost of a "
                f"clip of {grid} patches is not known. If the model computes each frame by itself, give the frames "
                "as images."
            )

        # runs that see each other in full, and images that are denoised
        if len(workload.splits) and "pairs:splits" not in self._evaluators:
            raise WorkloadError(
                f"The workload has splits (runs of tokens that see each other in full), but {self.name} takes none, "
                "because its code makes its own mask. Use `with_splits` to count the model under the mask of the "
                "splits."
            )
        if workload.latent_patches and not self.has_latents:
            raise WorkloadError(
                f"{self.name} takes no latents, but the workload holds {workload.latent_patches} latent patches. "
                "Leave them out, or name a model that takes latents."
            )

        # whatever comes in lengths, such as audio, and the sources of an encoder, which the text reads
        for name, sizes in workload.media.items():
            row = MODALITIES[name]
            if row.shape == "lengths" and row.tower not in self.towers:
                raise WorkloadError(
                    f"{self.name} has no {row.tower} tower, but the workload holds {row.number(len(sizes))}. Leave "
                    f"them out, or name a model that takes {name}."
                )
        reads = "source" in self.towers
        if len(workload.sources) and not reads:
            raise WorkloadError(
                f"{self.name} has no encoder beside its text, but the workload names {len(workload.sources)} sources. "
                "Leave them out, or name a model with cross attention."
            )
        if self.has_vision and not len(workload.grids):
            return  # the workload has no pictures that its text could read
        # an encoder that is read without saying how much of it
        if reads and workload.num_segments and not len(workload.sources):
            raise WorkloadError(
                f"{self.name} reads an encoder, but the workload has no source lengths. Give one source length "
                f"[tokens or feature frames] for each of the {workload.num_segments} segments."
            )

    def _coefficients(self, by: By, recompute: str, forward_only: bool) -> _Coefficients:
        again = run_again(self.rows, self.trained, recompute, self.name) if not forward_only else set()
        sums: dict[tuple[str, str, str], list[int]] = {}
        for i, row in enumerate(self.rows):
            if by == "component":
                name = row.component
            else:
                name = row.module if by == "layer" else re.sub(r"(?<=\.)\d+(?=\.|$)", "*", row.module)
            entry = sums.setdefault((name, row.driver, _evaluated(row)), [0, 0, 0, 0])
            entry[0] += row.forward
            for gradient in row.gradients if not forward_only else ():
                if gradient.runs(self.trained):
                    entry[1 if gradient.phase == "dgrad" else 2] += gradient.flops
            if i in again:
                entry[3] += row.forward
        return [(*key, *entry) for key, entry in sums.items() if any(entry)]  # type: ignore[misc]  # names and numbers

    @cached_property
    def head_flops(self) -> int:
        """FLOPs of the head for each token that it runs on, forward and backward; 0 of other models."""
        head = [row for row in self.rows if _evaluated(row) == "logits"]
        gradients = sum(grad.flops for row in head for grad in row.gradients if grad.runs(self.trained))
        return sum(row.forward for row in head) + gradients

    def stage(self, modules: Collection[str]) -> "CostModel":
        """Return this model with the costs of some modules alone, such as those of one stage of a pipeline.

        A stage counts the workload of the whole model, so its other rows stay and cost nothing: they tell which towers
        the workload may be for.

        Args:
            modules: their dotted paths, those of the modules within them included.
        """
        rows = (r if r.module in modules else replace(r, forward=0, gradients=(), cached=0) for r in self.rows)
        return replace(self, rows=tuple(rows))

    def freeze(self, patterns: Iterable[str]) -> "CostModel":
        """Return this model with the parameters that match frozen.

        Args:
            patterns: each a component or its first part (`vision`, `language.mlp`), or a glob over parameter names
                (`model.layers.0.*`).

        Raises:
            UsageError: a pattern matches no parameter.
        """
        parameters = list(self.parameters)
        for pattern in patterns:
            for i in self.matching(pattern, "freeze"):
                parameters[i] = replace(parameters[i], trainable=False)
        return replace(self, parameters=tuple(parameters))

    def training(self, trained: int) -> "CostModel":
        """Return this model with just these parameters trained, bit i set for parameter i as in `trained`.

        What makes the same products of backward gives the same object.
        """
        if trained == self.trained:
            return self
        model = self._variants.get(trained)
        if model is None:
            products = tuple(gradient.runs(trained) for row in self.rows for gradient in row.gradients)
            model = self._variants.get(products)
            if model is None:
                parameters = (replace(p, trainable=bool(trained >> i & 1)) for i, p in enumerate(self.parameters))
                model = replace(self, parameters=tuple(parameters))
            self._remember(products, model)
            self._remember(trained, model)
        return model

    def without_blocks(self, blocks: frozenset[str]) -> "CostModel":
        """Return this model without some of its blocks, as a forward runs it that leaves out layers at random."""
        if not blocks:
            return self
        model = self._variants.get(blocks)
        if model is None:
            model = replace(self, rows=tuple(row for row in self.rows if row.block not in blocks))
            self._remember(blocks, model)
        return model

    def _remember(self, key: Any, model: "CostModel") -> None:
        if len(self._variants) >= _MOST_VARIANTS:
            self._variants.clear()
        self._variants[key] = model

    def matching(self, pattern: str, parameter: str = "pattern") -> tuple[int, ...]:
        """Find the parameters that a pattern names, by their place in `parameters`.

        Args:
            pattern: as in `freeze`.
            parameter: Python's name of the argument that it came by, for the error.

        Raises:
            UsageError: it names none.
        """
        hits = tuple(i for i, p in enumerate(self.parameters) if _matches(p, pattern))
        if not hits:
            components = sorted({p.component for p in self.parameters})
            raise UsageError(
                Argument(parameter, pattern),
                f" matches no parameter of {self.name}. Give a component ({', '.join(components)}), the first part of "
                f"one, or a glob over parameter names such as {self.parameters[0].name!r}.",
                choices=components,
            )
        return hits

    def with_splits(self) -> "CostModel":
        """Return this model with the mask of a workload's splits in place of its causal one: a prefix, a block.

        Raises:
            WorkloadError: its text attends by another mask than the causal one, or carries a state from token to token.
        """
        if "pairs:splits" in self._evaluators:
            return self
        if other := self.mixed_otherwise:
            raise WorkloadError(
                f"{self.name} cannot be counted under splits, because its text is mixed by {other}, and splits are "
                "runs in a causal mask. Leave the splits out, or name a model whose attention is causal."
            )
        rows = tuple(replace(row, driver="pairs:splits") if row.component in _MIXING else row for row in self.rows)
        return replace(self, rows=rows)

    @cached_property
    def mixed_otherwise(self) -> str:
        """Drivers of operations other than causal attention that mix the text; "nothing" where none mixes it."""
        mixing = [row for row in self.rows if row.component in _MIXING]
        plain = ("pairs:causal", "pairs:splits")
        other = {row.driver for row in mixing if row.op != "attention" or row.driver not in plain}
        return ", ".join(sorted(other)) if mixing else "nothing"

    def with_input_gradients(self, inputs: Iterable[str] = ("inputs_embeds",)) -> "CostModel":
        """Return this model with gradients of its inputs, which something that is trained in front of it asks for.

        A frozen language model behind a trained projector computes the gradient of every activation down to
        `inputs_embeds`, although it has no trained parameter itself.

        Args:
            inputs: names of the forward's arguments that require a gradient.

        Raises:
            WorkloadError: the cost model does not tell what one of them costs.
        """
        inputs = tuple(inputs)
        if inputs not in self._reaching:
            traced = set(filter(None, self.source.get("input_gradients", "").split(", ")))
            self._reaching[inputs] = self if traced.issuperset(inputs) else self._with_more(traced, inputs)
        return self._reaching[inputs]

    def _with_more(self, traced: set[str], inputs: tuple[str, ...]) -> "CostModel":
        """Bill the gradients of more inputs than those it was traced with."""
        embeddings = [i for i, p in enumerate(self.parameters) if p.name == self.source.get("embeddings")]
        is_known = embeddings and "source" not in self.towers
        if unknown := [name for name in inputs if name not in traced and not (name == "inputs_embeds" and is_known)]:
            raise WorkloadError(
                f"{', '.join(unknown)} requires a gradient, but the cost of that gradient is not known for "
                f"{self.name}. Trace the model with such inputs: trace(model, inputs=...) with arguments that "
                "require a gradient. If nothing in front of the model is trained, detach() the inputs."
            )
        source = self.source | {"input_gradients": ", ".join(sorted({*traced, *inputs}))}
        return replace(self, rows=reaching(self.rows, embeddings[0]), source=source)

    def lora(self, rank: int, targets: Sequence[str] | None = None) -> "CostModel":
        """Return this model with low-rank adapters on its linear modules and everything else frozen.

        Args:
            rank: inner dimension of the adapters.
            targets: last parts of module paths (`q_proj`), or globs over them; all linear modules but the head when
                None, as peft's `all-linear` on dense models. Expert weights that are one tensor for all experts are no
                linear modules.

        Raises:
            UsageError: the rank is below 1, or a target matches no linear module.

        Source: LoRA, Hu et al. 2021, equation 3: W x + B (A x), A of rank x in, B of out x rank.
        """
        if rank < 1:
            raise UsageError(Argument("rank", rank), ": the rank must be at least 1.")
        rows, parameters = with_adapters(self.rows, self.parameters, rank, targets_of(self.rows, targets, self.name))
        return replace(self, rows=rows, parameters=parameters)


def _times(table: _Coefficients, units: dict[str, int]) -> FlopCount:
    return FlopCount(
        tuple(
            FlopRow(name, driver, n * forward, n * dgrad, n * wgrad, n * again)
            for name, driver, evaluated, forward, dgrad, wgrad, again in table
            if (n := units[evaluated])
        )
    )


def _evaluated(row: Row) -> str:
    """Name the driver by which a row is billed: a head runs on no more tokens than the workload wants logits of."""
    return "logits" if row.component == "language.head" and row.driver == "tokens" else row.driver


def _matches(parameter: Parameter, pattern: str) -> bool:
    component = parameter.component
    return component == pattern or component.startswith(pattern + ".") or fnmatch.fnmatchcase(parameter.name, pattern)
