"""Words for settings in other tools and what they are here, of `other_tools.toml`."""

import tomllib
from pathlib import Path

_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["row"]
SAME = {word: row["here"] for row in _ROWS if "here" in row for word in row["words"].split()}
"""Settings of other tools, and the setting here."""
ABSENT = {word: row["nearest"] for row in _ROWS if "nearest" in row for word in row["words"].split()}
"""Settings of other tools that Headway lacks, and Headway's nearest setting."""


def translated(name: str) -> str | None:
    """Translate another tool's setting into the one here, as the end of a sentence; None for a name of no other tool.

    Args:
        name: dotted; its last part counts, or its last two where they are one tool's name.

    >>> translated("training.learning_rate")
    'in Headway it is `optim.lr`'
    """
    parts = name.lower().replace("-", "_").split(".")
    for word in (".".join(parts[-2:]), parts[-1]):
        if word in SAME:
            return f"in Headway it is {SAME[word]}"
        if word in ABSENT:
            return f"there is none in Headway: {ABSENT[word]}"
    return None
