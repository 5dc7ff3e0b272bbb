"""KTO: its loss against TRL's trainer, and runs on answers that are wished for or not."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from trl import KTOConfig, KTOTrainer
from typer.testing import CliRunner

from headway.cli.app import app
from headway.config import parse_config
from headway.data import Encoder, read_samples
from headway.data.collate import Collator
from headway.data.feed.make import PackMaker, Piece
from headway.data.sources import open_source
from headway.errors import ConfigError
from headway.models.attention import use_attention
from headway.models.head import model_with_loss
from headway.models.load import load_model, load_processor, rope_index
from headway.models.parallel.ranks import Ranks
from headway.models.video import normalised
from headway.models.vision import vision_geometry
from headway.objectives.preferences.losses import Preferring
from headway.objectives.preferences.objective import PackWeights
from headway.objectives.preferences.reference import Scoring, with_reference
from headway.objectives.preferences.rows import GradedRows, mismatched
from headway.objectives.preferences.settings import PreferenceConfig
from headway.tracing import trace
from headway.train.check import check_run
from headway.train.data import open_feed
from headway.train.run import train
from helpers.processes import TRAIN, run_processes
from helpers.rollouts import LIBRARY_WARNINGS, assert_same, gradients, opened, pair, their_loss, turn, write_pairs
from helpers.runs import read_metrics

pytestmark = [pytest.mark.usefixtures("own_cache"), LIBRARY_WARNINGS]


def labelled(number):
    """One answer of a pair, and whether it is the right one."""
    row = pair(number)
    is_right = number % 3 != 1
    return {"prompt": row["prompt"], "completion": row["chosen" if is_right else "rejected"], "label": is_right}


@pytest.fixture
def words(raw, base, tmp_path):
    """A configuration of text, as plain types."""
    raw["model"] = {"path": str(base)}
    raw["data"] |= {"train": str(write_pairs(tmp_path / "rows.jsonl", 24, labelled)), "tokens_per_pack": 300}
    raw["optim"] = {"steps": 3, "lr": 5e-3, "schedule": "constant", "accumulation": 2, "clip": None}
    raw["preference"] = {"loss": "kto"}
    return raw


def steps_of(raw):
    records = read_metrics(Path(raw["run"]["folder"]) / "metrics.jsonl")
    return [record for record in records if record["kind"] == "step"]


def packed(folder, data, model):
    """The pack of all rows of a file, as a run makes it."""
    encoder = Encoder(load_processor(str(folder)), rope_index(model))
    collator = Collator(
        geometry=vision_geometry(model),
        pixel_scale=encoder.pixel_scale,
        position_rows=1 if encoder.rope_index is None else 3,
    )
    source = open_source(str(data))
    maker = PackMaker((source,), encoder, collator, skips=False, rule=GradedRows(mismatches=True))
    lengths = [encoder.measure(source[row]).tokens for row in range(len(source))]
    return encoder, maker([Piece(0, row, 0, length) for row, length in enumerate(lengths)]).batch


def our_loss(model, reference, batch, settings):
    """Loss of a pack, its gradients by parameter, and the divergence that it learns with."""
    scorings = []
    for each in (model, reference):
        use_attention(each, "headway_flash")
        scorings.append(Scoring(model_with_loss(each, chunk=7), torch.device("cpu"), nullcontext))
    batch = with_reference(batch, scorings[1].log_probabilities(batch))
    kl = 0.0
    if settings["loss"] == "kto":
        of_policy, of_reference = (scoring.log_probabilities(batch.companion) for scoring in scorings)
        kl = (of_policy - of_reference).mean().clamp_min(0)
    preferring = Preferring(PreferenceConfig.model_validate(settings))
    weights = PackWeights(preferring, batch, None, batch.answers.num_pairs, 1, kl)
    model.zero_grad()
    losses = scorings[0].model_with_loss
    losses(batch.model_inputs(), batch.labels_1T[0], weigh=weights).total.backward()
    return weights.numbers.loss_P.mean().item(), gradients(model), kl


def rows_of(encoder, data, *, cycle=True):
    """Rows as TRL's collator takes them: of preferences all chosen answers, then all rejected ones."""
    samples = read_samples(data)
    chats = [chat for sample in samples for chat in getattr(sample, "chats", (sample,))[:1]]
    chats += [chat for sample in samples for chat in getattr(sample, "chats", (sample,))[1:]]
    labels = [sample.desirable if getattr(sample, "desirable", None) is not None else True for sample in samples]
    labels += [False] * (len(chats) - len(labels))
    rows = []
    for chat, label in zip(chats, labels, strict=True):
        encoded = encoder.encode(chat)
        learnt = (encoded.labels_S != -100).nonzero()[:, 0].tolist()
        ids = encoded.input_ids_S.tolist()
        prompt, answer = ids[: learnt[0]], ids[learnt[0] : learnt[-1] + 1]
        rows.append({"prompt_ids": prompt, "completion_ids": answer, "label": label})
    answers = [row["completion_ids"] for row in rows]
    for row, answer in zip(rows, [answers[-1], *answers[:-1]] if cycle else (), strict=cycle):
        row["KL_completion_ids"] = answer
    return rows


