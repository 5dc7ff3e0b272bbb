"""Trace every language architecture of the installed transformers and say which ledgers are complete.

    python -m tools.sweep benchmarks/results/architectures_202611.md    all of them: ten minutes of one core
    python -m tools.sweep --only llama,qwen3_vl -                       some, to the terminal

Each architecture is built from its configuration class's own defaults, at full width with at most four layers a tower,
or with all of them where fewer cannot be; it needs no weights. One that transformers cannot build or run from its own
defaults counts neither for nor against us. A ledger that the second witness (`witness`) cannot confirm is refused, and
what conventions read off the configuration is held against it (`sizes`).
"""

from __future__ import annotations

import argparse
import copy
import signal
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from headway.count.workload import Workload
from headway.errors import HeadwayError, TraceError
from headway.tracing import build, trace
from headway.tracing.inputs.model_inputs import Inputs
from tools.sweep import defaults
from tools.sweep.page import LAYERS, TASKS, Outcome, render
from tools.sweep.sizes import read_sizes
from tools.sweep.witness import check_ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SMALL = {"vocab_size": 4096, "intermediate_size": 512, "moe_intermediate_size": 64}  # of a real model, at most
_FIRST_SPECIAL = 4000  # of the numbers that special tokens get in a small vocabulary
_TEXT = 131  # tokens that a real model is run on
_MOST_REAL = 1_500_000_000  # parameters of a real model: 6 GB
_LIMIT_S = 120  # for one architecture; the slowest that end take about 30 s


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
        foreign = error.__cause__ if isinstance(error, TraceError) and isinstance(error.__cause__, Exception) else error
        if isinstance(foreign, HeadwayError) or _runs(config, foreign):
            return failed("refused", error)
        return failed("not built", foreign)
    if cost.unknown:
        return Outcome(task, model_type, "refused", f"not counted: {', '.join(cost.unknown)}")
    checked = check_ledger(config, cost)
    if checked.unexplained:
        doubts = "; ".join(f"{e.where} {e.what}" for e in checked.unexplained)
        return Outcome(task, model_type, "refused", f"the second witness disagrees: {doubts}", checked)
    drivers = sorted({row.driver for row in cost.rows})
    alone, settled = (
        read_sizes(config.to_dict(), model_type, cost, checked.mixtures, alone=alone) for alone in (True, False)
    )
    return Outcome(task, model_type, "complete", ", ".join(drivers), checked, alone, settled)


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
        print(line, file=sys.stderr, flush=True)  # progress of a command

    page = render(sweep(options.only.split(",") if options.only else None, report))
    if options.page == "-":
        print(page)  # the command's result
    else:
        Path(options.page).write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
