"""`headway train`: train a model as a YAML file says."""

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.extras import needs_extra
from headway.cli.options import JsonOption
from headway.errors import UsageError

if TYPE_CHECKING:
    from headway.train.summary import RunSummary

INTERRUPTED = 130

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; recipes/ has some to start from.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="a.b=c", help="Change one setting, such as optim.lr=1e-3. The value is YAML. Repeatable."
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue the run in run.folder from its newest checkpoint, exactly as if never stopped."
    ),
]
ResumeIfAnyOption = Annotated[
    bool,
    typer.Option(
        "--resume-if-any",
        help="As --resume if run.folder holds a run, or else start one: for torchrun --max-restarts and requeued jobs.",
    ),
]


def train(
    config: ConfigArgument,
    settings: SetOption = None,
    resume: ResumeOption = False,
    resume_if_any: ResumeIfAnyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model on packed data; progress goes to stderr, the summary to stdout.

    Paths in CONFIG start from the working directory. The run folder gets the resolved configuration, a record per step
    (metrics.jsonl), checkpoints, a model folder that transformers' from_pretrained opens, and summary.json. Ctrl-C and
    SIGTERM finish the step, save a checkpoint and end with exit code 130 and 0.
    """
    if resume and resume_if_any:
        raise UsageError("--resume and --resume-if-any contradict each other where there is no run; give one of them.")
    from headway.train.config import load_config

    resolved = load_config(config, tuple(settings or ()))  # a typo is told before torch is loaded

    with needs_extra("training"):
        from headway.train.loop import train as run

    print_summary(run(resolved, resume=None if resume_if_any else resume), as_json=as_json)


def print_summary(summary: "RunSummary", *, as_json: bool) -> None:
    """Print a run's summary and leave with the exit code that its end calls for.

    Args:
        summary: of the run.
        as_json: one JSON object instead of a table.

    Raises:
        typer.Exit: Ctrl-C stopped the run before its end.
    """
    print(json.dumps(summary.as_json()) if as_json else summary.as_table())
    sys.stdout.flush()
    if not summary.is_complete and summary.stopped_by == signal.SIGINT:  # who sends SIGTERM expects 0
        raise typer.Exit(INTERRUPTED)
