"""Engines of other tools: each row says where it was read, changes a plan, and leaves the recipe's own settings."""

import json

import pytest

from headway.config import changed_config
from headway.config.read import with_overrides
from headway.count import Workload, load_cost_model
from headway.devices import named_device
from headway.errors import ConfigError
from headway.predict.engine import HEADWAY, engine_named, engines, with_engine
from headway.predict.speeds import Speeds
from helpers.processes import ROOT

PLAN = ("plan", "qwen3-0.6b", "--device", "H100", "--devices", 8, "--json")
PUBLISHED = json.loads((ROOT / "benchmarks/published.json").read_text())


def config_of(*settings):
    raw = {"model": {"path": "qwen3-0.6b"}, "data": {"train": [{"path": "data.jsonl"}], "tokens_per_pack": 8192},
           "optim": {"steps": 10, "lr": 1e-5}, "run": {"folder": "runs/x"}}  # fmt: skip
    return with_overrides(raw, settings)


@pytest.mark.parametrize("name", [name for name in engines() if name != "headway"])
def test_each_engine_says_where_it_was_read_and_is_run_by_a_published_row(name):
    engine = engine_named(name)
    assert engine.title
    assert engine.source
    assert engine.read_on is not None
    assert set(engine.time) <= {f"{kind} {dtype}" for kind in ("dense", "experts") for dtype in ("bf16", "fp8")}
    assert bool(engine.time) == bool(engine.rates_source)
    assert any(f"plan.engine={name}" in row["settings"] for row in PUBLISHED["rows"])
    with_engine(config_of(f"plan.engine={name}"))  # its settings are settings


def test_a_plan_with_another_engine_differs_and_says_so(headway):
    own, other = headway(*PLAN), headway(*PLAN, "--set", "plan.engine=megatron")
    assert (own.code, other.code) == (0, 0), other.err
    assert json.loads(own.out)["time"]["step_s"] != json.loads(other.out)["time"]["step_s"]
    text = headway(*PLAN[:-1], "--set", "plan.engine=megatron").out
    assert engine_named("megatron").title in text
    assert "priced" not in headway(*PLAN[:-1]).out


def test_an_unknown_engine_is_refused_by_the_nearest_name(headway):
    result = headway(*PLAN, "--set", "plan.engine=megatorn")
    assert result.code == 2
    assert "Did you mean 'megatron'?" in result.err


def test_settings_of_an_engine_lie_below_those_of_the_recipe():
    plain = with_engine(config_of("plan.engine=megatron", "optim.accumulation=4"))
    assert (plain.parallel.reshard, plain.parallel.reduce) == (False, "step")
    own = with_engine(config_of("plan.engine=megatron", "optim.accumulation=4", "parallel.reshard=true"))
    assert (own.parallel.reshard, own.parallel.reduce) == (True, "step")
    # gradients of one pack a step wait for no other: the setting would have no effect
    assert with_engine(config_of("plan.engine=megatron")).parallel.reduce == "pack"
    ours = config_of()
    assert with_engine(ours) is ours


def test_time_of_computing_is_scaled_by_kind_of_model_and_precision():
    device, dense, experts = named_device("B200"), load_cost_model("qwen3-8b"), load_cost_model("qwen3-30b-a3b")
    speeds = Speeds.of_device(device, "bf16")
    engine = type(HEADWAY)("half as fast with experts in fp8", time={"experts fp8": 2.0})
    for model, float8, factor in ((dense, True, 1.0), (experts, False, 1.0), (experts, True, 0.5)):
        other = engine.speeds(speeds, device, model, float8=float8)
        assert other.product_shares == speeds.product_shares.times(factor)
        assert other.bytes_per_s == speeds.bytes_per_s.times(factor)


def test_biases_of_experts_move_bytes_for_each_token_that_they_are_added_to():
    engine, model = engine_named("automodel-flex"), load_cost_model("gpt-oss-20b")
    # 24 layers; of 32 experts a token chooses 4, with biases of 2 x 2,880 and 2,880 numbers
    by_hand = 24 * 4 * (14 * 5760 + 68 * 2880) * 100
    assert engine.bytes_of_biases(model, Workload([60, 40])) == by_hand
    assert engine.bytes_of_biases(load_cost_model("qwen3-8b"), Workload([60, 40])) == 0


def test_a_kernel_that_a_device_does_not_have_is_refused():
    device = named_device("A100-SXM4-80GB")
    with pytest.raises(ConfigError, match="runs fa3, which does not run on"):
        type(HEADWAY)("a tool", attention="fa3").speeds(
            Speeds.of_device(device, "bf16"), device, load_cost_model("qwen3-8b"), float8=False
        )


def test_the_engine_of_a_changed_recipe_is_the_changed_one():
    changed = changed_config(config_of(), {"plan.engine": "nanochat"})
    assert engine_named(changed.plan.engine).title == "nanochat"
