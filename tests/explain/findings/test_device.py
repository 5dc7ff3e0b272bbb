"""Traces written by hand, in which what runs could be less or faster."""

import pytest

from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import US, paced_steps, products_in_a_row, sidecar, two_kernels_a_step

TRAIN = sidecar(loop="headway train")
HOPPER = [{"name": "NVIDIA H100", "computeMajor": 9, "computeMinor": 0}]


def found_in(tmp_path, trace, **beside):
    found = explain([read_trace(trace.write(tmp_path / "t.json", **beside))])
    return {one.id: one for one in found.findings}


def test_a_side_that_is_no_multiple_of_eight_is_named(tmp_path):
    found = found_in(tmp_path, products_in_a_row([[4096, 768], [768, 50257]], count=2, us=40))["misaligned-gemms"]
    assert found.ns == 40 * US  # half of what they took
    assert "a side of 50,257" in found.seen
    assert "50,304" in found.next


def test_an_aligned_product_is_no_finding(tmp_path):
    found = found_in(tmp_path, products_in_a_row([[4096, 768], [768, 50304]], count=2, us=40))
    assert "misaligned-gemms" not in found


def test_a_batched_product_has_lengths_and_no_vocabulary(tmp_path):
    def step(trace, at, number):
        trace.launched("gemm", at + US, at + 1000 * US, 100 * US, number + 1, operator="aten::bmm",
                       operands=([[16, 3137, 64], [16, 64, 3137]], "float"))  # fmt: skip

    found = found_in(tmp_path, paced_steps(step))["misaligned-gemms"]
    assert "a side of 3,137" in found.seen
    assert "a sequence length or a number of patches" in found.cause
    assert "vocabulary" not in found.cause + found.next


def test_a_norm_of_many_kernels_is_found(tmp_path):
    def step(trace, at, number):
        begin = at + 1000 * US
        trace.launched("gemm", at, begin, 60 * US, number + 90, operator="aten::mm")
        trace.annotation("module:layers.0.norm", at + 10 * US, 50 * US)
        for i, name in enumerate(["pow", "mean", "rsqrt", "mul"]):
            trace.launched(
                name, at + (12 + i) * US, begin + (60 + 10 * i) * US, 10 * US, number + i, operator=f"aten::{name}"
            )

    found = found_in(tmp_path, paced_steps(step))["unfused-chains"]
    assert found.ns == 30 * US  # of four passes over memory three
    assert found.seen.startswith("1 modules without matrix products")


def attention(operator, kernel, **operands):
    def step(trace, at, number):
        trace.annotation("phase:forward", at, 2 * US)
        trace.annotation("module:attn", at, US)
        trace.operator(operator, at, US, **operands)
        trace.call("cudaLaunchKernel", at, US - 100, number + 1)
        trace.kernel(kernel, at + 1000 * US, 40 * US, number + 1)
        trace.launched("gemm", at + US, at + 1040 * US, 60 * US, number + 2, operator="aten::mm")

    return paced_steps(step)


CUDNN = "speed.attention: auto or cudnn, after pip install nvidia-cudnn-frontend"
FLASH, MEMORY = "aten::_flash_attention_forward", "aten::_efficient_attention_forward"
AMPERE, BLACKWELL, TURING = ([{**HOPPER[0], "computeMajor": major}] for major in (8, 10, 7))


