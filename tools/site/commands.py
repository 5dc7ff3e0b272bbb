"""Pages of the command line: every command with its arguments and options, in the words of its own help."""

import re
from typing import TYPE_CHECKING, Any

import typer

from headway.cli.app import app
from tools.site.markdown import cell, prose, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_INDEX = """# Command line

```console
$ headway --help
{help}
```

Results go to stdout, everything else to stderr; `--json` prints one object. Exit code 0 is done, 1 failed, 2 wrong use,
130 Ctrl-C. An error is one paragraph; with `HEADWAY_DEBUG=1` its traceback is shown.

{commands}
```{{toctree}}
:hidden:

{pages}
```
"""


def command_pages(shown_in: "Mapping[str, Sequence[str]]") -> dict[str, str]:
    """Write the page that lists the commands, and one for each.

    Args:
        shown_in: links to the pages that show a command at work, by its name.

    Returns:
        Markdown by the page's path below `reference/`, without extension.
    """
    group: Any = typer.main.get_command(app)
    context = _context(group, "headway", None)
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    commands = {name: command for name, command in commands.items() if not command.hidden}
    index = _INDEX.format(
        help=group.get_help(context).strip(),
        commands=table(
            ("command", "what it does"),
            [(f"[`headway {name}`](commands/{name}.md)", cell(one.short_help)) for name, one in commands.items()],
        ),
        pages="\n".join(f"commands/{name}" for name in commands),
    )
    pages = {
        f"commands/{name}": _page(name, command, _context(command, name, context), shown_in.get(name, []))
        for name, command in commands.items()
    }
    return {"commands": index, **pages}


def _context(command: Any, name: str, parent: Any) -> Any:
    settings = {**command.context_settings, "terminal_width": 100, "max_content_width": 100}
    return command.context_class(command, info_name=name, parent=parent, **settings)


def _page(name: str, command: Any, context: Any, links: "Sequence[str]") -> str:
    usage = " ".join(["headway", name, *command.collect_usage_pieces(context)])
    examples = re.findall(r"^Examples?: +(headway .*)$", command.help, flags=re.MULTILINE)
    text = re.sub(r"^Examples?: +headway .*$", "", command.help, flags=re.MULTILINE)
    parts = [f"# headway {name}", "```sh\n" + "\n".join([*examples, "", usage]).strip() + "\n```", prose(text)]
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        found = [one for one in command.get_params(context) if one.param_type_name == kind]
        if rows := [_row(*record) for one in found if (record := one.get_help_record(context))]:
            parts.append(f"## {title}\n\n" + table((kind, "meaning", "default, bounds"), rows))
    if links:
        parts.append("## In use\n\nPages that show it at work: " + ", ".join(links) + ".")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _row(names: str, text: str) -> tuple[str, str, str]:
    """Split one record of the help: two spaces stand before the brackets that hold the default and bounds."""
    meaning, _, extra = text.partition("  [")
    extra = extra.removesuffix("]").replace("default: ", "")
    return cell(f"`{names}`"), cell(meaning), cell(extra)
