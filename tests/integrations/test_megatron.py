"""Explicit calls as a Megatron-style loop makes them, against integers that are derived here.

The nine behaviours are those that Megatron-Bridge's pull request 3839 lists for its own accumulator:

1. without boundaries, each row is one segment;                  5. micro-batches add up;
2. with boundaries, attention is the sum over their segments;    6. no tokens, nothing happens;
3. a padded tail is cut at `cu_seqlens_argmin`;                  7. image and video grids add up;
4. unpadded boundaries go before padded ones;                    8. empty boundaries are as none;
9. a pack of 32 samples has 1/32 of the attention of one long sample.
"""

import sys

import pytest
import torch

from headway import Workload, load_cost_model
from headway.count import CostModel, models
from headway.count.rows import Gradient, Parameter, Row
from headway.devices import Peak
from headway.errors import UsageError, WorkloadError
from headway.integrations import FlopsAccumulator
from headway.meter import Meter
from helpers.device import Clock
from helpers.processes import free_port, run_processes

PEAK = Peak("test device", 1e30, "fp32", "made up for a test")
# FLOPs of forward and both gradients: 18 per token, 12 per causal pair, 30 per patch, 6 per pair of patches of a frame
ROWS = {"tokens": 6, "pairs:causal": 4, "patches": 10, "patch_pairs:frame": 2}
COST_MODEL = CostModel(
    name="one-of-each",
    rows=tuple(
        Row(
            module=f"part{i}",
            op="linear",
            component="language.mlp",
            driver=driver,
            forward=forward,
            gradients=(Gradient("dgrad", forward, 1), Gradient("wgrad", forward, 1)),
        )
        for i, (driver, forward) in enumerate(ROWS.items())
    ),
    parameters=(Parameter("part0.weight", 3, 3, "language.mlp"),),
)


def flops(tokens, pairs, patches=0, frame_pairs=0):
    return 18 * tokens + 12 * pairs + 30 * patches + 6 * frame_pairs


