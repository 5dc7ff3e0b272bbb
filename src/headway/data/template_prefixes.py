"""Renderings of a chat's beginnings, many of them from one run of its template.

Each answer of a chat is learnt behind its prompt: the chat before the answer, as the template renders that beginning
alone. Most templates go through the messages in one loop, and what they write for a message depends on messages before
it. One run over the whole chat then passes through the very states in which runs over its beginnings are.

A run here reads the messages through `_Messages`, which notes how many of them the run knows to exist. If a turn of the
loop ends and no later message is known, a run over the messages so far has done the same. That run would leave the loop
here, so what stands behind the loop is rendered at once, with the messages so far, and gives the beginning's ending. A
turn that looked ahead, by `loop.last` for example, is rendered once more as the last turn. A template may find
something out before the loop, such as the place of the last question. This is then found out again for each beginning,
and has to be the same. A beginning for which any of this fails needs a run of its own.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.runtime import Macro, Undefined
from jinja2.utils import Namespace, missing

from headway.data.template_bounds import (
    RENDERING,
    BoundedEnvironment,
    Rendering,
    TemplateFailure,
    TemplateNamespace,
    failure_reason,
)

_ALL = 2**62  # messages that are known to exist where a template has asked for their number or for the last one
_ASKED = "add_generation_prompt"
_STATEFUL = {"cycler", "joiner", "caller", "kwargs", "varargs"}  # names of what changes from call to call
_OTHER_FILES = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
_FAILURES = (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError)  # failures of a run


class _UnwatchedError(TemplateError):
    """A template does with the messages what `_Messages` cannot follow."""


class _State(NamedTuple):
    """A place in a run.

    Attributes:
        length: of the text so far [characters].
        marks: spans that are marked so far.
        num_known: messages that the run knows to exist.
        has_looked: whether the run has looked whether an answer is to be opened.
        contents: what its namespaces hold.
    """

    length: int
    marks: int
    num_known: int
    has_looked: bool
    contents: list[dict[str, Any]]


class _Run:
    """One run of a template over a chat.

    Args:
        chat: all messages.
        limit: how many of them the run sees.
        wanted: lengths of beginnings whose endings are asked for [messages].

    Attributes:
        num_known: messages that the run knows to exist; `_ALL` where it knows their number.
        has_looked: whether it has looked whether an answer is to be opened.
        marked: whether the template has marked words.
        entry: what it knows as it enters the loop over messages; None before.
        turns: the iterator of that loop; None before.
        namespaces: those that it made.
        start: the place where the turn of the loop began.
        endings: of each beginning, by its messages and whether an answer is opened behind it: how much of the text it
            shares [characters], how many of the marked spans, and the text behind.
    """

    def __init__(self, chat: list[dict[str, Any]], limit: int, wanted: Collection[int] = ()) -> None:
        self.chat, self.limit, self.wanted = chat, limit, {length for length in wanted if length < limit}
        self.ids = {id(message) for message in chat}
        self.num_known, self.has_looked, self.marked = 0, False, False
        self.entry: Any = None
        self.turns: _Turns | None = None
        self.namespaces: list[Any] = []
        self.start = _State(0, 0, 0, False, [])
        self.endings: dict[tuple[int, bool], tuple[int, int, str]] = {}

    def contents(self) -> list[dict[str, Any]]:
        """A copy of what the namespaces hold."""
        contents = [dict(space._Namespace__attrs) for space in self.namespaces]
        for attributes in contents:
            for value in attributes.values():
                if not isinstance(value, str | int):
                    _signature(value, self)  # refuses what no copy keeps as it is
        return contents

    def set_contents(self, contents: list[dict[str, Any]]) -> None:
        """Put back what `contents` gave."""
        for space, attributes in zip(self.namespaces, contents, strict=False):
            space._Namespace__attrs.clear()
            space._Namespace__attrs.update(attributes)


class _Messages:
    """The messages of a chat from one on, as a list that notes what is read, and refuses what it cannot follow."""

    def __init__(self, run: _Run, first: int = 0) -> None:
        self._run, self._first = run, first

    def _all(self) -> list[dict[str, Any]]:
        self._run.num_known = _ALL
        return self._run.chat[self._first : self._run.limit]

    def __len__(self) -> int:
        return len(self._all())

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    def __iter__(self) -> "_Turns":
        return _Turns(self)

    def __reversed__(self) -> Iterator[dict[str, Any]]:
        return iter(self._all()[::-1])

    def __getitem__(self, place: Any) -> Any:
        run = self._run
        if isinstance(place, slice):
            is_rest = isinstance(place.start, int) and place.start >= 0 and (place.stop, place.step) == (None, None)
            return _Messages(run, self._first + place.start) if is_rest else self._all()[place]
        if not isinstance(place, int) or place < 0:
            return self._all()[place]
        index = self._first + place
        if index >= run.limit:
            run.num_known = _ALL
            raise IndexError("list index out of range")
        run.num_known = max(run.num_known, index + 1)
        return run.chat[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _UnwatchedError(f"it takes {name} of all messages")

    def _refuse(self, *_: Any) -> Any:
        raise _UnwatchedError("it takes all messages as one value")

    __eq__ = __contains__ = __str__ = __repr__ = __hash__ = _refuse


class _Turns:
    """An iterator over messages, which goes on where a limit that stopped it is lifted."""

    def __init__(self, messages: _Messages) -> None:
        self._messages, self.place = messages, 0

    def __iter__(self) -> "_Turns":
        return self

    def __len__(self) -> int:
        return len(self._messages)

    def __next__(self) -> dict[str, Any]:
        try:
            message: dict[str, Any] = self._messages[self.place]
        except IndexError:
            raise StopIteration from None
        self.place += 1
        return message

    @property
    def passed(self) -> int:
        """Messages of the chat up to the one that was handed out last."""
        return self._messages._first + self.place


class _PrefixEnvironment(BoundedEnvironment):
    """The environment of templates that tell what they would have written for a chat's beginnings.

    Attributes:
        run: under way.
        is_watched: whether the template has a loop over messages that can be followed.
        repeats: whether a turn of that loop can be rendered once more.
    """

    run: _Run

    def __init__(self) -> None:
        super().__init__()
        self.is_watched, self.repeats = False, False

        def make_namespace(*arguments: Any, **attributes: Any) -> TemplateNamespace:
            space = TemplateNamespace(*arguments, **attributes)
            self.run.namespaces.append(space)
            return space

        make_namespace.__name__ = TemplateNamespace.__name__  # calls are checked by it
        self.globals["namespace"] = make_namespace
        counted: Any = self.filters["_counted"]
        self.filters["_counted"] = lambda items, text: items if isinstance(items, _Turns) else counted(items, text)
        self.filters |= {"_turns": self._turns, "_asked": self._asked, "_enter": self._enter}
        self.filters |= {"_begin": self._begin, "_end": self._end}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Read a template, and let the last loop at its root tell what would stand behind each turn."""
        tree = super()._parse(source, name, filename)
        place = max((n for n, node in enumerate(tree.body) if isinstance(node, nodes.For)), default=None)
        if place is None or not _can_be_followed(tree, place):
            return tree
        loop: Any = tree.body[place]
        # The ending of a beginning: its last turn once more if that looked ahead, and what stands behind the loop.
        copy: Any = super()._parse(source, name, filename)
        last_turn = [] if _leaves(loop.body) else [nodes.Scope(copy.body[place].body)]
        ending = [nodes.If(nodes.Name("_once_more", "load"), last_turn, [], []), *copy.body[place + 1 :]]
        parameters = [nodes.Name(_ASKED, "param"), nodes.Name("_once_more", "param")]
        # A look whether an answer is to be opened, a parameter of the endings, is noted elsewhere.
        for holder in [tree, *tree.find_all(nodes.Node)]:
            for field, value in list(holder.iter_fields()):
                if isinstance(value, list):
                    value[:] = [_noted(part, holder) for part in value]
                else:
                    setattr(holder, field, _noted(value, holder))
        own = nodes.Name("loop", "load") if _names_in([loop]) & {"loop"} else nodes.Const(None)
        loop.body = [
            nodes.ExprStmt(_filter(nodes.Const(None), "_begin")),
            nodes.Scope(loop.body),
            nodes.Macro("_ending", parameters, [], ending),
            nodes.Output([_filter(nodes.Name("_ending", "load"), "_end", own)]),
        ]
        loop.iter = _filter(loop.iter, "_turns")
        tree.body.insert(place, nodes.Output([_filter(nodes.Const(None), "_enter")]))
        _number_lines(tree, 1)
        self.is_watched, self.repeats = True, bool(last_turn)
        return tree

    def mark(self, length: int) -> None:
        """Note that the next characters are marked, which no ending tells in its place."""
        self.run.marked = True
        super().mark(length)

    def _turns(self, items: Any) -> _Turns:
        if not isinstance(items, _Messages):
            raise _UnwatchedError("its last loop is not over messages")
        self.run.turns = _Turns(items)
        return self.run.turns

    def _asked(self, value: Any) -> Any:
        self.run.has_looked = True
        return value

    @pass_context
    def _enter(self, context: Any, _: None) -> str:
        """Note what the template knows as it enters the loop over messages."""
        run = self.run
        if _ASKED in context.vars:
            raise _UnwatchedError(f"it sets {_ASKED}")
        values = {name: _signature(value, run) for name, value in context.vars.items()}
        contents = [{name: _signature(value, run) for name, value in space.items()} for space in run.contents()]
        run.entry = "".join(self.texts), list(self.spans), values, contents
        return ""

    @pass_context  # keeps jinja2 from computing it as it compiles
    def _begin(self, context: Any, _: None) -> None:  # noqa: ARG002
        """Note where a turn of the loop begins."""
        self.budget.make(self.text)
        self.run.start = self._state()

    def _state(self) -> _State:
        run = self.run
        return _State(self.length, len(self.spans), run.num_known, run.has_looked, run.contents())

    @pass_context
    def _end(self, context: Any, ending: Macro, loop: Any) -> str:
        """Render what would follow if the chat ended with this message."""
        run, turns = self.run, self.run.turns
        assert turns is not None
        # A template that peeked has the next message at hand.
        length = turns.passed - (loop is not None and loop._after is not missing)
        if length not in run.wanted:
            return ""
        now = self._state()
        once_more = now.num_known > length or now.has_looked > run.start.has_looked
        state = run.start if once_more else now
        if state.num_known > length or (once_more and not self.repeats):
            return ""
        # The beginning's run: its messages alone, what it held then, and nothing of the next message.
        before, peeked = (run.limit, turns.place, self.spans), {} if loop is None else dict(vars(loop))
        for opened in (False,) if state.has_looked else (False, True):
            run.limit, run.has_looked, run.marked, self.spans = length, False, False, []
            turns.place += length - turns.passed
            run.set_contents(state.contents)
            if loop is not None:
                loop._after, loop._length = missing, None
            try:
                text = ending(context.eval_ctx, opened, once_more)
                if not run.marked and not (opened and run.has_looked):
                    run.endings[length, opened] = state.length, state.marks, text
            except _FAILURES:
                continue  # a run of its own says why
            finally:
                run.limit, turns.place, self.spans = before
                run.num_known, run.has_looked = now.num_known, now.has_looked
                run.set_contents(now.contents)
                if loop is not None:
                    vars(loop).update(peeked)
        return ""


