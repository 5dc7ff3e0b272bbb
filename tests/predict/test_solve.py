import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import PlanError
from headway.predict import QUANTITIES, solve

# A run written out by hand: 64 chips of 1e15 FLOP/s, 4e6 tokens of 48e9 FLOPs a step, 6 s a step, 1.2e12 tokens.
RUN = {
    "flops_per_token": 48e9,
    "tokens_per_step": 4e6,
    "step_flops": 192e15,
    "num_chips": 64,
    "peak_flops_per_s": 1e15,
    "optimal_step_s": 3.0,
    "step_s": 6.0,
    "optimal_tokens_per_s": 4e6 / 3,
    "tokens_per_s": 4e6 / 6,
    "tokens_per_s_per_chip": 4e6 / 6 / 64,
    "flops_per_s_per_chip": 0.5e15,
    "mfu": 0.5,
    "total_tokens": 1.2e12,
    "total_flops": 57.6e21,
    "num_steps": 300_000,
    "time_s": 1.8e6,
    "chip_hours": 32_000,
    "price_per_chip_hour": 2.5,
    "cost": 80_000,
}

SUFFICIENT = [
    ("flops_per_token", "tokens_per_step", "num_chips", "peak_flops_per_s", "step_s", "num_steps", "cost"),
    ("flops_per_token", "tokens_per_step", "num_chips", "peak_flops_per_s", "mfu", "total_tokens", "cost"),
    ("flops_per_token", "tokens_per_s", "num_chips", "peak_flops_per_s", "step_s", "total_tokens", "cost"),
    ("tokens_per_step", "tokens_per_s_per_chip", "peak_flops_per_s", "mfu", "time_s", "num_chips", "cost"),
    ("flops_per_token", "peak_flops_per_s", "mfu", "total_tokens", "time_s", "tokens_per_step", "price_per_chip_hour"),
]  # fmt: skip


@pytest.mark.parametrize("keys", SUFFICIENT)
def test_a_sufficient_set_gives_all_the_others(keys):
    plan = solve({key: RUN[key] for key in keys})
    assert plan.unknown == ()
    assert dict(plan.values) == pytest.approx(RUN)
    assert plan.inputs == set(keys)
    assert plan.warnings == ()


def test_the_run_names_every_quantity():
    assert set(RUN) == {quantity.key for quantity in QUANTITIES}


def test_chips_needed_within_a_time():
    # 15e12 tokens of 48e9 FLOPs at 40 % of 1e15 in 30 days: 720e21 / (0.4e15 x 2.592e6 s)
    plan = solve(
        {"flops_per_token": 48e9, "total_tokens": 15e12, "mfu": 0.4, "peak_flops_per_s": 1e15, "time_s": 2.592e6}
    )
    assert plan.values["num_chips"] == pytest.approx(720e21 / (0.4e15 * 2.592e6))


def test_rounded_values_do_not_contradict_each_other():
    plan = solve({"tokens_per_step": 4e6, "step_s": 6.0, "tokens_per_s": 666_667, "num_chips": 64})
    assert plan.values["tokens_per_s_per_chip"] == pytest.approx(666_667 / 64)


@given(st.lists(st.sampled_from(sorted(RUN)), min_size=2, max_size=7, unique=True))
@settings(max_examples=200, deadline=None)
def test_whatever_is_derived_is_right(keys):
    try:
        plan = solve({key: RUN[key] for key in keys})
    except PlanError as error:
        assert "too little to compute" in str(error)  # noqa: PT017  # too little is the only thing that can be wrong here
        return
    assert dict(plan.values) == pytest.approx({key: RUN[key] for key in plan.values})


BAD = [
    ({"tokens_per_s": 5, "step_s": 2, "tokens_per_step": 20}, "contradict each other: tokens/s 5, step time 2"),
    ({"num_chips": 4}, "chips 4 is too little to compute anything from"),
    ({}, "no value is too little"),
    ({"step_s": -1.0, "tokens_per_step": 2}, "step time is -1: it must be a positive number"),
    ({"step_s": float("inf"), "tokens_per_step": 2}, "must be a positive number"),
    ({"mfu": 45.0, "peak_flops_per_s": 1e15}, "Give a fraction: 0.45 for 45 %"),
    ({"speed": 1.0}, "'speed' is no quantity of a plan"),
]


@pytest.mark.parametrize(("values", "quoted"), BAD, ids=range(len(BAD)))
def test_bad_values_are_refused(values, quoted):
    with pytest.raises(PlanError) as error:
        solve(values)
    assert quoted in str(error.value)


def test_an_mfu_above_1_that_follows_is_reported_and_not_clipped():
    plan = solve({"step_flops": 1e18, "step_s": 1.0, "num_chips": 8, "peak_flops_per_s": 1e15})
    assert plan.values["mfu"] == pytest.approx(125)
    assert "Likely causes" in plan.warnings[0]
