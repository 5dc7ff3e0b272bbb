"""What a run wrote down of its steps, for tests to compare."""

import json


def read_metrics(path):
    """Read the records of a metrics.jsonl, in their order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
