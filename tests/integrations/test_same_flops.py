"""One training step through every integration: the same FLOPs to the FLOP, however its samples are accumulated.

Each way trains a fresh tiny model for one optimizer step on the same eight samples, in as many micro-batches as it is
told, and gives back the run's window. A new integration is a function and a line in `WAYS`.
"""

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import headway
from headway import Workload, trace
from headway.explain.budget import NeededWork
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.integrations import FlopsAccumulator, HeadwayCallback, HeadwayMonitor
from headway.meter import Meter
from helpers.cases import some
from helpers.folders import tiny_tokenizer
from helpers.loops import LENGTHS, PEAK, ROWS, collate, loader, run_accelerate, run_lightning, tiny, trainer_arguments
from helpers.models import checkpointing_name

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.* is deprecated:FutureWarning"),  # Lightning asks torch
]

STEP = Workload(LENGTHS)


def batches(accumulation):
    return loader(ROWS, len(ROWS) // accumulation)


def plain(_path, accumulation):
    model = tiny()
    meter = Meter(model, peak=PEAK)
    for batch in meter.batches(batches(accumulation)):
        meter.count(batch)
        model(**batch).loss.backward()
    meter.step()
    return meter.close()


def megatron(_path, accumulation):
    meter = Meter(tiny(), peak=PEAK)
    accumulator, size = FlopsAccumulator(meter), len(LENGTHS) // accumulation
    for first in range(0, len(LENGTHS), size):
        boundaries = torch.tensor([0, *LENGTHS[first : first + size]]).cumsum(0)
        accumulator.accumulate(torch.zeros(1, int(boundaries[-1])), cu_seqlens=boundaries)
    accumulator.step()
    return meter.close()


def accelerate(_path, accumulation):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    return run_accelerate(accelerator, batches(accumulation))


def arguments(path, accumulation):
    return trainer_arguments(path, len(ROWS) // accumulation, accumulation)


def transformers_trainer(path, accumulation):
    callback = HeadwayCallback(peak=PEAK)
    given = TrainingArguments(**arguments(path, accumulation))
    Trainer(tiny(), given, train_dataset=ROWS, data_collator=collate, callbacks=[callback]).train()
    return callback.run


def trl_sft(path, accumulation, **packing):
    callback = HeadwayCallback(peak=PEAK)
    given = SFTConfig(**arguments(path, accumulation), bf16=False, **{checkpointing_name(): False}, **packing)
    data, tokenizer = Dataset.from_list(ROWS), tiny_tokenizer()
    SFTTrainer(tiny(), given, train_dataset=data, processing_class=tokenizer, callbacks=[callback]).train()
    return callback.run


def trl_sft_padding_free(path, accumulation):
    return trl_sft(path, accumulation, padding_free=True, max_length=None)


def lightning_trainer(path, accumulation):
    return run_lightning(batches(accumulation), accumulation, default_root_dir=path)


WAYS = [plain, megatron, accelerate, transformers_trainer, trl_sft, trl_sft_padding_free, lightning_trainer]


@pytest.fixture(scope="module")
def ledger():
    """What the step costs: drivers are sums over tokens and over pairs of each sample, written out here."""
    cost = trace(tiny())
    tokens, pairs = sum(LENGTHS), sum(n * (n + 1) // 2 for n in LENGTHS)
    drivers = {"tokens": tokens, "pairs:causal": pairs}
    forward = sum(row.forward * drivers[row.driver] for row in cost.rows)
    backward = sum(g.flops * drivers[row.driver] for row in cost.rows for g in row.gradients)
    count = cost.count(STEP)
    assert (count.forward, count.dgrad + count.wgrad) == (forward, backward)
    return count


@pytest.mark.parametrize("accumulation", some([1, 2, 4], (2).__eq__))
@pytest.mark.parametrize("way", WAYS)
def test_a_step_costs_the_same_through_every_integration(tmp_path, way, accumulation, ledger):
    run = way(tmp_path, accumulation)
    assert run.flops == ledger
    assert (run.num_steps, run.tokens, run.segments) == (1, sum(LENGTHS), len(LENGTHS))
    assert run.num_batches == accumulation


@pytest.mark.parametrize("way", [accelerate, transformers_trainer, lightning_trainer])
def test_a_step_is_profiled_through_every_trainer_and_its_trace_explains_itself(tmp_path, way, ledger):
    with headway.profile(None, tmp_path / "profile", steps=range(1, 2)) as window:
        way(tmp_path, 2)
    recorded = read_trace(window.path)
    assert NeededWork(recorded.headway, str(window.path)).useful_flops(1) == ledger.total
    (step,) = explain([recorded]).steps
    assert sum(line.ns for line in step.lines) == step.duration_ns
    phases = {name for line in step.lines if line.key in ("memory", "optimizer") for name in line.parts}
    assert phases >= {"forward", "backward", "optimizer"}


def plain_bytes(accumulation):
    model = tiny()
    meter = Meter(model, peak=PEAK, optimizer=torch.optim.AdamW(model.parameters()), memory_bytes_per_s=1e9)
    for batch in batches(accumulation):
        meter.count(batch)
    meter.step()
    return meter.close()


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_moves_the_same_bytes_through_trainers_that_know_their_optimizer(tmp_path, accumulation):
    options = {"peak": PEAK, "memory_bytes_per_s": 1e9}
    callback = HeadwayCallback(names=("mbu",), **options)
    given = TrainingArguments(**arguments(tmp_path, accumulation), logging_steps=1, optim="adamw_torch")
    Trainer(tiny(), given, train_dataset=ROWS, data_collator=collate, callbacks=[callback]).train()
    monitor = HeadwayMonitor("model", names=("mbu",), **options)
    run_lightning(batches(accumulation), accumulation, monitor=monitor, optimizer=torch.optim.AdamW)
    expected = plain_bytes(accumulation)
    assert expected.bytes_moved > 0
    for run in (callback.run, monitor.run):
        assert run.bytes_moved == expected.bytes_moved
        assert run.mbu == pytest.approx(expected.bytes_moved / run.wall_s / 1e9)
