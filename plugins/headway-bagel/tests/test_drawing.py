"""Training a model that draws: equal to a plain loop, however it is spread, stopped and started again."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import Qwen3Config

from bagels import VAE, chat, image, write_data, write_model
from headway.config import parse_config
from headway.config.model import family_settings
from headway.data import read_samples
from headway.data.encoders import collator_of
from headway.errors import ConfigError, DataError
from headway.models.load import load_model, load_model_config, load_processor
from headway.models.parallel.ranks import Ranks
from headway.tracing import trace
from headway.train.data import open_feed
from headway.train.run import train
from headway_bagel.encoding import DrawingEncoder
from headway_bagel.settings import DrawingConfig
from helpers.processes import run_processes
from helpers.runs import configuration, read_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawing")
    write_model(folder / "model")
    write_model(folder / "latents", VAE)
    write_data(folder / "data")
    return folder


def raw_config(folder, run, *, model="model", processes=1, **overrides):
    data = [{"path": str(folder / "data" / "all.jsonl"), "name": "all"}]
    overrides["data"] = {"tokens_per_pack": 96, "overlong": "error"} | overrides.get("data", {})
    return configuration(folder / model, data, run, processes=processes, overrides=overrides)


def steps_of(run):
    return [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "step"]


def numbers(records):
    """Numbers of each step; a loss that nothing was learnt by is null, and stands as NaN."""
    names = ("loss", "flow_loss", "grad_norm")
    return [tuple(math.nan if r[name] is None else r[name] for name in names) for r in records]


def assert_same(found, expected):
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-5, nan_ok=True)


def work(records):
    return [(r["tokens"], r["flops"]["total"], r["samples_digest"]) for r in records]


@pytest.fixture(scope="module")
def plain_run(folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("plain") / "run"
    train(parse_config(raw_config(folder, run)))
    return run


@pytest.fixture(scope="module")
def plain(plain_run):
    return steps_of(plain_run)


def test_training_equals_a_plain_loop_over_single_samples(folder, tmp_path, plain):
    config = parse_config(raw_config(folder, tmp_path / "run"))
    torch.manual_seed(0)
    model = load_model(folder / "model", random_init=True, attention="sdpa").train()
    encoder = DrawingEncoder(load_processor(folder / "model"), model.config)
    feed = open_feed(config, encoder, model, trace(model), Ranks(0, 1), pin_memory=False)  # says which samples
    by_source = {sample.where: sample for sample in read_samples(folder / "data" / "all.jsonl")}
    optim = config.optim
    decayed = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": optim.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        betas=optim.betas,
    )
    for step, record in enumerate(plain[:3], start=1):
        batches = next(feed)
        tokens = sum(batch.num_supervised for batch in batches)
        drawn = sum(batch.workload.noised for batch in batches)
        words = flow = 0.0
        for batch in batches:
            for where in batch.sources:
                one = collator_of(encoder)([encoder.encode(by_source[where])]).noised(0, step)
                given = one.model_inputs()
                given["attention_mask"] = given["attention_mask"].dense()
                out = model(**given)
                labels = one.labels_1T[0][one.labels_1T[0] != -100]
                loss = torch.nn.functional.cross_entropy(out.logits, labels, reduction="sum") / tokens
                words += loss.item()
                if out.flow is not None:
                    error = (out.flow - out.flow_target).square().mean(-1).sum() / drawn
                    flow += error.item()
                    loss = loss + error
                loss.backward()
        assert record["loss"] == pytest.approx(words, rel=1e-5)
        assert record["flow_loss"] == pytest.approx(flow, rel=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = record["lr"]
        optimizer.step()
        optimizer.zero_grad()


def test_what_is_billed_is_what_the_ledger_says_of_the_packs(folder, plain):
    model = load_model(folder / "model", random_init=True)
    encoder = DrawingEncoder(load_processor(folder / "model"), model.config)
    config = parse_config(raw_config(folder, folder / "unused"))
    cost = trace(model)
    feed = open_feed(config, encoder, model, cost, Ranks(0, 1), pin_memory=False)
    for record in plain[:2]:
        assert record["flops"]["total"] == sum(cost.count(batch.workload).total for batch in next(feed))


def spread(raw, processes):
    """The steps of a run on so many processes."""
    run = Path(raw["run"]["folder"])
    path = run.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(raw))
    run_processes(
        [sys.executable, Path(__file__).parents[3] / "tests/train/compiled_training.py", "aot_eager", path], processes
    )
    return steps_of(run)


def dropping(folder, run, **how):
    raw = raw_config(folder, run, **how)
    raw["model"]["family"] = {"drop_text": 0.3, "drop_read": 0.5, "drop_reference": 0.5}
    return raw


@pytest.fixture(scope="module")
def dropped(folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("dropped") / "run"
    train(parse_config(dropping(folder, run, checkpoint={"every": 2})))
    return run


def test_a_resumed_run_leaves_out_the_same_conditions(folder, tmp_path, plain, dropped):
    whole = steps_of(dropped)
    assert work(whole) != work(plain)
    shutil.copytree(dropped, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000005")
    train(parse_config(dropping(folder, tmp_path / "run", checkpoint={"every": 2})), resume=True)
    again = steps_of(tmp_path / "run")
    assert work(again) == work(whole)
    assert numbers(again[-1:]) == numbers(whole[-1:])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("sequence", [1, 2])
def test_two_processes_leave_out_the_same_conditions(folder, tmp_path, dropped, sequence):
    found = spread(dropping(folder, tmp_path / "run", processes=2, parallel={"sequence": sequence}), 2)
    assert work(found) == work(steps_of(dropped))
    assert_same(found, steps_of(dropped))


WAYS = {
    "recomputed": (1, {"speed": {"recompute": "full"}}),
    "compiled": (1, {"speed": {"compile": True}}),
    "whole logits": (1, {"speed": {"loss_chunk": None}}),
    "fsdp2 x 2": (2, {}),
    "sequence 2": (2, {"parallel": {"sequence": 2}}),
    "sequence 2, recomputed, compiled": (
        2,
        {"parallel": {"sequence": 2}, "speed": {"recompute": "full", "compile": True}},
    ),
    "sequence 3, padded": (3, {"parallel": {"sequence": 3}, "data": {"bucket_tokens": 64}}),
    "sequence 2 x replicas": (4, {"parallel": {"sequence": 2, "replicate": 2, "shard": 1}}),
    "replicas x 2, recomputed": (2, {"parallel": {"replicate": 2, "shard": 1}, "speed": {"recompute": "full"}}),
}
JOINED = {"recomputed", "compiled", "sequence 2"}  # each is a part of another way, which stands for it in CI


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.long] * (way in JOINED)) for way in WAYS])
def test_however_it_is_run_it_is_the_same_run(folder, tmp_path, plain_run, plain, way):
    processes, overrides = WAYS[way]
    raw = raw_config(folder, tmp_path / "run", processes=processes, **overrides)
    found = spread(raw, processes)
    assert work(found) == work(plain)
    assert_same(found, plain)
    weights, expected = (
        load_model(run / "export" / "step-000005").state_dict() for run in (tmp_path / "run", plain_run)
    )
    for name, weight in weights.items():
        assert (weight - expected[name]).norm() <= 1e-5 * max(1.0, expected[name].norm()), name


PARTS = {
    "tower frozen": {"freeze": ["vision"]},
    "language frozen": {"freeze": ["language"]},
    "latents frozen": {"freeze": ["latents"]},
    "adapters on both copies": {"lora": {"rank": 4, "targets": ["q_proj", "o_proj_moe_gen"]}},
    "an autoencoder": {"path": "latents"},
}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_processes_that_share_packs_train_each_part_as_one_does(folder, tmp_path, part):
    found = []
    for sequence in (1, 2):
        raw = raw_config(folder, tmp_path / str(sequence), processes=sequence, parallel={"sequence": sequence})
        raw["model"] |= PARTS[part]
        raw["model"]["path"] = str(folder / raw["model"]["path"])  # joined to an absolute path, it stays that
        found.append(spread(raw, sequence))
    assert work(found[0]) == work(found[1])
    assert_same(found[1], found[0])


@pytest.mark.dist
@pytest.mark.slow
def test_a_run_goes_on_with_as_many_processes_to_a_pack_as_there_are(folder, tmp_path, plain):
    raw = raw_config(folder, tmp_path / "run", processes=2, parallel={"sequence": 2}, checkpoint={"every": 2})
    spread(raw, 2)
    for step in (5, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:06}")
    alone = raw_config(folder, tmp_path / "run", checkpoint={"every": 2})
    train(parse_config(alone), resume=True)
    assert work(steps_of(tmp_path / "run")) == work(plain)
    assert_same(steps_of(tmp_path / "run"), plain)


@pytest.mark.dist
@pytest.mark.slow
def test_processes_whose_packs_hold_nothing_to_read_keep_in_step(folder, tmp_path):
    # packs of a sample or two, mostly of pictures to draw: on some steps one process reads an image and another none
    found = []
    for processes in (1, 2):
        run = tmp_path / str(processes)
        mix = [
            {"path": str(folder / "data" / f"{name}.jsonl"), "weight": w} for name, w in (("all", 1), ("pictures", 3))
        ]
        raw = raw_config(folder, run, processes=processes, data={"tokens_per_pack": 50, "train": mix})
        found.append(spread(raw, processes))
    assert any(0 < record["images"] < record["packs"] for record in found[0])  # so some packs have none
    assert work(found[0]) == work(found[1])
    assert_same(found[1], found[0])


def test_padding_changes_nothing(folder, tmp_path, plain):
    train(parse_config(raw_config(folder, tmp_path / "run", data={"bucket_tokens": 64})))
    found = steps_of(tmp_path / "run")
    assert found[0]["padding_share"] > 0.1
    assert_same(found, plain)


def test_a_resumed_run_is_the_run(folder, tmp_path, plain):
    raw = raw_config(folder, tmp_path / "run", checkpoint={"every": 2})
    raw["optim"]["ema"] = {"decay": 0.9}
    train(parse_config(raw | {"optim": raw["optim"] | {"steps": 5}}))
    whole = steps_of(tmp_path / "run")
    assert_same(whole, plain)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000005")
    train(parse_config(raw), resume=True)
    again = steps_of(tmp_path / "run")
    assert numbers(again[-1:]) == numbers(whole[-1:])


@pytest.mark.slow
def test_latents_of_an_autoencoder_are_learnt(folder, tmp_path):
    train(parse_config(raw_config(folder, tmp_path / "run", model="latents")))
    records = steps_of(tmp_path / "run")
    assert all(record["flow_loss"] > 0 for record in records)
    saved = load_model(tmp_path / "run" / "export" / "step-000005")
    assert not any(parameter.requires_grad for parameter in saved.vae_model.parameters())
    raw = raw_config(folder, tmp_path / "again", model="latents")
    raw["model"] = {"path": str(tmp_path / "run" / "export" / "step-000005")}
    train(parse_config(raw))
    weights, before = (load_model(tmp_path / run / "export" / "step-000005") for run in ("again", "run"))
    for one, other in zip(weights.vae_model.parameters(), before.vae_model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("freeze", ["vision", "language", "latents"])
def test_each_part_can_be_frozen(folder, tmp_path, freeze):
    raw = raw_config(folder, tmp_path / "run", model="model")
    raw["model"]["freeze"] = [freeze]
    train(parse_config(raw))
    assert steps_of(tmp_path / "run")[-1]["flow_loss"] > 0


def test_adapters_on_either_copy_learn(folder, tmp_path):
    raw = raw_config(folder, tmp_path / "run")
    raw["model"]["lora"] = {"rank": 4, "targets": ["q_proj", "q_proj_moe_gen"]}
    train(parse_config(raw))
    assert steps_of(tmp_path / "run")[-1]["grad_norm"] > 0


def test_noise_depends_on_the_sample_and_the_step_alone(folder):
    config = load_model_config(folder / "model")
    encoder = DrawingEncoder(load_processor(folder / "model"), config)
    samples = [encoder.encode(sample) for sample in read_samples(folder / "data" / "all.jsonl")[:6]]
    collate = collator_of(encoder)
    together = collate(samples).noised(3, 7).family_inputs.inputs
    alone = [collate([sample]).noised(3, 7).family_inputs.inputs for sample in samples]
    for name in ("noise", "timesteps"):
        assert torch.equal(together[name], torch.cat([one[name] for one in alone if name in one]))
    assert not torch.equal(together["noise"], collate(samples).noised(3, 8).family_inputs.inputs["noise"])
    assert (together["timesteps"] == 0).sum() == sum(part.kind == "clean" for s in samples for part in s.parts)


def test_latents_of_an_autoencoder_are_drawn_by_sample_and_step(folder):
    encoder = DrawingEncoder(load_processor(folder / "latents"), load_model_config(folder / "latents"))
    samples = [encoder.encode(sample) for sample in read_samples(folder / "data" / "all.jsonl")[:4]]
    collate = collator_of(encoder)
    together, later = (collate(samples).noised(3, step).family_inputs.inputs["encoder_noise"] for step in (7, 8))
    alone = [collate([sample]).noised(3, 7).family_inputs.inputs for sample in samples if sample.latent_images]
    assert torch.equal(together, torch.cat([one["encoder_noise"] for one in alone]))
    assert not torch.equal(together, later)


def test_the_models_own_shift_of_times_holds_where_the_run_says_none(folder):
    config = load_model_config(folder / "model")
    encoder = DrawingEncoder(load_processor(folder / "model"), config)
    samples = [encoder.encode(sample) for sample in read_samples(folder / "data" / "all.jsonl")[:2]]
    plain = collator_of(encoder)(samples).noised(0, 1).family_inputs.inputs["timesteps"]
    config.timestep_shift = 3.0
    stated = DrawingEncoder(encoder.tokenizer, config, settings=DrawingConfig(timestep_shift=1.0))
    own, said = (collator_of(e)(samples).noised(0, 1).family_inputs.inputs["timesteps"] for e in (encoder, stated))
    assert torch.equal(said, plain)
    torch.testing.assert_close(own, 3 * plain / (1 + 2 * plain))


def test_data_that_are_moved_have_the_same_noise(folder, tmp_path):
    encoder = DrawingEncoder(load_processor(folder / "model"), load_model_config(folder / "model"))
    shutil.copytree(folder / "data", tmp_path / "elsewhere")
    noise = []
    for path in (folder / "data", tmp_path / "elsewhere"):
        sample = encoder.encode(read_samples(path / "all.jsonl")[0])
        noise.append(collator_of(encoder)([sample]).noised(0, 1).family_inputs.inputs["noise"])
    assert torch.equal(*noise)


def test_lengths_are_measured_without_decoding(folder):
    encoder = DrawingEncoder(load_processor(folder / "model"), load_model_config(folder / "model"))
    for sample in read_samples(folder / "data" / "all.jsonl"):
        assert encoder.measure(sample) == encoder.encode(sample).lengths


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (chat([image("0-0.png")], []), "nothing to learn"),
        (chat("Draw.", [image("missing.png")]), "missing.png"),
        (chat([{"type": "video", "video": "0-0.png"}], "a square"), "no video or sound"),
    ],
)
def test_samples_that_cannot_be_used_get_one_clear_error(folder, tmp_path, row, said):
    path = folder / "data" / "wrong.jsonl"
    path.write_text(json.dumps(row) + "\n")
    encoder = DrawingEncoder(load_processor(folder / "model"), load_model_config(folder / "model"))
    with pytest.raises(DataError, match=said):
        encoder.encode(read_samples(path)[0])


def test_settings_of_the_family_are_read_and_others_refused(folder):
    config = load_model_config(folder / "model")
    assert family_settings({"flow_weight": 2}, config) == DrawingConfig(flow_weight=2.0)
    assert family_settings({}, config) == DrawingConfig()
    with pytest.raises(ConfigError, match=r"model\.family: unknown key 'flow_wieght', did you mean 'flow_weight'"):
        family_settings({"flow_wieght": 2}, config)
    with pytest.raises(ConfigError, match=r"model\.family: drop_text = 2: must be at most 1"):
        family_settings({"drop_text": 2}, config)
    with pytest.raises(ConfigError, match=r"model\.family\.flow_weight has no effect: models of type 'qwen3'"):
        family_settings({"flow_weight": 2.0}, Qwen3Config())
