"""One plain PyTorch loop, bare and under each meter; `metering.py` times them.

A contender is a generator: it sets up, yields a function that runs the steps (and may tell their seconds itself), and
tidies up.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import mfu_tracker
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from mfu_tracker.gpu import GPUSpec
from torch.utils.flop_counter import FlopCounterMode

from headway import Workload, load_cost_model
from headway.compat import mfu_tracker as compat
from headway.devices import Peak
from headway.meter import Meter

LOG_EVERY = 10
COST_MODEL = load_cost_model("qwen3-0.6b")
PEAK = Peak("any", 1e30, "bf16", "an MFU that no step can pass")
SPEC = GPUSpec("any", (9, 0), 1, 1.0, 1.0, {"bf16": 1e30}, 1.0)


@dataclass
class Loop:
    """A model and the batch that each step trains it on."""

    model: torch.nn.Module
    batch: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def loss(self) -> torch.Tensor:
        """Run a forward."""
        out = self.model(**self.batch)
        return out if isinstance(out, torch.Tensor) else out.loss

    def train(self) -> None:
        """Take one step."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


Contender = Callable[[Loop, int], Iterator[Callable[[], float | None]]]


def bare(loop: Loop, steps: int) -> Iterator[Callable[[], float | None]]:
    """Nothing is metered."""

    def go() -> None:
        for _ in range(steps):
            loop.train()

    yield go


def headway_batch(loop: Loop, steps: int) -> Iterator[Callable[[], float | None]]:
    """Meter the batch that the model is given, padding mask read."""
    meter = Meter(COST_MODEL, peak=PEAK, log_every=LOG_EVERY)
    meter.start()

    def go() -> None:
        for _ in range(steps):
            meter.count(loop.batch)
            loop.train()
            meter.step()

    yield go


def headway_workload(loop: Loop, steps: int) -> Iterator[Callable[[], float | None]]:
    """Meter the workload that a collator made."""
    workload = Workload.from_attention_mask(loop.batch["attention_mask"])
    meter = Meter(COST_MODEL, peak=PEAK, log_every=LOG_EVERY)
    meter.start()

    def go() -> None:
        for _ in range(steps):
            meter.count(workload)
            loop.train()
            meter.step()

    yield go


def _nothing(*_: object) -> None:
    """Stand in for a call that needs a GPU; a `Mock` would cost more than what is measured."""


def _spec(*_: object) -> GPUSpec:
    return SPEC


class _Event:
    """A stand-in for a CUDA event."""

    def __init__(self, *, enable_timing: bool) -> None: ...

    def record(self, *_: object) -> None: ...

    def elapsed_time(self, _end: "_Event") -> float:
        return 1.0


def headway_track(loop: Loop, steps: int) -> Iterator[Callable[[], float | None]]:
    """Bill a constant, in the very call that mfu-tracker takes."""

    def go() -> None:
        for step in range(steps):
            with compat.track(10**9, 10**9, dtype="bf16", spec=SPEC) as result:
                loop.train()
            if step % LOG_EVERY == 0:
                _ = result.mfu

    yield go


def mfu_tracker_track(loop: Loop, steps: int) -> Iterator[Callable[[], float | None]]:
    """Bill a constant; its `track` waits for the GPU twice a step, here a stand-in."""
    with mock.patch("torch.cuda.synchronize", _nothing):

        def go() -> None:
            for step in range(steps):
                with mfu_tracker.track(10**9, 10**9, dtype="bf16", spec=SPEC) as result:
                    loop.train()
                if step % LOG_EVERY == 0:
                    _ = result.mfu

        yield go


def mfu_tracker_wrapper(loop: Loop, steps: int) -> Iterator[Callable[[], float | None]]:
    """Bill a constant; its optimizer wrapper records CUDA events, here stand-ins."""
    batch = {key: value[:1] for key, value in loop.batch.items()}
    with (
        mock.patch("torch.cuda.synchronize", _nothing),
        mock.patch("torch.cuda.Event", _Event),
        mock.patch("mfu_tracker.optim.get_gpu_spec", _spec),
    ):
        wrapper = mfu_tracker.MFUOptimizerWrapper(loop.optimizer, loop.model, sample_batch=batch, dtype="bf16")
        wrapper.profile()

        def go() -> None:
            for step in range(steps):
                with wrapper.track_step() as result:
                    loop.loss().backward()
                wrapper.step()
                if step % LOG_EVERY == 0:
                    _ = result.mfu

        yield go


