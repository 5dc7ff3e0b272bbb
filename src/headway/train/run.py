"""A run of training: set up, its steps taken (`loop.py`), and summed up in the run folder."""

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice, pairwise
from statistics import median
from typing import Any

import transformers

from headway.checkpoint.export import find_checkpoint_in
from headway.config import TrainConfig
from headway.config.run import ProfileConfig
from headway.count import Workload
from headway.data import Batch
from headway.data.feed import FeedReport
from headway.data.pool import leave_if_imported_again
from headway.errors import RunCompleteError, errors_in
from headway.explain.findings.rule import sentences
from headway.explain.findings.series import FALLING
from headway.explain.records import find_in_records
from headway.log.run_files import METRICS, RESUMES, SAMPLES, SUMMARY, write_json
from headway.log.working import working
from headway.meter import Goodput, clock
from headway.meter.goodput_report import FILE_NAME as GOODPUT
from headway.models.parallel.ranks import own_rank
from headway.report import format_share
from headway.report.quantity import number
from headway.stores import spool
from headway.train.loop import LastStep, Loop, LoopEnd, Outputs
from headway.train.memory import Explanation, record_memory
from headway.train.prepare import Run, exports_of, prepare
from headway.train.profiling import AutoProfile, ProfileWindow
from headway.train.progress import Progress
from headway.train.record import MetricsLog
from headway.train.recorder import StepRecorder
from headway.train.run_folder import RunFolder
from headway.train.summary import RunSummary, billed_by_conventions
from headway.train.watch import STOPPING, LoopPhase, Watchdog, explain_errors, stop_requests
from headway.words import RUN_KEYS, Argument

MOST_SKIPPED = 10  # updates in a row that optim.on_nonfinite "skip" may leave out; one more ends the run
LEAST = 0.1  # share of the time that a warning is worth
_EVERY, _KEPT = 50, 300  # steps from one look to the next, and that each looks back at
_LOOKS = 4  # fewest looks before a fall against their median is told
# Passes by itself, names no cause, is what a shared machine is like, or is told with the guard that failed.
_NOT_TOLD = ("first-steps", "not-compute-bound", "unstable-steps", "recompilation")
_SMALLER = "Fewer data workers or a smaller data.prefetch_bytes need less memory, and more processes share the model."


def train(config: TrainConfig, *, resume: bool | None = False, is_smoke: bool = False) -> RunSummary:
    """Train a model.

    Args:
        config: everything there is to say.
        resume: go on from the newest checkpoint of the run folder, exactly as if the run had not been interrupted;
            None to do so if there is a run, and to begin one if there is none.
        is_smoke: whether the run may take the place of an earlier smoke run in its folder.

    Returns:
        What the run did; incomplete if a signal stopped it (`STOPPING`), which saves a checkpoint first.

    Raises:
        ConfigError: a setting that cannot take effect here.
        DataError: a sample that cannot be used.
        CheckpointError: a checkpoint that is not whole or not of this model.
        TrainingError: a loss that is not finite, a stream without data, or no memory left.
        RankLostError: another process of the run ended.
        RunCompleteError: the run has taken all of its steps; an export that was cut off is made first.
    """
    leave_if_imported_again()
    start_ns = clock.now_ns()
    run_folder = spool(config.run.folder)  # a run behind a URL is written here, and sent
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": run_folder})})
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the bar on show is ours
    phase, rank = LoopPhase(), own_rank()
    with (
        Watchdog(phase, config.run.watchdog_s, config.run.folder / f"hung-rank-{rank}.txt", rank),
        explain_errors(phase, lambda error: f"out of memory (rank {rank}) in {phase}: {error}. {_SMALLER}"),
        errors_in(RUN_KEYS),
        RunFolder(config.run.folder, is_smoke=is_smoke) as folder,
    ):
        try:
            with working("setting up the run") as progress:
                phase.on_enter = lambda name: progress(f"setting up the run: {name}")
                run = prepare(config, resume=resume, phase=phase, folder=folder)
                phase.on_enter = None
            return _run(config, run, phase, start_ns)
        except RunCompleteError as error:
            if rank == 0:  # the run may have been ended while it exported, or have found no room
                phase.at("export", watched=False)
                error.model = exports_of(config).make(find_checkpoint_in(config.run.folder))
            raise


