"""Preferences for a small run, made of its chats."""

import json
from pathlib import Path


def into_pairs(path: Path) -> None:
    """Make preferences of a file of chats: each last answer, and its words the other way round as the worse one."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        *prompt, chosen = row.pop("messages", [None])
        if not prompt:
            continue  # a document
        words = chosen["content"].split()
        rejected = {**chosen, "content": " ".join([*words[::-1], "no"])}
        rows.append(row | {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
