"""The table of a comparison, from its record."""

from __future__ import annotations

from typing import Any

from tools.their_rules.rules import UNCOMPARED


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
    lines += ["", "Peaks that the tools divide by, for every device name that Headway knows:", ""]
    lines += ["| tool | project | commit | date | names | equal |", "| --- | --- | --- | --- | ---: | ---: |"]
    for found in record["peaks"]:
        names, differ = len(found["flops_per_s"]), found["differ"]
        cells = [f"`{found['tool']}`", found["project"], found["commit"], found["date"], str(names)]
        lines.append(f"| {' | '.join(cells)} | {names - len(differ)}{''.join(f'; not {name}' for name in differ)} |")
    return "\n".join(lines) + "\n"
