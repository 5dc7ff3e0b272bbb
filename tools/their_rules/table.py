"""The table of a comparison, from its record."""

from __future__ import annotations

from typing import Any

from headway.conventions import get_convention
from tools.their_rules.cases import ANSWERS, TEXT, Case
from tools.their_rules.rules import UNCOMPARED

_SHOWN = ("qwen3-8b", "qwen3-30b-a3b", "deepseek-v3")  # grouped queries, experts, latent attention
_NOTED = 0.0005  # differences below this share of the useful FLOPs are left out, as in `headway compare`


def render(record: dict[str, Any]) -> str:
    """Render the table: a line for each rule, and every case that differs."""
    lines = [
        "# Conventions beside the tools' own functions", "",
        f"`python -m tools.their_rules CHECKOUTS`, {record['date']}; Headway {record['headway']}, transformers "
        f"{record['transformers']}. A case is one model on one step; numbers are equal if they are the same FLOPs, as "
        "closely as a double holds them. Both refuse where the tool fails, prints 0 or prints nothing.", "",
        "| convention | project | commit | date | numbers | equal | both refuse | differ |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    total = [0, 0, 0, 0]
    for rule in record["rules"]:
        values = [flops for steps in rule["flops"].values() for flops in steps.values()]
        differ = rule["differences"]
        numbers = sum(value is not None for value in values)
        wrong = sum(row["theirs"] is not None for row in differ)
        counts = [numbers, numbers - wrong, len(values) - numbers - (len(differ) - wrong), len(differ)]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        cells = [f"`{rule['convention']}`", rule["project"], rule["commit"], rule["date"] or "release"]
        lines.append("| " + " | ".join([*cells, *(f"{n:,}" for n in counts)]) + " |")
    lines.append("| all | | | | " + " | ".join(f"{n:,}" for n in total) + " |")
    lines += ["", "Not compared here:", "", *(f"* `{name}`: {why}." for name, why in UNCOMPARED.items())]
    odd = [(rule["convention"], row) for rule in record["rules"] for row in rule["differences"]]
    if odd:
        lines += ["", "| convention | model | step | theirs | ours | why |", "| --- | --- | --- | ---: | ---: | --- |"]
    for name, row in odd:
        theirs, ours = ("-" if row[key] is None else f"{row[key]:,.0f}" for key in ("theirs", "ours"))
        lines.append(f"| `{name}` | {row['model']} | {row['step']} | {theirs} | {ours} | {row['why']} |")
    lines += beside_useful(record)
    lines += ["", "Peaks that the tools divide by, for every device name that Headway knows:", ""]
    lines += ["| tool | project | commit | date | names | equal |", "| --- | --- | --- | --- | ---: | ---: |"]
    for found in record["peaks"]:
        names, differ = len(found["flops_per_s"]), found["differ"]
        cells = [f"`{found['tool']}`", found["project"], found["commit"], found["date"], str(names)]
        lines.append(f"| {' | '.join(cells)} | {names - len(differ)}{''.join(f'; not {name}' for name in differ)} |")
    return "\n".join(lines) + "\n"


def beside_useful(record: dict[str, Any]) -> list[str]:
    """List how the trainers of reinforcement learning bill ten batches, over the useful FLOPs, and in which parts."""
    rows = []
    for rule in record["rules"]:
        for model in _SHOWN:
            steps = {name: flops for name, flops in rule["flops"].get(model, {}).items() if name in {**TEXT, **ANSWERS}}
            if not ANSWERS.keys() <= steps.keys() or None in steps.values():
                continue
            bills = {name: useful_and_theirs(rule["convention"], Case(model, name)) for name in steps}
            ratios = [steps[name] / sum(useful.values()) for name, (useful, _) in bills.items()]
            useful, theirs = bills["a long answer"]
            total = sum(useful.values())
            shares = {part: (theirs.get(part, 0) - useful.get(part, 0)) / total for part in {**useful, **theirs}}
            parts = ", ".join(f"{part} {share:+.1%}" for part, share in shares.items() if abs(share) >= _NOTED)
            cells = [f"`{rule['convention']}`", model, f"{min(ratios):.3f} to {max(ratios):.3f}", parts or "none"]
            rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return []
    head = [
        "",
        "Ten batches of text and of answers: the tool's own FLOPs over the useful ones, and what differs on `a long "
        "answer` (15 samples of 450 tokens, one of 16,640), as shares of the useful FLOPs.",
        "",
        "| convention | model | theirs / useful | differences |",
        "| --- | --- | --- | --- |",
    ]
    return head + rows


def useful_and_theirs(convention: str, case: Case) -> tuple[dict[str, float], dict[str, float]]:
    """Parts of a case's bill: the useful one's, and a rule's."""
    names = ("useful", convention)
    useful, theirs = ({**get_convention(name).bill(case.numbers, case.step).parts} for name in names)
    return useful, theirs
