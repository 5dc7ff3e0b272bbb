"""What `headway plan --scale` prints: a table of sizes, and what it assumes."""

from typing import TYPE_CHECKING, Any

from headway.cli.dry_run import ways_text
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
    from collections.abc import Sequence

    from headway.cli.plan_text import WholeRun
    from headway.config import TrainConfig
    from headway.predict.scale import Scaling, SizedRun

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
    """What makes the first size that does not fit fit."""
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
    """What the numbers take for granted, a sentence each."""
    steps = min(run.planned_steps for run in runs)
    shards = "over all devices" if config.parallel.shard == "auto" else "as set, and copies of them take the rest"
    found = [
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
    uneven = [run for run in runs if run.padding > MUCH_PADDING]
    if uneven:
        worst = max(uneven, key=lambda run: run.padding)
        found.append(
            f"Slices: tensors are cut by rows, and those with fewer rows than shards are filled up. {worst.devices:,} "
            f"devices hold and gather {worst.padding:,.3g} times the weights; fewer shards and copies of them (--set "
            "parallel.shard=32) do not."
        )
    reliability = scaling.reliability
    if reliability is not None:
        found.append(
            f"Failures: at random, one in {reliability.mtbf_s / 3600:,.0f} h of each device, each stops the job; it "
            f"stands still {format_duration(reliability.save_s)} for a checkpoint and takes "
            f"{format_duration(reliability.restart_s)} to start again. The interval is Daly's."
        )
    return found


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.4g} GB/s"
