"""`headway plan`: whether a run fits, the time of a step, the cost of the run."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.devices import local_device, local_rates
from headway.cli.links import LinkOptions
from headway.cli.offers import chosen_offers, print_offers
from headway.cli.options import JsonOption, SetOption, devices_from, models_from, spread
from headway.cli.output import needs_extra, print_result, warn
from headway.cli.plan_data import RunLength, RunRequest, lengths_of_data, measured_data
from headway.cli.plan_text import note_on_auto, plan_record, plan_text, plans_text
from headway.cli.resolve import resolve_cost_model, resolve_ledger
from headway.cli.workload import WorkloadOptions, samples_in_turn, with_text
from headway.errors import PlanError, UsageError
from headway.log.working import working

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from headway.config import TrainConfig
    from headway.count import CostModel
    from headway.devices import Device
    from headway.packing.lengths import LengthTable
    from headway.predict.failures import Reliability
    from headway.predict.prediction import OtherPacks, Prediction, RunTotals
    from headway.predict.predictor import Predictor
    from headway.predict.speeds import Speeds

_PACK = 8192  # tokens of a pack, where MODEL alone is named
_MOST_SAMPLES = 200_000  # among which other packs are looked for: some seconds
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "bfloat16-autocast": "bf16"}


SAVE_S, RESTART_S = 30.0, 300.0
_ENDLESS = "--price-list and --within are for a whole run; give its --samples, --tokens or --epochs."


@dataclass(frozen=True)
class SizeOptions:
    """Options that plan several numbers of devices, and their failures."""

    scale: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Numbers of devices to plan, to see how the step grows."),
    ] = None
    mtbf: Annotated[
        float | None,
        typer.Option(metavar="H", help="With --scale: mean time between failures of a device with its host [hours]."),
    ] = None
    save: Annotated[
        float | None, typer.Option(metavar="S", help=f"With --mtbf: pause for a checkpoint [s]. Default: {SAVE_S:g}.")
    ] = None
    restart: Annotated[
        float | None,
        typer.Option(metavar="S", help=f"With --mtbf: time from failure to next step [s]. Default: {RESTART_S:g}."),
    ] = None

    @property
    def reliability(self) -> "Reliability | None":
        """Rate at which devices fail; None if neither recipe nor command line sets it."""
        from headway.predict.failures import Reliability

        if self.mtbf is None:
            return None
        save_s, restart_s = (SAVE_S if self.save is None else self.save), self.restart
        return Reliability(self.mtbf * 3600, save_s, RESTART_S if restart_s is None else restart_s)


@dataclass(frozen=True)
class OfferOptions:
    """Options that look for devices: a time for the run, and prices."""

    within: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            help=("Time that the run may take, such as 7d [days]. Headway then looks for the number of devices."),
        ),
    ] = None
    price_list: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=("File of prices of device-hours, such as H100: 2.5 (YAML, JSON, CSV), to compare devices."),
        ),
    ] = None

    @property
    def are_given(self) -> bool:
        """True if devices are looked for."""
        return self.within is not None or self.price_list is not None


@spread(
    only=[
        *("tokens", "epochs", "samples", "within", "price_list", "segments", "images", "videos"),
        *("scale", "mtbf", "save", "restart", "link", "network", "per_node"),
    ],
    between={"samples": ["price"]},
)
def plan(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE|MODEL...",
            help="Training configuration or model. Several are shown side by side.",
            autocompletion=models_from,
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Device that `headway devices` lists. Default: plan.device.",
            autocompletion=devices_from,
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help=("Number of devices, with one process each. Default: plan.devices.")),
    ] = None,
    *,
    length: RunLength,
    price: Annotated[
        float | None, typer.Option(metavar="P", min=0, help="Price of a device-hour, in any currency.")
    ] = None,
    offers: OfferOptions,
    tokens_per_sample: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Text of each sample without its pictures, instead of --segments [tokens]."
        ),
    ] = None,
    work: WorkloadOptions,
    lengths: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measured lengths, as CSV or Parquet. Default: plan.lengths or plan.mix."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="D", help="Instead of --lengths: datasets, measured with the model's own processor. Repeatable."
        ),
    ] = None,
    sizes: SizeOptions,
    link_options: LinkOptions,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PACKAGE",
            help="Package of kernels on the machine that trains, such as flash-linear-attention, or none. Repeatable. "
            "Default: the packages that are installed here.",
        ),
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict memory, step time by part, MFU, tokens per second, days, cost and energy of a run; trains nothing.

    The lines of a step are those of `headway explain`, each with a range from the best rate to the worst. `headway
    ceiling --model` measures this machine's own rates. --scale plans for several numbers of devices, and --mtbf adds
    their failures. --price-list and --within rank devices and their numbers by cost. Several recipes or models are
    planned side by side.

    If the run does not fit the device, the command prints settings that fit, and the exit code is 1.

    Example: headway plan qwen3-8b --device H100 --devices 8 --tokens 1e9
    """
    segments = work.segments or tokens_per_sample
    _refuse(
        _wrong_uses(length, price, {"--lengths": lengths, "--data": data, "--segments": segments}, offers.within, sizes)
    )
    single = {"--within": offers.within, "--price-list": offers.price_list, "--scale": sizes.scale}
    _refuse(
        (len(recipes) > 1 and value is not None, f"{option} is for one run; name one of {', '.join(recipes)}.")
        for option, value in single.items()
    )
    if assume:
        settings = [*(settings or []), f"plan.assume={json.dumps(assume)}"]
    runs = [
        _requested(recipe, device, length, price, work, tokens_per_sample, lengths, data, settings)
        for recipe in recipes
    ]
    run = runs[0]
    if offers.are_given:
        # a recipe's own device bounds no list
        chosen = run.predictor.device if offers.price_list is None or device is not None else None
        others = {"scale": sizes.scale, "mtbf": sizes.mtbf, "data": data, **vars(link_options)}
        priced = chosen_offers(offers.price_list, chosen, price, others)
        _refuse([(not length.is_given, _ENDLESS)])
        print_offers(run, priced, speeds_of, offers.within, devices, as_json=as_json)
    elif sizes.scale is not None:
        _refuse(_wrong_uses_of_scale(devices, data))
        _print_sizes(run, sizes, link_options, as_json=as_json)
    else:
        plans = [
            _planned(run, devices or run.config.plan.devices or 1, link_options, data, looks_for_packs=len(runs) == 1)
            for run in runs
        ]
        _print_plans(recipes, plans, as_json=as_json)


