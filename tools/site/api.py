"""Pages of the Python API: every public name with its signature, its types and its docstring.

Read by griffe from the source, so that none of the libraries which parts of the package need has to be installed.
"""

import textwrap
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

import griffe

from tools.site.markdown import cell, prose, table
from tools.site.pages import toctree
from tools.site.public import ROOT, PublicName, public_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_INDEX = """# Python API

```python
from headway import Meter, Workload, load_cost_model, trace
```

The names below are what the package and its rooms offer. Those of `headway` and of `headway.integrations` are the
product's own; the rooms' names are what its parts, and programs built on them, use. [How the house is
built](../architecture.md) says what each room is for. Importing `headway` loads neither torch nor transformers.

"""
_WIDTH = 88  # of code and values [letters]
_OTHERS = "## Names of single files\n\nWhat pages and examples import besides.\n\n"


def api_pages() -> dict[str, str]:
    """Write the page that lists the modules, and one for each: Markdown by path below `reference/`.

    Raises:
        LookupError: a public name has no docstring.
    """
    names = public_names()
    if bare := [f"{one.module}.{one.name}" for one in names if not one.docstring]:
        raise LookupError(f"public names without a docstring: {', '.join(bare)}")
    package = griffe.load("headway", search_paths=[str(ROOT / "src")], docstring_parser="google")
    by_module = {module: list(found) for module, found in groupby(names, lambda one: one.module)}
    writer = _Writer(package, _main_places(names))
    pages = {f"api/{module}": writer.page(module, found) for module, found in by_module.items()}
    rooms = [module for module in by_module if _at(package, module).exports]
    rows = {module: (f"[`{module}`](api/{module}.md)", writer.summary(module)) for module in by_module}
    listed = table(("module", "what it offers"), [rows[module] for module in rooms])
    listed += "\n" + _OTHERS + table(("module", "what it is"), [rows[one] for one in by_module if one not in rooms])
    return {"api": _INDEX + listed + "\n" + toctree(pages), **pages}


def _main_places(names: "Iterable[PublicName]") -> dict[tuple[str, str], str]:
    """Say at which module the entry of each definition stands: `headway`, or else the one that its file lies below."""
    places: dict[tuple[str, str], str] = {}
    for one in names:
        key = (one.home, one.name)
        if key not in places or (places[key] != "headway" and one.home.startswith(one.module)):
            places[key] = one.module
    return places


def _at(package: Any, path: str) -> Any:
    """Look a dotted path up; where a module and a name in its package are called alike, it is the module."""
    found = package
    for part in path.split(".")[1:]:
        found = found.members[part]
        found = found.final_target if found.is_alias else found
    return found


