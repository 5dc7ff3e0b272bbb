"""Whose time each event's is: components of the model, and named activities around it."""

import pytest

from headway.explain.attribution import Phase
from headway.explain.breakdown import attributed_share, break_down
from headway.explain.budget import NO_COMPONENT
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import BACKWARD_THREAD, US, WrittenTrace, sidecar

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
