"""`headway tune`: which packing length, accumulation, recomputation and sharing trains a recipe fastest."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.links import LinkOptions, note_on_links
from headway.cli.options import JsonOption, SetOption, devices_from, models_from, spread
from headway.cli.output import print_result, say
from headway.cli.plan import named_recipe, pattern_of, speeds_of
from headway.cli.plan_data import RunLength, lengths_of_data, measured_data
from headway.cli.resolve import resolve_architecture
from headway.cli.train import find_inputs
from headway.cli.tune_text import TuneReport, as_text, note_on_tokens, to_dict
from headway.cli.workload import WorkloadOptions
from headway.errors import DataError, HeadwayError, PlanError, UsageError
from headway.files import write_output
from headway.log.working import working
from headway.report.quantity import SIZE_UNITS, bytes_in, doubt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.config import TrainConfig
    from headway.count import CostModel
    from headway.devices import Device
    from headway.packing.lengths import LengthTable
    from headway.predict.communication import Links
    from headway.predict.prediction import Prediction
    from headway.predict.speeds import Speeds
    from headway.predict.tune import Search, Trial

_SHOWN = 5


@spread(only=["tokens", "samples", "segments", "images", "videos", "link", "network", "per_node"])
def tune(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|MODEL",
            help="Training configuration or model, as for `headway plan`.",
            autocompletion=models_from,
        ),
    ],
    settings: SetOption = None,
    devices: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help=("Number of devices, with one process each. Default: plan.devices.")),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Device that `headway devices` lists. Default: plan.device.",
            autocompletion=devices_from,
        ),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help=("Lengths of the samples, as for `headway pack`. Default: those of the section plan.")
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="D", help="Datasets that the model's processor measures, in place of --lengths. Repeatable."
        ),
    ] = None,
    *,
    work: WorkloadOptions,
    length: RunLength,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help=("Memory that a run may use on each device, such as 70GiB. Default: 90 % of the device's memory."),
        ),
    ] = None,
    tokens_per_step: Annotated[
        str | None,
        typer.Option(
            metavar="N+-P%", help="Tokens of a step, such as '2M +-5%'. Default: the tokens of the recipe's packs."
        ),
    ] = None,
    meshes: Annotated[
        bool,
        typer.Option(
            "--meshes",
            help="Vary sharding, replication, sequence and expert degree too.",
        ),
    ] = False,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Number of choices to show.")] = _SHOWN,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the best choice as a recipe that extends RECIPE.")
    ] = None,
    measure: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            help=("Run the best K choices here for some steps, and rank again by their measured times."),
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Steps of a measured run, after two that warm up [steps].")
    ] = None,
    link_options: LinkOptions,
    as_json: JsonOption = False,
) -> None:
    """Search packing length, accumulation, recomputation, sharding and loss chunks for the fastest choice that fits.

    Headway compares every choice with the memory limit. For the choices that fit, Headway plans packs over the real
    lengths and predicts the time of a step. The command trains nothing unless you give --measure.

    Example: headway tune recipes/qwen2.5-7b-text-81920.yaml --write best.yaml
    """
    from headway.devices import named_device

    if steps is not None and measure is None:
        raise UsageError(f"--steps {steps} has no effect without --measure K. Add --measure, or leave --steps out.")
    if work.segments is not None and (lengths is not None or data):
        other = "--data" if data else "--lengths"
        raise UsageError(f"--segments and {other} both give lengths. Give one of them.")
    if length.tokens is not None and length.samples is not None:
        raise UsageError("--tokens and --samples both give the length of the run. Give one of them.")
    if write is not None:
        _check_target(write, recipe)
    cost_model, config = named_recipe(recipe, tuple(settings or ()))
    config = _planned_for(config, devices, device, lengths, measured=bool(data))
    if measure is not None:
        _check_data(config)
    kind = None if config.plan.device is None else named_device(config.plan.device)
    link_options.joining(kind, config.plan.devices or 1)  # before anything is measured, which takes long
    pattern = pattern_of(cost_model, config.model.path, work, None)
    search, joined, speeds = search_of(
        config, cost_model, memory, tokens_per_step, data or [], pattern, meshes=meshes, link_options=link_options
    )
    tuned = _tuned(recipe, search, kind, speeds, joined, top, measure, steps)
    if length.is_given:
        tuned = replace(tuned, run=length)
    if write is not None:
        _write(write, Path(recipe), tuned)
    print_result(lambda: to_dict(tuned), lambda: as_text(tuned), as_json=as_json)


def _planned_for(
    config: "TrainConfig", devices: int | None, device: str | None, lengths: Path | None, *, measured: bool
) -> "TrainConfig":
    """The recipe with the devices and lengths of the command line."""
    from headway.config import changed_config

    if lengths is not None and measured:
        raise UsageError("--lengths and --data both give lengths. Give one of them.")
    plan = config.plan
    planned = {"plan.devices": devices or plan.devices or 1, "plan.device": device or plan.device}
    of_lengths = {} if lengths is None else {"plan.lengths": str(lengths), "plan.mix": None}
    return changed_config(config, planned | of_lengths)


def _tuned(
    recipe: str,
    search: "Search",
    device: "Device | None",
    speeds: "Speeds",
    links: "Links | None",
    top: int,
    measure: int | None,
    steps: int | None,
) -> TuneReport:
    """Search, and measure the best where that is asked for."""
    from headway.predict.prediction import OtherPacks
    from headway.predict.recipe import precision_of
    from headway.predict.tune import corrected, distinct, front

    with working("searching packing lengths, recomputation and sharding"):
        result = search.run()
    # Choices that differ in a detail alone would fill the list; each row is a way of its own.
    best = distinct(result.ranked, max(top, measure or 0))
    if measure is not None and measure > len(best):
        raise UsageError(
            f"--measure {measure} is too many: {len(best)} choices that differ in more than details fit. Give at most "
            f"{len(best)}."
        )
    # Steps that were really run correct the forecasts of all others.
    trials = _run(best[:measure], search.devices, steps) if measure else {}
    again = corrected(result.ranked, trials) if trials else []
    shorter = result.fastest_shorter
    left_out = search.predictor.saved[precision_of(search.config, search.devices)].left_out
    notes = [
        note_on_tokens(best[0]),
        f"Headway cannot count the activations of {', '.join(left_out[:3])}." if left_out else "",
        note_on_links(links, search.devices),
    ]
    return TuneReport(
        recipe=recipe,
        model=search.predictor.cost_model.name,
        device=device,
        devices=search.devices,
        lengths=search.lengths[0],
        step_tokens=search.space.step_tokens,
        tolerance=search.space.tolerance,
        peak_flops_per_s=speeds.peak_flops_per_s if device is not None else None,
        source=speeds.source.partition(" (")[0],
        result=result,
        best=best[:top],
        shorter=None if shorter is None else OtherPacks(shorter, *search.longer(shorter.config), leaves_out=True),
        front=front(result.candidates),
        trials=trials,
        again=again,
        notes=tuple(note for note in notes if note),
    )


def search_of(
    config: "TrainConfig",
    cost_model: "CostModel",
    memory: str | None,
    tokens_per_step: str | None,
    data: list[str],
    pattern: "tuple[str, LengthTable] | None" = None,
    *,
    meshes: bool = False,
    link_options: LinkOptions = LinkOptions(),  # noqa: B008 - it is frozen
) -> "tuple[Search, Links | None, Speeds]":
    """Build the search from a recipe and the command line's options.

    Args:
        config: the recipe, with devices and device in its plan section.
        cost_model: of its model, before anything is frozen or adapted.
        memory: what each device may hold, such as 70GiB; nine tenths of it when None.
        tokens_per_step: such as "2M +-5%"; as many as the recipe's packs hold when None.
        data: datasets whose samples' lengths are taken; the plan section's lengths when empty.
        pattern: name and lengths of samples that repeat, in place of both.
        meshes: whether processes may share model and packs in other ways than in the recipe.
        link_options: how devices are joined, where the options say it.

    Returns:
        The search, the links between the devices, None where they are not known, and the speeds of a device.

    Raises:
        HeadwayError: a size or device that is not known, or nothing that says how long samples are.
    """
    from headway.devices import named_device
    from headway.predict.lengths import lengths_in_turn, lengths_of
    from headway.predict.predictor import Predictor
    from headway.predict.tune import Search, Space, parse_step_tokens
    from headway.predict.tune.space import TOLERANCE

    count, name = config.plan.devices or 1, config.plan.device
    target = named_device(name) if name is not None else None
    room = _room(memory, target)
    architecture = resolve_architecture(config.model.path, cost_model)
    predictor = Predictor.of(config, cost_model)
    learning = predictor.cost_model
    wanted, tolerance = (None, TOLERANCE) if tokens_per_step is None else parse_step_tokens(tokens_per_step)
    # Space of the search: packs, recomputation and sharding vary; the step keeps its tokens.
    space = Space.of(
        config,
        count,
        num_heads=architecture.heads,
        num_experts=architecture.num_experts,
        towers={learning.block_towers[block] for block in learning.blocks_in_backward if block},
        step_tokens=wanted,
        tolerance=tolerance,
        meshes=meshes,
    )
    shape = config.parallel.mesh_shape(count)
    # Lengths: of the data given, of the file that the recipe names, or of a mix drawn at this size.
    measured = measured_data(data, config, cost_model) if data else None
    if measured is not None:
        lengths: tuple[str, LengthTable] | None = (measured.name, measured.lengths)
    elif pattern is not None:
        lengths = lengths_in_turn(_of_size(config, space.step_tokens), pattern, shape)
    else:
        lengths = lengths_of_data(config, cost_model) or lengths_of(
            _of_size(config, space.step_tokens), learning, shape
        )
    if lengths is None:
        raise PlanError(
            "nothing says how long the samples are. Give --lengths FILE, --data D or --segments, or set plan.lengths "
            "or plan.mix in the recipe."
        )
    speeds = speeds_of(config, cost_model, target, count)
    links = link_options.joining(target, count)
    making_s = None if measured is None else measured.making_s
    predictor = replace(predictor, speeds=speeds, links=links, making_s=making_s)
    return Search(config, predictor, count, room, lengths, space), links, speeds


def _room(memory: str | None, device: "Device | None") -> int | None:
    """Memory that a run may use on each device [bytes]; None if it is unknown."""
    from headway.predict.fitting import room_of

    limit = None if device is None else device.total_memory_bytes
    if memory is None:
        return room_of(device)
    size = bytes_in(memory.strip())
    if not size:
        why = doubt(memory[:40], "bytes")
        raise UsageError(
            f"--memory {memory[:40]!r} is not a size{f': {why}' * bool(why)}. Write a number and a unit, such as "
            f"70GiB. Units are {', '.join(SIZE_UNITS)}."
        )
    if limit is not None and size > limit and device is not None:
        raise PlanError(
            f"--memory {memory} is more than the {limit / 2**30:.1f} GiB that {device.title} has. Give less, or name "
            "another --device."
        )
    return size


def _of_size(config: "TrainConfig", step_tokens: int) -> "TrainConfig":
    """The recipe with steps of at least the wanted size, so that enough samples are drawn."""
    from headway.predict.tune.space import admitted

    shape = config.parallel.mesh_shape(config.plan.devices or 1)
    packs = shape.world_size // shape.sequence * config.data.tokens_per_pack
    larger = admitted(config, {"optim.accumulation": max(config.optim.accumulation, -(-step_tokens // packs))})
    return larger or config


def _check_data(config: "TrainConfig") -> None:
    """Refuse to measure where model or data are not here."""
    try:
        find_inputs(config)
    except HeadwayError as error:
        raise DataError(
            f"--measure trains the recipe's model on the recipe's data. {error} Set model.path and data.train "
            "with --set, or leave --measure out."
        ) from error


def _check_target(write: Path, recipe: str) -> None:
    if not Path(recipe).is_file():
        raise UsageError(
            f"--write {write} needs a recipe file to extend, and {recipe!r} is no file. `headway init` writes a "
            "recipe for a model and data."
        )
    if write.resolve() == Path(recipe).resolve():
        raise UsageError(f"--write {write} would replace the recipe that the new recipe extends. Give another file.")
    if not write.parent.is_dir():
        raise UsageError(f"--write {write}: the folder {write.parent} does not exist. Make the folder first.")


def _run(best: "Sequence[Prediction]", devices: int, steps: int | None) -> "dict[Prediction, Trial]":
    from headway.predict.tune import measure
    from headway.predict.tune.measure import STEPS

    trials = {}
    for number, candidate in enumerate(best, start=1):
        say(f"measuring choice {number} of {len(best)} ...", on_stderr=True, flush=True)
        trials[candidate] = measure(candidate.config, devices, steps=steps or STEPS)
    return trials


def _write(path: Path, recipe: Path, tuned: TuneReport) -> None:
    """Write the best choice, by its measured rate if choices were measured."""
    from headway.predict.tune import recipe_text

    best = tuned.again[0][0] if tuned.again else tuned.best[0]
    where = "this machine" if tuned.device is None else tuned.device.title
    remark = (
        f"Found by headway tune: the fastest of {tuned.result.fitting:,} choices that fit, {tuned.devices:,} x {where}."
    )
    text = recipe_text(recipe, best.config, path, remark)
    write_output(path, text, option="--write")
    say(f"wrote {path}", on_stderr=True)
