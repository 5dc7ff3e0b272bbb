"""Source files of other projects at a commit, read out of clones; and single functions cut out of them."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from headway.errors import HeadwayError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class CheckoutError(HeadwayError):
    """A clone, a commit or a file in it is not there."""


@dataclass(frozen=True)
class Source:
    """A file of a project at a commit.

    Attributes:
        project: its repository, such as "verl-project/verl".
        commit: a commit, `^` for the one before it allowed; or a release that is unpacked to CHECKOUTS/NAME@RELEASE.
        path: of the file in the project.
    """

    project: str
    commit: str
    path: str


class Checkouts:
    """A folder of clones, bare or not, each named as its repository, such as CHECKOUTS/verl."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def text(self, source: Source) -> str:
        """Read a file at its commit.

        Raises:
            CheckoutError: there is no such clone, commit or file.
        """
        unpacked = self._unpacked(source)
        if unpacked.is_dir():
            return (unpacked / source.path).read_text(encoding="utf-8")
        return self._git(source, "show", f"{source.commit}:{source.path}")

    def commit_and_date(self, source: Source) -> tuple[str, str]:
        """Name the commit as its project does, and the day of it; a release has its own name and no day."""
        if self._unpacked(source).is_dir():
            return source.commit, ""
        commit, _, day = self._git(source, "log", "-1", "--format=%h %cs", source.commit).strip().partition(" ")
        return commit, day

    def _unpacked(self, source: Source) -> Path:
        return self._folder / f"{source.project.rpartition('/')[2]}@{source.commit}"

    def _git(self, source: Source, *arguments: str) -> str:
        clone = self._folder / source.project.rpartition("/")[2]
        done = subprocess.run(["git", "-C", str(clone), *arguments], check=False, capture_output=True, text=True)
        if done.returncode:
            raise CheckoutError(
                f"{source.path} of {source.project} at {source.commit} cannot be read from {clone}: "
                f"{done.stderr.strip()}. Clone the project there, with its history."
            )
        return done.stdout


def load(text: str, space: dict[str, Any], names: Sequence[str] = ("*",)) -> dict[str, Any]:
    """Compile the functions, classes and assignments at the top of a module, without its imports.

    Args:
        text: the module's source.
        space: what its imports would have brought; the compiled names are added to it.
        names: those to compile, as patterns of a shell's; all if not given.

    Returns:
        The space.
    """
    tree = ast.parse(text)
    body = [node for node in tree.body if any(fnmatch(bound, name) for bound in _bound(node) for name in names)]
    code = compile(ast.Module(body, []), "<their source>", "exec", dont_inherit=True, flags=_ANNOTATIONS)
    exec(code, space)
    return space


_ANNOTATIONS = __import__("__future__").annotations.compiler_flag


def method(text: str, owner: str, name: str, space: dict[str, Any]) -> Any:
    """Compile one method of a class by itself, as a function of `self`."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == owner]
    (found,) = (node for node in classes[0].body if isinstance(node, ast.FunctionDef) and node.name == name)
    found.decorator_list = []
    exec(compile(ast.Module([found], []), "<their source>", "exec", dont_inherit=True, flags=_ANNOTATIONS), space)
    return space[name]


def _bound(node: ast.stmt) -> set[str]:
    """Names that a statement at the top of a module defines; none of an import, a call or a test."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return {node.target.id}
    return set()
