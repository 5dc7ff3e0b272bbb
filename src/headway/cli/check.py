"""`headway check`: whether a run lost or repeated samples when it was interrupted."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import JsonOption
from headway.errors import LogError

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of headway train, ended or not.")]
OtherArgument = Annotated[
    Path | None,
    typer.Argument(metavar="OTHER", help="Folder of a run with the same data and packs, to compare step by step."),
]


def check(run: RunArgument, other: OtherArgument = None, as_json: JsonOption = False) -> None:
    """Prove from a run's records that no sample was lost or repeated, however often it was killed and resumed.

    Every step is recorded once; steps that were lost and taken again had the same samples as the first time; and what
    each checkpoint says was trained on is the sum of the steps before it. Exit code 1 if not.

    Example: headway check runs/digits/run
    """
    from headway.train.check import check_run

    found = check_run(run, other)
    print(json.dumps(found.as_json()) if as_json else found.as_table())
    if found.faults:
        raise LogError(f"{run} lost or repeated samples: {'; '.join(found.faults)}.")
