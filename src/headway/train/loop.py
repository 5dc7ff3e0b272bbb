"""The training loop, whole.

`train` reads from top to bottom: for each optimizer step, fetch the packs, run them forward and backward, update,
record; now and then evaluate and save. `prepare` builds what it needs. T is the slots of a pack, L those of them that
this process computes, S the sources.

The loss of a step is the sum of the cross-entropies of all its supervised tokens, over accumulation and ranks, divided
by their number; so neither the packing nor the number of ranks changes it. The head runs on every token of a pack,
supervised or not, because that is what the ledger counts: what is billed is what runs.
"""

import math
import time

import torch
import transformers

from headway.data.feed import FeedReport
from headway.errors import TrainingError
from headway.meter.goodput_report import FILE_NAME as GOODPUT
from headway.models.parallel import clip_, reduce_gradients
from headway.models.parallel.sequence import local_slots
from headway.train.answers import answers_record
from headway.train.config import TrainConfig
from headway.train.evaluate import EvalSet, Evaluation
from headway.train.memory_error import Explanation
from headway.train.nonfinite import take_step
from headway.train.optim import learning_rate, set_learning_rate
from headway.train.prepare import Run, prepare, save
from headway.train.profiling import ProfileWindow
from headway.train.progress import Progress, evaluation_line
from headway.train.record import (
    METRICS,
    SAMPLES,
    SUMMARY,
    MetricsLog,
    RunLedger,
    memory_bytes,
    read_metrics,
    write_json,
)
from headway.train.recorder import Launched, StepRecorder
from headway.train.share import Flags, agree
from headway.train.signals import NAMES, stop_requests
from headway.train.summary import RunSummary, mean_of_last
from headway.train.watch import Place, Watchdog, told


