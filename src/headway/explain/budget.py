"""Time that a step needed, by component, at the device's peak and at its ceiling: the head of the waterfall."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError
from headway.report.step_lines import NAMES

SCHEMA_VERSION = 1
NO_COMPONENT = "other modules"
OTHER = "other"


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Rates that a device can reach."""

    peak_flops_per_s: float | None = None  # peak for the products' dtype, dense [FLOP/s]; None where it is not known
    ceiling_flops_per_s: float | None = None  # the best that was measured [FLOP/s]; None where nothing was
    bytes_per_s: float | None = None  # bandwidth of its memory [B/s]; None where it is not known
    peak_source: str = ""  # source of the peak; "" without one, or where the trace says it itself
    why_no_peak: str = ""  # a sentence, where there is none

    @property
    def best_flops_per_s(self) -> float | None:
        """The ceiling, or the peak where none was measured [FLOP/s]."""
        return self.ceiling_flops_per_s or self.peak_flops_per_s


@dataclass(frozen=True, slots=True)
class Need:
    """Time that one component of a step needed [ns]; each is a whole number, so that sums are exact."""

    useful: int  # useful FLOPs / peak
    ceiling_loss: int  # time that the same FLOPs take longer at the ceiling
    recomputed: int  # FLOPs of activation checkpointing / ceiling
    padding: int  # FLOPs that were spent on padding / ceiling

    @property
    def total(self) -> int:
        """Sum of all four [ns]."""
        return self.useful + self.ceiling_loss + self.recomputed + self.padding


def head_lines(needs: Mapping[str, Need]) -> list[tuple[str, str, int, dict[str, int]]]:
    """The lines that a waterfall begins with: key, name, time [ns], and that of each component."""
    lines = []
    for key, attribute in (
        ("useful", "useful"),
        ("ceiling", "ceiling_loss"),
        ("recomputation", "recomputed"),
        ("padding", "padding"),
    ):
        by_component = {component: ns for component, need in needs.items() if (ns := getattr(need, attribute))}
        lines.append((key, NAMES[key], sum(by_component.values()), by_component))
    return lines


