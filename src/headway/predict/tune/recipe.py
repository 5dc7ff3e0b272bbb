"""A recipe that was found, as a file: what it changes of the one that it was found from."""

import os
from pathlib import Path
from typing import Any

import yaml

from headway.config import TrainConfig, load_config
from headway.config.read import EXTENDS
from headway.predict.tune.space import differences


def recipe_text(base: Path, config: TrainConfig, target: Path, remark: str) -> str:
    """Write a configuration as the recipe that it extends and the settings that differ.

    Args:
        base: the recipe.
        config: what it is to become.
        target: where the text will lie; the way to the recipe starts there.
        remark: said at the top, a line.

    Raises:
        ConfigError: the recipe cannot be read.
    """
    sections: dict[str, dict[str, Any]] = {}
    for name, value in differences(load_config(base), config).items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    way = os.path.relpath(base.resolve(), target.resolve().parent)
    body = yaml.safe_dump({EXTENDS: way, **sections}, sort_keys=False, allow_unicode=True)
    return f"# {remark}\n{body}"
