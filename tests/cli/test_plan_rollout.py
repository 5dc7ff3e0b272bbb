"""`headway plan` of a step of reinforcement learning: phases that add up, each as its engine or update says."""

import json
import math
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import RolloutConfig
from headway.count import Generation, Workload, load_cost_model
from headway.devices.model_rates import ModelRates
from headway.errors import ConfigError
from headway.predict.planned_lengths import answer_lengths
from headway.predict.speeds import Speeds

PLAN = ("plan", "qwen3-0.6b", "--device", "H100", "--devices", 8, "--json")
STEP = {"prompts": 32, "group": 4, "prompt_tokens": 100, "answer_tokens": 300}


def options(**settings):
    return [text for name, value in {**STEP, **settings}.items() for text in ("--set", f"plan.rollout.{name}={value}")]


@pytest.fixture
def planned(headway):
    def plan(*more, **settings):
        result = headway(*PLAN, *options(**settings), *more)
        assert result.code == 0, result.err
        return json.loads(result.out)

    return plan


def phase_s(record, name, key="wall_s"):
    return record["time"]["phases"][name][key][1]


def test_phases_add_up_to_the_step_and_each_has_its_flops(planned):
    record = planned(updates=4, reward_s=1.5)
    time, model = record["time"], load_cost_model("qwen3-0.6b")
    phases = time["phases"]
    assert list(phases) == ["rollout", "scoring", "reference", "reward", "update", "sync"]
    for case in range(3):
        assert time["step_s"][case] == pytest.approx(sum(phase["wall_s"][case] for phase in phases.values()))
    assert phase_s(record, "reward") == 1.5
    # FLOPs: written out of lengths, whoever runs them
    answers, samples = Generation([100] * 32, [300] * 128, group=4, prefix="computed once"), Workload([400] * 128)
    assert phases["rollout"]["flops"] == model.count(answers.workload, forward_only=True).total
    assert phases["scoring"]["flops"] == phases["reference"]["flops"] == model.count(samples, forward_only=True).total
    assert phases["update"]["flops"] == pytest.approx(model.count(samples).total, rel=1e-9)
    assert phases["update"]["tokens"] == time["tokens"] == samples.tokens
    flops = sum(phase["flops"] for phase in phases.values())
    assert time["mfu_of_all_devices"][1] == pytest.approx(flops / time["step_s"][1] / (8 * 989.4e12), rel=1e-3)
    for name in ("rollout", "update"):
        use = phases[name]
        assert use["mfu"][1] == pytest.approx(use["flops"] / use["wall_s"][1] / (8 * 989.4e12), rel=1e-3)
    assert 0 < phases["rollout"]["mbu"][1] <= 0.8


def test_an_update_is_the_step_that_a_plan_without_rollout_predicts(planned, headway, tmp_path):
    record = planned(prompts=64, group=8, prompt_tokens=424, answer_tokens=600)
    update = record["time"]["update"]
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("tokens\n" + "1024\n" * 512 * 17)
    settings = ("data.tokens_per_pack=8192", "optim.accumulation=8")
    result = headway(*PLAN, "--lengths", lengths, *(text for s in settings for text in ("--set", s)))
    step = json.loads(result.out)["time"]
    assert update["tokens"] == 64 * 8 * 1024
    # the planner leaves some packs of these lengths a sample short; an update learns from every answer
    more = update["tokens"] / step["tokens"]
    assert 1 <= more < 1.02
    assert update["flops"] == pytest.approx(more * step["flops"])
    assert update["step_s"] == pytest.approx([more * seconds for seconds in step["step_s"]], rel=2e-3)
    assert json.loads(result.out)["memory"]["peak"] == record["memory"]["peak"]


def test_a_shared_prompt_saves_its_prefills_and_nothing_else(planned):
    shared, own = planned(), planned(prefix="own")
    saved = own["time"]["rollout"]["prefill_s"][1] - shared["time"]["rollout"]["prefill_s"][1]
    assert saved > 0
    assert shared["time"]["rollout"]["decode_s"] == own["time"]["rollout"]["decode_s"]
    assert phase_s(own, "rollout") - phase_s(shared, "rollout") == pytest.approx(saved)
    prefill = load_cost_model("qwen3-0.6b").count(Workload([100], logits=1), forward_only=True).total
    flops = [record["time"]["phases"]["rollout"]["flops"] for record in (own, shared)]
    assert flops[0] - flops[1] == 32 * 3 * prefill
    assert phase_s(own, "update") == phase_s(shared, "update")


def test_longer_and_more_answers_take_longer_in_every_phase(planned):
    steps = [planned(answer_tokens=tokens) for tokens in (100, 300, 900)] + [planned(answer_tokens=900, group=8)]
    for name in ("rollout", "scoring", "update"):
        seconds = [phase_s(step, name) for step in steps]
        assert seconds == sorted(seconds)


