"""Cases of `explain_faults.py`: 37 faults, each with the findings that would name it, and 20 healthy runs."""

import gc
import logging
import os
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from explain_faults_loops import (
    Batch,
    Lengths,
    Loop,
    Times,
    batches,
    busy,
    packed,
    padded,
    run_ddp,
    run_plain,
    run_train,
    run_trainer,
    small_model,
    train_step,
    without_sync,
)

DATA = {"data-bound", "data-storage", "data-decoding", "data-tokenising"}
MEAN_LENGTH = 47  # tokens of a sample of varied length, e^(3.6 + 0.7^2 / 2)
READS = {"read-back", "synchronisation"}


@dataclass(frozen=True)
class Case:
    """A planted fault, or a healthy run.

    Attributes:
        fault: in words.
        names: findings that name it; none of a healthy run.
        make: what the loop needs, given whether the fault is planted.
        run: the loop.
        num_ranks: processes.
    """

    fault: str
    names: frozenset[str]
    make: Callable[[bool], Any]
    run: Callable[[Any, Path], Times]
    num_ranks: int = 1


CASES: dict[str, Case] = {}


def case(fault: str, *names: str, run: Any = run_plain, num_ranks: int = 1) -> Callable[[Any], Any]:
    """Add a function to the cases, under its name."""

    def add(make: Callable[[bool], Any]) -> Callable[[bool], Any]:
        CASES[make.__name__] = Case(fault, frozenset(names), make, run, num_ranks)
        return make

    return add


def after(action: Callable[[Loop], None]) -> Any:
    """Make a step that does something else behind its update."""

    def step(loop: Loop, batch: Batch, count: Any) -> None:
        train_step(loop, batch, count)
        action(loop)

    return step


def healthy_step(is_faulty: bool, step: Any) -> Any:
    """Choose the faulty step, or the usual one."""
    return step if is_faulty else train_step


# Faults of plain loops.


@case("`.item()` per layer and per parameter", *READS)
def item_each_layer(is_faulty: bool) -> Loop:
    """Read a standard deviation of each layer and a norm of each gradient."""
    model = small_model(hidden_size=64, intermediate_size=128, num_hidden_layers=6)
    numbers: list[float] = []

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        numbers.append((output[0] if isinstance(output, tuple) else output).std().item())

    def step(loop: Loop, batch: Batch, count: Any) -> None:
        count(batch)
        loss = loop.model(**batch).loss
        loss.backward()
        for parameter in loop.model.parameters():
            numbers.append(parameter.grad.norm().item())
            numbers.append(parameter.grad.abs().max().item())
            numbers.append(parameter.norm().item())
        loop.update()
        numbers.append(loss.item())

    if is_faulty:
        for layer in model.model.layers:
            layer.register_forward_hook(note)
    return Loop(model, batches(Lengths(64), 4), step=healthy_step(is_faulty, step))


@case("slow collating, no workers", *DATA)
def slow_collate(is_faulty: bool) -> Loop:
    """Compute in the collator."""
    return Loop(small_model(), batches(collate=partial(padded, delay_s=0.4 * is_faulty)))


@case("one slow worker", *DATA)
def slow_worker(is_faulty: bool) -> Loop:
    """Collate in one worker that is slower than the step."""
    return Loop(small_model(), batches(workers=1, collate=partial(padded, delay_s=0.8 * is_faulty)))


@case("tokenising in Python", *DATA)
def python_tokenising(is_faulty: bool) -> Loop:
    """Look for the longest piece at each character, in the main process."""
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(list(string.ascii_letters + " "), 40_000))

    class Texts(Lengths):
        """Texts that are tokenised when they are asked for."""

        def __getitem__(self, index: int) -> torch.Tensor:
            if is_faulty:
                pieces = [max((text[k : k + n] for n in (1, 2, 3)), key=hash) for k in range(40_000)]
                assert pieces
            return super().__getitem__(index)

    return Loop(small_model(), batches(Texts()))


