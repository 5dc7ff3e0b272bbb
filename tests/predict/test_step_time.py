"""Predicted steps: by hand on written-out models, and against what the lines of `headway explain` mean."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.config import load_config
from headway.config.optim import OptimConfig
from headway.count import CostModel, Workload, load_cost_model
from headway.count.activations import SavedActivations, SavedBlock, shipped_activations
from headway.count.rows import Gradient, Parameter, Row
from headway.count.updating import RULES, trained_by_rule
from headway.devices import named_device
from headway.optim import Optimizer
from headway.predict.engine import Engine
from headway.predict.kernel_bytes import clipping_bytes, loss_bytes, own_update, update_bytes
from headway.predict.recipe import State, state_of
from headway.predict.speeds import HEAD_SIZE, PRODUCTS, Cases, Speeds
from headway.predict.step_time import LOSS_LAUNCHES, StepTimes, StepWork, product_shape, shapes_of
from headway.predict.weights import values_of_experts

SPEEDS = Speeds("mine", 100.0, Cases.exact(10.0), "", {(8, 4, 2): 50.0}, {8: (20.0, 10.0)}, host_s=0.0)
EAGER = State(compute_bytes=4)
ONE = Fraction(1)
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def tiny(**changes):
    """A model of one linear module of 4 x 2 and attention of 3 FLOPs a pair, in one block."""
    linear = Row("l", "linear", "language.mlp", "tokens", 16, (Gradient("dgrad", 16, 1), Gradient("wgrad", 16, 1)),
                 block="layers.0", recomputed=True, features=(4, 2))  # fmt: skip
    attention = Row("a", "attention", "language.attention", "pairs:causal", 3, (Gradient("dgrad", 6, 1),),
                    block="layers.0", recomputed=True)  # fmt: skip
    return replace(CostModel("tiny", (linear, attention), (Parameter("l.weight", 8, 8, "language.mlp"),)), **changes)


def saved(per_token=5):
    block = SavedBlock(
        {"tokens": per_token * ONE}, {"tokens": ONE}, {"tokens": ONE}, {}, {"forward": 2 * ONE, "backward": 4 * ONE}
    )
    return SavedActivations({"": SavedBlock({}, {}, {}, {}), "layers.0": block})


def work(cost_model, **changes):
    pack = Workload([8])
    return replace(StepWork(cost_model.count(pack), pack, packs=1, tokens=8), **changes)


def seconds(step):
    return {line.key: line.seconds.expected for line in step.lines}


def test_a_step_by_hand():
    step = StepTimes(tiny(), saved(), SPEEDS).predict(work(tiny()), EAGER)
    flops = 3 * 16 * 8 + 9 * 36
    assert step.flops == flops
    found = seconds(step)
    assert found["useful"] == flops / 100
    assert found["ceiling"] == pytest.approx(flops / 50 - flops / 100)
    assert found.get("slow.language.mlp", 0) == pytest.approx(0)  # every product runs at the one rate measured
    assert found["slow.language.attention"] == pytest.approx(3 * 36 / 20 + 6 * 36 / 10 - 9 * 36 / 50)
    assert found["memory"] == 5 * 5 * 8 / 10  # each saved byte twice in forward, three times in backward
    assert found["optimizer"] == (4 * 4 + 2 * 4 + 2 * 4 * 2) * 8 / 10
    assert step.step_s == pytest.approx(sum(found.values()))
    assert step.mfu.expected == pytest.approx(flops / step.step_s / 100)
    assert step.tokens_per_s.expected == pytest.approx(8 / step.step_s)


def test_copies_to_the_host_take_what_forward_and_backward_do_not_hide():
    full = replace(EAGER, recompute="full", inputs_on_host=True)
    without = StepTimes(tiny(), saved(), SPEEDS).predict(work(tiny()), replace(full, inputs_on_host=False))
    num_bytes = 8  # of the block's input
    hidden, shown = (
        StepTimes(tiny(), saved(), replace(SPEEDS, host_bytes_per_s=rate)).predict(work(tiny()), full)
        for rate in (1e6, 1e-3)
    )
    assert "copies" not in seconds(hidden)
    # the device reads them in forward and writes them in backward, 10 bytes a second
    assert hidden.step_s == pytest.approx(without.step_s + 2 * num_bytes / 10)
    passes = sum(s for key, s in seconds(shown).items() if key not in ("copies", "optimizer"))
    assert seconds(shown)["copies"] == pytest.approx(2 * num_bytes / (0.8 * 1e-3) - passes)


def test_packs_that_are_made_too_slowly_are_waited_for():
    times = StepTimes(tiny(), saved(), SPEEDS)
    ready = times.predict(work(tiny()), EAGER)
    assert times.predict(work(tiny(), making_s=0.9 * ready.step_s), EAGER) == ready
    late = times.predict(work(tiny(), making_s=ready.step_s + 2), EAGER)
    assert seconds(late)["idle.data"] == pytest.approx(2)
    assert late.step_s == pytest.approx(ready.step_s + 2)


def test_what_runs_in_part_takes_the_host_in_part():
    host = replace(SPEEDS, host_s=1.0, runs_ahead=False)

    def launched(cost_model, **changes):
        step = StepTimes(cost_model, saved(), host).predict(work(cost_model), replace(EAGER, **changes))
        return seconds(step)["idle.launch"]

    # the update: five for the norm, four for the factor, and of both groups the steps, the factor and AdamW
    update = 5 + 4 + 2 * 3
    assert launched(tiny()) == pytest.approx(LOSS_LAUNCHES + 6 + update)  # forward and backward
    assert launched(tiny(), recompute="full") == pytest.approx(LOSS_LAUNCHES + 8 + update)
    assert launched(tiny().freeze(["*"])) == pytest.approx(LOSS_LAUNCHES + 2)


def test_recomputation_costs_forward_again_and_its_bytes():
    times = StepTimes(tiny(), saved(), SPEEDS)
    plain, again = (seconds(times.predict(work(tiny()), replace(EAGER, recompute=how))) for how in ("none", "full"))
    assert "recomputation" not in plain
    assert again["recomputation"] == pytest.approx((16 * 8 + 3 * 36) / 50)
    assert again["memory"] == plain["memory"] + 2 * 5 * 8 / 10
    assert again["useful"] == plain["useful"]


def test_a_frozen_model_moves_and_computes_its_forward_alone():
    frozen = tiny().freeze(("*",))
    step = seconds(StepTimes(frozen, saved(), SPEEDS).predict(work(frozen), EAGER))
    assert step["useful"] == (16 * 8 + 3 * 36) / 100
    assert step["memory"] == 2 * 5 * 8 / 10
    assert "optimizer" not in step


def test_padding_accumulation_imbalance_and_launches_have_their_lines():
    times = StepTimes(tiny(), saved(), SPEEDS)
    padded = seconds(times.predict(work(tiny(), pack=Workload([8], slots=16)), EAGER))
    assert padded["padding"] == pytest.approx(3 * 16 * 8 / 50)  # eight slots more in the linear module
    plain, twice = (times.predict(work(tiny(), packs=n), EAGER) for n in (1, 2))
    more = seconds(twice)["memory"] - seconds(plain)["memory"]
    assert more == pytest.approx(5 * 5 * 8 / 10 + 2 * 3 * 4 * 8 / 10)  # gradients are added to those that are there
    uneven = times.predict(work(tiny(), balance=0.5), EAGER)
    assert seconds(uneven)["communication.waiting"] == pytest.approx(plain.step_s)
    late, behind = (
        StepTimes(tiny(), saved(), replace(SPEEDS, host_s=25.0, runs_ahead=ahead)).predict(work(tiny()), EAGER)
        for ahead in (True, False)
    )
    assert late.step_s == pytest.approx(875.0)  # 20 launches of the pack, and 15 of the update
    assert seconds(late)["idle.launch"] == pytest.approx(875 - plain.step_s)
    assert behind.step_s == pytest.approx(875 + plain.step_s)


def test_devices_share_the_work_and_the_optimizer():
    times = StepTimes(tiny(), saved(), SPEEDS)
    one = times.predict(work(tiny()), EAGER)
    count = sum([tiny().count(Workload([8]))] * 3, tiny().count(Workload([8])))
    four = times.predict(work(tiny(), flops=count, devices=4, shards=4, tokens=32), EAGER)
    assert seconds(four)["useful"] == seconds(one)["useful"]
    assert seconds(four)["optimizer"] == seconds(one)["optimizer"] / 4
    assert four.tokens_per_s.expected > 4 * one.tokens_per_s.expected


def test_the_cases_of_a_datasheet_stand_in_their_order_and_every_line_adds_up():
    cost_model = load_cost_model("qwen3-8b")
    times = StepTimes(
        cost_model, shipped_activations("qwen3-8b", "bfloat16"), Speeds.of_device(named_device("H100"), "bf16")
    )
    pack = Workload([4096, 4096])
    step = times.predict(StepWork(cost_model.count(pack), pack, 4096, 1, 8192), State(fused=True, chunk=2048))
    assert step.seconds.best < step.seconds.expected < step.seconds.worst
    sums = [sum(case) for case in zip(*(line.seconds for line in step.lines), strict=True)]
    assert step.seconds == pytest.approx(sums)
    assert step.mfu.best < PRODUCTS.best


def test_shapes_of_products_are_those_that_pytorch_runs():
    assert [product_shape(phase, 8, (4, 2)) for phase in ("forward", "recompute", "dgrad", "wgrad")] == [
        (8, 4, 2), (8, 4, 2), (8, 2, 4), (2, 8, 4),
    ]  # fmt: skip
    assert product_shape("forward", 8, None) is None
    assert shapes_of(tiny(), [8]) == [(2, 8, 4), (8, 2, 4), (8, 4, 2)]


def test_attention_goes_by_the_pairs_that_a_query_of_its_own_tower_sees():
    picture = Row("v", "linear", "vision.mlp", "patches", 16, block="visual.0", features=(4, 2))
    seen = Row("w", "attention", "vision.attention", "patch_pairs:frame", 3, block="visual.0")
    model = replace(tiny(), rows=(*tiny().rows, picture, seen))
    pack = Workload([8], images=[(1, 4, 4)] * 3)
    asked = []

    class Noted(Speeds):
        def attention_s(self, forward, backward, pairs_per_query, head_size):
            if forward + backward and head_size == HEAD_SIZE:  # as these rows say nothing of heads
                asked.append((forward, pairs_per_query))
            return Cases.exact(0.0)

    once = StepWork(model.count(pack), pack, packs=1, tokens=8)
    StepTimes(model, saved(), Noted("mine", 100.0, Cases.exact(10.0), "")).predict(once, EAGER)
    assert sorted(asked) == [(3 * 36, 4.5), (3 * 3 * 16**2, 16)]  # three pictures of 16 patches, each seen by 16
    asked.clear()
    four = replace(once, flops=model.count(Workload([8] * 4, images=[(1, 4, 4)] * 12, packs=4)), packs=4, tokens=32)
    StepTimes(model, saved(), Noted("mine", 100.0, Cases.exact(10.0), "")).predict(four, EAGER)
    assert [pairs for _, pairs in sorted(asked)] == [4.5, 16]


@pytest.mark.parametrize(
    ("case", "model", "attention", "recompute", "most"),
    [
        ("text, liger, compiled", "qwen2.5-7b", "auto", "full,-attention", 0.04),
        ("text, liger, compiled, attention cudnn", "qwen2.5-7b", "cudnn", "full,-attention", 0.04),
        ("image, torch, compiled, attention cudnn", "qwen3-vl-8b", "cudnn", "full", 0.06),
    ],
)
def test_steps_take_as_long_as_on_an_h200(case, model, attention, recompute, most):
    (path,) = RESULTS.glob("plan_measured_*.json")
    record = json.loads(path.read_text())
    took = next(row["step_s"] for row in record["rows"] if row["case"] == case)
    speeds = Speeds.of_device(named_device("H200"), "bf16", attention=attention)
    cost_model = load_cost_model(model)
    times = StepTimes(
        cost_model, shipped_activations(model, "bfloat16"), speeds, engine=Engine("of then", update="separate")
    )  # as then
    state = State(weight_bytes=2, moment_bytes=2.0, recompute=recompute, fused=True, chunk=1024)
    packs = [Workload(pack["segments"], images=pack["images"]) for pack in record["packs"][case.partition(",")[0]]]
    steps = [times.predict(StepWork(cost_model.count(pack), pack, 1, pack.tokens), state).step_s for pack in packs]
    assert sum(steps) / len(steps) == pytest.approx(took, rel=most)


def test_a_loss_moves_the_operands_of_its_operations():
    model = load_cost_model("qwen3-vl-30b-a3b")
    width, vocabulary = 2048, 151_936
    held = State(weight_bytes=2)
    torch, fused = (loss_bytes(model, 8192, held, fused=is_fused) for is_fused in (False, True))
    # to float32 and back; three reads and a write of log-softmax, which is exponentiated in place
    assert torch == 8192 * vocabulary * (6 + 16 + 8 + 6) + width * vocabulary * (4 + 8 + 6 + 4)
    assert fused == 8192 * vocabulary * (2 + 2 + 2) + width * vocabulary * (4 + 6 + 4 + 4)
    # the head's elementwise kernels of this pack took 14.8 ms on a H200, at some 0.8 of its 4.8 TB/s
    assert torch / (0.8 * 4.8e12) == pytest.approx(14.8e-3, rel=0.12)
    frozen = model.freeze(("lm_head.weight",))
    assert torch - loss_bytes(frozen, 8192, held, fused=False) == width * vocabulary * 22
    assert loss_bytes(tiny(), 8192, held, fused=False) == 0


def test_rows_for_experts_are_sorted_and_added_up_by_index():
    model, pack = load_cost_model("qwen3-vl-30b-a3b"), Workload([8192])
    activations = shipped_activations("qwen3-vl-30b-a3b", "bfloat16")
    speeds = Speeds.of_device(named_device("H200"), "bf16")

    def memory_s(model, recompute, **kernels):
        times = StepTimes(model, activations, speeds, engine=Engine("another", **kernels))
        step = times.predict(StepWork(model.count(pack), pack, 1, 8192), State(recompute=recompute, fused=True))
        return seconds(step)["memory"]

    for recompute, sorts in (("none", 1), ("full", 2)):
        added = memory_s(model, recompute) - memory_s(model, recompute, sorts_rows=False)
        # of 48 layers: eight rows of 2,048 numbers a token, twice at 0.22 of the rate; its router's choice and sorts
        slower = 2 * 2 * 8 * 2048 * 8192 / (0.8 * 4.8e12) * (1 / 0.22 - 1)
        assert added == pytest.approx(48 * (slower + sorts * (110e-6 + 8192 * 8.5e-9)))
    routed = {
        name: values_of_experts(load_cost_model(name), shipped_activations(name, "bfloat16"))
        for name in ("qwen3-8b", "deepseek-v2-lite")
    }
    assert routed["qwen3-8b"] == {}
    assert {*routed["deepseek-v2-lite"].values()} == {6 * 2048}  # shared ones are not chosen


def test_an_update_counts_the_bytes_of_all_its_passes():
    types = {"float32": (4, 4), "bfloat16": (2, 2), "8bit": (4, 1)}
    held = {name: State(weight_bytes=weight, moment_bytes=moment) for name, (weight, moment) in types.items()}
    one, apart = (
        {name: update_bytes(state, 10, update) for name, state in held.items()} for update in ("one pass", "separate")
    )
    # read and written, gradients read: of weights and moments in float32 both ways
    assert one == {"float32": 280, "bfloat16": 140, "8bit": 160}
    # 16.1 billion numbers took 690 ms on a H200, with clipping that read and scaled gradients in bfloat16 beforehand
    assert apart["float32"] == one["float32"]
    took = (apart["bfloat16"] + 3 * 2 * 10) / 10 * 16.116e9 / (0.8 * 4.8e12)
    assert took == pytest.approx(0.690, rel=0.03)
    assert apart["8bit"] > one["8bit"]


class Moved(TorchDispatchMode):
    """Adds up the bytes that operations read and write, products left out."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
        if func.is_view or name in ("_unsafe_view", "detach", "empty", "new_empty", "bmm", "baddbmm"):
            return result
        # of AdamW's fused kernel gradients are written only if they are scaled; a copy does not read what it overwrites
        changed = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info
            and argument.alias_info.is_write
            and (name, argument.name) != ("_fused_adamw_", "grads")
        ]
        is_overwritten = changed and ("copy_" in name or "rand" in name)
        read, written = bytes_of_tensors((args, kwargs)), bytes_of_tensors(changed or result)
        self.num_bytes += read + (0 if is_overwritten else written)
        return result


