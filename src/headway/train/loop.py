"""The training loop, whole.

`train` reads from top to bottom: for each optimizer step, fetch the packs, run them forward and backward, update,
record; now and then evaluate and save. `prepare` builds what it needs. T is the slots of a pack, L those of them that
this process computes, S the sources.

The loss of a step is the sum of the cross-entropies of all its supervised tokens, over accumulation and ranks, divided
by their number; so neither the packing nor the number of ranks changes it. The head runs on every token of a pack,
supervised or not, because that is what the ledger counts: what is billed is what runs.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
import transformers

from headway.answer.answers import answer_line, answers_record
from headway.answer.evaluate import EvalSet, Evaluation
from headway.checkpoint.export import find_checkpoint_in
from headway.config import TrainConfig
from headway.data import Batch
from headway.data.feed import FeedReport, on_device
from headway.errors import RunCompleteError, TrainingError, errors_in
from headway.log.run_files import METRICS, RESUMES, SAMPLES, SUMMARY, write_json
from headway.log.working import working
from headway.meter import Goodput, clock
from headway.meter.goodput_report import FILE_NAME as GOODPUT
from headway.meter.goodput_report import Bucket
from headway.meter.window import SCHEMA_VERSION
from headway.models.parallel import clip_, reduce_gradients
from headway.models.parallel.ranks import own_rank
from headway.optim import learning_rate, set_learning_rate, take_step
from headway.train.memory_error import Explanation
from headway.train.memory_record import record_memory
from headway.train.prepare import Run, exports_of, prepare
from headway.train.profiling import ProfileWindow
from headway.train.progress import Progress, evaluation_line
from headway.train.record import MetricsLog
from headway.train.recorder import LaunchedStep, StepRecorder
from headway.train.run_folder import RunFolder
from headway.train.salvage import LastStep
from headway.train.share import Flags, exchange_step
from headway.train.step_numbers import StepSums
from headway.train.summary import RunSummary, billed_by_conventions
from headway.train.watch import STOPPING, LoopPhase, Watchdog, explain_errors, stop_requests
from headway.words import RUN_KEYS, Argument

_SHOWN_ANSWERS = 3  # on the screen; samples.jsonl has all
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
        RunCompleteError: the run has taken all of its steps; with `resume=None` an export that was cut off is made.
    """
    start_ns = clock.now_ns()
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
            return _loop(config, run, phase, start_ns)
        except RunCompleteError:
            if resume is None and rank == 0:  # it may have been ended while it exported
                phase.at("export", watched=False)
                exports_of(config).make(find_checkpoint_in(config.run.folder))
            raise