@case("`gc.collect()` in every step", "garbage-collection")
def collects_garbage(is_faulty: bool) -> Loop:
    """Collect a large heap in every step."""
    heap = [[{"a": [j]} for j in range(60)] for _ in range(12_000)]
    return Loop(small_model(), step=healthy_step(is_faulty, after(lambda _: (gc.collect(), len(heap))[0] and None)))


@case("a logging handler that blocks", "host-pause", "logging")
def blocking_logging(is_faulty: bool) -> Loop:
    """Log to a handler that takes 0.4 s."""

    class Slow(logging.Handler):
        """A handler behind a slow connection."""

        def emit(self, _record: logging.LogRecord) -> None:
            """Wait."""
            time.sleep(0.4)

    logger = logging.getLogger("slow")
    logger.setLevel("INFO")
    logger.handlers = [Slow()]
    logger.propagate = False
    return Loop(small_model(), step=healthy_step(is_faulty, after(lambda _: logger.info("a step"))))


@case("padding to the maximum", "padding")
def pads_to_maximum(is_faulty: bool) -> Loop:
    """Pad short samples to 256 tokens; healthy: as many tokens without padding."""
    samples = Lengths(varied=True) if is_faulty else Lengths(MEAN_LENGTH)
    return Loop(small_model(), batches(samples, collate=partial(padded, to=256) if is_faulty else padded))


@case("lengths that vary, padded to the longest of 48", "padding")
def pads_to_longest(is_faulty: bool) -> Loop:
    """Pad batches of unsorted lengths; healthy: as many tokens without padding."""
    return Loop(small_model(), batches(Lengths(512, varied=True) if is_faulty else Lengths(MEAN_LENGTH), 48))


@case("a vocabulary of 60,000 on a width of 64", "large-head")
def huge_vocabulary(is_faulty: bool) -> Loop:
    """Project on a vocabulary that dwarfs the model; healthy: on 1,000 tokens."""
    vocabulary = 60_000 if is_faulty else 1000
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return Loop(small_model(vocab_size=vocabulary, **sizes), batches(Lengths(128, vocabulary=vocabulary), 2))


@case("a checkpoint written and synced, unannounced", "host-pause", "checkpoint")
def silent_checkpoint(is_faulty: bool) -> Loop:
    """Save and fsync six times a step."""
    path = Path(tempfile.mkdtemp()) / "state.pt"

    def save(loop: Loop) -> None:
        for _ in range(6):
            with path.open("wb") as file:
                torch.save([loop.model.state_dict(), loop.optimizer.state_dict()], file)
                os.fsync(file.fileno())

    return Loop(small_model(vocab_size=8000), step=healthy_step(is_faulty, after(save)))


