"""Chat templates of strangers, rendered within bounds of time, memory and size.

A chat template is a program. jinja2's sandbox keeps it from files and from Python's insides, but lets it loop for days
and fill the memory. Here loops, calls and operators are counted, and what would make a value too large is refused
before it is made, also where jinja2 computes constants as it compiles.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from jinja2 import nodes
from jinja2.runtime import BlockReference, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MAX_STEPS = 2_000_000  # turns of loops and calls in one rendering; real chats take some thousands
MAX_LENGTH = 100_000_000  # of one text [characters] or list; a tokenizer's own bound is far below
MAX_MADE = 4_000_000_000  # all texts and lists that one rendering makes, one after another [characters, entries]
MAX_SECONDS = 30.0  # of one rendering; the largest real ones take a tenth of a second [s]
_MAX_WIDTH = 100_000  # to which a template may pad a text [characters]
_MAX_PARTS = 2_000_000  # of a list or mapping, those within it included
_MAX_BITS = 10_000  # of a product or power
_TRANSFORMERS_COMPILE = chat_template_utils._compile_jinja_template
_RENDERING = threading.Lock()  # a compiled template counts, and one that marks words holds state, while it renders

# The width or precision of a format: %5d, {:5}; and one that an argument states: %*d, {:{}}.
_WIDE = re.compile(r"%[-+ #0]*(?:\d*\.)?\d{6,}|:[^{}]*\d{6,}[^{}]*\}")
_STATED = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "indent", "batch", "slice", "tojson"}
_CHECKED_FILTERS = _PADDING | {"replace", "join", "format", "sum", "string", "pprint"}


class TemplateFailure(Exception):  # noqa: N818 - no error of its own: the chat's reader says what it means for the chat
    """A template raised something, or went beyond a bound; the text says which."""


def render_template(chat: list[dict[str, Any]], source: str, **options: Any) -> tuple[str, Any]:
    """Render a chat by a template that anybody may have written.

    Args:
        chat: its turns, as templates read them.
        source: the template.
        **options: of transformers' `render_jinja_template`, and variables of the template.

    Returns:
        The text, and the generation spans where `return_assistant_tokens_mask` asks for them.

    Raises:
        TemplateFailure: whatever the template raises, or that it goes beyond a bound.
    """
    with _RENDERING:
        chat_template_utils._compile_jinja_template = _compiled  # type: ignore[assignment]  # keeps its own templates
        try:
            rendered: Any = chat_template_utils.render_jinja_template([chat], chat_template=source, **options)
        except Exception as error:
            raise TemplateFailure(_reason(error)) from error
        finally:
            chat_template_utils._compile_jinja_template = _TRANSFORMERS_COMPILE
    texts, spans = rendered
    return str(texts[0]), spans


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, RecursionError):
        text = "it calls itself without end"
    return text[:500] or type(error).__name__


class _Budget:
    """What one rendering has spent of its bounds."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.steps, self.made, self.end_s = 0, 0, time.monotonic() + MAX_SECONDS

    def step(self, number: int = 1) -> None:
        self.steps += number
        if self.steps > MAX_STEPS:
            raise OverflowError(f"it takes more than {MAX_STEPS:,} steps")
        if time.monotonic() > self.end_s:
            raise OverflowError(f"it takes longer than {MAX_SECONDS:g} s")

    def make(self, length: int) -> None:
        """Enter a text or list before it is made."""
        self.step()
        self.made += length
        if length > MAX_LENGTH:
            raise OverflowError(f"it makes a text or list of {length:,} entries; at most {MAX_LENGTH:,} are allowed")
        if self.made > MAX_MADE:
            raise OverflowError(f"it makes texts of more than {MAX_MADE:,} characters in all")


