"""Sides of the benchmark of preferences: pairs as both read them, and TRL's DPOTrainer on the same tokens and pixels.

`headway_run.py` runs `headway train`, `contenders.py` has the optimizer that all share.
"""

import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, Qwen3Config
from trl import DPOConfig, DPOTrainer

from contenders import IGNORED, Shape, Stamp, Timing, build_model, timing, trainer_arguments
from headway.data import EncodedSample
from headway.data.collate import Collator
from headway.models import load_processor
from headway.synthetic.processor import write_tokenizer
from headway.synthetic.small_data import WORDS, vocabulary_texts
from mixes import Mix, MixFiles, encoded, images_mix, place, text_mix
from step_clock import Clock

BETA = 0.1
PROMPT_MEDIAN, ANSWER_MEDIAN, SIGMA, LONGEST = 64, 128, 1.0, 1000  # words; medians and sigma of lognormals, clipped


class FirstSteps(NamedTuple):
    """Numbers of two steps on the same pairs: the second step shows that the first update was the same.

    Attributes:
        losses: of each step.
        log_ps: mean log-probabilities of the better and of the worse answers in the first [nats].
    """

    losses: tuple[float, float]
    log_ps: tuple[float, float]


def text_pairs(num_pairs: int, seed: int = 0, folder: Path | None = None) -> Mix:
    """Pairs of answers to prompts of text, each of a lognormal length of its own, and the model of `text_mix`."""
    rng = np.random.default_rng(seed)
    medians = (PROMPT_MEDIAN, ANSWER_MEDIAN, ANSWER_MEDIAN)
    with place(folder) as here:
        files = MixFiles(here / "model", here / "pairs.jsonl")
        source: Any = text_mix(2).config
        assert isinstance(source, Qwen3Config)
        source.max_position_embeddings = 4 * LONGEST
        source.save_pretrained(files.model)
        write_tokenizer(files.model, vocabulary_texts())
        rows = []
        for _ in range(num_pairs):
            lengths = [min(LONGEST, max(2, round(rng.lognormal(np.log(median), SIGMA)))) for median in medians]
            prompt, chosen, rejected = (" " + " ".join(rng.choice(WORDS, length)) for length in lengths)
            answers = {"chosen": chosen, "rejected": rejected}
            row = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
            rows.append({"prompt": [{"role": "user", "content": prompt}]} | row)
        files.samples.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        config, samples, facts = encoded(files.model, files.samples)
    description = (
        f"lognormal words, median {PROMPT_MEDIAN} of a prompt and {ANSWER_MEDIAN} of each answer, sigma {SIGMA}, "
        f"clipped at {LONGEST}; prompts and answers of a pair together {facts}"
    )
    return Mix("text pairs", description, config, samples, None if folder is None else files)


def pictured_pairs(num_pairs: int, seed: int = 0, folder: Path | None = None) -> Mix:
    """The chats of `images_mix`, most with images, each with a worse answer beside its own."""
    mix = images_mix(num_pairs, seed, folder, in_pairs=True)
    description = f"{mix.description} in a pair, whose prompt and images stand before each answer"
    return Mix("pairs with images", description, mix.config, mix.samples, mix.files)


class Row(NamedTuple):
    """A pair as TRL's collator takes it, with the images of its prompt.

    Attributes:
        ids: tokens of prompt and answers, up to the last that is learnt.
        grids_M3: of the images [patches]; None without.
        pixels_PD: of the images; None without.
        sample: the pair as Headway's collator takes it.
    """

    ids: dict[str, list[int]]
    grids_M3: torch.Tensor | None
    pixels_PD: torch.Tensor | None
    sample: EncodedSample


