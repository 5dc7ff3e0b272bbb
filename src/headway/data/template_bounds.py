"""Chat templates of strangers, rendered within bounds of time, memory and size.

A chat template is a program. jinja2's sandbox keeps it from files and from Python's insides, but lets it loop for days
and fill the memory. Here loops, calls and operators are counted, and what would make a value too large is refused
before it is made, also where jinja2 computes constants as it compiles.

Templates find what transformers gives them: blocks and their white space, `{% generation %}`, break and continue, and
the filters and functions below. Source: transformers 5.17 to 5.23, `utils/chat_template_utils.py`; tests hold the texts
of all templates against those that `apply_chat_template` makes.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SOURCE = 2**20  # length of the longest template [characters]; the longest of shipped models have tens of thousands
MAX_STEPS = 2_000_000  # turns of loops and calls in one rendering; real chats take some thousands
MAX_LENGTH = 100_000_000  # length of the longest text [characters] or list; a tokenizer's own bound is far below
MAX_MADE = 4_000_000_000  # all texts and lists that one rendering makes, one after another [characters, entries]
MAX_SECONDS = 30.0  # time of the longest rendering [s]; the largest real chats take a tenth of a second
_STEPS_BETWEEN_LOOKS = 32  # steps from one look at the clock to the next; the longest take tenths of a second
_MAX_WIDTH = 100_000  # width to which a template may pad a text [characters]
_MAX_PARTS = 2_000_000  # parts of a list or mapping, the parts of its parts included
_MAX_BITS = 10_000  # size of a product or power [bits]
RENDERING = threading.Lock()  # a compiled template counts, and notes the spans that it marks, while it renders

# The width or precision of a format: %5d, {:5}; and one that an argument states: %*d, {:{}}.
_WIDE = re.compile(r"%[-+ #0]*(?:\d*\.)?\d{6,}|:[^{}]*\d{6,}[^{}]*\}")
_STATED = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "indent", "batch", "slice", "tojson"}
_OF_MAPPINGS = frozenset(dir(dict))
_CHECKED_FILTERS = _PADDING | {"replace", "join", "format", "sum", "string", "pprint"}


Rendering = tuple[str, list[tuple[int, int]]]
"""A text, and the spans of it that its template marks with `{% generation %}` [characters]."""


class TemplateFailure(Exception):  # noqa: N818 - no error of its own: the chat's reader says what it means for the chat
    """A template raised something, or went beyond a bound; the text says which."""


def compile_template(source: str) -> Template:
    """Compile a chat template; each source once.

    Raises:
        TemplateSyntaxError: it is none, or none that can be compiled.
    """
    try:
        return _compiled(source)
    except TemplateSyntaxError:
        raise
    except Exception as error:  # Python's own compiler raises on expressions that are nested too deeply, for example
        raise TemplateSyntaxError(failure_reason(error), 1) from error


def render_template(
    chat: list[dict[str, Any]],
    source: str,
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> Rendering:
    """Render a chat by a template that anybody may have written.

    Args:
        chat: its turns, as templates read them.
        source: the template.
        tools: JSON schemas of the functions that the chat offers.
        add_generation_prompt: open the assistant's next turn.
        variables: of the template; the arguments above go before variables of their names.

    Returns:
        The text, and the spans of it that the template marks with `{% generation %}` [characters].

    Raises:
        TemplateFailure: whatever the template raises, or that it goes beyond a bound.
    """
    with RENDERING:
        try:
            template = _compiled(source)
            environment: Any = template.environment
            own = {"messages": chat, "tools": tools, "add_generation_prompt": add_generation_prompt}
            for _ in environment.run_template(template, {"documents": None, **variables, **own}):
                pass
        except Exception as error:
            raise TemplateFailure(failure_reason(error)) from error
        return "".join(environment.texts), environment.spans


def failure_reason(error: Exception) -> str:
    """The reason why a template failed, cut to what a person reads."""
    text = str(error)
    if isinstance(error, RecursionError):
        text = "it calls itself without end"
    return text[:500] or type(error).__name__


class _Budget:
    """Spending of one rendering against its bounds."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.steps, self.made, self.next_look = 0, 0, 0
        self.end_s = time.monotonic() + MAX_SECONDS

    def step(self, number: int = 1) -> None:
        self.steps += number
        if self.steps > MAX_STEPS:
            raise OverflowError(f"it takes more than {MAX_STEPS:,} steps")
        if self.steps >= self.next_look:  # the clock is dearer than a step
            self.next_look = self.steps + _STEPS_BETWEEN_LOOKS
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
    """Iterable of a loop; each turn is a step."""

    def __init__(self, items: Iterable[Any], budget: _Budget, text: int) -> None:
        self._items, self._budget, self._text = items, budget, text

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.make(self._text)
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a loop that has no length asks for a list of it instead


