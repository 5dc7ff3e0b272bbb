"""Why a real step runs other FLOPs than its ledger bills, module by module, each reason checked by arithmetic.

A reason is given only where it predicts what PyTorch counted, forward and backward, to the FLOP; the pairs that a mask
allows are those that the real softmaxes went over. Three can do less, and their words say so: the chunks of a
recurrence are a bound from below, scores that end in no softmax one from above; a kernel that PyTorch has no formula
for, or a recurrence of elementwise products, is not seen at all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from headway.count import drivers
from headway.count.rows import Row
from headway.count.workload import Workload
from headway.tracing.classify import inside, members
from headway.tracing.counted_step import RECURRENCE, CountedStep
from headway.tracing.families.experts import unchosen_rows
from headway.tracing.families.padding import paddings


@dataclass(frozen=True)
class Billed:
    """What a ledger bills one module for in a step."""

    module: str  # path
    rows: tuple[Row, ...]  # the ledger's rows of it
    trained: int  # the parameters that are, as bits
    workload: Workload

    @property
    def flops(self) -> tuple[int, int]:
        """FLOPs forward and backward."""
        return self.on(lambda driver: drivers.parse(driver)(self.workload))

    def on(self, units: Callable[[str], int]) -> tuple[int, int]:
        """Count FLOPs forward and backward on other units than the workload's."""
        forward = sum(units(row.driver) * row.forward for row in self.rows)
        backward = sum(
            units(row.driver) * sum(g.flops for g in row.gradients if g.runs(self.trained)) for row in self.rows
        )
        return forward, backward


def explain(billed: Billed, counted: CountedStep, model: nn.Module) -> str | None:
    """Say why what PyTorch counted for a module differs from what its ledger bills.

    Returns:
        The reason; "" where the two are equal, None where no reason predicts what was counted.
    """
    module, ledger = billed.module, billed.flops
    seen = (counted.forward[module], counted.backward[module])
    if seen == ledger:
        return "rotary angles: an outer product without parameters is no model FLOP" if counted.outer[module] else ""
    if seen == (ledger[0] + counted.too_much[module, False], ledger[1] + counted.too_much[module, True]):
        return (
            "a causal convolution's padding is no token's, and PyTorch takes a grouped one's backward for a dense one's"
        )
    if module.endswith(RECURRENCE):
        return _recurrence(ledger, seen)
    if module in counted.fused and seen == (0, 0):
        return f"PyTorch's counter has no formula for {counted.fused[module]}"
    if any(row.op == "experts" for row in billed.rows):
        home = model.get_submodule(module)
        return _every_expert(billed, seen, home) or _experts(billed, counted.of_expert[module], seen, model)
    return _padded(billed, seen, model) or _squares(billed, counted, seen)


def _recurrence(ledger: tuple[int, int], seen: tuple[int, int]) -> str | None:
    """Compare a recurrence with the form that the ledger bills, whose products `recurrences.recur` derives.

    Forward, half of a state-space model's FLOPs write the state and half read it; a loop that writes elementwise shows
    the reads alone, and those of its backward that its reads need. Chunks read and write the state as often and
    multiply inside each chunk too, so they run no less.
    """
    if seen == (0, 0):
        return (
            "a recurrence is counted in its recurrent form; it ran in elementwise products, of which PyTorch counts "
            "none: held against nothing"
        )
    half = ledger[0] // 2
    if 2 * seen[0] == ledger[0] and seen[1] in (0, half, 2 * half) and seen[1] <= ledger[1]:
        return "a recurrence is counted in its recurrent form; its loop writes the state elementwise and reads it here"
    if seen[0] >= ledger[0] > 0 and seen[1] >= ledger[1]:
        return (
            "a recurrence is counted in its recurrent form; it ran in chunks, which is more: held as a lower bound only"
        )
    return None


def _every_expert(billed: Billed, seen: tuple[int, int], home: nn.Module) -> str | None:
    """Compare a stack of experts that all ran on every token with the few of them that a token is routed to."""
    stacks = [p for p in home.parameters(recurse=False) if p.dim() == 3]
    every, meant = 2 * sum(p.numel() for p in stacks), sum(row.forward for row in billed.rows)
    if not stacks or any(mine * every != theirs * meant for mine, theirs in zip(billed.flops, seen, strict=True)):
        return None
    return (
        f"code runs all {stacks[0].shape[0]} experts on every token, most of them on zeros: only those that the router "
        "chose are counted"
    )


