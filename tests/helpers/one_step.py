"""One training step of eight samples, for tests that meter it through different loops and on several ranks."""

import lightning.pytorch
import torch

from headway.devices import Peak
from headway.integrations import AccelerateMeter, HeadwayMonitor
from headway.tracing.build import model_class
from helpers.tiny_models import tiny_config

PEAK = Peak("test", 1e12, "fp32", "made up for a test")
LENGTHS = [5, 9, 14, 3, 8, 8, 21, 1]
ROWS = [{"input_ids": [7] * length} for length in LENGTHS]


def tiny():
    torch.manual_seed(0)  # the same weights on every rank
    config = tiny_config("qwen3")
    return model_class(config)._from_config(config, dtype=torch.float32)


def collate(rows):
    """Pad rows of token ids to the longest."""
    width = max(len(row["input_ids"]) for row in rows)

    def padded(value, padding):
        return torch.tensor([[value] * len(r["input_ids"]) + [padding] * (width - len(r["input_ids"])) for r in rows])

    return {"input_ids": padded(7, 0), "attention_mask": padded(1, 0), "labels": padded(7, -100)}


def loader(rows, batch_size):
    return torch.utils.data.DataLoader(rows, batch_size=batch_size, collate_fn=collate)


def run_accelerate(accelerator, batches):
    """Run a loop around `accelerator.accumulate`; returns the metered run."""
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    meter = AccelerateMeter(accelerator, model, peak=PEAK)
    for batch in meter.batches(batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        meter.step()
    return meter.close()


def trainer_arguments(folder, batch_size, accumulation):
    """What both of Hugging Face's trainers are told."""
    return {
        "output_dir": str(folder), "num_train_epochs": 1, "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "save_strategy": "no", "remove_unused_columns": False, "dataloader_pin_memory": False,
    }  # fmt: skip


class Lit(lightning.pytorch.LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.model = tiny()
        self.optimizer = optimizer

    def training_step(self, batch, _index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return self.optimizer(self.model.parameters(), lr=0.01)


def run_lightning(batches, accumulation, *, monitor=None, optimizer=torch.optim.SGD, **options):
    """Run an epoch of Lightning's Trainer; returns the metered run."""
    monitor = monitor or HeadwayMonitor(peak=PEAK)
    trainer = lightning.pytorch.Trainer(
        callbacks=[monitor], accumulate_grad_batches=accumulation, max_epochs=1, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(Lit(optimizer), batches)
    return monitor.run
