"""Pages of the Python API: every public name with its signature, its types and its docstring.

Read by griffe from the source, so that none of the libraries which parts of the package need has to be installed:
autodoc with mocks of torch cannot import 71 of 245 names (torch is asked for operations and signatures at import), and
sphinx-autoapi gives the 58 dataclasses no constructor.
"""

import textwrap
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

import griffe

from tools.site.markdown import cell, prose, table
from tools.site.pages import toctree
from tools.site.public import ROOT, PublicName, public_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    if bare := [f"{name.module}.{name.name}" for name in names if not name.docstring]:
        raise LookupError(f"public names without a docstring: {', '.join(bare)}")
    package = griffe.load("headway", search_paths=[str(ROOT / "src")], docstring_parser="google")
    # An entry stands at `headway`, or else at the module that the file of the definition lies below.
    places: dict[tuple[str, str], str] = {}
    for name in names:
        key = (name.home, name.name)
        if key not in places or (places[key] != "headway" and name.home.startswith(name.module)):
            places[key] = name.module
    by_module = {module: [*group] for module, group in groupby(names, lambda name: name.module)}
    pages = {f"api/{module}": _page(package, module, group, places) for module, group in by_module.items()}
    rooms, files = [], []
    for module in by_module:
        definition = _at(package, module)
        row = (f"[`{module}`](api/{module}.md)", cell(definition.docstring.value.partition("\n\n")[0]))
        (rooms if definition.exports else files).append(row)
    listed = f"{table(('module', 'what it offers'), rooms)}\n{_OTHERS}{table(('module', 'what it is'), files)}"
    return {"api": f"{_INDEX}{listed}\n{toctree(pages)}", **pages}


def _at(package: Any, path: str) -> Any:
    """Look a dotted path up; where a module and a name in its package are called alike, it is the module."""
    definition = package
    for part in path.split(".")[1:]:
        definition = definition.members[part]
        definition = definition.final_target if definition.is_alias else definition
    return definition


def _page(package: Any, module: str, names: "Sequence[PublicName]", places: dict[tuple[str, str], str]) -> str:
    listed = ", ".join(name.name for name in names)
    shown = f"from {module} import {listed}"
    if len(shown) > _WIDTH:
        lines = textwrap.wrap(listed + ",", _WIDTH, initial_indent="    ", subsequent_indent="    ")
        shown = "\n".join([f"from {module} import (", *lines, ")"])
    entries = [_entry(package, name, places[name.home, name.name]) for name in names]
    text = prose(_at(package, module).docstring.value)
    return "\n\n".join([f"# {module}", f"```python\n{shown}\n```", text, *entries]) + "\n"


def _entry(package: Any, name: PublicName, place: str) -> str:
    path = f"{place}.{name.name}"
    if place != name.module:
        return f"{{py:obj}}`{name.name} <{path}>`: its entry stands at `{place}`."
    definition = _at(package, f"{name.home}.{name.name}")
    if definition.is_class:
        return _class(path, definition)
    if definition.is_function:
        return _directive("function", definition.signature(name=path), _text(definition), "::::")
    value = textwrap.shorten(str(definition.value), _WIDTH, placeholder=" ...")
    return _directive("data", path, f":value: {value}\n\n{prose(name.docstring or '')}", "::::")


def _class(path: str, definition: Any) -> str:
    init = definition.all_members.get("__init__")
    signature = init.signature(name=path, return_type=False) if init and init.parameters else path
    fields = [
        f":ivar {name}: {cell(meaning)}\n:vartype {name}: {definition.members[name].annotation}"
        for name, meaning in _commented(definition).items()
    ]
    members = [_member(name, member) for name, member in _public_members(definition)]
    return _directive("class", signature, "\n\n".join([_text(definition), "\n".join(fields), *members]), "::::")


def _member(name: str, member: Any) -> str:
    if member.is_function:
        notes = "".join(f":{label}:\n" for label in ("classmethod", "staticmethod") if label in member.labels)
        return _directive("method", member.signature(), f"{notes}\n{_text(member)}", ":::")
    type_line = f":type: {member.annotation}\n" if member.annotation is not None else ""
    return _directive("property", name, f"{type_line}\n{_text(member)}", ":::")


def _sections(definition: Any) -> "Sequence[Any]":
    """A docstring of Google style, taken apart."""
    return definition.docstring.parse("google", warnings=False) if definition.docstring is not None else ()


def _text(definition: Any) -> str:
    """Turn a docstring into Markdown with Sphinx's fields."""
    parts = []
    for section in _sections(definition):
        kind, value = section.kind.value, section.value
        if kind == "text":
            parts.append(prose(value))
        elif kind == "examples":
            parts.append("\n\n".join(prose(text) for _, text in value))
        elif kind in _FIELDS:
            parts.append("\n".join(_fields(kind, value, definition)))
        else:  # a heading of the house's own, such as Source
            parts.append(f"**{section.title or value.kind}** {prose(getattr(value, 'description', str(value)))}")
    return "\n\n".join(parts)


def _fields(kind: str, items: Any, definition: Any) -> "Iterator[str]":
    for item in items:
        subject = "" if kind in ("returns", "yields") else f" {item.annotation if kind == 'raises' else item.name}"
        yield f":{_FIELDS[kind]}{subject}: {' '.join(prose(item.description).split())}"
        attribute = definition.all_members.get(item.name) if kind == "attributes" else None
        if attribute is not None and attribute.is_attribute and attribute.annotation is not None:
            yield f":vartype {item.name}: {attribute.annotation}"


_FIELDS = {"parameters": "param", "attributes": "ivar", "returns": "returns", "yields": "yields", "raises": "raises"}


def _directive(kind: str, signature: str, text: str, fence: str) -> str:
    return f"{fence}{{py:{kind}}} {signature}\n{text}\n{fence}"


def _public_members(definition: Any) -> "Iterator[tuple[str, Any]]":
    """Methods and properties of a class, those of its bases in this package included, in the order of the source."""
    for name, alias in {**definition.inherited_members, **definition.members}.items():
        member = alias.final_target if alias.is_alias else alias
        is_described = member.docstring is not None and (member.is_function or "property" in member.labels)
        if is_described and not name.startswith("_") and member.canonical_path.startswith("headway."):
            yield name, member


def _commented(definition: Any) -> dict[str, str]:
    """Find the fields of a class that comments explain, on their own line or on those above, and no docstring does."""
    lines = definition.lines_collection[definition.filepath]
    described = [section for section in _sections(definition) if section.kind.value in ("attributes", "parameters")]
    names = {item.name for section in described for item in section.value}
    meanings = {}
    for name, member in definition.members.items():
        if member.is_attribute and member.annotation is not None and not name.startswith("_") and name not in names:
            comment = lines[member.endlineno - 1].partition("  # ")[2]
            above = takewhile(lambda line: line.startswith("    # "), reversed(lines[: member.lineno - 1]))
            if comment := comment or " ".join(line.strip("# ") for line in reversed([*above])):
                meanings[name] = comment
    return meanings