def causal(*lengths):
    """Count (query, key) pairs on and below the diagonal."""
    return sum(s * (s + 1) // 2 for s in lengths)


def boundaries(*ends, tail=()):
    return torch.tensor([[0, *ends, *tail]], dtype=torch.int32)


def tokens_of(rows, slots):
    return torch.zeros(rows, slots, dtype=torch.long)


def accumulator(**options):
    return FlopsAccumulator(Meter(COST_MODEL, peak=PEAK, log_every=1), **options)


def step_of(*calls, **options):
    """Run one optimizer step of (tokens, boundaries and grids) per micro-batch; returns its window."""
    measured = accumulator(**options)
    for tokens, given in calls:
        measured.accumulate(tokens, **given)
    return measured.step()


def test_1_without_boundaries_each_row_is_one_segment():
    window = step_of((tokens_of(3, 8), {}))
    assert (window.tokens, window.slots, window.segments) == (24, 24, 3)
    assert window.flops.total == flops(24, causal(8, 8, 8))  # 108 pairs; half of 3 x 8^2 would leave out the diagonal


def test_2_with_boundaries_attention_is_the_sum_over_their_segments():
    window = step_of((tokens_of(1, 10), {"cu_seqlens": boundaries(3, 10)}))
    assert window.flops.total == flops(10, causal(3, 7))  # 6 + 28 pairs, not the 55 of one segment of 10
    flat = step_of((tokens_of(1, 10), {"cu_seqlens": boundaries(3, 10)[0]}))
    assert flat.flops == window.flops


@pytest.mark.parametrize("argmin", [3, torch.tensor([[3]], dtype=torch.int32), None])
def test_3_a_padded_tail_is_cut_at_argmin(argmin):
    window = step_of((tokens_of(1, 12), {"cu_seqlens": boundaries(3, 10, tail=(-1, -1)), "cu_seqlens_argmin": argmin}))
    assert (window.tokens, window.slots, window.segments) == (
        10,
        12,
        2,
    )  # two slots after the last boundary are padding
    assert window.flops.total == flops(10, causal(3, 7))


def test_3_an_argmin_of_zero_cuts_nothing():
    # torch.argmin gives 0 where no tail of -1 was appended; cutting there would fall back to one segment of 10
    window = step_of((tokens_of(1, 10), {"cu_seqlens": boundaries(3, 10), "cu_seqlens_argmin": torch.tensor(0)}))
    assert window.flops.total == flops(10, causal(3, 7))


def test_4_unpadded_boundaries_go_before_padded_ones():
    padded = {"cu_seqlens": boundaries(4, 12, tail=(-1,)), "cu_seqlens_argmin": torch.tensor(3)}
    real = {"cu_seqlens_unpadded": boundaries(3, 8, tail=(-1,)), "cu_seqlens_unpadded_argmin": torch.tensor(3)}
    window = step_of((tokens_of(1, 12), {**padded, **real}))
    assert (window.tokens, window.slots) == (8, 12)
    assert window.flops.total == flops(8, causal(3, 5))  # padding is neither billed per token nor in pairs
    assert step_of((tokens_of(1, 12), real)).flops == window.flops


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_5_micro_batches_add_up_and_a_step_starts_from_nothing(accumulation):
    lengths = [3, 5, 2, 6, 1, 7, 4, 4]  # pairs of 8 tokens: four packs
    packs = [lengths[i : i + 2] for i in range(0, 8, 2)]
    of_steps = accumulator()
    windows = []
    for _ in range(2):
        per_micro = 4 // accumulation
        for i in range(accumulation):
            given = [s for pack in packs[i * per_micro : (i + 1) * per_micro] for s in pack]
            ends = torch.tensor(given).cumsum(0).tolist()
            of_steps.accumulate(tokens_of(1, 8 * per_micro), cu_seqlens=boundaries(*ends))
        windows.append(of_steps.step())
    assert [w.flops.total for w in windows] == [flops(32, causal(*lengths))] * 2
    assert windows[0].flops == COST_MODEL.count(Workload(lengths))  # the ledger
    plain = Meter(COST_MODEL, peak=PEAK, log_every=1)
    plain.count(Workload(lengths))
    assert plain.step().flops == windows[0].flops


def test_6_no_tokens_bill_nothing():
    window = step_of((None, {"cu_seqlens": boundaries(3, 10)}), (tokens_of(1, 4), {}))
    assert window.flops.total == flops(4, causal(4))
    inner_stage = accumulator()
    inner_stage.accumulate(None)
    assert inner_stage.step().flops.total == 0


def test_7_image_and_video_grids_add_up():
    grids = {"image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]]), "video_grid_thw": torch.tensor([[3, 2, 4]])}
    window = step_of((tokens_of(1, 20), grids), (tokens_of(1, 20), {"image_grid_thw": torch.zeros(0, 3).long()}))
    # 24 + 4 + 3 x 8 patches, each attending within its own frame: 24^2 + 4^2 + 3 x 8^2 pairs
    assert tuple(window.entries[name] for name in ("images", "videos", "patches")) == (2, 1, 52)
    assert window.flops.total == flops(40, causal(20, 20), 52, 784)


@pytest.mark.parametrize("empty", [torch.zeros(0, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)])
def test_8_empty_boundaries_are_as_none(empty):
    assert step_of((tokens_of(2, 8), {"cu_seqlens": empty})).flops.total == flops(16, causal(8, 8))


def test_9_a_pack_of_32_samples_has_a_32nd_of_the_attention_of_one():
    pack = step_of((tokens_of(1, 8192), {"cu_seqlens": boundaries(*range(256, 8193, 256))}))
    one = step_of((tokens_of(1, 8192), {}))
    assert pack.flops.total == flops(8192, 32 * 256 * 257 // 2)
    assert one.flops.total == flops(8192, 8192 * 8193 // 2)
    # squares differ by 32 exactly; with the diagonal that every token attends to, by 8193 / 257 = 31.88
    assert (one.flops.total - 18 * 8192) * 257 == (pack.flops.total - 18 * 8192) * 8193


def test_a_pack_of_qwen3_8b_costs_what_its_configuration_says():
    meter = Meter(load_cost_model("qwen3-8b"), peak=PEAK, log_every=1)
    measured = FlopsAccumulator(meter)
    measured.accumulate(tokens_of(1, 4096), cu_seqlens=boundaries(1024, 2048, 4096, tail=(-1,)), cu_seqlens_argmin=4)
    # 36 layers of width 4096: 32 and 8 heads of 128, a feed-forward of 12288, a vocabulary of 151936
    per_token = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288) + 4096 * 151936
    pairs = causal(1024, 1024, 2048)
    assert measured.step().flops.total == 3 * (2 * per_token * 4096 + 36 * 4 * 4096 * pairs)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_context_parallel_ranks_together_bill_what_one_would(size):
    # each rank holds a share of the row, boundaries are those of the whole row
    share, given = tokens_of(1, 16 // size), {"cu_seqlens": boundaries(5, 16)}
    window = step_of((share, given), context_parallel_size=size)
    assert (window.slots, window.flops.total) == (16, flops(16, causal(5, 11)))
    assert step_of((share, given), context_parallel_size=size, billed=False).flops.total == 0
    rows = step_of((share, {}), context_parallel_size=size)
    assert rows.flops.total == flops(16, causal(16))


def test_megatron_bridges_own_call_bills_the_same_as_it_is():
    # as its qwen3_vl_step of 22 Aug 2026 calls accumulate_flops_metadata, with the grids added
    grid = torch.tensor([[1, 4, 6]])
    stats = (torch.tensor(24), torch.tensor(24**2), torch.tensor(6))
    given = {"cu_seqlens": boundaries(3, 10), "image_grid_thw": grid}
    own, plain = accumulator(), accumulator()
    for stage in (0, 1, 2):  # chunks of an interleaved pipeline that see the same micro-batch
        own.accumulate(object(), tokens_of(1, 10), vp_stage=stage, vision_patch_stats=stats, **given)
    own.accumulate(object(), tokens_of(1, 10), vp_stage=None, vision_patch_stats=(0, 0, 0), num_vision_patches=0)
    plain.accumulate(tokens_of(1, 10), **given)
    plain.accumulate(tokens=tokens_of(1, 10))
    assert own.step().flops == plain.step().flops


@pytest.mark.parametrize("size", [1, 2])
def test_a_configured_row_length_makes_a_share_a_row(size):
    # as gpt_step calls it: dense rows are split between context-parallel ranks before the forward step
    share = tokens_of(2, 8)
    dense = step_of((share, {"config_seq_len": 8 * size}), context_parallel_size=size)
    assert dense.flops.total == flops(16 * size, causal(8 * size, 8 * size))
    assert step_of((share, {"config_seq_len": 16})).flops.total == flops(32, causal(16, 16))
    # boundaries go before it
    packed = step_of((tokens_of(1, 10), {"config_seq_len": 40, "cu_seqlens": boundaries(3, 10)}))
    assert packed.flops.total == flops(10, causal(3, 7))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"config_seq_len": 12}, "config_seq_len=12 .* have 8 slots and context_parallel_size is 1"),
        ({"config_seq_len": 4}, "config_seq_len=4 "),
        ({"num_vision_patches": 40}, "num_vision_patches says how many .* image_grid_thw="),
        ({"num_vision_patches": torch.tensor(8)}, "num_vision_patches says how many"),
        ({"vision_patch_stats": (24, 576, 6)}, "vision_patch_stats says how many"),
        ({"cross_cu_seqlens": boundaries(5)}, r"cross attention reads.*Workload\(lengths, sources="),
    ],
)
def test_what_the_grids_or_lengths_are_missing_for_says_what_to_hand_over(given, says):
    with pytest.raises(UsageError, match=says):
        accumulator().accumulate(tokens_of(1, 8), **given)


