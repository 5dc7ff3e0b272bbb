"""Answers that share their prompt: losses, gradients, records and work against answers behind prompts of their own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from headway.cli.app import app
from headway.config import parse_config
from headway.count import Workload
from headway.data import Encoder, read_samples
from headway.data.blank_media import with_blanks
from headway.data.collate import Collator
from headway.data.index import build_index
from headway.data.sources import open_source
from headway.errors import ConfigError
from headway.models.load import load_model, load_processor, rope_index
from headway.models.vision import vision_geometry
from headway.objectives.preferences.prompts import why_apart
from headway.tracing import trace
from headway.train.run import train
from helpers.rollouts import assert_same, opened, our_loss, pair, turn, write_pairs, write_pictured_pairs
from helpers.runs import read_metrics, write_model

pytestmark = [
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


def ranked(number):
    """Pairs, and every third row three answers."""
    row = pair(number)
    if number % 3:
        return row
    answers = [row["chosen"], row["rejected"], turn("assistant", "It is none of them, I think.")]
    completions = [{"response": answer[0]["content"], "rank": rank} for rank, answer in enumerate(answers, 1)]
    return {"prompt": row["prompt"][0]["content"], "completions": completions}


def with_three(path):
    """The same rows, every second one with one more answer."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[::2]:
        chosen, rejected = row.pop("chosen"), row.pop("rejected")
        texts = [chosen[0]["content"], rejected[0]["content"], "no idea"]
        row["completions"] = [{"response": text, "rank": rank} for rank, text in enumerate(texts, 1)]
        row["messages"] = row.pop("prompt")
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def encoders(folder, model):
    """An encoder of answers that stand apart, and one of answers that share prompts."""
    apart, shared = (Encoder(load_processor(str(folder)), rope_index(model)) for _ in range(2))
    shared.shares_prompts = True
    return apart, shared


def collator_for(encoder, model, **settings):
    rows = 1 if encoder.rope_index is None else 3
    return Collator(
        geometry=vision_geometry(model), pixel_scale=encoder.pixel_scale, position_rows=rows, **settings
    )  # fmt: skip


def both_packs(folder, data, model, **settings):
    """The pack of a file's rows with answers apart, and that of the same rows with shared prompts."""
    samples = list(read_samples(data))
    return [
        collator_for(encoder, model, **settings)([encoder.encode(sample) for sample in samples])
        for encoder in encoders(folder, model)
    ]


def assert_equal_training(folder, apart, shared, settings):
    expected = our_loss(opened(folder, shift=0.3), apart, settings, opened(folder))
    found = our_loss(opened(folder, shift=0.3), shared, settings, opened(folder))
    assert_same(found[:2], expected[:2])
    for ours, theirs in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("settings", [{"sft": 0.2}, {"loss": "simpo"}, {"loss": "orpo"}], ids=str)
def test_text_is_learnt_as_where_answers_stand_apart(tmp_path, family, settings):
    folder = write_model(tmp_path / "model", family)
    data = write_pairs(tmp_path / "rows.jsonl", 7, ranked)
    apart, shared = both_packs(folder, data, opened(folder), bucket_tokens=64)
    assert shared.slots > shared.tokens  # there is padding
    assert [*shared.answers.counts] == [*apart.answers.counts] == [3, 2, 2, 3, 2, 2, 3]
    assert shared.tokens < 0.8 * apart.tokens
    assert_equal_training(folder, apart, shared, settings)


def test_pictures_are_learnt_as_where_answers_stand_apart_and_read_once(digits):
    """Qwen3-VL: three rows of positions, features of the tower in early layers, and one picture for all answers."""
    folder = digits / "model"
    data = with_three(write_pictured_pairs(digits, digits / "data" / "three.jsonl", 5))
    apart, shared = both_packs(folder, data, opened(folder), bucket_tokens=32, bucket_patches=64)
    assert shared.answers.counts == (3, 2, 3, 2, 3)
    per_row = [len(sample.media("image")) for sample in (row.chats[0] for row in read_samples(data))]
    assert shared.num_images == sum(per_row)
    assert apart.num_images == sum(n * answers for n, answers in zip(per_row, apart.answers.counts, strict=True))
    assert shared.position_ids_R1T.shape[0] == 3
    assert_equal_training(folder, apart, shared, {"sft": 0.1})