def _experts(billed: Billed, of_expert: dict[str, int], seen: tuple[int, int], model: nn.Module) -> str | None:
    """Compare experts of a list by their rows: each expert costs 2 FLOPs a row and weight."""
    ledger, home = billed.flops, model.get_submodule(billed.module)
    experts = members(billed.module, home)
    weights = {sum(p.numel() for p in expert.parameters() if p.dim() > 1) for expert in experts.values()}
    if len(weights) != 1 or seen[1] * ledger[0] != ledger[1] * seen[0]:
        return None
    per_row = 2 * weights.pop()
    rows = {path: flops // per_row for path, flops in of_expert.items()}
    meant, run = ledger[0] // per_row, sum(rows.values())
    if run * per_row != seen[0]:
        return None
    tokens = {drivers.parse(row.driver)(billed.workload) for row in billed.rows}
    if {run} == {n * len(experts) for n in tokens} and (
        reason := unchosen_rows(home, len(experts), meant * len(experts) // run)
    ):
        return reason
    beside = model.get_submodule(billed.module.rpartition(".")[0])
    limits = {m.expert_capacity for m in beside.modules() if isinstance(getattr(m, "expert_capacity", None), int)}
    if run < meant and limits == {max(rows.values(), default=0)}:
        return f"experts take {limits.pop():,} rows at most: the router dropped {meant - run:,} of {meant:,}"
    return None


FILLED_UP = "an encoder fills up the last piece of a clip, and those frames are no clip's"


def filled_up(workload: Workload, driver: str) -> Workload:
    """Return the workload whose clips are rounded up to whole pieces, as an encoder that cuts them into pieces runs it.

    Args:
        workload: with clips or sources.
        driver: of a row, such as `audio/2:1:200` for pieces of 200 frames.
    """
    steps = driver.partition("/")[2].split(":")
    piece = int(steps[2]) if steps[2:] else 1
    sources, audio = (-(-lengths // piece) * piece for lengths in (workload.sources, workload.audio))
    return Workload(workload.segments, sources=sources, audio=audio)


def _padded(billed: Billed, seen: tuple[int, int], model: nn.Module) -> str | None:
    """Compare code that computes padding, or blocks beyond what each position sees."""
    if any(row.op == "convolution" for row in billed.rows):
        filled = filled_up(billed.workload, billed.rows[0].driver)
        if seen == billed.on(lambda driver: drivers.parse(driver)(filled)):
            return FILLED_UP
    for path, padding in paddings(model, billed.workload):
        if inside(billed.module, [path]) and seen == billed.on(padding.units):
            return padding.reason
    return None


def _squares(billed: Billed, counted: CountedStep, seen: tuple[int, int]) -> str | None:
    """Compare eager attention, which computes whole squares of scores, with the pairs that the mask allows."""
    of_driver: dict[str, tuple[int, int]] = {}  # per score; by hand, scores and values have a row each
    workload = billed.workload
    for row in billed.rows:
        shown = drivers.tower(row.driver) == "language" or row.driver == "patch_pairs:frame"
        if row.op == "attention" and (shown or _all_pairs(row.driver)):
            ahead, back = of_driver.get(row.driver, (0, 0))
            needed = sum(g.flops for g in row.gradients if g.runs(billed.trained))
            of_driver[row.driver] = (ahead + row.forward, back + needed)
    if len(set(of_driver.values())) != 1:
        return None
    per_score, per_score_back = next(iter(of_driver.values()))
    allowed, run = billed.flops[0] // per_score, seen[0] // per_score
    if run < allowed or seen != (run * per_score, run * per_score_back):
        return None
    # one text's queries over all keys, its own and compressed ones beside them; all pictures in a row; all of a clip
    whole = workload.num_segments == 1 and run % workload.tokens == 0
    heard = {drivers.parse(_all_pairs(driver))(workload) for driver in of_driver if _all_pairs(driver)}
    if not (whole or run == workload.patches**2 or run in heard):
        return None
    why = f"eager attention runs all {run:,} scores, the mask allows {allowed:,}"
    if not counted.softmaxes[billed.module]:
        return f"{why} by the ledger; no softmax shows them, so that is held as an upper bound only"
    return why if allowed in _unmasked_scores(counted.softmaxes[billed.module], run) else None


def _unmasked_scores(softmaxes: list[tuple[int, int, int]], run: int) -> Iterator[int]:
    """Count the scores of a head that the real mask left visible, from the softmaxes that a module ran.

    A softmax is its places, those that no mask had hidden, and places for each query; a head has `run` scores. Two
    counts are tried: each head has its scores alone, or each query has one place more, a learnt sink.
    """
    places, shown = (sum(numbers[i] for numbers in softmaxes) for i in (0, 1))
    for sinks in (0, sum(number // width for number, _, width in softmaxes)):
        heads, rest = divmod(places - sinks, run)
        if heads and not rest and (shown - sinks) % heads == 0:
            yield (shown - sinks) // heads


def _all_pairs(driver: str) -> str:
    """Name the driver of all pairs of a clip or source for a driver that counts some of them; "" for other drivers.

    `audio_pairs:block:10/2` gives `audio_pairs:full/2`, `pairs:causal` gives "".
    """
    pairs, slash, steps = driver.partition("/")
    kind = pairs.partition(":")[0]
    return f"{kind}:full{slash}{steps}" if kind in ("audio_pairs", "source_pairs") else ""