class _Counted:
    """What a loop goes through; each turn is a step."""

    def __init__(self, items: Iterable[Any], budget: _Budget, text: int) -> None:
        self._items, self._budget, self._text = items, budget, text

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.make(self._text)
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a loop that has no length asks for a list of it instead


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, which counts."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    budget: _Budget
    text: int  # characters of the template that are printed as they stand

    def bind(self) -> None:
        """Take an environment of transformers over: its filters are checked, and each printed value is counted."""
        self.budget, self.text = _Budget(), 0
        self.globals.pop("lipsum", None)  # makes any number of words, which no chat needs
        for name, filter_ in list(self.filters.items()):
            if name in _CHECKED_FILTERS:
                self.filters[name] = _checked(name, filter_, self)
        self.filters["_counted"] = lambda items, text: _Counted(items, self.budget, text)
        self.filters["_sized"] = _sized
        self.filters["_joined"] = lambda *parts: self._joined([str(_sized(part)) for part in parts])
        self.finalize = self._printed

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        """Have loops, lists and `~` go through a filter, and write the template's program."""
        self.text = _text_in(source)
        for loop in list(source.find_all(nodes.For)):
            loop.iter = _filter(loop.iter, "_counted", nodes.Const(_text_in(loop)))
        for holder in [source, *source.find_all(nodes.Node)]:
            for field, value in list(holder.iter_fields()):
                if isinstance(value, list):
                    value[:] = map(_looked_at, value)
                else:
                    setattr(holder, field, _looked_at(value))
        source.set_environment(self)
        return super()._generate(source, *arguments, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Do an operation whose result is bounded."""
        if operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(max(1, left.bit_length()) * max(0, right))
        elif operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
            for sequence, times in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(times, int):
                    self.budget.make(len(sequence) * max(0, times))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self.budget.make(len(left) + len(right))
        self.budget.step()
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls, after a look at its arguments."""
        self.budget.make(self.text if isinstance(function, Macro | BlockReference) else 0)
        name = getattr(function, "__name__", type(function).__name__)
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # of `format`, the sandbox's own
        args = _settled(args) if name == "join" else args
        _check(name, self.budget, (owner, *args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)

    def _joined(self, parts: list[str]) -> str:
        self.budget.make(sum(map(len, parts)))
        return "".join(parts)

    def _printed(self, value: Any) -> Any:
        self.budget.make(len(value) if isinstance(value, str) else 0)
        return _sized(value)


@lru_cache(maxsize=32)
def _bounded(source: str) -> Any:
    environment: Any = _TRANSFORMERS_COMPILE.__wrapped__("").environment  # a new one, with all that templates may use
    environment.__class__ = _BoundedEnvironment
    environment.bind()
    return environment.from_string(source)


def _compiled(source: str) -> Any:
    """A template that counts from 0; compiled once."""
    template = _bounded(source)
    template.environment.budget.start()
    return template


def _filter(node: Any, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


def _looked_at(node: Any) -> Any:
    """`a ~ b`, and lists and mappings as they are written, as filters that look at them; other nodes as they are."""
    if isinstance(node, nodes.Concat):
        return _filter(node.nodes[0], "_joined", *node.nodes[1:])
    is_made = isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load")
    return _filter(node, "_sized") if is_made else node


def _text_in(node: nodes.Node) -> int:
    return sum(len(text.data) for text in node.find_all(nodes.TemplateData))


def _checked(name: str, filter_: Callable[..., Any], environment: _BoundedEnvironment) -> Callable[..., Any]:
    """A filter that looks at its arguments first; what jinja2 notes on a filter stays noted."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        args = _settled(args) if name == "join" else args
        _check(name, environment.budget, (*args, *kwargs.values()))
        return filter_(*args, **kwargs)

    checked.__dict__.update(vars(filter_))
    return checked


def _check(name: str, budget: _Budget, values: tuple[Any, ...]) -> None:
    """Refuse a method or filter that would make too large a value of these."""
    if name in ("TemplateDict", "TemplateNamespace", "fromkeys", "tojson", "string", "pprint"):
        _sized(values)
    texts = [value for value in values if isinstance(value, str)]
    if name in _PADDING:
        width = max((value for value in values if isinstance(value, int)), default=0)
        if width > _MAX_WIDTH:
            raise OverflowError(f"{name} pads to {width:,}; at most {_MAX_WIDTH:,} are allowed")
        stops = "\n" if name == "indent" else "\t"
        budget.make(texts[0].count(stops) * width if texts and name in ("expandtabs", "indent") else 0)
    elif name == "replace" and len(texts) >= 3:
        text, old, new = texts[:3]
        budget.make(len(text) + text.count(old) * max(0, len(new) - len(old)))
    elif name == "join":
        parts = next((value for value in values if isinstance(value, list | tuple)), ())
        separator = max((len(text) for text in texts), default=0)
        budget.make(sum(len(part) if isinstance(part, str) else 1 for part in parts) + separator * len(parts))
    elif name in ("format", "format_map", "strftime_now") and texts:
        _check_format(texts[0], values)
    elif name == "sum" and any(isinstance(value, list | tuple) for value in values[1:]):
        raise OverflowError("it adds lists up")


def _settled(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Generators as lists, so that they can be looked at."""
    return tuple(list(value) if isinstance(value, Iterator) else value for value in values)


def _sized(value: Any) -> Any:
    """A value, if it is not too large when it is printed: lists within lists may hold one another many times."""
    left, waiting = _MAX_PARTS, [value]
    while waiting:
        part = waiting.pop()
        left -= 1
        if left < 0:
            raise OverflowError(f"it nests lists to more than {_MAX_PARTS:,} parts")
        if isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
    return value


def _check_format(text: str, values: tuple[Any, ...]) -> None:
    stated = _STATED.search(text) and any(isinstance(value, int) and abs(value) > _MAX_WIDTH for value in values)
    if stated or _WIDE.search(text):
        raise OverflowError(f"it formats to a width above {_MAX_WIDTH:,} characters")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise OverflowError(f"it computes a number of {bits:,} bits; at most {_MAX_BITS:,} are allowed")