def _run(config: TrainConfig, run: Run, phase: LoopPhase, start_ns: int) -> RunSummary:
    with (
        _outputs(config, run, start_ns) as out,
        _profile(config, run, phase, out),
        run.feed,
        _workers_started(run, phase) as packs,
        _set_up_kept(),
        run.meter,
        run.saver,
        stop_requests() as stop_signal,
        LastStep(run, out.recorder, lambda: loop.leave("checkpoint"), out.progress.note) as last,
        explain_errors(phase, Explanation(run, config, phase)),
    ):
        loop = Loop(config, run, phase, out, last, stop_signal)
        for line in run.describe():
            out.progress.note(line)
        end = loop.take_steps(packs)
        phase.at("checkpoint")
        saved = run.saver.wait()
        utilisation = run.meter.close()
        if end.stopped_by and end.step < run.steps:
            signal, resume = STOPPING[end.stopped_by], Argument("resume", True)
            out.progress.note(f"stopped by {signal} after step {end.step}. Continue with {resume}")
        elif end.ended_early:
            out.progress.note(
                f"ended early after step {end.step} of {run.steps}: {run.best.since} evaluations were no better than "
                f"{run.best.text}"
            )
        for warning in utilisation.warnings:
            out.progress.note(f"warning: {warning}")
        if line := run.feed.cache_line(run.ranks.gather(run.feed.cached)):
            out.progress.note(line)

    # Losses of all steps, those before a resume included: the first process has them.
    losses = run.ranks.gather_all(out.metrics.losses)[0]
    summary = RunSummary(
        folder=config.run.folder,
        checkpoint=saved.folder,
        model=run.exports.folder(saved),
        stopped_by=end.stopped_by,
        steps=end.step,
        planned_steps=end.step if end.data_ended else run.steps,
        ended_early=end.ended_early,
        best=run.best if config.checkpoint.keep_best or config.eval.stop_after is not None else None,
        keeps_best=bool(config.checkpoint.keep_best),
        skipped=losses.skipped,
        empty=losses.empty,
        missing_records=out.metrics.num_missing,
        lost=run.meter.boundary.lost,
        first_loss=losses.first,
        last_loss=losses.last,
        last_further=losses.last_further,
        utilisation=utilisation,
        conventions=_bills(config, run, end),
        report=FeedReport.total(run.ranks.gather(run.feed.report())),
        evaluation=end.evaluation,
        total_s=(clock.now_ns() - start_ns) / 1e9,
    )
    phase.at("export", watched=False)  # takes as long as the model is large, and nobody waits for it
    if run.ranks.is_first:
        guard = run.meter.boundary.guard
        with guard("The summary in the run folder"):  # a run killed while it exports has one
            write_json(config.run.folder / SUMMARY, summary.to_dict())
        run.exports.make(saved)
        with guard("The record of predicted and measured memory"):
            record_memory(run, config, utilisation.peak_memory_bytes)
    return summary


@contextmanager
def _set_up_kept() -> Iterator[None]:
    """Have Python's collections of garbage pass over what the set-up made, as it stays for the whole run.

    A million objects, of imports mostly, take a third of a second to go through, in the middle of a rank's step. What
    steps make is collected as ever. Source: gc.freeze in the documentation of Python.
    """
    if gc.get_freeze_count():  # the program around has chosen what is passed over, and nobody could undo ours alone
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _bills(config: TrainConfig, run: Run, end: LoopEnd) -> list[dict[str, Any]]:
    bills: list[dict[str, Any]] = []
    skips = run.trained.model_with_loss.skips_unlabelled
    with run.meter.boundary.guard("The bill of the last step by other tools' rules"):
        bills += billed_by_conventions(
            run.model.config.to_dict(),
            run.meter.cost_model,
            Workload.total(batch.work(skips_unlabelled=skips) for batch in end.batches),
            row_length=config.data.tokens_per_pack,
            recompute=run.trained.recompute,
        )
    return bills


@contextmanager
def _outputs(config: TrainConfig, run: Run, start_ns: int) -> Iterator[Outputs]:
    """Open the files of a run, cut back to the checkpoint that it goes on from; all are closed in the end."""
    settings, optim, ranks = config.run, config.optim, run.ranks
    step = run.checkpoint.step if run.checkpoint else 0
    # Records are the first rank's; a resumed run first drops those of steps it lost.
    metrics = MetricsLog(
        settings.folder / METRICS if ranks.is_first else None,
        last_step=step,
        trackers=settings.trackers,
        lost=settings.folder / RESUMES if run.resumes else None,
        damaged=run.damaged,
        boundary=run.meter.boundary,
    )
    writes_samples = ranks.is_first and run.generation_eval is not None
    samples = MetricsLog(settings.folder / SAMPLES if writes_samples else None, last_step=step)
    boundary = run.meter.boundary
    goodput = run.meter.goodput = Goodput(settings.folder / GOODPUT, since_ns=start_ns) if ranks.is_first else None
    if goodput is not None and run.resumes:
        goodput.resumed(step)
    # A live panel takes the place of progress lines.
    panel = any(spec.partition(":")[0] == "live" for spec in settings.trackers)
    with (
        Progress(
            run.steps,
            done=step,
            log_every=settings.log_every,
            epochs=config.optim.epochs,
            quiet=not ranks.is_first,
            has_panel=panel,
            boundary=boundary,
        ) as progress,
        metrics,
        samples,
        goodput or nullcontext(),
    ):
        if ranks.is_first:
            progress.observer = RunWarnings(progress.note).add
        recorder = StepRecorder(
            metrics,
            _shown(run, progress),
            run.feed.names,
            may_skip=MOST_SKIPPED if optim.on_nonfinite == "skip" else 0,
            bad_samples=settings.folder / f"not-finite-rank-{ranks.rank}.json",
            objective=run.objective,
            before=run.checkpoint.position() if run.checkpoint else {},
            resumes=metrics.resumes,
            boundary=boundary,
        )
        yield Outputs(progress, metrics, samples, goodput, recorder)


