"""Rates: shares of a datasheet, or what was measured at a model's sizes."""

import json
import math
import statistics
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headway.devices import named_device
from headway.devices.model_rates import ModelRates
from headway.errors import PlanError
from headway.models.attention.ragged import suits
from headway.predict.speeds import ATTENTION, CUDNN_KEYS, CUDNN_SLOTS, PRODUCTS, Cases, Speeds
from headway.predict.speeds import MEASURED as AS_MEASURED

H100 = named_device("H100")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RATES = ModelRates(
    products={(100, 10, 10): 1e9, (10_000, 10, 10): 9e9},
    attention={100: (2e9, 1e9), 10_000: (4e9, 3e9)},
    copied_bytes_per_s=5e9,
    measured_at=datetime(2026, 11, 23, tzinfo=UTC),
    is_cached=False,
)
MEASURED = Speeds.measured("mine", 5e9, RATES, runs_ahead=False)


def test_a_device_reaches_the_shares_of_its_peak_that_the_table_has():
    speeds = Speeds.of_device(H100, "bf16", attention="fa3")
    large = speeds.product_s(1e15, (8192, 8192, 8192), 2)
    assert large == pytest.approx([1e15 / share / speeds.peak_flops_per_s for share in H100.product_shares])
    attention = speeds.attention_s(4e14, 8e14, 1e9)  # segments so long that only what grows with their keys counts
    assert attention.expected == pytest.approx(1.2e15 / H100.attention_shares["fa3"] / speeds.peak_flops_per_s)
    with pytest.raises(PlanError, match=r"speed\.attention = 'fa3' does not run on .*A100"):
        Speeds.of_device(named_device("A100"), "bf16", attention="fa3")


def test_cudnn_is_planned_where_training_takes_it():
    h200 = named_device("H200")
    cudnn, flash = (Speeds.of_device(h200, "bf16", attention=name) for name in ("cudnn", "torch"))
    assert cudnn.of_pack(CUDNN_SLOTS, CUDNN_KEYS) is cudnn
    for slots, keys in ((CUDNN_SLOTS - 1, CUDNN_KEYS), (CUDNN_SLOTS, CUDNN_KEYS - 1)):
        assert cudnn.of_pack(slots, keys).attention_s(1e12, 2e12, keys, 72) == flash.attention_s(1e12, 2e12, keys, 72)
    assert flash.of_pack(1, 1) is flash
    # the same bounds in training: a causal query sees half of its segment
    segments = CUDNN_SLOTS // (2 * CUDNN_KEYS)
    assert suits(CUDNN_SLOTS, segments, 2 * CUDNN_KEYS, heads=28)
    assert not suits(CUDNN_SLOTS - 1, segments - 1, 2 * CUDNN_KEYS, heads=28)
    assert not suits(CUDNN_SLOTS, segments + 1, 2 * CUDNN_KEYS, heads=28)


def measured_attention():
    """Layers of the recipes alone on a H200: kernel, head size, keys of a query, and seconds of a FLOP and phase."""
    record = json.loads((RESULTS / "attention_gpu_nvidia-h200_202611.json").read_text())
    for shape in record["shapes"]:
        for name, took in shape["kernels"].items():
            keys = shape["flops"] / (4 * shape["heads"] * shape["size"] * sum(shape["lengths"]))
            waits_for_host = took["host_s"] > took["both_s"] * 0.95
            if name == "cudnn" and (waits_for_host or keys < 100):
                continue
            forward, both = took["forward_s"] / shape["flops"], took["both_s"] / shape["flops"]
            yield name, shape["size"], keys, forward, (both - forward) / 2


def test_the_rate_of_attention_follows_from_keys_and_head_sizes_as_measured():
    h200 = named_device("H200")
    for kernel, most in (("torch", 0.07), ("cudnn", 0.07)):
        speeds, errors = Speeds.of_device(h200, "bf16", attention=kernel), []
        for name, size, keys, *phases in measured_attention():
            if name == kernel:
                # alone a layer runs at a higher clock than within a step, by the table's 0.8
                forward, backward = (
                    0.8 * speeds.attention_s(*flops, keys, size).expected for flops in ((1.0, 0.0), (0.0, 1.0))
                )
                errors += [forward / phases[0] - 1, backward / phases[1] - 1]
        assert len(errors) >= 16
        assert statistics.median(map(abs, errors)) < most
        assert max(map(abs, errors)) < 0.32


def test_short_segments_and_heads_between_sizes_are_slower():
    speeds = Speeds.of_device(named_device("H200"), "bf16", attention="cudnn")
    long, short, narrow = (
        speeds.attention_s(1e12, 2e12, *case).expected for case in ((8e3, 128), (3e2, 128), (8e3, 72))
    )
    assert 2 < short / long < 4
    assert narrow / long == pytest.approx(128 / 72)


