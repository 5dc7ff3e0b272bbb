"""Engines of other tools: each row says where it was read, changes a plan, and leaves the recipe's own settings."""

import json

import pytest

from headway.config import changed_config
from headway.config.read import with_overrides
from headway.count import Workload, load_cost_model
from headway.devices import named_device
from headway.errors import ConfigError
from headway.predict.engine import HEADWAY, Float8, engine_named, engines, float8_of, with_engine
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
    assert float8_of(name).source
    with_engine(config_of(f"plan.engine={name}"), print)  # its settings are settings


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
    assert "Did you mean 'megatron'?" in " ".join(result.err.split())


def test_settings_of_an_engine_lie_below_those_of_the_recipe():
    said = []
    plain = with_engine(config_of("plan.engine=megatron", "optim.accumulation=4"), said.append)
    assert (plain.parallel.reshard, plain.parallel.reduce) == (False, "step")
    own = with_engine(config_of("plan.engine=megatron", "optim.accumulation=4", "parallel.reshard=true"), said.append)
    assert (own.parallel.reshard, own.parallel.reduce) == (True, "step")
    ours = config_of()
    assert with_engine(ours, said.append) is ours
    assert not said


@pytest.mark.parametrize("options", [(), ("--scale", "8,16"), ("--price-list", "prices.yaml")])
def test_a_setting_that_the_recipe_refuses_is_said_by_every_plan(options, headway, tmp_path, monkeypatch):
    """Gradients of one pack a step wait for no other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prices.yaml").write_text("H100: 2.5")
    devices = () if "--scale" in options else ("--devices", 8)
    command = ("plan", "qwen3-0.6b", "--device", "H100", "--tokens", "1e9", *devices, *options)
    result = headway(*command, "--set", "plan.engine=megatron")
    assert "without its parallel.reduce=step" in " ".join(result.err.split())
    assert "has no effect with one pack per step" in " ".join(result.err.split())
    several = headway(*command, "--set", "plan.engine=megatron", "--set", "optim.accumulation=4")
    assert "without its" not in " ".join(several.err.split())


def test_bytes_of_casts_are_those_of_each_number_that_a_product_reads():
    way = Float8(6, 5, 8, source="", read_on=None, result_bytes=4)
    shape = (2, 3, 7)  # an input of 2 x 3, a weight of 3 x 7, a result of 2 x 7
    assert way.moved_bytes("forward", shape, shards=8, packs=4) == 6 * 6 + 8 * 21
    assert way.moved_bytes("dgrad", shape, shards=8, packs=4) == 5 * 6 + 4 * 14
    assert way.moved_bytes("wgrad", shape, shards=8, packs=4) == 4 * 14
    each_step = Float8(6, 5, 8, source="", read_on=None, casts_each_step=True)
    assert each_step.moved_bytes("recompute", shape, shards=8, packs=4) == 6 * 6 + 8 * 21 / 4
    gathered = Float8(6, 5, 8, source="", read_on=None, gathers=True)
    assert gathered.moved_bytes("forward", shape, shards=8, packs=4) == 6 * 6 + 8 * 21 / 8


SLOW_MEMORY = """
[h100-500w]
names = ["H100 with HBM2e, 500 W"]
tflops = { bf16 = 989.4, fp8 = 1978.9 }
memory_gb = 96
memory_gb_per_s = 2400
board_power_w = 700
link_gb_per_s = 450
network_gb_per_s = 50
devices_per_node = 8
link_source = "as H100"
link_read_on = 2026-11-25
products = [0.69, 0.59, 0.5]
attention = { fa2 = 0.23 }
rates_source = "as H100"
source = "torchtitan benchmarks, llama3_h100_202412_torchtitan.md"
read_on = 2026-11-25
"""


def test_gains_of_float8_are_those_that_torchtitan_and_torchao_print(headway, tmp_path, monkeypatch):
    """Llama 3.1 8B on 8 H100 of 500 W and 2.4 TB/s.

    A scale for each row gains +11.5 and +10.1 %, one scale a tensor +24.8 and +25.0 %.

    Source: torchtitan 7a04053; torchao's docs/source/workflows/training.md at 36027d8.
    """
    (tmp_path / "peaks.toml").write_text(SLOW_MEMORY)
    monkeypatch.setenv("HEADWAY_PEAKS", str(tmp_path / "peaks.toml"))
    base = (
        "plan",
        "llama-3.1-8b",
        "--device",
        "H100 with HBM2e, 500 W",
        "--devices",
        8,
        "--tokens-per-sample",
        8192,
        "--json",
    )
    settings = ("plan.power_w=500", "speed.recompute=every:2,-attention", "speed.compile=true", "speed.kernels=torch")

    def rate(engine, *more):
        names = (f"plan.engine={engine}", *settings, *more)
        result = headway(*base, *(part for name in names for part in ("--set", name)))
        return json.loads(result.out)["time"]["tokens_per_s"][1]

    bf16 = rate("torchtitan-2024")
    assert rate("torchtitan-rowwise", "run.dtype=float8") / bf16 == pytest.approx(1.108, abs=0.03)
    assert rate("torchtitan-2024", "run.dtype=float8") / bf16 == pytest.approx(1.249, abs=0.03)


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


def test_lists_of_tensors_take_the_weights_once_more_in_an_update(headway):
    """Source: `_foreach_doc` of torch/optim/optimizer.py, "~ sizeof(params) more peak memory"."""
    run = ("plan", "qwen3-0.6b", "--device", "H100", "--json", "--set", "run.dtype=bfloat16-params")
    own, trainer = (
        json.loads(headway(*run, "--set", f"plan.engine={name}").out) for name in ("headway", "transformers")
    )
    assert trainer["memory"]["updating"] == 2 * trainer["params"]["total"]
    assert own["memory"]["updating"] < trainer["memory"]["updating"]


def test_the_engine_of_a_changed_recipe_is_the_changed_one():
    changed = changed_config(config_of(), {"plan.engine": "nanochat"})
    assert engine_named(changed.plan.engine).title == "nanochat"
