"""Options that sister commands share, one command beside another: what one takes, the other takes and means alike."""

import json

import pytest

from headway.synthetic.digits import write_reader
from helpers.folders import QUESTIONS

H100 = ("--device", "H100", "--devices", 8)


def test_plans_stand_side_by_side_with_the_numbers_that_each_has_alone(headway):
    names, run = ("qwen3-8b", "qwen3-0.6b"), (*H100, "--tokens", 1e9, "--price", 2.5, "--json")
    alone = [json.loads(headway("plan", name, *run).out) for name in names]
    together = json.loads(headway("plan", *names, *run).out)["plans"]
    for one, other in zip(alone, together, strict=True):
        assert {**other, "schema_version": one["schema_version"]} == one
    text = headway("plan", *names, *run[:-1])
    assert (text.code, text.err) == (0, "")
    cells = {line.split("  ")[0]: line.split()[1:] for line in text.out.splitlines()}
    assert cells["cost"] == [f"{one['run']['cost'][1]:,.4g}" for one in alone]


def test_a_plan_that_does_not_fit_fails_beside_one_that_does(headway):
    result = headway("plan", "gpt2", "qwen3-32b", "--device", "H100")
    assert (result.code, "DOES NOT FIT" in result.out) == (1, True)


@pytest.mark.parametrize("option", [("--scale", "8,16"), ("--within", "7d")])
def test_what_is_for_one_run_is_refused_of_several(headway, option):
    result = headway("plan", "gpt2", "qwen3-8b", "--device", "H100", *option, "--tokens", 1e9)
    assert (result.code, f"{option[0]} is for one run" in result.err) == (2, True)


def test_tune_takes_the_samples_that_plan_takes(headway):
    samples = ("--segments", "900*3,4096", "--samples", 2_000_000)
    planned = json.loads(headway("plan", "qwen3-8b", *H100, *samples, "--json").out)
    tuned = json.loads(headway("tune", "qwen3-8b", *H100, *samples, "--json").out)
    own = tuned["as_it_is"]
    assert tuned["lengths"] == "--segments 900*3,4096"
    assert own["run_s"] == pytest.approx(planned["run"]["seconds"][1], rel=0.02)
    assert tuned["best"][0]["run_s"] <= own["run_s"]
    twice = headway("tune", "qwen3-8b", *H100, *samples, "--data", "x.jsonl")
    assert (twice.code, "--segments and --data both give lengths" in twice.err) == (2, True)


def test_compare_shows_the_conventions_that_are_named_beside_useful(headway):
    step = ("compare", "gpt2", "--segments", 512, "--device", "H100", "--step-time", 1)
    every = json.loads(headway(*step, "--json").out)["conventions"]
    few = json.loads(headway(*step, "--convention", "6nd", "--convention", "megatron-lm", "--json").out)["conventions"]
    assert few == [row for row in every if row["name"] in {"useful", "6nd", "megatron-lm"}]
    wrong = headway(*step, "--convention", "megatron")
    assert (wrong.code, "'megatron' is not known" in wrong.err) == (2, True)


def test_devices_show_the_peak_of_one_dtype(headway):
    one = json.loads(headway("devices", "H100", "--dtype", "fp8", "--json").out)
    assert one["peak_flops_per_s"] == {"fp8": 1978.9e12}
    every, few = (json.loads(headway("devices", *more, "--json").out)["devices"] for more in ((), ("--dtype", "fp4")))
    having = [device["key"] for device in every if "fp4" in device["peak_flops_per_s"]]
    assert [device["key"] for device in few] == having
    missing = headway("devices", "H100", "--dtype", "fp4")
    assert (missing.code, "No source has a peak of H100 in fp4. Those with a source are bf16" in missing.err) == (
        2,
        True,
    )


def test_look_reads_columns_of_other_names_as_index_does(headway, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    model = write_reader(tmp_path / "model", [*QUESTIONS, "user\n", "assistant\n", "red"])
    data = tmp_path / "qa.jsonl"
    data.write_text(json.dumps({"Frage": QUESTIONS[0], "Antwort": "red"}) + "\n")
    columns = ("--column", "question=Frage", "--column", "answer=Antwort")
    shown = headway("look", data, "--model", model, *columns, "--json")
    assert shown.code == 0, shown.err
    (sample,) = json.loads(shown.out)["samples"]
    measured = json.loads(headway("index", data, "--model", model, *columns, "--json").out)["indices"][0]
    assert sample["lengths"]["tokens"] == measured["tokens"]


MISSING = [
    "audit no.log",
    "goodput no",
    "check no",
    "check no other",
    "explain no",
    "report no",
    "train no.yaml",
    "index no --model gpt2",
    "pack --lengths no.csv --packing-length 64",
    "plan gpt2 --device H100 --lengths no.csv",
    "look no --model gpt2",
    "plan gpt2 --device H100 --samples 5 --price-list no",
    "tune gpt2 --device H100 --lengths no.csv",
    "export no out",
    "new-model m --data no.jsonl",
    "init --model gpt2 --data no.jsonl",
    "evaluate gpt2 no.jsonl",
    "flops ./no.json --segments 8",
]


@pytest.mark.parametrize("line", MISSING)
def test_a_missing_file_is_a_wrong_use_in_every_command(headway, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    result = headway(*line.split())
    assert (result.code, result.out) == (2, ""), result.err
    assert "no" in result.err


@pytest.mark.parametrize(("typed", "meant"), [("H1000", "H100"), ("409", "4090"), ("b20", "B200")])
def test_a_device_with_a_digit_too_many_or_too_few_is_offered(headway, typed, meant):
    assert f"Did you mean {meant}" in headway("devices", typed).err
