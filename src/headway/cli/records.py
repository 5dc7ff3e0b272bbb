"""`headway check` and `headway goodput`: proofs and times from the records of a run."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import JsonOption
from headway.cli.output import print_result, warn
from headway.errors import LogError
from headway.log.run_files import run_copy

CheckedRunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run folder of headway train. The run may be going on.")
]
OtherArgument = Annotated[
    Path | None,
    typer.Argument(metavar="OTHER", help="Folder of a run with the same data and packs, to compare step by step."),
]


def check(run: CheckedRunArgument, other: OtherArgument = None, as_json: JsonOption = False) -> None:
    """Prove from a run's records that no sample was lost or repeated, as far as there are witnesses.

    The command proves that every step is recorded once, that repeated steps had the same samples as the first time, and
    that each checkpoint agrees with the steps before it. The output names the steps that are proved, and the steps that
    are not.

    Exit code 0: some steps are proved, and nothing disagrees. 1: something disagrees, or no step has a witness.

    Example: headway check runs/digits/run
    """
    from headway.train.check import check_run

    checked = check_run(run_copy(run), None if other is None else run_copy(other))
    print_result(checked.to_dict, checked.as_table, as_json=as_json)
    if checked.faults:
        raise LogError(f"{run} lost or repeated samples, or its records were changed: {'; '.join(checked.faults)}.")
    if not checked.proved:
        raise LogError(
            f"nothing is proved of {run}, because there is no checkpoint to compare its {checked.steps} steps with, "
            "and no step was repeated. Check the run while it has a checkpoint, or give the folder of another run "
            "with the same data."
        )


RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder that holds goodput.jsonl, or that file.")]


def goodput(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show how the wall time of a run divides into steps, waiting, evaluation, checkpoints, recovery and the rest.

    Every second from the first process's start to the last line is in exactly one bucket. Goodput is the share of the
    time in steps that no restart lost. The run may still be going on.

    Example: headway goodput runs/digits/run
    """
    from headway.meter.goodput_report import read_goodput

    report = read_goodput(run_copy(run))
    print_result(report.to_dict, report.as_table, as_json=as_json)
    for warning in report.warnings:
        warn(warning)
