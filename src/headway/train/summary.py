"""The end of a run: one object of totals and rates, and its table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.answer.evaluate import Evaluation
from headway.conventions import Step, architecture, conventions
from headway.count import CostModel, Workload
from headway.data.bad_rows import OUTCOMES
from headway.data.feed import FeedReport
from headway.errors import HeadwayError
from headway.meter import Window
from headway.models.load import processor_note
from headway.models.lora import ADAPTER_CONFIG
from headway.report import (
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    format_rounded,
    format_share,
    render_pairs,
)
from headway.stores import exists, place, shown
from headway.train.best import BestEvaluation

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RunSummary:
    """Totals and rates of a run.

    Attributes:
        folder: the run folder.
        checkpoint: the last checkpoint, which a continuation starts from.
        model: the folder that `from_pretrained` opens, made of the last checkpoint; None if there is to be none.
        steps: optimizer steps taken, those before a resume included [steps].
        planned_steps: optimizer steps that were asked for [steps].
        first_loss: of the run's first step whose update was not left out; None without one [nats per supervised token].
        skipped: updates that were left out because their numbers were not finite [steps].
        empty: steps with nothing to learn from, whose update was left out as well [steps].
        last_loss: mean of the last tenth of these steps, at most 100 of them [nats per supervised token].
        last_further: the same of each further loss that the objective records, by its name.
        utilisation: FLOPs and time of the steps that this process took; evaluations and checkpoints are outside.
        conventions: the last step's packs of this process as other tools bill them, by `billed_by_conventions`.
        report: samples and packs read, those before a resume included.
        evaluation: the last evaluation, if there was one.
        stopped_by: number of the signal that ended the run early; 0 for none.
        ended_early: whether evaluations did, none of which bettered the best one.
        best: the best evaluation, where the run ends by it or keeps its checkpoint; None else.
        keeps_best: whether its checkpoint is there.
        missing_records: records of steps and evaluations that metrics.jsonl does not have.
        lost: what else could not be recorded, each with its first error.
        total_s: wall time of this process's run, everything included [s].
    """

    folder: Path
    checkpoint: Path
    model: Path | None
    steps: int
    planned_steps: int
    skipped: int
    first_loss: float | None
    last_loss: float | None
    utilisation: Window
    conventions: Sequence[Mapping[str, Any]]
    report: FeedReport
    evaluation: Evaluation | None
    stopped_by: int
    total_s: float
    last_further: Mapping[str, float] = field(default_factory=dict)
    empty: int = 0
    missing_records: int = 0
    lost: Mapping[str, str] = field(default_factory=dict)
    ended_early: bool = False
    best: BestEvaluation | None = None
    keeps_best: bool = False

    @property
    def is_complete(self) -> bool:
        """True if the run has taken every planned step, or evaluations ended the run as the settings ask."""
        return self.steps == self.planned_steps or self.ended_early

    def to_dict(self) -> dict[str, Any]:
        """One JSON-ready object; seconds, counts and fractions."""
        return {
            **self.utilisation.to_dict(),
            "schema_version": SCHEMA_VERSION,
            "kind": "run",
            "folder": shown(self.folder),
            "checkpoint": shown(self.checkpoint),
            "model": shown(self.model) if self.model else None,
            "complete": self.is_complete,
            "steps": self.steps,
            "planned_steps": self.planned_steps,
            "ended_early": self.ended_early,
            "measured_steps": self.utilisation.num_steps,
            "skipped_updates": self.skipped,
            "empty_steps": self.empty,
            "missing_records": self.missing_records,
            "not_recorded": {**self.lost},
            "first_loss": self.first_loss,
            "last_loss": self.last_loss,
            **{f"last_{name}_loss": value for name, value in self.last_further.items()},
            "evaluation": self.evaluation.to_dict() if self.evaluation else None,
            "best_evaluation": self.best.to_dict() if self.best else None,
            "vision_share": self.utilisation.flops.share("vision"),
            "conventions": [*self.conventions],
            "fill": self.report.fill,
            "data": self.report.to_dict(),
            "total_s": self.total_s,
        }

    def as_table(self) -> str:
        """Names and values for people."""
        use, flops, report = self.utilisation, self.utilisation.flops, self.report
        measured = "" if use.num_steps == self.steps else f", the last {use.num_steps} measured here"
        skipped = f", {format_count(self.skipped)} updates left out" if self.skipped else ""
        skipped += f", {format_count(self.empty)} with nothing to learn from" if self.empty else ""
        if self.ended_early and self.best is not None:
            skipped += f", ended early: {self.best.since} evaluations without a better one"
        # Lines that depend on how the run went.
        loss = "none: every update was left out"
        if self.first_loss is not None:
            loss = f"{self.first_loss:.4f} first, {self.last_loss:.4f} at the end"
            loss += "".join(f"; {name} {value:.4f}" for name, value in self.last_further.items())
        judged, exact = "exact match", "not evaluated"
        if self.evaluation and self.evaluation.pairs:
            judged = "pairs right"
            exact = f"{format_share(self.evaluation.accuracy)} of {format_count(self.evaluation.pairs)} held-out pairs"
        elif self.evaluation and not self.evaluation.answers:
            judged, exact = "held-out loss", f"{self.evaluation.loss:.4f}"
        elif self.evaluation:
            exact = (
                f"{format_share(self.evaluation.exact_match)} "
                f"({format_count(self.evaluation.exact)} of {format_count(self.evaluation.samples)} held-out samples)"
            )
        return render_pairs(
            [
                ("steps", f"{format_count(self.steps)} of {format_count(self.planned_steps)}{measured}{skipped}"),
                ("loss", loss),
                (judged, exact),
                *self._best(),
                ("tokens", f"{format_count(use.tokens)} real, {format_rounded(use.tokens_per_s)} per second"),
                ("time in steps", f"{format_duration(use.wall_s)} of {format_duration(self.total_s)} in all"),
                ("data wait", f"{format_share(use.data_wait_share)} of the time in steps"),
                ("fill of the packs", f"{format_share(report.fill)} of {format_count(report.packs)} packs"),
                ("samples", _samples(report)),
                ("padding share", format_share(use.padding_share)),
                ("FLOPs", f"{flops.total:.4g} useful, {format_rate(use.flops_per_s)}"),
                ("vision share", f"{format_share(flops.share('vision'))} of the FLOPs"),
                ("MFU", f"{format_share(use.mfu)} (convention {use.convention})"),
                ("HFU", format_share(use.hfu)),
                ("peak", f"{format_rate(use.peak.flops_per_s)} {use.peak.dtype}, {use.peak.kind}: {use.peak.name}"),
                ("peak source", use.peak.source),
                ("memory", format_bytes(use.peak_memory_bytes)),
                ("checkpoint", shown(self.checkpoint)),
                *self._exported(),
                *self.not_recorded(),
            ]
        )

    def _best(self) -> list[tuple[str, str]]:
        """The best evaluation, and how to use its checkpoint."""
        if self.best is None or not self.best.text:
            return []
        use = f"; `headway export {shown(self.folder)} MODEL --best` makes its folder" if self.keeps_best else ""
        return [("best evaluation", f"{self.best.text}{use}")]

    def not_recorded(self) -> list[tuple[str, str]]:
        """Name and value of records that the run could not write, if any."""
        missing = f"{format_count(self.missing_records)} records are not in metrics.jsonl"
        losses = [*([missing] if self.missing_records else []), *(f"{what}: {why}" for what, why in self.lost.items())]
        return [("not recorded", "; ".join(losses))] if losses else []

    def _exported(self) -> list[tuple[str, str]]:
        """Kind and place of the folder that the run leaves to be used, and a note on its processor if there is one."""
        if self.model is None:
            return [("model folder", "none; make one with headway export")]
        kind = "adapters" if exists(place(self.model / ADAPTER_CONFIG)) else "model folder"
        note = processor_note(self.model) if self.model.is_dir() else None  # the model may be behind a URL
        return [(kind, shown(self.model)), *([("processor", note)] if note is not None else [])]


def _samples(report: FeedReport) -> str:
    """Say how many samples were read, and how many of them were not used whole."""
    counts = {outcome: report.samples.total(outcome) for outcome in OUTCOMES}
    left_out = {name: sum(plan[name] for plan in report.planned.values()) for name in ("bad", "empty", "dropped")}
    parts = [f"{format_count(counts['read'].samples)} read"]
    for outcome in ("skipped", "dropped", "truncated", "split"):
        if counts[outcome].samples:
            tokens = f" ({format_count(counts[outcome].tokens)} tokens)" if counts[outcome].tokens else ""
            parts.append(f"{format_count(counts[outcome].samples)} {outcome}{tokens}")
    if left_out["bad"]:
        parts.append(f"{format_count(left_out['bad'])} known to be bad")
    if left_out["empty"]:
        parts.append(f"{format_count(left_out['empty'])} empty")
    if left_out["dropped"]:
        parts.append(f"{format_count(left_out['dropped'])} left out as over-long")
    return ", ".join(parts)


def billed_by_conventions(
    model_config: dict[str, Any], cost_model: CostModel, workload: Workload, *, row_length: int, recompute: str
) -> list[dict[str, Any]]:
    """Bill the packs that this process trained on in one step in every convention.

    Args:
        model_config: the content of the model's `config.json`.
        cost_model: of the model.
        workload: of the packs.
        row_length: slots of a pack, which tools that bill the configured length take [tokens].
        recompute: which blocks are computed again in backward, as `CostModel.count` takes it.

    Returns:
        Of each convention its name, version, FLOPs, their ratio to the useful ones (both None where the rule has no
        number for this model), and what it counts differently; nothing of a model whose sizes no rule can read.
    """
    step = Step(workload, max([row_length, *workload.segments.tolist()]), recompute)
    try:
        sizes = architecture(model_config, cost_model.name, cost_model)
        bills = [(rule, rule.bill(sizes, step)) for rule in conventions(sizes.model_type)]
    except HeadwayError:
        return []
    useful = next(bill.flops for rule, bill in bills if rule.name == "useful")
    return [
        {
            "name": rule.name,
            "version": rule.version,
            "flops": bill.flops,
            "ratio_to_useful": bill.flops / useful if bill.flops is not None and useful else None,
            "why": bill.reason or rule.why,
        }
        for rule, bill in bills
    ]
