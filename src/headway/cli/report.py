"""`headway report`: a run as one HTML page that needs nothing else, or as Markdown."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cache import write_whole
from headway.errors import ConfigError, UsageError


def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Run folder that holds metrics.jsonl, or a file of a meter's records."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page; report.html if not given.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--md", help="Print Markdown instead, for an issue.")] = False,
) -> None:
    """Write what a run's records tell as one HTML page, without scripts or requests: speed, loss, time, findings.

    Example: headway report runs/digits/run -o report.html
    """
    from headway.cli.report_page import read_run, report_markdown, report_page

    if markdown and output is not None:
        raise UsageError("--md prints; -o is the HTML page's. Give one of them.")
    seen = read_run(run)
    if markdown:
        print(report_markdown(seen))
        return
    path = output or Path("report.html")
    written = report_page(seen).encode()
    try:
        write_whole(path, lambda file: file.write(written))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}. Give another path by -o.") from error
    print(f"{path}: {len(seen.records)} records of {seen.name}, {len(written):,} bytes")
