"""Plans of preferences: the output layer's second run, and the reference, in time, in memory and in cost."""

import pytest

from fake_cuda.moments import run_moments, settings
from fake_cuda.shared import run_shared
from headway.cli.plan import named_recipe, speeds_of
from headway.devices import named_device
from headway.predict.communication import Links
from headway.predict.predictor import Predictor

MODEL = "llama-3.1-8b"
BASE = ("plan.mix=chats", "data.tokens_per_pack=8192")
LORA, STORED, OFF = "model.lora={rank: 16}", "preference.loss=sigmoid", "preference.reference=adapters-off"
NONE = "preference.loss=simpo"


def planned(*given, device="H100", devices=8):
    """A recipe's packs, and its mean step on some devices."""
    cost_model, config = named_recipe(MODEL, (*BASE, *given))
    kind = named_device(device)
    speeds, links = speeds_of(config, cost_model, kind, devices), Links.of_device(kind)
    run = Predictor.of(config, cost_model, device=kind, speeds=speeds, links=links).at(config, devices)
    return run, run.step, speeds


def seconds(step):
    return {line.key: line.seconds.expected for line in step.lines}


def test_an_output_layer_that_runs_twice_takes_time_and_bytes_twice():
    """Its forward at the ceiling is recomputation; logits are cast and turned into log-probabilities once more."""
    (run, step, speeds), (plain, alone, _) = planned(NONE), planned()
    head = next(row.forward for row in plain.packs.flops.rows if row.name == "language.head")
    assert run.packs.flops.recompute - plain.packs.flops.recompute == head > 0
    more = seconds(step)["recomputation"] - seconds(alone).get("recomputation", 0.0)
    assert more == pytest.approx(head / 8 / speeds.ceiling_flops_per_s)
    # 128,256 logits of each slot: cast (2 + 4 bytes), read three times in float32 and written once
    slots = run.packs.report.fill * 8192
    memory = seconds(step)["memory"] - seconds(alone)["memory"]
    assert memory == pytest.approx(speeds.moving_s((6 + 16) * 128_256 * slots).expected, rel=0.02)
    assert step.mfu.expected < alone.mfu.expected
    # where a pack's logits are kept, the layer runs once
    whole, once = planned(NONE, "speed.loss_chunk=null"), planned("speed.loss_chunk=null")
    assert (whole[1].step_s, whole[0].flops) == (once[1].step_s, once[0].flops)


def test_a_reference_without_adapters_is_a_forward_of_each_step():
    (run, step, _), (plain, alone, _) = planned(LORA, STORED, OFF), planned(LORA, NONE)
    assert run.packs.reference.total == pytest.approx(planned(STORED)[0].packs.flops.forward, rel=1e-3)
    assert run.flops.total == step.flops == plain.flops.total + run.packs.reference.total
    assert run.to_dict()["reference"] == {"runs": "each step", "flops": run.packs.reference.total}
    assert not any(step.reference)
    # it takes about as long for a FLOP as the step's own work, gathers weights, and updates nothing
    share = (step.step_s - alone.step_s) / alone.step_s
    own = plain.flops.total + plain.flops.recompute
    assert share == pytest.approx(run.packs.reference.total / own, rel=0.2)
    assert seconds(step)["optimizer"] == seconds(alone)["optimizer"]
    assert run.memory.peak == plain.memory.peak  # nothing of it is kept


def test_a_stored_reference_comes_before_the_first_step():
    (run, step, _), (plain, alone, _) = planned(STORED), planned(NONE)
    assert run.flops == plain.flops
    assert step.seconds == alone.seconds
    assert run.packs.reference.total == run.packs.flops.forward
    assert run.to_dict()["reference"] == {"runs": "once", "flops": run.packs.reference.total}
    assert plain.to_dict()["reference"] is None
    assert 0.15 * step.step_s < step.reference.expected < 0.45 * step.step_s  # a third, and a head that runs once


CHUNK = "speed.loss_chunk=512"


@pytest.mark.parametrize(
    "overrides",
    [
        (STORED, CHUNK, "speed.recompute=full", "run.dtype=bfloat16-params"),
        pytest.param((STORED, CHUNK), marks=pytest.mark.slow),
        pytest.param((STORED, "speed.loss_chunk=null"), marks=pytest.mark.slow),
        (LORA, STORED, OFF, CHUNK, "speed.recompute=full"),
        pytest.param((LORA, STORED, OFF, CHUNK), marks=pytest.mark.slow),
    ],
)
def test_a_device_holds_no_more_for_preferences_than_is_planned(overrides):
    found, plan = run_moments("text", settings(*overrides))
    assert plan.peak == pytest.approx(found.peak, rel=0.05)


@pytest.mark.parametrize("overrides", [(STORED,), (LORA, STORED, OFF, "speed.recompute=full")])
def test_a_processor_really_holds_what_is_planned(overrides):
    base = ("speed.loss_chunk=256", "run.dtype=float32")
    found, plan = run_shared("little text", settings(*base, *overrides), 1)
    assert plan.peak == pytest.approx(found.peak, rel=0.05)
    for moment in ("forward", "backward", "update"):
        assert plan.at(moment).total == pytest.approx(found.peaks[moment], rel=0.05, abs=0.05 * found.peak)
