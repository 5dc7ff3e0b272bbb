"""The training loop, whole.

`train` reads from top to bottom: for each optimizer step, fetch the packs, run them forward and backward, update,
record; now and then evaluate and save. `prepare` builds what it needs. T is the slots of a pack, L those of them that
this process computes, S the sources.

The loss of a step is the sum of the cross-entropies of all its supervised tokens, over accumulation and ranks, divided
by their number; so neither the packing nor the number of ranks changes it. The head runs on every token of a pack,
supervised or not, because that is what the ledger counts: what is billed is what runs.
"""

import math
from contextlib import nullcontext
from pathlib import Path

import torch
import transformers

from headway.data.feed import FeedReport, on_device
from headway.errors import TrainingError
from headway.meter import Goodput, clock
from headway.meter.goodput_report import FILE_NAME as GOODPUT
from headway.meter.goodput_report import Bucket
from headway.meter.window import SCHEMA_VERSION
from headway.models.parallel import clip_, reduce_gradients
from headway.models.parallel.sequence import local_slots
from headway.train.answers import answers_record
from headway.train.checkpoint import Checkpoint
from headway.train.config import TrainConfig
from headway.train.evaluate import EvalSet, Evaluation
from headway.train.memory_error import Explanation
from headway.train.nonfinite import take_step
from headway.train.optim import learning_rate, set_learning_rate
from headway.train.prepare import Run, prepare, save
from headway.train.profiling import ProfileWindow
from headway.train.progress import Progress, evaluation_line
from headway.train.ranks import own_rank
from headway.train.record import METRICS, RESUMES, SAMPLES, SUMMARY, MetricsLog, write_json
from headway.train.recorder import Launched, StepRecorder
from headway.train.run_folder import RunFolder
from headway.train.share import Flags, agree
from headway.train.signals import NAMES, stop_requests
from headway.train.summary import RunSummary
from headway.train.watch import LoopPhase, Watchdog, told

_SMALLER = "Fewer data workers or a smaller data.prefetch_bytes need less memory, and more processes share the model."


def train(config: TrainConfig, *, resume: bool | None = False) -> RunSummary:
    """Train a model.

    Args:
        config: everything there is to say.
        resume: go on from the newest checkpoint of the run folder, exactly as if the run had not been interrupted;
            None to do so if there is a run, and to begin one if there is none.

    Returns:
        What the run did; incomplete if Ctrl-C or SIGTERM stopped it, which save a checkpoint first.

    Raises:
        ConfigError: a setting that cannot take effect here.
        DataError: a sample that cannot be used.
        CheckpointError: a checkpoint that is not whole or not of this model.
        TrainingError: a loss that is not finite, data that ended early, or no memory left.
        RankLostError: another process of the run ended.
    """
    start_ns = clock.now_ns()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the bar on show is ours
    place, rank = LoopPhase(), own_rank()
    with (
        Watchdog(place, config.run.watchdog_s, config.run.folder / f"hung-rank-{rank}.txt", rank),
        told(place, lambda error: f"out of memory (rank {rank}) in {place}: {error}. {_SMALLER}"),
        RunFolder(config.run.folder) as folder,
    ):
        return _loop(config, prepare(config, resume=resume, place=place, folder=folder), place, start_ns)


