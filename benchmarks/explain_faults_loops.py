"""Loops for `explain_faults.py`: plain, under Hugging Face's Trainer, DDP over gloo, and `headway train`.

Each runs a case under the public meter without its fault and with it in turn, so that a machine that becomes faster or
slower meanwhile does not count as the fault; `headway explain` is shown one of the faulty runs, with a profile of a few
steps. A first such run is not used: until the heap is as large as a loop and a profile need it, the system gives pages
of memory one by one, for up to a third of a step. A case is a function from whether the fault is planted to what its
loop needs.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

import headway
from headway.integrations import HeadwayCallback

PEAK = headway.Peak("one CPU thread", flops_per_s=60e9, dtype="fp32", source="assumed")
NUM_STEPS, NUM_PROFILED = 9, 16  # steps of a run, and of one with a profile
WINDOW = range(9, 12)  # profiled steps
NUM_WARM = 3  # first steps, which are not timed
Batch = dict[str, torch.Tensor]
Times = tuple[float, float]  # of a healthy step and of a faulty one [s]
Step = Callable[["Loop", Batch, Callable[[Batch], None]], None]


class Turn(NamedTuple):
    """One of the runs of a case.

    Attributes:
        is_faulty: whether the fault is planted.
        is_profiled: whether a few of its steps are.
        is_shown: whether `headway explain` is asked of its records and its profile.
        is_timed: whether its steps count.
    """

    is_faulty: bool
    is_profiled: bool = False
    is_shown: bool = False
    is_timed: bool = True

    @property
    def num_steps(self) -> int:
        """Steps to take."""
        return NUM_PROFILED if self.is_profiled else NUM_STEPS

    @property
    def records(self) -> str:
        """Name of the file of records."""
        return "metrics.jsonl" if self.is_shown else "unshown.jsonl"

    @property
    def profile(self) -> str:
        """Name of the profile's folder."""
        return "profile" if self.is_shown else "unshown"


TURNS = (
    Turn(True, is_profiled=True, is_timed=False),
    Turn(False), Turn(True, is_profiled=True, is_shown=True),
    Turn(False), Turn(True), Turn(False), Turn(True),
)  # fmt: skip


class Lengths(Dataset[torch.Tensor]):
    """Token sequences: all of the longest length, or of log-normal lengths, each the same whenever it is asked for."""

    def __init__(
        self, longest: int = 256, *, size: int = 400, vocabulary: int = 1000, varied: bool = False, delay_s: float = 0.0
    ) -> None:
        self.longest, self.size, self.vocabulary = longest, size, vocabulary
        self.varied, self.delay_s = varied, delay_s

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.delay_s:
            time.sleep(self.delay_s)
        generator = torch.Generator().manual_seed(index)
        length = self.longest
        if self.varied:
            length = int(torch.empty(1).log_normal_(3.6, 0.7, generator=generator).clamp(16, self.longest))
        return torch.randint(1, self.vocabulary, (length,), generator=generator)


def padded(samples: Sequence[Any], to: int | None = None, delay_s: float = 0.0) -> Batch:
    """Pad samples to the longest, or to a fixed length."""
    rows = [sample["input_ids"] if isinstance(sample, dict) else sample for sample in samples]
    busy(delay_s)
    ids = torch.zeros(len(rows), to or max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed(samples: Sequence[Any]) -> Batch:
    """Lay samples end to end in one row."""
    rows = [sample["input_ids"] if isinstance(sample, dict) else sample for sample in samples]
    ids = torch.cat(rows)[None]
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None], "labels": ids}


