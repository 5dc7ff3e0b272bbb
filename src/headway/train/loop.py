"""The training loop: the steps of a run, from packs of data to their records.

`Loop.take_steps` reads from top to bottom: for each optimizer step, fetch the packs, run them forward and backward,
update, record; now and then evaluate and save. `run.py` sets it up. T is the slots of a pack, L those of them that
this process computes, S the sources.

The run's objective gives the loss of each pack (`objective.py`). That of a step is their sum over accumulation and
ranks, divided by what all of them have: of cross-entropy the supervised tokens, so that neither the packing nor the
number of ranks changes it. Where the head leaves out slots without a label, the ledger bills it for labelled tokens
alone: what is billed is what runs.
"""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import torch

from headway.answer.answers import answer_line, answers_record
from headway.answer.evaluate import EvalSet, Evaluation
from headway.config import TrainConfig
from headway.data import Batch
from headway.data.feed import transfer_ahead
from headway.errors import CheckpointError, NotFiniteError, RankLostError, RunCompleteError, TrainingError, first_line
from headway.log.records import SCHEMA_VERSION
from headway.log.run_files import SAMPLES
from headway.meter import Goodput
from headway.meter.goodput_report import Bucket
from headway.models.parallel.mesh import clipping_factor, gradient_norm
from headway.models.parallel.shard import reduce_gradients
from headway.optim import learning_rate, set_learning_rate, take_step
from headway.train.objective import LoopStep
from headway.train.prepare import Place, Run, begin_checkpoint
from headway.train.progress import Progress, evaluation_line
from headway.train.record import MetricsLog
from headway.train.recorder import LaunchedStep, StepRecorder
from headway.train.share import Flags, StepShare, exchange_step
from headway.train.step_numbers import StepSums
from headway.train.watch import LoopPhase

_SHOWN_ANSWERS = 3  # on the screen; samples.jsonl has all


class Outputs(NamedTuple):
    """Where a run writes down what it does; ranks other than the first write no files and no lines."""

    progress: Progress
    metrics: MetricsLog
    samples: MetricsLog
    goodput: Goodput | None
    recorder: StepRecorder


class LoopEnd(NamedTuple):
    """Where the loop ended.

    Attributes:
        step: number of the last step taken.
        stopped_by: number of the signal that stopped the run; 0 for none.
        data_ended: whether a stream ended before the steps did.
        ended_early: whether evaluations stopped the run, none of which bettered the best one.
        evaluation: the last one; None if there was none.
        batches: packs of the last step, of this process; none if no step was taken.
    """

    step: int
    stopped_by: int
    data_ended: bool
    ended_early: bool
    evaluation: Evaluation | None
    batches: Sequence[Batch]


