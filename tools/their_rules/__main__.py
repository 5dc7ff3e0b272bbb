"""Compare Headway's conventions with the tools' own functions, and write the table and its record.

python -m tools.their_rules CHECKOUTS [--out FOLDER] [--only CONVENTION ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headway
from headway.conventions import get_convention
from tools.their_rules.cases import cases
from tools.their_rules.checkouts import Checkouts
from tools.their_rules.peaks import PEAKS, compare_peaks
from tools.their_rules.rules import RULES
from tools.their_rules.sizes import NotTheirsError
from tools.their_rules.table import render

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tools.their_rules.cases import Case
    from tools.their_rules.rules import Rule

_DOUBLE = 1e-15  # FLOPs that their functions hold as floats are compared as closely as a float tells numbers apart


def compare(rule: Rule, checkouts: Checkouts, chosen: Iterable[Case]) -> dict[str, Any]:
    """Run a tool's function and our rule on every case.

    Returns:
        The project, its commit and date; its FLOPs by model and step, None where it has no number; and the cases in
        which ours are others.
    """
    commit, day = checkouts.commit_and_date(rule.source)
    count, convention = rule.make(checkouts, rule.source), get_convention(rule.convention)
    flops: dict[str, dict[str, float | None]] = {}
    differences = []
    for case in chosen:
        try:
            theirs = count(case)
        except NotTheirsError:
            continue
        flops.setdefault(case.model, {})[case.step_name] = theirs
        bill = convention.bill(case.numbers, case.step)
        if not agree(theirs, bill.flops):
            differences.append({
                "model": case.model, "step": case.step_name, "theirs": theirs, "ours": bill.flops, "why": bill.reason,
            })  # fmt: skip
    named = {"convention": rule.convention, "project": rule.source.project, "commit": commit, "date": day}
    return {**named, "flops": flops, "differences": differences}


def agree(theirs: float | None, ours: float | None) -> bool:
    """Whether both have no number, or the same, as closely as the floats that hold theirs tell numbers apart."""
    if theirs is None or ours is None:
        return theirs is ours
    return abs(theirs - ours) <= _DOUBLE * max(theirs, ours)


def _one_model_a_line(record: dict[str, Any]) -> str:
    """Write a record as JSON, the numbers of a model on one line, whole ones as integers."""
    marked: dict[str, str] = {}

    def line(steps: dict[str, float | str | None]) -> str:
        whole = {name: int(v) if isinstance(v, float) and v == int(v) else v for name, v in steps.items()}
        marked[f'"@{len(marked)}@"'] = json.dumps(whole)
        return f"@{len(marked) - 1}@"

    rules = [{**r, "flops": {name: line(steps) for name, steps in r["flops"].items()}} for r in record["rules"]]
    peaks = [{**found, "flops_per_s": line(found["flops_per_s"])} for found in record["peaks"]]
    text = json.dumps({**record, "rules": rules, "peaks": peaks}, indent=1)
    for mark, steps in marked.items():
        text = text.replace(mark, steps)
    return text + "\n"


def with_others(record: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Take rules and peaks that a record lacks from one made before, in the order of the script."""
    rules = {rule["convention"]: rule for rule in [*before["rules"], *record["rules"]]}
    peaks = {peak["tool"]: peak for peak in [*before["peaks"], *record["peaks"]]}
    ordered = [rules[rule.convention] for rule in RULES if rule.convention in rules]
    return {**record, "rules": ordered, "peaks": [peaks[tool] for tool in PEAKS if tool in peaks]}


def main() -> None:
    """Run the comparison and write its record; ends with 1 where a number differs."""
    import transformers

    parser = argparse.ArgumentParser(prog="python -m tools.their_rules", description=__doc__)
    parser.add_argument(
        "checkouts", type=Path, metavar="CHECKOUTS", help="folder of clones, named as their repositories"
    )
    parser.add_argument(
        "--out", type=Path, help="where to write their_rules_<yyyymm>.md and .json; printed if not given"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        metavar="CONVENTION",
        help="rules to compare, all others as recorded before; all if not given",
    )
    given = parser.parse_args()
    checkouts = Checkouts(given.checkouts)
    now = datetime.now(UTC).date()
    rules = [rule for rule in RULES if not given.only or rule.convention in given.only]
    record = {
        "what": "tools.their_rules", "date": now.isoformat(), "headway": headway.__version__,
        "transformers": transformers.__version__,
        "rules": [compare(rule, checkouts, cases(answers=rule.answers)) for rule in rules],
        "peaks": [compare_peaks(tool, checkouts) for tool in PEAKS if not given.only or tool in given.only],
    }  # fmt: skip
    if given.out is None:
        print(render(record))
    else:
        stem = given.out / f"their_rules_{now:%Y%m}"
        if given.only and stem.with_suffix(".json").exists():
            record = with_others(record, json.loads(stem.with_suffix(".json").read_text(encoding="utf-8")))
        stem.with_suffix(".md").write_text(render(record), encoding="utf-8")
        stem.with_suffix(".json").write_text(_one_model_a_line(record), encoding="utf-8")
    if any(rule["differences"] for rule in record["rules"]) or any(found["differ"] for found in record["peaks"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
