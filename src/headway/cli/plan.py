"""`headway plan`: will it fit, how long will a step take, what will the run cost."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.devices import local_device, local_rates
from headway.cli.dry_run import LinkOptions, in_red, lengths_of_data, measured_data, saved_of_recipe
from headway.cli.offers import chosen_offers, plan_offers
from headway.cli.options import JsonOption, devices_from, models_from, spread
from headway.cli.output import needs_extra, print_result, warn
from headway.cli.plan_text import WholeRun, as_text, note_on_auto, to_dict
from headway.cli.resolve import resolve_cost_model, resolve_ledger
from headway.cli.run_length import RunLength, refuse_halves
from headway.cli.train import SetOption
from headway.cli.workload import WorkloadOptions, samples_in_turn, with_text
from headway.errors import PlanError, UsageError
from headway.log.working import working

if TYPE_CHECKING:
    from headway.config import TrainConfig
    from headway.count import CostModel
    from headway.count.activations import SavedActivations
    from headway.devices import Device
    from headway.packing.lengths import LengthTable
    from headway.predict.collectives import Links
    from headway.predict.dry_run import DryRun
    from headway.predict.failures import Reliability
    from headway.predict.scale import Scaling, SizedRun
    from headway.predict.speeds import Speeds
    from headway.predict.step_time import StepForecast

_PACK = 8192  # tokens of a pack, where MODEL alone is named
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "bfloat16-autocast": "bf16"}


SAVE_S, RESTART_S = 30.0, 300.0


@spread(only=["segments", "images", "videos", "link", "network", "per_node"])
def plan(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|MODEL", help="A training configuration, or a model.", autocompletion=models_from
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Device that `headway devices` lists; plan.device if not given.",
            autocompletion=devices_from,
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Devices, a process each; plan.devices if not given.")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(metavar="T", min=1, help="Tokens to train on, such as 2e9; for time and cost.")
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(metavar="E", min=0, help="Instead: how often --data, --lengths or --samples play."),
    ] = None,
    price: Annotated[
        float | None, typer.Option(metavar="P", min=0, help="Price of a device-hour, in any currency.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Instead: samples to train on, as --segments or plan.mix describe them."),
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(
            metavar="TIME", help="Time that the run may take, such as 7d: how many devices is looked for [days]."
        ),
    ] = None,
    price_list: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Prices of device-hours, as H100: 2.5 (YAML, JSON, CSV): devices side by side."
        ),
    ] = None,
    tokens_per_sample: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Instead of --segments: text of each sample, its pictures besides [tokens]."
        ),
    ] = None,
    *,
    work: WorkloadOptions,
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
    link_options: LinkOptions,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict memory, step time by part, MFU, tokens per second, days, cost and energy of a run; trains nothing.

    The step's lines are those of `headway explain`. Each has a range, from what devices reach at best to what they
    should reach at least; `headway ceiling --model` measures this machine's own rates. With --scale, the same for
    several numbers of devices, with the failures that --mtbf implies. With --price-list or --within, which devices and
    how many of them, ranked by cost.

    Exit code 1 if the run does not fit the device; settings that make it fit are printed.

    Example: headway plan qwen3-8b --device H100 --devices 8 --tokens 1e9
    """
    from headway.devices import named_device
    from headway.predict.dry_run import dry_run, learning_model, with_copies
    from headway.predict.forecast import Forecaster
    from headway.predict.planned_lengths import lengths_in_turn, no_lengths

    ends = RunLength(tokens, epochs, samples)
    refuse_halves(ends, price, lengths, data, work.segments or tokens_per_sample, within)
    of_lengths = () if lengths is None else ("plan.mix=null", f"plan.lengths={json.dumps(str(lengths))}")
    cost_model, config = named_recipe(recipe, (*of_lengths, *(settings or ())))
    pattern = _pattern(cost_model, config.model.path, work, tokens_per_sample)
    name = device or config.plan.device
    target = named_device(name) if name is not None else None
    saved = saved_of_recipe(config)
    reliability = _reliability(scale, mtbf, save, restart)
    own = lengths_of_data(config, cost_model) if pattern is None and not data else None
    if epochs is not None and not (lengths or data or samples or own):
        raise UsageError(
            f"--epochs {epochs:g} needs data that end: give --data, --lengths or --samples, or --tokens instead."
        )
    if price_list is not None or within is not None:
        plan_offers(
            chosen_offers(
                price_list,
                target if price_list is None or device is not None else None,  # a recipe's own bounds no list
                price,
                {"scale": scale, "mtbf": mtbf, "data": data, **vars(link_options)},
            ),
            (config, cost_model, saved),
            (ends, pattern or own, lengths),
            (within, devices),
            speeds_of,
            as_json=as_json,
        )
        return
    if scale is not None:
        _refuse_with_scale({"--devices": devices, "--data": data})
        sizes = _sizes(scale, config, cost_model, target, saved, link_options, reliability, pattern or own)
        rows = ends.rows(own, lengths)
        _print_sizes(
            config, sizes, [ends.total(size.packs, rows) for size in sizes[1]], ends.passes, price, as_json=as_json
        )
        return
    count = devices or config.plan.devices or 1
    config = with_copies(config, count)
    link_options.joining(target, count)  # or an error, before anything is measured
    measured = measured_data(data, config, cost_model) if data else None
    table = own if measured is None else (measured.name, measured.lengths)
    if pattern is not None:
        table = lengths_in_turn(config, pattern, config.parallel.mesh_shape(count))
    planned = dry_run(config, cost_model, saved, devices=count, device=target, lengths=table)
    if planned.packs is None:
        raise no_lengths()
    speeds = speeds_of(config, cost_model, target, count)
    links = link_options.joining(target, count)
    making_s = None if measured is None else measured.making_s
    learning = learning_model(config, cost_model)
    time = Forecaster(learning, saved, speeds, count, links, making_s=making_s).predict(config, planned.packs)
    total = ends.total(planned.packs, planned.packs.counts.read)
    planned = _with_note_on_auto(config, learning, saved, planned, time, (target, count, links, making_s))
    run = (
        None
        if total is None
        else WholeRun.of(total, time, count, price, speeds, before=time.before(total / ends.passes))
    )
    print_result(
        lambda: to_dict(planned, time, speeds, run),
        lambda: in_red(as_text(config, planned, time, speeds, run, count, links, making_s)),
        as_json=as_json,
    )
    if planned.fits is False:
        raise typer.Exit(1)


