"""`headway config`: every setting of a training run, from the classes that check it."""

import difflib
import json
import shutil
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import JsonOption
from headway.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headway.config.tree import Setting

_HEAD = """# Configuration

<!-- `headway config --markdown` prints this page; tests/cli/test_config.py holds it to that. -->

```sh
headway config                        # this page, as text
headway config optim                  # one section, or one setting: optim.lr
headway config --json > schema.json   # JSON Schema, for an editor
```

`headway train CONFIG.yaml` reads these settings, and `--set a.b=c` changes one of them. Names are dotted here and
nested in YAML; N is the number of a list's item, from 0. A setting without a default is required. `null` takes back
what a file inherits by `extends: FILE`, a path from the file's own folder: the setting is at its default again, or
off where `null` is among its values. A first line `# yaml-language-server: $schema=schema.json` in a YAML file makes
editors complete and check it.

Numbers are read as people write them, here and in the options of all commands: `32k`, `1e9` and `100B` (by the SI: 32k
is 32,000, and B are billions), `40%`, and with units where a setting has one, `2GiB` or `90min`. A value alone stands
for a list of it; in the place of a section that may be left out, it is the one setting that this requires:
`model.lora: 16`. A key that stands twice is an error, and so is a setting of LLaMA-Factory, ms-swift, TRL or axolotl;
the error names what it is here.
"""


