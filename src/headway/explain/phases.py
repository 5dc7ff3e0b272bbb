"""A step by the phases that its loop names: time, share, MFU, MBU and bound of each, which add up to the step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.count.generation import GENERATION_QUANTITIES
from headway.meter.step_phases import REST
from headway.report import format_ms, format_share
from headway.report.quantity import quantity
from headway.report.section import ReportSection
from headway.report.step_lines import NAMES

ASIDE = "aside"
_QUANTITIES = (*GENERATION_QUANTITIES, "tokens", "slots", "scored_tokens", "bytes_moved", "weight_bytes")
_FAR = 0.1  # MFU and MBU below which a phase is bound neither by what it computes nor by what it moves
_MOSTLY = 0.5  # part of decode's places from which idle places are what the phase is bound by
_WORTH_A_WORD = 0.01  # part of the step, or of decode's rows, from which a sentence names it


@dataclass(frozen=True, slots=True)
class PhaseLine:
    """A named phase of a step, or of the mean of several."""

    name: str  # name that the loop gives it; "rest" of what no phase claims, "aside" of what is no training
    ns: int  # time that the loop was in it [ns]; those of all lines add up to the step
    share: float  # ns / the step's duration
    busy_ns: int  # time that its devices worked [ns]: its own where it has some, else `ns`
    num_devices: int = 0  # devices of its own; 0 where it runs on those of the loop
    mfu: float | None = None  # MFU of its devices over `busy_ns`; None where it is not known
    mbu: float | None = None  # MBU of its devices over `busy_ns`; None where it is not known
    flops: float | None = None  # useful FLOPs of a step; None where they are not known
    # tokens, bytes and what was generated, of a step, by their names in a record
    quantities: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.quantities.get(name, 0.0)

    @property
    def idle_share(self) -> float:
        """Share of decode's places whose answer had ended: the tail of the longest answer."""
        return 1 - self["decode_tokens"] / self["decode_slots"] if self["decode_slots"] else 0.0

    @property
    def bound(self) -> str:
        """Name for people of the bound of the phase; "" if it is unknown."""
        if self.num_devices:
            return "other devices"
        if self.name == ASIDE or not self.flops:
            return "host" if self.flops == 0 and self.ns else ""
        if self.idle_share >= _MOSTLY:
            return "idle rows"
        if self.mfu is None or self.mbu is None:
            return ""
        if max(self.mfu, self.mbu) < _FAR:
            return "neither"
        return "compute" if self.mfu >= self.mbu else "memory"

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON-ready record."""
        return {
            "name": self.name,
            "ns": self.ns,
            "share": self.share,
            "busy_ns": self.busy_ns,
            "num_devices": self.num_devices,
            "mfu": self.mfu,
            "mbu": self.mbu,
            "bound": self.bound or None,
            "flops": self.flops,
            "idle_share": self.idle_share,
            **self.quantities,
        }


def phase_lines(record: Mapping[str, Any], duration_ns: int, aside_ns: int) -> tuple[PhaseLine, ...]:
    """Read the phases of a record's mean step.

    Args:
        record: of one step or of several.
        duration_ns: of the mean step [ns], above 0.
        aside_ns: part of it that is no training [ns].

    Returns:
        Lines that add up to the duration, in the record's order, with the rest and what is no training last; none of a
        loop without phases.
    """
    phases = record.get("phases")
    entries = {} if not isinstance(phases, Mapping) else {k: v for k, v in phases.items() if isinstance(v, Mapping)}
    if not entries:
        return ()
    num_steps = max(1, round(quantity(record.get("num_steps", 1)) or 1))
    lines = [
        _line(name, entry, num_steps, _ns(entry.get("wall_s"), num_steps), duration_ns)
        for name, entry in entries.items()
        if name != REST
    ]
    # Rounding of the others is the rest's, so that the sum is the step.
    rest_ns = duration_ns - aside_ns - sum(line.ns for line in lines)
    lines.append(_line(REST, entries.get(REST, {}), num_steps, rest_ns, duration_ns))
    if aside_ns:
        lines.append(PhaseLine(ASIDE, aside_ns, aside_ns / duration_ns, aside_ns))
    return tuple(lines)


def profiled_phases(times: Mapping[str, int], duration_ns: int) -> tuple[PhaseLine, ...]:
    """Make the phases of a step of a trace from their times [ns], which add up to its duration [ns]."""
    in_order = sorted(times.items(), key=lambda phase: phase[0] == REST)
    return tuple(PhaseLine(name, ns, ns / duration_ns, ns) for name, ns in in_order)


def _ns(seconds: object, num_steps: int) -> int:
    return round((quantity(seconds) or 0.0) * 1e9) // num_steps


def _line(name: str, entry: Mapping[str, Any], num_steps: int, ns: int, duration_ns: int) -> PhaseLine:
    flops = entry.get("flops")
    of_all_steps = {key: quantity(entry.get(key)) or 0.0 for key in _QUANTITIES}
    total = quantity(flops.get("total")) if isinstance(flops, Mapping) else None
    num_devices = round(quantity(entry.get("num_devices")) or 0)
    return PhaseLine(
        name,
        ns,
        ns / duration_ns,
        busy_ns=_ns(entry.get("devices_s"), num_steps) if num_devices else ns,
        num_devices=num_devices,
        mfu=quantity(entry.get("mfu")),
        mbu=quantity(entry.get("mbu")),
        flops=None if total is None else total / num_steps,
        quantities={key: number / num_steps for key, number in of_all_steps.items() if number},
    )


def mean_phases(steps: Sequence[tuple[int, Sequence[PhaseLine]]]) -> tuple[PhaseLine, ...]:
    """Add up the phases of steps and divide by their number, in whole nanoseconds.

    Args:
        steps: duration [ns] and lines of each step; one without lines is all rest.

    Returns:
        Lines that add up to the mean duration, rounded down, as `mean_of` has it; rates are totals over totals.
    """
    if not any(lines for _, lines in steps):
        return ()
    count, duration_ns = len(steps), sum(ns for ns, _ in steps) // len(steps)
    by_name: dict[str, list[PhaseLine]] = {}
    for step_ns, lines in steps:
        for line in lines or [PhaseLine(REST, step_ns, 1.0, step_ns)]:
            by_name.setdefault(line.name, []).append(line)
    # Phases in the loop's own order, then the time that no phase claims.
    last = [name for name in (REST, ASIDE) if name in by_name]
    before, means = 0, []
    for name in [*(name for name in by_name if name not in last), *last]:
        of_name = by_name[name]
        ns = sum(line.ns for line in of_name)
        mean_ns = (before + ns) // count - before // count  # difference of running sums, so that the lines add up
        before += ns
        quantities: defaultdict[str, float] = defaultdict(float)
        for line in of_name:
            for key, number in line.quantities.items():
                quantities[key] += number
        means.append(
            PhaseLine(
                name,
                mean_ns,
                mean_ns / duration_ns,
                busy_ns=sum(line.busy_ns for line in of_name) // count,
                num_devices=max(line.num_devices for line in of_name),
                mfu=_mean_rate([(line.mfu, line.busy_ns) for line in of_name]),
                mbu=_mean_rate([(line.mbu, line.busy_ns) for line in of_name]),
                flops=_mean_flops(of_name, count),
                quantities={key: number / count for key, number in quantities.items()},
            )
        )
    return tuple(means)


def _mean_rate(rates: Sequence[tuple[float | None, int]]) -> float | None:
    """Mean of a rate over its time; None if the rate of a step that took time is unknown."""
    timed = [(rate, ns) for rate, ns in rates if ns]
    total_ns = sum(ns for _, ns in timed)
    reached = [rate * ns for rate, ns in timed if rate is not None]
    return sum(reached) / total_ns if total_ns and len(reached) == len(timed) else None


def _mean_flops(lines: Sequence[PhaseLine], count: int) -> float | None:
    flops = [line.flops for line in lines if line.flops is not None]
    return sum(flops) / count if flops else None


def phase_section(lines: Sequence[PhaseLine], duration_ns: int) -> ReportSection:
    """Table of phases, and the step that they add up to."""
    # A rate that is known of no phase has no column.
    rates = [
        (name, values)
        for name, values in (("MFU", [line.mfu for line in lines]), ("MBU", [line.mbu for line in lines]))
        if any(values)
    ]
    has_bounds = any(line.bound for line in lines)  # none in a trace
    headings = ["by phase", "ms", "share", *(name for name, _ in rates), *(["bound by"] if has_bounds else [])]
    rows = []
    for place, line in enumerate(lines):
        if line.ns or line.flops:
            reached = [_rate(values[place]) for _, values in rates]
            time = [format_ms(line.ns), format_share(line.share)]
            rows.append([NAMES.get(line.name, line.name), *time, *reached, *([line.bound] if has_bounds else [])])
    nothing = [""] * (len(rates) + has_bounds)
    footer = ["the step", format_ms(duration_ns), format_share(1.0), *nothing]
    return ReportSection("", headings, rows, footer=footer, left=(0, 3 + len(rates)))


def _rate(rate: float | None) -> str:
    return "" if not rate else format_share(rate)


def phase_sentences(lines: Sequence[PhaseLine]) -> list[str]:
    """Describe each phase that generates, or has devices of its own: its lower bounds, and its waits."""
    texts = []
    for line in lines:
        if line.share < _WORTH_A_WORD and line.busy_ns == line.ns:
            continue
        parts = []
        if line.num_devices:
            parts.append(
                f"{line.num_devices} devices of its own worked for {format_ms(line.busy_ns)} ms, and the loop waited "
                f"{format_ms(line.ns)} ms for them"
            )
        if line["generated_tokens"]:
            parts += _of_generation(line)
        if parts:
            texts.append(f"{line.name}: {'; '.join(parts)}.")
    return texts


def _of_generation(line: PhaseLine) -> list[str]:
    """Lower bounds of a generation's time, its rows and its idle places."""
    # Rates are shares of what the devices can do: so are these times of the phase's.
    floors = [
        f"{format_ms(round(rate * line.busy_ns))} ms {what}"
        for rate, what in ((line.mbu, "of bytes at full bandwidth"), (line.mfu, "of FLOPs at peak"))
        if rate
    ]
    parts = [f"at least {' and '.join(floors)} of {format_ms(line.busy_ns)} ms"] if floors else []
    if line["decode_steps"] and line["prefills"]:
        rows = line["decode_slots"] / line["decode_steps"]
        text = f"{line['decode_steps']:,.0f} decode steps of {rows:,.1f} rows"
        if line.idle_share > _WORTH_A_WORD:
            text += f", {format_share(line.idle_share)} of them idle until the longest answer of a batch ended"
        parts.append(text)
    return parts