def busy(seconds: float) -> None:
    """Compute in Python for some time of a core [s]."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def own_s() -> float:
    """Time by the clock without what the main thread waited for a core that other processes had [s].

    Source: proc_schedstats, Linux: second number of /proc/PID/schedstat [ns]; other systems have the clock alone.
    """
    path = Path("/proc/self/schedstat")
    waited_ns = int(path.read_text().split()[1]) if path.exists() else 0
    return time.perf_counter() - waited_ns / 1e9


def small_model(**sizes: Any) -> Qwen3ForCausalLM:
    """Draw a Qwen3 of some 800,000 parameters, or of other sizes."""
    torch.manual_seed(0)
    defaults = {
        "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa", "use_cache": False,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**{**defaults, **sizes})).train()


def batches(dataset: Dataset[Any] | None = None, rows: int = 4, *, workers: int = 0, collate: Any = padded) -> Any:
    """Load batches of a data set over and over."""
    loader = DataLoader(dataset or Lengths(), batch_size=rows, num_workers=workers, collate_fn=collate)
    while True:
        yield from loader


def train_step(loop: "Loop", batch: Batch, count: Callable[[Batch], None]) -> None:
    """Forward, backward and update, as any loop has them."""
    count(batch)
    (loop.model if loop.call is None else loop.call)(**batch).loss.backward()
    loop.update()


@dataclass
class Loop:
    """A loop of one process.

    Attributes:
        model: that learns.
        batches: an endless iterable.
        optimizer: AdamW, fused, if None.
        step: what happens between a batch and `meter.step()`.
        call: what is called in the model's place, as what torch.compile made of it.
        scale: this loop's time / the time of the faulty loop's work, where the healthy loop does other work.
        meter: what else Meter takes.
    """

    model: Any
    batches: Iterable[Batch] = field(default_factory=batches)
    optimizer: torch.optim.Optimizer | None = None
    step: Step = train_step
    call: Any = None
    scale: float = 1.0
    meter: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def update(self) -> None:
        """Take the optimizer's step."""
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()


def usual_s(turn: Turn, ends: Sequence[float]) -> float:
    """Median time of warm steps, without those that were profiled and their neighbours [s].

    Args:
        turn: the run.
        ends: end of each of its steps by the clock [s].
    """
    profiled = range(WINDOW.start - 1, WINDOW.stop + 2) if turn.is_profiled else range(0)
    steps = enumerate(pairwise(ends), start=2)
    return statistics.median(
        end - begin for number, (begin, end) in steps if number > NUM_WARM and number not in profiled
    )


def quickest(usual: Sequence[float]) -> Times:
    """Times of a healthy step and of a faulty one [s], each of the run that other work on the machine slowed least."""
    by_fault = [
        [step_s for turn, step_s in zip(TURNS, usual, strict=True) if turn.is_timed and turn.is_faulty == is_faulty]
        for is_faulty in (False, True)
    ]
    return min(by_fault[0]), min(by_fault[1])


def run_plain(make: Callable[[bool], Loop], folder: Path, *, ranks: Sequence[int] = (0,)) -> Times:
    """Run a loop of one's own without and with its fault, both under a meter: their difference is the fault's alone.

    Returns:
        Time of a healthy step and of a faulty one [s].
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    usual = []
    for turn in TURNS:
        loop = make(turn.is_faulty)
        model = loop.model.module if isinstance(loop.model, DistributedDataParallel) else loop.model
        log_to = [f"jsonl:{folder / turn.records}"] if is_first else []
        meter = headway.Meter(model, peak=PEAK, log_every=1, log_to=log_to, **loop.meter)
        profiled = headway.profile(meter, folder / turn.profile, steps=WINDOW, ranks=ranks)
        ends = []
        with profiled if turn.is_profiled else nullcontext():
            for _, batch in zip(range(turn.num_steps), meter.batches(loop.batches), strict=False):
                loop.step(loop, batch, meter.count)
                meter.step()
                ends.append(own_s())
        meter.close()
        usual.append(usual_s(turn, ends) / loop.scale)
        torch.autograd.set_detect_anomaly(False)
    return quickest(usual)


def run_ddp(make: Callable[[bool], Loop], folder: Path) -> Times:
    """Run a loop of one's own on several processes that average gradients."""
    dist.init_process_group("gloo")
    try:
        return run_plain(make, folder, ranks=range(dist.get_world_size()))
    finally:
        dist.barrier()
        dist.destroy_process_group()


class Clock(TrainerCallback):
    """Notes when each step begins: between two lies all that the Trainer does, saving and evaluating included."""

    def __init__(self) -> None:
        self.begins: list[float] = []

    def on_step_begin(self, *_args: Any, **_options: Any) -> None:
        """Note the time."""
        self.begins.append(own_s())


class Rows(Dataset[dict[str, torch.Tensor]]):
    """A data set as the Trainer wants it: rows of columns."""

    def __init__(self, samples: Lengths) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.samples[index]}