class Loop:
    """Takes the steps of a run.

    Args:
        config: everything there is to say.
        run: its parts.
        phase: where this process stands, for messages.
        out: where it writes down what it does.
        last: saves the steps.
        stop_signal: gives the number of the signal that asks the run to stop; 0 while there is none.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        phase: LoopPhase,
        out: Outputs,
        last: "LastStep",
        stop_signal: Callable[[], int],
    ) -> None:
        self._config, self._run, self._phase, self._out = config, run, phase, out
        self._last, self._stop_signal = last, stop_signal
        self._step = run.checkpoint.step if run.checkpoint else 0
        self._evaluation: Evaluation | None = None
        self._parameters = [parameter for parameter in run.model.parameters() if parameter.requires_grad]

    def take_steps(self, packs: Iterator[list[Batch]]) -> LoopEnd:
        """Take steps until there are enough, the data end, or a signal or evaluations stop the run.

        Args:
            packs: of each step, of this process; nothing more where the data have ended.

        Raises:
            TrainingError: this process or another one cannot go on.
        """
        config, run, out, last = self._config, self._run, self._out, self._last
        stopped_by, data_ended, ended_early = 0, False, False
        batches: list[Batch] = []
        run.model.train()
        while self._step < run.steps and not stopped_by and not ended_early:
            self._step += 1
            lr = learning_rate(self._step, config.optim, run.steps)
            set_learning_rate(run.optimizer, lr)

            # This rank's packs come before its first forward, and with them what the other ranks' hold.
            batches, shared = self._next_step(packs)
            if data_ended := shared.flags.has_ended:  # a stream ends here; the end of an index is known before the run
                self._step -= 1
                break
            stopped_by = shared.flags.stop_signal

            # Forward and backward, pack by pack; then the update, if there was anything to learn from.
            batches, sums = self._compute(batches, shared)
            self._update(sums, lr, shared, batches)

            # Now and then, and at the end.
            is_last = self._step == run.steps
            is_best = False
            if _is_due(self._step, config.eval.every) or (is_last and config.eval.at_end):
                is_best = self._evaluate()
                ended_early = not is_last and run.best.has_ended(config.eval.stop_after)
            is_to_keep = is_best and bool(config.checkpoint.keep_best)
            if _is_due(self._step, config.checkpoint.every) or is_last or stopped_by or ended_early or is_to_keep:
                last.save()
        if data_ended:  # work of the last step, which is only now known to be the last
            out.progress.note(_data_ended(run, self._step))
            if config.eval.at_end:
                self._evaluate()
            last.save()
        return LoopEnd(self._step, stopped_by, data_ended, ended_early, self._evaluation, batches)

    def leave(self, bucket: Bucket) -> None:
        """Stop training for a while: the device is waited for, and the steps that it has taken are recorded."""
        self._phase.at(bucket)
        meter = self._run.meter
        meter.leave(bucket)
        self._out.recorder.write(meter.merge(self._run.ranks.gather_all(meter.finished())))

    def _next_step(self, packs: Iterator[list[Batch]]) -> tuple[list[Batch], StepShare]:
        """Fetch the packs of the next step, and learn the sums over all ranks' packs.

        What divides the loss is counted over all ranks. With the same message ranks tell each other which steps their
        devices have passed, and what may end the run.
        """
        run, phase = self._run, self._phase
        phase.at("data wait", step=self._step)
        run.meter.await_data()
        batches, failure = _next_packs(packs)
        run.meter.got_data()
        is_at_end = not batches and failure is None  # a stream's lanes need not end together
        reason = "" if failure is None else first_line(failure)  # for the other processes
        flags = Flags(is_at_end, self._stop_signal(), run.saver.has_failed, reason)
        batches = batches or [run.feed.padding() for _ in range(self._config.optim.accumulation)]
        phase.at("exchange of what each rank computes")
        with run.meter.exchanging():
            batches, shared, finished = exchange_step(
                batches, run.feed, run.ranks, flags, run.objective.counts, run.meter.finished()
            )
        phase.at("logging")
        self._out.recorder.write(run.meter.merge(finished))
        run.saver.finished(wait=shared.flags.save_failed)
        if shared.flags.failure:
            phase.at("data wait")
            self._last.all_know = True
            raise failure or TrainingError(f"{shared.flags.failure}. This process ends too.")
        return batches, shared

    def _compute(self, batches: Sequence[Batch], shared: StepShare) -> tuple[list[Batch], StepSums]:
        """Run a step's packs forward and backward; returns them as they ran, and the sums of their losses."""
        run, phase = self._run, self._phase
        sums = StepSums(len(run.feed.names), run.objective.terms, run.device)
        step = LoopStep(self._step, shared, sums, run.meter)
        phase.at("forward")
        ready = run.objective.begin(batches, step)
        for number, batch in enumerate(transfer_ahead(ready, run.device), start=1):
            phase.at("forward", batch=batch)
            reduce_gradients(run.model, now=number == len(ready) or self._config.parallel.reduce == "pack")
            pack = run.objective.pack_loss(batch, step)
            phase.at("backward", batch=batch)
            torch.autograd.backward(pack.total)
            sums.add(pack)
            run.meter.count(batch.work(skips_unlabelled=run.trained.model_with_loss.skips_unlabelled))
        return ready, sums

    def _update(self, sums: StepSums, lr: float, shared: StepShare, batches: list[Batch]) -> None:
        """Take the optimizer's step on clipped gradients; its numbers are recorded once the device has passed it."""
        run, optim, ranks = self._run, self._config.optim, self._run.ranks
        self._phase.at("update")
        self._last.updating()
        compilations = run.trained.compile_watch.since()
        numbers = sums.over_ranks(
            len(compilations.guards),
            ranks.sum_,
            norm=lambda: gradient_norm(self._parameters),
            router=run.router_load.take,
        )
        # the optimizer multiplies gradients by the factor that clips them, while it reads them
        factor = None if optim.clip is None else clipping_factor(numbers.grad_norm, optim.clip)
        skips = optim.on_nonfinite == "skip"
        take_step(run.optimizer, numbers.vector_K, factor=factor, skips=skips, learns=shared.learns)
        if run.ema is not None and shared.learns:
            run.ema.update(self._step)
        run.optimizer.zero_grad(set_to_none=True)
        self._last.complete(self._step)
        feed, data_ranks = run.feed, ranks.num_data_ranks
        making_s = dict(feed.making_s)
        launched = LaunchedStep(self._step, lr, feed.epochs, shared, batches, data_ranks, compilations, making_s)
        self._out.recorder.add(launched, numbers)
        run.meter.step()
        self._out.progress.recompiled(self._step, compilations.news)

    def _evaluate(self) -> bool:
        """Judge the model after a step, outside of the time of training; whether it is the best so far."""
        if self._run.eval_set is None:
            return False
        self.leave("evaluation")
        self._evaluation, is_best = _judge(self._run, self._run.eval_set, self._step, self._out)
        self._last.complete(self._step)
        return is_best