class _Writer:
    """Writes the pages of one package.

    Args:
        package: as griffe read it.
        places: the module at which the entry of each definition stands, by its home and name.
    """

    def __init__(self, package: Any, places: dict[tuple[str, str], str]) -> None:
        self._package = package
        self._places = places
        self._links = {f"{home}.{name}": f"{place}.{name}" for (home, name), place in places.items()}

    def summary(self, module: str) -> str:
        """First sentence of a module's docstring."""
        return cell(_at(self._package, module).docstring.value.partition("\n\n")[0])

    def page(self, module: str, names: "Sequence[PublicName]") -> str:
        """Write the page of one module."""
        text = prose(_at(self._package, module).docstring.value)
        listed = ", ".join(one.name for one in names)
        shown = f"from {module} import {listed}"
        if len(shown) > _WIDTH:
            lines = textwrap.wrap(listed + ",", _WIDTH, initial_indent="    ", subsequent_indent="    ")
            shown = "\n".join([f"from {module} import (", *lines, ")"])
        entries = [self._entry(one) for one in names]
        return "\n\n".join([f"# {module}", f"```python\n{shown}\n```", text, *entries]) + "\n"

    def _entry(self, one: PublicName) -> str:
        place = self._places[one.home, one.name]
        if place != one.module:
            return f"{{py:obj}}`{one.name} <{place}.{one.name}>`: its entry stands at `{place}`."
        path, found = f"{place}.{one.name}", _at(self._package, f"{one.home}.{one.name}")
        if found.is_class:
            return self._class(path, found)
        if found.is_function:
            return _directive("function", self._signature(path, found), self._text(found.docstring), "::::")
        options = f":value: {_value(found)}\n\n"
        return _directive("data", path, options + prose(one.docstring or ""), "::::")

    def _class(self, path: str, found: Any) -> str:
        members = [self._member(name, one) for name, one in _public_members(found)]
        signature = self._signature(path, found) if found.parameters else path
        fields = "\n".join(
            f":ivar {name}: {cell(meaning)}\n:vartype {name}: {self._type(found.members[name].annotation)}"
            for name, meaning in _commented(found).items()
        )
        text = "\n\n".join([self._text(found.docstring, found), fields, *members])
        return _directive("class", signature, text, "::::")

    def _member(self, name: str, found: Any) -> str:
        if found.is_function:
            note = "".join(f":{one}:\n" for one in ("classmethod", "staticmethod") if one in found.labels)
            return _directive("method", self._signature(name, found), f"{note}\n{self._text(found.docstring)}", ":::")
        text = f":type: {self._type(found.annotation)}\n" if found.annotation is not None else ""
        return _directive("property", name, f"{text}\n{self._text(found.docstring)}", ":::")

    def _type(self, expression: Any) -> str:
        """Write an annotation; names that have an entry by the path of that entry, which Sphinx makes a link."""
        if expression is None or isinstance(expression, str):
            return str(expression or "").strip("'\"")
        parts = []
        for part in expression.iterate(flat=True):
            path = part if isinstance(part, str) else part.canonical_path
            parts.append(self._links.get(path, str(part)))
        return "".join(parts)

    def _signature(self, name: str, found: Any) -> str:
        parts = []
        marked = False
        for one in found.parameters:
            if one.name in ("self", "cls") and not parts:
                continue
            kind = one.kind.value
            if kind == "keyword-only" and not marked:
                marked = True
                parts.append("*")
            marked = marked or kind == "variadic positional"
            text = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "") + one.name
            text += f": {self._type(one.annotation)}" if one.annotation is not None else ""
            text += f" = {one.default}" if one.default is not None and "variadic" not in kind else ""
            parts.append(text)
        returns = f" -> {self._type(found.returns)}" if found.is_function and found.returns is not None else ""
        return f"{name}({', '.join(parts)}){returns}"

    def _text(self, docstring: Any, owner: Any = None) -> str:
        """Turn a docstring of Google style into Markdown with Sphinx's fields."""
        parts = []
        for section in docstring.parse("google", warnings=False) if docstring is not None else ():
            kind = section.kind.value
            if kind == "text":
                parts.append(prose(section.value))
            elif kind == "examples":
                parts.append("\n\n".join(prose(text) for _, text in section.value))
            elif kind in _FIELDS:
                parts.append("\n".join(self._fields(kind, section.value, owner)))
            else:  # a heading of the house's own, such as Source
                value = section.value
                parts.append(f"**{section.title or value.kind}** {prose(getattr(value, 'description', str(value)))}")
        return "\n\n".join(parts)

    def _fields(self, kind: str, items: Any, owner: Any) -> "Iterator[str]":
        for one in items:
            text = " ".join(prose(one.description).split())
            if kind in ("returns", "yields"):
                yield f":{_FIELDS[kind]}: {text}"
            elif kind == "raises":
                yield f":{_FIELDS[kind]} {self._type(one.annotation)}: {text}"
            else:
                yield f":{_FIELDS[kind]} {one.name}: {text}"
            if kind == "attributes" and (member := _attribute(owner, one.name)) is not None:
                yield f":vartype {one.name}: {self._type(member.annotation)}"


_FIELDS = {
    "parameters": "param",
    "other parameters": "param",
    "attributes": "ivar",
    "returns": "returns",
    "yields": "yields",
    "raises": "raises",
}


def _directive(kind: str, signature: str, text: str, fence: str) -> str:
    return f"{fence}{{py:{kind}}} {signature}\n{text}\n{fence}"


def _public_members(found: Any) -> "Iterator[tuple[str, Any]]":
    """Methods and properties of a class, those of its bases in this package included, in the order of the source."""
    for name, member in {**dict(found.inherited_members), **found.members}.items():
        one = member.final_target if member.is_alias else member
        described = one.docstring is not None and (one.is_function or "property" in one.labels)
        if not name.startswith("_") and described and one.canonical_path.startswith("headway."):
            yield name, one


def _commented(found: Any) -> dict[str, str]:
    """Find the fields of a class that comments explain, on their own line or on those above, and no docstring does."""
    lines = found.lines_collection[found.filepath]
    sections = found.docstring.parse("google", warnings=False) if found.docstring is not None else ()
    told = {item.name for one in sections if one.kind.value in ("attributes", "parameters") for item in one.value}
    meanings = {}
    for name, member in found.members.items():
        if not member.is_attribute or member.annotation is None or name.startswith("_") or name in told:
            continue
        comment = lines[member.endlineno - 1].partition("  # ")[2]
        above = takewhile(lambda line: line.startswith("    # "), reversed(lines[: member.lineno - 1]))
        comment = comment or " ".join(line.strip("# ") for line in reversed([*above]))
        if comment:
            meanings[name] = comment
    return meanings


def _attribute(owner: Any, name: str) -> Any:
    found = owner.all_members.get(name) if owner is not None else None
    if found is None:
        return None
    found = found.final_target if found.is_alias else found
    return found if found.is_attribute and found.annotation is not None else None


def _value(found: Any) -> str:
    text = " ".join(str(found.value).split())
    return textwrap.shorten(text, _WIDTH, placeholder=" ...")
