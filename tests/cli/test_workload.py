"""Options that describe a step's workload: declared once, spread over five commands, built in one place."""

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer

from headway.cli.audit import audit
from headway.cli.compare import compare
from headway.cli.explain import explain
from headway.cli.flops import flops
from headway.cli.mfu import mfu
from headway.cli.options import spread
from headway.cli.workload import WorkloadOptions
from headway.count import Workload
from headway.count.modalities import MODALITIES


@spread()
def every_option(*, work: WorkloadOptions) -> None:
    """A command that has nothing but these options."""


NAMES = [*inspect.signature(every_option).parameters]


def test_each_option_is_an_argument_of_the_workload():
    assert {*NAMES} - {*MODALITIES} <= {*inspect.signature(Workload).parameters}
    assert {*NAMES} >= {*MODALITIES}


@pytest.mark.parametrize(
    ("command", "without"),
    [
        (flops, []),
        (compare, ["past", "logits"]),
        (explain, ["past", "logits"]),
        (mfu, ["past", "slots", "logits"]),
        (audit, ["audio", "past", "logits"]),
    ],
)
def test_a_command_has_every_option_but_those_that_it_leaves_out(command, without):
    options = [name for name in inspect.signature(command).parameters if name in NAMES]
    assert options == [name for name in NAMES if name not in without]


@dataclass(frozen=True)
class Pair:
    """Two options."""

    left: Annotated[int, typer.Option()] = 1
    right: Annotated[int, typer.Option()] = 2


def test_a_group_is_spread_at_its_place_and_handed_on_as_one_object():
    calls = []

    @spread(between={"right": ["middle"]})
    def command(first: str, *, pair: Pair, middle: int = 0, last: bool = False) -> None:
        calls.append((first, pair, middle, last))

    assert [*inspect.signature(command).parameters] == ["first", "left", "middle", "right", "last"]
    command("a", left=5, middle=3)
    assert calls == [("a", Pair(left=5), 3, False)]


def test_an_option_that_is_left_out_keeps_its_default():
    calls = []

    @spread(without=["left"])
    def command(*, pair: Pair) -> None:
        calls.append(pair)

    assert [*inspect.signature(command).parameters] == ["right"]
    command(right=7)
    assert calls == [Pair(right=7)]


def test_lengths_may_come_from_elsewhere_than_the_options():
    assert WorkloadOptions(media={"images": "1x2x2"}).build([7, 3]).tokens == 10
