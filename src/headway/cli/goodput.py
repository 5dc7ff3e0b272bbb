"""`headway goodput`: where the wall time of a run went, restarts included."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import JsonOption
from headway.cli.output import warn

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder that holds goodput.jsonl, or that file.")]


def goodput(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show how the wall time of a run divides into steps, waiting, evaluation, checkpoints, recovery and the rest.

    Every second is in exactly one bucket, from the first process's start to the last line; goodput is the share of
    steps that were not lost to a restart. A run that is going on can be looked at, too.

    Example: headway goodput runs/digits/run
    """
    from headway.meter.goodput_report import read_goodput

    report = read_goodput(run)
    print(json.dumps(report.to_dict()) if as_json else report.as_table())
    for warning in report.warnings:
        warn(warning)