def train(config: TrainConfig, *, resume: bool | None = False) -> RunSummary:  # noqa: PLR0915 - stays whole
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
    start_s, start_ns = time.perf_counter(), time.monotonic_ns()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the bar on show is ours
    run = prepare(config, resume=resume)
    trained, model, optimizer, meter = run.trained, run.model, run.optimizer, run.meter
    ranks, device = run.ranks, run.device
    optim, saver = config.optim, run.saver
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    max_norm = optim.clip if optim.clip is not None else math.inf
    step = run.checkpoint.step if run.checkpoint else 0
    steps = iter(run.feed)
    evaluation, stopped_by, place = None, 0, Place(step)
    progress = Progress(optim.steps, done=step, log_every=config.run.log_every, quiet=not ranks.is_first)
    window = ProfileWindow(config.run.profile, config.run.folder, rank=ranks.rank, size=ranks.size, device=device)
    log = MetricsLog(
        config.run.folder / METRICS if ranks.is_first else None, last_step=step, trackers=config.run.trackers
    )
    writes_samples = ranks.is_first and run.questions is not None
    samples = MetricsLog(config.run.folder / SAMPLES if writes_samples else None, last_step=step)

    ledger = RunLedger(
        config.run.folder / GOODPUT if ranks.is_first else None,
        since_ns=start_ns,
        resumed_from=step if run.resumes else None,
        compiles=trained.compiles,
    )

    with (
        Watchdog(place, config.run.watchdog_s, config.run.folder / f"hung-rank-{ranks.rank}.txt", ranks.rank),
        progress,
        log,
        samples,
        window,
        ledger,
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
            device,
            run.feed.names,
            may_skip=optim.nonfinite_limit if optim.on_nonfinite == "skip" else 0,
            bad_samples=config.run.folder / f"not-finite-rank-{ranks.rank}.json",
        )
        model.train()

        while step < optim.steps and not stopped_by:
            step += 1
            lr = learning_rate(step, optim)
            set_learning_rate(optimizer, lr)
            window.before(step)

            # This rank's packs come before its first forward, and with them what the other ranks' hold: all supervised
            # tokens normalise the loss, and the meter counts the step as a whole.
            meter.start_step()
            ledger.spend("data wait")
            place.at("data wait", step=step)
            wait_start_s = time.perf_counter()
            batches = next(steps, [])
            meter.data_wait(time.perf_counter() - wait_start_s)
            ledger.spend("step")
            has_ended = not batches  # on this rank; a stream's lanes need not end together
            batches = batches or [run.feed.padding() for _ in range(optim.accumulation)]
            place.at("exchange of what each rank computes")
            flags = Flags(has_ended, stop_signal(), saver.has_failed)
            batches, whole = agree(batches, run.feed, ranks, flags)
            for checkpoint in saver.finished(wait=whole.flags.save_failed):
                ledger.checkpoint_saved(checkpoint.step)
            if whole.flags.has_ended:
                recorder.flush()
                ledger.spend("checkpoint")
                save(run, step - 1)
                ledger.checkpoint_saved(saver.wait().step)
                raise TrainingError(_data_ended(config, step - 1))
            stopped_by = whole.flags.stop_signal

            # Forward and backward, pack by pack.
            loss_S = torch.zeros(len(run.feed.names), device=device)
            for number, batch in enumerate((batch.to(device) for batch in batches), start=1):
                place.at("forward and backward", batch=batch)
                reduce_gradients(model, now=number == len(batches) or config.parallel.reduce == "pack")
                local = local_slots(batch.slots, run.sequence_group)
                labels_L = batch.labels_1T[0, local]
                with run.precision.autocast():
                    pack = trained.head(batch.model_inputs(), labels_L, per=max(1, whole.num_supervised))
                torch.autograd.backward(pack.total)
                loss_S.index_add_(0, batch.source_of_slots()[local], pack.loss_T)
            meter.add(whole.workload)

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
            utilisation = meter.end_step(compiled=compilations.happened)
            recorder.add(Launched(step, lr, whole, utilisation, batches, compilations), numbers_K)
            progress.recompiled(step, compilations.news)
            window.after(step, progress.note)

            # Now and then, and at the end.
            is_last = step == optim.steps
            if run.eval_set is not None and (_is_due(step, config.eval.every) or (is_last and config.eval.at_end)):
                recorder.flush()
                ledger.spend("evaluation")
                place.at("evaluation")
                evaluation = _evaluate(run, run.eval_set, step, log, samples, progress)
            if _is_due(step, config.checkpoint.every) or is_last or stopped_by:
                recorder.flush()
                ledger.spend("checkpoint")
                place.at("checkpoint")
                save(run, step)
        ledger.spend("checkpoint")
        last = saver.wait()
        ledger.checkpoint_saved(last.step)
        ledger.spend("idle")
        if step < optim.steps:
            progress.note(f"stopped by {NAMES[stopped_by]} after step {step}; continue with --resume")
        for warning in meter.summary().warnings:
            progress.note(f"warning: {warning}")

    taken = [r for r in read_metrics(config.run.folder / METRICS) if r["kind"] == "step"]
    losses = [r["loss"] for r in taken if r["loss"] is not None]
    summary = RunSummary(
        folder=config.run.folder,
        checkpoint=last.folder,
        model=run.exports.folder(last),
        stopped_by=stopped_by,
        steps=step,
        planned_steps=optim.steps,
        skipped=len(taken) - len(losses),
        first_loss=losses[0],
        last_loss=mean_of_last(losses),
        utilisation=meter.summary(),
        report=FeedReport.total(ranks.gather(run.feed.report())),
        evaluation=evaluation,
        total_s=time.perf_counter() - start_s,
        memory_bytes=memory_bytes(device),
    )
    if ranks.is_first:
        run.exports.make(last)
        write_json(config.run.folder / SUMMARY, summary.as_json())
    return summary


def _evaluate(
    run: Run, eval_set: EvalSet, step: int, log: MetricsLog, samples: MetricsLog, progress: Progress
) -> Evaluation:
    """Judge the model on the held-out samples and write down what was found, with some answers in words."""
    device, autocast = run.device, run.precision.autocast
    with run.weights_to_judge():
        evaluation = eval_set.evaluate(run.trained.head, device, autocast)
        answers = [] if run.questions is None else run.questions.answer(run.model, device, autocast)
    record = {"kind": "evaluation", "step": step, **evaluation.as_record()}
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
