"""Text of `headway tune`: the best choices, the worth of more memory, the next choice's obstacles, runs measured."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from headway.cli.plan_text import LABELS, other_packs_text, overlong_text
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

    from headway.cli.plan_data import RunLength
    from headway.devices import Device
    from headway.predict.prediction import OtherPacks, Prediction
    from headway.predict.tune import SearchResult, Trial

T = TypeVar("T")
_GIB, _MIB = 2**30, 2**20
_SMALL = 8 * _GIB  # limits below it are told in MiB
_LEAST_GAIN = 0.01  # in speed, by which a line of the table of memory and speed exceeds the one before


@dataclass(frozen=True)
class TuneReport:
    """A search with its settings, and the runs measured afterwards."""

    recipe: str
    model: str
    device: "Device | None"
    devices: int
    lengths: str
    step_tokens: int
    tolerance: float
    peak_flops_per_s: float | None  # peak of one device in the dtype of the products; None if the device was measured
    source: str  # origin of the device's speeds
    result: "SearchResult"
    best: "Sequence[Prediction]"
    shorter: "OtherPacks | None"  # in packs that leave out samples
    front: "Sequence[Prediction]"
    trials: "Mapping[Prediction, Trial]"
    again: "Sequence[tuple[Prediction, float, Trial | None]]"  # ranked after measuring
    notes: tuple[str, ...]
    run: "RunLength | None" = None  # length of a whole run, whose time is asked for

    def run_s(self, candidate: "Prediction") -> float | None:
        """Expected time of the whole run by a choice [s]; None if the length of the run is unknown."""
        tokens = None if self.run is None else self.run.total(candidate.work, 0)
        return None if tokens is None else candidate.totals(tokens).seconds.expected

    def mfu(self, flops_per_s: float) -> float | None:
        """Share of the devices' peak; None if the peak is unknown."""
        return None if self.peak_flops_per_s is None else flops_per_s / self.devices / self.peak_flops_per_s

    @property
    def next_better(self) -> "Prediction | None":
        """The choice that needs the least memory of all choices that are faster than the best and do not fit."""
        best = self.best[0]
        faster = [
            candidate
            for candidate in self.result.candidates
            if not self.result.fits(candidate) and candidate.flops_per_s > 1.001 * best.flops_per_s
        ]
        return min(faster, key=lambda candidate: candidate.memory.peak, default=None)


def to_dict(tuned: TuneReport) -> dict[str, Any]:
    """Everything as plain JSON types; sizes in bytes, times in seconds, rates in FLOP/s, shares as fractions."""
    result, further = tuned.result, tuned.next_better
    return {
        "recipe": tuned.recipe,
        "model": tuned.model,
        "device": None if tuned.device is None else tuned.device.title,
        "devices": tuned.devices,
        "lengths": tuned.lengths,
        "step_tokens": tuned.step_tokens,
        "tolerance": tuned.tolerance,
        "room_bytes": result.room_bytes,
        "tried": result.tried,
        "timed": len(result.candidates),
        "fitting": result.fitting,
        "packings": result.packings,
        "seconds": result.seconds,
        "as_it_is": _candidate_record(tuned, result.own),
        "best": [_candidate_record(tuned, candidate) for candidate in tuned.best],
        "shorter": None if tuned.shorter is None else tuned.shorter.to_dict(),
        "front": [_candidate_record(tuned, candidate) for candidate in tuned.front],
        "next": None if further is None else _candidate_record(tuned, further) | {"more": _more(tuned, further)},
        "measured": [
            {**_candidate_record(tuned, candidate), "seen": vars(trial) | {"mfu": tuned.mfu(trial.flops_per_s or 0.0)}}
            for candidate, trial in tuned.trials.items()
        ],
        "ranked_again": [
            {"settings": dict(candidate.changes), "flops_per_s": rate, "was_measured": trial is not None}
            for candidate, rate, trial in tuned.again[: len(tuned.best)]
        ],
        "notes": list(tuned.notes),
    }