@pytest.mark.parametrize(
    ("operator", "kernel", "device", "advice", "part"),
    [
        (MEMORY, "fmha_cutlassF", HOPPER, "speed.attention: auto", 1 / 2),
        (MEMORY, "fmha_cutlassF", AMPERE, "speed.attention: auto", 1 / 2),
        # 1.5 times as fast, where nothing tells the lengths of segments
        (FLASH, "void pytorch_flash::flash_fwd_kernel<64>", HOPPER, f"{CUDNN}; or fa3", 1 / 3),
        (FLASH, "flash_fwd_kernel", BLACKWELL, "SDPBackend.CUDNN_ATTENTION", 1 / 3),
        (FLASH, "flash_fwd_kernel", AMPERE, None, 0),
        (FLASH, "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", HOPPER, None, 0),
        (FLASH, "void cutlass::device_kernel<flash::FlashAttnFwdSm90<64> >", HOPPER, None, 0),
        (MEMORY, "fmha_cutlassF", TURING, None, 0),
        (MEMORY, "fmha_cutlassF", [], None, 0),
    ],
)
def test_attention_is_held_against_the_best_kernel_of_its_device(tmp_path, operator, kernel, device, advice, part):
    found = found_in(tmp_path, attention(operator, kernel), deviceProperties=device, headway=TRAIN)
    assert ("slow-attention" in found) == (advice is not None)
    if advice is not None:
        assert advice in found["slow-attention"].next
        assert found["slow-attention"].ns == pytest.approx(40 * US * part, abs=1)


HEADS = [2, 128]  # heads x head size


@pytest.mark.parametrize(
    ("sizes", "keys", "speedup"),
    [
        # 8,192 tokens in 3 and in 14 segments: half of 2,731 and of 585 keys
        ([[8192, *HEADS]] * 3 + [[4]] * 2, None, 1.5),
        ([[8192, *HEADS]] * 3 + [[15]] * 2, None, 0.6),
        ([[2, 4096, *HEADS]] * 3, None, 1.5),  # a batch of two
        ([[2, 500, *HEADS]] * 3, None, 0.6),
        # the trace tells the pairs of the pack, whatever the mean length is
        ([[8192, *HEADS]] * 3 + [[15]] * 2, 685, 1.4),
        ([[8192, *HEADS]] * 3 + [[4]] * 2, 313, 0.6),
    ],
)
def test_flash_attention_on_hopper_is_slow_where_queries_see_many_keys(tmp_path, sizes, keys, speedup):
    beside = TRAIN
    if keys is not None:
        flops = 4 * keys * 8192 * 2 * 128
        steps = steps_that_say(packs=[{"attention": {"attn": [flops, 2 * flops, 0]}}])
        beside = {**TRAIN, "components": {"attn": "language.attention"}, "steps": steps}
    operands = {"Input Dims": sizes, "Input type": ["c10::BFloat16"] * 3 + ["int"] * (len(sizes) - 3)}
    trace = attention(FLASH, "flash_fwd_kernel", **operands)
    found = found_in(tmp_path, trace, deviceProperties=HOPPER, headway=beside)
    assert ("slow-attention" in found) == (speedup > 1)
    if speedup > 1:
        assert found["slow-attention"].ns == pytest.approx(40 * US * (1 - 1 / speedup), abs=1)


@pytest.mark.parametrize(
    ("memory", "is_found"),
    [
        ({"peak_bytes": 20 << 30, "total_bytes": 80 << 30}, True),
        ({"peak_bytes": 70 << 30, "total_bytes": 80 << 30}, False),
        (None, False),
        ({"peak_bytes": 20 << 30}, False),
        ({"peak_bytes": "much", "total_bytes": None}, False),
    ],
)
def test_recomputation_is_a_finding_where_memory_is_free(tmp_path, memory, is_found):
    beside = {} if memory is None else {"memory": memory}
    found = found_in(tmp_path, two_kernels_a_step(), headway=sidecar(loop="headway train", **beside))
    assert ("recomputation" in found) == is_found
    if is_found:
        assert found["recomputation"].ns == round(8.75 * US)
        assert "60.0 of 80.0 GiB were free" in found["recomputation"].seen
        assert "reached the ceiling" not in found["recomputation"].seen  # no kernel that runs again is seen
        assert "speed.recompute: memory:48GiB" in found["recomputation"].next