@case("steps of one sample of 8 tokens", "launch-bound", "small-gemms")
def tiny_batches(is_faulty: bool) -> Loop:
    """Train on one sample of 8 tokens a step. Healthy: a step of 32 samples, and a 32nd of its time."""
    model = small_model(hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    rows = 1 if is_faulty else 32
    return Loop(model, batches(Lengths(8), rows), scale=float(rows))


@case("eager attention over 1,024 tokens", "eager-attention")
def eager_attention(is_faulty: bool) -> Loop:
    """Write attention out; healthy: sdpa."""
    model = small_model(attn_implementation="eager" if is_faulty else "sdpa", num_hidden_layers=2)
    return Loop(model, batches(Lengths(1024), 1))


@case("a length that changes, `torch.compile(dynamic=False)`", "recompilation")
def compiles_each_step(is_faulty: bool) -> Loop:
    """Compile a step anew for every length; healthy: not compiled."""
    torch._dynamo.reset()
    torch._dynamo.config.cache_size_limit = 64
    model = small_model(num_hidden_layers=1)
    lengths = (
        {"input_ids": ids, "labels": ids} for n in range(1000) for ids in [torch.randint(1, 1000, (2, 32 + 8 * n))]
    )
    compiled = torch.compile(model, dynamic=False, backend="aot_eager") if is_faulty else None
    return Loop(model, lengths, call=compiled)


@case("AdamW one tensor at a time", "optimizer-loop")
def loop_of_updates(is_faulty: bool) -> Loop:
    """Update with foreach=False; healthy: fused."""
    model = small_model(num_hidden_layers=10, hidden_size=64, intermediate_size=128)
    kind = {"foreach": False, "fused": False} if is_faulty else {"fused": True}
    return Loop(model, batches(Lengths(64), 1), torch.optim.AdamW(model.parameters(), lr=1e-4, **kind))


@case("clipping in Python, a `float()` per parameter", *READS, "parameter-loop")
def clips_in_python(is_faulty: bool) -> Loop:
    """Clip gradients one tensor after the other."""

    def step(loop: Loop, batch: Batch, count: Any) -> None:
        count(batch)
        loop.model(**batch).loss.backward()
        total = 0.0
        for parameter in loop.model.parameters():
            total += float((parameter.grad**2).sum())
        for parameter in loop.model.parameters():
            parameter.grad.mul_(min(1.0, 1.0 / (total**0.5 + 1e-6)))
        loop.update()

    model = small_model(num_hidden_layers=10, hidden_size=64, intermediate_size=128)
    return Loop(model, batches(Lengths(32), 1), step=healthy_step(is_faulty, step))


@case("checkpointing without need", "recomputation")
def needless_checkpointing(is_faulty: bool) -> Loop:
    """Recompute all blocks of a small model."""
    model = small_model()
    if is_faulty:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Loop(model, meter={"recompute": "full"} if is_faulty else {})


@case("0.5 s of work in the loop's body", "host-pause")
def work_in_the_body(is_faulty: bool) -> Loop:
    """Prepare data behind the meter's back."""

    def step(loop: Loop, batch: Batch, count: Any) -> None:
        busy(0.5)
        train_step(loop, batch, count)

    return Loop(small_model(), step=healthy_step(is_faulty, step))


@case("`set_detect_anomaly(True)`", "anomaly-mode")
def detects_anomalies(is_faulty: bool) -> Loop:
    """Leave anomaly mode on."""
    torch.autograd.set_detect_anomaly(is_faulty)
    return Loop(small_model(), batches(Lengths(64), 2))


@case("entropy of the logits in 64 bits", "double-precision")
def entropy_in_doubles(is_faulty: bool) -> Loop:
    """Compute an entropy beside the loss in fp64; healthy: in fp32."""

    def step(loop: Loop, batch: Batch, count: Any) -> None:
        count(batch)
        output = loop.model(**batch)
        log_p = torch.log_softmax(output.logits.double() if is_faulty else output.logits, -1)
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        (output.loss + 0 * entropy.float()).backward()
        loop.update()

    return Loop(small_model(vocab_size=8000), batches(Lengths(128, vocabulary=8000)), step=step)


# Faults under Hugging Face's Trainer.


@case("Trainer: padding to the maximum", "padding", run=run_trainer)
def trainer_pads_to_maximum(is_faulty: bool) -> dict[str, Any]:
    """Pad short samples to 256 tokens; healthy: as many tokens without padding."""
    samples = Lengths(varied=True) if is_faulty else Lengths(MEAN_LENGTH)
    return {"samples": samples, "collate": partial(padded, to=256) if is_faulty else padded}


@case("Trainer: a checkpoint every step", "checkpoint", "host-pause", run=run_trainer)
def trainer_saves_each_step(is_faulty: bool) -> dict[str, Any]:
    """Save at every step."""
    often = {"save_strategy": "steps", "save_steps": 1} if is_faulty else {}
    return {"model": small_model(vocab_size=20_000), "arguments": often, "samples": Lengths(64)}


@case("Trainer: an evaluation every step", "evaluation", run=run_trainer)
def trainer_evaluates_each_step(is_faulty: bool) -> dict[str, Any]:
    """Evaluate at every step."""
    return {"arguments": {"eval_strategy": "steps", "eval_steps": 1} if is_faulty else {}}


@case("Trainer: a callback that sleeps", "host-pause", run=run_trainer)
def trainer_callback_sleeps(is_faulty: bool) -> dict[str, Any]:
    """Wait in a callback."""

    class Slow(TrainerCallback):
        """Calls a service that answers slowly."""

        def on_step_end(self, *_args: Any, **_options: Any) -> None:
            """Wait."""
            time.sleep(0.4)

    return {"callbacks": [Slow()] if is_faulty else []}


@case("Trainer: gradient checkpointing without need", "recomputation", run=run_trainer)
def trainer_checkpoints(is_faulty: bool) -> dict[str, Any]:
    """Recompute all blocks of a small model."""
    return {"arguments": {"gradient_checkpointing": is_faulty}}


# Faults of several processes, whose gradients DDP averages over gloo.


def ddp_loop(
    *, held_up_rank: Callable[[], None] | None = None, rank: int = 1, rows: int = 2, longest: int = 128, **options: Any
) -> Loop:
    """A loop under DDP in which one rank may be held up before its forward."""

    def step(loop: Loop, batch: Batch, count: Any) -> None:
        if held_up_rank is not None and dist.get_rank() == rank:
            held_up_rank()
        train_step(loop, batch, count)

    return Loop(DistributedDataParallel(small_model()), batches(Lengths(longest), rows), step=step, **options)


def extra_products() -> None:
    """Compute what nobody asked for, as a device that is shared does."""
    for _ in range(60):
        torch.randn(300, 300) @ torch.randn(300, 300)


@case("DDP: one rank computes slowly", "slow-rank", run=run_ddp, num_ranks=2)
def ddp_slow_rank(is_faulty: bool) -> Loop:
    """Give a rank extra work in forward."""
    return ddp_loop(held_up_rank=extra_products if is_faulty else None)


@case("DDP: one rank sleeps", "slow-rank", run=run_ddp, num_ranks=2)
def ddp_rank_sleeps(is_faulty: bool) -> Loop:
    """Hold a rank up before its forward."""
    return ddp_loop(held_up_rank=partial(time.sleep, 0.6) if is_faulty else None)


def accumulating_loop(is_synced_each_time: bool, rows: int = 1, longest: int = 32) -> Loop:
    """A DDP loop of eight passes a step."""

    def step(loop: Loop, batch: Batch, count: Any) -> None:
        for number in range(8):
            count(batch)
            with nullcontext() if is_synced_each_time else without_sync(loop.model, number == 7):
                (loop.model(**batch).loss / 8).backward()
        loop.update()

    model = DistributedDataParallel(small_model(vocab_size=8000))
    return Loop(model, batches(Lengths(longest, vocabulary=8000), rows), step=step)


@case("DDP: accumulation that reduces each time", "reduces-each-pass", run=run_ddp, num_ranks=2)
def ddp_accumulates_with_sync(is_faulty: bool) -> Loop:
    """Leave out no_sync."""
    return accumulating_loop(is_faulty)


# Ten more.


@case("a program started in every step", "host-pause")
def starts_a_program(is_faulty: bool) -> Loop:
    """Ask another program for something, as `nvidia-smi`."""
    command = [sys.executable, "-c", "import time; time.sleep(0.3)"]
    action = after(lambda _: subprocess.run(command, check=True) and None)
    return Loop(small_model(), step=healthy_step(is_faulty, action))


@case("a linear layer per token", "small-gemms")
def layer_per_token(is_faulty: bool) -> Loop:
    """Call a layer on one token after the other; healthy: on all at once."""

    class Gate(nn.Module):
        """A gate of eight experts."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(128, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Multiply token by token."""
            if is_faulty:
                return torch.cat([self.weight(token) for token in x.flatten(0, 1).split(1)])
            return self.weight(x).flatten(0, 1)

    model = small_model()
    model.gate = Gate()

    def call(**batch: torch.Tensor) -> Any:
        output = model(**batch, output_hidden_states=True)
        output.loss = output.loss + model.gate(output.hidden_states[-1]).square().mean()
        return output

    cost_model = {"cost_model": _cost_model()}
    return Loop(model, batches(Lengths(256), 2), call=call, meter=cost_model)


def _cost_model() -> Any:
    """Trace the model without what a case adds to it."""
    from headway.tracing import trace

    return trace(small_model())


@case("a model in 64 bits", "double-precision")
def model_in_doubles(is_faulty: bool) -> Loop:
    """Train in fp64, as what NumPy's numbers were made into."""
    model = small_model(attn_implementation="sdpa")
    return Loop(model.double() if is_faulty else model, meter={"cost_model": _cost_model()})


@case("garbage collected after every 50 objects", "garbage-collection")
def collects_often(is_faulty: bool) -> Loop:
    """Set the threshold of collections low, with a large heap."""
    gc.set_threshold(*((50, 2, 2) if is_faulty else (700, 10, 10)))
    heap = [[{"a": [j]} for j in range(20)] for _ in range(3000)]

    def step(loop: Loop, batch: Batch, count: Any) -> None:
        train_step(loop, batch, count)
        assert [[n] for n in range(20_000)]
        assert heap

    return Loop(small_model(), batches(Lengths(64), 2), step=step)


@case("an average of the weights, tensor by tensor", "parameter-loop")
def averages_weights(is_faulty: bool) -> Loop:
    """Keep three moving averages in Python."""
    model = small_model(num_hidden_layers=10, hidden_size=64, intermediate_size=128)
    averages = [[p.detach().clone() for p in model.parameters()] for _ in range(3)]

    def step(loop: Loop, batch: Batch, count: Any) -> None:
        train_step(loop, batch, count)
        with torch.no_grad():
            for copies in averages:
                for average, parameter in zip(copies, loop.model.parameters(), strict=True):
                    average.mul_(0.999).add_(parameter * 0.001)

    return Loop(model, batches(Lengths(32), 1), step=healthy_step(is_faulty, step))


@case("Trainer: histograms of the weights", "host-pause", "parameter-loop", *READS, run=run_trainer)
def trainer_histograms(is_faulty: bool) -> dict[str, Any]:
    """Count the weights in NumPy after every step."""

    class Histograms(TrainerCallback):
        """What a tracker shows of weights."""

        def on_step_end(self, *_args: Any, model: Any = None, **_options: Any) -> None:
            """Sort every tensor's numbers into 512 bins."""
            for parameter in model.parameters():
                np.histogram(np.sort(parameter.detach().numpy().ravel()), bins=512)

    model = small_model(vocab_size=8000)
    return {"callbacks": [Histograms()] if is_faulty else [], "model": model, "samples": Lengths(128)}


@case("DDP: one rank of three waits for data", "slow-rank", *DATA, run=run_ddp, num_ranks=3)
def ddp_slow_data(is_faulty: bool) -> Loop:
    """Give one rank a slow loader."""
    is_slow = is_faulty and dist.get_rank() == 2
    samples = Lengths(128, delay_s=0.3 if is_slow else 0.0)
    return Loop(DistributedDataParallel(small_model()), batches(samples, 2))


@case("headway train: recomputation without need", "recomputation", run=run_train)
def train_recomputes(is_faulty: bool) -> dict[str, Any]:
    """Recompute all blocks."""
    return {"settings": {"speed.recompute": "full" if is_faulty else "none"}}


@case("headway train: slow storage", "data-storage", run=run_train)
def train_slow_storage(is_faulty: bool) -> dict[str, Any]:
    """Read each sample from a storage that answers slowly."""
    from headway.data.sources import Source

    read = Source.__getitem__

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.06 * is_faulty)
        return read(*arguments)

    settings = {"data.workers": 0, "data.prefetch_bytes": 0}
    return {"settings": settings, "held_up": patch.object(Source, "__getitem__", slowly)}


