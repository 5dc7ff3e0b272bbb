"""Attention of packs, held against the pairs of each pack and layer."""

import pytest
import torch

import headway
from headway.count import Workload
from headway.count.masks import causal_pairs, sliding_pairs
from headway.errors import ConfigError
from headway.explain.attribution import Phase
from headway.explain.breakdown import NO_ATTENTION, NO_KERNEL, break_down
from headway.explain.text import as_text
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.meter import Meter
from headway.models.attention import use_attention
from headway.models.recompute import recompute_blocks
from headway.tracing.build import model_class
from helpers.loops import PEAK
from helpers.models import tiny_config, tiny_ledger
from helpers.traces import sidecar, two_kernels_a_step

WINDOW = 16  # keys that the first of two layers sees; the second one sees all before
PER_PAIR = 128  # FLOPs of a pair in forward: 4 heads of 8 channels, two products of 2 FLOPs each
STEPS = {2: [[30, 5, 21], [40], [9, 9]], 3: [[17, 33], [64, 2]]}  # segments of the packs of two steps


def pack_of(segments):
    """The forward's arguments for a pack."""
    slots = sum(segments)
    ids = torch.arange(slots)[None] % 150 + 3
    return {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.cat([torch.arange(length) for length in segments])[None],
        "pack_cu_seqlens": torch.tensor([0, *segments]).cumsum(0).to(torch.int32),
        "pack_max_seqlen": max(segments),
        "use_cache": False,
    }


@pytest.fixture(scope="module")
def explanation(tmp_path_factory):
    """A real run that recomputes both layers, two of its three steps profiled."""
    torch.manual_seed(0)
    config, cost_model = tiny_config("gemma3_sliding"), tiny_ledger("gemma3_sliding")
    model = model_class(config)._from_config(config, dtype=torch.float32).train()
    use_attention(model)
    recompute_blocks(model, "full")
    meter = Meter(model, cost_model=cost_model, peak=PEAK, recompute="full")
    folder = tmp_path_factory.mktemp("packs")
    with headway.profile(meter, folder, steps=range(2, 4), report=lambda _: None) as window:
        for packs in ([[4]], *STEPS.values()):
            for segments in packs:
                meter.count(Workload(segments))
                model(**pack_of(segments)).loss.backward()
            model.zero_grad()
            meter.step()
        meter.close()
    return explain([read_trace(window.path)])


def attention_of(waterfall):
    rows = {row.name: row for row in break_down(waterfall, "attention")}
    rest = rows.pop(NO_ATTENTION).ns + rows.pop(NO_KERNEL).ns
    assert sum(row.ns for row in rows.values()) + rest == waterfall.duration_ns
    return rows


def test_each_kernel_of_attention_has_the_pairs_of_its_own_pack_and_layer(explanation):
    cost_model = tiny_ledger("gemma3_sliding")
    for waterfall in explanation.steps:
        rows, packs = attention_of(waterfall), STEPS[waterfall.step]
        expected = {}
        for number, segments in enumerate(packs, start=1):
            for layer, pairs in enumerate((sliding_pairs(segments, WINDOW), causal_pairs(segments))):
                forward = PER_PAIR * pairs
                expected[f"model.layers.{layer}.self_attn, pack {number}"] = {
                    Phase.FORWARD: forward,
                    Phase.BACKWARD: 2 * forward,
                    Phase.RECOMPUTED: forward,
                }
        assert {name: row.flops_by_phase for name, row in rows.items()} == expected
        for row in rows.values():  # kernels of each were found, in each part of the step, and in no other part
            assert set(row.by_phase) == set(row.flops_by_phase)
            assert min(row.by_phase.values()) > 0
            assert row.ns == row.matmul_ns
            assert row.flops_per_s == pytest.approx(row.flops / row.ns * 1e9)
        count = cost_model.count(Workload.total(map(Workload, packs)), recompute="full")
        of_step = [row for row in count.rows if row.name == "language.attention"]
        assert sum(row.flops for row in rows.values()) == sum(row.total + row.recompute for row in of_step)
    assert [one.step for one in explanation.steps] == [*STEPS]
    assert " by the cost model (" in as_text(explanation, "attention")


def test_a_trace_that_does_not_tell_its_packs_is_an_error_with_a_way_out(tmp_path):
    path = two_kernels_a_step().write(tmp_path / "t.json", headway=sidecar())
    with pytest.raises(ConfigError, match=r"t\.json does not say what each pack of step 2 attends to. Profile again"):
        break_down(explain([read_trace(path)]).steps[0], "attention")


def test_packs_that_the_passes_do_not_match_are_not_told_apart(tmp_path):
    steps = {str(n): {**sidecar()["steps"]["2"], "packs": [{"attention": {"head": [100, 200, 0]}}]} for n in range(5)}
    trace = two_kernels_a_step()
    for i in range(4):  # two passes in each step, and one pack
        for at in (1, 20):
            trace.annotation("phase:forward", 1_000_000 + 50_000 * i + 1000 * at, 10_000)
        trace.annotation("module:head", 1_000_000 + 50_000 * i + 1500, 8_000)
    path = trace.write(tmp_path / "t.json", headway=sidecar(steps=steps))
    found = explain([read_trace(path)])
    rows = {row.name: row for row in break_down(found.steps[0], "attention")}
    assert (rows["head, pack unknown"].matmul_ns, rows["head, pack unknown"].flops) == (60_000, None)
    assert (rows["head, pack 1"].ns, rows["head, pack 1"].flops) == (0, 300)
    assert "attention of packs in layers: 2 took 0.06 ms." in as_text(found, "attention")
