"""`headway plan`: will it fit, how long will a step take, what will the run cost."""

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.ceiling import local_device, local_rates
from headway.cli.dry_run import NO_ROOM, saved_of_recipe, verdict
from headway.cli.links import GivenLinks, LinkOption, NetworkOption, PerNodeOption, note_on_links
from headway.cli.measured_data import measured_data
from headway.cli.options import JsonOption
from headway.cli.output import needs_extra, print_json, warn
from headway.cli.resolve import resolve_cost_model, resolve_ledger
from headway.cli.train import SetOption
from headway.errors import PlanError, UsageError
from headway.log.working import working
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
from headway.report.terminal import coloured

if TYPE_CHECKING:
    from headway.count import CostModel
    from headway.count.activations import SavedActivations
    from headway.devices import Device
    from headway.plan.collectives import Links
    from headway.plan.failures import Reliability
    from headway.plan.speeds import Cases, Speeds
    from headway.plan.step_time import StepForecast
    from headway.train.config import TrainConfig
    from headway.train.dry_run import DryRun

_PACK = 8192  # tokens of a pack, where MODEL alone is named
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "bfloat16-autocast": "bf16"}


SAVE_S, RESTART_S = 30.0, 300.0


@dataclass(frozen=True)
class WholeRun:
    """What a whole run takes; of each quantity the best, the expected and the worst case."""

    tokens: float  # to train on
    seconds: "Cases"  # of the run [s]
    device_hours: "Cases"  # of all devices [h]
    cost: "Cases | None"  # in the currency of the price; None without one
    energy_kwh: "Cases | None"  # of the boards [kWh]; None where their power is not known