def _next_packs(steps: Iterator[list[Batch]]) -> tuple[list[Batch], Exception | None]:
    """The packs of the next step, none where the data have ended; or the error that keeps this process from any."""
    try:
        return next(steps, []), None
    except Exception as error:  # noqa: BLE001 - raised as soon as all processes know of it
        return [], error


def _judge(run: Run, eval_set: EvalSet, step: int, out: Outputs) -> tuple[Evaluation, bool]:
    """Judge the model on the held-out samples and write down the results, with some answers in words.

    Returns:
        The evaluation, and whether it is the best so far; the same on all processes.
    """
    device, autocast = run.device, run.precision.autocast
    with run.weights_to_judge():
        evaluation = eval_set.evaluate(run.trained.model_with_loss, device, autocast)
        evaluation = run.ranks.gather_all(evaluation)[0]  # to the last bit, as they stop by it together
        answers = [] if run.generation_eval is None else run.generation_eval.answer(run.model, device, autocast)
    record = {"schema_version": SCHEMA_VERSION, "kind": "evaluation", "step": step, **evaluation.to_dict()}
    is_best = run.best.add(step, evaluation)
    out.metrics.write(record)
    out.progress.note(evaluation_line(record, run.best))
    out.progress.parted(out.metrics.held_out.parting)
    for number, answer in enumerate(answers):
        out.samples.write(answer.to_dict(step))
        if number < _SHOWN_ANSWERS:
            out.progress.note(f"  {answer_line(answer)}")
    if len(answers) > _SHOWN_ANSWERS:
        out.progress.note(f"  and {len(answers) - _SHOWN_ANSWERS} more answers, in {SAMPLES}")
    if answers:
        out.metrics.write(answers_record(step, answers))
    return evaluation, is_best


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _data_ended(run: Run, step: int) -> str:
    """Note on a stream that ends before the steps do."""
    if step == (run.checkpoint.step if run.checkpoint else 0):
        kind = RunCompleteError if run.checkpoint else TrainingError
        raise kind(
            f"the data ended after step {step} of {run.steps}, so there is nothing to train on. Leave 'epochs' out "
            "of data.train to train for all steps, or give more data."
        )
    return (
        f"warning: the data ended after step {step} of {run.steps}, so the run ends before its schedule. Leave "
        "'epochs' out of data.train to train for all steps."
    )


class LastStep:
    """Saves the steps of a run: those that it is told to, and the last complete one when an error ends the run.

    An error that comes between two updates leaves weights and optimizer as the step before made them; with the place in
    the data and the random generators as they were then, that step is as good as one that was saved at once. So it is
    saved, unless

    * the update itself failed, or its numbers were not finite: then the weights are lost;
    * the disk refused a checkpoint, or another process has ended;
    * there are several processes, and they do not all know of the error. One that fails alone in a forward, backward or
      evaluation leaves the others within an exchange that it will never come to. They would wait for each other until
      their time is up; so it ends at once, and the others with it.

    Args:
        run: its parts.
        recorder: of its steps.
        leave: waits for the device, and records the steps that it has taken.
        note: prints a line.

    Attributes:
        all_know: whether all processes know of the error that is raised next; a lone process always does.
    """

    def __init__(
        self, run: Run, recorder: StepRecorder, leave: Callable[[], None], note: Callable[[str], None]
    ) -> None:
        self._run, self._recorder, self._leave, self._note = run, recorder, leave, note
        self._saved = run.checkpoint.step if run.checkpoint else 0
        self._place: Place | None = None
        self.all_know = run.ranks.size == 1

    def updating(self) -> None:
        """Note that the weights change from now on, so that they are of no step until `complete`."""
        self._place = None

    def complete(self, step: int) -> None:
        """Note that a step is complete, and where the run stands behind it."""
        self._place = self._run.place(step)

    def save(self, *, goes_on: bool = True) -> None:
        """Begin to save the step, all processes together.

        Args:
            goes_on: whether training may go on meanwhile.

        Raises:
            CheckpointError: the checkpoint before could not be written, or this one.
            NotFiniteError: the numbers of a step are not finite.
        """
        assert self._place is not None
        self._leave()
        self._saved = self._place.step
        if self._run.meter.goodput is not None:  # before it is written: a kill may come right after
            self._run.meter.goodput.checkpoint_saved(self._saved)
        begin_checkpoint(self._run, self._place, self._recorder.behind(), goes_on=goes_on)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._place is None or self._place.step <= self._saved or not self._may_save_after(error):
            return
        step = self._place.step
        try:
            self.save(goes_on=False)
            folder = self._run.saver.wait().folder
        except Exception as reason:  # noqa: BLE001 - the error that ends the run is the one to be raised
            self._note(f"step {step}, the last complete one, could not be saved: {reason}")
        else:
            self._note(f"an error ends the run; step {step}, the last complete one, is saved in {folder}")

    def _may_save_after(self, error: BaseException | None) -> bool:
        fatal = (NotFiniteError, CheckpointError, RankLostError)
        return self.all_know and isinstance(error, Exception) and not isinstance(error, fatal)
