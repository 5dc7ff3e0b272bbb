"""The cases that a law is tried on: how many of them, and inputs that no honest program writes."""

import json
import math
import os
import resource
import signal
from contextlib import contextmanager

import pytest

PROFILE = os.environ.get("HEADWAY_TEST_PROFILE", "headway")
IS_QUICK = PROFILE == "quick"


def examples(quick, usual):
    """The number of examples that a property is tried on."""
    return quick if IS_QUICK else 10 * usual if PROFILE == "long" else usual


def some(cases, is_often):
    """Mark as slow the cases of a law that `make test` need not try.

    Args:
        cases: values of one parameter, or tuples of several.
        is_often: whether `make test` tries a case too.
    """
    parts = ((case, case if isinstance(case, tuple) else (case,)) for case in cases)
    return [case if is_often(case) else pytest.param(*values, marks=pytest.mark.slow) for case, values in parts]


ODD = [
    None, True, False, -1, 0, 2**31, 2**63, 10**30, -(10**30), 1e308, 5e-324, 0.1, "", "x", "1", [], {}, [1], [[1]],
    {"a": 1}, "\x1b[2J", "\u202e", "é" * 50, "9" * 5000, math.nan, math.inf, -math.inf, "1e5", " 1 ", "\x00",
]  # fmt: skip
CUTS = ["\x00", "{", "]", ",", "\\", '"', "9" * 5000, "1e999999", "-", "\ud7ff"]


def mutated(value, random, share):
    """A copy of JSON data in which some values are others, some keys gone or renamed, some lists longer or shorter."""
    if random.random() < share:
        return random.choice(ODD)
    if isinstance(value, dict):
        pairs = ((key, mutated(inner, random, share)) for key, inner in value.items() if random.random() > share / 3)
        return {(random.choice(["", "x", key + "2"]) if random.random() < share / 3 else key): it for key, it in pairs}
    if isinstance(value, list):
        items = [mutated(inner, random, share) for inner in value]
        return (items + items[:1])[: len(items) + random.choice([0, 0, 0, 0, -1, 1])] if items else items
    return value


def damaged(value, random):
    """JSON of data, which is cut or has a piece put in, once in ten."""
    text = json.dumps(value)
    place = random.randrange(len(text) + 1)
    chance = random.random()
    if chance < 0.05:
        return text[:place]
    return text[:place] + random.choice(CUTS) + text[place:] if chance < 0.1 else text


PAYLOADS = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    "<!--",
    "]]>",
    "`<b onclick=x>`",
    "a `` ` <i> `` b ` <u>",
    "[x](javascript:alert(1))",
    "![x](//evil/a.png)",
    "<https://evil>",
    "[x]: //evil\n\n[x]",
    "\n\n# big\n\n* item\n\n<iframe src=//evil>",
    "\\[x](//evil) \\<b> \\`<i>`",
    "</title><script>x</script>",
    "</pre></style><meta http-equiv=refresh content=0;url=//evil>",
    "&lt;script&gt; &#60;b&#62;",
    "\x1b[31mred\x9b a\u202eb | c **d** ~~e~~",
)


@contextmanager
def a_full_disk(room):
    """Let no file grow beyond `room` bytes: the write fails as on a full disk, even for root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
