"""A step's time does not depend on whether its packs were planned with what is computed again."""

import pytest

from headway.devices import named_device
from headway.predict.forecast import Forecaster
from headway.predict.packs import plan_packs
from headway.predict.speeds import Speeds
from headway.predict.tune.space import admitted


@pytest.mark.parametrize("recompute", ["none", "full", "every:3", "full,-attention"])
def test_packs_planned_without_recomputation_take_what_those_planned_with_it_take(make_search, recompute):
    search = make_search()
    config = admitted(search.config, {"speed.recompute": recompute})
    speeds, shape = Speeds.of_device(named_device("H100"), "bf16"), config.parallel.mesh_shape(8)
    plain, again = (
        plan_packs(config, search.cost_model, shape, choice, lengths=search.lengths) for choice in ("none", recompute)
    )
    forecaster = Forecaster(search.cost_model, search.saved, speeds, 8)
    expected, found = forecaster.predict(config, again), forecaster.predict(config, plain)
    assert found.flops == expected.flops == plain.flops.total
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-9)
