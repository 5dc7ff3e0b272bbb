"""Trace every language architecture of the installed transformers and say which ledgers are complete.

    python -m headway.count.tracing.sweep docs/architectures.md       all of them: five minutes on 2 cores
    python -m headway.count.tracing.sweep --only llama,qwen3_vl -     some, to the terminal

Each architecture is built from its configuration class's own defaults, at full width with at most four layers a tower,
or with all of them where fewer cannot be; it needs no weights. One that transformers cannot build or run from its own
defaults counts neither for nor against us.
"""

from __future__ import annotations

import argparse
import copy
import signal
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from headway.count.conventions.verl import LISTED_TYPES
from headway.count.tracing import build, defaults, trace
from headway.count.tracing.inputs import Inputs
from headway.count.workload import Workload
from headway.errors import HeadwayError, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LAYERS = 4
TASKS = {
    "causal language model": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image and text to text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
_SMALL = {"vocab_size": 4096, "intermediate_size": 512, "moe_intermediate_size": 64}  # of a real model, at most
_FIRST_SPECIAL = 4000  # of the numbers that special tokens get in a small vocabulary
_TEXT = 131  # tokens that a real model is run on
_MOST_REAL = 1_500_000_000  # parameters of a real model: 6 GB
_LIMIT_S = 120  # for one architecture; the slowest that end take about 30 s


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture.

    Attributes:
        task: a key of `TASKS`.
        model_type: as in its configuration.
        status: `complete`: every operation explained; `refused`: the trace said no; `not built`: transformers cannot
            make it from its own defaults, or not run what it made.
        detail: drivers of the rows, or the reason.
    """

    task: str
    model_type: str
    status: Literal["complete", "refused", "not built"]
    detail: str


def architectures() -> list[tuple[str, str, str]]:
    """List (task, model type, class name) of everything that transformers registers for the tasks."""
    from transformers.models.auto import modeling_auto

    found = []
    for task, mapping in TASKS.items():
        for model_type, names in getattr(modeling_auto, mapping).items():
            found.append((task, model_type, names if isinstance(names, str) else names[0]))
    return found


def attempt(task: str, model_type: str, class_name: str) -> Outcome:
    """Build and trace one architecture; whatever goes wrong becomes the outcome."""
    from transformers import CONFIG_MAPPING

    def failed(status: Literal["refused", "not built"], error: BaseException) -> Outcome:
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason if isinstance(error, HeadwayError) else f"{type(error).__name__}: {reason}"
        return Outcome(task, model_type, status, reason)

    try:
        whole = CONFIG_MAPPING[model_type]()
        try:
            config = _fitted(build.with_layers(whole, LAYERS), class_name)
        except Exception:  # noqa: BLE001  # some cannot do with fewer layers: they share keys, or share layers
            config = _fitted(whole, class_name)
    except Exception as error:  # noqa: BLE001  # any failure of foreign code is a result here
        return failed("not built", error)
    try:
        with _limit(_LIMIT_S):
            cost = trace(config)
    except Exception as error:  # noqa: BLE001  # as above
        runs = isinstance(error, HeadwayError) or _runs(config, error)
        return failed("refused" if runs else "not built", error)
    if cost.unknown:
        return Outcome(task, model_type, "refused", f"not counted: {', '.join(cost.unknown)}")
    drivers = sorted({row.driver for row in cost.rows})
    return Outcome(task, model_type, "complete", ", ".join(drivers))


def _fitted(config: Any, class_name: str) -> Any:
    """Bring the parts of a default configuration to fit each other; fails where transformers cannot build it."""
    config.architectures = [class_name]
    defaults.fit_defaults(config)
    defaults.fit_sections(config, build.twin_of_config(config))
    build.twin_of_config(config)
    return config


def _runs(config: Any, failure: Exception) -> bool:
    """Say whether transformers itself runs a model on real token ids, where a trace failed with a foreign error.

    Only the same kind of error, raised at the same place in transformers, counts against them; and only on text alone,
    which cannot be at fault, as images or speech in a wrong form would be.
    """
    try:
        config = _small(config)
        if sum(p.numel() for p in build.twin_of_config(config).parameters()) > _MOST_REAL:
            return True
        model = build.model_class(config)._from_config(config, dtype=torch.float32)
        model(**Inputs(model).arguments(Workload([_TEXT]), torch.device("cpu")))
    except Exception as error:  # noqa: BLE001  # any failure of foreign code is a result here
        return type(error) is not type(failure) or _place(error) != _place(failure)
    return True


def _small(config: Any) -> Any:
    """Copy a configuration with smaller layers and vocabularies, and numbers of special tokens that these hold."""
    config = copy.deepcopy(config)
    numbers: dict[int, int] = {}
    for part in build.subconfigs(config):
        for name, value in list(vars(part).items()):
            if type(value) is int and name in _SMALL:
                setattr(part, name, min(value, _SMALL[name]))
            elif type(value) is int and name.endswith(defaults.SPECIAL) and value >= _SMALL["vocab_size"]:
                setattr(part, name, numbers.setdefault(value, _FIRST_SPECIAL + len(numbers)))
    return config


def _place(error: Exception) -> tuple[str, int] | None:
    """Return the innermost file and line of transformers that an error passed; None if it passed none."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return next((frame for frame in reversed(frames) if "/transformers/" in frame[0]), None)


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Give up on a trace that takes too long."""

    def expire(_signal: int, _frame: Any) -> None:
        raise TraceError(f"the trace took longer than {seconds} s: the model loops over its tokens.")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def sweep(only: Sequence[str] | None = None, report: Callable[[Outcome, float], None] | None = None) -> list[Outcome]:
    """Try every architecture, or those whose model type is named.

    Args:
        only: model types; all when None.
        report: called with each outcome and its seconds.
    """
    outcomes = []
    for task, model_type, class_name in architectures():
        if only is not None and model_type not in only:
            continue
        start_s = time.perf_counter()
        outcomes.append(attempt(task, model_type, class_name))
        if report is not None:
            report(outcomes[-1], time.perf_counter() - start_s)
    return outcomes


def render(outcomes: Sequence[Outcome]) -> str:
    """Render the page: the count by task, then every architecture."""
    import transformers

    lines = [
        "# Architectures that count completely",
        "",
        f"Every architecture that transformers {transformers.__version__} registers for these tasks, built from its "
        f"own default configuration with at most {LAYERS} layers a tower and traced forward and backward. Made by "
        "`make sweep`; a complete ledger has no operation unexplained, and a refusal names the first thing that is.",
        "",
        "| task | registered | transformers runs it | complete | share |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for task in (*TASKS, "all"):
        mine = [o for o in outcomes if task in (o.task, "all")]
        built = [o for o in mine if o.status != "not built"]
        complete = [o for o in built if o.status == "complete"]
        share = f"{100 * len(complete) / len(built):.0f} %" if built else "-"
        lines.append(f"| {task} | {len(mine)} | {len(built)} | {len(complete)} | {share} |")
    lines += _peers(outcomes)
    for status, heading, column in (
        ("complete", "Complete", "drivers"),
        ("refused", "Refused", "what is not explained"),
        ("not built", "Not built or not run by transformers from its own defaults", "its error"),
    ):
        lines += ["", f"## {heading}", "", f"| model type | task | {column} |", "| --- | --- | --- |"]
        for o in outcomes:
            if o.status == status:
                detail = o.detail if len(o.detail) <= 160 else o.detail[:157] + "..."
                lines.append(f"| `{o.model_type}` | {o.task} | {detail.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _peers(outcomes: Sequence[Outcome]) -> list[str]:
    """Render how many model types the tools that keep a list have a formula for."""
    complete = {o.model_type for o in outcomes if o.status == "complete"}
    lines = [
        "",
        "Tools that choose a formula by model type print 0 for every type that is not on their list (the lists and "
        "their sources: `src/headway/count/conventions/verl.py`; what each formula leaves out: "
        "[conventions.md](conventions.md)).",
        "",
        "| counter | model types with a formula | of them here too |",
        "| --- | ---: | ---: |",
        f"| Headway, by tracing | {len(complete)} | {len(complete)} |",
    ]
    registered = {o.model_type for o in outcomes}
    for tool, types in sorted(LISTED_TYPES.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {tool} | {len(types)} | {len(types & complete)} of {len(types & registered)} registered |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep and write the page."""
    import transformers

    parser = argparse.ArgumentParser(description="Trace every language architecture of the installed transformers.")
    parser.add_argument("page", help="Markdown file to write, - for the terminal")
    parser.add_argument("--only", help="model types, separated by commas")
    options = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # defaults of others' configs
    torch.set_num_threads(1)

    def report(outcome: Outcome, seconds: float) -> None:
        line = f"{outcome.model_type:28} {outcome.status:10} {seconds:5.1f} s  {outcome.detail[:80]}"
        print(line, file=sys.stderr, flush=True)  # noqa: T201  # progress of a command

    page = render(sweep(options.only.split(",") if options.only else None, report))
    if options.page == "-":
        print(page)  # noqa: T201  # the command's result
    else:
        Path(options.page).write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