def test_boundaries_in_the_place_of_tokens_are_not_taken_for_them():
    for given in ((tokens_of(1, 8), boundaries(3, 8)), ()):
        with pytest.raises(UsageError, match=r"takes tokens alone.* every other argument by its name"):
            accumulator().accumulate(*given)


def test_an_evaluation_is_left_out():
    clock = Clock()
    measured = FlopsAccumulator(Meter(COST_MODEL, peak=PEAK, log_every=1, clock=clock))
    measured.accumulate(tokens_of(1, 8))
    with measured.evaluation():
        measured.accumulate(tokens_of(1, 4096))
        clock.now_s += 60.0
    clock.now_s += 1.0
    window = measured.step(loss=0.5)
    assert (window.tokens, window.wall_s, window.extra) == (8, 1.0, {"loss": 0.5})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cu_seqlens": torch.tensor([2, 8])}, "cu_seqlens must start at 0, got 2"),
        ({"cu_seqlens": torch.tensor([0, 6, 4, 8])}, "must not decrease, got 6 followed by 4 at index 2"),
        (
            {"cu_seqlens": torch.tensor([0, 4, 16])},
            "boundaries end at 16, but the batch holds 1 x 8 slots.*context_par",
        ),
        ({"cu_seqlens_unpadded": torch.tensor([0, 3, 9])}, "boundaries end at 9, but the batch holds 1 x 8 slots"),
        (
            {"cu_seqlens": torch.tensor([0, 4, 8]), "cu_seqlens_unpadded": torch.tensor([0, 4, 12])},
            "8 slots cannot hold 12 tokens",
        ),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, "cu_seqlens must be whole numbers"),
        ({"image_grid_thw": torch.tensor([4, 6])}, r"images must be a list of grids \(t, h, w\)"),
    ],
)
def test_boundaries_of_another_batch_are_refused(given, says):
    with pytest.raises(WorkloadError, match=says):
        accumulator().accumulate(tokens_of(1, 8), **given)


