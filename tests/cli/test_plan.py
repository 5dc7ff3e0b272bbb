"""`headway plan`: what it prints, what follows from what, and what it refuses."""

import json
from datetime import UTC, datetime

import pytest

from headway.devices import named_device
from headway.devices.measure import TimeBudget
from headway.devices.model_rates import ModelRates
from headway.plan.speeds import Speeds
from headway.synthetic.digits import write_reader
from helpers.processes import ROOT
from helpers.talking import QUESTIONS

RECIPE = ROOT / "recipes/qwen2.5-7b-text-81920.yaml"
MODEL = ("plan", "qwen3-0.6b", "--device", "H100", "--devices", 8)


def test_a_model_alone_is_planned_and_what_follows_agrees(headway):
    result = headway(*MODEL, "--tokens", "1e9", "--price", 2, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert (found["schema_version"], found["model"], found["devices"]) == (1, "qwen3-0.6b", 8)
    time, run = found["time"], found["run"]
    for case in range(3):
        assert time["step_s"][case] == pytest.approx(sum(line["seconds"][case] for line in time["lines"]))
        assert time["mfu"][case] == pytest.approx(time["flops"] / time["step_s"][case] / time["peak_flops_per_s"])
        assert time["tokens_per_s"][case] == pytest.approx(time["tokens"] / time["step_s"][case])
        assert run["seconds"][case] == pytest.approx(1e9 / time["tokens_per_s"][case])
        assert run["device_hours"][case] == pytest.approx(8 * run["seconds"][case] / 3600)
        assert run["cost"][case] == pytest.approx(2 * run["device_hours"][case])
        power_w = named_device("H100").board_power_w
        assert run["energy_kwh"][case] == pytest.approx(run["device_hours"][case] * power_w / 1000)
    assert time["step_s"] == sorted(time["step_s"])
    assert time["flops"] == found["flops"]["total"]
    assert time["peak_flops_per_s"] == 8 * named_device("H100").peak_flops_per_s["bf16"]


def test_a_recipe_is_planned_for_its_own_devices_within_eighty_columns(headway, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = headway("plan", RECIPE)
    assert result.code == 0, result.err
    assert [line for line in result.out.splitlines() if len(line) > 80] == []
    assert "32 x NVIDIA A800-SXM4-80GB" in result.out
    assert "needed work at peak" in result.out
    assert "Links: printed links of NVIDIA A800-SXM4-80GB" in result.out
    unknown = headway("plan", RECIPE, "--device", "A40")
    assert "Exchanges between devices are taken to hide behind computing" in unknown.out


def test_a_run_over_given_lengths_lasts_as_many_epochs(headway, tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("tokens\n" + "\n".join(str(100 + row % 900) for row in range(9000)))
    tokens = sum(100 + row % 900 for row in range(9000))
    asked = (*MODEL, "--lengths", file, "--price", 2, "--json")
    run = json.loads(headway(*asked, "--epochs", 2.5).out)["run"]
    assert run["tokens"] == 2.5 * tokens
    assert run == json.loads(headway(*asked, "--tokens", 2.5 * tokens).out)["run"]


def test_data_are_measured_and_their_making_is_timed(headway, monkeypatch, tmp_path):
    data = tmp_path / "chats.jsonl"
    answers = ["digit " * (1 + row % 7) for row in range(60)]
    rows = [{"prompt": QUESTIONS[row % len(QUESTIONS)], "completion": answers[row]} for row in range(60)]
    data.write_text("\n".join(map(json.dumps, rows)))
    write_reader(tmp_path / "model", [*QUESTIONS, "user\n", "assistant\n", "system\n"])
    few = ("--device", "H100", "--set", "data.tokens_per_pack=64", "--data", data, "--epochs", 3)
    plan = headway("plan", tmp_path / "model", *few)
    assert plan.code == 0, plan.err
    assert "lengths chats" in " ".join(plan.out.split())
    assert "Data: a worker makes" in plan.out
    found = json.loads(headway("plan", tmp_path / "model", *few, "--json").out)
    index = json.loads(headway("index", data, "--model", tmp_path / "model", "--json").out)
    assert found["run"]["tokens"] == 3 * index["indices"][0]["tokens"]
    monkeypatch.setattr("headway.train.measured_data.making_s", lambda *_: 1.0)
    slow = json.loads(headway("plan", tmp_path / "model", *few, "--set", "data.workers=2", "--json").out)
    tokens = 64 * slow["packs"]["fill"]
    assert slow["time"]["step_s"] == pytest.approx([tokens / 2] * 3)  # two workers, a second a token


def test_settings_change_the_plan(headway):
    plain, again = (
        json.loads(headway(*MODEL, "--json", *more).out)["time"] for more in ((), ("--set", "speed.recompute=full"))
    )
    assert plain["flops"] == again["flops"]
    assert plain["step_s"] < again["step_s"]
    assert "recomputation" in {line["key"] for line in again["lines"]} - {line["key"] for line in plain["lines"]}


def test_this_processor_is_measured_at_the_models_sizes_and_kept(headway, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("headway.devices.model_rates._LENGTHS", {"cpu": (16,)})
    monkeypatch.setattr("headway.train.block_times._SLOTS", {"cpu": (8, 16)})
    monkeypatch.setattr("headway.train.block_times._BUDGET", TimeBudget(0.0, 60.0, 1))
    monkeypatch.setattr("headway.devices.ceilings._SIZES", {"cpu": (2**16,)})
    monkeypatch.setattr("headway.plan.step_time.shapes_of", lambda _: [(8, 4, 2), (16, 4, 2)])
    measured = headway("ceiling", "--model", "qwen3-0.6b", "--device", "cpu", "--dtype", "fp32")
    assert measured.code == 0, measured.err
    assert " ".join(measured.out.split()).count("fp32 product 8x4x2") == 1
    assert "first blocks, forward and backward  pack of 16 tokens" in measured.out
    assert "just now" in measured.out
    again = json.loads(headway("ceiling", "--model", "qwen3-0.6b", "--device", "cpu", "--json").out)
    assert (again["schema_version"], again["model"], again["device"]["type"]) == (1, "qwen3-0.6b", "cpu")
    assert [(one["dtype"], one["cached"], one["blocks"]["cached"]) for one in again["rates"]] == [("fp32", True, True)]
    planned = headway("plan", "qwen3-0.6b", "--set", "run.device=cpu", "--json")
    assert planned.code == 0, planned.err
    speeds = json.loads(planned.out)["speeds"]
    assert speeds["measured"]
    assert speeds["source"].startswith("measured at the model's sizes on")


def test_exchanges_of_processes_on_this_machine_are_not_in_a_plan_which_says_so(headway, monkeypatch):
    rates = ModelRates({(100, 10, 10): 1e9}, {100: (2e9, 1e9)}, 5e9, datetime(2026, 11, 23, tzinfo=UTC), False)
    speeds = Speeds.measured("mine", 5e9, rates, runs_ahead=False)
    monkeypatch.setattr("headway.cli.plan.speeds_of", lambda *_: speeds)
    asked = ("plan", "qwen3-0.6b", "--set", "run.device=cpu", "--devices", 2)
    text = headway(*asked)
    assert text.code == 0, text.err
    assert "Exchanges between processes of this machine are not in the step" in " ".join(text.out.split())
    keys = {line["key"] for line in json.loads(headway(*asked, "--json").out)["time"]["lines"]}
    assert "communication.transfer" not in keys


@pytest.mark.parametrize("setting", ["model.freeze=[language.mlp]", "model.lora={rank: 8}"])
def test_plan_tune_and_a_dry_run_expect_the_same_memory_of_a_model_that_learns_in_part(headway, setting):
    few = ("--set", "data.tokens_per_pack=8192", "--set", setting, "--device", "H200", "--devices", 2, "--json")
    planned = json.loads(headway("plan", RECIPE, *few).out)
    assert planned["memory"] == json.loads(headway("train", RECIPE, "--dry-run", *few).out)["memory"]
    tuned = json.loads(headway("tune", RECIPE, *few).out)
    assert planned["memory"] == tuned["as_it_is"]["memory"]
    assert planned["time"]["step_s"][1] == pytest.approx(tuned["as_it_is"]["step_s"])


def test_a_run_that_does_not_fit_is_told_and_fails(headway):
    result = headway("plan", RECIPE, "--device", "H100", "--devices", 2)
    assert result.code == 1
    assert "DOES NOT FIT within 90.0 %" in " ".join(result.out.split())
    assert json.loads(headway("plan", RECIPE, "--device", "H100", "--devices", 2, "--json").out)["fits"] is False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("plan", "qwen3-0.6b"), "no device is named"),
        (("plan", "qwen3-0.6b", "--device", "H999"), "H999"),
        (("plan", "qwen3-0.6b", "--device", "rtx-3090-ti"), "the bandwidth of its memory is not known"),
        ((*MODEL, "--price", 2), "give its --tokens or --epochs too"),
        ((*MODEL, "--tokens", 1e9, "--epochs", 1), "both say how long the run is"),
        ((*MODEL, "--epochs", 1), "needs data that end"),
        ((*MODEL, "--tokens", "inf"), "--tokens inf is no length of a run"),
        ((*MODEL, "--epochs", 0, "--lengths", "x.csv"), "--epochs 0 is no length of a run"),
        ((*MODEL, "--data", "x.jsonl", "--lengths", "x.csv"), "two places for lengths"),
        (("plan", "qwen3-0.6b", "--data", "x.jsonl", "--scale", "8"), "--data x.jsonl is for one size of a run"),
        ((*MODEL, "--data", "no-such.jsonl"), "no-such.jsonl"),
        ((*MODEL, "--set", "plan.mix=null"), "nothing says how long the samples are"),
        ((*MODEL, "--set", "parallel.replicate=3"), "does not divide the 8 processes"),
        (("plan", "no-such-model", "--device", "H100"), "no-such-model"),
        (("plan", "no/such.yaml", "--device", "H100"), "no/such.yaml"),
        ((*MODEL, "--set", "speed.recompute=nothing.*"), "speed.recompute"),
    ],
)
def test_bad_input_is_one_clear_error(headway, options, words):
    result = headway(*options)
    assert result.code in (1, 2)
    assert result.out == ""
    assert words in " ".join(result.err.split())
    assert "Traceback" not in result.err


SCALE = ("plan", RECIPE, "--set", "data.tokens_per_pack=8192", "--scale", "8,16")


def test_sizes_are_planned_within_bounds_and_with_their_assumptions(headway):
    result = headway(*SCALE, "--mtbf", 50_000, "--save", 60)
    assert result.code == 0, result.err
    assert "tokens/s that last" in result.out
    assert "one in 50,000 h of each device" in result.out
    assert "stands still 1 min 0 s for a checkpoint" in result.out
    assert "over 16 steps of all ranks" in result.out
    found = json.loads(headway(*SCALE, "--mtbf", 50_000, "--save", 60, "--json").out)
    assert [one["devices"] for one in found["sizes"]] == [8, 16]
    assert found["links"]["devices_per_node"] == 8
    assert all(line in result.out for line in found["assumptions"])
    plain = json.loads(headway(*SCALE, "--json").out)
    assert [one["interruptions"] for one in plain["sizes"]] == [None, None]


def test_links_can_be_given(headway):
    slow, fast = (
        json.loads(headway(*SCALE, "--network", rate, "--json").out)["sizes"][1]["exposed_s"][1] for rate in (1, 100)
    )
    assert slow > fast
    given = headway(*SCALE, "--device", "A40", "--link", 50, "--per-node", 4, "--network", 12.5)
    assert given.code == 0, given.err
    assert "links as given for NVIDIA A40" in given.out


def test_lengths_of_a_file_take_the_place_of_typical_ones(headway, tmp_path):
    (tmp_path / "lengths.csv").write_text("tokens\n" + "\n".join(["700", "3000"] * 3))
    result = headway(*SCALE, "--lengths", tmp_path / "lengths.csv")
    assert result.code == 0, result.err
    assert "lengths.csv" in result.out


def test_many_shards_of_few_rows_are_told(headway):
    recipe = ROOT / "recipes/qwen3-vl-30b-a3b-vqa-8192.yaml"
    result = headway("plan", recipe, "--scale", "256")
    assert result.code == 0, result.err
    assert "256 devices hold and gather 1.9" in result.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scale", "8,many"), "'many' is no number of devices"),
        (("--scale", "8", "--devices", 8), "--devices 8 is for one size"),
        (("--scale", "8", "--tokens", "1e9"), "is for one size"),
        (("--mtbf", 1000), "--mtbf 1000 cannot take effect without --scale"),
        (("--scale", "8", "--save", 3), "--save 3 cannot take effect without --mtbf"),
        (("--scale", "8", "--mtbf", -3), "--mtbf -3 is no time"),
        (("--scale", "8", "--mtbf", 0), "above 0"),
        (("--set", "plan.device=null", "--link", 50), "cannot take effect without --device"),
        (("--devices", 1, "--link", 50), "cannot take effect on one device"),
        (("--device", "A40", "--per-node", 4), "Give --link in GB/s and --per-node"),
        (("--set", "plan.mix=null"), "Give --lengths FILE"),
        (("--set", "plan.device=null", "--scale", "8"), "no device is named, and --scale needs one"),
        (("--scale", "8", "--device", "A40"), "Give --link in GB/s and --per-node"),
        (("--scale", "8,16", "--device", "V100"), "Give each device's share with --network"),
        (("--scale", "8", "--set", "plan.mix=null"), "Give --lengths FILE"),
        (("--scale", "7", "--set", "parallel.shard=4"), "parallel.shard 4"),
    ],
)
def test_sizes_that_cannot_be_planned_are_refused(headway, options, words):
    result = headway("plan", RECIPE, *options)
    assert result.code == 2
    assert words in " ".join(result.err.split())