def row_of(sample: EncodedSample) -> Row:
    """Take a pair apart into the tokens that TRL learns and the images of one of its two answers."""
    ids: dict[str, list[int]] = {}
    answers = zip(sample.input_ids_S.split(sample.answers), sample.labels_S.split(sample.answers), strict=True)
    for name, (input_ids, labels) in zip(("chosen_ids", "rejected_ids"), answers, strict=True):
        learnt = (labels != IGNORED).nonzero()[:, 0]
        first, last = int(learnt[0]), int(learnt[-1]) + 1
        ids |= {"prompt_ids": input_ids[:first].tolist(), name: input_ids[first:last].tolist()}
    media = sample.media.get("images")
    if media is None or media.features is None:
        return Row(ids, None, None, sample)
    # the images of the first answer, which are those of the second
    grids, pixels = media.sizes, media.features
    return Row(ids, grids[: len(grids) // 2], pixels[: len(pixels) // 2], sample)


class NotedDPO(DPOTrainer):  # type: ignore[misc]
    """TRL's trainer, which keeps the loss of each step, and the mean log-probabilities of both answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[float] = []
        self.log_ps: list[tuple[float, float]] = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss and keep it."""
        loss = super().compute_loss(*args, **kwargs)
        logged = self._metrics["train"]  # emptied with each log
        self.losses.append(loss.item())
        self.log_ps.append((logged["logps/chosen"][-1], logged["logps/rejected"][-1]))
        return loss


def trainer_of(
    folder: str,
    mix: Mix,
    shape: Shape,
    device: torch.device,
    rows: Sequence[dict[str, Any]],
    *,
    reference: PreTrainedModel | None = None,
    clock: Clock | None = None,
) -> NotedDPO:
    """TRL's DPOTrainer on rows that hold a `Row` and, without a reference model, log-probabilities under it.

    Tokens and pixels come ready made: TRL reads neither text nor images while it trains. Images with stored
    log-probabilities, which it does not offer, are given to it.
    """
    disable_progress_bars()
    processor = load_processor(str(_folder(mix)))
    tokenizer: PreTrainedTokenizerBase = getattr(processor, "tokenizer", processor)
    model = build_model(mix, "sdpa", device)
    options = {"beta": BETA, "loss_type": ["sigmoid"], "max_length": None, "gradient_checkpointing": False}
    options |= {"precompute_ref_log_probs": reference is None}
    arguments = DPOConfig(
        per_device_train_batch_size=shape.batch,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        **options,
        **trainer_arguments(folder, shape, device),
    )
    trainer = NotedDPO(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=Dataset.from_list(
            [{"prompt": "a", "chosen": "b", "rejected": "c"}]
        ),  # what TRL itself makes ready is set aside
        processing_class=tokenizer,
        callbacks=[] if clock is None else [Stamp(clock)],
    )
    trainer.remove_callback(PrinterCallback)  # its final metrics would stand between our lines
    trainer.train_dataset = rows
    trainer.data_collator = partial(collated, trainer.data_collator, getattr(model.config, "image_token_id", None))
    return trainer


def collated(collator: Any, image_token_id: int | None, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """TRL's padded batch, all better answers before all worse ones, with the pixels of each."""
    batch: dict[str, Any] = collator([row["row"].ids | row["reference"] for row in rows])
    pictured = [row["row"] for row in rows if row["row"].grids_M3 is not None]
    if image_token_id is not None:
        batch["mm_token_type_ids"] = (batch["input_ids"] == image_token_id).int()
    if pictured:
        batch["image_grid_thw"] = torch.cat([row.grids_M3 for row in pictured] * 2)
        batch["pixel_values"] = torch.cat([row.pixels_PD for row in pictured] * 2)
    return batch


def reference_of(mix: Mix) -> list[dict[str, float]]:
    """Log-probabilities of each pair's answers under the initial weights, by TRL's own function, a pair at a time."""
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(folder, mix, Shape(1, 1, 0), cpu, [])
        found = []
        for sample in mix.samples:
            batch = trainer.data_collator([{"row": row_of(sample), "reference": {}}])
            chosen, rejected = trainer.compute_ref_log_probs(trainer.model, batch)
            found.append({"ref_chosen_logps": chosen.item(), "ref_rejected_logps": rejected.item()})
    return found


def run_dpo(
    mix: Mix, shape: Shape, device: torch.device, stored: Sequence[dict[str, float]] | None
) -> tuple[Timing, NotedDPO]:
    """Train with TRL's DPOTrainer, padded to the longest answer of a batch.

    Args:
        mix: model and pairs.
        shape: pairs per step, steps and warm-up.
        device: where to train.
        stored: log-probabilities under the initial weights; None for a second model that computes them in each step.
    """
    clock, slots = Clock(device), []
    trained: list[list[EncodedSample]] = []
    nothing: list[dict[str, float]] = [{}] * len(mix.samples)
    rows = [
        {"row": row_of(sample), "reference": reference}
        for sample, reference in zip(mix.samples, stored or nothing, strict=True)
    ]
    reference = build_model(mix, "sdpa", device).eval() if stored is None else None
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(folder, mix, shape, device, rows, reference=reference, clock=clock)
        plain = trainer.data_collator

        def counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
            batch: dict[str, Any] = plain(rows)
            slots.append(batch["input_ids"].numel())
            trained.append([row["row"].sample for row in rows])
            return batch

        trainer.data_collator = counted
        trainer.train()
    work = [Collator()(samples).work(skips_unlabelled=True) for samples in trained]
    return timing(clock, work, slots, shape.warmup), trainer


def first_steps(mix: Mix, batch: int) -> FirstSteps:
    """Two steps of TRL on the first pairs."""
    few = Mix(mix.name, mix.description, mix.config, mix.samples[:batch] * 2, mix.files)
    stored = reference_of(Mix(mix.name, mix.description, mix.config, mix.samples[:batch], mix.files)) * 2
    _, trainer = run_dpo(few, Shape(batch, 2, 1), torch.device("cpu"), stored)
    first, second = trainer.losses
    return FirstSteps((first, second), trainer.log_ps[0])


def _folder(mix: Mix) -> Path:
    assert mix.files is not None  # the mix was made with a folder
    return mix.files.model
