"""`headway tune`: what it prints and writes, and what it refuses."""

import json

import pytest

from headway.config import load_config
from headway.predict.tune import Trial
from helpers.processes import ROOT

RECIPE = ROOT / "recipes/qwen2.5-7b-text-81920.yaml"
FEW = ("--devices", 4, "--device", "H200", "--set", "data.tokens_per_pack=32768")


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths") / "lengths.csv"
    path.write_text("tokens\n" + "".join(f"{200 + 37 * i % 3000}\n" for i in range(2500)))
    return path


@pytest.fixture
def tune(headway, lengths):
    return lambda *options: headway("tune", RECIPE, *FEW, "--lengths", lengths, *options)


def test_it_ranks_what_fits_and_writes_a_recipe_that_a_dry_run_takes(tune, headway, lengths, tmp_path):
    result = tune("--json", "--write", tmp_path / "best.yaml")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert (found["schema_version"], found["devices"], found["model"]) == (1, 4, "qwen2.5-7b")
    best = found["best"]
    assert all(one["fits"] and one["memory"]["peak"] <= found["room_bytes"] for one in best)
    assert best[0]["flops_per_s"] >= found["as_it_is"]["flops_per_s"]
    assert best[0]["mfu"] == pytest.approx(best[0]["flops_per_s"] / 4 / 989e12, rel=0.01)
    assert all(one["step_tokens"] == pytest.approx(4 * 32_768, rel=0.05) for one in best)
    peaks = [one["memory"]["peak"] for one in found["front"]]
    assert peaks == sorted(peaks)
    plan = json.loads(headway("train", tmp_path / "best.yaml", "--dry-run", "--json").out)
    assert plan["fits"]
    assert plan["memory"]["peak"] == best[0]["memory"]["peak"]
    assert load_config(tmp_path / "best.yaml").plan.lengths == lengths


def test_what_is_printed_keeps_to_eighty_columns_and_says_what_is_next(tune, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = tune("--memory", "60GiB")
    assert result.code == 0, result.err
    assert [line for line in result.out.splitlines() if len(line) > 80] == []
    text = " ".join(result.out.split())
    assert "60.0 GiB on each device, 42.7 % of 140.4 GiB" in text
    assert "gain per GiB" in text
    assert "more than the limit. Compared with choice 1: +" in text  # why the next faster one does not fit
    assert "Links: printed links of NVIDIA H200" in text


def test_choices_pay_for_exchanges_over_the_links_that_are_given(tune):
    few = ("--set", "data.tokens_per_pack=8192", "--json")
    printed, slow = (json.loads(tune(*few, *more).out)["as_it_is"] for more in ((), ("--link", 1)))
    assert printed["memory"] == slow["memory"]
    assert slow["step_s"] > 2 * printed["step_s"]


@pytest.mark.slow
def test_meshes_are_varied_where_that_is_asked_for(tune):
    own, every = (json.loads(tune("--json", *more).out) for more in ((), ("--meshes",)))
    assert own["tried"] < every["tried"]
    assert {one["mesh"]["sequence"] for one in own["front"]} == {1}


def test_what_was_measured_is_shown_and_ranks_again(tune, monkeypatch, tmp_path):
    runs = iter([Trial("out of memory", reason="it burst"), Trial("measured", 4e14, 2.0), Trial("measured", 5e14, 1.6)])
    monkeypatch.setattr("headway.predict.tune.measure", lambda *_, **_more: next(runs))
    monkeypatch.setattr("headway.cli.tune.find_inputs", print)
    result = tune("--measure", 3, "--write", tmp_path / "best.yaml")
    assert result.code == 0, result.err
    assert "out of memory: it burst" in result.out
    assert "After the measurement, the fastest is choice 3: 500.0 TFLOP/s (measured)." in result.out
    runs = iter([Trial("failed", reason="a fault")])
    assert "Headway could measure none of the choices" in tune("--measure", 1).out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--memory", "1GiB"), 2, "choices fits 1.0 GiB on each of 4 devices. The least that was found takes"),
        (("--memory", "500GiB"), 2, "is more than the 140.4 GiB that NVIDIA H200 has"),
        (("--memory", "lots"), 2, "--memory 'lots' is not a size"),
        (("--tokens-per-step", "2M or so"), 2, "is not a number of tokens with a tolerance"),
        (("--tokens-per-step", "131072 +-0.0001%"), 2, "ranks x accumulation x packing length must come near"),
        (("--measure", 2), 1, "--measure trains the recipe's model on the recipe's data."),
        (("--steps", 2), 2, "--steps 2 has no effect without --measure K"),
        (("--data", "x.jsonl"), 2, "--lengths and --data both give lengths"),
        (("--write", RECIPE), 2, "would replace the recipe"),
        (("--write", "/nowhere/at/all.yaml"), 2, "the folder /nowhere/at does not exist"),
        (("--device", "H2000"), 2, "H2000"),
    ],
)
def test_wrong_uses_are_told_in_a_sentence(tune, options, code, message):
    result = tune(*options)
    assert result.code == code
    assert message in " ".join(result.err.split())