def _requested(
    recipe: str,
    device: str | None,
    length: RunLength,
    price: float | None,
    work: WorkloadOptions,
    tokens_per_sample: int | None,
    lengths: Path | None,
    data: list[str] | None,
    settings: list[str] | None,
) -> RunRequest:
    """The run that a recipe or model and the options name; arguments as the command's."""
    from headway.devices import named_device
    from headway.predict.predictor import Predictor

    of_lengths = () if lengths is None else ("plan.mix=null", f"plan.lengths={json.dumps(str(lengths))}")
    cost_model, config = named_recipe(recipe, (*of_lengths, *(settings or ())))
    pattern = pattern_of(cost_model, config.model.path, work, tokens_per_sample)
    name = device or config.plan.device
    target = named_device(name) if name is not None else None
    own = lengths_of_data(config, cost_model) if pattern is None and not data else None
    if length.epochs is not None and not (lengths or data or length.samples or own):
        raise UsageError(
            f"--epochs {length.epochs:g} needs data that end: give --data, --lengths or --samples, or --tokens instead."
        )
    predictor = Predictor.of(config, cost_model, device=target)
    rows = 0 if data else length.rows(own, lengths)
    return RunRequest(config, cost_model, predictor, pattern, own, length, rows, price)


def _print_plans(recipes: list[str], plans: "Sequence[tuple[Prediction, RunTotals | None]]", *, as_json: bool) -> None:
    """Print a plan with its step by line, or several side by side.

    Raises:
        typer.Exit: a run does not fit its device; exit code 1.
    """
    if len(plans) == 1:
        print_result(lambda: plan_record(*plans[0]), lambda: plan_text(*plans[0]), as_json=as_json)
    else:
        names = [(Path(recipe).stem if Path(recipe).is_file() else recipe) for recipe in recipes]
        print_result(
            lambda: {"plans": [plan_record(*plan) for plan in plans]},
            lambda: plans_text(names, plans),
            as_json=as_json,
        )
    if any(planned.fits is False for planned, _ in plans):
        raise typer.Exit(1)


