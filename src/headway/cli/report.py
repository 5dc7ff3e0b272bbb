"""`headway report`: a run, or two side by side, as one HTML page that needs nothing else, as Markdown, or live.

`headway report STORED NEW --fail-if "mfu<-5%"` is a gate for CI: it fails where the new run is worse, with the cause.
"""

import re
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.output import say, warn
from headway.errors import ConfigError, HeadwayError, UsageError
from headway.files import write_output
from headway.log.run_files import run_copy
from headway.log.working import working
from headway.report import format_bytes, format_count, format_duration, format_share
from headway.stores import shown, url_of

if TYPE_CHECKING:
    from headway.pages.run import ReportedRun


_CONDITION = re.compile(r"\s*([a-z/]+)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%\s*")
_EXAMPLES = '"mfu<-5%", "tokens/s<-5%", "step>5%" or "memory>10%"'
_PER_STEP = {"mfu": -1, "tokens/s": -1, "step": 1}  # metrics that a step's time decides, with its power in them
METRICS = (*_PER_STEP, "memory")


class GateError(HeadwayError):
    """A run is worse than the stored one by more than its gate allows."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A change of the second run against the first one at which the command fails.

    Attributes:
        text: as it was typed.
        metric: one of `METRICS`.
        bound: share of the first run's value; below 0 for a fall by more than that.
    """

    text: str
    metric: str
    bound: float

    def holds(self, change: float) -> bool:
        """True if a change lies beyond the bound."""
        return change < self.bound if self.bound < 0 else change > self.bound


def parse_condition(text: str) -> Condition:
    """Read METRIC<-N% or METRIC>N%.

    Raises:
        UsageError: it is neither.

    >>> parse_condition("mfu<-5%")
    Condition(text='mfu<-5%', metric='mfu', bound=-0.05)
    """
    match = _CONDITION.fullmatch(text)
    if match is None or match[1] not in METRICS:
        raise UsageError(
            f"--fail-if {text[:80]!r} is not a condition. Write a metric ({', '.join(METRICS)}) and its change against "
            f"the first run, such as {_EXAMPLES}."
        )
    bound = float(match[3]) / 100
    if (bound < 0) != (match[2] == "<") or bound == 0:
        raise UsageError(
            f"--fail-if {text[:80]!r} would hold for two equal runs. Write a fall with < and a number below 0, and a "
            f"rise with > and a number above 0, such as {_EXAMPLES}."
        )
    return Condition(text.strip(), match[1], bound)


def check(conditions: Sequence[Condition], stored: "ReportedRun", new: "ReportedRun") -> None:
    """Hold a run against a stored one, and print what each condition found on stderr.

    A change that a step's time decides counts only where the 95 % interval, from how the steps of each run vary, leaves
    no doubt of its sign.

    Raises:
        GateError: a condition holds; the message has the lines of the step that got longer.
        UsageError: one of the runs does not tell the metric.
    """
    from headway.explain.comparison import compare, differences
    from headway.pages.comparison import step_interval
    from headway.pages.folder import names_of_runs

    interval = step_interval(stored, new)
    if interval is None:
        warn("there are too few steps to tell how they vary, so --fail-if uses only the mean step.")
    broken = []
    for condition in conditions:
        before, after = (_value(condition, run) for run in (stored, new))
        change = after / before - 1
        low, high = change, change
        if interval is not None and (power := _PER_STEP.get(condition.metric)):
            # the work of a step changes a metric beside its time, and does not vary by itself
            own = (1 + change) / (new.mean.duration_ns / stored.mean.duration_ns) ** power
            low, high = sorted(own * (1 + bound) ** power - 1 for bound in interval)
        sure = high < 0 if condition.bound < 0 else low > 0
        comparison = (
            f"{condition.metric} {_shown(condition, before)} -> {_shown(condition, after)} ({100 * change:+.1f} %"
        )
        comparison += f", 95 % interval {100 * low:+.1f} to {100 * high:+.1f} %)" if low < high else ")"
        is_beyond = condition.holds(change)
        doubt = ", which is within how the steps vary" if is_beyond and not sure else ""
        say(f"--fail-if {condition.text}: {comparison}{doubt}", on_stderr=True)
        if is_beyond and sure:
            broken.append(comparison)
    if broken:
        a, b = names_of_runs([stored.path, new.path])
        causes = differences(compare((a, stored.explanation), (b, new.explanation)))
        raise GateError(f"{b} (B) is worse than {a} (A): {'; '.join(broken)}. {' '.join(causes)}")


def _value(condition: Condition, run: "ReportedRun") -> float:
    """The metric of a run, above 0."""
    step_s = run.mean.duration_ns / 1e9
    value: float | None
    if condition.metric == "step":
        value = step_s
    elif condition.metric == "mfu":
        value = run.mean.mfu
    elif condition.metric == "memory":
        value = max((record.get("peak_memory_bytes") or 0 for record in run.records), default=0)
    else:
        steps = sum(record.get("num_steps") or 1 for record in run.records)
        value = sum(record.get("tokens") or 0 for record in run.records) / max(1, steps) / step_s
    if not value:
        raise UsageError(f"--fail-if {condition.text}: the records of {run.name} do not tell {condition.metric}.")
    return value


def _shown(condition: Condition, value: float) -> str:
    if condition.metric == "mfu":
        return format_share(value)
    if condition.metric == "memory":
        return format_bytes(value)
    return format_duration(value) if condition.metric == "step" else format_count(round(value))


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