class NeededWork:
    """Record that Headway wrote into a trace of the work of its steps.

    Args:
        written: the object `headway` of the trace.
        source: the trace's name, for errors.

    Raises:
        ConfigError: the object is of another version, or lacks a key.
    """

    def __init__(self, written: Mapping[str, Any], source: str) -> None:
        self._source = source
        if written.get("schema_version") != SCHEMA_VERSION:
            raise ConfigError(
                f"{source}: its object `headway` is of version {written.get('schema_version')!r}, this Headway reads "
                f"version {SCHEMA_VERSION}. Explain it with the Headway that wrote it, or write the trace again."
            )
        with self._read():
            peak, ceiling = written["peak_flops_per_s"], written["ceiling_flops_per_s"]
            self.peak_flops_per_s = None if peak is None else float(peak)
            self.ceiling_flops_per_s = None if ceiling is None else float(ceiling)
            bandwidth = written.get("memory_bytes_per_s")  # missing in the first profiles
            self.bytes_per_s = None if bandwidth is None else float(bandwidth)
            self.profiler_overhead_s = float(written["profiler_overhead_s"] or 0.0)
            self._components = {str(path): str(name) for path, name in written["components"].items()}
            self._within = _components_within(self._components)
            self._steps = dict(written["steps"])
            if not all(rate is None or rate > 0 for rate in (self.peak_flops_per_s, self.ceiling_flops_per_s)):
                raise ValueError(f"peak {self.peak_flops_per_s}, ceiling {self.ceiling_flops_per_s}")

    @property
    def is_undivided(self) -> bool:
        """True if the whole model is one component, as where the trace's modules have no paths."""
        return self._components.keys() == {""}

    def component_of(self, module: str) -> str:
        """The component of a module, or of the nearest module around it that has a component or holds one.

        Where that holds several, as a block does around its norms, it is `TOWER.other`, as the cost model names the
        parameters of norms; `model.other` where they are of several towers.
        """
        path = module
        while path not in self._components:
            within = self._within.get(path, ())
            if within:
                return next(iter(within)) if len(within) == 1 else f"{tower_of(within)}.{OTHER}"
            if not path:
                return NO_COMPONENT
            path = path.rpartition(".")[0]
        return self._components[path]

    def components_in(self, module: str) -> frozenset[str]:
        """The components of a module and of all modules within."""
        own = {self._components[module]} if module in self._components else set()
        return frozenset(own | self._within.get(module, set()))

    def flops_run(self, step: int) -> dict[str, int]:
        """FLOPs that each component ran in a step, useful and recomputed; {} without the step's workload."""
        if str(step) not in self._steps:
            return {}
        ran = self._useful(step)
        for name, flops in self._recomputed(step).items():
            ran[name] = ran.get(name, 0) + flops
        return ran

    def packs(self, step: int) -> "list[Mapping[str, Sequence[int]]] | None":
        """List for each pass of a step, in order, FLOPs of each module that attends: forward, backward, and run again.

        None where the trace does not say.
        """
        with self._read():
            packs = self._steps.get(str(step), {}).get("packs")
            if packs is None:
                return None
            return [{str(path): [int(n) for n in flops] for path, flops in pack["attention"].items()} for pack in packs]

    def useful_flops(self, step: int) -> int | None:
        """Useful FLOPs of a step; None if the trace has none of this step."""
        if str(step) not in self._steps:
            return None
        return sum(self._useful(step).values())

    def needs(self, step: int) -> dict[str, Need] | None:
        """Compute the time that each component of a step needed; None without the step's workload or a peak.

        Padding is known for the whole step only: it is shared out as the useful FLOPs are.
        """
        peak = self.peak_flops_per_s
        if peak is None or str(step) not in self._steps:
            return None
        ceiling = self.ceiling_flops_per_s or peak
        useful, recomputed = self._useful(step), self._recomputed(step)
        with self._read():
            padding = int(self._steps[str(step)]["padding_flops"] or 0)
        total = sum(useful.values())
        needs, shared, shared_flops = {}, 0, 0
        for name in [*useful, *(name for name in recomputed if name not in useful)]:
            flops = useful.get(name, 0)
            shared_flops += flops
            # Difference of running sums, so that none is lost.
            share = padding * shared_flops // total - shared if total else 0
            shared += share
            at_peak, at_ceiling = round(flops / peak * 1e9), round(flops / ceiling * 1e9)
            needs[name] = Need(
                useful=at_peak,
                ceiling_loss=at_ceiling - at_peak,
                recomputed=round(recomputed.get(name, 0) / ceiling * 1e9),
                padding=round(share / ceiling * 1e9),
            )
        return needs

    def _useful(self, step: int) -> dict[str, int]:
        with self._read():
            parts_of = self._steps[str(step)]["useful_flops"]
            return {str(name): sum(int(flops) for flops in parts.values()) for name, parts in parts_of.items()}

    def _recomputed(self, step: int) -> dict[str, int]:
        with self._read():
            return {str(name): int(flops) for name, flops in self._steps[str(step)]["recomputed_flops"].items()}

    @contextmanager
    def _read(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{self._source}: its object `headway` cannot be read ({type(error).__name__}: {error}). Write the "
                "trace again with this Headway."
            ) from error


def tower_of(components: Collection[str]) -> str:
    """The first part that all names of components have; `model` where they have several.

    >>> tower_of(["language.mlp", "language.attention"]), tower_of(["language.mlp", "vision.mlp"])
    ('language', 'model')
    """
    towers = {name.partition(".")[0] for name in components}
    return next(iter(towers)) if len(towers) == 1 else "model"


def _components_within(components: Mapping[str, str]) -> dict[str, set[str]]:
    """The components of all modules below each path, the root as "" among them."""
    within: dict[str, set[str]] = {}
    for path, name in components.items():
        outer = path
        while outer:
            outer = outer.rpartition(".")[0]
            within.setdefault(outer, set()).add(name)
    return within