def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|MODEL", help="A training configuration, or a model.")],
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Device that `headway devices` lists; plan.device if not given.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Devices, a process each; plan.devices if not given.")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(metavar="T", min=1, help="Tokens to train on, such as 2e9; for time and cost.")
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(metavar="E", min=0, help="Instead: how often the data of --data or --lengths play.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(metavar="P", min=0, help="Price of a device-hour, in any currency.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measured lengths, CSV or Parquet; plan.lengths or plan.mix if not given."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="D", help="Instead: datasets, measured with the model's own processor. Repeatable."),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="How the step grows with devices: plans packs of all ranks at each size."),
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(metavar="H", help="With --scale: mean time between failures of a device with its host [hours]."),
    ] = None,
    save: Annotated[
        float | None, typer.Option(metavar="S", help=f"With --mtbf: pause for a checkpoint [s]; {SAVE_S:g}.")
    ] = None,
    restart: Annotated[
        float | None,
        typer.Option(metavar="S", help=f"With --mtbf: from a failure to the next step [s]; {RESTART_S:g}."),
    ] = None,
    link: LinkOption = None,
    network: NetworkOption = None,
    per_node: PerNodeOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict memory, step time by part, MFU, tokens per second, days, cost and energy of a run; trains nothing.

    The step's lines are those of `headway explain`. Each has a range, from what devices reach at best to what they
    should reach at least; `headway ceiling --model` measures this machine's own rates. With --scale, the same for
    several numbers of devices, with the failures that --mtbf implies.

    Exit code 1 if the run does not fit the device.

    Example: headway plan qwen3-8b --device H100 --devices 8 --tokens 1e9
    """
    from headway.devices import named_device
    from headway.train.dry_run import dry_run, learning_model
    from headway.train.forecast import Forecaster
    from headway.train.planned_lengths import NO_LENGTHS

    _refuse_halves(tokens, epochs, price, lengths, data)
    of_lengths = () if lengths is None else ("plan.mix=null", f"plan.lengths={json.dumps(str(lengths))}")
    cost_model, config = named_recipe(recipe, (*of_lengths, *(settings or ())))
    name = device or config.plan.device
    found = named_device(name) if name is not None else None
    saved = saved_of_recipe(config)
    given = GivenLinks(link, network, per_node)
    reliability = _reliability(scale, mtbf, save, restart)
    if scale is not None:
        _refuse_with_scale({"--devices": devices, "--tokens": tokens, "--epochs": epochs, "--data": data})
        _print_scale(scale, config, cost_model, found, saved, given, reliability, as_json=as_json)
        return
    count = devices or config.plan.devices or 1
    given.joining(found, count)  # or an error, before anything is measured
    measured = measured_data(data, config) if data else None
    table = None if measured is None else (measured.name, measured.lengths)
    planned = dry_run(config, cost_model, saved, devices=count, device=found, lengths=table)
    if planned.packs is None:
        raise PlanError(NO_LENGTHS)
    speeds = speeds_of(config, cost_model, found, count)
    links = given.between(found, count)
    making_s = None if measured is None else measured.making_s
    forecaster = Forecaster(learning_model(config, cost_model), saved, speeds, count, links, making_s=making_s)
    time = forecaster.predict(config, planned.packs)
    if epochs is not None:
        tokens = epochs * planned.packs.epoch_tokens
    run = None if tokens is None else _run(tokens, time, count, price, speeds)
    if as_json:
        print_json(_record(planned, time, speeds, run))
    else:
        text = _render(config, planned, time, speeds, run, count, links, making_s)
        print(text.replace(NO_ROOM, coloured(NO_ROOM, "red", sys.stdout)))
    if planned.fits is False:
        raise typer.Exit(1)


def _refuse_halves(
    tokens: float | None, epochs: float | None, price: float | None, lengths: Path | None, data: list[str] | None
) -> None:
    """Refuse options that two places would answer, or none."""
    if lengths is not None and data:
        raise UsageError("--lengths and --data are two places for lengths; give one of them.")
    if tokens is not None and epochs is not None:
        raise UsageError("--tokens and --epochs both say how long the run is; give one of them.")
    for name, value in (("--tokens", tokens), ("--epochs", epochs)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} {value:g} is no length of a run; give a positive number.")
    if epochs is not None and lengths is None and not data:
        raise UsageError(f"--epochs {epochs:g} needs data that end: give --data or --lengths, or --tokens instead.")
    if price is not None and tokens is None and epochs is None:
        raise UsageError("--price is for a whole run; give its --tokens or --epochs too.")


def _refuse_with_scale(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            given = value[0] if isinstance(value, list) else f"{value:g}"
            raise UsageError(f"{name} {given} is for one size of a run, and cannot take effect with --scale.")


def _reliability(
    scale: str | None, mtbf: float | None, save: float | None, restart: float | None
) -> "Reliability | None":
    """How often devices fail, as the options say; None where they do not."""
    from headway.plan.failures import Reliability

    for name, value, needed, given in (
        ("--mtbf", mtbf, "--scale", scale),
        ("--save", save, "--mtbf", mtbf),
        ("--restart", restart, "--mtbf", mtbf),
    ):
        if value is not None and given is None:
            raise UsageError(f"{name} {value:g} cannot take effect without {needed}.")
        if value is not None and value < 0:
            raise UsageError(f"{name} {value:g} is no time; give a positive number.")
    if mtbf is None:
        return None
    return Reliability(mtbf * 3600, SAVE_S if save is None else save, RESTART_S if restart is None else restart)


def _print_scale(
    scale: str,
    config: "TrainConfig",
    cost_model: "CostModel",
    device: "Device | None",
    saved: Mapping[str, "SavedActivations"],
    given: GivenLinks,
    reliability: "Reliability | None",
    *,
    as_json: bool,
) -> None:
    from headway.cli.scale_text import as_record, as_text
    from headway.train.dry_run import learning_model
    from headway.train.scale import Scaling, sizes_of

    sizes = sizes_of(scale)
    if device is None:
        raise PlanError("no device is named, and --scale needs one: give --device, or set plan.device.")
    links = given.required(device)
    links.require(max(sizes))
    speeds = speeds_of(config, cost_model, device, max(sizes))
    scaling = Scaling(learning_model(config, cost_model), saved, speeds, links, reliability)
    with working(f"planning packs for up to {max(sizes):,} devices"):
        runs = [scaling.at(config, devices) for devices in sizes]
    if as_json:
        print_json(as_record(config, scaling, runs))
    else:
        print(as_text(config, scaling, runs))


def named_recipe(recipe: str, settings: tuple[str, ...]) -> "tuple[CostModel, TrainConfig]":
    """Load the cost model and the configuration that RECIPE|MODEL names.

    Args:
        recipe: a YAML file; or a model, which is trained by AdamW on packs of 8,192 tokens of typical samples.
        settings: assignments that change the configuration, as `--set` takes them.
    """
    from headway.train.config import load_config
    from headway.train.config.read import with_overrides

    if Path(recipe).suffix in (".yaml", ".yml"):
        config = load_config(Path(recipe), settings)
        return resolve_ledger(config.model), config
    cost_model = resolve_cost_model(recipe)
    mix = "images" if cost_model.has_vision else "chats"
    raw = {
        "model": {"path": recipe},
        "data": {"train": [{"path": "data.jsonl"}], "tokens_per_pack": _PACK, "overlong": "truncate"},
        "optim": {"steps": 1000, "lr": 1e-5},
        "run": {"folder": "runs/plan"},
        "plan": {"mix": mix},
    }
    return cost_model, with_overrides(raw, settings)


def speeds_of(config: "TrainConfig", cost_model: "CostModel", device: "Device | None", devices: int) -> "Speeds":
    """Rates of the device that is named, or of this machine, measured at the model's sizes.

    Args:
        config: the recipe.
        cost_model: of its model.
        device: of the table; None for this machine.
        devices: processes, a device each.

    Raises:
        PlanError: the device's peak or bandwidth is not known; or none is named, and the run is not for this machine.
    """
    from headway.plan.blocks import with_blocks
    from headway.plan.speeds import Speeds
    from headway.train.dry_run import precision_of

    dtype = _DTYPES[precision_of(config, devices)]
    if device is not None:
        return Speeds.of_device(device, dtype)
    with needs_extra("planning for this machine"):
        from headway.devices.ceilings import matmul_ceiling

        where = local_device(None)
    if where.type == "cpu" and config.run.device != "cpu":
        raise PlanError(
            "no device is named, so neither memory nor time can be planned: give --device, set plan.device, or plan "
            "for this machine's processor with --set run.device=cpu."
        )
    rates, blocks = local_rates(config.model.path, cost_model, where, dtype)
    peak = matmul_ceiling(where, dtype, warn=warn).peak()
    speeds = Speeds.measured(peak.name, peak.flops_per_s, rates, runs_ahead=where.type != "cpu")
    return speeds if blocks is None else with_blocks(speeds, blocks)


def _run(tokens: float, time: "StepForecast", devices: int, price: float | None, speeds: "Speeds") -> WholeRun:
    seconds = time.seconds.times(tokens / time.tokens)
    hours = seconds.times(devices / 3600)
    power_w = speeds.board_power_w
    return WholeRun(
        tokens,
        seconds,
        hours,
        None if price is None else hours.times(price),
        None if power_w is None else hours.times(power_w / 1000),
    )


def _record(planned: "DryRun", time: "StepForecast", speeds: "Speeds", run: WholeRun | None) -> dict[str, Any]:
    dry = planned.as_json()
    dry.pop("schema_version")
    whole = run and {
        "tokens": run.tokens,
        "seconds": [*run.seconds],
        "device_hours": [*run.device_hours],
        "cost": None if run.cost is None else [*run.cost],
        "energy_kwh": None if run.energy_kwh is None else [*run.energy_kwh],
    }
    source = {"device": speeds.name, "source": speeds.source, "measured": speeds.is_measured}
    return {**dry, "speeds": source, "time": time.as_json(), "run": whole}


def _render(
    config: "TrainConfig",
    planned: "DryRun",
    time: "StepForecast",
    speeds: "Speeds",
    run: WholeRun | None,
    devices: int,
    links: "Links | None",
    making_s: float | None,
) -> str:
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
            (f"{format_count(round(run.tokens))} tokens", _cases(run.seconds, format_duration)),
            ("device-hours", _cases(run.device_hours, lambda hours: f"{hours:,.4g}")),
        ]
        if run.cost is not None:
            pairs.append(("cost", _cases(run.cost, lambda cost: f"{cost:,.4g}")))
        if run.energy_kwh is not None:
            pairs.append(("energy", _cases(run.energy_kwh, lambda energy: f"{energy:,.4g} kWh") + ", boards alone"))
    notes = [*planned.notes, f"Rates: {speeds.source}.", note_on_links(links, devices)]
    if making_s is not None:
        notes.append(
            f"Data: a worker makes {format_count(round(1 / making_s))} tokens/s, timed here; each device has "
            f"{format_count(max(1, config.data.workers))}."
        )
    return "\n\n".join([render_pairs(pairs), _lines(time), render_lines([note for note in notes if note])])


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
