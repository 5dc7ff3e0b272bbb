"""Sides of the throughput benchmark: Headway's packed step alone, transformers.Trainer three ways, and TRL's packing.

`headway_run.py` has `headway train`. All here get the same encoded samples from memory, the same initial weights, AdamW
(fused) with the same settings, the same clipping and, but for TRL, whose packs are as long as a step's samples on
average, the same number of samples per optimizer step. With the Trainer's sequential order even the batches are the
same, so the losses are the same.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from headway.config import SpeedConfig
from headway.count import Workload
from headway.data import EncodedSample
from headway.data.collate import Collator
from headway.data.media.joining import pack_tensor
from headway.models import load_model
from headway.models.compiling import CompileWatch, compile_blocks
from headway.models.head import model_with_loss
from headway.models.kernels import use_kernels
from headway.models.vision import vision_geometry
from mixes import Mix, tokenizer
from step_clock import Clock

LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
IGNORED = -100


@dataclass(frozen=True)
class Shape:
    """How much a round trains.

    Attributes:
        batch: samples per optimizer step.
        steps: optimizer steps, warm-up included.
        warmup: first steps that are not timed.
    """

    batch: int
    steps: int
    warmup: int


@dataclass(frozen=True)
class Timing:
    """One round of one contender, after its warm-up steps.

    Attributes:
        wall_s: from the end of the last warm-up step to the end of the last step [s].
        cpu_s: processor time of this process from and to the same, all its threads together [s].
        work: the samples of those steps: real tokens and patches, nothing that pads, and a head on labels alone.
        slots: positions computed in those steps, padding included.
    """

    wall_s: float
    cpu_s: float
    work: Workload
    slots: int


def timing(clock: Clock, work: Sequence[Workload], slots: Sequence[int], warmup: int) -> Timing:
    """Sum up what happened after the warm-up, from the work and the computed positions of each step."""
    counted = slice(warmup, len(clock.ends_s))
    return Timing(*clock.spent_s(warmup), Workload.total(work[counted]), sum(slots[counted]))


def build_model(mix: Mix, attention: str, device: torch.device) -> PreTrainedModel:
    """Build the mix's model with the same random weights for every contender."""
    torch.manual_seed(0)
    return load_model(mix.config, device=device, attention=attention, random_init=True).train()


def run_headway(mix: Mix, shape: Shape, device: torch.device, *, compiled: bool = False) -> Timing:
    """Train in packs; the statements of a step are those of `headway.train.loop`, compiled as by `speed.compile`."""
    model = build_model(mix, "headway_flash", device)
    use_kernels(model, "torch", device)
    head = model_with_loss(model, chunk=SpeedConfig().loss_chunk)
    if compiled:
        compile_blocks(model, CompileWatch())
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True,
    )  # fmt: skip
    clock, work, collator = Clock(device), [], Collator(geometry=vision_geometry(model))
    for start in range(0, shape.steps * shape.batch, shape.batch):
        batch = collator(mix.samples[start : start + shape.batch]).dealt(None)
        work.append(batch.work(skips_unlabelled=True))
        batch = batch.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            pack = head(batch.model_inputs(), batch.labels_1T[0], per=batch.num_supervised, labelled_K=batch.labelled_K)
        torch.autograd.backward(pack.total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step_ended()
    return timing(clock, work, [load.slots for load in work], shape.warmup)


def run_trainer(
    mix: Mix, shape: Shape, device: torch.device, *, sampling: str = "sequential", flattened: bool = False
) -> Timing:
    """Train with transformers.Trainer and sdpa attention.

    Args:
        mix: model and samples.
        shape: samples per step, steps and warm-up.
        device: where to train; bf16 autocast on CUDA, fp32 on the CPU, as on the other side.
        sampling: "sequential", or "group_by_length", the Trainer's own remedy against padding.
        flattened: lay samples end to end by transformers' DataCollatorWithFlattening instead of padding them to the
            longest; for text alone, which is all that it knows.
    """
    clock, slots = Clock(device), []
    trained: list[list[EncodedSample]] = []

    def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
        trained.append([row["sample"] for row in rows])
        batch = flatten(trained[-1]) if flattened else pad(trained[-1])
        slots.append(batch["input_ids"].numel())
        return batch

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            per_device_train_batch_size=shape.batch,
            train_sampling_strategy=sampling,
            remove_unused_columns=False,
            **trainer_arguments(folder, shape, device),
        )
        rows = [{"input_ids": sample.input_ids_S, "sample": sample} for sample in mix.samples]
        trainer = Trainer(
            model=build_model(mix, "sdpa", device),
            args=arguments,
            train_dataset=rows,
            data_collator=collated,
            callbacks=[Stamp(clock)],
        )
        trainer.remove_callback(PrinterCallback)  # its final metrics would stand between our lines
        trainer.train()
    work = [Collator()(samples).work(skips_unlabelled=True) for samples in trained]
    return timing(clock, work, slots, shape.warmup)