def _loop(config: TrainConfig, run: Run, place: LoopPhase, start_ns: int) -> RunSummary:  # noqa: PLR0915 - stays whole
    """Take the steps of a run, write down what they gave, and sum up."""
    trained, model, optimizer, meter = run.trained, run.model, run.optimizer, run.meter
    ranks, device = run.ranks, run.device
    optim, saver = config.optim, run.saver
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    max_norm = optim.clip if optim.clip is not None else math.inf
    step = run.checkpoint.step if run.checkpoint else 0
    steps = iter(run.feed)
    evaluation, stopped_by = None, 0
    progress = Progress(optim.steps, done=step, log_every=config.run.log_every, quiet=not ranks.is_first)
    window = ProfileWindow(config.run.profile, config.run.folder, rank=ranks.rank, size=ranks.size, device=device)
    log = MetricsLog(
        config.run.folder / METRICS if ranks.is_first else None,
        last_step=step,
        trackers=config.run.trackers,
        lost=config.run.folder / RESUMES if run.resumes else None,
    )
    writes_samples = ranks.is_first and run.questions is not None
    samples = MetricsLog(config.run.folder / SAMPLES if writes_samples else None, last_step=step)

    goodput = meter.goodput = _open_goodput(run, config.run.folder / GOODPUT, start_ns)

    with (
        progress,
        log,
        samples,
        window,
        goodput or nullcontext(),
        meter,
        run.feed,
        saver,
        stop_requests() as stop_signal,
        told(place, Explanation(run, config, place)),
    ):
        for line in run.describe():
            progress.note(line)
        recorder = StepRecorder(
            log,
            progress.step,
            run.feed.names,
            may_skip=optim.nonfinite_limit if optim.on_nonfinite == "skip" else 0,
            bad_samples=config.run.folder / f"not-finite-rank-{ranks.rank}.json",
            before=run.checkpoint.position() if run.checkpoint else {},
        )
        model.train()

        while step < optim.steps and not stopped_by:
            step += 1
            lr = learning_rate(step, optim)
            set_learning_rate(optimizer, lr)
            window.before(step)

            # This rank's packs come before its first forward, and with them what the other ranks' hold: all supervised
            # tokens normalise the loss. With the same message ranks tell which steps their devices have passed.
            place.at("data wait", step=step)
            meter.await_data()
            batches = next(steps, [])
            meter.got_data()
            has_ended = not batches  # on this rank; a stream's lanes need not end together
            batches = batches or [run.feed.padding() for _ in range(optim.accumulation)]
            place.at("exchange of what each rank computes")
            flags = Flags(has_ended, stop_signal(), saver.has_failed)
            batches, whole, finished = agree(batches, run.feed, ranks, flags, meter.finished())
            recorder.write(meter.merge(finished))
            for checkpoint in saver.finished(wait=whole.flags.save_failed):
                _note_saved(goodput, checkpoint)
            if whole.flags.has_ended:
                _leave(run, recorder, "checkpoint")
                save(run, step - 1, recorder.behind())
                _note_saved(goodput, saver.wait())
                raise TrainingError(_data_ended(config, step - 1))
            stopped_by = whole.flags.stop_signal

            # Forward and backward, pack by pack.
            loss_S = torch.zeros(len(run.feed.names), device=device)
            for number, batch in enumerate(on_device(batches, device), start=1):
                place.at("forward and backward", batch=batch)
                reduce_gradients(model, now=number == len(batches) or config.parallel.reduce == "pack")
                local = local_slots(batch.slots, run.sequence_group)
                labels_L = batch.labels_1T[0, local]
                with run.precision.autocast():
                    pack = trained.head(batch.model_inputs(), labels_L, per=max(1, whole.num_supervised))
                torch.autograd.backward(pack.total)
                loss_S.index_add_(0, batch.source_of_slots()[local], pack.loss_T)
                meter.count(ranks.billed(batch.workload))

            # Update.
            place.at("update")
            compilations = trained.compile_watch.since()
            sums = torch.cat([loss_S, torch.full((1,), len(compilations.guards), device=device)])
            ranks.sum_(sums)
            grad_norm = clip_(parameters, max_norm)
            numbers_K = torch.cat([sums, grad_norm.to(sums)[None], run.router_load.take(ranks.sum_)])
            take_step(optimizer, numbers_K, skips=optim.on_nonfinite == "skip")
            if run.ema is not None:
                run.ema.update(step)
            optimizer.zero_grad(set_to_none=True)
            recorder.add(Launched(step, lr, whole, batches, ranks.num_data_ranks, compilations), numbers_K)
            meter.step()
            progress.recompiled(step, compilations.news)
            window.after(step, meter, progress.note)

            # Now and then, and at the end.
            is_last = step == optim.steps
            if run.eval_set is not None and (_is_due(step, config.eval.every) or (is_last and config.eval.at_end)):
                place.at("evaluation")
                _leave(run, recorder, "evaluation")
                evaluation = _evaluate(run, run.eval_set, step, log, samples, progress)
            if _is_due(step, config.checkpoint.every) or is_last or stopped_by:
                place.at("checkpoint")
                _leave(run, recorder, "checkpoint")
                save(run, step, recorder.behind())
        place.at("checkpoint")
        last = saver.wait()
        _note_saved(goodput, last)
        utilisation = meter.close()
        if step < optim.steps:
            progress.note(f"stopped by {NAMES[stopped_by]} after step {step}; continue with --resume")
        for warning in utilisation.warnings:
            progress.note(f"warning: {warning}")

    losses = ranks.gather_all(log.losses)[0]  # of all steps, those before a resume included: the first process has them
    summary = RunSummary(
        folder=config.run.folder,
        checkpoint=last.folder,
        model=run.exports.folder(last),
        stopped_by=stopped_by,
        steps=step,
        planned_steps=optim.steps,
        skipped=losses.skipped,
        first_loss=losses.first,
        last_loss=losses.last,
        utilisation=utilisation,
        report=FeedReport.total(ranks.gather(run.feed.report())),
        evaluation=evaluation,
        total_s=(clock.now_ns() - start_ns) / 1e9,
    )
    place.at("export", watched=False)  # takes as long as the model is large, and nobody waits for it
    if ranks.is_first:
        run.exports.make(last)
        write_json(config.run.folder / SUMMARY, summary.as_json())
    return summary