class Beginnings:
    """Renderings of a chat's beginnings that one run of its template gave.

    Args:
        text: the whole chat.
        spans: what the template marks of it [characters].
        run: the run.
    """

    def __init__(self, text: str, spans: list[tuple[int, int]], run: _Run) -> None:
        self._text, self._spans, self._length, self._endings = text, spans, run.limit, run.endings

    def get(self, length: int, opened: bool) -> Rendering | None:
        """A beginning as the template renders it alone; None where that is not known."""
        if (length, opened) == (self._length, False):
            return self._text, self._spans
        if (ending := self._endings.get((length, opened))) is None:
            return None
        place, marks, tail = ending
        return self._text[:place] + tail, self._spans[:marks]


def render_beginnings(
    chat: list[dict[str, Any]],
    source: str,
    lengths: Collection[int],
    *,
    tools: list[dict[str, Any]] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> Beginnings | None:
    """Render a chat, and with it those of its beginnings for which that is the same as to render each alone.

    Args:
        chat: its turns, as templates read them.
        source: the template.
        lengths: of the beginnings that are wanted [messages].
        tools: JSON schemas of the functions that the chat offers.
        variables: of the template.

    Returns:
        The renderings; None where the template cannot be followed.

    Raises:
        TemplateFailure: as `render_template`, or the template does with this chat what cannot be followed.
    """
    with RENDERING:
        try:
            template = _compiled(source)
            environment: Any = template.environment
            if not environment.is_watched:
                return None
            run = _Run(chat, len(chat), lengths)
            values = {"documents": None, **variables, "tools": tools, _ASKED: False}
            for _ in _texts(template, run, values):
                if run.entry is not None and run.turns is None and run.num_known:
                    _leave_what_enters_alike(template, run, values)
            return Beginnings("".join(environment.texts), environment.spans, run)
        except Exception as error:
            raise TemplateFailure(failure_reason(error)) from error


def _texts(template: Template, run: _Run, variables: dict[str, Any]) -> Iterator[None]:
    environment: Any = template.environment
    environment.run = run
    texts: Iterator[None] = environment.run_template(template, {**variables, "messages": _Messages(run)})
    return texts


def _leave_what_enters_alike(template: Template, run: _Run, variables: dict[str, Any]) -> None:
    """Leave only those beginnings wanted that enter the loop as the whole chat, which has looked at messages before."""
    environment: Any = template.environment
    before = environment.texts, environment.spans, environment.length
    for length in sorted(run.wanted, reverse=True):
        if length >= run.num_known:
            continue
        beginning = _Run(run.chat, length)
        try:
            for _ in _texts(template, beginning, variables):
                if beginning.entry is not None:
                    break
        except _FAILURES:
            beginning.entry = None  # a run of its own says why
        if beginning.entry != run.entry:
            run.wanted = {other for other in run.wanted if other > length}
            break
    environment.texts, environment.spans, environment.length = before
    environment.run, run.num_known = run, 0


def _signature(value: Any, run: _Run) -> Any:
    """A key by which a value of a template is the same in two runs over beginnings of one chat."""
    key: Any = value
    if isinstance(value, _Messages):
        key = value._first
    elif isinstance(value, Undefined):
        key = value._undefined_name
    elif isinstance(value, Macro):
        key = value.name
    elif isinstance(value, Namespace):
        key = next(number for number, space in enumerate(run.namespaces) if space is value)
    elif id(value) in run.ids:
        key = id(value)
    elif isinstance(value, list | tuple):
        key = [_signature(part, run) for part in value]
    elif isinstance(value, dict):
        key = [(name, _signature(part, run)) for name, part in value.items()]
    elif not isinstance(value, str | int | float | range | None):
        raise _UnwatchedError(f"it keeps a value of type {type(value).__name__}, which may change as it is read")
    return type(value), key


def _can_be_followed(tree: nodes.Template, place: int) -> bool:
    """Tell whether a loop at a template's root can be left after each turn, and what is behind be rendered there."""
    loop: Any = tree.body[place]
    own = _names_in([loop.target]) | {"loop"}
    changes = any(node.attr == "changed" for node in loop.find_all(nodes.Getattr))  # compares with the turn before
    return not (
        loop.test
        or loop.else_
        or loop.recursive
        or changes
        or own & _names_in(tree.body[place + 1 :])
        or _STATEFUL & _names_in([tree])
        or next(tree.find_all(_OTHER_FILES), None)
    )


def _names_in(statements: list[nodes.Node]) -> set[str]:
    return {
        node.name
        for statement in statements
        for node in [statement, *statement.find_all(nodes.Name)]
        if isinstance(node, nodes.Name)
    }


def _noted(node: Any, holder: nodes.Node) -> Any:
    """A look whether an answer is to be opened, which is noted; other nodes as they are."""
    if not isinstance(node, nodes.Name) or (node.name, node.ctx) != (_ASKED, "load"):
        return node
    is_test = isinstance(holder, nodes.Test) and holder.name in ("defined", "undefined")
    return node if is_test else _filter(node, "_asked")


def _leaves(body: list[nodes.Node]) -> bool:
    """Tell whether statements leave the loop that they are in."""
    return any(
        isinstance(node, nodes.Continue | nodes.Break)
        or (not isinstance(node, nodes.For) and _leaves(list(node.iter_child_nodes())))
        for node in body
    )


def _filter(node: nodes.Expr, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None)


def _number_lines(node: nodes.Node, line: int) -> None:
    """Give nodes that were made here the line of what holds them."""
    node.lineno = node.lineno or line
    for child in node.iter_child_nodes():
        _number_lines(child, node.lineno)


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    return _PrefixEnvironment().from_string(source)
