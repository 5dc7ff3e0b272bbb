"""Send the calls of Python functions elsewhere for a while, whoever holds a reference to them.

A model may have imported an attention function by name, kept it in an attribute or a closure, or compiled it. All of
these hold the same function object, so what is exchanged is that object's code; no reference has to be found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import CodeType, FunctionType

_PLACE = "the replacement"


def _forward(*args: Any, **kwargs: Any) -> Any:
    replacement: Any = "the replacement"
    return replacement(*args, **kwargs)


def _code_calling(replacement: Callable[..., Any], function: FunctionType) -> CodeType:
    """Make code that calls `replacement`, held as a constant, for a function that may have a closure."""
    constants = tuple(replacement if constant == _PLACE else constant for constant in _forward.__code__.co_consts)
    return _forward.__code__.replace(co_consts=constants, co_freevars=function.__code__.co_freevars)


class Swapped:
    """While entered, calls of each function go to its replacement.

    Args:
        replacements: what each function is replaced by.

    >>> def double(x): return 2 * x
    >>> held = [double]
    >>> with Swapped({double: lambda x: 0}):
    ...     held[0](21)
    0
    >>> held[0](21)
    42
    """

    def __init__(self, replacements: Mapping[FunctionType, Callable[..., Any]]) -> None:
        self.replacements = replacements

    def __enter__(self) -> None:
        self._before = [(function, function.__code__) for function in self.replacements]
        for function, replacement in self.replacements.items():
            function.__code__ = _code_calling(replacement, function)

    def __exit__(self, *exception: object) -> None:
        for function, code in self._before:
            function.__code__ = code
