import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.audit import factors
from headway.audit.compare import _PARTS_IN_ORDER
from headway.audit.rows import Interval, common, hull, printed
from headway.conventions import PARTS, Step, architecture, conventions, get_convention
from headway.count import Workload, load_cost_model
from headway.count.models import presets
from helpers.cases import examples
from tools.their_rules.cases import Case

MODELS = {
    name: architecture(presets()[name], name, load_cost_model(name))
    for name in ("qwen3-8b", "qwen3-vl-30b-a3b", "gemma-3-4b", "deepseek-v3", "qwen2.5-vl-7b")
}


@pytest.mark.parametrize("convention", conventions(), ids=lambda convention: convention.name)
@given(
    name=st.sampled_from(sorted(MODELS)),
    segments=st.lists(st.integers(600, 8192), min_size=1, max_size=6),
    padding=st.integers(0, 2000),
    images=st.integers(0, 2),
    frozen=st.booleans(),
)
@settings(max_examples=examples(8, 25), deadline=None)
def test_factors_multiply_to_the_bill_over_useful(convention, name, segments, padding, images, frozen):
    model = MODELS[name]
    grids = [(1, 32, 48)] * images if model.vision else []
    step = Step(Workload(segments, grids, slots=sum(segments) + padding), 8192)
    bill = convention.bill(model, step)
    if bill.flops is None:
        return
    trained = model
    if frozen:
        cost_model = load_cost_model(name).freeze(["language.projections"])
        trained = architecture(presets()[name], name, cost_model)
    useful = get_convention("useful").bill(trained, step).flops
    product = math.prod(factor.ratio for factor in factors(convention, model, step, trained))
    assert product == pytest.approx(bill.flops / useful, rel=5e-4)


def test_every_part_of_a_bill_has_a_factor_of_its_own():
    # what has none would be laid on the last one, of frozen weights
    assert {part for _, part, _ in _PARTS_IN_ORDER} == set(PARTS)


def test_the_states_of_delta_rules_are_a_factor():
    pytest.importorskip("transformers")
    case = Case("qwen3-next-80b", "pack")  # traced
    model, step = case.numbers, case.step
    convention = get_convention("nemo-automodel")
    ratios = {factor.name: factor.ratio for factor in factors(convention, model, step, model)}
    assert "recurrence" in ratios
    assert "frozen" not in ratios
    bill = convention.bill(model, step).flops / get_convention("useful").bill(model, step).flops
    assert math.prod(ratios.values()) == pytest.approx(bill, rel=5e-4)


def test_each_factor_is_what_its_name_says():
    # 8 samples of 1024 in a row of 8192 of Qwen3-8B by torchtitan's rule: the square is 8 times that of the samples,
    # and the causal half leaves 1025 / 2048 of each.
    linear = 36 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 12288) + 4096 * 151936
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    square = 12 * 36 * 4096
    found = factors(
        get_convention("torchtitan"), MODELS["qwen3-8b"], Step(Workload([1024] * 8), 8192), MODELS["qwen3-8b"]
    )
    ratios = {factor.name: factor.ratio for factor in found}
    weights = 6 * (linear + norms)
    assert ratios["document mask"] == pytest.approx((weights + square * 8192) / (weights + square * 1024))
    assert ratios["causal"] == pytest.approx((weights + square * 1024) / (weights + square * 1025 / 2))
    assert ratios["other weights"] == pytest.approx((weights + square * 1025 / 2) / (6 * linear + square * 1025 / 2))
    assert set(ratios) == {"document mask", "causal", "other weights"}


def test_whole_rows_and_padding_are_told_apart():
    # 3000 tokens and 1096 slots of padding, in a row of 8192 that is billed whole
    step = Step(Workload([3000], slots=4096), 8192)
    found = factors(get_convention("maxtext"), MODELS["qwen3-8b"], step, MODELS["qwen3-8b"])
    ratios = {factor.name: factor.ratio for factor in found}
    assert ratios["tokens billed"] == pytest.approx(8192 / 4096)
    assert ratios["padding"] == pytest.approx(4096 / 3000)


@pytest.mark.parametrize(
    ("text", "options", "low", "high"),
    [
        ("332.64", {"scale": 1e12}, 332.635e12, 332.645e12),
        ("1,764", {}, 1763.5, 1764.5),
        ("5000", {"truncated": True}, 5000, 5001),
        ("0.520", {"step": 0.01}, 0.515, 0.525),
        ("0", {}, 0, 0.5),
    ],
)
def test_what_a_printed_number_can_have_been(text, options, low, high):
    interval = printed(text, **options).range
    assert (interval.low, interval.high) == pytest.approx((low, high))


@given(st.floats(0.01, 1e6), st.integers(0, 4))
def test_the_true_number_lies_in_the_interval_of_its_print(value, digits):
    assert value in printed(f"{value:,.{digits}f}").range.widened(1e-9)


def test_intervals():
    assert common([Interval(1, 2), Interval(3, 4)]) is None
    assert common([]) is None
    assert hull([Interval(1, 2), Interval(3, 4)]) == Interval(1, 4)
    assert Interval(1, 2) * Interval(3, 4) == Interval(3, 8)
    assert Interval(1, 2) / Interval(0, 4) == Interval(0.25, math.inf)
