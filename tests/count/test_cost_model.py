"""Counting with stored cost models: laws, freezing, adapters, recomputation."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.count import FlopCount, FlopRow, Workload, load_cost_model, models
from headway.errors import CostModelError, UsageError, WorkloadError

TEXT = load_cost_model("qwen3-8b")
VISION = load_cost_model("qwen2.5-vl-7b")

segments = st.lists(st.integers(1, 3000), min_size=1, max_size=5)
grids = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([2, 8, 14, 30]), st.sampled_from([4, 16, 22])), max_size=3
)
steps = st.builds(Workload, segments, images=grids, videos=grids)


def phases(count: FlopCount) -> tuple[int, int, int]:
    return count.forward, count.dgrad, count.wgrad


def test_llama_8b_at_8192_by_hand():
    # per token and layer: q and o 4096 x 4096, k and v 4096 x 1024, three of 4096 x 14336; a head of 4096 x 128256
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    linear = 2 * 8192 * (32 * layer + 4096 * 128256)
    scores = 2 * 32 * 32 * (128 + 128) * (8192 * 8193 // 2)
    count = load_cost_model("llama-3.1-8b").count(Workload([8192]))
    assert phases(count) == (linear + scores, linear + 2 * scores, linear)
    assert count.total == 421651971833856


@given(steps, steps)
def test_cost_is_additive(a, b):
    assert VISION.count(a + b).total == VISION.count(a).total + VISION.count(b).total
    assert VISION.count(a) + VISION.count(b) == sum([VISION.count(a), VISION.count(b)])
    assert phases(VISION.count(a) + VISION.count(b)) == phases(VISION.count(a + b))


@given(steps, st.randoms(use_true_random=False))
def test_order_and_packing_do_not_change_the_cost(step, random):
    lengths, images = step.segments.tolist(), step.images.tolist()
    random.shuffle(lengths)
    random.shuffle(images)
    packs = [Workload([n]) for n in lengths] + [Workload([], images=images, videos=step.videos)]
    assert sum(VISION.count(pack).total for pack in packs) == VISION.count(step).total


@given(steps)
def test_phases_and_components_sum_to_the_total(step):
    count = VISION.count(step)
    assert sum(count.by_component().values()) == count.total == sum(phases(count))
    assert phases(VISION.count(step, by="module")) == phases(VISION.count(step, by="layer")) == phases(count)
    assert count.share("vision") + count.share("language") == pytest.approx(1)


@given(steps, st.lists(st.sampled_from(["vision", "language.mlp", "*embed*", "model.visual.blocks.3.*"]), max_size=3))
def test_freezing_never_adds(step, patterns):
    frozen, whole = VISION.freeze(patterns).count(step), VISION.count(step)
    assert frozen.forward == whole.forward
    assert frozen.dgrad <= whole.dgrad
    assert frozen.wgrad <= whole.wgrad


def test_padding_slots_are_not_work():
    assert TEXT.count(Workload([100], slots=4096)) == TEXT.count(Workload([100]))


def test_a_frozen_vision_tower_runs_forward_only():
    count = VISION.freeze(["vision"]).count(Workload([512], images=[(1, 16, 16)]))
    for row in count.rows:
        assert (row.dgrad > 0) == row.name.startswith("language"), row


def test_freezing_everything_leaves_no_backward():
    frozen = TEXT.freeze(["language"])
    assert frozen.params.trainable == 0
    assert phases(frozen.count(Workload([64])))[1:] == (0, 0)


def test_a_frozen_bottom_needs_no_gradients_below_the_first_trained_layer():
    step = Workload([64])
    frozen = TEXT.freeze(["model.embed_tokens.*", *(f"model.layers.{i}.*" for i in range(35))])
    whole = TEXT.count(step)
    head = 2 * 64 * 4096 * 151936
    count = frozen.count(step)
    assert count.wgrad == (whole.wgrad - head) // 36 + head
    # the trained layer's own first norm sits before q, k and v, so their input still needs its gradient
    assert count.dgrad == (whole.dgrad - head) // 36 + head
    norms_too = frozen.freeze(["model.layers.35.input_layernorm.*"]).count(step)
    assert count.dgrad - norms_too.dgrad == 2 * 64 * 4096 * (4096 + 1024 + 1024)


def test_forward_only_has_no_backward():
    count = TEXT.count(Workload([100]), forward_only=True)
    assert phases(count) == (TEXT.count(Workload([100])).forward, 0, 0)


def test_recomputation_is_kept_apart_from_useful_work():
    step = Workload([1000])
    plain, full = TEXT.count(step), TEXT.count(step, recompute="full")
    assert full.total == plain.total
    # a block's closing projection (12288 to 4096) is not run again: nothing after it is saved for backward
    head, down = 2 * 1000 * 4096 * 151936, 36 * 2 * 1000 * 12288 * 4096
    assert full.recompute == plain.forward - head - down
    assert 36 * TEXT.count(step, recompute="model.layers.7").recompute == full.recompute


def test_frozen_blocks_are_not_recomputed():
    step = Workload([512], images=[(1, 16, 16)])
    frozen = VISION.freeze(["vision"]).count(step, recompute="full")
    assert all(row.recompute == 0 for row in frozen.rows if row.name.startswith("vision"))
    assert frozen.recompute > 0


def test_lora_adds_two_thin_products_beside_each_target():
    step, rank = Workload([1000]), 16
    plain, lora = TEXT.count(step), TEXT.lora(rank, ["q_proj", "v_proj"]).count(step)
    # q_proj is 4096 to 4096, v_proj 4096 to 1024: A and B add rank x (in + out) each
    adapters = 36 * 2 * 1000 * rank * (4096 + 4096 + 4096 + 1024)
    assert lora.forward == plain.forward + adapters
    assert lora.wgrad == adapters
    # every input needs its gradient but that of the first layer's q, k and v and of its adapters' A
    first = 2 * 1000 * (4096 * (4096 + 1024 + 1024) + 2 * 4096 * rank)
    # there k has no trained parameter behind it: dK = dS^T Q falls away
    scores = 1000 * 1001 // 2 * 2 * 32 * 128
    assert lora.dgrad == plain.dgrad + adapters - first - scores
    assert TEXT.lora(rank, ["q_proj", "v_proj"]).params.trainable == 36 * rank * (4096 + 4096 + 4096 + 1024)


def test_counts_stay_exact_integers_at_any_size():
    count = TEXT.count(Workload(np.full(100_000, 1_000_003)))
    assert count.total == 100_000 * TEXT.count(Workload([1_000_003])).total
    assert isinstance(count.total, int)


def test_rows_merge_by_name_and_driver_when_counts_add():
    a = FlopCount((FlopRow("x", "tokens", 1, 2, 3, 4),))
    b = FlopCount((FlopRow("x", "tokens", 10), FlopRow("x", "patches", 5)))
    assert (a + b).rows == (FlopRow("x", "tokens", 11, 2, 3, 4), FlopRow("x", "patches", 5))
    with pytest.raises(UsageError, match="cannot be added"):
        a + FlopCount(convention="6nd")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: TEXT.count(Workload([9], images=[(1, 2, 2)])), WorkloadError, "qwen3-8b has no vision tower"),
        (lambda: VISION.count(Workload([9], images=[(1, 3, 4)])), WorkloadError, "1x3x4 cannot be merged"),
        (lambda: TEXT.freeze(["visoin"]), UsageError, "freeze='visoin' matches no parameter"),
        (lambda: TEXT.lora(0), UsageError, "rank must be at least 1"),
        (lambda: TEXT.lora(4, ["qproj"]), UsageError, "The model has .*q_proj"),
        (lambda: TEXT.count(Workload([9]), recompute="layers.1"), UsageError, "matches nothing of qwen3-8b"),
    ],
)
def test_what_cannot_take_effect_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_gradient_of_an_input_does_not_depend_on_what_is_trained(tmp_path):
    model = load_cost_model("qwen3-0.6b")
    step = Workload([7, 3])
    asked = model.with_input_gradients()
    assert asked.count(step) == model.count(step)  # the embeddings, below everything, are trained
    frozen = asked.freeze(["language"]).count(step)
    assert (frozen.dgrad, frozen.wgrad) == (model.count(step).dgrad, 0)
    assert asked.lora(4).count(step).dgrad > model.lora(4).count(step).dgrad  # of the first layer's projections
    models.save_cost_model(asked, tmp_path / "model.json")
    assert models.load(tmp_path / "model.json") == asked.with_input_gradients() == asked


@pytest.mark.parametrize("asked", [["pixel_values"], ["inputs_embeds", "pixel_values"]])
def test_a_gradient_of_an_input_that_was_not_traced_is_refused(asked):
    with pytest.raises(
        WorkloadError, match="pixel_values requires a gradient, but the cost of that gradient is not known"
    ):
        load_cost_model("qwen3-vl-2b").with_input_gradients(asked)


@given(st.sets(st.integers(0, 200)))
def test_parameter_sets_survive_as_ranges(members):
    bits = sum(1 << i for i in members)
    assert models.from_ranges(models.to_ranges(bits)) == bits


def test_a_cost_model_survives_its_file(tmp_path):
    path = tmp_path / "model.json"
    changed = VISION.freeze(["vision.merger"]).lora(8)
    models.save_cost_model(changed, path)
    assert models.load(path) == changed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not a Headway cost model"),
        ('{"format": "headway-cost-model", "version": 99}', "version 99"),
        ('{"format": "headway-cost-model", "version": 1, "rows": [[1]]}', "damaged"),
    ],
)
def test_a_broken_file_is_named(tmp_path, text, message):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(CostModelError, match=rf"broken\.json.*{message}"):
        models.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CostModelError, match="cannot be read"):
        models.load(tmp_path / "none.json")


def test_a_cost_model_that_has_counted_can_be_sent_to_another_process():
    model = load_cost_model("qwen3-vl-2b")
    step = Workload([300, 20], images=[(1, 16, 16)])
    counted = model.count(step)
    assert pickle.loads(pickle.dumps(model)).count(step) == counted
