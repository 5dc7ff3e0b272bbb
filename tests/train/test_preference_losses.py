"""Losses of preferences on packs, against TRL's own trainers on the same tokens."""

from dataclasses import replace

import pytest
import torch
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from headway.data import Encoder
from headway.data.collate import Collator
from headway.models.load import load_processor
from headway.models.video import normalised
from headway.objectives.preferences.losses import LOSSES
from headway.objectives.preferences.settings import PAIR_LOSSES
from helpers.rollouts import (
    assert_same,
    ids_of,
    opened,
    our_loss,
    packed,
    their_loss,
    trainer_of,
    write_pairs,
    write_pictured_pairs,
)
from helpers.runs import write_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return write_model(folder / "model", "qwen3"), write_pairs(folder / "pairs.jsonl", 5)


def test_each_loss_has_a_function_and_a_row():
    assert LOSSES.keys() == {name for name, row in PAIR_LOSSES.items() if not row.unpaired}


DPO = {
    "sigmoid": ({"loss": "sigmoid"}, {"loss_type": ["sigmoid"], "beta": 0.1}),
    "sigmoid, beta": ({"loss": "sigmoid", "beta": 0.5}, {"loss_type": ["sigmoid"], "beta": 0.5}),
    "robust": (
        {"loss": "robust", "label_smoothing": 0.2},
        {"loss_type": ["robust"], "label_smoothing": 0.2, "beta": 0.1},
    ),
    "hinge": ({"loss": "hinge"}, {"loss_type": ["hinge"], "beta": 0.1}),
    "ipo": ({"loss": "ipo"}, {"loss_type": ["ipo"], "beta": 0.1}),
    "sigmoid_norm": ({"loss": "sigmoid_norm"}, {"loss_type": ["sigmoid_norm"], "beta": 5.0}),
    "with sft": (
        {"loss": "sigmoid", "sft": 0.3},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3], "beta": 0.1},
    ),
}


@pytest.mark.parametrize("name", DPO)
def test_dpo_equals_trl(text, tmp_path, name):
    settings, options = DPO[name]
    folder, data = text
    policy, reference = opened(folder, shift=0.3), opened(folder)
    samples, batch = packed(folder, data, policy)
    loss, grads, _ = our_loss(policy, batch, settings, reference)

    theirs, their_reference = opened(folder, shift=0.3), opened(folder)
    for model in (theirs, their_reference):
        model.set_attn_implementation("sdpa")
    tokenizer = load_processor(str(folder))
    trainer = trainer_of(DPOTrainer, DPOConfig, tmp_path, theirs, tokenizer, ref_model=their_reference, options=options)
    assert_same((loss, grads), their_loss(trainer, theirs, trainer.data_collator(ids_of(samples))))


