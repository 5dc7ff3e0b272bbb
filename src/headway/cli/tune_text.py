"""What `headway tune` prints: the best choices, what memory buys, what stands in the way of the next, runs measured."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from headway.cli.dry_run import LABELS
from headway.report import (
    Column,
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    format_share,
    render_lines,
    render_pairs,
    render_table,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headway.devices import Device
    from headway.predict.tune import Candidate, SearchResult, Trial

T = TypeVar("T")
_GIB, _MIB = 2**30, 2**20
_SMALL = 8 * _GIB  # limits below it are told in MiB
_LEAST_GAIN = 0.01  # in speed, by which a line of the table of memory and speed exceeds the one before


@dataclass(frozen=True)
class Tuned:
    """A search with what it was asked, and what was measured afterwards."""

    recipe: str
    model: str
    device: "Device | None"
    devices: int
    lengths: str
    step_tokens: int
    tolerance: float
    peak_flops_per_s: float | None  # of one device in the dtype of the products; None of one that was measured
    source: str  # of the device's speeds
    found: "SearchResult"
    best: "Sequence[Candidate]"
    front: "Sequence[Candidate]"
    seen: "Mapping[Candidate, Trial]"
    again: "Sequence[tuple[Candidate, float, Trial | None]]"  # ranked after measuring
    notes: tuple[str, ...]

    def mfu(self, flops_per_s: float) -> float | None:
        """Share of the devices' peak; None where that is not known."""
        return None if self.peak_flops_per_s is None else flops_per_s / self.devices / self.peak_flops_per_s

    @property
    def next_better(self) -> "Candidate | None":
        """Of the choices that are faster than the best and do not fit, the one that needs the least memory."""
        best = self.best[0]
        faster = [
            one
            for one in self.found.candidates
            if not self.found.fits(one) and one.flops_per_s > 1.001 * best.flops_per_s
        ]
        return min(faster, key=lambda one: one.memory.peak, default=None)


def to_dict(tuned: Tuned) -> dict[str, Any]:
    """Everything as plain JSON types; sizes in bytes, times in seconds, rates in FLOP/s, shares as fractions."""
    found, further = tuned.found, tuned.next_better
    return {
        "recipe": tuned.recipe,
        "model": tuned.model,
        "device": None if tuned.device is None else tuned.device.title,
        "devices": tuned.devices,
        "lengths": tuned.lengths,
        "step_tokens": tuned.step_tokens,
        "tolerance": tuned.tolerance,
        "room_bytes": found.room_bytes,
        "tried": found.tried,
        "timed": len(found.candidates),
        "fitting": found.fitting,
        "packings": found.packings,
        "seconds": found.seconds,
        "as_it_is": _candidate_record(tuned, found.own),
        "best": [_candidate_record(tuned, one) for one in tuned.best],
        "front": [_candidate_record(tuned, one) for one in tuned.front],
        "next": None if further is None else _candidate_record(tuned, further) | {"more": _more(tuned, further)},
        "measured": [
            {**_candidate_record(tuned, one), "seen": vars(seen) | {"mfu": tuned.mfu(seen.flops_per_s or 0.0)}}
            for one, seen in tuned.seen.items()
        ],
        "ranked_again": [
            {"settings": dict(one.changes), "flops_per_s": rate, "was_measured": seen is not None}
            for one, rate, seen in tuned.again[: len(tuned.best)]
        ],
        "notes": list(tuned.notes),
    }


def _candidate_record(tuned: Tuned, one: "Candidate") -> dict[str, Any]:
    return {
        "settings": dict(one.changes),
        "mesh": vars(one.shape),
        "tokens_per_pack": one.config.data.tokens_per_pack,
        "patches_per_pack": one.config.data.patches_per_pack,
        "accumulation": one.config.optim.accumulation,
        "step_tokens": one.step_tokens,
        "fill": one.packs.report.fill,
        "balance": one.packs.report.balance,
        "padding_as_batches": one.packs.report.padding_loss,
        "memory": one.memory.to_dict(),
        "fits": tuned.found.fits(one),
        "step_s": one.step_s,
        "flops_per_s": one.flops_per_s,
        "mfu": tuned.mfu(one.flops_per_s),
        "tokens_per_s": one.step_tokens / one.step_s,
    }


