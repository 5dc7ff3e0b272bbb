"""What became of each architecture in a sweep, and the page that says so."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from headway.conventions.veomni import VEOMNI
from headway.conventions.verl import LMMS_ENGINE, VERL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tools.sweep.sizes import Reading
    from tools.sweep.witness import Checked

LAYERS = 4
TASKS = {
    "causal language model": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image and text to text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
_WIDEST = 160  # characters of a cell
_NUMBER = re.compile(r"\d[\d,]*")


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture.

    Attributes:
        task: a key of `TASKS`.
        model_type: as in its configuration.
        status: `complete`: every operation explained; `refused`: the trace or the second witness said no; `not built`:
            transformers cannot make it from its own defaults, or not run what it made.
        detail: drivers of the rows, or the reason.
        checked: what the second witness saw; None where there is no ledger.
        alone: what conventions read off the configuration alone.
        settled: what they read off the configuration and the ledger.
    """

    task: str
    model_type: str
    status: Literal["complete", "refused", "not built"]
    detail: str
    checked: Checked | None = None
    alone: Reading | None = None
    settled: Reading | None = None


def render(outcomes: Sequence[Outcome]) -> str:
    """Render the page: the count by task, then every architecture."""
    import transformers

    lines = [
        "# Architectures that count completely",
        "",
        "    headway flops FOLDER --segments 4096    # FOLDER has the config.json of any architecture below",
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
    lines += [*_peers(outcomes), *_witness(outcomes), *_sizes(outcomes)]
    for status, heading, column in (
        ("complete", "Complete", "drivers"),
        ("refused", "Refused", "what is not explained"),
        ("not built", "Not built or not run by transformers from its own defaults", "its error"),
    ):
        lines += ["", f"## {heading}", "", f"| model type | task | {column} |", "| --- | --- | --- |"]
        for o in outcomes:
            if o.status == status:
                lines.append(f"| `{o.model_type}` | {o.task} | {_cell(o.detail)} |")
    return "\n".join(lines) + "\n"


def _peers(outcomes: Sequence[Outcome]) -> list[str]:
    """Render how many model types the tools that keep a list have a formula for."""
    complete = {o.model_type for o in outcomes if o.status == "complete"}
    lines = [
        "",
        "Tools that choose a formula by model type print 0 for every type that is not on their list (the lists and "
        "their sources: `src/headway/conventions/verl.py` and `veomni.py`; what each formula leaves out: "
        "[conventions.md](conventions.md)).",
        "",
        "| counter | model types with a formula | of them here too |",
        "| --- | ---: | ---: |",
        f"| Headway, by tracing | {len(complete)} | {len(complete)} |",
    ]
    registered = {o.model_type for o in outcomes}
    listed = {"LMMs-Engine": set(LMMS_ENGINE), "VeOmni": set(VEOMNI), "verl": set(VERL)}
    for tool, types in sorted(listed.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {tool} | {len(types)} | {len(types & complete)} of {len(types & registered)} registered |")
    return lines


def _cell(text: str) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= _WIDEST else text[: _WIDEST - 3] + "..."


def _types(outcomes: Iterable[Outcome]) -> str:
    return ", ".join(dict.fromkeys(f"`{o.model_type}`" for o in outcomes))


def _witness(outcomes: Sequence[Outcome]) -> list[str]:
    """Render what the second witness checked, and what does not follow its rules."""
    heard = [(o, o.checked) for o in outcomes if o.checked is not None]
    kinds: Counter[str] = Counter()
    for _, checked in heard:
        kinds += checked.parameters
    mixtures = [(o, mixture) for o, checked in heard for mixture in checked.mixtures]
    exceptions: defaultdict[tuple[str, str], list[tuple[Outcome, str]]] = defaultdict(list)
    for o, checked in heard:
        for e in checked.exceptions:
            what = _NUMBER.sub("N", e.what) if e.reason else e.what
            exceptions[e.reason or "unexplained", what].append((o, e.where))
    lines = [
        "",
        "## Second witness",
        "",
        "Each model runs forward once more while its calls of PyTorch's functions are watched, apart from the trace: "
        "the FLOPs of a weight's rows are those of the calls that multiply it, computed from shapes, and 2 x its "
        "elements x a whole number of calls; those of experts are 2 x the elements that a token's picks hold; and "
        "every parameter of two dimensions or more has a row or a reason (`tools/sweep/witness.py`).",
        "",
        "| checked | number |",
        "| --- | ---: |",
        f"| architectures | {len(heard)} |",
        f"| modules whose FLOPs were held against their weights | {sum(t.modules for _, t in heard):,} |",
        f"| modules of experts, in {len({o.model_type for o, _ in mixtures})} architectures | {len(mixtures):,} |",
        f"| parameters of two dimensions or more | {sum(kinds.values()):,} |",
        *(f"| of them: {kind} | {number:,} |" for kind, number in kinds.most_common()),
        "",
        "What is an exception to that, and why:",
        "",
        "| exception | reason | where | architectures |",
        "| --- | --- | --- | --- |",
    ]
    for (reason, what), found in exceptions.items():
        where = _cell(", ".join(dict.fromkeys(f"`{where}`" for _, where in found)))
        lines.append(f"| {what} | {reason} | {where} | {_types(o for o, _ in found)} |")
    return lines


def _sizes(outcomes: Sequence[Outcome]) -> list[str]:
    """Render how what conventions read off configurations compares with the ledgers."""
    lines = [
        "",
        "## Sizes that conventions read",
        "",
        "The formulas of other tools take sizes off a configuration. What is read of each decoder is held against its "
        "ledger: layers with attention, windows, chunks, layers with experts, experts and picks, the weights of MLPs, "
        "features of a query-key pair. Where it does not make the model, a convention refuses with the reason.",
        "",
        "| read off | agrees | refuses | disagrees |",
        "| --- | ---: | ---: | ---: |",
    ]
    readings = {
        "the configuration and the ledger": [(o, o.settled) for o in outcomes if o.settled is not None],
        "the configuration alone": [(o, o.alone) for o in outcomes if o.alone is not None],
    }
    for name, read in readings.items():
        counts = Counter(reading.status for _, reading in read)
        lines.append(f"| {name} | {counts['agrees']} | {counts['refuses']} | {counts['disagrees']} |")
    for name, read in readings.items():
        reasons: defaultdict[tuple[str, str], list[Outcome]] = defaultdict(list)
        for o, reading in read:
            if reading.status != "agrees":
                reasons[reading.status, reading.detail.replace(o.model_type, "it")].append(o)
        lines += ["", f"Read off {name}:", "", "| it | reason | architectures |", "| --- | --- | --- |"]
        lines += [f"| {status} | {_cell(why)} | {_types(found)} |" for (status, why), found in reasons.items()]
    return lines
