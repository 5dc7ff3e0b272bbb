"""Text of `headway plan`: the run's totals, its ways to fit, and the lines of its step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.cli.dry_run import note_on_links, verdict, ways_text
from headway.report import (
    Column,
    format_bytes,
    format_count,
    format_duration,
    format_flops,
    format_share,
    render_lines,
    render_pairs,
    render_table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.config import TrainConfig
    from headway.count import FlopCount
    from headway.predict.collectives import Links
    from headway.predict.dry_run import DryRun
    from headway.predict.scale import Scaling, SizedRun
    from headway.predict.speeds import Cases, Speeds
    from headway.predict.step_time import StepForecast

_LEAST_GAIN = 0.001  # of a step, that is worth a package


@dataclass(frozen=True)
class WholeRun:
    """Totals of a whole run; of each quantity the best, the expected and the worst case."""

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
        before: "Cases | None" = None,
        goodput: float = 1.0,
    ) -> "WholeRun":
        """Extend a mean step to a run of so many tokens.

        Args:
            tokens: to train on.
            time: of a mean step.
            devices: of the run.
            price: of a device-hour, in any currency.
            speeds: of the device, for its board's power.
            before: time before the first step [s]; None for none.
            goodput: share of the time that failures do not take back.
        """
        steps = tokens / time.tokens
        seconds = time.seconds.times(steps / goodput)
        seconds = seconds if before is None else seconds + before.times(1 / goodput)
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

    def to_pairs(self) -> list[tuple[str, str]]:
        """Name and text of each quantity."""
        pairs = [
            (
                "steps",
                f"{format_count(max(1, round(self.steps)))} of {format_count(round(self.tokens / self.steps))} tokens",
            ),
            (f"{format_count(round(self.tokens))} tokens", cases_text(self.seconds, format_duration)),
            ("device-hours", cases_text(self.device_hours, lambda hours: f"{hours:,.4g}")),
        ]
        if self.cost is not None:
            pairs.append(("cost", cases_text(self.cost, lambda cost: f"{cost:,.4g}")))
        if self.energy_kwh is not None:
            pairs.append(("energy", cases_text(self.energy_kwh, lambda kwh: f"{kwh:,.4g} kWh") + ", boards alone"))
        return pairs


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
    shape = planned.shape
    copies = f", {shape.replicate:,} copies of {shape.fsdp:,} shards" if shape.replicate > 1 else ""
    pairs = [
        (
            "model",
            f"{planned.model}, {planned.params.total:,} parameters, {planned.params.trainable:,} of them trained",
        ),
        ("devices", f"{devices:,} x {speeds.name}{copies}"),
        ("packs", f"{config.data.tokens_per_pack:,} tokens, {format_share(packs.report.fill)} full"),
        ("lengths", packs.lengths.partition(":")[0]),
        ("memory", memory_text(planned)),
        ("step", cases_text(time.seconds, format_duration)),
        ("MFU", cases_text(time.mfu, format_share)),
        ("tokens/s", cases_text(time.tokens_per_s, lambda rate: format_count(round(rate)))),
    ]
    if packs.reference is not None:
        pairs.append(("reference", _reference_text(planned, packs.reference, time)))
    sections = [render_pairs(pairs + ([] if run is None else run.to_pairs()))]
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


def note_on_auto(time: "StepForecast", faster: "StepForecast", more_bytes: int) -> str:
    """Say what `speed.attention=auto` is planned as, and what it takes where the package of another kernel is.

    Args:
        time: with PyTorch's FlashAttention-2.
        faster: with cuDNN's kernel where that suits a pack.
        more_bytes: that each device then holds beside.
    """
    note = "speed.attention=auto is planned as FlashAttention-2, which every installation has; "
    gain = 1 - faster.step_s / time.step_s
    if gain < _LEAST_GAIN:
        return f"{note}for these packs cuDNN's kernel would gain nothing."
    return (
        f"{note}with nvidia-cudnn-frontend installed it takes cuDNN's: {format_duration(faster.step_s)} a step, "
        f"{format_share(gain)} less, and {format_bytes(max(0, more_bytes))} more memory."
    )


def _lines(time: "StepForecast") -> str:
    step_s = time.step_s
    columns = [Column("where the time will go", "left"), Column("ms"), Column("share"), Column("best"), Column("worst")]
    rows = [
        [line.name, *_milliseconds(line.seconds, step_s)]
        for line in time.lines
        if abs(line.seconds.worst) >= 5e-4 * time.seconds.worst
    ]
    return render_table(columns, rows, footer=["the step", *_milliseconds(time.seconds, step_s)])


def _reference_text(planned: "DryRun", reference: "FlopCount", time: "StepForecast") -> str:
    """Say what the forward of a frozen model takes, and when."""
    flops = format_flops(reference.total)
    if planned.refers == "each step":
        return f"a forward of each step without adapters, {flops} of its {format_flops(time.flops)}"
    once = cases_text(time.reference, format_duration)
    return f"stored: before the first step a forward of the data, for a step's packs {flops} in {once}"


def _milliseconds(seconds: "Cases", step_s: float) -> list[str]:
    best, expected, worst = (f"{1e3 * value:,.2f}" for value in seconds)
    return [expected, format_share(seconds.expected / step_s), best, worst]


def cases_text(cases: "Cases", write: Callable[[float], str]) -> str:
    """The expected case, and the two others behind it: "2.40 s (1.90 s at best, 3.80 s at worst)"."""
    return f"{write(cases.expected)} ({write(cases.best)} at best, {write(cases.worst)} at worst)"


def memory_text(planned: "DryRun") -> str:
    """The peak and whether it fits; `headway train --dry-run` has the parts."""
    peak = format_bytes(planned.memory.peak)
    has_memory = planned.device is not None and planned.device.memory_bytes is not None
    return f"{peak}, {verdict(planned)}" if has_memory else f"{peak} of each device"


SCHEMA_VERSION = 1
MUCH_PADDING = 1.1
"""Numbers gathered over weights from which on it is told."""


def scale_record(
    config: "TrainConfig", scaling: "Scaling", sizes: "Sequence[SizedRun]", runs: "Sequence[WholeRun | None]"
) -> dict[str, Any]:
    """The prediction for each number of devices, and the assumptions behind it, as plain JSON types.

    Args:
        config: the recipe.
        scaling: what it runs on.
        sizes: the recipe at each number of devices.
        runs: what a whole run takes at each; None where nothing says how long it is.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "model": scaling.cost_model.name,
        "speeds": {"device": scaling.speeds.name, "source": scaling.speeds.source},
        "links": {
            "link_bytes_per_s": scaling.links.inside.bytes_per_s,
            "network_bytes_per_s": None if scaling.links.between is None else scaling.links.between.bytes_per_s,
            "devices_per_node": scaling.links.per_node,
            "source": scaling.links.source,
        },
        "lengths": sizes[0].packs.lengths,
        "sizes": [{**size.to_dict(), "run": run and run.to_dict()} for size, run in zip(sizes, runs, strict=True)],
        "assumptions": assumptions(config, scaling, sizes),
    }