def _planned(
    run: RunRequest, count: int, link_options: LinkOptions, data: list[str] | None, *, looks_for_packs: bool
) -> "tuple[Prediction, RunTotals | None]":
    """The plan for one number of devices, with time and cost of a whole run, and with faster packs if asked for."""
    from headway.predict.lengths import lengths_in_turn, no_lengths
    from headway.predict.recipe import with_copies

    config, predictor = with_copies(run.config, count), run.predictor
    links = link_options.joining(predictor.device, count)  # before anything is measured, which takes long
    measured = measured_data(data, config, run.cost_model) if data else None
    table = run.own if measured is None else (measured.name, measured.lengths)
    if run.pattern is not None:
        table = lengths_in_turn(config, run.pattern, config.parallel.mesh_shape(count))
    elif table is None and config.plan.lengths is None and config.plan.mix is None:
        raise no_lengths()
    speeds = speeds_of(config, run.cost_model, predictor.device, count)
    making_s = None if measured is None else measured.making_s
    predictor = replace(predictor, speeds=speeds, links=links, making_s=making_s)
    planned = _with_note_on_auto(predictor, predictor.at(config, count, table))
    if looks_for_packs:
        planned = replace(planned, others=_other_packs(predictor, planned, table))
    return planned, run.totals(planned, planned.work.counts.read)


def _with_note_on_auto(predictor: "Predictor", planned: "Prediction") -> "Prediction":
    """Add a note on the other kernel of attention that auto may take on the machine that trains, and on its gain."""
    from headway.config import changed_config

    target, config = planned.device, planned.config
    if config.speed.attention != "auto" or target is None or "cudnn" not in target.attention_shares:
        return planned
    faster = changed_config(config, {"speed.attention": "cudnn"})
    speeds = speeds_of(faster, predictor.cost_model, target, planned.devices)
    other = replace(predictor, device=None, speeds=speeds).over(planned.packs, faster, planned.devices)
    note = note_on_auto(planned.step, other.step, other.memory.peak - planned.memory.peak)
    return replace(planned, notes=(*planned.notes, note))


def _other_packs(
    predictor: "Predictor", planned: "Prediction", table: "tuple[str, LengthTable] | None"
) -> "tuple[OtherPacks, ...]":
    """Faster packs of as many tokens a step; none are looked for without a device, or among too many samples."""
    from headway.predict.lengths import lengths_of
    from headway.predict.tune import same_step

    config, devices = planned.config, planned.devices
    lengths = table or lengths_of(config, predictor.cost_model, planned.shape)
    if predictor.device is None or lengths is None or len(lengths[1].tokens) > _MOST_SAMPLES:
        return ()
    return same_step(config, predictor, devices, lengths)


def pattern_of(
    cost_model: "CostModel", model: str, work: WorkloadOptions, tokens_per_sample: int | None
) -> "tuple[str, LengthTable] | None":
    """Name and table of the samples that --segments, --images and --videos describe; None without these options."""
    work = work.in_patches(model)
    if tokens_per_sample is not None:
        work = with_text(cost_model, work, tokens_per_sample)
    table = samples_in_turn(cost_model, work)
    if table is None:
        return None
    return " ".join(f"{option} {text[:60]}" for option, text in work.typed().items()), table


def _refuse(wrong: "Iterable[tuple[object, str]]") -> None:
    """Raise the error of the first condition that holds."""
    for is_wrong, sentence in wrong:
        if is_wrong:
            raise UsageError(sentence)


