"""Proof from a run's records that an interruption lost or repeated no samples, and the steps without a witness.

Each step's record has a digest of its samples (`samples_digest`), which is a sum, so digests of steps add up. A record
alone proves nothing; its witnesses were written by others. Each checkpoint carries, handed on from process to process,
a chain over the steps behind it in their order, and the feed's own counts of what it handed out. Steps that were lost
and taken again are in resumes.jsonl as they were the first time. And there may be a run of the same data to compare
with.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headway.errors import LogError
from headway.files import open_plain
from headway.log.records import RecordReader
from headway.log.run_files import CONFIG, METRICS
from headway.log.sink import flatten
from headway.report import format_count, render_pairs

SCHEMA_VERSION = 2
CHAINED = ("step", "samples_digest", "packs", "tokens", "segments")
"""Fields of a step's record that a checkpoint's chain is made of."""

_MOST_NAMED = 3  # settings that differ between two runs
_DIGEST = re.compile("[0-9a-f]{16}")
_NEVER_PROVED = (
    "losses, gradient norms, learning rates, times, FLOPs and rates of the records, because no other file holds "
    "these numbers",
    "contents of samples, because a digest covers only their files, rows and lengths (see data.verify)",
    "weights, optimizer states and generators in checkpoints, because a resume compares these files with the manifest",
)
_CHOOSE_NO_SAMPLES = ("data/eval", "data/workers", "data/prefetch_bytes", "data/verify")
Ranges = tuple[tuple[int, int], ...]


def chained(before: str, record: Mapping[str, Any]) -> str:
    """Add a step's record to a chain, whose digest depends on every step's fields and on their order.

    Args:
        before: digest of the chain so far; "" before the first step.
        record: of the step.

    Returns:
        BLAKE2b of the digest before and the fields `CHAINED`.
    """
    fields = [record.get(name) for name in CHAINED]
    return hashlib.blake2b(json.dumps([before, *fields]).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of checking a run's records for lost and repeated samples.

    Attributes:
        steps: steps recorded, from the first on, each once [steps].
        resumes: times that the run went on from a checkpoint, or from its start.
        redone: steps that had been taken and were lost, compared with what was recorded the first time [steps].
        unwitnessed: steps after which the run went on, of which nothing tells whether the next was the right one: no
            later step had been recorded, or none that can be compared.
        regrouped: lost steps that were taken again with another number of packs, and cannot be compared [steps].
        checkpoints: checkpoints whose chain and counts were compared with the steps up to them.
        others: steps compared with another run; None without one [steps].
        incomparable: why that run's steps hold other samples, whatever happened to either; empty where they do not.
        proved: first and last of each stretch of steps on whose samples a witness agrees; none where there is a fault.
        in_order: those of them whose order, packs, tokens and segments are proved step by step.
        faults: what does not agree, a sentence each.
    """

    steps: int
    resumes: int = 0
    redone: int = 0
    unwitnessed: tuple[int, ...] = ()
    regrouped: int = 0
    checkpoints: int = 0
    others: int | None = None
    incomparable: str = ""
    proved: Ranges = ()
    in_order: Ranges = ()
    faults: tuple[str, ...] = ()

    @property
    def without_witness(self) -> Ranges:
        """Stretches of steps that no witness speaks of, or all where something disagrees."""
        return _complement(self.proved, self.steps)

    @property
    def unproved(self) -> tuple[str, ...]:
        """All that the records claim and nothing proves, a clause each."""
        clauses = []
        if self.without_witness:
            clauses.append(f"samples of {_named(self.without_witness)}")
        if unordered := _complement(self.in_order, self.steps):
            clauses.append(f"order, packs, tokens and segments of {_named(unordered)}, one by one")
        if self.unwitnessed:
            places = ", ".join(map(format_count, self.unwitnessed))
            clauses.append(
                f"that the run went on at the right place after step {places}, because there is no later step to "
                "compare"
            )
        if self.incomparable:
            clauses.append(f"that both runs took the same samples: {self.incomparable}")
        return (*clauses, *_NEVER_PROVED)

    @property
    def verdict(self) -> str:
        """Verdict of the witnesses on the samples, in one sentence."""
        if self.faults:
            return "something was lost or repeated, or a record was changed"
        if not self.proved:
            return "nothing is proved, because no step has a witness"
        return f"nothing was lost or repeated in {_named(self.proved)}"

    def to_dict(self) -> dict[str, Any]:
        """One JSON-ready object."""
        derived = {"without_witness": self.without_witness, "unproved": self.unproved, "verdict": self.verdict}
        return {"schema_version": SCHEMA_VERSION, **vars(self), **derived}

    def as_table(self) -> str:
        """Names and values for people."""
        witnessed = format_count(self.resumes - len(self.unwitnessed))
        pairs = [
            ("steps", f"{format_count(self.steps)}, each recorded once"),
            ("checkpoints", f"{format_count(self.checkpoints)} compared with the steps up to them"),
            ("restarts", f"{format_count(self.resumes)}, {witnessed} of them with a witness"),
            ("steps taken again", f"{format_count(self.redone)} compared with the first time"),
        ]
        if self.regrouped:
            pairs.append(("not comparable", f"{format_count(self.regrouped)} steps taken again with other packs"))
        if self.others is not None:
            pairs.append(("the other run", f"{format_count(self.others)} steps compared"))
        pairs += [("not proved", clause) for clause in self.unproved]
        return render_pairs([*pairs, ("samples", self.verdict)])


