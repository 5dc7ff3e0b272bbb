"""The public names of the package: what `__all__` of its packages offers, and what the pages import.

Read from the syntax tree, as `tools/house.py` does: nothing is imported, so no library has to be there.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.house import SourceFile, read_package

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class PublicName:
    """One name of one package or module.

    Attributes:
        module: where it is offered, such as `headway.count`.
        name: the name.
        home: module that defines it, such as `headway.count.workload`.
        docstring: its docstring, or the string below a constant; None where there is none.
    """

    module: str
    name: str
    home: str
    docstring: str | None


def public_names(package: Path = ROOT / "src" / "headway", pages: Iterable[Path] | None = None) -> list[PublicName]:
    """List the public names: of the package first, then of each of its packages, then what pages import besides.

    Args:
        package: folder of the package.
        pages: pages and programs that import from it; README.md, docs/ and examples/ if not given.
    """
    files = read_package(package)
    if pages is None:
        pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py")]
    offered = [(file.name, name) for file in files.values() if file.is_package for name in _all_of(file)]
    errors = files.get(f"{package.name}.errors")  # what a caller may catch
    offered += (
        [(errors.name, node.name) for node in errors.tree.body if isinstance(node, ast.ClassDef)] if errors else []
    )
    defined = {(_home(files, *one), one[1]) for one in offered}
    imported = sorted({one for page in pages for one in _imported(page, package.name) if ".".join(one) not in files})
    offered += [one for one in imported if (_home(files, *one), one[1]) not in defined]
    names = []
    for module, name in offered:
        home = _home(files, module, name)
        names.append(PublicName(module, name, home, _docstring(files[home].tree, name)))
    return names


def _all_of(file: SourceFile) -> list[str]:
    for node in file.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def _imported(page: Path, package: str) -> list[tuple[str, str]]:
    """Modules of a package and the names that a page or a program imports from them."""
    pattern = rf"^ *from ({package}[\w.]*) import ([\w, ]+)$"
    found = re.findall(pattern, page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [(module, name) for module, names in found for name in names.replace(" ", "").split(",")]


def _home(files: dict[str, SourceFile], module: str, name: str) -> str:
    """Follow imports to the module that defines a name."""
    for node in ast.walk(files[module].tree):
        names = [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if name in names and node.module in files:
            return _home(files, node.module, name)
    return module


def _docstring(tree: ast.Module, name: str) -> str | None:
    """The docstring of a function or class, or the string on the lines below a constant."""
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return ast.get_docstring(node)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if ast.unparse(target) == name and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return str(after.value.value)
    return None