def flop_counter_mode(loop: Loop, steps: int) -> Iterator[Callable[[], float | None]]:
    """Count every operator of every step."""

    def go() -> None:
        for _ in range(steps):
            with FlopCounterMode(display=False) as counter:
                loop.train()
            counter.get_total_flops()

    yield go


class MegatronStyle:
    """Accumulate token counts and squared lengths on the device, as Megatron-Bridge's packed fix is described."""

    def __init__(self) -> None:
        self.linear, self.square = 0, torch.zeros((), dtype=torch.float64)

    def accumulate(self, tokens: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
        """Add a micro-batch."""
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).double()
        self.linear += tokens.numel()
        self.square += (lengths * lengths).sum()

    def read(self) -> float:
        """Read and reset, as when a line is logged."""
        flops = 6.0 * self.linear + 12.0 * self.square.item()
        self.linear = 0
        self.square.zero_()
        return flops


def megatron_style(loop: Loop, steps: int) -> Iterator[Callable[[], float | None]]:
    """Accumulate from boundaries that the loader made."""
    lengths = loop.batch["attention_mask"].sum(1)
    boundaries = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    counter = MegatronStyle()

    def go() -> None:
        for step in range(steps):
            counter.accumulate(loop.batch["input_ids"], boundaries)
            loop.train()
            if (step + 1) % LOG_EVERY == 0:
                counter.read()

    yield go


class Lit(pl.LightningModule):
    """The loop's model in Lightning's clothes."""

    flops_per_batch = 10**9

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop, self.model = loop, loop.model

    def training_step(self, _batch: Any, _index: int) -> torch.Tensor:
        """Run the loop's forward."""
        return self.loop.loss()

    def on_train_start(self) -> None:
        """Start the clock: what comes before is set-up."""
        self.start_s = time.perf_counter()

    def on_train_end(self) -> None:
        """Stop the clock."""
        self.end_s = time.perf_counter()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Hand over the loop's optimizer."""
        return self.loop.optimizer


def lightning(loop: Loop, steps: int, *callbacks: pl.Callback) -> Iterator[Callable[[], float | None]]:
    """Run Lightning's Trainer on the same batch."""
    trainer = pl.Trainer(
        max_steps=steps, logger=False, callbacks=list(callbacks), enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=LOG_EVERY,
    )  # fmt: skip
    module = Lit(loop)
    batches = torch.utils.data.DataLoader([loop.batch] * steps, batch_size=None)

    def go() -> float:
        trainer.fit(module, batches)
        return module.end_s - module.start_s

    yield go


def lightning_monitor(loop: Loop, steps: int) -> Iterator[Callable[[], float | None]]:
    """Let Lightning's ThroughputMonitor bill a constant per batch."""
    monitor = ThroughputMonitor(lambda batch: batch["input_ids"].size(0), lambda batch: batch["input_ids"].size(1))
    yield from lightning(loop, steps, monitor)


CONTENDERS: dict[str, Contender] = {
    "bare loop": bare,
    "bare Lightning loop": lightning,
    "headway.Meter, workload made by the collator": headway_workload,
    "headway.Meter, padding mask read": headway_batch,
    "headway's track of a stated number": headway_track,
    "mfu_tracker.track": mfu_tracker_track,
    "mfu_tracker.MFUOptimizerWrapper": mfu_tracker_wrapper,
    "torch FlopCounterMode": flop_counter_mode,
    "Megatron-style accumulator": megatron_style,
    "Lightning ThroughputMonitor": lightning_monitor,
}
ADDED_TO = {
    name: "bare Lightning loop" if "Lightning" in name else "bare loop"
    for name in CONTENDERS
    if not name.startswith("bare")
}