@case("headway train: packs padded to a large bucket", "padding", run=run_train)
def train_pads(is_faulty: bool) -> dict[str, Any]:
    """Pad packs of 512 tokens to 2,048."""
    return {"settings": {"data.tokens_per_pack": 512, **({"data.bucket_tokens": 2048} if is_faulty else {})}}


# Healthy runs: nothing is to be found.


def healthy(name: str, make: Callable[[], Any], *, run: Any = run_plain, num_ranks: int = 1) -> None:
    """Add a run without a fault."""
    CASES[f"healthy_{name}"] = Case(name.replace("_", " "), frozenset(), lambda _: make(), run, num_ranks)


def _logs(loop: Loop, batch: Batch, count: Any) -> None:
    count(batch)
    loss = loop.model(**batch).loss
    loss.backward()
    loop.update()
    assert loss.item() > 0


def _accumulates(loop: Loop, batch: Batch, count: Any) -> None:
    for _ in range(2):
        count(batch)
        (loop.model(**batch).loss / 2).backward()
    loop.update()


def _clips(loop: Loop, batch: Batch, count: Any) -> None:
    count(batch)
    loop.model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.update()


def _gpt2() -> Loop:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 512, "n_positions": 512, "n_embd": 128, "n_layer": 2, "n_head": 2}
    # GPT-2's usual activation is written out, and with dropout PyTorch writes attention out on a CPU.
    sizes |= {"activation_function": "gelu", "attn_pdrop": 0.0}
    return Loop(GPT2LMHeadModel(GPT2Config(**sizes)).train(), batches(Lengths(vocabulary=500)))