def _more(tuned: Tuned, further: "Candidate") -> dict[str, int]:
    """Bytes by which the parts of a choice's memory exceed those of the best, the largest first."""
    mine, theirs = tuned.best[0].memory.fullest.parts, further.memory.fullest.parts
    more = {name: more for name, size in theirs.items() if (more := size - mine.get(name, 0)) > 0}
    return dict(sorted(more.items(), key=lambda item: -item[1]))


def as_text(tuned: Tuned) -> str:
    """The search as a person reads it."""
    sections = [render_pairs(_head(tuned)), _best_table(tuned), _settings_table(tuned.best)]
    sections += [_front_table(tuned)] if tuned.found.room_bytes is not None else []
    sections.append(render_lines([_what_is_next(tuned)]))
    if tuned.seen:
        sections += [_seen_table(tuned), render_lines([_said_after(tuned)])]
    return "\n\n".join([*sections, render_lines(list(tuned.notes))])


def _head(tuned: Tuned) -> list[tuple[str, str]]:
    found, device = tuned.found, tuned.device
    room = "none" if found.room_bytes is None else f"{format_bytes(found.room_bytes)} on each device"
    if device is not None and device.memory_bytes is not None and found.room_bytes is not None:
        room += f", {format_share(found.room_bytes / device.memory_bytes)} of {format_bytes(device.memory_bytes)}"
    return [
        ("recipe", f"{tuned.recipe}  (ledger of {tuned.model})"),
        ("devices", f"{tuned.devices:,} x {device.title if device else 'this machine'}"),
        ("limit", room),
        ("speeds", tuned.source),
        ("lengths", tuned.lengths),
        ("step", f"{tuned.step_tokens:,} tokens +-{100 * tuned.tolerance:g} %"),
        (
            "tried",
            f"{found.tried:,} choices, {found.fitting:,} of them fit; {found.packings} packings planned; "
            f"{format_duration(found.seconds)}",
        ),
    ]


def _cells(tuned: Tuned, one: "Candidate") -> list[str]:
    mfu = tuned.mfu(one.flops_per_s)
    return [
        f"{one.config.data.tokens_per_pack:,}",
        f"{one.config.optim.accumulation}",
        f"{one.packs.report.balance:.3f}",
        one.config.speed.recompute,
        _mesh(one),
        format_bytes(one.memory.peak),
        format_duration(one.step_s),
        format_rate(one.flops_per_s) if mfu is None else format_share(mfu),
    ]


def _mesh(one: "Candidate") -> str:
    shape = one.shape
    return f"{shape.replicate}x{shape.shard}x{shape.sequence}" + (f" e{shape.expert}" if shape.expert > 1 else "")


def _columns(tuned: Tuned) -> list[Column]:
    rate = "useful" if tuned.peak_flops_per_s is None else "MFU"
    return [
        Column("pack"),
        Column("x"),
        Column("balance"),
        Column("recompute", "left"),
        Column("mesh", "left"),
        Column("memory"),
        Column("step"),
        Column(rate),
    ]


def _best_table(tuned: Tuned) -> str:
    rows = [[str(number), *_cells(tuned, one)] for number, one in enumerate(tuned.best, start=1)]
    return render_table([Column("", "left"), *_columns(tuned)], rows, footer=["as is", *_cells(tuned, tuned.found.own)])


def _settings_table(best: "Sequence[Candidate]") -> str:
    rows = [[str(number), " ".join(one.settings) or "the recipe as it is"] for number, one in enumerate(best, start=1)]
    return render_table([Column("", "left"), Column("what it changes", "left")], rows)


