"""`headway train`: train a model as a YAML file says."""

import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.options import JsonOption, SetOption, devices_from
from headway.cli.output import needs_extra, print_result, say
from headway.cli.plan_data import find_data, lengths_of_data
from headway.cli.plan_text import dry_run_text
from headway.cli.resolve import resolve_ledger
from headway.errors import RunCompleteError, UsageError
from headway.stores import shown

if TYPE_CHECKING:
    from headway.config import TrainConfig
    from headway.train.summary import RunSummary

INTERRUPTED = 130

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file. recipes/ has examples.")]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Continue the run in run.folder from its newest checkpoint, to the same losses."),
]
ResumeIfAnyOption = Annotated[
    bool,
    typer.Option(
        "--resume-if-any",
        help=(
            "Continue the run in run.folder, or start a run if there is none, for torchrun --max-restarts and "
            "requeued jobs."
        ),
    ),
]

DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Train nothing: show parameters, memory of each device by part, FLOPs of a step and packs, from CONFIG "
        "alone.",
    ),
]
DevicesOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help=("With --dry-run: number of devices, with one process each. Default: plan.devices.")
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --dry-run: device that `headway devices` lists. Default: plan.device.",
        autocompletion=devices_from,
    ),
]
ScaleDownOption = Annotated[
    bool,
    typer.Option(
        "--scale-down",
        help=(
            "Train a small model with the same code for about a minute on a laptop: fewer layers, smaller packs, "
            "fewer steps, made-up samples. --set changes the shrunk settings."
        ),
    ),
]
SmokeOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Take N steps of the run, with one evaluation and one checkpoint, in a run folder that ends in -smoke.",
    ),
]