def test_answers_with_pictures_of_their_own_stand_apart_in_the_same_pack(digits):
    folder, model = digits / "model", opened(digits / "model")
    data = write_pictured_pairs(digits, digits / "data" / "own.jsonl", 4)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    first, second = rows[0], rows[1]
    words = [part for part in first["prompt"][0]["content"] if part["type"] == "text"]
    pictures = [part for part in second["prompt"][0]["content"] if part["type"] == "image"]
    other = turn("user", pictures + words)
    rows[1] = {"chosen": first["prompt"] + first["chosen"], "rejected": other + first["rejected"]}
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")
    apart, shared = both_packs(folder, data, model)
    prompts = [encoders(folder, model)[1].encode(sample).prompt for sample in read_samples(data)]
    assert [prompt > 0 for prompt in prompts] == [True, False, True, True]
    assert shared.num_segments == apart.num_segments - 3
    assert_equal_training(folder, apart, shared, {})


def test_a_blank_picture_stands_behind_the_answers(digits):
    """Of a pack without a picture where other ranks' packs have some."""
    folder, model = digits / "model", opened(digits / "model")
    data = write_pairs(digits / "data" / "words.jsonl", 4, ranked)
    apart, shared = both_packs(folder, data, model)
    blank = with_blanks(shared, frozenset({"images"}), collator_for(encoders(folder, model)[1], model))
    assert blank.slots > shared.slots
    expected, found = (our_loss(opened(folder, shift=0.3), pack, {}, opened(folder))[:2] for pack in (apart, blank))
    tower = {name: found[1].pop(name) for name in found[1].keys() - expected[1].keys()}
    assert tower
    assert not any(grad.any() for grad in tower.values())
    assert_same(found, expected)


def test_the_ledger_bills_what_is_computed(tmp_path):
    folder = write_model(tmp_path / "model", "qwen3")
    model = opened(folder)
    for batch in both_packs(folder, write_pairs(tmp_path / "rows.jsonl", 7, ranked), model):
        rows = {row.name: row for row in trace(model).with_splits().count(batch.workload).rows}
        with FlopCounterMode(display=False) as counter:
            model(**batch.model_inputs())
        counted = sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
        attention = rows.pop("language.attention")
        assert counted == sum(row.forward for row in rows.values())
        # pairs of the mask, cell by cell: 2 (dqk + dv) FLOPs each for every head and layer
        pairs = _mask(batch).sum().item()
        config = model.config
        assert attention.forward == pairs * 4 * config.head_dim * config.num_attention_heads * config.num_hidden_layers


def _mask(batch):
    if batch.splits is not None:
        return batch.splits.dense()
    return torch.block_diag(*(torch.ones(n, n).tril() for n in batch.workload.segments.tolist())).bool()


def test_lengths_of_an_index_are_those_of_the_samples(digits):
    folder, model = digits / "model", opened(digits / "model")
    data = with_three(write_pictured_pairs(digits, digits / "data" / "index.jsonl", 6))
    apart, shared = encoders(folder, model)
    plain = build_index(open_source(data), apart, workers=0)
    once, ledger = plain.with_prompts_once(), trace(model).with_splits()
    costs = once.costs(ledger)
    for row, sample in enumerate(read_samples(data)):
        lengths, encoded = apart.measure(sample).with_prompt_once(), shared.encode(sample)
        assert lengths == replace(
            encoded.lengths,
            num_answers=len(sample.chats),
            prompt=encoded.prompt,
            branches=encoded.answers,
        )
        assert (once.tokens[row], once.media_end[row]) == (encoded.tokens, encoded.media_end)
        assert once.patches[row] == encoded.patches > 0
        assert once.media["images"][row].tolist() == encoded.media["images"].sizes.tolist()
        assert [tuple(run) for run in once.targets[row].tolist()] == [*lengths.targets]
        assert once.splits_of(row)[0] == ("causal", encoded.prompt)
        batch = collator_for(shared, model)([encoded])
        assert costs[row] == ledger.count(batch.workload).total
        assert encoded.tokens < plain.tokens[row]


