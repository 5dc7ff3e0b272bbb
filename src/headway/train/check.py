"""Whether a run lost or repeated samples when it was interrupted, told by its records alone.

Each step's record has a digest of its samples (`samples_digest`), which is a sum, so digests of steps add up. What the
records have to agree with was written by others: by the processes that took a step before it was lost, in
resumes.jsonl, and by the checkpoints, each of which carries the sum of all steps behind it from process to process.
"""

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import LogError
from headway.report import format_count, render_pairs

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Check:
    """Result of checking a run's records for lost and repeated samples.

    Attributes:
        steps: steps recorded, from the first on, each once [steps].
        resumes: times that the run went on from a checkpoint, or from its start.
        redone: steps that had been taken and were lost, compared with what was recorded the first time [steps].
        unwitnessed: resumes before which no later step had been recorded, so that there is nothing to compare.
        regrouped: lost steps that were taken again with another number of packs, and cannot be compared [steps].
        checkpoints: checkpoints whose sum was compared with that of the steps up to them.
        others: steps compared with another run; None without one [steps].
        faults: what does not agree, a sentence each.
    """

    steps: int
    resumes: int
    redone: int
    unwitnessed: int
    regrouped: int
    checkpoints: int
    others: int | None
    faults: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """One JSON-ready object."""
        return {"schema_version": SCHEMA_VERSION, **vars(self), "faults": list(self.faults)}

    def as_table(self) -> str:
        """Names and values for people."""
        pairs = [
            ("steps", f"{format_count(self.steps)}, each recorded once"),
            (
                "restarts",
                f"{format_count(self.resumes)}, {format_count(self.unwitnessed)} of them lost no recorded step",
            ),
            ("steps taken again", f"{format_count(self.redone)} compared with the first time"),
            ("checkpoints", f"{format_count(self.checkpoints)} compared with the steps before them"),
        ]
        if self.regrouped:
            pairs.append(("not comparable", f"{format_count(self.regrouped)} steps taken again with other packs"))
        if self.others is not None:
            pairs.append(("the other run", f"{format_count(self.others)} steps compared"))
        verdict = "something was lost or repeated" if self.faults else "nothing was lost or repeated"
        return render_pairs([*pairs, ("samples", verdict)])


class _Steps:
    """The digests and packs of steps 1, 2, 3 ... of a run."""

    def __init__(self, folder: Path) -> None:
        path = folder / "metrics.jsonl"
        self.digests, self.packs = array("Q"), array("Q")
        for record in _lines(path):
            if record.get("kind") != "step":
                continue
            expected = len(self.digests) + 1
            step = record.get("step")
            if step != expected:
                raise LogError(
                    f"{path} has a record of step {step} where that of step {expected} belongs: a step was lost or "
                    "repeated, or the file was edited."
                )
            if "samples_digest" not in record:
                raise LogError(f"{path} has no samples_digest in step {expected}; earlier versions wrote none.")
            self.digests.append(int(record["samples_digest"], 16))
            self.packs.append(record["packs"])

    def __len__(self) -> int:
        return len(self.digests)


def check_run(folder: Path, other: Path | None = None) -> Check:
    """Compare a run's records with the digests that earlier processes and checkpoints wrote.

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
    steps, faults = _Steps(folder), []
    resumes = redone = unwitnessed = regrouped = checkpoints = 0
    for resume in _lines(folder / "resumes.jsonl") if (folder / "resumes.jsonl").exists() else ():
        resumes += 1
        unwitnessed += not resume["lost"]
        for lost in resume["lost"]:
            step = lost["step"]
            if step > len(steps) or lost["samples_digest"] is None:
                continue  # not taken again yet
            if lost["packs"] != steps.packs[step - 1]:
                regrouped += 1
                continue
            redone += 1
            if int(lost["samples_digest"], 16) != steps.digests[step - 1]:
                faults.append(f"after going on from step {resume['step']}, step {step} had other samples than before")
    for path in sorted((folder / "checkpoints").glob("step-*/position.json")):
        step = int(path.parent.name.removeprefix("step-"))
        saved = json.loads(path.read_text(encoding="utf-8")).get("samples_digest")
        if saved is None:
            continue
        checkpoints += 1
        if step > len(steps):
            faults.append(f"there is a checkpoint of step {step}, and the records end at step {len(steps)}")
        elif int(saved, 16) != sum(steps.digests[:step]) % 2**64:
            faults.append(f"the checkpoint of step {step} had other samples behind it than the records")
    others = None
    if other is not None:
        theirs = _Steps(other)
        others = min(len(steps), len(theirs))
        differing = [n for n in range(others) if steps.digests[n] != theirs.digests[n]]
        if differing:
            faults.append(f"{len(differing)} steps, the first of them step {differing[0] + 1}, differ from {other}")
    return Check(len(steps), resumes, redone, unwitnessed, regrouped, checkpoints, others, tuple(faults))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a file's records but for a last line without a line break, which a kill tore or which is being written."""
    number = 0
    try:
        with path.open("rb") as file:
            for line in file:
                number += 1
                if not line.endswith(b"\n"):
                    return
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("an object was expected")
                yield record
    except OSError as error:
        raise LogError(
            f"{path} cannot be read: {error.strerror}. Give the folder of a run of headway train."
        ) from error
    except (ValueError, RecursionError) as error:
        raise LogError(f"{path}, line {number} is no record: {error}.") from error
