"""`headway explain`: where every second of a profiled step went, in lines that add up to the step exactly."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import JsonOption
from headway.errors import UsageError
from headway.explain.breakdown import By, break_down
from headway.explain.text import as_text
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain as explain_traces


def explain(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="Traces of torch.profiler (.json or .json.gz) of torch 2.0 or newer; several are ranks of one job.",
            show_default=False,
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Only this step, by the number in ProfilerStep#N; all that are whole if not given."
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(metavar="R", help="Only this rank; the others still tell how long it waits.")
    ] = None,
    by: Annotated[
        By | None, typer.Option(help="Add the step's time by component, module or kernel.", show_default=False)
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Take the whole trace as one step.")] = False,
    as_json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--md", help="Print Markdown, for an issue or a pull request.")] = False,
) -> None:
    """Show where every second of a step went: computing by class, communication, copies, idle time by cause.

    The lines of a step add up to it exactly. A step is measured on the device's clock; in a trace of a CPU alone,
    operators take the place of kernels.

    Example: headway explain trace.json.gz --by kernel
    """
    if as_json and markdown:
        raise UsageError("--json and --md are two outputs; give one of them.")
    found = explain_traces([read_trace(path) for path in traces], step=step, rank=rank, whole=whole)
    if as_json:
        record = found.as_record()
        if by is not None:
            for written, waterfall in zip(record["steps"], found.steps, strict=True):
                written["by"] = {"key": by, "rows": [share.as_record() for share in break_down(waterfall, by)]}
        print(json.dumps(record))
    else:
        print(as_text(found, by, markdown=markdown))