def _candidate_record(tuned: TuneReport, candidate: "Prediction") -> dict[str, Any]:
    return {
        "settings": dict(candidate.changes),
        "mesh": vars(candidate.shape),
        "tokens_per_pack": candidate.config.data.tokens_per_pack,
        "patches_per_pack": candidate.config.data.patches_per_pack,
        "accumulation": candidate.config.optim.accumulation,
        "step_tokens": candidate.step_tokens,
        "fill": candidate.work.report.fill,
        "balance": candidate.work.report.balance,
        "padding_as_batches": candidate.work.report.padding_loss,
        "memory": candidate.memory.to_dict(),
        "fits": tuned.result.fits(candidate),
        "step_s": candidate.step_s,
        "flops_per_s": candidate.flops_per_s,
        "mfu": tuned.mfu(candidate.flops_per_s),
        "tokens_per_s": candidate.step_tokens / candidate.step_s,
        "run_s": tuned.run_s(candidate),
    }


def _more(tuned: TuneReport, further: "Prediction") -> dict[str, int]:
    """Bytes by which the parts of a choice's memory exceed the parts of the best choice, the largest first."""
    mine, theirs = tuned.best[0].memory.fullest.parts, further.memory.fullest.parts
    more = {name: more for name, size in theirs.items() if (more := size - mine.get(name, 0)) > 0}
    return dict(sorted(more.items(), key=lambda item: -item[1]))


def as_text(tuned: TuneReport) -> str:
    """The search as a person reads it."""
    sections = [render_pairs(_head(tuned)), _best_table(tuned), _settings_table(tuned.best)]
    sections += [] if tuned.shorter is None else [other_packs_text(tuned.shorter)]
    sections += [_front_table(tuned)] if tuned.result.room_bytes is not None else []
    sections.append(render_lines([_what_is_next(tuned)]))
    if tuned.trials:
        sections += [_seen_table(tuned), render_lines([_said_after(tuned)])]
    return "\n\n".join([*sections, render_lines(list(tuned.notes))])


def _head(tuned: TuneReport) -> list[tuple[str, str]]:
    result, device = tuned.result, tuned.device
    room = "none" if result.room_bytes is None else f"{format_bytes(result.room_bytes)} on each device"
    total = None if device is None else device.total_memory_bytes
    if total is not None and result.room_bytes is not None:
        room += f", {format_share(result.room_bytes / total)} of {format_bytes(total)}"
    return [
        ("recipe", f"{tuned.recipe}  (cost model of {tuned.model})"),
        ("devices", f"{tuned.devices:,} x {device.title if device else 'this machine'}"),
        ("limit", room),
        ("speeds", tuned.source),
        ("lengths", tuned.lengths),
        ("step", f"{tuned.step_tokens:,} tokens +-{100 * tuned.tolerance:g} %"),
        ("tried", f"{result.tried:,} choices in {format_duration(result.seconds)}, of which {result.fitting:,} fit"),
        *([] if tuned.run is None else [("run", _run_text(tuned))]),
    ]


def _run_text(tuned: TuneReport) -> str:
    """Time of the whole run by the best choice, and by the recipe as it is."""
    best, own = (tuned.run_s(candidate) for candidate in (tuned.best[0], tuned.result.own))
    assert tuned.run is not None
    assert best is not None
    assert own is not None
    samples, tokens = tuned.run.samples, tuned.run.tokens
    size = f"{format_count(samples)} samples" if samples else f"{format_count(round(tokens or 0))} tokens"
    return f"{size} take {format_duration(best)} by choice 1, {format_duration(own)} by the recipe as it is"


def _cells(tuned: TuneReport, candidate: "Prediction") -> list[str]:
    mfu = tuned.mfu(candidate.flops_per_s)
    return [
        f"{candidate.config.data.tokens_per_pack:,}",
        f"{candidate.config.optim.accumulation}",
        f"{candidate.work.report.balance:.3f}",
        candidate.config.speed.recompute,
        _mesh(candidate),
        format_bytes(candidate.memory.peak),
        format_duration(candidate.step_s),
        format_rate(candidate.flops_per_s) if mfu is None else format_share(mfu),
    ]


def _mesh(candidate: "Prediction") -> str:
    shape = candidate.shape
    return f"{shape.replicate}x{shape.shard}x{shape.sequence}" + (f" e{shape.expert}" if shape.expert > 1 else "")


def _columns(tuned: TuneReport) -> list[Column]:
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


def _best_table(tuned: TuneReport) -> str:
    rows = [[str(number), *_cells(tuned, candidate)] for number, candidate in enumerate(tuned.best, start=1)]
    return render_table(
        [Column("", "left"), *_columns(tuned)], rows, footer=["as is", *_cells(tuned, tuned.result.own)]
    )