def _with_note_on_auto(
    config: "TrainConfig",
    learning: "CostModel",
    saved: Mapping[str, "SavedActivations"],
    planned: "DryRun",
    time: "StepForecast",
    where: "tuple[Device | None, int, Links | None, float | None]",
) -> "DryRun":
    """Add a note on the other kernel of attention that auto may take on the machine that trains, and on its gain.

    Args:
        config: the recipe.
        learning: cost model, with adapters in place.
        saved: what autograd saves of the model, by precision.
        planned: with FlashAttention-2.
        time: of a step with FlashAttention-2.
        where: kind and number of the devices, how they are joined, and the time of making a token [s].
    """
    from headway.config.read import with_overrides
    from headway.predict.dry_run import memory_plan
    from headway.predict.forecast import Forecaster

    packs, (target, count, links, making_s) = planned.packs, where
    if packs is None or config.speed.attention != "auto" or target is None or "cudnn" not in target.attention_shares:
        return planned
    faster = with_overrides(config.to_dict(), ("speed.attention=cudnn",))
    memory = memory_plan(faster, learning, saved, count, packs.most_tokens, packs.most_patches, packs.padded)
    speeds = speeds_of(faster, learning, target, count)
    step = Forecaster(learning, saved, speeds, count, links, making_s=making_s).predict(faster, packs)
    note = note_on_auto(time, step, memory.peak - planned.memory.peak)
    return replace(planned, notes=(*planned.notes, note))


def _pattern(
    cost_model: "CostModel", model: str, work: WorkloadOptions, tokens_per_sample: int | None
) -> "tuple[str, LengthTable] | None":
    """Name and table of the samples that --segments, --images and --videos describe; None where they are not given."""
    work = work.in_patches(model)
    if tokens_per_sample is not None:
        work = with_text(cost_model, work, tokens_per_sample)
    table = samples_in_turn(cost_model, work)
    if table is None:
        return None
    return " ".join(f"{option} {text[:60]}" for option, text in work.typed().items()), table