def _loop(config: TrainConfig, run: Run, phase: LoopPhase, start_ns: int) -> RunSummary:  # noqa: C901, PLR0912, PLR0915
    """Take the steps of a run, write down what they gave, and sum up; it stays whole, to be read from top to bottom."""
    trained, model, optimizer, meter = run.trained, run.model, run.optimizer, run.meter
    ranks, device, saver, optim, drawing = run.ranks, run.device, run.saver, config.optim, config.model.drawing
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    max_norm = optim.clip if optim.clip is not None else math.inf
    step = run.checkpoint.step if run.checkpoint else 0
    evaluation, stopped_by, has_ended = None, 0, False

    with (
        _outputs(config, run, start_ns) as out,
        _profile(config, run, phase, out),
        run.feed,
        _workers_started(run, phase, needed=step < run.steps) as steps,
        meter,
        saver,
        stop_requests() as stop_signal,
        LastStep(run, out.recorder, lambda: _leave(run, out, phase, "checkpoint"), out.progress.note) as last,
        explain_errors(phase, Explanation(run, config, phase)),
    ):
        for line in run.describe():
            out.progress.note(line)
        model.train()

        def judge() -> Evaluation | None:
            """Evaluate after a step, outside of the time of training."""
            if run.eval_set is None:
                return None
            _leave(run, out, phase, "evaluation")
            judged = _evaluate(run, run.eval_set, step, out)
            last.complete(step)
            return judged

        while step < run.steps and not stopped_by:
            step += 1
            lr = learning_rate(step, optim, run.steps)
            set_learning_rate(optimizer, lr)

            # This rank's packs come before its first forward, and with them what the other ranks' hold: all supervised
            # tokens normalise the loss. With the same message ranks tell which steps their devices have passed.
            phase.at("data wait", step=step)
            meter.await_data()
            batches, failure = _next_packs(steps)
            meter.got_data()
            is_at_end = not batches and failure is None  # a stream's lanes need not end together
            flags = Flags(is_at_end, stop_signal(), saver.has_failed, "" if failure is None else _reason(failure))
            batches = batches or [run.feed.padding() for _ in range(optim.accumulation)]
            phase.at("exchange of what each rank computes")
            batches, shared, finished = exchange_step(batches, run.feed, ranks, flags, meter.finished())
            phase.at("logging")
            out.recorder.write(meter.merge(finished))
            saver.finished(wait=shared.flags.save_failed)
            if shared.flags.failure:
                phase.at("data wait")
                last.all_know = True
                raise failure or TrainingError(f"{shared.flags.failure} So this process ends with it.")
            if has_ended := shared.flags.has_ended:  # of a stream; how far an index reaches is known beforehand
                step -= 1
                break
            stopped_by = shared.flags.stop_signal

            # Forward and backward, pack by pack.
            sums = StepSums(len(run.feed.names), run.loss_terms, device)
            batches = [
                batch.noised(config.run.seed, step, drawing.timestep_shift).dealt(run.sequence_group)
                for batch in batches
            ]
            per, per_drawn = max(1, shared.num_supervised), max(1, shared.workload.drawn)
            for number, batch in enumerate(on_device(batches, device), start=1):
                phase.at("forward", batch=batch)
                reduce_gradients(model, now=number == len(batches) or config.parallel.reduce == "pack")
                local = batch.local_slots(run.sequence_group)
                labels_L = batch.labels_1T[0, local]
                with run.precision.autocast():
                    pack = trained.model_with_loss(batch.model_inputs(), labels_L, per=per, per_drawn=per_drawn)
                phase.at("backward", batch=batch)
                torch.autograd.backward(pack.total)
                sums.add(pack, batch.source_of_slots()[local])
                meter.count(batch.workload, elsewhere=not ranks.bills)

            # Update, if there was anything to learn from.
            phase.at("update")
            last.updating()
            compilations = trained.compile_watch.since()
            numbers = sums.over_ranks(
                len(compilations.guards),
                ranks.sum_,
                norm=lambda: clip_(parameters, max_norm),
                router=run.router_load.take,
            )
            take_step(optimizer, numbers.vector(), skips=optim.on_nonfinite == "skip", learns=shared.learns)
            if run.ema is not None and shared.learns:
                run.ema.update(step)
            optimizer.zero_grad(set_to_none=True)
            last.complete(step)
            launched = LaunchedStep(step, lr, run.feed.epochs, shared, batches, ranks.num_data_ranks, compilations)
            out.recorder.add(launched, numbers)
            meter.step()
            out.progress.recompiled(step, compilations.news)

            # Now and then, and at the end.
            is_last = step == run.steps
            if _is_due(step, config.eval.every) or (is_last and config.eval.at_end):
                evaluation = judge() or evaluation
            if _is_due(step, config.checkpoint.every) or is_last or stopped_by:
                last.save()
        if has_ended:  # what the last step does, now that it is known which one it was
            out.progress.note(_data_ended(run, step))
            if config.eval.at_end:
                evaluation = judge() or evaluation
            last.save()
        phase.at("checkpoint")
        saved = saver.wait()
        utilisation = meter.close()
        if stopped_by and step < run.steps:
            out.progress.note(
                f"stopped by {STOPPING[stopped_by]} after step {step}; continue with {Argument('resume', True)}"
            )
        for warning in utilisation.warnings:
            out.progress.note(f"warning: {warning}")

    # Of all steps, those before a resume included: the first process has them.
    losses = ranks.gather_all(out.metrics.losses)[0]
    conventions: list[dict[str, Any]] = []
    with meter.boundary.guard("The bill of the last step by other tools' rules"):
        conventions = billed_by_conventions(
            model.config.to_dict(),
            meter.cost_model,
            launched.batches,
            row_length=config.data.tokens_per_pack,
            recompute=trained.recompute,
        )
    summary = RunSummary(
        folder=config.run.folder,
        checkpoint=saved.folder,
        model=run.exports.folder(saved),
        stopped_by=stopped_by,
        steps=step,
        planned_steps=step if has_ended else run.steps,
        skipped=losses.skipped,
        empty=losses.empty,
        missing_records=out.metrics.num_missing,
        lost=meter.boundary.lost,
        first_loss=losses.first,
        last_loss=losses.last,
        last_flow_loss=losses.last_flow,
        utilisation=utilisation,
        conventions=conventions,
        report=FeedReport.total(ranks.gather(run.feed.report())),
        evaluation=evaluation,
        total_s=(clock.now_ns() - start_ns) / 1e9,
    )
    phase.at("export", watched=False)  # takes as long as the model is large, and nobody waits for it
    if ranks.is_first:
        with meter.boundary.guard("The summary in the run folder"):  # a run killed while it exports has one
            write_json(config.run.folder / SUMMARY, summary.to_dict())
        run.exports.make(saved)
        with meter.boundary.guard("The record of predicted and measured memory"):
            record_memory(run, config, utilisation.peak_memory_bytes)
    return summary


