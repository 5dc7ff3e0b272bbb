"""Dropout that is off: a model computes in training what it computes when it is judged, whatever its layers draw by."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from headway.config import parse_config
from headway.errors import ConfigError
from headway.models.load import load_model
from headway.models.lora import add_adapters, initialise_adapters
from headway.train.build import switch_dropout
from headway.train.run import train
from helpers.rollouts import write_pairs
from helpers.runs import read_metrics, write_model

pytestmark = [
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}

# Where transformers keeps a probability: a module, a number of a layer, the configuration that a layer reads.
DRAWING = {
    "modules": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64),
    "numbers": lambda: transformers.GraniteConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, attention_dropout=0.3
    ),
    "layers that are left out": lambda: transformers.OPTConfig(
        **SMALL, ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.5, dropout=0.3, attention_dropout=0.3
    ),
    "a configuration": lambda: transformers.FalconConfig(**SMALL, hidden_dropout=0.3, attention_dropout=0.3),
    "noise of routers": lambda: transformers.MixtralConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=4, router_jitter_noise=0.3
    ),
}


def losses_of(words):
    records = read_metrics(Path(words["run"]["folder"]) / "metrics.jsonl")
    return [record["loss"] for record in records if record["kind"] == "step"]


def out_of(model):
    return model(input_ids=torch.arange(24)[None], use_cache=False).logits.detach()


@pytest.mark.parametrize("name", DRAWING)
def test_a_model_trains_on_what_is_judged(name):
    model = load_model(DRAWING[name](), random_init=True, attention="eager")
    targets = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)][:2]
    if targets:
        add_adapters(model, targets, rank=4, alpha=4, dropout=0.5, base="base")
        initialise_adapters(model, 0, "cpu")
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                parameter.add_("lora_B" in parameter_name, alpha=0.1)
    judged, config = out_of(model.eval()), model.config.to_dict()
    model.train()
    assert not torch.equal(out_of(model), judged)
    switch_dropout(model, is_on=False)
    assert torch.equal(out_of(model), judged)
    assert model.config.to_dict() == config  # which exports hold


@pytest.fixture
def words(raw, tmp_path):
    """A configuration of text whose model drops attention, as plain types."""
    raw["model"] = {"path": str(write_model(tmp_path / "model", "qwen3", attention_dropout=0.1)), "random_init": True}
    raw["data"] |= {"train": str(write_pairs(tmp_path / "pairs.jsonl", 8)), "tokens_per_pack": 300}
    raw["optim"] = {"steps": 2, "lr": 5e-3, "accumulation": 1}
    return raw


@pytest.mark.parametrize(
    ("loss", "first"), [("sigmoid", math.log(2)), ("hinge", 1.0), ("ipo", 25.0), ("kto", 0.5), ("robust", math.log(2))]
)
def test_the_first_loss_is_that_of_no_difference(words, loss, first, capsys):
    words["preference"] = {"loss": loss}
    train(parse_config(words))
    assert losses_of(words)[0] == pytest.approx(first, rel=1e-5)
    assert "not of one function" not in capsys.readouterr().err


def test_a_policy_that_is_not_its_reference_at_the_start_is_told(words, monkeypatch, capsys):
    words["preference"] = {"loss": "sigmoid", "beta": 0.5}
    monkeypatch.setattr("headway.train.build.switch_dropout", lambda *_, **__: None)
    train(parse_config(words))
    told = capsys.readouterr().err
    assert "warning: the first step's preference loss is 0." in told
    assert "but should be 0.6931, because the model equals its reference" in told


def test_dropout_is_off_where_it_is_set_so(words, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c d"}]}] * 6
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words["data"]["train"] = str(tmp_path / "chats.jsonl")
    losses = {}
    for value, probability in (("auto", 0.1), (False, 0.1), ("auto", 0.0)):
        write_model(tmp_path / "model", "qwen3", attention_dropout=probability)
        words["model"]["dropout"] = value
        words["run"]["folder"] = str(tmp_path / f"run-{value}-{probability}")
        train(parse_config(words))
        losses[value, probability] = losses_of(words)
    assert losses[False, 0.1] == losses["auto", 0.0] != losses["auto", 0.1]


@pytest.mark.parametrize(
    ("model", "preference", "message"),
    [
        ({"dropout": True}, {}, "model.dropout is on, but preference compares the model with its reference"),
        ({"lora": {"rank": 2, "dropout": 0.1}}, {}, r"model.lora.dropout 0.1 has no effect with preference, where"),
        ({"lora": {"rank": 2, "dropout": 0.1}, "dropout": False}, None, r"has no effect with model.dropout: off"),
    ],
)
def test_dropout_that_has_no_effect_is_an_error(words, model, preference, message):
    words["model"] |= model
    if preference is not None:
        words["preference"] = preference
    with pytest.raises(ConfigError, match=message):
        parse_config(words)


def test_dropout_goes_with_losses_that_compare_with_nothing(words):
    words["model"]["dropout"] = True
    words["preference"] = {"loss": "simpo"}
    assert parse_config(words).drops
