"""Measure the source as a house: files, lines, circles of imports, names that mean two things, and lines per room.

    python tools/house.py [FOLDER ...]     # a table with a column per package; `src/headway` alone by default
    python tools/house.py --names          # where a name says nothing of what it holds

A room is a folder directly below the package; a file beside them is a room of its own. Imports are read from the syntax
tree, those inside functions and under TYPE_CHECKING included: a circle that only types close is still read as one.
"""

import argparse
import ast
import functools
import io
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Grammar where a noun belongs: `found` may be rows, matches or a device. Of the names bound in nanochat, torchtitan,
# einops and packaging 0.0 to 0.5 in 1,000 are among these.
OPAQUE = {
    "ahead", "alone", "asked", "behind", "beside", "each", "found", "given", "held", "kept", "known", "late",
    "made", "named", "one", "owed", "passed", "read", "rest", "said", "seen", "taken", "tell", "told", "went",
    "whole",
}  # fmt: skip


@dataclass
class SourceFile:
    """One module of a package, as text and as a syntax tree."""

    name: str  # dotted, the package's own name included
    path: Path
    is_package: bool
    text: str
    tree: ast.Module
    imports: set[str] = field(default_factory=set)  # modules of the same package

    @property
    def room(self) -> str:
        """The folder or file directly below the package; the package's own `__init__` is a room too."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else parts[0]

    @property
    def lines(self) -> int:
        """How many lines the file has."""
        return len(self.text.splitlines())


def read_package(folder: Path) -> dict[str, SourceFile]:
    """Read every module below a package's folder, with its imports of other modules of the package."""
    files = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text()
        files[name] = SourceFile(name, path, is_package, text, ast.parse(text))
    for file in files.values():
        file.imports = set(_imported(file, files)) - {file.name}
    return files


