"""What `headway plan` prints of a step of reinforcement learning: its totals, its phases, and what binds each."""

import math
from typing import TYPE_CHECKING, Any

from headway.cli.dry_run import note_on_links, ways_text
from headway.cli.plan_text import WholeRun, cases_text, memory_text
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
    from headway.predict.rollout import EngineDevices, PhaseForecast, RlForecast, RolloutForecast
    from headway.predict.speeds import Cases, Speeds

_LIMITS = {
    "answers": "as many as it gets",
    "max_rows": "limited by plan.rollout.max_rows",
    "cache": "limited by the memory for their cache",
}


def rollout_record(
    planned: "DryRun", forecast: "RlForecast", speeds: "Speeds", engines: "EngineDevices", run: WholeRun | None
) -> dict[str, Any]:
    """The dry run of the update, the step by phase and the whole run, as plain JSON types."""
    sources = {
        name: {"device": rates.name, "source": rates.source, "measured": rates.is_measured}
        for name, rates in (("speeds", speeds), ("engine_speeds", engines.speeds))
    }
    dry = planned.to_dict()
    dry.pop("schema_version")
    return {**dry, **sources, "time": forecast.to_dict(), "run": run and run.to_dict()}


def rollout_text(
    config: "TrainConfig",
    planned: "DryRun",
    forecast: "RlForecast",
    speeds: "Speeds",
    engines: "EngineDevices",
    run: WholeRun | None,
    links: "Links | None",
) -> str:
    """Format a step of reinforcement learning: totals first, then its phases, then what they rest on."""
    rollout, written = config.plan.rollout, forecast.rollout
    assert rollout is not None
    devices, answers, pack = planned.shape.world_size, rollout.answers, config.data.tokens_per_pack
    places = f"{devices:,} x {speeds.name}"
    if rollout.devices is not None:
        places += f" for the update, {rollout.devices:,} x {engines.speeds.name} for the answers"
    # totals of the step
    pairs = [
        ("model", f"{planned.model}, {planned.params.total:,} parameters"),
        ("devices", places),
        (
            "answers",
            f"{rollout.prompts:,} prompts of {rollout.prompt_tokens:,} tokens x {rollout.group:,} answers of "
            f"{format_count(round(written.generated_tokens / answers))} on average",
        ),
        ("engines", _engines(written, rollout.tensor)),
        ("update", f"{rollout.updates:,} x {config.optim.accumulation:,} packs of {pack:,} tokens on each rank"),
        ("memory", memory_text(planned)),
        ("step", cases_text(forecast.seconds, format_duration)),
        ("MFU", cases_text(forecast.mfu, format_share) + ", of all devices and phases"),
        ("tokens/s", cases_text(forecast.tokens_per_s, lambda rate: format_count(round(rate)))),
    ]
    # ways out where it does not fit, the phases, and what the numbers rest on
    sections = [render_pairs(pairs + ([] if run is None else run.to_pairs()))]
    if planned.ways:
        sections.append(ways_text(planned.device, planned.ways))
    notes = [f"Rates: {speeds.source}.", note_on_links(links, devices, on_this_machine=speeds.is_measured)]
    notes += [*planned.notes, *_notes(forecast, asynchronous=rollout.asynchronous)]
    return "\n\n".join([*sections, _phases(forecast), render_lines([note for note in notes if note])])


def _engines(written: "RolloutForecast", tensor: int) -> str:
    """How many engines write, how many answers each writes at a time, and why no more."""
    run = written.slowest
    size = f" of {tensor:,} devices" if tensor > 1 else ""
    room = "" if math.isinf(written.room_bytes) else f"; {format_bytes(written.room_bytes)} for cache on each device"
    return (
        f"{written.engines:,}{size}, {run.most_rows:,} answers at a time, {_LIMITS[written.limit]} "
        f"({run.rows:,.0f} on average){room}"
    )


def _phases(forecast: "RlForecast") -> str:
    headings = ("s", "share", "best", "worst", "MFU", "MBU")
    columns = [Column("phase", "left"), *map(Column, headings), Column("bound by", "left")]
    run, step_s = forecast.rollout.slowest, forecast.seconds.expected
    rows = []
    for phase in forecast.phases:
        rows.append([phase.name, *_seconds(phase.wall_s, step_s), *_use(phase), phase.bound or "-"])
        if phase.name == "rollout":
            parts = [("prefill", run.prefill), (f"decode, {run.steps:,} steps", run.decode)]
            rows += [
                [f"  {name}", *_seconds(part, step_s)[:1], "", *_seconds(part, step_s)[2:], "", "", ""]
                for name, part in parts
            ]
    return render_table(columns, rows, footer=["the step", *_seconds(forecast.seconds, step_s), "", "", ""])


def _seconds(seconds: "Cases", step_s: float) -> list[str]:
    best, expected, worst = (f"{value:,.2f}" for value in seconds)
    return [expected, format_share(seconds.expected / step_s), best, worst]


def _use(phase: "PhaseForecast") -> list[str]:
    return ["-" if use is None else format_share(use.expected) for use in (phase.mfu, phase.mbu)]


def _notes(forecast: "RlForecast", *, asynchronous: bool) -> list[str]:
    """What the phases take for granted, a sentence each."""
    notes = [
        "Prompts are of one length and are dealt to the engines in a row; the slowest engine ends the rollout. Not in "
        "it: the engine's own work between steps, tool calls, moving weights and optimizer to the host and back.",
    ]
    if asynchronous:
        own = format_duration(forecast.phases[0].devices_s.expected)
        notes.append(f"The answers take {own} beside the other phases; the rollout's line is what those do not hide.")
    return notes
