"""What the package imports and what pyproject.toml declares are the same packages."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = packages_distributions()

# declared and imported by no file of ours, with who imports them
IMPORTED_BY_OTHERS = {
    "zstandard": "fsspec, to open .zst files",
    "sqlalchemy": "mlflow, to write to a database file",
    "alembic": "mlflow, to write to a database file",
    "flash-linear-attention": "transformers, for gated delta rules",
    "nvidia-cudnn-frontend": "importlib, by the name of the module that defines its operations",
}
# imported only where they are there already: loops that integrations join, and fsspec's client of web servers
USERS_OWN = {"accelerate", "lightning", "pytorch-lightning", "torchtitan", "aiohttp"}
# names under which packages are imported that cannot be installed on every machine
NOT_INSTALLED = {"liger_kernel": "liger-kernel", "pynvml": "nvidia-ml-py"}


def declared(extra=None):
    """Names of the packages that an extra asks for, or the plain installation."""
    entries = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(entry).name) for entry in entries}


def imported():
    """Each package that a file below src imports, with the files."""
    files = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for top in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"headway"}:
                name = NOT_INSTALLED.get(top) or next(iter(DISTRIBUTIONS.get(top, [top])))
                files.setdefault(canonicalize_name(name), []).append(path.relative_to(ROOT).as_posix())
    return files


def test_every_package_that_is_imported_is_declared():
    extras = set().union(
        *(declared(extra) for extra in PROJECT["optional-dependencies"] if extra not in ("dev", "docs"))
    )
    unknown = imported().keys() - declared() - extras - USERS_OWN
    assert {name: imported()[name] for name in unknown} == {}


@pytest.mark.slow
@pytest.mark.parametrize("extra", [None, "train", "trackers", "engine", "gpu", "demo"])
def test_every_package_that_is_declared_is_imported(extra):
    assert declared(extra) - imported().keys() - IMPORTED_BY_OTHERS.keys() == set()


@pytest.mark.slow
def test_no_exception_has_outlived_its_reason():
    everything = declared().union(*(declared(extra) for extra in PROJECT["optional-dependencies"]))
    assert IMPORTED_BY_OTHERS.keys() <= everything - imported().keys()
    assert USERS_OWN - {"pytorch-lightning"} <= imported().keys()
