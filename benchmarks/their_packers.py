"""The packers of LMMs-Engine, run as its datasets run them; their source is loaded from the PyPI wheel, unchanged.

The wheel is installed without its dependencies into a folder of its own. Its package imports most of them on sight, so
only the files that pack are loaded: `datasets/packing` as a package, and two methods of the naive dataset.
"""

import ast
import importlib.util
import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

VERSION = "0.1.4"
ONLINE = ("first_fit", "best_fit", "balanced")
WINDOW = 100  # of its naive dataset's "window_100"

Packs = list[list[int]]


def install(folder: Path) -> Path:
    """Install the wheel into a folder, if it is not there, and return its datasets' folder."""
    datasets = folder / "lmms_engine" / "datasets"
    if not datasets.is_dir():
        command = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"lmms-engine=={VERSION}"]
        subprocess.run([sys.executable, *command], check=True)
    return datasets


def online_packers(datasets: Path) -> ModuleType:
    """Load `lmms_engine.datasets.packing` by itself."""
    folder = datasets / "packing"
    spec = importlib.util.spec_from_file_location(
        "lmms_packing", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lmms_packing"] = module
    spec.loader.exec_module(module)
    return module


def naive_packers(datasets: Path) -> dict[str, Callable[[Sequence[int], int], Packs]]:
    """Cut the packing methods out of the naive dataset's class and compile them as they are."""
    source = (datasets / "naive" / "multimodal_dataset.py").read_text(encoding="utf-8")
    methods = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    space: dict[str, Any] = {"List": list, "logger": SimpleNamespace(info=lambda _: None)}
    for name in ("_pack_by_first_fit", "_pack_by_window"):
        text = textwrap.dedent(ast.get_source_segment(source, methods[name], padded=True) or "")
        exec(compile(text, f"lmms_engine:{name}", "exec"), space)
    return {
        "first_fit": lambda lengths, length: space["_pack_by_first_fit"](None, lengths, length),
        f"window_{WINDOW}": lambda lengths, length: space["_pack_by_window"](None, lengths, length, WINDOW),
    }


def pack_online(module: ModuleType, strategy: str, lengths: Sequence[int], packing_length: int, ranks: int) -> Packs:
    """Pack as the iterable dataset does: each rank its contiguous part of the shuffled data, with a packer of its own.

    Returns:
        Packs in the order of training: the first pack of each rank, then the second of each, as long as all have one;
        what ranks have beyond that forms the last, incomplete step.
    """
    bounds = np.linspace(0, len(lengths), ranks + 1).astype(int).tolist()
    streams: list[Packs] = []
    for first, stop in itertools.pairwise(bounds):
        packer = module.build_online_packer(strategy, packing_length)
        packs: Packs = []
        for number in range(first, stop):
            packs.extend(packer.add(number, lengths[number]))
        packs.extend(packer.flush())
        streams.append(packs)
    shortest = min(map(len, streams))
    return [stream[step] for step in range(shortest) for stream in streams] + [
        pack for stream in streams for pack in stream[shortest:]
    ]