def _shown(run: Run, progress: Progress) -> Callable[[dict[str, Any]], None]:
    """Show a step's record, and the objective's word on the first one."""

    def show(record: dict[str, Any]) -> None:
        progress.step(record)
        if record["step"] == 1 and (fault := run.objective.first_fault(record)):
            progress.note(f"warning: {fault}")

    return show


def _profile(config: TrainConfig, run: Run, phase: LoopPhase, out: Outputs) -> AbstractContextManager[Any]:
    """Profile the steps that the configuration names; else some by itself, on the first rank of a long run."""
    profile = config.run.profile

    def window(settings: ProfileConfig) -> ProfileWindow:
        return ProfileWindow(
            settings,
            config.run.folder,
            run.meter,
            size=run.ranks.size,
            feed=run.feed,
            recorder=out.recorder,
            note=out.progress.note,
        )

    if profile is None and not (config.run.auto_profile and run.ranks.is_first):
        return nullcontext()
    # Steps that the user named on the ranks that they named; else the first rank chooses.
    if profile is not None:
        chosen = window(profile)
        phase.on_enter = chosen.enter
        return chosen
    automatic = AutoProfile(
        config.run.folder,
        run.meter,
        num_steps=run.steps,
        window=lambda steps: window(ProfileConfig(start=steps.start, steps=len(steps), ranks=(run.ranks.rank,))),
    )
    phase.on_enter = automatic.enter
    return automatic


@contextmanager
def _workers_started(run: Run, phase: LoopPhase) -> Iterator[Iterator[list[Batch]]]:
    """Wait for the first step's packs before the clock starts: that processes start is no data wait of that step."""
    phase.at("start of the data workers")
    needed = run.steps > (run.checkpoint.step if run.checkpoint else 0)
    yield chain([next(run.feed, [])] if needed else [], run.feed)


class RunWarnings:
    """Looks at the records of the last 300 steps, every 50 steps, with the rules of `headway explain`.

    A fall that takes longer, or came at once, shows against the run itself: the median MFU of the last 50 steps beside
    that of all looks before.

    Args:
        note: prints a line.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._records: deque[Mapping[str, Any]] = deque(maxlen=_KEPT)
        self._since, self._warned = 0, set[str]()
        self._usual: list[float] = []  # median MFU of each look

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a step's record, and warn of changes in the run since the last look."""
        self._records.append(record)
        self._since += 1
        if self._since < _EVERY:
            return
        self._since = 0
        for finding in find_in_records(self._records):
            if finding.share >= LEAST and finding.id not in _NOT_TOLD:
                self._warn(finding.id, f"{finding.seen} Likely: {finding.cause} Try: {finding.next}")
        if fall := self._fall(list(islice(reversed(self._records), _EVERY))):
            words = sentences(FALLING)
            self._warn(FALLING, f"{fall} Likely: {words['why']} Try: {words['next']}")

    def _warn(self, cause: str, text: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            self._note(f"warning: {text}")

    def _fall(self, last: Sequence[Mapping[str, Any]]) -> str:
        """Say that MFU is below the run's own median by a tenth, and by more than looks differ; "" where it is not."""
        measured = [mfu for record in last if (mfu := _mfu(record)) is not None]
        if not measured:
            return ""
        now, before = median(measured), [*self._usual]
        self._usual.append(now)
        if len(before) < _LOOKS:
            return ""
        usual = median(before)
        # a slow fall does not widen this scatter
        scatter = median(abs(after - before_it) for before_it, after in pairwise(before))
        if usual - now <= max(LEAST * usual, 3 * scatter):
            return ""
        return (
            f"MFU of the last {len(last)} steps is {format_share(now)}, {format_share(1 - now / usual)} below the "
            f"run's own median of {format_share(usual)}. Neither number contains waiting for data."
        )


def _mfu(record: Mapping[str, Any]) -> float | None:
    """Of the time in which data did not have to be waited for, whose warning is another one."""
    flops = record.get("flops")
    total = number(flops.get("total")) if isinstance(flops, Mapping) else None
    peak, wall_s = number(record.get("peak_flops_per_s")), number(record.get("wall_s"))
    if total is None or not peak or wall_s is None:
        return None
    busy_s = wall_s - (number(record.get("data_wait_s")) or 0.0)
    return total / (busy_s * peak * (number(record.get("world_size")) or 1.0)) if busy_s > 0 else None