def train(
    config: ConfigArgument,
    settings: SetOption = None,
    resume: ResumeOption = False,
    resume_if_any: ResumeIfAnyOption = False,
    dry_run: DryRunOption = False,
    devices: DevicesOption = None,
    device: DeviceOption = None,
    scale_down: ScaleDownOption = False,
    smoke: SmokeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a model on packed data; progress goes to stderr, the summary to stdout.

    Paths in CONFIG start from the working directory. The run folder gets the resolved configuration, a record per step
    (metrics.jsonl), checkpoints, a model folder that transformers' from_pretrained opens, and summary.json. Ctrl-C,
    SIGTERM, SIGUSR1 and SIGHUP finish the step and save a checkpoint. The exit code is 130 after Ctrl-C, and 0 after
    another signal.

    `headway config` prints every setting of CONFIG with its type, unit, default and meaning.

    Example: headway train train.yaml --set optim.lr=1e-4
    """
    if resume and resume_if_any:
        raise UsageError("--resume and --resume-if-any contradict each other if there is no run. Give one of them.")
    if smoke is not None and (resume or resume_if_any or dry_run or scale_down):
        raise UsageError(
            "--smoke takes the first steps of a new run. Leave out --resume, --resume-if-any, --dry-run, --scale-down."
        )
    from headway.config import load_config
    from headway.config.smoke import smoke_of

    overrides: tuple[str, ...] = tuple(settings or ())
    later: tuple[str, ...] = ()
    if scale_down:  # settings of what is shrunk come before the scaling, the rest on top
        shrinking = ("model.path=", "run.folder=", "run.device=", "plan.")
        later = tuple(override for override in overrides if not override.startswith(shrinking))
        overrides = tuple(override for override in overrides if override.startswith(shrinking))
    resolved = load_config(config, overrides)  # a typo is told before torch is loaded

    if dry_run:
        if scale_down or resume or resume_if_any:
            raise UsageError("--dry-run trains nothing. Leave out --scale-down, --resume and --resume-if-any.")
        _print_dry_run(resolved, devices=devices, device=device, as_json=as_json)
        return
    if devices is not None or device is not None:
        raise UsageError(
            "--devices and --device need --dry-run, because they plan a run. Training uses the processes that "
            "torchrun starts, and run.device."
        )
    with needs_extra("training"):
        if not scale_down and find_spec("torch") is not None:
            find_inputs(resolved)
        from headway.train.run import train as run

    goes_on = None if resume_if_any else resume
    if scale_down:
        resolved = _scaled_down(resolved, later, resume=goes_on)
    if smoke is not None:
        resolved = smoke_of(resolved, smoke)
    try:
        summary = run(resolved, resume=goes_on, is_smoke=smoke is not None)
    except RunCompleteError as error:
        if not resume_if_any and error.model is None:
            raise
        note = (
            "" if error.model is None else f" Its export was missing, so Headway writes it now: {shown(error.model)}."
        )
        say(f"{error}{note}", on_stderr=True)  # a job that restarts by itself has what it came for
        return
    print_summary(summary, as_json=as_json)


def _print_dry_run(config: "TrainConfig", *, devices: int | None, device: str | None, as_json: bool) -> None:
    """Predict the memory, packs and FLOPs of the run that a configuration describes, and print them.

    Raises:
        HeadwayError: an unknown model or device, a mesh that does not fit, or a setting that cannot take effect.
        typer.Exit: the run does not fit the device; exit code 1.
    """
    from headway.devices import named_device
    from headway.predict.predictor import Predictor
    from headway.predict.recipe import with_copies

    count = devices or config.plan.devices or 1
    name = device or config.plan.device
    config = with_copies(config, count)
    cost_model = resolve_ledger(config.model)
    target = named_device(name) if name is not None else None
    if target is None:
        config = _of_this_machine(config)
    lengths = lengths_of_data(config, cost_model, strict=True)
    planned = Predictor.of(config, cost_model, device=target).at(config, count, lengths)
    print_result(planned.to_dict, lambda: dry_run_text(planned), as_json=as_json)
    if planned.fits is False:
        raise typer.Exit(1)


def _of_this_machine(config: "TrainConfig") -> "TrainConfig":
    """Name the processor in a recipe that takes what there is, where PyTorch sees no accelerator on this machine."""
    if config.run.device != "auto" or find_spec("torch") is None:
        return config
    from headway.cli.devices import local_device
    from headway.config import changed_config

    return changed_config(config, {"run.device": "cpu"}) if local_device(None).type == "cpu" else config


def find_inputs(config: "TrainConfig") -> None:
    """Look for the model and the data before torch is imported, which takes seconds."""
    from headway.hub import EXPORTS, located

    located(config.model.path)
    if Path(config.model.path).parent.name == EXPORTS:  # a run's model may have been named by the run's folder
        say(f"model {config.model.path}", on_stderr=True)
    find_data(config)


def _scaled_down(config: "TrainConfig", overrides: tuple[str, ...], *, resume: bool | None) -> "TrainConfig":
    """Shrink a recipe and write what it trains on; a run that goes on has both already."""
    import torch

    from headway.models.parallel.ranks import launched
    from headway.train.run_folder import has_run
    from headway.train.scale_down import scale_down, write_small

    world_size = launched()[1]
    cuda = config.run.device != "cpu" and torch.cuda.is_available()
    small = scale_down(config, world_size=world_size, cuda=cuda, overrides=overrides)
    if not (has_run(small.config.run.folder) if resume is None else resume):
        write_small(small)
    return small.config


def print_summary(summary: "RunSummary", *, as_json: bool) -> None:
    """Print a run's summary and leave with the exit code that its end calls for.

    Raises:
        typer.Exit: Ctrl-C stopped the run before its end.
    """
    from headway.models.parallel.ranks import own_rank

    if own_rank() == 0:  # the first process speaks for all processes of a run
        print_result(summary.to_dict, summary.as_table, as_json=as_json)
    sys.stdout.flush()
    if not summary.is_complete and summary.stopped_by == signal.SIGINT:  # the sender of SIGTERM expects 0
        raise typer.Exit(INTERRUPTED)