def run_trl(mix: Mix, shape: Shape, device: torch.device) -> Timing:
    """Train with TRL's SFTTrainer and its packing ("bfd"), a pack a step, sdpa attention.

    A pack holds as many tokens as a step of the others has on average, and never less than the longest sample.
    """
    clock, work, slots = Clock(device), [], []
    lengths = [sample.tokens for sample in mix.samples]
    length = max(*lengths, round(shape.batch * sum(lengths) / len(lengths)))
    rows = [{"input_ids": s.input_ids_S.tolist(), "labels": s.labels_S.tolist()} for s in mix.samples]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            per_device_train_batch_size=1,
            packing=True,
            max_length=length,
            gradient_checkpointing=False,
            **trainer_arguments(folder, shape, device),
        )
        trainer = SFTTrainer(
            model=build_model(mix, "sdpa", device),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(mix.config.vocab_size),
            callbacks=[Stamp(clock)],
        )
        trainer.remove_callback(PrinterCallback)
        plain = trainer.data_collator

        def counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
            batch: dict[str, Any] = plain(rows)
            lengths = [length for row in rows for length in row["seq_lengths"]]
            # Every token of running text but a segment's first has a label.
            work.append(Workload(lengths, logits=sum(lengths) - len(lengths)))
            slots.append(batch["input_ids"].numel())
            return batch

        trainer.data_collator = counted
        trainer.train()
    return timing(clock, work, slots, shape.warmup)


def trainer_arguments(folder: str, shape: Shape, device: torch.device) -> dict[str, Any]:
    """Arguments that all trainers get."""
    return {
        "output_dir": folder,
        "max_steps": shape.steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": CLIP,
        "optim": "adamw_torch_fused",
        "bf16": device.type == "cuda",
        "use_cpu": device.type == "cpu",
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": device.type == "cuda",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


class Stamp(TrainerCallback):
    """Tells the clock that the Trainer has ended a step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the time of the step's end."""
        self._clock.step_ended()


def pad(samples: Sequence[EncodedSample]) -> dict[str, Any]:
    """Make an ordinary padded batch: every sample filled up to the longest, padding masked and unsupervised."""

    def rows(tensors: Sequence[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=value)

    batch: dict[str, Any] = {
        "input_ids": rows([sample.input_ids_S for sample in samples], 0),
        "labels": rows([sample.labels_S for sample in samples], IGNORED),
        "attention_mask": rows([torch.ones(sample.tokens, dtype=torch.long) for sample in samples], 0),
    }
    types = [sample.token_types_S for sample in samples if sample.token_types_S is not None]
    if types:
        batch[samples[0].types_name] = rows(types, 0)
    images = [sample.media["images"] for sample in samples if "images" in sample.media]
    pixels = [media.features for media in images if media.features is not None]  # else the processor's own tensors
    if pixels:
        batch["pixel_values"] = torch.cat(pixels)
        batch["image_grid_thw"] = torch.cat([media.sizes for media in images])
    processed = [sample.processed for sample in samples if sample.processed]
    for name in processed[0] if processed else ():
        batch[name] = pack_tensor([each[name].tensor_X for each in processed], processed[0][name].rule)
    return batch


def flatten(samples: Sequence[EncodedSample]) -> dict[str, Any]:
    """Make a padding-free batch as transformers does: samples end to end, positions from 0 in each."""
    rows = [{"input_ids": s.input_ids_S.tolist(), "labels": s.labels_S.tolist()} for s in samples]
    batch: dict[str, Any] = DataCollatorWithFlattening(return_tensors="pt")(rows)
    return batch


def compare_first_losses(mix: Mix, batch_size: int) -> dict[str, float]:
    """Compute the first step's loss each way, in fp32 on the CPU: the proof that all sides do the same work."""
    samples, cpu = mix.samples[:batch_size], torch.device("cpu")
    with torch.no_grad():
        batch = Collator()(samples)
        head = model_with_loss(build_model(mix, "headway_flash", cpu), chunk=SpeedConfig().loss_chunk)
        found = {"headway": head(batch.model_inputs(), batch.labels_1T[0], per=batch.num_supervised).total}
        theirs = build_model(mix, "sdpa", cpu)
        found["trainer"] = theirs(**pad(samples)).loss
        if mix.is_text:
            found["trainer_flattened"] = theirs(**flatten(samples), use_cache=False).loss  # as in the Trainer
    return {name: float(loss) for name, loss in found.items()}