@pytest.fixture
def few(raw, tmp_path):
    """A run whose steps are of the same few rows, whatever their lengths."""
    folder, data = write_model(tmp_path / "model", "qwen3"), write_pairs(tmp_path / "rows.jsonl", 5, ranked)
    raw["model"]["path"] = str(folder)
    raw["data"] |= {"train": str(data), "eval": str(data), "tokens_per_pack": 900, "samples_per_pack": 5, "window": 5}
    raw["optim"] = {"steps": 3, "lr": 5e-3, "schedule": "constant"}
    raw["eval"] = {"every": 1}
    raw["preference"] = {"loss": "sigmoid"}
    return raw


def records_of(raw):
    train(parse_config(raw))
    return read_metrics(Path(raw["run"]["folder"]) / "metrics.jsonl")


@pytest.mark.parametrize("reference", ["stored", "adapters-off"])
def test_records_are_those_of_a_run_whose_answers_stand_apart(few, reference):
    few["preference"]["reference"] = reference
    if reference == "adapters-off":
        few["model"]["lora"] = {"rank": 2, "targets": ["q_proj", "down_proj"]}
    shared = records_of(few)
    few["run"]["folder"] += "-apart"
    few["preference"]["shared_prompts"] = False
    apart = records_of(few)
    assert [r["kind"] for r in shared] == [r["kind"] for r in apart]
    for ours, theirs in zip(shared, apart, strict=True):
        if ours["kind"] == "step":
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            if ours["step"] == 1:  # no reward differs yet but by rounding, which is what decides who is right
                ours["preference"]["accuracy"] = theirs["preference"]["accuracy"]
            assert ours["preference"] == pytest.approx(theirs["preference"], rel=1e-4, abs=1e-6)
            assert ours["tokens"] < theirs["tokens"]
            assert ours["flops"]["total"] < theirs["flops"]["total"]
        elif ours["kind"] == "evaluation":
            names = ("loss", "accuracy", "margin", "pairs")
            assert [ours[n] for n in names] == pytest.approx([theirs[n] for n in names], rel=1e-4, abs=1e-6)


def test_a_stream_packs_what_is_left_of_shared_prompts(few):
    few["preference"] = {"loss": "simpo"}
    few["data"] |= {"stream": {"lanes": 1}, "tokens_per_pack": 120, "samples_per_pack": None}
    del few["data"]["eval"], few["data"]["window"], few["eval"]
    few["optim"]["steps"] = 2
    steps = [record for record in records_of(few) if record["kind"] == "step"]
    assert all(record["preference"]["pairs"] > 0 for record in steps)


def test_a_dry_run_and_a_look_know_what_a_step_computes(few, tmp_path):
    path = tmp_path / "recipe.yaml"
    few["data"]["workers"] = 1
    path.write_text(yaml.safe_dump(few))
    outputs = [
        CliRunner().invoke(app, command)
        for command in (["train", str(path), "--dry-run", "--json"], ["look", str(path), "--json"])
    ]
    assert not any(result.exit_code for result in outputs), outputs
    planned, shown = (json.loads(result.stdout) for result in outputs)
    step = next(record for record in records_of(few) if record["kind"] == "step")
    assert planned["packs"]["most_tokens"] == step["tokens"]
    assert planned["flops"]["total"] == step["flops"]["total"]
    assert planned["flops"]["recompute"] == step["flops"]["recompute"] > 0
    assert (shown["packs"][0]["tokens"], shown["packs"][0]["flops"]) == (step["tokens"], step["flops"]["total"])
    for sample in shown["samples"]:
        assert sample["used"] == [[0, sample["lengths"]["tokens"]]]
        assert sample["lengths"]["prompt"] + sum(sample["lengths"]["branches"]) == sample["lengths"]["tokens"]