def scale_text(
    config: "TrainConfig", scaling: "Scaling", sizes: "Sequence[SizedRun]", runs: "Sequence[WholeRun | None]"
) -> str:
    """Format the prediction for each number of devices as tables, followed by the assumptions behind it.

    Args:
        config: the recipe.
        scaling: what it runs on.
        sizes: the recipe at each number of devices.
        runs: what a whole run takes at each; None where nothing says how long it is.
    """
    links = scaling.links
    network = "network unknown" if links.between is None else f"network {_gb(links.between.bytes_per_s)} each"
    pairs = [
        ("model", scaling.cost_model.name),
        ("device", scaling.speeds.name),
        ("nodes", f"{links.per_node:,} devices, links {_gb(links.inside.bytes_per_s)} each, {network}"),
        ("packs", f"{config.data.tokens_per_pack:,} tokens, {config.optim.accumulation:,} a step and rank"),
        ("lengths", sizes[0].packs.lengths.partition(":")[0]),
    ]
    parts = [render_pairs(pairs), _runs(sizes, runs), *_ways(scaling, sizes), _steps(sizes)]
    if scaling.reliability is not None:
        parts.append(_failures(sizes))
    parts.append(render_lines(assumptions(config, scaling, sizes)))
    return "\n\n".join(parts)


def _runs(sizes: "Sequence[SizedRun]", runs: "Sequence[WholeRun | None]") -> str:
    """A table of what one chooses a size by: whether it fits, how fast it is, and what the whole run takes."""
    first = runs[0]
    headings = ["fits", "memory", "step", "MFU", "tokens/s"]
    if first is not None:
        headings += [f"{format_count(round(first.tokens))} tokens", "device-hours"]
        headings += ["cost"] if first.cost is not None else []
    rows = []
    for size, run in zip(sizes, runs, strict=True):
        time = size.time
        cells = [f"{size.devices:,}", _FITS[size.fits], format_bytes(size.memory.peak), format_duration(time.step_s)]
        cells += [format_share(time.mfu.expected), format_count(round(time.tokens_per_s.expected))]
        if run is not None:
            cells += [format_duration(run.seconds.expected), f"{run.device_hours.expected:,.4g}"]
            cells += [f"{run.cost.expected:,.4g}"] if run.cost is not None else []
        rows.append(cells)
    return render_table([Column("devices"), *map(Column, headings)], rows)