def test_more_runs_than_choices_that_fit_are_refused(tune, monkeypatch):
    monkeypatch.setattr("headway.cli.tune.find_inputs", print)
    result = tune("--measure", 500)
    assert (result.code, "choices that differ in more than details fit" in result.err) == (2, True)


def test_a_model_is_tuned_by_its_name_alone(headway, tmp_path):
    result = headway("tune", "gpt2", "--device", "H100", "--devices", 2, "--json")
    assert result.code == 0, result.err
    best = json.loads(result.out)["best"][0]
    assert best["mfu"] > 0
    refused = headway("tune", "gpt2", "--device", "H100", "--write", tmp_path / "best.yaml")
    assert (refused.code, refused.out) == (2, "")
    assert "'gpt2' is no file. `headway init` writes a recipe" in " ".join(refused.err.split())
    misspelt = headway("tune", "qwen3-vl-9b", "--device", "H100")
    assert "Did you mean qwen3-vl-8b" in " ".join(misspelt.err.split())


def test_without_lengths_it_says_how_to_give_them(headway):
    result = headway("tune", RECIPE, "--set", "plan.mix=null")
    assert (result.code, "nothing says how long the samples are" in " ".join(result.err.split())) == (2, True)


def test_a_device_without_bandwidth_is_refused(headway, monkeypatch, tmp_path):
    table = tmp_path / "peaks.toml"
    table.write_text(
        '[mine]\ntitle = "My card"\naliases = ["mine"]\ntflops = { bf16 = 100.0 }\nmemory_gb = 80\n'
        'source = "me"\nread_on = 2026-11-23\n'
    )
    monkeypatch.setenv("HEADWAY_PEAKS", str(table))
    result = headway("tune", RECIPE, "--device", "mine")
    assert (result.code, "bandwidth of its memory is not known" in " ".join(result.err.split())) == (2, True)


def test_a_model_without_saved_activations_is_refused(headway, monkeypatch):
    monkeypatch.setattr("headway.count.activations._shipped", dict)
    result = headway("tune", RECIPE)
    words = "no saved activations of 'qwen2.5-7b' ship"
    assert (result.code, words in " ".join(result.err.split())) == (1, True), result


def test_without_a_device_this_processor_is_asked_for_by_name(headway):
    result = headway("tune", RECIPE, "--set", "plan.device=null")
    assert (result.code, "no device is named" in " ".join(result.err.split())) == (2, True)


@pytest.mark.parametrize("command", ["plan", "tune"])
def test_a_model_without_attention_is_planned_and_tuned(headway, tmp_path, command):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 160, "state_size": 16, "num_heads": 4}
    config = {"model_type": "mamba2", "head_dim": 32, "expand": 2, "n_groups": 1, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = headway(command, tmp_path, "--device", "H100")
    assert result.code == 0, result.err
    assert "Mamba2ForCausalLM" in result.out