def bytes_of_tensors(values):
    return sum(value.nbytes for value in tree_leaves(values) if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("held", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_an_update_by_copies_is_planned_to_move_what_torch_dispatches(rule, dtype, held):
    parameters = [torch.nn.Parameter(torch.randn(512, 512).to(dtype)) for _ in range(4)]
    groups = [{"params": parameters, "rule": rule, "lr_factor": 1.0, "weight_decay": 0.1}]
    optimizer = Optimizer(groups, OptimConfig(steps=1, lr=1e-3, state=held))
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()  # the first makes the states
    with Moved() as moved:
        optimizer.step()
    state = State(weight_bytes=dtype.itemsize, moment_bytes={"float32": 4, "bfloat16": 2, "8bit": 1 + 4 / 256}[held])
    planned = update_bytes(state, 4 * 512 * 512, "separate", rule)
    assert planned == pytest.approx(moved.num_bytes, rel=0.25)


@pytest.mark.parametrize(
    ("setting", "is_kernel"),
    [("state=auto", True), ("state=8bit", False), ("name=muon", False)],
)
def test_a_plan_prices_one_pass_only_where_the_kernel_for_it_runs(setting, is_kernel):
    """AdamW of 16-bit numbers has a kernel on CUDA; Muon and moments of 8 bits are updated by copies."""
    model = load_cost_model("qwen2.5-7b")
    settings = (f"optim.{setting}", "run.dtype=bfloat16-params", "run.device=cuda")
    config = load_config(ROOT / "recipes" / "qwen2.5-7b-text-81920.yaml", settings)
    state = state_of(config, "bfloat16", "none")
    updates = {rule: own_update(state, rule) for rule in trained_by_rule(model, state.rule)}
    assert updates[state.rule] == ("one pass" if is_kernel else "separate")


def test_clipping_moves_what_the_norm_reads_and_no_kernel_scales_on_its_way():
    types = {"float32": (4, 4), "bfloat16": (2, 2), "moments in bfloat16": (4, 2), "8bit": (2, 1)}
    held = {name: State(weight_bytes=weight, moment_bytes=moment) for name, (weight, moment) in types.items()}
    for update, scaled in (
        ("one pass", {"float32": 8, "bfloat16": 0, "moments in bfloat16": 0, "8bit": 8}),
        ("separate", dict.fromkeys(types, 8)),
    ):
        for name, state in held.items():
            assert clipping_bytes(state, 10, update) == 10 * (state.weight_bytes + scaled[name])
            assert clipping_bytes(replace(state, clips=False), 10, update) == 10 * state.weight_bytes