class _Outputs(NamedTuple):
    """Where a run writes down what it does; ranks other than the first write no files and no lines."""

    progress: Progress
    metrics: MetricsLog
    samples: MetricsLog
    goodput: Goodput | None
    recorder: StepRecorder


@contextmanager
def _outputs(config: TrainConfig, run: Run, start_ns: int) -> Iterator[_Outputs]:
    """Open the files of a run, cut back to the checkpoint that it goes on from; all are closed in the end."""
    settings, optim, ranks = config.run, config.optim, run.ranks
    step = run.checkpoint.step if run.checkpoint else 0
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
        recorder = StepRecorder(
            metrics,
            progress.step,
            run.feed.names,
            may_skip=optim.nonfinite_limit if optim.on_nonfinite == "skip" else 0,
            bad_samples=settings.folder / f"not-finite-rank-{ranks.rank}.json",
            before=run.checkpoint.position() if run.checkpoint else {},
            resumes=metrics.resumes,
            boundary=boundary,
        )
        yield _Outputs(progress, metrics, samples, goodput, recorder)


def _profile(config: TrainConfig, run: Run, phase: LoopPhase, out: _Outputs) -> AbstractContextManager[Any]:
    if config.run.profile is None:
        return nullcontext()
    window = ProfileWindow(
        config.run.profile,
        config.run.folder,
        run.meter,
        size=run.ranks.size,
        feed=run.feed,
        recorder=out.recorder,
        note=out.progress.note,
    )
    phase.on_enter = window.enter
    return window


@contextmanager
def _workers_started(run: Run, phase: LoopPhase, *, needed: bool) -> Iterator[Iterator[list[Batch]]]:
    """Wait for the first step's packs before the clock starts: that processes start is no data wait of that step."""
    phase.at("start of the data workers")
    yield chain([next(run.feed, [])] if needed else [], run.feed)


def _next_packs(steps: Iterator[list[Batch]]) -> tuple[list[Batch], Exception | None]:
    """The packs of the next step, none where the data have ended; or the error that keeps this process from any."""
    try:
        return next(steps, []), None
    except Exception as error:  # noqa: BLE001 - raised as soon as all processes know of it
        return [], error


def _reason(error: Exception) -> str:
    """An error in one line, for the other processes."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _leave(run: Run, out: _Outputs, phase: LoopPhase, bucket: Bucket) -> None:
    """Stop training for a while: the device is waited for, and the steps that it has taken are recorded."""
    phase.at(bucket)
    run.meter.leave(bucket)
    out.recorder.write(run.meter.merge(run.ranks.gather_all(run.meter.finished())))


def _evaluate(run: Run, eval_set: EvalSet, step: int, out: _Outputs) -> Evaluation:
    """Judge the model on the held-out samples and write down what was found, with some answers in words."""
    device, autocast = run.device, run.precision.autocast
    with run.weights_to_judge():
        evaluation = eval_set.evaluate(run.trained.model_with_loss, device, autocast)
        answers = [] if run.generation_eval is None else run.generation_eval.answer(run.model, device, autocast)
    record = {"schema_version": SCHEMA_VERSION, "kind": "evaluation", "step": step, **evaluation.to_dict()}
    out.metrics.write(record)
    out.progress.note(evaluation_line(record))
    for number, answer in enumerate(answers):
        out.samples.write(answer.to_dict(step))
        if number < _SHOWN_ANSWERS:
            out.progress.note(f"  {answer_line(answer)}")
    if len(answers) > _SHOWN_ANSWERS:
        out.progress.note(f"  and {len(answers) - _SHOWN_ANSWERS} more answers, in {SAMPLES}")
    if answers:
        out.metrics.write(answers_record(step, answers))
    return evaluation


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _data_ended(run: Run, step: int) -> str:
    """What is told of a stream that ends before the steps do."""
    if step == (run.checkpoint.step if run.checkpoint else 0):
        kind = RunCompleteError if run.checkpoint else TrainingError
        raise kind(
            f"the data ended after step {step} of {run.steps}, so there is nothing to train on. Leave 'epochs' out of "
            "data.train to go on as long as there are steps, or give more data."
        )
    return (
        f"warning: the data ended after step {step} of {run.steps}, and the run with them, before its schedule did. "
        "Leave 'epochs' out of data.train to go on as long as there are steps."
    )