def test_mistakes_of_the_loop_are_named():
    with pytest.raises(UsageError, match="context_parallel_size=0: it is a number of ranks"):
        accumulator(context_parallel_size=0)
    with pytest.warns(UserWarning, match="step 1 ends without a batch"):
        accumulator().step()


# two pipelines of two stages: ranks 0 and 1 are the first stages of two data-parallel replicas, 2 and 3 the last ones,
# which have tokens too, as in Megatron
LOOP = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from headway.count import models
from headway.devices import Peak
from headway.integrations import FlopsAccumulator
from headway.meter import Meter

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
meter = Meter(models.load(Path(sys.argv[1])), peak=Peak("test", 1e12, "fp32", "test"), log_every=2)
replicas = max(world // 2, 1)
accumulator = FlopsAccumulator(meter, billed=rank < replicas)
packs = [[3, 7], [10], [1, 9], [5, 5]]
for step in range(2):
    for lengths in packs[rank % replicas :: replicas]:
        ends = torch.tensor([0, *lengths]).cumsum(0)
        accumulator.accumulate(torch.zeros(1, 10, dtype=torch.long), cu_seqlens=ends)
    window = accumulator.step()
print(window.world_size, window.tokens, window.flops.total, window.peak_flops_per_s)
meter.close()
"""


@pytest.mark.dist
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_are_summed_and_stages_of_one_pipeline_bill_once(tmp_path, world):
    path, script = tmp_path / "model.json", tmp_path / "loop.py"
    models.save_cost_model(COST_MODEL, path)
    script.write_text(LOOP)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = run_processes([sys.executable, script, path], world, env=place if world == 1 else None)
    total = 2 * flops(40, causal(3, 7, 10, 1, 9, 5, 5))
    assert [rank.stdout for rank in ended] == [f"{world} 80 {total} {world * 1e12}\n"] * world


@pytest.mark.gpu
def test_tensors_on_an_accelerator_are_read_late_and_never_waited_for():
    meter = Meter(COST_MODEL, peak=PEAK, log_every=1000)
    measured = FlopsAccumulator(meter)
    assert meter.device.type == "cuda"
    given = {
        "cu_seqlens": boundaries(3, 10, tail=(-1,)).cuda(),
        "cu_seqlens_argmin": torch.tensor(3).cuda(),
        "image_grid_thw": torch.tensor([[1, 4, 6]]).cuda(),
    }
    tokens = tokens_of(1, 10).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            measured.accumulate(tokens, **given)
            measured.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meter.close().flops.total == 3 * flops(10, causal(3, 7), 24, 24**2)