def _imported(file: SourceFile, files: Mapping[str, SourceFile]) -> Iterable[str]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = file.name.split(".")
                keep = len(parents) - node.level + file.is_package
                base = ".".join([*parents[:keep], *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                if submodule in files:
                    yield submodule
                elif base in files:
                    yield base


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Find the groups of two or more nodes that can all be reached from each other (Tarjan, SIAM J. Comput. 1972)."""
    found: list[list[str]] = []
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for other in sorted(arrows.get(node, ())):
            if other not in index:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], index[other])
        if lowest[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(arrows):
        if node not in index:
            visit(node)
    return found


def room_arrows(files: Mapping[str, SourceFile]) -> dict[str, set[str]]:
    """Which rooms each room imports."""
    arrows: dict[str, set[str]] = defaultdict(set)
    for file in files.values():
        arrows[file.room] |= {files[name].room for name in file.imports} - {file.room}
    return dict(arrows)


def importers(files: Mapping[str, SourceFile]) -> dict[str, set[str]]:
    """Which modules import each module."""
    readers: dict[str, set[str]] = {name: set() for name in files}
    for file in files.values():
        for name in file.imports:
            readers[name].add(file.name)
    return readers


def homes_of_names(files: Mapping[str, SourceFile], kind: type[ast.AST]) -> dict[str, list[str]]:
    """Public classes (`ast.ClassDef`) or functions (`ast.FunctionDef`) whose name has several modules."""
    homes: dict[str, list[str]] = defaultdict(list)
    for file in files.values():
        for node in file.tree.body:
            if isinstance(node, kind) and not node.name.startswith("_"):
                homes[node.name].append(file.name)
    return {name: modules for name, modules in sorted(homes.items()) if len(modules) > 1}


def bindings(tree: ast.AST) -> Iterable[tuple[str, int]]:
    """Yield each name that a file binds to a value, with its line: variables, parameters, targets of loops."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno


def opaque_names(tree: ast.AST) -> list[tuple[str, int]]:
    """List the bindings whose name is among `OPAQUE`, with their lines; a leading underscore is no matter."""
    return [(name, line) for name, line in bindings(tree) if name.strip("_") in OPAQUE]


def comments_of_long_bodies(file: SourceFile, least: int = 25) -> tuple[int, int]:
    """Count the lines of functions' bodies of `least` lines and more, without docstrings, and their comments."""
    tokens = tokenize.generate_tokens(io.StringIO(file.text).readline)
    commented = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    lines: set[int] = set()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0].lineno
            body = range(start, node.end_lineno + 1)
            lines |= {*body} if len(body) >= least else set()
    return len(lines), len(lines & commented)


def longest_chain(arrows: Mapping[str, set[str]]) -> int:
    """Count the files of the longest chain of imports, where there are no circles."""

    @functools.cache
    def below(name: str) -> int:
        return 1 + max(map(below, arrows[name]), default=0)

    return max(map(below, arrows))


def reach(arrows: Mapping[str, set[str]], start: str) -> int:
    """Count the files that a file imports, and those that they import."""
    seen, waiting = set(), [start]
    while waiting:
        for name in arrows.get(waiting.pop(), set()) - seen:
            seen.add(name)
            waiting.append(name)
    return len(seen)


def _docstring_lines(file: SourceFile) -> int:
    lines = 0
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            lines += node.body[0].end_lineno - node.body[0].lineno + 1
    return lines


def _comments(file: SourceFile) -> tuple[int, int]:
    """Lines that are a comment alone, and lines that end in one."""
    alone = trailing = 0
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type == tokenize.COMMENT:
            if token.line.lstrip().startswith("#"):
                alone += 1
            else:
                trailing += 1
    return alone, trailing


def _function_lengths(file: SourceFile) -> list[int]:
    functions = (node for node in ast.walk(file.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [node.end_lineno - node.lineno + 1 for node in functions]


def measure(folder: Path) -> dict[str, str]:
    """Every figure of one package, as text."""
    files = read_package(folder)
    sizes = [file.lines for file in files.values()]
    total = sum(sizes)
    docs = sum(_docstring_lines(file) for file in files.values())
    comments = [_comments(file) for file in files.values()]
    blank = sum(not line.strip() for file in files.values() for line in file.text.splitlines())
    lengths = [length for file in files.values() for length in _function_lengths(file)]
    single = [name for name, readers in importers(files).items() if len(readers) == 1]

    arrows = {file.name: file.imports for file in files.values()}
    has_circles = bool(circles(arrows))
    num_bindings = sum(1 for file in files.values() for _ in bindings(file.tree))
    num_opaque = sum(len(opaque_names(file.tree)) for file in files.values())
    long_lines, long_comments = map(sum, zip(*map(comments_of_long_bodies, files.values()), strict=True))
    classes = [node for file in files.values() for node in file.tree.body if isinstance(node, ast.ClassDef)]

    def percent(part: int) -> str:
        return f"{100 * part / total:.1f} %"

    return {
        "files": f"{len(files):,}",
        "lines": f"{total:,}",
        "lines of code": f"{total - docs - blank - sum(alone for alone, _ in comments):,}",
        "median file": f"{statistics.median(sizes):.0f}",
        "90th percentile, longest": f"{statistics.quantiles(sizes, n=10)[-1]:.0f}, {max(sizes)}",
        "files over 500 lines": str(sum(size > 500 for size in sizes)),
        "files under 80 lines": str(sum(size < 80 for size in sizes)),
        "modules with one importer": str(len(single)),
        "circles of files": str(len(circles({file.name: file.imports for file in files.values()}))),
        "circles of rooms": str(len(circles(room_arrows(files)))),
        "class names with two homes": str(len(homes_of_names(files, ast.ClassDef))),
        "function names with two homes": str(len(homes_of_names(files, ast.FunctionDef))),
        "public classes": str(sum(not node.name.startswith("_") for node in classes)),
        "longest chain of imports": "circular" if has_circles else str(longest_chain(arrows)),
        **(
            {"files that train.loop reaches": str(reach(arrows, loop))}
            if (loop := "headway.train.loop") in files
            else {}
        ),
        "opaque names, of 1,000 bindings": f"{num_opaque:,}, {1000 * num_opaque / max(1, num_bindings):.1f}",
        "comments in bodies of 25 lines and more": f"{100 * long_comments / max(1, long_lines):.1f} %",
        "docstrings": percent(docs),
        "lines that are comments": percent(sum(alone for alone, _ in comments)),
        "lines that end in a comment": percent(sum(trailing for _, trailing in comments)),
        "blank": percent(blank),
        "function median, 90th, longest": (
            f"{statistics.median(lengths):.0f}, {statistics.quantiles(lengths, n=10)[-1]:.0f}, {max(lengths)}"
        ),
        **_rooms(files),
    }


def _rooms(files: Mapping[str, SourceFile]) -> dict[str, str]:
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for file in files.values():
        rooms[file.room].update(files=1, lines=file.lines)
    named = sorted((name, room) for name, room in rooms.items() if room["files"] > 1)
    return {f"room {name}": f"{room['lines']:,} ({room['files']})" for name, room in named}


def main() -> None:
    """Print a table with a column for each package, then the circles and the names with two homes of the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("src/headway")], help="a package's folder")
    parser.add_argument("--names", action="store_true", help="list the opaque names of the first folder instead")
    options = parser.parse_args()
    folders = options.folders
    if options.names:
        for file in read_package(folders[0]).values():
            for name, line in sorted(opaque_names(file.tree), key=lambda site: site[1]):
                print(f"{file.path}:{line}: {name}")
        return
    columns = [measure(folder) for folder in folders]
    rows = list(dict.fromkeys(row for column in columns for row in column))
    print("| | " + " | ".join(folder.name for folder in folders) + " |")
    print("| --- " * (len(folders) + 1) + "|")
    for row in rows:
        print(f"| {row} | " + " | ".join(column.get(row, "") for column in columns) + " |")

    files = read_package(folders[0])
    for group in circles({file.name: file.imports for file in files.values()}):
        print("\ncircle of files:", ", ".join(group))
    for group in circles(room_arrows(files)):
        print("\ncircle of rooms:", ", ".join(group))
    for name, homes in (homes_of_names(files, ast.ClassDef) | homes_of_names(files, ast.FunctionDef)).items():
        print(f"\n{name}:", ", ".join(homes))


if __name__ == "__main__":
    main()