@dataclass
class _Witnesses:
    """Comparisons so far."""

    faults: list[str] = field(default_factory=list)
    last: int = 0  # step of the last checkpoint that agrees
    resumes: int = 0  # resumes by the checkpoints' own count
    checkpoints: int = 0


class _Steps:
    """The records of steps 1, 2, 3 ... of a run, as far as samples go."""

    def __init__(self, folder: Path) -> None:
        path = folder / METRICS
        self.digests, self.packs = array("Q"), array("Q")
        self.chain = [""]  # after each step, and before the first
        self.totals = {"tokens": [0], "segments": [0]}  # up to each step
        self.compares = False  # whether the objective makes several segments of a sample
        for record in _lines(path):
            if record.get("kind") != "step":
                continue
            expected = len(self.digests) + 1
            step = record.get("step")
            if "samples_digest" not in record:
                raise LogError(
                    f"{path} has no samples_digest in step {step}, because only `headway train` writes one. Give the "
                    "folder of such a run."
                )
            if step != expected:
                raise LogError(
                    f"{path} has a record of step {step} where that of step {expected} belongs. A step was lost or "
                    "repeated, or the file was edited."
                )
            self.digests.append(_digest(record["samples_digest"]))
            self.packs.append(record["packs"])
            self.chain.append(chained(self.chain[-1], record))
            for name, totals in self.totals.items():
                totals.append(totals[-1] + record[name])
            self.compares = self.compares or "objective" in record

    def __len__(self) -> int:
        return len(self.digests)


def check_run(folder: Path, other: Path | None = None) -> Check:
    """Compare a run's records with the files of earlier processes and checkpoints.

    Args:
        folder: of the run.
        other: folder of a run with the same data and packs, such as one that was never interrupted.

    Raises:
        LogError: the records cannot be read, or a step's is missing, doubled or without a digest.
    """
    try:
        return _compare(folder, other)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, OSError, RecursionError) as error:
        raise LogError(f"{folder} holds records that headway train did not write: {error!r}.") from error


def _compare(folder: Path, other: Path | None) -> Check:
    steps, witnesses = _Steps(folder), _Witnesses()
    for path in sorted((folder / "checkpoints").glob("step-*/position.json")):
        step = int(path.parent.name.removeprefix("step-"))
        _compare_checkpoint(json.loads(path.read_text(encoding="utf-8")), step, steps, witnesses)

    # Steps that were lost, as they were the first time.
    resumes, regrouped, redone = 0, 0, set[int]()
    unwitnessed: list[int] = []
    for resume in _lines(folder / "resumes.jsonl") if (folder / "resumes.jsonl").exists() else ():
        resumes += 1
        compared = 0
        for lost in resume["lost"]:
            step = lost["step"]
            if step > len(steps) or lost["samples_digest"] is None:
                continue  # the step is not taken again yet
            if lost["packs"] != steps.packs[step - 1]:
                regrouped += 1
                continue
            compared += 1
            redone.add(step)
            if _digest(lost["samples_digest"]) != steps.digests[step - 1]:
                witnesses.faults.append(
                    f"after going on from step {resume['step']}, step {step} had other samples than before"
                )
        if not compared:
            unwitnessed.append(int(resume["step"]))
    incomparable = "" if other is None else _other_packs(folder, steps, other)
    others, differing = _compare_runs(steps, None if incomparable else other)
    witnesses.faults += differing
    _compare_restarts(folder, resumes, witnesses)

    # All steps with a witness are proved, unless something disagrees.
    ordered = (1, witnesses.last)
    witnessed = [ordered, *((step, step) for step in redone), (1, others or 0)]
    return Check(
        steps=len(steps),
        resumes=resumes,
        redone=len(redone),
        unwitnessed=tuple(step for step in unwitnessed if (others or 0) <= step),
        regrouped=regrouped,
        checkpoints=witnesses.checkpoints,
        others=others,
        incomparable=incomparable,
        proved=() if witnesses.faults else _joined(witnessed),
        in_order=() if witnesses.faults else _joined([ordered]),
        faults=tuple(witnesses.faults),
    )