_FITS = {True: "yes", False: "NO", None: "not known"}


def _ways(scaling: "Scaling", sizes: "Sequence[SizedRun]") -> list[str]:
    """Settings with which the first size that does not fit would."""
    size = next((size for size in sizes if size.ways), None)
    if size is None:
        return []
    return [f"{size.devices:,} devices do not fit as they are.\n" + ways_text(scaling.device, size.ways)]


def _steps(runs: "Sequence[SizedRun]") -> str:
    headings = ("mesh", "tokens", "exposed", "waiting", "fill", "balance")
    columns = [Column("devices"), *map(Column, headings)]
    rows = []
    for run in runs:
        time, shape = run.time, run.shape
        others = [(shape.sequence, "sp"), (shape.expert, "ep")]
        mesh = f"{shape.replicate}x{shape.shard}" + "".join(f" {name}{size}" for size, name in others if size > 1)
        rows.append(
            [
                f"{run.devices:,}",
                mesh,
                format_count(round(time.tokens)),
                format_share(run.exposed.expected / time.step_s),
                format_share(run.waiting.expected / time.step_s),
                f"{run.packs.report.fill:.4f}",
                f"{run.packs.report.balance:.4f}",
            ]
        )
    return render_table(columns, rows)


def _failures(runs: "Sequence[SizedRun]") -> str:
    headings = ("fails every", "failures/day", "save every", "steps", "goodput", "tokens/s that last")
    rows = []
    for run in runs:
        lost = run.interruptions
        assert lost is not None
        rows.append(
            [
                f"{run.devices:,}",
                format_duration(lost.mtbf_s),
                f"{lost.per_day:,.3g}",
                format_duration(lost.interval_s),
                f"{max(1, round(lost.interval_s / run.time.step_s)):,}",
                format_share(lost.goodput),
                format_count(round(run.lasting_tokens_per_s)),
            ]
        )
    return render_table([Column("devices"), *map(Column, headings)], rows)


def assumptions(config: "TrainConfig", scaling: "Scaling", runs: "Sequence[SizedRun]") -> list[str]:
    """Assumptions behind the numbers, a sentence each."""
    steps = min(run.planned_steps for run in runs)
    shards = "over all devices" if config.parallel.shard == "auto" else "as set, and copies of them take the rest"
    # What every size assumes.
    sentences = [
        "Expected values; --json has the best and the worst case too.",
        "mesh: copies x shards. tokens: of a step of all devices. exposed, waiting: shares of the step that exchanges "
        "take and computing does not hide, and that a mean rank waits for the heaviest.",
        "Each rank keeps its packs, so a step's tokens grow with the devices; learning rate and batch are yours to "
        "judge.",
        f"Packs: the planner of training, over {steps:,} steps of all ranks at each size.",
        f"Shards: {shards}.",
        f"Rates: {scaling.speeds.source}.",
        f"Links: {scaling.links.source}, of which collectives reach 80 %; rings as in NCCL, trees for all-reduce where "
        "they take less; nobody else on the network.",
        "Gathers and sums hide behind the computing of the block beside them, and slow it down by nothing.",
        "Not in a step: loading data, stragglers among equal devices, messages between hosts, evaluations.",
    ]
    # What only some inputs bring: slices that are filled up, failures.
    uneven = [run for run in runs if run.padding > MUCH_PADDING]
    if uneven:
        worst = max(uneven, key=lambda run: run.padding)
        sentences.append(
            f"Slices: tensors are cut by rows, and those with fewer rows than shards are filled up. {worst.devices:,} "
            f"devices hold and gather {worst.padding:,.3g} times the weights; fewer shards and copies of them (--set "
            "parallel.shard=32) do not."
        )
    reliability = scaling.reliability
    if reliability is not None:
        sentences.append(
            f"Failures: at random, one in {reliability.mtbf_s / 3600:,.0f} h of each device, each stops the job; it "
            f"stands still {format_duration(reliability.save_s)} for a checkpoint and takes "
            f"{format_duration(reliability.restart_s)} to start again. The interval is Daly's."
        )
    return sentences


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.4g} GB/s"
