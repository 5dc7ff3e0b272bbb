"""What `headway plan` prints: the run's totals, its ways to fit, and the lines of its step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.cli.dry_run import verdict, ways_text
from headway.cli.links import note_on_links
from headway.report import (
    Column,
    format_bytes,
    format_count,
    format_duration,
    format_share,
    render_lines,
    render_pairs,
    render_table,
)

if TYPE_CHECKING:
    from headway.config import TrainConfig
    from headway.predict.collectives import Links
    from headway.predict.dry_run import DryRun
    from headway.predict.speeds import Cases, Speeds
    from headway.predict.step_time import StepForecast


@dataclass(frozen=True)
class WholeRun:
    """What a whole run takes; of each quantity the best, the expected and the worst case."""

    tokens: float  # to train on
    steps: float  # of the optimizer
    seconds: "Cases"  # of the run [s]
    device_hours: "Cases"  # of all devices [h]
    cost: "Cases | None"  # in the currency of the price; None without one
    energy_kwh: "Cases | None"  # of the boards [kWh]; None where their power is not known

    @classmethod
    def of(
        cls,
        tokens: float,
        time: "StepForecast",
        devices: int,
        price: float | None,
        speeds: "Speeds",
        *,
        goodput: float = 1.0,
    ) -> "WholeRun":
        """Extend a mean step to a run of so many tokens.

        Args:
            tokens: to train on.
            time: of a mean step.
            devices: of the run.
            price: of a device-hour, in any currency.
            speeds: of the device, for its board's power.
            goodput: share of the time that failures do not take back.
        """
        steps = tokens / time.tokens
        seconds = time.seconds.times(steps / goodput)
        hours = seconds.times(devices / 3600)
        power_w = speeds.board_power_w
        return cls(
            tokens,
            steps,
            seconds,
            hours,
            None if price is None else hours.times(price),
            None if power_w is None else hours.times(power_w / 1000),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; of each time the best, the expected and the worst case."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "seconds": [*self.seconds],
            "device_hours": [*self.device_hours],
            "cost": None if self.cost is None else [*self.cost],
            "energy_kwh": None if self.energy_kwh is None else [*self.energy_kwh],
        }


def to_dict(planned: "DryRun", time: "StepForecast", speeds: "Speeds", run: WholeRun | None) -> dict[str, Any]:
    """The dry run, the step and the whole run, as plain JSON types."""
    source = {"device": speeds.name, "source": speeds.source, "measured": speeds.is_measured}
    dry = planned.to_dict()
    dry.pop("schema_version")
    return {**dry, "speeds": source, "time": time.to_dict(), "run": run and run.to_dict()}


def as_text(
    config: "TrainConfig",
    planned: "DryRun",
    time: "StepForecast",
    speeds: "Speeds",
    run: WholeRun | None,
    devices: int,
    links: "Links | None",
    making_s: float | None,
) -> str:
    """Format a plan: totals first, then what would fit if it does not, then the step's lines and their sources."""
    packs = planned.packs
    assert packs is not None
    pairs = [
        (
            "model",
            f"{planned.model}, {planned.params.total:,} parameters, {planned.params.trainable:,} of them trained",
        ),
        ("devices", f"{devices:,} x {speeds.name}"),
        ("packs", f"{config.data.tokens_per_pack:,} tokens, {format_share(packs.report.fill)} full"),
        ("lengths", packs.lengths.partition(":")[0]),
        ("memory", _memory(planned)),
        ("step", _cases(time.seconds, format_duration)),
        ("MFU", _cases(time.mfu, format_share)),
        ("tokens/s", _cases(time.tokens_per_s, lambda rate: format_count(round(rate)))),
    ]
    if run is not None:
        pairs += [
            ("steps", f"{format_count(max(1, round(run.steps)))} of {format_count(round(time.tokens))} tokens"),
            (f"{format_count(round(run.tokens))} tokens", _cases(run.seconds, format_duration)),
            ("device-hours", _cases(run.device_hours, lambda hours: f"{hours:,.4g}")),
        ]
        if run.cost is not None:
            pairs.append(("cost", _cases(run.cost, lambda cost: f"{cost:,.4g}")))
        if run.energy_kwh is not None:
            pairs.append(("energy", _cases(run.energy_kwh, lambda energy: f"{energy:,.4g} kWh") + ", boards alone"))
    sections = [render_pairs(pairs)]
    if planned.ways:
        sections.append(ways_text(planned.device, planned.ways))
    on_links = note_on_links(links, devices, on_this_machine=speeds.is_measured)
    if links is None and devices > 1:  # which makes every number above a best case: said before the lines, not after
        sections.append(render_lines([on_links]))
        on_links = ""
    notes = [*planned.notes, f"Rates: {speeds.source}.", on_links]
    if making_s is not None:
        notes.append(
            f"Data: a worker makes {format_count(round(1 / making_s))} tokens/s, timed here; each device has "
            f"{format_count(max(1, config.data.workers))}."
        )
    return "\n\n".join([*sections, _lines(time), render_lines([note for note in notes if note])])


def _lines(time: "StepForecast") -> str:
    whole = time.step_s
    columns = [Column("where the time will go", "left"), Column("ms"), Column("share"), Column("best"), Column("worst")]
    rows = [
        [line.name, *_milliseconds(line.seconds, whole)]
        for line in time.lines
        if abs(line.seconds.worst) >= 5e-4 * time.seconds.worst
    ]
    return render_table(columns, rows, footer=["the step", *_milliseconds(time.seconds, whole)])


def _milliseconds(seconds: "Cases", whole: float) -> list[str]:
    best, expected, worst = (f"{1e3 * value:,.2f}" for value in seconds)
    return [expected, format_share(seconds.expected / whole), best, worst]


def _cases(cases: "Cases", write: Callable[[float], str]) -> str:
    """The expected case, and the two others behind it: "2.40 s (1.90 s at best, 3.80 s at worst)"."""
    return f"{write(cases.expected)} ({write(cases.best)} at best, {write(cases.worst)} at worst)"


def _memory(planned: "DryRun") -> str:
    """The peak and whether it fits; `headway train --dry-run` has the parts."""
    peak = format_bytes(planned.memory.peak)
    known = planned.device is not None and planned.device.memory_bytes is not None
    return f"{peak}, {verdict(planned)}" if known else f"{peak} of each device"
