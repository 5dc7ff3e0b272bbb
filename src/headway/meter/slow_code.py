"""Code that is known to be slow, by what a model, a machine or a profile shows of it: a table, and its reader."""

import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.errors import UsageError

_WAITED = 0.05  # part of the time; a loader that keeps up is not waited for


@dataclass(frozen=True, slots=True)
class SlowCode:
    """One kind of code that is known to be slow; see `slow_code.toml` for the fields."""

    name: str
    cause: str
    remedy: str
    source: str
    factor: str = ""
    modules: str = ""
    kernels: str = ""
    frames: str = ""
    paths: str = ""
    torch: tuple[str, str] | None = None
    cudnn: tuple[str, str] | None = None
    missing: tuple[str, ...] = ()
    setting: str = ""
    value: str = ""
    most_patches: int = 0
    num_workers: int | None = None

    def is_in(
        self,
        classes: Collection[str],
        settings: Mapping[str, Any],
        versions: Mapping[str, str],
        installed: Collection[str],
    ) -> bool:
        """Tell whether a model runs it on a machine; False of what a loop decides.

        Args:
            classes: names of the classes of its modules.
            settings: attributes of its config.
            versions: of "torch" and "cudnn", as "2.9.1"; one that is missing is not known.
            installed: packages that are there, of those that the table names.
        """
        has_module = not self.modules or any(re.fullmatch(self.modules, name) for name in classes)
        has_setting = not self.setting or settings.get(self.setting) == self.value
        ranges = {"torch": self.torch, "cudnn": self.cudnn}
        has_versions = all(_is_within(versions.get(name), span) for name, span in ranges.items() if span is not None)
        is_missing = not self.missing or any(package not in installed for package in self.missing)
        is_of_models = bool(self.modules or self.setting)
        return is_of_models and has_module and has_setting and has_versions and is_missing

    def is_at(self, paths: Iterable[str]) -> bool:
        """Tell whether one of a model's paths leads to modules that may run it."""
        return bool(self.paths) and any(re.search(self.paths, path) for path in paths)

    def is_among(self, frames: Iterable[str]) -> bool:
        """Tell whether one of a profile's frames or annotations is it."""
        return bool(self.frames) and any(re.search(self.frames, frame) for frame in frames)

    def has_few(self, patches: float) -> bool:
        """Tell whether a pass of so many patches is it."""
        return 0 < patches <= self.most_patches

    @property
    def text(self) -> str:
        """Cause, factor and remedy, as sentences."""
        factor = f" Others measured {self.factor} times as long." if self.factor else ""
        return f"{self.cause}{factor} Try: {self.remedy}"


@cache
def slow_code_table() -> tuple[SlowCode, ...]:
    """Read the table."""
    rows: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["slow_code"]
    table = []
    for row in rows:
        fields: dict[str, Any] = {key: tuple(field) if isinstance(field, list) else field for key, field in row.items()}
        table.append(SlowCode(**fields))
    return tuple(table)


def slow_code_of(model: Any) -> list[SlowCode]:
    """Find the code known to be slow that a model on a CUDA or ROCm device runs here; none of a model elsewhere."""
    torch = sys.modules.get("torch")
    first = next(model.parameters(), None) if hasattr(model, "parameters") else None
    if torch is None or first is None or first.device.type != "cuda":
        return []
    config = getattr(model, "config", None)
    settings = {row.setting: getattr(config, row.setting, None) for row in slow_code_table() if row.setting}
    classes = {type(module).__name__ for module in model.modules()}
    number = torch.backends.cudnn.version() or 0 if torch.version.cuda else 0
    versions = {"torch": str(torch.__version__)}
    if number:  # 91002 is 9.10.2
        versions["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return [row for row in slow_code_table() if row.is_in(classes, settings, versions, installed_kernels())]


def slow_code_of_loop(patches: float, num_workers: int | None, data_wait_share: float) -> list[SlowCode]:
    """Find the code known to be slow that a window shows: by patches in a pass, and workers of a loader, if known."""
    waits_for = num_workers if data_wait_share >= _WAITED and num_workers is not None else -1
    return [row for row in slow_code_table() if row.has_few(patches) or row.num_workers == waits_for]


def slow_code_of_plan(paths: Collection[str], patches: float, packages: Collection[str]) -> list[SlowCode]:
    """Find the code known to be slow that a model would run, by its modules' paths, a pack's patches and packages."""
    return [
        row
        for row in slow_code_table()
        if row.is_at(paths) and (row.has_few(patches) or any(package not in packages for package in row.missing))
    ]


_DISTRIBUTIONS = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d", "mamba-ssm": "mamba_ssm"}


@cache
def installed_kernels() -> frozenset[str]:
    """Packages of kernels for recurrent layers that are installed, by the names under which they are imported."""
    return frozenset(package for package in _DISTRIBUTIONS.values() if find_spec(package) is not None)


def kernel_package(distribution: str) -> str:
    """Name under which a package of kernels is imported.

    Raises:
        UsageError: no recurrent layer has kernels from it.
    """
    if distribution not in _DISTRIBUTIONS:
        raise UsageError(
            f"{distribution} is no package of kernels for recurrent layers; known are none, "
            f"{', '.join(_DISTRIBUTIONS)}."
        )
    return _DISTRIBUTIONS[distribution]


def _is_within(version: str | None, span: tuple[str, str]) -> bool:
    """Tell whether a version is from the first of two up to and without the second.

    >>> [_is_within(version, ("2.9", "2.10")) for version in ("2.8.0", "2.9.1+cu128", "2.10.0", None)]
    [False, True, False, False]
    """
    begin, end = map(_numbers, span)
    return version is not None and begin <= _numbers(version) < end


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))