def _foreach() -> Loop:
    model = small_model()
    return Loop(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True))


def _sgd() -> Loop:
    model = small_model()
    return Loop(model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))


healthy("plain", lambda: Loop(small_model()))
healthy("wide", lambda: Loop(small_model(hidden_size=256, intermediate_size=768), batches(rows=8)))
healthy("deep", lambda: Loop(small_model(num_hidden_layers=8), batches(rows=2)))
healthy("reads_the_loss", lambda: Loop(small_model(), step=_logs))
healthy("accumulates", lambda: Loop(small_model(), step=_accumulates))
healthy("clips_at_once", lambda: Loop(small_model(), step=_clips))
healthy("foreach", _foreach)
healthy("sgd", _sgd)
healthy("gpt2", _gpt2)
healthy("packed", lambda: Loop(small_model(), batches(Lengths(varied=True), 12, collate=packed)))
healthy("two_workers", lambda: Loop(small_model(), batches(workers=2)))
healthy("long_rows", lambda: Loop(small_model(), batches(Lengths(512), 2)))
healthy("trainer", dict, run=run_trainer)
healthy("trainer_accumulates", lambda: {"arguments": {"gradient_accumulation_steps": 2}}, run=run_trainer)
healthy("trainer_packed", lambda: {"samples": Lengths(256), "collate": packed}, run=run_trainer)
# Gradients of two rows of 128 tokens take a quarter of a step to exchange (a loop under no_sync is the witness), which
# is no healthy run; those of eight rows of 256 take 6 %.
healthy("ddp", lambda: ddp_loop(rows=8, longest=256), run=run_ddp, num_ranks=2)
# The same of passes: eight of 32 tokens exchange for 10 % of a step.
healthy("ddp_no_sync", lambda: accumulating_loop(False, rows=4, longest=64), run=run_ddp, num_ranks=2)
healthy("ddp_clips", lambda: Loop(DistributedDataParallel(small_model()), step=_clips), run=run_ddp, num_ranks=2)
# The demo's reader spends 60 % of a step in its tower, which is told, and one that does not learn its tower waits for
# the worker that decodes pictures. A deeper language model does neither.
healthy("train", lambda: {"language_layers": 6}, run=run_train)
healthy("train_large", lambda: {"language_layers": 6, "settings": {"data.tokens_per_pack": 4096}}, run=run_train)