def _open_goodput(run: Run, path: Path, start_ns: int) -> Goodput | None:
    """The ledger of the run's time, which the first process keeps."""
    if not run.ranks.is_first:
        return None
    goodput = Goodput(path, since_ns=start_ns)
    if run.resumes:
        goodput.resumed(run.checkpoint.step if run.checkpoint else 0)
    return goodput


def _leave(run: Run, recorder: StepRecorder, bucket: Bucket) -> None:
    """Stop training for a while: the device is waited for, and the steps that it has taken are recorded.

    Raises:
        TrainingError: one of them had a loss or gradient that is not finite.
    """
    run.meter.leave(bucket)
    recorder.write(run.meter.merge(run.ranks.gather_all(run.meter.finished())))


def _note_saved(goodput: Goodput | None, checkpoint: Checkpoint) -> None:
    if goodput is not None:
        goodput.checkpoint_saved(checkpoint.step)


def _evaluate(
    run: Run, eval_set: EvalSet, step: int, log: MetricsLog, samples: MetricsLog, progress: Progress
) -> Evaluation:
    """Judge the model on the held-out samples and write down what was found, with some answers in words."""
    device, autocast = run.device, run.precision.autocast
    with run.weights_to_judge():
        evaluation = eval_set.evaluate(run.trained.head, device, autocast)
        answers = [] if run.questions is None else run.questions.answer(run.model, device, autocast)
    record = {"schema_version": SCHEMA_VERSION, "kind": "evaluation", "step": step, **evaluation.as_record()}
    log.write(record)
    progress.note(evaluation_line(record))
    for answer in answers:
        samples.write(answer.as_record(step))
    if answers:
        log.write(answers_record(step, answers))
    return evaluation


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _data_ended(config: TrainConfig, step: int) -> str:
    return (
        f"the data ended after step {step} of {config.optim.steps}; a checkpoint of that step is saved. Leave 'epochs' "
        "out of the last stage of data.train to go on as long as there are steps, or set optim.steps to what the data "
        "fill."
    )