def test_few_rows_for_each_expert_are_slower():
    speeds = Speeds.of_device(named_device("H200"), "bf16")
    many, few = speeds.grouped_s(1e12, 1e9).expected, speeds.grouped_s(1e12, 512).expected
    assert many == pytest.approx(speeds.product_s(1e12, None, 2).expected)
    assert many / few == pytest.approx(512 / 693, rel=0.02)  # TFLOP/s, as profiled


def test_a_device_of_which_no_shares_are_known_reaches_usual_ones():
    speeds = Speeds.of_device(replace(H100, product_shares=None, attention_shares={}), "bf16")
    assert speeds.peak_flops_per_s == speeds.ceiling_flops_per_s == H100.peak_flops_per_s["bf16"]
    large = speeds.product_s(1e15, (8192, 8192, 8192), 2)
    assert large == tuple(1e15 / share / speeds.peak_flops_per_s for share in PRODUCTS)
    assert large.best < large.expected < large.worst
    both = speeds.attention_s(4e14, 8e14, 1e9)
    assert both == pytest.approx([1.2e15 / share / speeds.peak_flops_per_s for share in ATTENTION])
    assert not speeds.is_measured


def test_a_product_with_one_row_takes_as_long_as_its_weight_takes_to_read():
    speeds = Speeds.of_device(H100, "bf16")
    took = speeds.product_s(2 * 8192 * 8192, (1, 8192, 8192), 2)
    assert took == speeds.memory_s((8192 * 8192 + 2 * 8192) * 2)


def test_measured_rates_are_taken_as_they_are_and_between_sizes_from_those_near():
    assert MEASURED.product_s(1e9, (100, 10, 10), 4) == AS_MEASURED
    assert MEASURED.product_s(9e9, (10_000, 10, 10), 4) == AS_MEASURED
    assert MEASURED.product_s(3e9, (1000, 10, 10), 4).expected == pytest.approx(1.0)  # the geometric mean of both
    assert MEASURED.product_s(9e9, None, 4) == AS_MEASURED  # of a size that is not known, the best
    assert MEASURED.attention_s(4e9, 3e9, 10**6) == AS_MEASURED.times(2)  # beyond the longest, as the longest
    assert MEASURED.memory_s(5e9) == pytest.approx(AS_MEASURED)
    assert MEASURED.moving_s(5e9) == pytest.approx(AS_MEASURED)  # as the memory, where nothing else is known
    assert replace(MEASURED, elementwise_s=1e-9).moving_s(1e9) == pytest.approx(AS_MEASURED)
    assert AS_MEASURED.best < AS_MEASURED.expected < AS_MEASURED.worst


def test_a_product_faster_than_the_peak_becomes_the_peak():
    assert MEASURED.peak_flops_per_s == MEASURED.ceiling_flops_per_s == 9e9


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [
        (replace(H100, memory_bytes_per_s=None), "bf16", "the bandwidth of its memory is not known"),
        (H100, "fp4", "its dense peak in fp4 is not known"),
    ],
)
def test_a_device_without_a_figure_is_one_clear_error(device, dtype, words):
    with pytest.raises(PlanError, match=words) as error:
        Speeds.of_device(device, dtype)
    assert "HEADWAY_PEAKS" in str(error.value)


def test_cases_add_up_case_by_case():
    assert Cases(1, 2, 3) + Cases(1, 1, 1) == (2, 3, 4)
    assert Cases(1, 2, 3) - Cases(1, 1, 1) == (0, 1, 2)
    assert sum([Cases(1, 2, 3)] * 2, Cases.exact(0)).times(0.5) == (1, 2, 3)
    assert math.isclose(Cases.exact(2.0).worst, 2.0)


def test_attention_takes_a_time_per_token_and_one_per_pair():
    per_token, per_pair, flops_per_pair = 3e-6, 2e-9, 128

    def rate(length):
        pairs = (length + 1) / 2
        return flops_per_pair * pairs / (per_token + per_pair * pairs)

    speeds = replace(MEASURED, attention={length: (rate(length), rate(length) / 2) for length in (16, 64, 1024)})
    for pairs in (8.5, 20, 33, 100, 512.5):  # of a query; 10^5 queries
        took = speeds.attention_s(1e5 * pairs * flops_per_pair, 0, pairs).expected
        assert took == pytest.approx(1e5 * (per_token + per_pair * pairs))
        assert speeds.attention_s(0, 1e5 * pairs * flops_per_pair, pairs).expected == pytest.approx(2 * took)
    # shorter than all that were measured: a token takes no less than there
    assert speeds.attention_s(1e5 * flops_per_pair, 0, 1).expected == pytest.approx(1e5 * (per_token + per_pair * 8.5))