def _refuse_with_scale(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            text = value[0] if isinstance(value, list) else f"{value:g}"
            raise UsageError(f"{name} {text} is for one size of a run, and cannot take effect with --scale.")


def _reliability(
    scale: str | None, mtbf: float | None, save: float | None, restart: float | None
) -> "Reliability | None":
    """Rate at which devices fail, as the options say; None where they do not."""
    from headway.predict.failures import Reliability

    for name, value, needed, other in (
        ("--mtbf", mtbf, "--scale", scale),
        ("--save", save, "--mtbf", mtbf),
        ("--restart", restart, "--mtbf", mtbf),
    ):
        if value is not None and other is None:
            raise UsageError(f"{name} {value:g} cannot take effect without {needed}.")
        if value is not None and value < 0:
            raise UsageError(f"{name} {value:g} is no time; give a positive number.")
    if mtbf is None:
        return None
    return Reliability(mtbf * 3600, SAVE_S if save is None else save, RESTART_S if restart is None else restart)


def _sizes(
    scale: str,
    config: "TrainConfig",
    cost_model: "CostModel",
    device: "Device | None",
    saved: Mapping[str, "SavedActivations"],
    link_options: LinkOptions,
    reliability: "Reliability | None",
    pattern: "tuple[str, LengthTable] | None",
) -> "tuple[Scaling, list[SizedRun]]":
    """Plan each number of devices that --scale names."""
    from headway.predict.dry_run import learning_model
    from headway.predict.scale import Scaling, sizes_of

    sizes = sizes_of(scale)
    if device is None:
        raise PlanError("no device is named, and --scale needs one: give --device, or set plan.device.")
    links = link_options.required(device)
    links.require(max(sizes))
    speeds = speeds_of(config, cost_model, device, max(sizes))
    scaling = Scaling(learning_model(config, cost_model), saved, speeds, links, reliability, device)
    with working(f"planning packs for up to {max(sizes):,} devices"):
        return scaling, [scaling.at(config, devices, pattern) for devices in sizes]


def _print_sizes(
    config: "TrainConfig",
    sizes: "tuple[Scaling, list[SizedRun]]",
    totals: "list[float | None]",
    passes: float,
    price: float | None,
    *,
    as_json: bool,
) -> None:
    """Print the sizes with what a whole run of so many tokens takes at each.

    Raises:
        typer.Exit: one does not fit the device; exit code 1.
    """
    from headway.cli.plan_text import scale_record, scale_text

    scaling, sized = sizes
    runs = []
    for size, total in zip(sized, totals, strict=True):
        lasting = 1.0 if size.interruptions is None else size.interruptions.goodput
        runs.append(
            None
            if total is None
            else WholeRun.of(
                total,
                size.time,
                size.devices,
                price,
                scaling.speeds,
                before=size.time.before(total / passes),
                goodput=lasting,
            )
        )
    sizes_and_runs = config, scaling, sized, runs
    print_result(lambda: scale_record(*sizes_and_runs), lambda: in_red(scale_text(*sizes_and_runs)), as_json=as_json)
    if any(size.fits is False for size in sized):
        raise typer.Exit(1)


def named_recipe(recipe: str, settings: tuple[str, ...]) -> "tuple[CostModel, TrainConfig]":
    """Load the cost model and the configuration that RECIPE|MODEL names.

    Args:
        recipe: a YAML file; or a model, which is trained by AdamW on packs of 8,192 tokens of typical samples.
        settings: assignments that change the configuration, as `--set` takes them.
    """
    from headway.config import load_config
    from headway.config.read import with_overrides

    if Path(recipe).suffix in (".yaml", ".yml"):
        config = load_config(Path(recipe), settings)
        return resolve_ledger(config.model), config
    cost_model = resolve_cost_model(recipe)
    raw = {
        "model": {"path": recipe},
        "data": {"train": [{"path": "data.jsonl"}], "tokens_per_pack": _PACK, "overlong": "truncate"},
        "optim": {"steps": 1000, "lr": 1e-5},
        "run": {"folder": "runs/plan"},
        "plan": {"mix": "images" if cost_model.has_vision else "chats"},
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
    from headway.predict.blocks import with_blocks
    from headway.predict.dry_run import precision_of
    from headway.predict.speeds import Speeds

    dtype = _DTYPES[precision_of(config, devices)]
    # a device of the table, else this machine
    if device is not None:
        return Speeds.of_device(
            device,
            dtype,
            attention=config.speed.attention,
            float8=config.run.dtype == "float8",
            power_w=config.plan.power_w,
        )
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