def _compare_checkpoint(saved: dict[str, Any], step: int, steps: _Steps, witnesses: _Witnesses) -> None:
    witnesses.resumes = max(witnesses.resumes, int(saved.get("resumes", 0)))
    if (chain := saved.get("samples_chain")) is None:
        return
    witnesses.checkpoints += 1
    if step > len(steps):
        witnesses.faults.append(f"there is a checkpoint of step {step}, but the records end at step {len(steps)}")
        return
    faults = []
    if chain != steps.chain[step]:
        faults.append(
            f"the checkpoint of step {step} followed other samples, packs, tokens or segments than the records, or the "
            "same in another order"
        )
    # The feed's own counts must be the records' totals.
    for name, count in _feed_counts(saved["report"]).items():
        recorded = steps.totals[name][step]
        if count != recorded and not (name == "segments" and steps.compares):
            faults.append(
                f"by the checkpoint of step {step} the feed had handed out {format_count(count)} {name}, but the "
                f"records have {format_count(recorded)}"
            )
    if not faults:
        witnesses.last = max(witnesses.last, step)
    witnesses.faults += faults


def _feed_counts(report: Mapping[str, Any]) -> dict[str, int]:
    """Tokens and segments that a feed handed out, by its own count; segments where no sample was cut into several."""
    counts = {"tokens": int(report["tokens"])}
    sources = report["samples"].values()
    if not any(source["split"]["samples"] for source in sources):
        counts["segments"] = sum(source["used"]["samples"] for source in sources)
    return counts


def _compare_runs(steps: _Steps, other: Path | None) -> tuple[int | None, list[str]]:
    """Steps that two runs share, and their differences."""
    if other is None:
        return None, []
    theirs = _Steps(other)
    both = min(len(steps), len(theirs))
    differing = [n for n in range(both) if steps.digests[n] != theirs.digests[n]]
    if not differing:
        return both, []
    return both, [f"{len(differing)} steps, the first of them step {differing[0] + 1}, differ from {other}"]


def _other_packs(folder: Path, steps: _Steps, other: Path) -> str:
    """Name the reason why two runs' steps hold other samples: the number of packs, or a setting of the data."""
    theirs = _Steps(other)
    if steps.packs[:1] != theirs.packs[:1]:
        return f"a step has {sum(steps.packs[:1])} packs in {folder}, and {sum(theirs.packs[:1])} in {other}"
    ours, those = (_data_settings(run) for run in (folder, other))
    names = [name for name in sorted(ours.keys() | those.keys()) if ours.get(name) != those.get(name)]
    clauses = [
        f"{name.replace('/', '.')} is {ours.get(name)!r} in {folder}, and {those.get(name)!r} in {other}"
        for name in names[:_MOST_NAMED]
    ]
    return "; ".join(clauses)


def _data_settings(folder: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    settings = flatten({"step": 0, "data": raw["data"]}) if isinstance(raw, dict) and "data" in raw else {}
    return {name: value for name, value in settings.items() if not name.startswith(_CHOOSE_NO_SAMPLES)}


def _compare_restarts(folder: Path, resumes: int, witnesses: _Witnesses) -> None:
    """Compare the restarts in resumes.jsonl with the counts of checkpoints and of the ledger of seconds."""
    ledger = folder / "goodput.jsonl"
    counted = sum(line.get("kind") == "resumed" for line in _lines(ledger)) if ledger.exists() else 0
    for where, count in (("a checkpoint", witnesses.resumes), (ledger.name, counted)):
        if count > resumes:
            witnesses.faults.append(f"{where} counts {count} restarts, and resumes.jsonl tells of {resumes}")


def _digest(text: object) -> int:
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise ValueError(f"{text!r} is no digest of 16 hexadecimal digits")
    return int(text, 16)


def _joined(ranges: list[tuple[int, int]]) -> Ranges:
    """Ranges of steps joined where they touch, without empty ones."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(stretch for stretch in ranges if stretch[0] <= stretch[1]):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return tuple(joined)


def _complement(ranges: Ranges, steps: int) -> Ranges:
    """Steps from the first to the last that no range holds."""
    ends = [0, *(last for _, last in ranges)]
    starts = [*(first for first, _ in ranges), steps + 1]
    return tuple((last + 1, first - 1) for last, first in zip(ends, starts, strict=True) if last + 1 < first)


def _named(ranges: Ranges) -> str:
    """Ranges in words.

    >>> _named(((1, 20), (23, 23)))
    'steps 1 to 20, 23'
    """
    words = [
        format_count(first) if first == last else f"{format_count(first)} to {format_count(last)}"
        for first, last in ranges
    ]
    return f"step{'' if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else 's'} {', '.join(words)}"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a file's records but for a last line without a line break, which a kill tore or which is being written."""
    number, reader = 0, RecordReader()
    try:
        with open_plain(path) as file:
            for line in file:
                number += 1
                if not line.endswith(b"\n"):
                    return
                record = reader.read(line)
                if record is None:
                    raise ValueError("an object was expected")
                yield record
    except OSError as error:
        raise LogError(
            f"{path} cannot be read: {error.strerror}. Give the folder of a run of headway train."
        ) from error
    except (ValueError, RecursionError) as error:
        raise LogError(f"{path}, line {number} is no record: {error}.") from error
