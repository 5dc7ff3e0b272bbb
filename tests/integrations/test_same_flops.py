"""One training step through every integration: the same FLOPs to the FLOP, however its samples are accumulated.

Each way trains a fresh tiny model for one optimizer step on the same eight samples, in as many micro-batches as it is
told, and gives back the run's window. A new integration is a function and a line in `WAYS`.
"""

import lightning.pytorch
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from headway import Workload, trace
from headway.count.tracing.build import model_class
from headway.devices import Peak
from headway.integrations import AccelerateMeter, HeadwayCallback, HeadwayMonitor
from headway.meter import Meter
from tiny_models import tiny_config
from tiny_tokenizer import tiny_tokenizer

pytestmark = [
    pytest.mark.usefixtures("fresh_accelerator"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.* is deprecated:FutureWarning"),  # Lightning asks torch
]

PEAK = Peak("test", 1e12, "fp32", "made up for a test")
LENGTHS = [5, 9, 14, 3, 8, 8, 21, 1]
STEP = Workload(LENGTHS)


def tiny():
    config = tiny_config("qwen3")
    return model_class(config)._from_config(config, dtype=torch.float32)


def collate(rows):
    """Pad rows of token ids to the longest."""
    width = max(len(row["input_ids"]) for row in rows)

    def padded(value, padding):
        return torch.tensor([[value] * len(r["input_ids"]) + [padding] * (width - len(r["input_ids"])) for r in rows])

    return {"input_ids": padded(7, 0), "attention_mask": padded(1, 0), "labels": padded(7, -100)}


ROWS = [{"input_ids": [7] * length} for length in LENGTHS]


def loader(accumulation):
    return torch.utils.data.DataLoader(ROWS, batch_size=len(ROWS) // accumulation, collate_fn=collate)


def plain(_path, accumulation):
    model = tiny()
    meter = Meter(model, peak=PEAK)
    for batch in meter.batches(loader(accumulation)):
        meter.count(batch)
        model(**batch).loss.backward()
    meter.step()
    return meter.close()


def accelerate(_path, accumulation):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(accumulation))
    meter = AccelerateMeter(accelerator, model, peak=PEAK)
    for batch in meter.batches(batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        meter.step()
    return meter.close()


def arguments(path, accumulation):
    """What both of Hugging Face's trainers are told."""
    return {
        "output_dir": str(path), "num_train_epochs": 1, "per_device_train_batch_size": len(ROWS) // accumulation,
        "gradient_accumulation_steps": accumulation, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no", "remove_unused_columns": False, "dataloader_pin_memory": False,
    }  # fmt: skip


def transformers_trainer(path, accumulation):
    callback = HeadwayCallback(peak=PEAK)
    given = TrainingArguments(**arguments(path, accumulation))
    Trainer(tiny(), given, train_dataset=ROWS, data_collator=collate, callbacks=[callback]).train()
    return callback.run


def trl_sft(path, accumulation, **batches):
    callback = HeadwayCallback(peak=PEAK)
    given = SFTConfig(**arguments(path, accumulation), bf16=False, activation_checkpointing=False, **batches)
    data, tokenizer = Dataset.from_list(ROWS), tiny_tokenizer()
    SFTTrainer(tiny(), given, train_dataset=data, processing_class=tokenizer, callbacks=[callback]).train()
    return callback.run


def trl_sft_padding_free(path, accumulation):
    return trl_sft(path, accumulation, padding_free=True, max_length=None)


class Lit(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny()

    def training_step(self, batch, _index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.01)


def lightning_trainer(path, accumulation):
    monitor = HeadwayMonitor(peak=PEAK)
    lightning.pytorch.Trainer(
        default_root_dir=path, callbacks=[monitor], accumulate_grad_batches=accumulation, max_epochs=1,
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Lit(), loader(accumulation))  # fmt: skip
    return monitor.run


WAYS = [plain, accelerate, transformers_trainer, trl_sft, trl_sft_padding_free, lightning_trainer]


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


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_costs_the_same_through_every_integration(tmp_path, way, accumulation, ledger):
    run = way(tmp_path, accumulation)
    assert run.flops == ledger
    assert (run.num_steps, run.tokens, run.segments) == (1, sum(LENGTHS), len(LENGTHS))
    assert run.num_batches == accumulation