class _Generation(Extension):
    """The block `{% generation %}`, which marks the words of the assistant."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way

    def parse(self, parser: Parser) -> nodes.Node:
        """Read a block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        environment: Any = self.environment
        text: str = caller()
        environment.mark(len(text))
        return text


class _Dict:
    """`dict` without the methods and attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Make a dictionary of keys and one value."""
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """`namespace` whose names do not begin with an underscore, as Python's own do."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *arguments = args
        attributes = dict(*arguments, **kwargs)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateError(f"it sets {name!r} of a namespace, whose names may not begin with an underscore")


def _refuse(message: object) -> NoReturn:
    """Refuse the chat, in the template's words."""
    raise TemplateError(str(message))


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write a value as JSON, without the escapes of HTML that jinja2's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(layout: str) -> str:
    """Write today's date and time."""
    return datetime.now().strftime(layout)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates, which counts: filters are checked, and each printed value is counted."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    texts: list[str]  # texts that a rendering has given so far
    length: int  # length of these texts [characters]
    spans: list[tuple[int, int]]  # spans of the joined texts that the template marks

    def __init__(self) -> None:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.budget = _Budget()
        self.text = 0  # characters of the template that are printed as they stand
        self.texts, self.length, self.spans = [], 0, []
        del self.globals["lipsum"]  # makes any number of words, which no chat needs
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now, "dict": _Dict()}
        self.globals["namespace"] = TemplateNamespace
        self.filters["tojson"] = _as_json
        for name, filter_ in list(self.filters.items()):
            if name in _CHECKED_FILTERS:
                self.filters[name] = _checked(name, filter_, self)
        self.filters["_counted"] = lambda items, text: _Counted(items, self.budget, text)
        self.filters["_sized"] = _sized
        self.filters["_joined"] = lambda *parts: self._joined([str(_sized(part)) for part in parts])
        self.finalize = self._printed

    def run_template(self, template: Template, variables: dict[str, Any]) -> Iterator[None]:
        """Run a template, and stop behind each text that it gives."""
        self.budget.start()
        self.texts, self.length, self.spans = [], 0, []
        for text in template.generate(variables):
            self.texts.append(text)
            self.length += len(text)
            yield

    def mark(self, length: int) -> None:
        """Note that the next characters are marked."""
        self.spans.append((self.length, self.length + length))

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
        if operator == "+" and type(left) is type(right) is str:
            self.budget.make(len(left) + len(right))
            return left + right
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
        """Call a template's function, after a check of the arguments."""
        if isinstance(function, Macro):
            self.budget.make(self.text)
            return super().call(context, function, *args, **kwargs)
        self.budget.make(self.text if isinstance(function, BlockReference) else 0)
        name = getattr(function, "__name__", type(function).__name__)
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # text of a wrapped `format`
        args = _settled(args) if name == "join" else args
        _check(name, self.budget, (owner, *args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Read an attribute, or an entry of a mapping at once where the type has no attribute of that name."""
        if type(obj) is dict and attribute in obj and attribute not in _OF_MAPPINGS:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def _joined(self, parts: list[str]) -> str:
        self.budget.make(sum(map(len, parts)))
        return "".join(parts)

    def _printed(self, value: Any) -> Any:
        if isinstance(value, str):
            self.budget.make(len(value))
            return value
        self.budget.step()
        return _sized(value)


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    if len(source) > MAX_SOURCE:
        raise TemplateSyntaxError(f"it has {len(source):,} characters, and at most {MAX_SOURCE:,} are allowed", 1)
    return BoundedEnvironment().from_string(source)


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


def _checked(name: str, filter_: Callable[..., Any], environment: BoundedEnvironment) -> Callable[..., Any]:
    """A filter that checks its arguments first, with jinja2's marks of the original filter."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        args = _settled(args) if name == "join" else args
        _check(name, environment.budget, (*args, *kwargs.values()))
        return filter_(*args, **kwargs)

    checked.__dict__.update(vars(filter_))
    return checked


def _check(name: str, budget: _Budget, values: tuple[Any, ...]) -> None:
    """Refuse a method or filter that would make too large a value of these."""
    if name in ("_Dict", "TemplateNamespace", "fromkeys", "tojson", "string", "pprint"):
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
    elif name in ("format", "format_map", "_now") and texts:
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