def _settings_table(best: "Sequence[Prediction]") -> str:
    changes = [" ".join(candidate.settings) or "the recipe as it is" for candidate in best]
    rows = [[str(number), text] for number, text in enumerate(changes, start=1)]
    return render_table([Column("", "left"), Column("settings", "left")], rows)


def _front_table(tuned: TuneReport) -> str:
    """The choices that no other choice beats in both memory and speed, and the gain of a GiB from one to the next."""
    shown: list[Prediction] = []
    for candidate in tuned.front:
        last = candidate is tuned.front[-1]
        if not shown or last or candidate.flops_per_s > (1 + _LEAST_GAIN) * shown[-1].flops_per_s:
            shown.append(candidate)
    room = tuned.result.room_bytes
    unit, name = (_MIB, "MiB") if room is not None and room < _SMALL else (_GIB, "GiB")
    rows = []
    for before, candidate in zip([None, *shown], shown, strict=False):
        more = 0.0 if before is None else (candidate.memory.peak - before.memory.peak) / unit
        gain = "-"
        if before is not None and more > 0:
            gain = f"+{100 * (candidate.flops_per_s / before.flops_per_s - 1) / more:.2f} %"
        memory, speed, *settings = _on_front(_cells(tuned, candidate))
        rows.append([memory, speed, gain, *settings, "" if tuned.result.fits(candidate) else "beyond"])
    of_memory, of_speed, *others = _on_front(_columns(tuned))
    headings = [of_memory, of_speed, Column(f"gain per {name}"), *others]
    if any(row[-1] for row in rows):
        return render_table([*headings, Column("", "left")], rows)
    return render_table(headings, [row[:-1] for row in rows])


def _on_front(cells: "Sequence[T]") -> "list[T]":
    """Cells of a choice in the order of the table of memory and speed."""
    pack, packs, _, recompute, mesh, memory, _, speed = cells
    return [memory, speed, pack, packs, recompute, mesh]


def _what_is_next(tuned: TuneReport) -> str:
    further, room = tuned.next_better, tuned.result.room_bytes
    if room is None:
        return "Every choice fits, because no limit is set. Give --memory or --device to see the gain of more memory."
    if further is None:
        return "More memory would gain nothing: no choice within 125 % of the limit is faster than choice 1."
    gain = further.flops_per_s / tuned.best[0].flops_per_s - 1
    more = [
        f"+{format_bytes(size)} of {LABELS.get(name, name)}" for name, size in list(_more(tuned, further).items())[:2]
    ]
    return (
        f"The next faster choice does not fit. Packs of {further.config.data.tokens_per_pack:,} x "
        f"{further.config.optim.accumulation}, recompute {further.config.speed.recompute}, mesh {_mesh(further)} are "
        f"{format_share(gain)} faster. They take {format_bytes(further.memory.peak)}, "
        f"{format_bytes(further.memory.peak - room)} more than the limit. Compared with choice 1: "
        f"{', '.join(more) or 'no part alone is larger'}."
    )


def _seen_table(tuned: TuneReport) -> str:
    rows = []
    for number, (candidate, trial) in enumerate(tuned.trials.items(), start=1):
        measured = "-" if trial.step_s is None else format_duration(trial.step_s)
        ratio = "-" if trial.step_s is None else f"{trial.step_s / candidate.step_s:.2f}"
        result = trial.outcome if not trial.reason else f"{trial.outcome}: {trial.reason}"
        rows.append([str(number), format_duration(candidate.step_s), measured, ratio, result])
    columns = [Column("", "left"), Column("predicted"), Column("measured"), Column("ratio"), Column("result", "left")]
    return render_table(columns, rows)


def _said_after(tuned: TuneReport) -> str:
    if not any(trial.outcome == "measured" for trial in tuned.trials.values()):
        return "Headway could measure none of the choices, so the table above shows predictions."
    candidate, rate, trial = tuned.again[0]
    number = list(tuned.trials).index(candidate) + 1 if candidate in tuned.trials else None
    which = f"choice {number}" if number else f"a choice that was not measured ({' '.join(candidate.settings)})"
    how = "measured" if trial is not None else "predicted, corrected by the measured choices"
    return f"After the measurement, the fastest is {which}: {format_rate(rate)} ({how})."


def note_on_tokens(candidate: "Prediction") -> str:
    """Name the fate of samples that are longer than a pack of the best choice."""
    left, samples = overlong_text(candidate.work), candidate.work.counts.read
    return f"The packs of choice 1 do not hold all {format_count(samples)} samples whole: {left}." if left else ""