def _wrong_uses(
    length: RunLength, price: float | None, places: dict[str, Any], within: float | None, sizes: SizeOptions
) -> "Iterable[tuple[object, str]]":
    """Options that two places would answer, or none, each with its sentence."""
    names = [name for name, value in places.items() if value]
    yield len(names) > 1, f"{' and '.join(names)} are two places for lengths; give one of them."
    for name, value in (("--epochs", length.epochs), ("--samples", length.samples)):
        both = length.tokens is not None and value is not None
        yield both, f"--tokens and {name} both say how long the run is; give one of them."
    is_time = within is None or 0 < within < math.inf
    yield not is_time, f"--within {_short(within)} is no time; give a positive one, such as 7d or 36h."
    again = length.samples is not None and names and names[0] != "--segments"
    yield again, f"--samples {length.samples} says again what {''.join(names)} holds; give --epochs instead."
    for name, value in (("--tokens", length.tokens), ("--epochs", length.epochs)):
        is_length = value is None or 0 < value < math.inf
        yield not is_length, f"{name} {_short(value)} is no length of a run; give a positive number."
    endless = not length.is_given
    yield price is not None and endless, "--price is for a whole run; give its --tokens, --epochs or --samples too."
    for name, value, needed, other in (
        ("--mtbf", sizes.mtbf, "--scale", sizes.scale),
        ("--save", sizes.save, "--mtbf", sizes.mtbf),
        ("--restart", sizes.restart, "--mtbf", sizes.mtbf),
    ):
        lacks = value is not None and other is None
        yield lacks, f"{name} {_short(value)} cannot take effect without {needed}."
        yield value is not None and value < 0, f"{name} {_short(value)} is no time; give a positive number."


def _wrong_uses_of_scale(devices: int | None, data: list[str] | None) -> "Iterable[tuple[object, str]]":
    for name, value in (("--devices", devices), ("--data", data and data[0])):
        yield value is not None, f"{name} {value} is for one size of a run, and cannot take effect with --scale."


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _print_sizes(run: RunRequest, options: SizeOptions, link_options: LinkOptions, *, as_json: bool) -> None:
    """Plan each number of devices that --scale names, and print time and cost of a whole run at each.

    Raises:
        typer.Exit: one does not fit the device; exit code 1.
    """
    from headway.cli.scale_text import scale_record, scale_text
    from headway.predict.scale import at_size, sizes_of

    counts, target, reliability = sizes_of(options.scale or ""), run.predictor.device, options.reliability
    if target is None:
        raise PlanError("no device is named, and --scale needs one: give --device, or set plan.device.")
    links = link_options.of(target)
    speeds = speeds_of(run.config, run.cost_model, target, max(counts))
    predictor = replace(run.predictor, speeds=speeds, links=links)
    with working(f"planning packs for up to {max(counts):,} devices"):
        planned = [at_size(predictor, run.config, count, run.pattern or run.own, reliability) for count in counts]
    sizes = [(size, run.totals(size)) for size in planned]
    print_result(lambda: scale_record(sizes, reliability), lambda: scale_text(sizes, reliability), as_json=as_json)
    if any(size.fits is False for size in planned):
        raise typer.Exit(1)


def named_recipe(recipe: str, settings: tuple[str, ...]) -> "tuple[CostModel, TrainConfig]":
    """Load the cost model and the configuration that RECIPE|MODEL names.

    Args:
        recipe: a YAML file; or a model, which is trained by AdamW on packs of 8,192 tokens of typical samples.
        settings: assignments that change the configuration, as `--set` takes them.
    """
    from headway.config import load_config, with_overrides
    from headway.predict.engine import with_engine

    if Path(recipe).suffix in (".yaml", ".yml"):
        config = with_engine(load_config(Path(recipe), settings), warn)
        return resolve_ledger(config.model), config
    cost_model = resolve_cost_model(recipe)
    raw = {
        "model": {"path": recipe},
        "data": {"train": [{"path": "data.jsonl"}], "tokens_per_pack": _PACK, "overlong": "truncate"},
        "optim": {"steps": 1000, "lr": 1e-5},
        "run": {"folder": "runs/plan"},
        "plan": {"mix": "images" if cost_model.has_vision else "chats"},
    }
    return cost_model, with_engine(with_overrides(raw, settings), warn)


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
    from headway.predict.recipe import precision_of
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
    with needs_extra("no device is named (--device H100 would name one), and planning for this machine"):
        from headway.devices.ceilings import matmul_ceiling
        from headway.predict.block_times import with_blocks

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