def trainer_for(tmp_path, folder, theirs, reference, options):
    words = {"prompt": "a", "completion": "b", "label": True}
    settings = {"report_to": [], "use_cpu": True, "bf16": False, "max_length": None, "disable_tqdm": True}
    settings |= {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential"}
    for model in (theirs, reference):
        model.set_attn_implementation("sdpa")
    processor = load_processor(str(folder))
    return KTOTrainer(
        model=theirs,
        ref_model=reference,
        args=KTOConfig(str(tmp_path / "trl"), **settings | options),
        train_dataset=Dataset.from_list([words, {**words, "label": False}]),
        processing_class=getattr(processor, "tokenizer", processor),
    )


LOSSES = {
    "kto": ({"loss": "kto"}, {"loss_type": "kto", "beta": 0.1}),
    "kto, weighed": (
        {"loss": "kto", "beta": 0.4, "weights": [1.5, 0.7]},
        {"loss_type": "kto", "beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.7},
    ),
    "apo_zero_unpaired": ({"loss": "apo_zero_unpaired"}, {"loss_type": "apo_zero_unpaired", "beta": 0.1}),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("row", [labelled, pair], ids=["labelled", "pairs"])
def test_the_loss_equals_trls(base, tmp_path, name, row):
    settings, options = LOSSES[name]
    data = write_pairs(tmp_path / "rows.jsonl", 6, row)
    policy, reference = opened(base), opened(base, shift=0.3)
    encoder, batch = packed(base, data, policy)
    loss, grads, kl = our_loss(policy, reference, batch, settings)
    theirs = opened(base)
    trainer = trainer_for(tmp_path, base, theirs, opened(base, shift=0.3), options)
    inputs = trainer.data_collator(rows_of(encoder, data, cycle=settings["loss"] == "kto"))
    assert_same((loss, grads), their_loss(trainer, theirs, inputs))
    if settings["loss"] == "kto":
        assert kl > 0  # else nothing would be seen of it
        measured = trainer._metrics["train" if theirs.training else "eval"]
        assert measured["kl"][0] == pytest.approx(kl.item(), rel=1e-5)


def test_the_loss_on_pictures_equals_trls(digits, tmp_path):
    """Rows of pictures: an answer behind another prompt is one about another picture."""
    folder, lines = digits / "model", []
    for number, line in enumerate((digits / "data/train.jsonl").read_text().splitlines()[:4]):
        question, answer = json.loads(line)["messages"]
        lines.append({"prompt": [question], "completion": [answer], "label": number != 2})
    data = digits / "data" / "labelled.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)) + "\n")
    policy, reference = opened(folder, shift=0.3), opened(folder)
    encoder, batch = packed(folder, data, policy)
    loss, grads, kl = our_loss(policy, reference, batch, {"loss": "kto"})

    theirs = opened(folder, shift=0.3)
    trainer = trainer_for(tmp_path, folder, theirs, opened(folder), {"loss_type": "kto", "beta": 0.1})
    inputs = trainer.data_collator(rows_of(encoder, data))
    samples = [encoder.encode(sample) for sample in read_samples(data)]
    placeholder = theirs.config.image_token_id
    inputs |= {
        "image_grid_thw": torch.cat([sample.media["images"].sizes for sample in samples]),
        "pixel_values": torch.cat(
            [normalised(sample.media["images"].features, encoder.pixel_scale) for sample in samples]
        ),
        "mm_token_type_ids": (inputs["input_ids"] == placeholder).int(),
        "KL_mm_token_type_ids": (inputs["KL_input_ids"] == placeholder).int(),
    }
    assert_same((loss, grads), their_loss(trainer, theirs, inputs))
    measured = trainer._metrics["train" if theirs.training else "eval"]
    assert measured["kl"][0] == pytest.approx(float(kl), rel=1e-4, abs=1e-6)


def test_answers_stand_behind_other_prompts_and_fill_as_much(base, tmp_path):
    model = opened(base)
    _, batch = packed(base, write_pairs(tmp_path / "rows.jsonl", 5, labelled), model)
    assert batch.companion.tokens == batch.tokens
    assert sorted(batch.companion.input_ids_1T[0].tolist()) == sorted(batch.input_ids_1T[0].tolist())
    assert batch.companion.num_supervised == batch.num_supervised
    _, alone = packed(base, write_pairs(tmp_path / "one.jsonl", 1, pair), model)
    assert (alone.answers.num_pairs, alone.companion.answers) == (2, None)
    assert mismatched([]) == []


@pytest.mark.parametrize("reference", ["stored", "adapters-off"])
def test_a_run_learns_over_the_packs_of_a_step(words, base, reference):
    """Packs of a step share an estimate, and records say what it is."""
    words["preference"]["reference"] = reference
    if reference == "adapters-off":
        words["model"]["lora"] = {"rank": 4, "targets": ["q_proj", "down_proj"]}
        words["optim"]["lr"] = 0.05
    words["optim"]["steps"] = 6
    train(parse_config(words))
    steps = steps_of(words)
    first, last = steps[0]["preference"], steps[-1]["preference"]
    assert steps[0]["loss"] == pytest.approx(0.5, abs=1e-4)  # the policy is the reference
    assert (first["kl"], first["rows"]) == (pytest.approx(0.0, abs=1e-5), first["mismatched"])
    assert 0 < first["desirable"] < first["rows"]
    assert last["reward_desirable"] > last["reward_undesirable"]
    # what is run is billed: the policy forward on as many tokens again, and the reference twice where it runs
    ledger = trace(load_model(str(base)))
    head = {row.component: row for row in ledger.rows}["language.head"]
    kl = steps[0]["phases"]["kl"]["flops"]
    assert kl["total"] == kl["forward"] > head.forward * steps[0]["tokens"]
    if reference == "adapters-off":
        off = steps[0]["phases"]["reference"]["flops"]
        assert kl["total"] < off["total"] < 2 * kl["total"]


def test_labels_come_without_an_index(words):
    words["data"]["stream"] = {"lanes": 1}
    words["model"]["lora"] = {"rank": 2, "targets": ["q_proj"]}
    words["preference"]["reference"] = "adapters-off"
    words["optim"]["steps"] = 2
    train(parse_config(words))
    assert all(record["preference"]["mismatched"] > 0 for record in steps_of(words))


def test_a_step_equals_trls_whichever_packs_it_has(words, base, tmp_path):
    """A pack a step is a batch of TRL's; its rows are cycled as TRL cycles them."""
    words["optim"] |= {"accumulation": 1, "steps": 3}
    config = parse_config(words)
    train(config)
    encoder = Encoder(load_processor(str(base)))
    by_place = {sample.where: sample for sample in read_samples(words["data"]["train"])}
    model, reference = (load_model(str(base), attention="sdpa") for _ in range(2))
    feed = open_feed(config, encoder, model, trace(model), Ranks(0, 1), pin_memory=False)
    trainer = trainer_for(tmp_path, base, model, reference, {"loss_type": "kto", "beta": 0.1})
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, betas=config.optim.betas, eps=1e-8)
    for record in steps_of(words):
        (batch,) = next(feed)
        data = tmp_path / "step.jsonl"
        lines = Path(words["data"]["train"]).read_text().splitlines()
        data.write_text("\n".join(lines[by_place[where].origin.row] for where in batch.sources) + "\n")
        loss = trainer.compute_loss(model, trainer.data_collator(rows_of(encoder, data)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-4)
        measured = trainer._metrics["train" if model.training else "eval"]
        assert record["preference"]["kl"] == pytest.approx(measured["kl"][-1], rel=1e-3, abs=1e-5)


def test_a_resumed_run_is_the_same_to_the_bit(words):
    words["checkpoint"] = {"every": 2}
    words["optim"]["steps"] = 4
    whole = train(parse_config(words))
    records = steps_of(words)
    folder = Path(words["run"]["folder"])
    shutil.rmtree(folder / "checkpoints/step-000004")
    shutil.move(folder / "export", folder / "first")
    again = train(parse_config(words), resume=True)
    assert [record["loss"] for record in steps_of(words)] == [record["loss"] for record in records]
    assert [record["preference"] for record in steps_of(words)] == [record["preference"] for record in records]
    checked = check_run(folder)
    assert (checked.faults, checked.redone) == ((), 2)
    states = (load_model(str(path)).state_dict() for path in (folder / "first" / whole.model.name, again.model))
    for one, two in zip(*(state.values() for state in states), strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "parallel"), [(3, {}), (2, {"sequence": 2})])
def test_several_ranks_have_the_losses_of_one(words, tmp_path, ranks, parallel):
    words["data"]["strategy"] = "first_fit"
    words["optim"]["accumulation"] = ranks
    train(parse_config(words))
    alone = steps_of(words)
    words["optim"]["accumulation"] = ranks if parallel else 1
    words["parallel"] = parallel
    words["run"]["folder"] += "-several"
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(words))
    run_processes([*TRAIN, path], ranks)
    for one, two in zip(alone, steps_of(words), strict=True):
        assert two["samples_digest"] == one["samples_digest"]
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert two["preference"] == pytest.approx(one["preference"], rel=1e-3, abs=1e-4)
        assert two["flops"] == one["flops"]


def test_held_out_pairs_are_judged_by_their_rewards(words, tmp_path):
    words["data"]["eval"] = str(write_pairs(tmp_path / "held_out.jsonl", 5))
    words["eval"] = {"at_end": True}
    train(parse_config(words))
    folder = Path(words["run"]["folder"])
    (in_run,) = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "evaluation"]
    result = CliRunner().invoke(app, ["evaluate", str(folder), words["data"]["eval"], "--json"])
    after = json.loads(result.stdout)
    assert (after["pairs"], after["accuracy"]) == (in_run["pairs"], in_run["accuracy"])
    assert after["loss"] == pytest.approx(in_run["loss"], rel=1e-5)
    assert "loss sigmoid beside the initial weights" in after["judged_by"]["note"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preference": {"loss": "kto", "sft": 0.1}}, "sft has no effect with loss 'kto'"),
        ({"preference": {"loss": "sigmoid", "weights": [2.0, 1.0]}}, "has no effect with loss 'sigmoid'. Remove it"),
        ({"preference": {"loss": "kto", "reference": "none"}}, "kto' needs a reference"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(words, changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(words | changes)


def test_rows_that_cannot_be_learnt_are_refused(words, tmp_path):
    words["data"]["overlong"] = "split"
    with pytest.raises(ConfigError, match="would cut an answer into several rows"):
        parse_config(words)
    words["data"]["overlong"] = "drop"
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [*turn("user", "a"), *turn("assistant", "b")]}) + "\n")
    words["data"]["train"] = str(path)
    with pytest.raises(ConfigError, match="does not say whether its answer is good or bad"):
        train(parse_config(words))
