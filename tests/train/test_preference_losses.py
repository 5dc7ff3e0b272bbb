"""Losses of preferences on packs, against TRL's own trainers on the same tokens."""

import pytest
import torch
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from headway.config.preference import PAIR_LOSSES
from headway.models.load import load_processor
from headway.models.preferences import LOSSES
from helpers.preferences import assert_same, ids_of, opened, our_loss, packed, their_loss, trainer_of, write_pairs
from helpers.runs import write_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return write_model(folder / "model", "qwen3"), write_pairs(folder / "pairs.jsonl", 5)


def test_each_loss_has_a_function_and_a_row():
    assert LOSSES.keys() == PAIR_LOSSES.keys()


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
    trainer = trainer_of(
        DPOTrainer, DPOConfig, tmp_path, theirs, tokenizer, ref_model=their_reference, options=options
    )
    assert_same((loss, grads), their_loss(trainer, theirs, trainer.data_collator(ids_of(samples))))
    metrics = trainer._metrics["train"]


def test_a_whole_pack_of_logits_gives_the_same(text):
    folder, data = text
    policy, reference = opened(folder, shift=0.3), opened(folder)
    _, batch = packed(folder, data, policy)
    loss, grads, _ = our_loss(policy, batch, {"sft": 0.1}, reference)
    again = our_loss(opened(folder, shift=0.3), batch, {"sft": 0.1}, opened(folder), chunk=None)
    assert_same((loss, grads), again[:2])
