"""Translate a configuration of LMMs-Engine into a recipe that `headway train` runs.

    python -m tools.import_config theirs.yaml -o ours.yaml

Every key is translated, or named with the reason why it is not needed, or what is to be done by hand; a key that is not
known, or asks for what Headway cannot do, is an error. What became of each key goes to stderr.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.cli.app import error_paragraph
from headway.cli.output import SCHEMA_VERSION, warn
from headway.config import parse_config
from headway.errors import HeadwayError
from headway.files import write_output
from headway.report import Column, render_table
from tools.import_config.read import KeyOutcome, import_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.import_config", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="YAML or JSON configuration of LMMs-Engine")
    parser.add_argument("-o", "--output", type=Path, help="write the recipe here, not to stdout")
    parser.add_argument("--model", help="model.path, where FILE does not say it or says another")
    parser.add_argument("--data", help="the training data, where FILE does not say them, or says others")
    parser.add_argument(
        "--steps", type=int, help="optimizer steps, where FILE says none; instead of its epochs [steps]"
    )
    parser.add_argument(
        "--leave-out", action="append", default=[], metavar="KEY", help="go on without a key that cannot be taken over"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of YAML")
    try:
        _import(parser.parse_args(arguments))
    except HeadwayError as error:
        print(error_paragraph(error), file=sys.stderr)
        return error.exit_code
    return 0


def _import(options: argparse.Namespace) -> None:
    settings: dict[str, Any] = {}
    if options.model is not None:
        settings["model.path"] = options.model
    if options.data is not None:
        settings["data.train"] = [{"path": options.data}]
    if options.steps is not None:
        settings["optim.steps"] = options.steps
    imported = import_config(options.file, settings, leave_out=tuple(options.leave_out))
    parse_config(imported.recipe, source=f"the recipe made from {options.file}")
    keys = [key for key in imported.keys if key.is_set or key.outcome.settings]
    print(_table(keys), file=sys.stderr)
    for key in imported.absent:
        warn(f"--leave-out {key}: {options.file} has no such key, so nothing was left out for it.")
    text = imported.as_yaml().rstrip("\n")
    if options.json:
        rows = [key.to_dict() for key in keys]
        text = json.dumps({"schema_version": SCHEMA_VERSION, "recipe": imported.recipe, "keys": rows})
    if options.output is None:
        print(text)
    else:
        write_output(options.output, f"{text}\n", option="-o")


def _table(keys: Sequence[KeyOutcome]) -> str:
    columns = [Column(name, "left") for name in ("key", "value", "", "becomes", "remark")]
    rows = [
        [
            key.key,
            _short(key.value) + ("" if key.is_set else " (its default)"),
            key.outcome.fate,
            ", ".join(f"{name}={_short(value)}" for name, value in key.outcome.settings.items()),
            key.outcome.reason,
        ]
        for key in keys
    ]
    return render_table(columns, rows)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


if __name__ == "__main__":
    sys.exit(main())