def test_one_long_answer_keeps_the_others_waiting(planned):
    alike, tail = planned(answer_tokens=300), planned(answer_tokens="[275,275,275,275,275,275,275,475]")
    assert alike["time"]["rollout"]["generated_tokens"] == tail["time"]["rollout"]["generated_tokens"]
    assert tail["time"]["rollout"]["decode_steps"] == 474
    assert tail["time"]["rollout"]["rows"] < 0.7 * alike["time"]["rollout"]["rows"]
    assert phase_s(tail, "rollout") > 1.4 * phase_s(alike, "rollout")


def test_engines_of_their_own_write_beside_the_update(planned):
    colocated = planned()
    apart = planned(devices=8)
    assert phase_s(apart, "rollout") == pytest.approx(phase_s(colocated, "rollout"))
    assert phase_s(apart, "sync") > phase_s(colocated, "sync")
    assert apart["time"]["mfu_of_all_devices"][1] < 0.6 * colocated["time"]["mfu_of_all_devices"][1]
    beside = planned(devices=8, asynchronous="true")
    others = sum(phase_s(beside, name) for name in ("scoring", "reference", "update", "sync"))
    assert beside["time"]["step_s"][1] == pytest.approx(max(others, phase_s(beside, "rollout", "devices_s")))
    assert phase_s(beside, "rollout", "devices_s") == pytest.approx(phase_s(apart, "rollout"))
    slower = planned(devices=8, device="A100")
    assert phase_s(slower, "rollout") > phase_s(apart, "rollout")
    assert slower["engine_speeds"]["device"].startswith("NVIDIA A100")


def test_cache_has_the_room_that_weights_and_the_update_leave(planned):
    # 0.6 billion weights in bfloat16, beside an eighth of them and of two moments in float32
    model = load_cost_model("qwen3-0.6b").params.total
    room = planned()["time"]["rollout"]["room_bytes"]
    assert room == pytest.approx(0.9 * 80e9 - 2 * model - 12 * model / 8, rel=1e-3)
    assert planned(offload="true")["time"]["rollout"]["room_bytes"] == pytest.approx(0.9 * 80e9 - 2 * model)
    tight = planned(memory=0.06, answer_tokens=3000, offload="true")["time"]["rollout"]
    assert tight["limit"] == "cache"
    assert tight["cache_bytes"] <= tight["room_bytes"]
    assert planned(max_rows=4)["time"]["rollout"]["limit"] == "max_rows"
    assert planned()["time"]["rollout"]["limit"] == "answers"


def test_this_machine_is_planned_at_its_measured_rates_in_float32(headway, monkeypatch):
    rates = ModelRates({(100, 10, 10): 1e9}, {100: (2e9, 1e9)}, 5e9, datetime(2026, 11, 26, tzinfo=UTC), False)
    speeds = Speeds.measured("mine", 5e9, rates, runs_ahead=False)
    monkeypatch.setattr("headway.cli.plan.speeds_of", lambda *_: speeds)
    result = headway("plan", "qwen3-0.6b", "--set", "run.device=cpu", "--json", *options(prompts=2))
    record = json.loads(result.out)
    assert record["engine_speeds"] == record["speeds"]
    rollout = record["time"]["rollout"]
    assert rollout["room_bytes"] is None  # nothing says how large the memory is
    # products at the one rate that was measured, attention at its own or as fast as its cache is read
    model = load_cost_model("qwen3-0.6b")
    decode = model.count(Generation([100] * 2, [300] * 8, group=4).decode, forward_only=True)
    products = sum(row.forward for row in decode.rows if row.name != "language.attention") / 1e9
    cache = 4 * sum(row.cached for row in model.rows) * 8 * sum(range(102, 401)) / 5e9
    assert rollout["decode_s"][1] == pytest.approx(products + cache, rel=0.02)
    assert headway("plan", "qwen3-0.6b", "--set", "run.device=cpu", *options(prompts=2)).code == 0


def test_with_adapters_the_update_is_shorter_and_the_rest_is_not(planned):
    whole, adapted = planned(), planned("--set", "model.lora={rank: 8}")
    assert phase_s(adapted, "update") < phase_s(whole, "update")
    for name in ("rollout", "scoring"):
        assert phase_s(adapted, name) == pytest.approx(phase_s(whole, name), rel=0.15)


def test_what_is_left_out_is_no_phase(planned):
    record = planned(scoring="false", reference="false")
    assert list(record["time"]["phases"]) == ["rollout", "update", "sync"]