def _front_table(tuned: Tuned) -> str:
    """The choices that no other beats in both memory and speed, and what a GiB buys on the way from one to the next."""
    kept: list[Candidate] = []
    for one in tuned.front:
        last = one is tuned.front[-1]
        if not kept or last or one.flops_per_s > (1 + _LEAST_GAIN) * kept[-1].flops_per_s:
            kept.append(one)
    room = tuned.found.room_bytes
    unit, name = (_MIB, "MiB") if room is not None and room < _SMALL else (_GIB, "GiB")
    rows = []
    for before, one in zip([None, *kept], kept, strict=False):
        more = 0.0 if before is None else (one.memory.peak - before.memory.peak) / unit
        gain = "-"
        if before is not None and more > 0:
            gain = f"+{100 * (one.flops_per_s / before.flops_per_s - 1) / more:.2f} %"
        memory, speed, *settings = _on_front(_cells(tuned, one))
        rows.append([memory, speed, gain, *settings, "" if tuned.found.fits(one) else "beyond"])
    of_memory, of_speed, *others = _on_front(_columns(tuned))
    headings = [of_memory, of_speed, Column(f"a {name} buys"), *others]
    if any(row[-1] for row in rows):
        return render_table([*headings, Column("", "left")], rows)
    return render_table(headings, [row[:-1] for row in rows])


def _on_front(cells: "Sequence[T]") -> "list[T]":
    """Cells of a choice in the order of the table of memory and speed."""
    pack, packs, _, recompute, mesh, memory, _, speed = cells
    return [memory, speed, pack, packs, recompute, mesh]


def _what_is_next(tuned: Tuned) -> str:
    further, room = tuned.next_better, tuned.found.room_bytes
    if room is None:
        return "Without a limit nothing is out of reach; give --memory or --device for what memory buys."
    if further is None:
        return "More memory buys nothing here: no choice up to a quarter beyond the limit is faster than the best."
    gain = further.flops_per_s / tuned.best[0].flops_per_s - 1
    more = [
        f"+{format_bytes(size)} of {LABELS.get(name, name)}" for name, size in list(_more(tuned, further).items())[:2]
    ]
    return (
        f"The next faster choice does not fit: packs of {further.config.data.tokens_per_pack:,} x "
        f"{further.config.optim.accumulation}, recompute {further.config.speed.recompute}, mesh {_mesh(further)}, is "
        f"{format_share(gain)} faster and takes {format_bytes(further.memory.peak)}, "
        f"{format_bytes(further.memory.peak - room)} more than the limit ({', '.join(more) or 'no part alone'} beside "
        "the best)."
    )


def _seen_table(tuned: Tuned) -> str:
    rows = []
    for number, (one, seen) in enumerate(tuned.seen.items(), start=1):
        measured = "-" if seen.step_s is None else format_duration(seen.step_s)
        ratio = "-" if seen.step_s is None else f"{seen.step_s / one.step_s:.2f}"
        result = seen.outcome if not seen.reason else f"{seen.outcome}: {seen.reason}"
        rows.append([str(number), format_duration(one.step_s), measured, ratio, result])
    columns = [Column("", "left"), Column("predicted"), Column("measured"), Column("ratio"), Column("result", "left")]
    return render_table(columns, rows)


def _said_after(tuned: Tuned) -> str:
    if not any(seen.outcome == "measured" for seen in tuned.seen.values()):
        return "None of them could be measured, so the predictions stand as they are."
    one, rate, seen = tuned.again[0]
    number = list(tuned.seen).index(one) + 1 if one in tuned.seen else None
    which = f"choice {number}" if number else f"not measured: {' '.join(one.settings)}"
    how = "measured" if seen is not None else "predicted, times what was measured over predicted elsewhere"
    return f"The best by what was seen is {which}, {format_rate(rate)} ({how})."


def note_on_tokens(candidate: "Candidate") -> str:
    """Say what becomes of samples that are longer than a pack of the best choice."""
    counts = candidate.packs.counts
    left = [f"{n:,} {what}" for what in ("dropped", "truncated", "split") if (n := getattr(counts, what))]
    return f"Of {format_count(counts.read)} samples {', '.join(left)} in the packs of choice 1." if left else ""
