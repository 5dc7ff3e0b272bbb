"""Numeric options take numbers as people write them: `--tokens 100B`, `--mfu 40%`, `--price '$2.5'`."""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple, get_args, get_type_hints

from typer.core import TyperCommand
from typer.models import OptionInfo

from headway.errors import UsageError
from headway.report.quantity import MONEY, examples, parse_number

_UNIT = re.compile(r"\[([a-zA-Z/]+)\]")

_NOT_FINITE = {sign + word for sign in ("", "+", "-") for word in ("nan", "inf", "infinity")}


class _Kind(NamedTuple):
    """What a numeric option counts: its unit, "" for none, and whether it is whole."""

    unit: str
    whole: bool


class NumberCommand(TyperCommand):
    """A command that reads the numbers among its options before the parser sees them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: D102 - as the class above says
        if ctx.resilient_parsing:  # a shell asks how half a line goes on
            return super().parse_args(ctx, args)
        kinds = _numeric(self.callback) if self.callback else {}
        options = {name: kinds[param.name] for param in self.params if param.name in kinds for name in param.opts}
        return super().parse_args(ctx, _plain(args, options))


def _numeric(function: Callable[..., Any]) -> dict[str, _Kind]:
    """The numeric options of a command's function, by the names of its arguments."""
    kinds = {}
    for name, annotation in get_type_hints(inspect.unwrap(function), include_extras=True).items():
        option = next((each for each in get_args(annotation) if isinstance(each, OptionInfo)), None)
        types = _types(annotation)
        if option is not None and types & {int, float} and str not in types:
            written = option.help or ""
            match = _UNIT.search(written)
            unit = match[1] if match else MONEY if MONEY in written else ""
            kinds[name] = _Kind(unit, whole=float not in types)
    return kinds


def _types(annotation: Any) -> set[Any]:
    arguments = get_args(annotation)
    return (
        set().union(*map(_types, arguments)) if arguments else {annotation} if isinstance(annotation, type) else set()
    )


def _plain(arguments: list[str], options: dict[str, _Kind]) -> list[str]:
    """The arguments with the numbers of these options as Python writes them."""
    plain: list[str] = []
    option = ""  # the one whose value comes next
    for position, argument in enumerate(arguments):
        if argument == "--":
            return plain + arguments[position:]
        name, equals, value = argument.partition("=")
        if option:
            plain.append(_number(option, argument, options[option]))
            option = ""
        elif equals and name in options:
            plain.append(f"{name}={_number(name, value, options[name])}")
        else:
            plain.append(argument)
            option = argument if argument in options else ""
    return plain


def _number(option: str, text: str, kind: _Kind) -> str:
    number = parse_number(text, kind.unit, whole=kind.whole)
    if number is None and not kind.whole and text.strip().lower() in _NOT_FINITE:
        return text  # which the commands themselves refuse, each with what it needs
    if number is None or (kind.whole and not isinstance(number, int)):
        what = "a whole number" if kind.whole else "a number"
        raise UsageError(f"{option} {text[:40]!r} is not {what}. Write {examples(kind.unit, whole=kind.whole)}.")
    return repr(number)