def test_a_plan_of_a_rollout_is_printed_by_phase(headway, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = headway(*PLAN[:-1], *options(devices=8, asynchronous="true"), "--tokens", 1e9, "--price", 2)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    heads = [line.split()[0] for line in lines if line.strip()]
    for name in ("engines", "rollout", "prefill", "decode,", "scoring", "reference", "update", "sync", "cost"):
        assert name in heads
    assert "32 prompts of 100 tokens x 4 answers of 300 on average" in result.out
    assert "bound by" in result.out
    assert "beside the other phases" in " ".join(result.out.split())


@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        ({"tensor": 3}, (), "8 devices cannot form engines of plan.rollout.tensor=3"),
        ({"updates": 100}, (), "128 answers in plan.rollout.updates=100 leave 1 for each update"),
        ({"answer_tokens": 9000}, (), "give --set data.tokens_per_pack=9100"),
        ({"memory": 0.01}, (), "there is no room for an answer"),
        ({"memory": 0.026}, (), "--set plan.rollout.tensor=2"),
        ({"memory": 0.0125}, ("--set", "plan.rollout.tensor=8"), "--set plan.rollout.offload=true"),
        ({}, ("--samples", 3), "--samples 3 cannot take effect: plan.rollout says"),
        ({}, ("--scale", "8,16"), "--scale 8,16 cannot take effect"),
        ({}, ("--tokens", 1e9, "--epochs", 2), "--tokens and --epochs both say how long the run is"),
        ({}, ("--epochs", 2), "--epochs 2.0 cannot take effect"),
        ({}, ("--lengths", "a.csv"), "give either 'lengths' or 'rollout'"),
        ({}, ("--set", "plan.mix=chats"), "give either 'mix' or 'rollout'"),
        ({"group": 0}, (), "plan.rollout.group"),
        ({"prompts": 10**6, "group": 2}, (), "more than 1,000,000"),
        ({"longest_answer": 200}, (), "longest_answer 200 is below the mean, 300 tokens"),
        ({"longest_answer": 900, "answer_tokens": "[1,2]"}, (), "give one number as answer_tokens"),
        ({"device": "H100"}, (), "device has no effect without 'devices'"),
        ({"asynchronous": "true"}, (), "asynchronous has no effect without 'devices'"),
        ({"devices": 6, "tensor": 4}, (), "6 devices cannot form engines of 4 each"),
        ({"devices": 8, "offload": "true"}, (), "offload has no effect where the engines have 'devices'"),
        ({"batching": "dynamic"}, (), "plan.rollout.batching"),
    ],
)
def test_mistakes_get_one_error_that_names_the_way_out(headway, settings, more, message):
    result = headway(*PLAN, *options(**settings), *more)
    assert result.code in (1, 2)
    assert message in " ".join(result.err.split())


@given(st.integers(1, 400), st.integers(1, 6), st.integers(1, 5000), st.integers(0, 5000))
@settings(max_examples=60, deadline=None)
def test_spread_answers_have_the_mean_and_stay_below_the_longest(prompts, group, mean, beyond):
    longest = mean + beyond
    config = RolloutConfig(prompts=prompts, group=group, prompt_tokens=5, answer_tokens=(mean,), longest_answer=longest)
    lengths = answer_lengths(config)
    assert lengths.shape == (prompts * group,)
    assert 1 <= lengths.min() <= lengths.max() <= longest
    # of N quantiles the mean is off by the step of the two at the ends at most, and by rounding
    assert lengths.mean() == pytest.approx(mean, abs=0.5 + 2 * longest / len(lengths))


def test_several_lengths_share_the_answers_evenly():
    config = RolloutConfig(prompts=10, group=3, prompt_tokens=5, answer_tokens=(9, 100, 20))
    values, counts = np.unique(answer_lengths(config), return_counts=True)
    assert (values.tolist(), counts.tolist()) == ([9, 20, 100], [10, 10, 10])
    assert math.isclose(answer_lengths(config).mean(), 43)


def test_a_dry_run_plans_the_packs_of_a_rollouts_answers(headway, tmp_path):
    recipe = tmp_path / "rl.yaml"
    recipe.write_text(
        "model: {path: qwen3-0.6b}\ndata: {train: chats.jsonl, tokens_per_pack: 4096}\n"
        "optim: {steps: 10, lr: 1e-5}\nrun: {folder: runs/rl}\n"
        "plan: {device: H100, devices: 8, rollout: {prompts: 64, group: 8, prompt_tokens: 200, answer_tokens: 800}}\n"
    )
    dry = json.loads(headway("train", recipe, "--dry-run", "--json").out)
    assert dry["packs"]["lengths"] == "rollout: 64 prompts x 8 answers"
    assert dry["packs"]["samples_per_pack"] == 4
    assert headway("plan", recipe).code == 0


def test_no_rollout_needs_its_numbers():
    with pytest.raises((ConfigError, ValueError)):
        RolloutConfig(prompts=3)