@pytest.mark.slow  # inductor's C++ compiler takes its time
def test_no_step_compiles_again_over_packs_of_any_answers(raw, digits):
    torch._dynamo.reset()
    data = with_three(write_pictured_pairs(digits, digits / "data" / "compiled.jsonl"))
    raw["data"] |= {"train": str(data), "tokens_per_pack": 200, "strategy": "next_fit"}
    raw["optim"]["steps"] = 25
    raw["preference"] = {"loss": "simpo", "shared_prompts": True}
    raw["speed"] = {"compile": True, "recompiles": "error"}
    steps = [record for record in records_of(raw) if record["kind"] == "step"]
    # Behind the graph break of attention on a CPU, torch learns from the second pack which sizes differ.
    assert {step["step"] for step in steps if step["compiled"]} <= {1, 2}
    assert not any(step["recompiles"] for step in steps)
    assert len({step["slots"] for step in steps}) > 5


CAN = ("gpt2", "llama", "qwen3_moe", "deepseek_v3", "qwen3_vl")
CANNOT = {
    "mistral_sliding": "pairs:sliding",
    "gemma2_softcap": "pairs:sliding",
    "gpt_oss_sinks": "pairs:sliding",
    "qwen3_next": "mixes tokens outside attention",
    "mamba": "mixes tokens outside attention",
}


@pytest.mark.parametrize("family", [*CAN, *CANNOT])
def test_a_model_says_by_its_attention_whether_answers_can_share(tmp_path, family):
    folder = write_model(tmp_path / "model", family)
    model = load_model(str(folder), random_init=True)
    reason = why_apart(model, trace(model), Encoder(load_processor(str(folder)), rope_index(model)))
    assert CANNOT[family] in reason if family in CANNOT else not reason, reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 2.0}, "caps the scores"),
        ({"sinks": True}, "has sinks"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "length of each answer"),
    ],
    ids=["caps", "sinks", "rotary embedding"],
)
def test_what_attention_adds_to_scores_keeps_answers_apart(tmp_path, changes, message):
    rope = {name: value for name, value in changes.items() if name == "rope_parameters"}
    folder = write_model(tmp_path / "model", "llama", **rope)
    model = load_model(str(folder), random_init=True)
    if "sinks" in changes:
        model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    model.config.attn_logit_softcapping = changes.get("attn_logit_softcapping")
    ledger = trace(load_model(str(folder), random_init=True))
    assert message in why_apart(model, ledger, Encoder(load_processor(str(folder))))


def test_a_model_that_cannot_share_trains_on_answers_apart_and_says_so(few, tmp_path, capsys):
    few["model"]["path"] = str(write_model(tmp_path / "sliding", "mistral_sliding"))
    few["optim"]["steps"] = 1
    found = records_of(few)
    told = capsys.readouterr().err
    assert "each answer has its own copy of the prompt" in told
    assert "pairs:sliding:16" in told
    few["run"]["folder"] += "-apart"
    few["preference"]["shared_prompts"] = False
    assert records_of(few)[0]["loss"] == found[0]["loss"]
    assert "own copy" not in capsys.readouterr().err
    few["preference"]["shared_prompts"] = True
    few["run"]["folder"] += "-asked"
    with pytest.raises(
        ConfigError, match=r"shared_prompts is true, but .*pairs:sliding.*Set shared_prompts to auto or false"
    ):
        train(parse_config(few))


def test_attention_that_is_more_than_causal_refuses_shared_prompts(tmp_path):
    folder = write_model(tmp_path / "model", "mistral_sliding")
    model = opened(folder)
    _, shared = both_packs(folder, write_pairs(tmp_path / "rows.jsonl", 2), model)
    with pytest.raises(ConfigError, match=r"a window of 16 tokens.*shared_prompts to false"):
        model(**shared.model_inputs())


def test_costs_need_a_ledger_that_takes_splits(tmp_path):
    folder = write_model(tmp_path / "model", "qwen3")
    model = opened(folder)
    _, shared = both_packs(folder, write_pairs(tmp_path / "rows.jsonl", 2), model)
    assert trace(model).with_splits().count(Workload([9])).total == trace(model).count(Workload([9])).total
    assert trace(model).with_splits().count(shared.workload).total > 0