def run_trainer(make: Callable[[bool], dict[str, Any]], folder: Path) -> Times:
    """Run Hugging Face's Trainer without and with a fault; `make` gives its model, data, callbacks and arguments."""
    usual = []
    for number, turn in enumerate(TURNS):
        options = make(turn.is_faulty)
        clock, folder_of = Clock(), folder / f"run-{number}"
        arguments: dict[str, Any] = {
            "logging_steps": 2, "save_strategy": "no", "per_device_train_batch_size": 4,
            **options.get("arguments", {}),
        }  # fmt: skip
        meter = HeadwayCallback(peak=PEAK, log_to=[f"jsonl:{folder / turn.records}"])
        trainer = Trainer(
            model=options.get("model") or small_model(),
            args=TrainingArguments(
                output_dir=str(folder_of), max_steps=turn.num_steps, report_to=[], use_cpu=True, disable_tqdm=True,
                **arguments,
            ),
            train_dataset=Rows(options.get("samples") or Lengths()), eval_dataset=Rows(Lengths(size=16)),
            data_collator=options.get("collate", padded), callbacks=[meter, clock, *options.get("callbacks", ())],
        )  # fmt: skip
        profiled = headway.profile(None, folder / turn.profile, steps=WINDOW)
        with profiled if turn.is_profiled else nullcontext():
            trainer.train()
        usual.append(usual_s(turn, clock.begins[1:]))
    return quickest(usual)


def run_train(make: Callable[[bool], dict[str, Any]], folder: Path) -> Times:
    """Run `headway train` on digits without and with a fault.

    `make` gives settings by dotted key, what holds the data up (`held_up`), and how deep the language model is
    (`language_layers`). Packs hold 2,048 tokens: of 512, calls take a third of the reader's step (102 us a token; 79 of
    2,048, 70 of 8,192), and a run that larger packs make so much faster is no healthy one.
    """
    from headway.config import parse_config
    from headway.meter.meter import Meter
    from headway.synthetic.digits import write_digits, write_reader
    from headway.train.run import train

    data, model = folder / "data", folder / "model"
    write_digits(data, num_one_digit=4, num_train=400, num_eval=64, renderings=2)
    write_reader(model)
    sizes = json.loads((model / "config.json").read_text())
    sizes["text_config"]["num_hidden_layers"] = make(False).get("language_layers", 2)
    (model / "config.json").write_text(json.dumps(sizes))
    end_step = Meter.step
    usual = []
    for number, turn in enumerate(TURNS):
        options = make(turn.is_faulty)
        run = folder / ("run" if turn.is_shown else f"run-{number}")
        config: dict[str, Any] = {
            "model": {"path": str(model), "random_init": True},
            "data": {
                "train": [{"path": str(data / "train.jsonl")}], "eval": str(data / "eval.jsonl"),
                "tokens_per_pack": 2048, "workers": 1,
            },
            "optim": {"steps": turn.num_steps, "lr": 1e-3},
            "speed": {"compile": False},
            "run": {"folder": str(run), "device": "cpu", "threads": 1},
        }  # fmt: skip
        if turn.is_profiled:
            config["run"]["profile"] = {"start": WINDOW.start, "steps": len(WINDOW)}
        for key, value in options.get("settings", {}).items():
            section, _, name = key.partition(".")
            config.setdefault(section, {})[name] = value
        ends: list[float] = []

        def noted(*arguments: Any, ends: list[float] = ends, **options: Any) -> Any:
            ends.append(own_s())
            return end_step(*arguments, **options)

        with options.get("held_up", nullcontext()), patch.object(Meter, "step", noted):
            train(parse_config(config))
        usual.append(usual_s(turn, ends))
    (folder / "metrics.jsonl").write_bytes((folder / "run" / "metrics.jsonl").read_bytes())
    (folder / "profile").symlink_to(folder / "run" / "profile")
    return quickest(usual)


def ranks_of(num_ranks: int) -> Iterator[dict[str, str]]:
    """Environment variables of each process of a job on this machine."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(num_ranks):
        yield {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip


def without_sync(model: nn.Module, is_last: bool) -> Any:
    """Leave gradients unsent unless this is a step's last pass."""
    return nullcontext() if is_last or not isinstance(model, DistributedDataParallel) else model.no_sync()
