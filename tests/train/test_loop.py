import gc
import json
import math
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch

from headway.checkpoint import latest_checkpoint
from headway.config import parse_config
from headway.data import Encoder, read_samples
from headway.errors import CheckpointError, ConfigError, DataError, RunCompleteError, TraceError, TrainingError
from headway.models.load import load_model, load_processor, rope_index
from headway.models.parallel.ranks import Ranks
from headway.models.video import normalised
from headway.tracing import trace
from headway.train.data import open_feed
from headway.train.run import train
from helpers.runs import read_metrics


def steps_of(config):
    return [record for record in read_metrics(config.run.folder / "metrics.jsonl") if record["kind"] == "step"]


def trained_steps(raw, name):
    raw["run"]["folder"] = str(Path(raw["run"]["folder"]).with_name(name))
    config = parse_config(raw)
    train(config)
    return steps_of(config)


def test_training_equals_a_plain_loop_over_single_samples(raw, digits):
    """The same steps by other means: each sample alone through sdpa, plain AdamW and a schedule written out here."""
    raw["optim"] |= {"steps": 4, "accumulation": 3, "clip": 0.5, "weight_decay": 0.2, "betas": [0.9, 0.95]}
    config = parse_config(raw)
    summary = train(config)

    torch.manual_seed(0)
    model = load_model(str(digits / "model"), random_init=True, attention="sdpa")
    encoder = Encoder(load_processor(str(digits / "model")), rope_index(model))
    samples = read_samples(digits / "data/train.jsonl")
    feed = open_feed(config, encoder, model, trace(model), Ranks(0, 1), pin_memory=False)  # says which samples
    by_source = {sample.where: sample for sample in samples}
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.2}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    for step, record in enumerate(steps_of(config), start=1):
        chosen = [encoder.encode(by_source[where]) for batch in next(feed) for where in batch.sources]
        tokens = sum(int((one.labels_S[1:] != -100).sum()) for one in chosen)
        total = 0.0
        for one in chosen:
            logits_SV = model(
                input_ids=one.input_ids_S[None],
                position_ids=one.position_ids_RS[:, None],
                mm_token_type_ids=one.token_types_S[None],
                pixel_values=normalised(one.media["images"].features, encoder.pixel_scale),
                image_grid_thw=one.media["images"].sizes,
            ).logits[0]
            loss = torch.nn.functional.cross_entropy(logits_SV[:-1], one.labels_S[1:], reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        lr = 2e-3 * step / 2 if step <= 2 else 2e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 2) / 2)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        assert record["loss"] == pytest.approx(total, rel=1e-4)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert record["lr"] == pytest.approx(lr)
        assert record["tokens"] == sum(one.tokens for one in chosen)
    trained = load_model(str(summary.model)).requires_grad_(False)
    model.requires_grad_(False)
    for (name, ours), theirs in zip(trained.named_parameters(), model.parameters(), strict=True):
        # Adam divides by the gradient's own size, so rounding shows where a gradient is nearly zero.
        assert (ours - theirs).norm() <= 2e-2 * max(theirs.norm().item(), 1e-2), name


def test_a_steps_mbu_is_what_it_must_move_where_the_bandwidth_is_known(raw, monkeypatch):
    for user in ("train.prepare", "meter.meter"):
        monkeypatch.setattr(f"headway.{user}.bandwidth_of", lambda _device: 1e10)
    raw["optim"] |= {"steps": 2, "warmup_steps": 0}
    moved = []
    for state in ("auto", "bfloat16"):
        raw["optim"]["state"] = state
        raw["run"]["folder"] += state
        config = parse_config(raw)
        model = load_model(str(train(config).model))
        records = steps_of(config)
        assert all(r["mbu"] == pytest.approx(r["bytes_moved"] / r["wall_s"] / 1e10) for r in records)
        moved.append([r["bytes_moved"] for r in records])
    # an update reads and writes both moments of each parameter, in 4 bytes or in 2
    numel = sum(p.numel() for p in model.parameters())
    assert [full - half for full, half in zip(*moved, strict=True)] == [2 * 2 * 2 * numel] * 2