def test_what_recomputation_took_is_told_beside_what_its_products_need(tmp_path):
    def step(trace, at, number):
        trace.launched("gemm", at, at + 1000 * US, 40 * US, number + 1, operator="aten::mm")
        node = "autograd::engine::evaluate_function: CheckpointBackward"
        trace.operator(node, at + 10 * US, 20 * US, sequence=number + 5, forward_thread=1)
        trace.annotation("module:blocks", at + 11 * US, 10 * US)  # in backward: it runs again
        trace.launched("gemm", at + 12 * US, at + 1040 * US, 30 * US, number + 2, operator="aten::mm")
        trace.launched("norm", at + 14 * US, at + 1070 * US, 30 * US, number + 3, operator="aten::rms_norm")

    memory = {"peak_bytes": 20 << 30, "total_bytes": 80 << 30}
    found = found_in(tmp_path, paced_steps(step), headway=sidecar(memory=memory))["recomputation"]
    assert found.ns == 60 * US
    # 7,000 FLOPs at a ceiling of 0.8e9 a second
    assert "took 60.0 % of the time, 8.8 % if its products reached the ceiling, and 60.0 of 80.0 GiB" in found.seen


def steps_that_say(**changes):
    step = {**sidecar()["steps"]["1"], **changes}
    return {str(number): step for number in range(10)}


def test_padding_is_found_by_the_slots_without_a_token(tmp_path):
    found = found_in(tmp_path, two_kernels_a_step(), headway=sidecar(steps=steps_that_say(tokens=40, slots=100)))
    assert found["padding"].ns == round(0.6 * 90 * US)
    assert found["padding"].seen.startswith("60.0 % of the slots were padding")
    full = sidecar(steps=steps_that_say(tokens=99, slots=100))
    assert "padding" not in found_in(tmp_path, two_kernels_a_step(), headway=full)


def test_a_vision_tower_that_learns_is_found_by_its_backward(tmp_path):
    flops = {"vision.mlp": {"forward": 10_000, "backward": 20_000}}
    beside = sidecar(
        loop="headway train",
        components={"": "vision.mlp"},
        steps=steps_that_say(useful_flops=flops, recomputed_flops={}),
    )
    found = found_in(tmp_path, two_kernels_a_step(), headway=beside)["vision-tower"]
    assert found.ns == 40 * US  # two thirds of 60
    assert "model.freeze: [vision]" in found.next
    # a fault comes first, though it is smaller: without the tower's backward another model would be trained
    padded = {**beside, "steps": steps_that_say(useful_flops=flops, recomputed_flops={}, tokens=80, slots=100)}
    found = found_in(tmp_path, two_kernels_a_step(), headway=padded)
    assert list(found)[:2] == ["padding", "vision-tower"]
    assert found["padding"].ns < found["vision-tower"].ns


def test_uneven_experts_are_found_where_the_router_tells(tmp_path):
    flops = {"language.experts": {"forward": 10_000, "backward": 20_000}}
    router = {"max_over_mean": 2.0, "worst_max_over_mean": 3.0, "unused": 0}
    steps = steps_that_say(useful_flops=flops, recomputed_flops={}, router=router)
    beside = sidecar(components={"": "language.experts"}, steps=steps)
    assert found_in(tmp_path, two_kernels_a_step(), headway=beside)["uneven-experts"].ns == 30 * US


@pytest.mark.parametrize(
    ("clocks", "lost_us"),
    [
        ({"sm_mhz": 1000, "most_sm_mhz": 2000}, 30),
        ({"sm_mhz": 1900, "most_sm_mhz": 2000}, None),
        (None, None),
        ({"sm_mhz": "none"}, None),
    ],
)
def test_a_clock_below_its_highest_costs_what_computes(tmp_path, clocks, lost_us):
    found = found_in(tmp_path, two_kernels_a_step(), headway=sidecar(clocks=clocks))
    assert [one.ns for one in found.values() if one.id == "throttled-clocks"] == (
        [] if lost_us is None else [lost_us * US]
    )