def config(
    setting: Annotated[
        str | None, typer.Argument(metavar="[SETTING]", help="A section or setting, such as optim or data.train.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="As docs/configuration.md has them.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every setting of `headway train` with its type, unit, default and meaning.

    --json prints the JSON Schema, which editors complete and check YAML files by.

    Example: headway config optim
    """
    if markdown and (as_json or setting is not None):
        raise UsageError("--markdown prints the whole page; leave out --json and SETTING.")
    if as_json:
        print(json.dumps(_schema(setting), indent=2))
    elif markdown:
        print(_page(), end="")
    else:
        width = shutil.get_terminal_size().columns
        print("\n".join(line for shown in _shown(setting) for line in _lines(shown, width)))


def _shown(name: str | None) -> "Iterator[tuple[Setting, str]]":
    """The settings at and below a name, each with what is to be said of those in it: "" if they follow."""
    from headway.config import TrainConfig
    from headway.config.tree import inside, settings_of

    places_by_name: dict[tuple[str, str], list[str]] = {}  # of each last part of a name and meaning, where it was told

    def below(section: Any, prefix: str) -> "Iterator[tuple[Setting, str]]":
        settings = settings_of(section, prefix)
        for setting in settings:
            places_by_name.setdefault((setting.name.rpartition(".")[2], setting.meaning), []).append(prefix)
        for setting in settings:
            if setting.section is None:
                yield setting, ""
                continue
            places = [places_by_name.get((inner.name, inner.meaning), []) for inner in settings_of(setting.section)]
            if common := [place for place in places[0] if all(place in inner for inner in places)]:
                yield setting, f"its settings: as {common[0]}*"
                continue
            yield setting, ""
            yield from below(setting.section, inside(setting))

    shown = [(setting, note) for setting, note in below(TrainConfig, "")]
    if name is not None:
        _check_name(name)
        wanted = _general(name)
        shown = [(setting, note) for setting, note in shown if f"{setting.name}.".startswith(f"{wanted}.")]
        if not shown:  # told elsewhere, as the same settings occur there
            from headway.config.tree import walk

            shown = [(setting, "") for setting in walk(TrainConfig) if f"{setting.name}.".startswith(f"{wanted}.")]
    yield from shown


def _general(name: str) -> str:
    """A name with N for the numbers of items."""
    return ".".join("N" if part.isdecimal() else part for part in name.strip(".").split("."))


def _check_name(name: str) -> None:
    from headway.config import TrainConfig
    from headway.config.mistakes import hint_for
    from headway.config.tree import walk

    names = [setting.name for setting in walk(TrainConfig)]
    general = _general(name)
    if any(f"{setting}.".startswith(f"{general}.") for setting in names):
        return
    near = difflib.get_close_matches(general, names, n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}?" if near else hint_for(general, (), TrainConfig)
    hint = hint or f"sections: {', '.join(TrainConfig.model_fields)}"
    hint = f"{hint[0].upper()}{hint[1:]}".rstrip("?.") + ("?" if hint.endswith("?") else ".")
    raise UsageError(f"There is no setting {name!r}. {hint}")


def _kind(setting: "Setting") -> str:
    return f"{setting.values} [{setting.unit}]" if setting.unit else setting.values


def _default(setting: "Setting") -> str:
    if setting.default is not None:
        return f"default {setting.default or repr('')}"
    return "" if setting.section is not None else "required"


def _lines(shown: "tuple[Setting, str]", width: int) -> "Iterator[str]":
    setting, note = shown
    width = max(40, width)
    depth = "" if "." not in setting.name else "  "
    if not depth:
        yield ""
    facts = (_kind(setting), _default(setting), note) if depth else (note,)
    text = "  ".join(fact for fact in facts if fact)
    head = f"{depth}{setting.name}"
    if len(head) + 2 + len(text) <= width:
        yield f"{head}  {text}".rstrip()
    else:
        yield head
        yield from textwrap.wrap(text, width, initial_indent=depth + "    ", subsequent_indent=depth + "    ")
    yield from textwrap.wrap(
        setting.meaning, width, initial_indent=depth + "    ", subsequent_indent=depth + "    ", break_long_words=False
    )


def _page() -> str:
    lines = [_HEAD]
    for setting, note in _shown(None):
        if "." not in setting.name:
            lines += [f"\n## {setting.name}\n", f"{setting.meaning}\n", "| setting | value | default | meaning |"]
            lines.append("| --- | --- | --- | --- |")
            continue
        meaning = " ".join(part for part in (setting.meaning, f"({note})" if note else "") if part)
        default = f"`{setting.default or repr('')}`" if setting.default is not None else _default(setting)
        cells = [f"`{setting.name}`", _kind(setting), default, meaning]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("*", "\\*") for cell in cells) + " |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def _schema(name: str | None) -> dict[str, Any]:
    """JSON Schema of a whole file or one section; `headway train`, which sees `extends`, tells what is missing."""
    from headway.config import TrainConfig
    from headway.config.tree import walk

    if name is not None:
        _check_name(name)
        section = next((part.section for part in walk(TrainConfig) if part.name == _general(name)), None)
        if section is None:
            raise UsageError(f"{name} is no section, and has no schema of its own. Leave it out, or name its section.")
        return _as_written(section.model_json_schema())
    schema = _as_written(TrainConfig.model_json_schema())
    extends = {"type": "string", "description": "YAML file that this one changes, a path from this file's folder"}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    sections = [
        schema["$defs"][info.annotation.__name__] for info in TrainConfig.model_fields.values() if info.annotation
    ]
    for part in (schema, *sections):
        part.pop("required", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "headway train"}


def _as_written(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with what stands for a number, for a list and for an optional section in a file: texts, or a value."""
    sections = {f"#/$defs/{name}": part for name, part in schema.get("$defs", {}).items()}

    def widened(node: Any) -> Any:
        if isinstance(node, list):
            return [widened(part) for part in node]
        if not isinstance(node, dict):
            return node
        node = {key: widened(part) for key, part in node.items()}
        if node.get("type") in ("integer", "number"):
            node["type"] = [node["type"], "string"]
        elif (
            node.get("type") == "array"
            and "prefixItems" not in node
            and isinstance(node["items"].get("type"), str | list)
        ):
            kinds = node["items"]["type"]
            node["type"] = ["array", *([kinds] if isinstance(kinds, str) else kinds)]
        elif {"type": "null"} in node.get("anyOf", ()):
            required = [sections.get(part.get("$ref"), {}).get("required", ()) for part in node["anyOf"]]
            if any(len(names) == 1 for names in required):
                node["anyOf"].append({"type": ["number", "string"]})
        return node

    changed: dict[str, Any] = widened(schema)
    return changed
