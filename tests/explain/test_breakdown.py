"""Attention of packs, held against the pairs of each pack and layer."""

import pytest
import torch

import headway
from headway.count import Workload
from headway.count.masks import causal_pairs, sliding_pairs
from headway.errors import ConfigError
from headway.explain.attribution import Phase
from headway.explain.breakdown import NO_ATTENTION, NO_KERNEL, OTHERS, attributed_share, break_down, gemms_of
from headway.explain.budget import NO_COMPONENT
from headway.explain.text import as_text
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.meter import Meter
from headway.models.attention import use_attention
from headway.models.recompute import recompute_blocks
from headway.tracing.build import model_class
from helpers.loops import PEAK
from helpers.models import tiny_config, tiny_ledger
from helpers.traces import BACKWARD_THREAD, US, WrittenTrace, sidecar, two_kernels_a_step

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


COMPONENTS = {
    "model.layers.0.attn": "language.attention",
    "model.layers.0.attn.q": "language.projections",
    "model.layers.0.mlp.up": "language.mlp",
    "vision.patch": "vision.embed",
    "vision.mlp": "vision.mlp",
}


def written(body, tmp_path, **changes):
    """One step of 1,000 us, in which a body writes what runs; the rows by component, by name [us]."""
    trace = WrittenTrace()
    trace.steps(0, 1000 * US)
    body(trace)
    path = trace.write(tmp_path / "t.json", headway=sidecar(**{"components": COMPONENTS, **changes}))
    (waterfall,) = explain([read_trace(path)]).steps
    rows = break_down(waterfall, "component")
    return {row.name: row.ns // US for row in rows[:-1]}, waterfall, rows


def run(trace, operator, at, us, *, module=None, sequence=None, tid=100, **more):
    """An operator on the host, in a module if one is named."""
    if module is not None:
        trace.annotation(f"module:{module}", at * US, us * US, tid=tid)
    trace.operator(operator, at * US, us * US, sequence=sequence, tid=tid, **more)


@pytest.mark.parametrize(
    ("module", "owner"),
    [
        ("model.layers.0.attn", "language.attention"),
        ("model.layers.0.attn.q_norm", "language.attention"),
        ("model.layers.0.mlp", "language.mlp"),
        ("model.layers.0.input_norm", "language.other"),
        ("model.layers.0", "language.other"),
        ("model.embed", "language.other"),
        ("vision.positions", "vision.other"),
        ("pooler", "model.other"),
        ("", "model.other"),
    ],
)
def test_what_runs_between_components_is_its_towers(tmp_path, module, owner):
    def body(trace):
        trace.annotation("phase:forward", 0, 500 * US)
        run(trace, "aten::add", 10, 20, module=module or None)

    found, _, rows = written(body, tmp_path)
    assert found == {owner: 20}
    assert attributed_share(rows) == 1.0


def test_what_no_pass_of_the_model_holds_is_not_attributed(tmp_path):
    def body(trace):
        run(trace, "aten::add", 10, 20)
        run(trace, "aten::mul", 40, 60, module="vision.mlp")

    found, _, rows = written(body, tmp_path)
    assert found == {"vision.mlp": 60, NO_COMPONENT: 20}
    assert attributed_share(rows) == pytest.approx(0.75)


def test_the_backward_of_the_models_own_code_is_the_models(tmp_path):
    def body(trace):
        trace.annotation("phase:forward", 0, 100 * US)
        run(trace, "aten::mean", 10, 20, sequence=7)
        node = "autograd::engine::evaluate_function: MeanBackward0"
        trace.operator(node, 200 * US, 90 * US, sequence=7, forward_thread=1)
        run(trace, "aten::div", 210, 30)

    assert written(body, tmp_path)[0] == {"model.other": 50}


def test_activities_around_the_model_have_names(tmp_path):
    def body(trace):
        trace.annotation("Optimizer.step#AdamW.step", 0, 50 * US)
        run(trace, "aten::_fused_adamw_", 5, 40)
        trace.annotation("FSDP::all_gather_copy_out (model.layers.0)", 60 * US, 30 * US)
        run(trace, "fsdp::split_with_sizes_copy", 65, 20)
        trace.operator("torch::autograd::AccumulateGrad", 100 * US, 30 * US)
        run(trace, "aten::add_", 105, 10)
        trace.annotation("gloo:all_reduce", 200 * US, 70 * US, tid=BACKWARD_THREAD)
        trace.annotation("phase:logging", 300 * US, 20 * US)
        run(trace, "aten::item", 305, 5)

    found, waterfall, rows = written(body, tmp_path)
    assert found == {
        "(optimizer)": 40, "(data parallelism)": 20, "(accumulation)": 10, "(communication)": 70, "(logging)": 5,
    }  # fmt: skip
    assert attributed_share(rows) == 1.0
    assert "unexplained" not in {line.key for line in waterfall.lines if line.ns}


def compiled_block(trace):
    """A compiled block with a product in forward and one in backward, and a layer of the other tower that is not."""
    trace.annotation("phase:forward", 0, 400 * US)
    trace.annotation("module:model.layers.0", 0, 200 * US)
    trace.operator("Torch-Compiled Region: 0/0", 10 * US, 180 * US)
    trace.operator("CompiledFunction", 20 * US, 160 * US, sequence=7)
    run(trace, "aten::mm", 30, 100)
    run(trace, "aten::mm", 300, 20, module="vision.mlp")
    trace.operator("autograd::engine::evaluate_function: CompiledFunctionBackward", 500 * US, 90 * US, sequence=7,
                   forward_thread=1)  # fmt: skip
    trace.operator("CompiledFunctionBackward", 510 * US, 70 * US, sequence=7, forward_thread=1)
    run(trace, "aten::mm", 520, 50)


def test_a_compiled_block_is_one_owner_of_all_the_components_within(tmp_path):
    useful = {"language.mlp": {"forward": 10_000, "backward": 20_000}, "language.projections": {"forward": 5_000}}
    step = {**sidecar()["steps"]["1"], "useful_flops": {**useful, "vision.mlp": {"forward": 4_000}}}
    step |= {"recomputed_flops": {"language.mlp": 10_000}, "padding_flops": 0}
    found, waterfall, rows = written(compiled_block, tmp_path, steps={"1": step})
    assert found == {"language (compiled)": 180 + 70, "vision.mlp": 20}
    by_name = {row.name: row for row in rows}
    block = by_name["language (compiled)"]
    assert (block.matmul_ns, block.flops) == (150 * US, 45_000)
    assert block.flops_per_s == pytest.approx(45_000 / 150e-6)
    assert set(block.by_phase) == {Phase.FORWARD, Phase.BACKWARD}
    slow = {line.key: line.ns for line in waterfall.lines if line.key.startswith("slow.")}
    needed = round(35_000 / 0.8) + round(10_000 / 0.8)  # [ns] at the ceiling of 0.8e9 FLOP/s
    assert slow == {"slow.language (compiled)": 150 * US - needed, "slow.vision.mlp": 20 * US - 5_000}


def attending_blocks(operators):
    """Compiled blocks, each with of 240 us, with an operator of 60 us, a product of 100 us and a norm of 5 us."""

    def body(trace):
        trace.annotation("phase:forward", 0, 900 * US)
        for i, operator in enumerate(operators):
            at = 300 * i
            trace.annotation(f"module:model.layers.{i}", at * US, 250 * US)
            trace.operator("Torch-Compiled Region: 0/0", at * US, 240 * US)
            run(trace, operator, at, 60)
            run(trace, "aten::mm", at + 60, 100)
            run(trace, "aten::rms_norm", at + 160, 5)

    return body


TWO_BLOCKS = {
    f"model.layers.{i}.{path}": f"language.{name}"
    for i in (0, 1)
    for path, name in [("attn", "attention"), ("attn.q", "projections"), ("mlp", "mlp")]
}
FLASH = "torch_attn::_varlen_attn"


@pytest.mark.parametrize(
    ("operators", "components", "owners"),
    [
        ([FLASH, FLASH], TWO_BLOCKS, {"language.attention": 120, "language.products": 200, "language.other": 160}),
        # attention of one block is written out: whose the products are cannot be told
        ([FLASH, "aten::bmm"], TWO_BLOCKS, {"language (compiled)": 480}),
        # a name of Inductor's tells all that is fused, and this one is a product
        ([FLASH, "triton_tem_fused__varlen_attn_mm_3"], TWO_BLOCKS, {"language (compiled)": 480}),
        (
            [FLASH, FLASH],
            {path: name for path, name in TWO_BLOCKS.items() if not name.endswith("projections")},
            {"language.attention": 120, "language.mlp": 200, "language.other": 160},
        ),
    ],
)
def test_attention_in_compiled_blocks_is_told_from_other_products(tmp_path, operators, components, owners):
    useful = {"language.attention": {"forward": 6_000}, "language.mlp": {"forward": 9_000}}
    step = {**sidecar()["steps"]["1"], "useful_flops": useful, "recomputed_flops": {}, "padding_flops": 0}
    found, waterfall, rows = written(
        attending_blocks(operators), tmp_path, components=components, steps={"1": step}, ceiling_flops_per_s=None
    )
    assert found == owners
    flops = {row.name: row.flops for row in rows if row.flops}
    assert sum(flops.values()) == 15_000
    slow = {line.key.removeprefix("slow."): line.ns for line in waterfall.lines if line.key.startswith("slow.")}
    if "language.attention" in owners:
        assert flops["language.attention"] == 6_000
        assert slow["language.attention"] == (120 - 6) * US


def test_a_compiled_function_in_a_layer_whose_modules_have_names_stays_with_the_layer(tmp_path):
    def body(trace):
        trace.annotation("phase:forward", 0, 400 * US)
        trace.annotation("module:model.layers.0.attn", 0, 200 * US)
        trace.annotation("module:model.layers.0.attn.q", 5 * US, 10 * US)
        run(trace, "aten::mm", 6, 4)
        trace.operator("Torch-Compiled Region: 0/0", 30 * US, 100 * US)

    assert written(body, tmp_path)[0] == {"language.attention": 100, "language.projections": 4}


pytestmark = pytest.mark.own_peak


def products(tmp_path, **options):
    """Two products of 512 x 256 x 128 in 10 us each, a batch of 4 in 5 us, and attention in 20 us."""
    trace = WrittenTrace()
    bf16 = "c10::BFloat16"
    for i in (0, 1):
        operands = [[512, 128], [128, 256]], bf16
        trace.launched("gemm", 10 * i * US, (100 + 10 * i) * US, 10 * US, 1 + i, operator="aten::mm", operands=operands)
    operands = [[4, 64, 32], [4, 32, 16]], bf16
    trace.launched("gemm", 30 * US, 120 * US, 5 * US, 3, operator="aten::bmm", operands=operands)
    trace.launched("flash", 40 * US, 125 * US, 20 * US, 4, operator="aten::_scaled_dot_product_flash_attention")
    path = trace.write(tmp_path / "t.json", deviceProperties=[{"name": "NVIDIA H200"}])
    return explain([read_trace(path)], as_one_step=True, **options)


def test_products_are_joined_by_size_and_have_a_rate(tmp_path):
    found = products(tmp_path).steps[0]
    one, batch, rest = gemms_of(found)
    flops = 2 * 512 * 256 * 128
    assert (one.name, one.calls, one.ns) == ("512x256x128", 2, 20 * US)
    assert one.flops_per_s == pytest.approx(2 * flops / 20e-6)
    assert one.of_ceiling == pytest.approx(one.flops_per_s / 989.4e12, rel=1e-3)  # the H200's peak in bf16
    assert (batch.name, batch.calls, batch.ns) == ("4*64x16x32", 1, 5 * US)
    assert (rest.name, rest.ns, rest.flops_per_s) == (OTHERS, 20 * US, None)
    assert one.to_dict()["flops"] == 2 * flops


def test_a_stated_peak_takes_the_place_of_the_tables(tmp_path):
    found = gemms_of(products(tmp_path, device="1e13").steps[0])
    assert found[0].of_ceiling == pytest.approx(found[0].flops_per_s / 1e13)


@pytest.mark.parametrize("markdown", [True, False])
def test_products_are_a_table_of_their_own(tmp_path, markdown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = as_text(products(tmp_path), "gemm", markdown=markdown)
    assert "of ceiling" in text
    assert "512x256x128" in text
    assert "67.1 MFLOP" in text


def test_a_trace_without_shapes_is_an_error_with_a_way_out(tmp_path):
    found = explain([read_trace(two_kernels_a_step(3).write(tmp_path / "t.json"))])
    with pytest.raises(ConfigError, match=r"t\.json has no shapes.*record_shapes=True.*by='kernel'"):
        gemms_of(found.steps[0])
