"""`headway report`: a run, or two side by side, as one HTML page that needs nothing else, as Markdown, or live."""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.output import say
from headway.errors import ConfigError, UsageError
from headway.files import write_output
from headway.log.run_files import run_copy
from headway.log.working import working
from headway.stores import shown, url_of

if TYPE_CHECKING:
    from headway.pages.run import ReportedRun

MOST = 2


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN [RUN2]",
            help="Run folder that holds metrics.jsonl, a file of a meter's records, or another tool's log; or two.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File of the page. Default: report.html.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--md", help="Print Markdown instead, for an issue.")] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHANGE",
            help=(
                "Exit with 1 and say why if the second of two runs is worse by more than this, such as 'mfu<-5%', "
                "'step>5%', 'tokens/s<-5%' or 'memory>10%'. Changes within the scatter of the steps do not count. "
                "Repeatable."
            ),
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--serve", help="Show a run that is going on, at an address of this machine.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(metavar="P", min=0, max=65535, help="Port of --serve; 0 takes any free port. Default: 8484."),
    ] = None,
) -> None:
    """Write the page of a run as one HTML file that loads nothing from the network, and print its first screen.

    The page says how well the run went, where a step's time goes, and what to change first. The page of two runs shows
    both with their differences, the losses at equal tokens and FLOPs, and the settings that differ.

    Example: headway report runs/digits/run -o report.html
    """
    from headway.cli.gate import check, parse_condition
    from headway.cli.report_serve import serve
    from headway.pages.folder import names_of_runs
    from headway.pages.page import judged_page, page_of
    from headway.pages.run import evaluations_of

    conditions = [parse_condition(text) for text in fail_if or ()]
    if conditions and (live or len(runs) != MOST):
        raise UsageError("--fail-if compares a second run with a first one. Give two runs, and leave out --serve.")
    if live:
        serve(runs, port, output=output, markdown=markdown, open_it=open_it)
        return
    if port is not None:
        raise UsageError(f"--port {port} takes effect only with --serve. Add --serve, or leave --port out.")

    if markdown and (output is not None or open_it):
        raise UsageError("--md prints Markdown, but -o and --open are for the HTML page. Give one of them.")
    runs = [run_copy(run) for run in runs]
    if len(runs) > MOST:
        raise UsageError(f"{len(runs)} runs are given, but a page shows one run or two.")
    # One run is reported, two are compared.
    try:
        with working("reading records"):
            read_runs = [_read(run) for run in runs]
        names = zip(read_runs, names_of_runs(runs), strict=True)
        contents = " and ".join(f"{len(part.records)} records of {name}" for part, name in names)
        page = page_of(*read_runs)
    except ConfigError:
        if len(runs) > 1 or not (evaluations := evaluations_of(runs[0])):
            raise
        page, contents = judged_page(runs[0], evaluations), f"{len(evaluations)} evaluations"
    if markdown:
        print(page.as_markdown())
    else:
        print(page.as_terminal(), end="\n\n")
        _write(output, page.as_html(), contents, open_it=open_it)
    if conditions:
        check(conditions, *read_runs)


def _write(output: Path | None, page: str, contents: str, *, open_it: bool) -> None:
    path, written = output or Path("report.html"), page.encode()
    write_output(path, written, option="-o")
    say(f"{shown(path)}: {contents}, {len(written):,} bytes")
    if open_it and url_of(path) is None:
        webbrowser.open(path.resolve().as_uri())


def _read(path: Path) -> "ReportedRun":
    """Read a run's records, or another tool's log of one."""
    from headway.cli.explain_sources import records_of_log
    from headway.pages.run import assembled, read_run

    log = records_of_log(path)
    return read_run(path) if log is None else assembled(path, *log)