@pytest.mark.own_peak
def test_what_a_run_leaves_behind(raw, digits):
    raw["data"]["eval"] = str(digits / "data/eval.jsonl")
    raw["eval"] = {"every": 3}
    raw["checkpoint"] = {"every": 2, "keep": 2}
    config = parse_config(raw)
    summary = train(config)
    folder = config.run.folder

    records = read_metrics(folder / "metrics.jsonl")
    assert [(r["kind"], r["step"]) for r in records if r["kind"] == "evaluation"] == [
        ("evaluation", 3),
        ("evaluation", 6),
    ]
    steps = steps_of(config)
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert {"loss", "lr", "grad_norm", "tokens_per_s", "data_wait_share", "padding_share"} <= set(steps[0])
    assert {"flops_by_component", "mfu", "convention", "peak_source", "peak_memory_bytes", "step_s", "balance"} <= set(
        steps[0]
    )
    assert sum(steps[0]["flops_by_component"].values()) == steps[0]["flops"]["total"]
    assert any(name.startswith("vision.") for name in steps[0]["flops_by_component"])
    assert steps[0]["padding_share"] == 0.0

    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    run = json.loads((folder / "run.json").read_text())
    assert run["software"]["torch"] == torch.__version__
    assert run["peak"]["kind"] == "ceiling"
    assert run["command"] == sys.argv
    assert run["host"] == socket.gethostname()
    saved = json.loads((folder / "summary.json").read_text())
    assert saved["complete"]
    assert saved["flops"]["total"] == sum(record["flops"]["total"] for record in steps)
    assert 0.5 < saved["fill"] <= 1.0
    billed = {one["name"]: one for one in saved["conventions"]}
    assert billed["useful"]["flops"] == steps[-1]["flops"]["total"]
    assert billed["useful"]["ratio_to_useful"] == 1.0
    assert billed["torchtitan"]["ratio_to_useful"] == billed["torchtitan"]["flops"] / steps[-1]["flops"]["total"]
    assert saved["evaluation"]["samples"] == 12
    assert "exact match" in summary.as_table()
    load_model(str(summary.model))
    load_processor(str(summary.model))


def test_a_frozen_tower_does_not_move_and_is_not_billed(raw, digits):
    raw["model"]["freeze"] = ["vision"]
    raw["data"]["strategy"] = "best_fit"  # the same packs, whatever they cost
    config = parse_config(raw)
    summary = train(config)
    torch.manual_seed(0)
    before = dict(load_model(str(digits / "model"), random_init=True).named_parameters())
    for name, after in load_model(str(summary.model)).named_parameters():
        assert torch.equal(after, before[name]) == name.startswith("model.visual."), name
    frozen = steps_of(config)[0]["flops_by_component"]["vision.mlp"]
    raw["model"]["freeze"] = []
    raw["run"]["folder"] += "-free"
    free_config = parse_config(raw)
    train(free_config)
    # Without wgrad and, below the merger, without dgrad: a third of forward and backward.
    assert 3 * frozen == steps_of(free_config)[0]["flops_by_component"]["vision.mlp"]


def test_a_loss_that_is_not_finite_stops_the_run(raw):
    raw["optim"] |= {"lr": 1e30, "warmup_steps": 0, "clip": None}
    with pytest.raises(TrainingError, match=r"step \d has loss .*Lower optim.lr"):
        train(parse_config(raw))


def test_an_existing_run_is_not_overwritten(config):
    train(config)
    with pytest.raises(ConfigError, match=r"already holds a run\. Continue it with resume=True"):
        train(config)


def test_resuming_needs_a_run(config):
    with pytest.raises(ConfigError, match="no run to resume"):
        train(config, resume=True)


def test_a_finished_run_is_not_resumed(config):
    train(config, resume=None)  # there is none, so it begins
    exported = config.run.folder / "export/step-000006"
    names = {path.name for path in exported.iterdir()}
    shutil.rmtree(exported)  # as if the run had been killed while it wrote it
    with pytest.raises(RunCompleteError, match="has finished all of its 6 steps"):
        train(config, resume=None)
    assert {path.name for path in exported.iterdir()} == names
    with pytest.raises(ConfigError, match="has finished all of its 6 steps"):
        train(config, resume=True)


def test_resuming_with_other_settings_is_refused(raw):
    train(parse_config(raw))
    raw["optim"]["lr"] = 1e-3
    raw["eval"] = {}
    with pytest.raises(ConfigError, match=r"optim.lr was 0.002 and is 0.001"):
        train(parse_config(raw), resume=True)