@pytest.mark.parametrize("name", DPO)
def test_dpo_on_pictures_equals_trl(digits, tmp_path, name):
    """The same tokens and pixels, a row for each answer, padded; each prompt's pictures once for each answer."""
    settings, options = DPO[name]
    folder = digits / "model"
    data = write_pictured_pairs(digits, digits / "data" / "few_preferences.jsonl", 4)
    policy, reference = opened(folder, shift=0.3), opened(folder)
    samples, batch = packed(folder, data, policy)
    loss, grads, _ = our_loss(policy, batch, settings, reference)

    theirs, their_reference = opened(folder, shift=0.3), opened(folder)
    for model in (theirs, their_reference):
        model.set_attn_implementation("sdpa")
    processor = load_processor(str(folder))
    tokenizer = processor.tokenizer
    trainer = trainer_of(DPOTrainer, DPOConfig, tmp_path, theirs, tokenizer, ref_model=their_reference, options=options)
    inputs = trainer.data_collator(ids_of(samples))
    # a sample's pictures are those of its first answer and again those of its second
    scale = Encoder(processor).pixel_scale
    sizes = [sample.media["images"].sizes for sample in samples]
    pixels = [normalised(sample.media["images"].features, scale) for sample in samples]
    halves = [(x[: len(x) // 2], y[: len(y) // 2]) for x, y in zip(sizes, pixels, strict=True)] * 2
    placeholder = theirs.config.image_token_id
    inputs |= {
        "image_grid_thw": torch.cat([grids for grids, _ in halves]),
        "pixel_values": torch.cat([patches for _, patches in halves]),
        "mm_token_type_ids": (inputs["input_ids"] == placeholder).int(),
    }
    assert_same((loss, grads), their_loss(trainer, theirs, inputs))


def test_a_whole_pack_of_logits_gives_the_same(text):
    folder, data = text
    policy, reference = opened(folder, shift=0.3), opened(folder)
    _, batch = packed(folder, data, policy)
    loss, grads, _ = our_loss(policy, batch, {"sft": 0.1}, reference)
    again = our_loss(opened(folder, shift=0.3), batch, {"sft": 0.1}, opened(folder), chunk=None)
    assert_same((loss, grads), again[:2])


def without_prompt(samples):
    """Each answer behind the last token of its prompt alone: TRL's ORPO learns all other tokens of prompts too."""
    cut = []
    for sample in samples:
        parts = zip(sample.input_ids_S.split(sample.answers), sample.labels_S.split(sample.answers), strict=True)
        pieces = [(ids[start:], labels[start:]) for ids, labels in parts for start in [first_learnt(labels) - 1]]
        lengths = tuple(len(ids) for ids, _ in pieces)
        cut.append(
            replace(
                sample,
                input_ids_S=torch.cat([ids for ids, _ in pieces]),
                labels_S=torch.cat([labels for _, labels in pieces]),
                position_ids_RS=torch.cat([torch.arange(length) for length in lengths])[None],
                segments=lengths,
                answers=lengths,
            )
        )
    return cut


def first_learnt(labels):
    return int((labels != -100).nonzero()[0])


def padded(samples, tokenizer):
    """The pairs as the collators of CPO and ORPO take them."""
    rows = []
    for ids in ids_of(samples):
        row = {"prompt_input_ids": ids["prompt_ids"], "prompt_attention_mask": [1] * len(ids["prompt_ids"])}
        for name in ("chosen", "rejected"):
            tokens = ids["prompt_ids"] + ids[f"{name}_ids"]
            row[f"{name}_input_ids"], row[f"{name}_attention_mask"] = tokens, [1] * len(tokens)
            row[f"{name}_labels"] = [-100] * len(ids["prompt_ids"]) + ids[f"{name}_ids"]
        rows.append(row)
    return rows


FREE = {
    "simpo": ({"loss": "simpo"}, {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}),
    "simpo, smoothed, with sft": (
        {"loss": "simpo", "label_smoothing": 0.1, "gamma": 1.0, "sft": 0.5},
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.5, "label_smoothing": 0.1},
    ),
    # TRL's DPOTrainer leaves label_smoothing out of its sigmoid; its CPOTrainer has it, without a reference
    "sigmoid, smoothed": (
        {"loss": "sigmoid", "reference": "none", "label_smoothing": 0.2},
        {"loss_type": "sigmoid", "beta": 0.1, "cpo_alpha": 0.0, "label_smoothing": 0.2},
    ),
    "hinge": (
        {"loss": "hinge", "reference": "none", "sft": 1.0},
        {"loss_type": "hinge", "beta": 0.1, "cpo_alpha": 1.0},
    ),
}


@pytest.mark.parametrize("name", FREE)
def test_losses_without_a_reference_equal_trls_cpo(text, tmp_path, name):
    settings, options = FREE[name]
    folder, data = text
    policy, theirs = opened(folder, shift=0.3), opened(folder, shift=0.3)
    samples, batch = packed(folder, data, policy)
    loss, grads, numbers = our_loss(policy, batch, settings)
    theirs.set_attn_implementation("sdpa")
    tokenizer = load_processor(str(folder))
    options = options | {"max_completion_length": None}
    trainer = trainer_of(CPOTrainer, CPOConfig, tmp_path, theirs, tokenizer, options=options)
    assert_same((loss, grads), their_loss(trainer, theirs, trainer.data_collator(padded(samples, tokenizer))))
    stored = trainer._stored_metrics["train"]
    assert numbers.rewards_2P.mean(1).tolist() == pytest.approx(
        [stored["rewards/chosen"][0], stored["rewards/rejected"][0]], rel=1e-5
    )


def test_orpo_equals_trl(text, tmp_path):
    folder, data = text
    policy, theirs = opened(folder, shift=0.3), opened(folder, shift=0.3)
    samples = without_prompt(packed(folder, data, policy)[0])
    loss, grads, _ = our_loss(policy, Collator()(samples), {"loss": "orpo"})
    theirs.set_attn_implementation("sdpa")
    tokenizer = load_processor(str(folder))
    options = {"beta": 0.1, "max_completion_length": None}
    trainer = trainer_of(ORPOTrainer, ORPOConfig, tmp_path, theirs, tokenizer, options=options)
    assert_same((loss, grads), their_loss(trainer, theirs, trainer.data_collator(padded(samples, tokenizer))))