def test_a_checkpoint_of_another_model_is_refused(raw, digits, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for path in (digits / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    raw["model"]["path"] = str(model)
    raw["checkpoint"] = {"every": 3}
    config = parse_config(raw)
    train(config)
    _forget_the_end(config, 3)
    changed = json.loads((model / "config.json").read_text())
    changed["text_config"]["intermediate_size"] = 64
    (model / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"holds another model .* The two differ in text_config"):
        train(config, resume=True)


def _forget_the_end(config, step):
    """Bring a finished run back to a checkpoint, as a kill after it would have left it."""
    for folder in (config.run.folder / "checkpoints").iterdir():
        if folder.name > f"step-{step:06d}":
            shutil.rmtree(folder)
    assert latest_checkpoint(config.run.folder / "checkpoints").step == step


@pytest.mark.parametrize(
    ("section", "changes", "error", "message"),
    [
        ("run", {"dtype": "bfloat16-autocast"}, ConfigError, "takes effect on CUDA only"),
        ("run", {"device": "tpu"}, ConfigError, "is no device"),
        ("run", {"device": "meta"}, ConfigError, "is not supported"),
        ("model", {"freeze": ["nothing.*"]}, ConfigError, "matches no parameter"),
        ("data", {"train": [{"path": "missing.jsonl"}]}, DataError, "missing.jsonl cannot be read"),
    ],
)
def test_a_setting_that_cannot_take_effect_here(raw, section, changes, error, message):
    raw[section] |= changes
    with pytest.raises(error, match=message):
        train(parse_config(raw))


@pytest.fixture
def unfrozen():
    """Python's collector as programs have it; afterwards as the other tests do."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    gc.unfreeze()
    if was_frozen:
        gc.freeze()


def test_what_a_program_has_frozen_stays_so(config, unfrozen):
    gc.freeze()
    frozen = gc.get_freeze_count()
    train(config)
    assert 0.9 * frozen < gc.get_freeze_count() <= frozen


def test_a_read_only_run_folder(raw, tmp_path):
    (tmp_path / "file").write_text("")
    raw["run"]["folder"] = str(tmp_path / "file" / "run")  # no permission stops root, a file in the way does
    with pytest.raises(ConfigError, match=r"run folder .* cannot be written"):
        train(parse_config(raw))


def test_a_signal_that_is_ignored_stays_so(raw, monkeypatch):
    """As SIGHUP under nohup."""
    from headway.train import loop

    learning_rate = loop.learning_rate

    def close_the_terminal(step, *settings):
        os.kill(os.getpid(), signal.SIGHUP)
        return learning_rate(step, *settings)

    monkeypatch.setattr(loop, "learning_rate", close_the_terminal)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(parse_config(raw)).is_complete
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_finishes_the_step_and_saves(raw, monkeypatch, number):
    before = signal.getsignal(number)
    raw["optim"]["steps"] = 50
    config = parse_config(raw)
    from headway.train import loop

    learning_rate = loop.learning_rate

    def interrupt_at_the_third_step(step, *settings):
        if step == 3:
            os.kill(os.getpid(), number)
        return learning_rate(step, *settings)

    monkeypatch.setattr(loop, "learning_rate", interrupt_at_the_third_step)
    summary = train(config)
    assert not summary.is_complete
    assert (summary.steps, summary.stopped_by) == (3, number)
    assert latest_checkpoint(config.run.folder / "checkpoints").step == 3
    monkeypatch.undo()
    assert signal.getsignal(number) is before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16-autocast", "bfloat16-params"])
def test_cuda_starts_from_the_same_loss_as_the_cpu(raw, dtype):
    raw["optim"]["steps"] = 3
    config = parse_config(raw)
    train(config)
    raw["run"] |= {"folder": raw["run"]["folder"] + "-cuda", "device": "cuda", "dtype": dtype}
    raw["model"] |= {"path": str(config.run.folder / "export/step-000003"), "random_init": False}
    on_cuda = parse_config(raw)
    train(on_cuda)
    raw["run"] |= {"folder": raw["run"]["folder"] + "-cpu", "device": "cpu", "dtype": "float32"}
    on_cpu = parse_config(raw)
    train(on_cpu)
    assert steps_of(on_cuda)[0]["loss"] == pytest.approx(steps_of(on_cpu)[0]["loss"], rel=2e-2)
    assert steps_of(on_cuda)[0]["flops"] == steps_of(on_cpu)[0]["flops"]
    assert steps_of(on_cuda)[0]["peak_memory_bytes"] > 0


def test_a_text_model_trains_the_same_way(raw, digits, tmp_path):
    from transformers import Qwen3Config

    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((digits / "model" / name).read_bytes())
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen3Config(vocab_size=400, architectures=["Qwen3ForCausalLM"], **small, **heads).save_pretrained(folder)
    turns = [{"role": "user", "content": "Read the digits."}, {"role": "assistant", "content": "47"}]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(20)))
    raw["model"]["path"] = str(folder)
    raw["data"]["train"] = [{"path": str(tmp_path / "text.jsonl")}]
    raw["optim"] |= {"steps": 30, "lr": 1e-2}
    summary = train(parse_config(raw))
    assert summary.last_loss < 0.1 * summary.first_loss
    assert summary.utilisation.flops.share("vision") == 0.0
    load_model(str(summary.model))


def test_a_model_that_cannot_be_traced_trains_without_flops_if_asked(raw, monkeypatch):
    def fail(_model):
        raise TraceError("Strange.forward raises an error when it runs on shapes alone.")

    raw["optim"]["steps"] = 2
    counted = [record["loss"] for record in trained_steps(raw, "counted")]
    monkeypatch.setattr("headway.train.build.trace", fail)
    with pytest.raises(TraceError, match=r"on shapes alone\. To train it without FLOPs and MFU, set model\.flops to"):
        trained_steps(raw, "refused")
    raw["model"]["flops"] = False
    raw["data"]["strategy"] = "next_fit"  # as balanced packs go by FLOPs
    steps = trained_steps(raw, "trained")
    assert [(record["mfu"], record["flops"]["total"]) for record in steps] == [(None, 0)] * 2
    assert all(math.isfinite(record["loss"]) for record in steps)
    assert steps[0]["loss"] == pytest.approx(counted[0], rel=0.2)  # of other packs of the same data
