"""The meter in real loops, on a clock that the test moves where time matters."""

import gc
import sys
import textwrap
import warnings
import weakref
from dataclasses import replace
from math import nan

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.count import CostModel, Workload
from headway.devices import Peak
from headway.errors import UsageError
from headway.meter import Goodput, Meter
from headway.meter.model_traffic import traffic_of
from headway.tracing import trace
from helpers.device import COST_MODEL, Clock
from helpers.models import tiny_model
from helpers.processes import run_processes
from helpers.runs import read_metrics

# one linear layer of 3 x 5: 30 FLOPs per token and phase, the forward run again under checkpointing
PER_TOKEN = 90
PEAK = Peak("test device", 1e15, "fp32", "made up for a test")  # real time too stays below it


def run(steps, *, clock=None, **options):
    """Meter steps, each given as (seconds, workloads of its micro-batches); returns the meter and its windows."""
    clock = clock or Clock()
    windows = []
    meter = Meter(COST_MODEL, peak=PEAK, on_window=windows.append, clock=clock, **options)
    meter.start()
    for seconds, workloads in steps:
        for workload in workloads:
            meter.count(workload)
        clock.now_s += seconds
        meter.step()
    return meter, windows


def test_a_window_is_total_flops_over_total_time():
    meter, windows = run([(1.0, [Workload([10])]), (3.0, [Workload([20], slots=25)])] * 2, log_every=2)
    assert [w.step for w in windows] == [2, 4]
    first = windows[0]
    assert (first.num_steps, first.tokens, first.slots, first.segments) == (2, 30, 35, 2)
    assert first.flops.total == 30 * PER_TOKEN
    assert first.mfu == pytest.approx(30 * PER_TOKEN / 4.0 / PEAK.flops_per_s)
    assert first.step_s == 2.0
    whole = meter.close()
    assert (whole.num_steps, whole.flops.total, whole.wall_s) == (4, 60 * PER_TOKEN, 8.0)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_accumulation_does_not_change_a_steps_flops(accumulation):
    micro_batches = [Workload([8 // accumulation] * 4)] * accumulation
    _, (window,) = run([(1.0, micro_batches)], log_every=1)
    assert window.flops.total == 32 * PER_TOKEN
    assert window.num_steps == 1


def test_warm_up_is_left_out_and_said():
    meter, windows = run([(100.0, [Workload([10])])] + [(1.0, [Workload([10])])] * 3, log_every=4, num_warmup_steps=1)
    assert (windows[0].num_steps, windows[0].num_left_out, windows[0].wall_s) == (3, 1, 3.0)
    assert meter.close().tokens == 30
    only_warm_up, _ = run([(1.0, [Workload([10])])], num_warmup_steps=1)
    with pytest.warns(UserWarning, match="of 1 steps, all were warm-up"):
        nothing = only_warm_up.close()
    assert (nothing.num_steps, nothing.to_dict()["mfu"], nothing.to_dict()["step_s"]) == (0, None, None)


def test_steps_that_compile_are_left_out():
    compiled = torch.compile(nn.Linear(3, 5), backend="eager", dynamic=False)
    meter = Meter(COST_MODEL, peak=PEAK, log_every=4)
    for tokens in (7, 7, 9, 9):
        meter.count(Workload([tokens]))
        compiled(torch.zeros(tokens, 3)).sum().backward()
        window = meter.step()
    assert (window.num_left_out, window.tokens) == (2, 16)


def test_what_is_not_training_and_waits_for_data_are_told_apart():
    clock = Clock()
    meter = Meter(COST_MODEL, peak=PEAK, clock=clock, log_every=2)

    def loader():
        for _ in range(2):
            clock.now_s += 0.25
            yield Workload([10])

    for workload in meter.batches(loader()):
        meter.count(workload)
        clock.now_s += 0.75
        with meter.away():
            clock.now_s += 60.0  # an evaluation
        window = meter.step(loss=0.5)
    assert (window.wall_s, window.data_wait_s, window.data_wait_share) == (2.0, 0.5, 0.25)
    assert (window.away_s, window.to_dict()["away_s"]) == (120.0, 120.0)
    assert window.to_dict()["loss"] == 0.5


def test_a_skipped_update_was_computed_all_the_same():
    meter = Meter(COST_MODEL, peak=PEAK, log_every=1)
    meter.count(Workload([10]))
    window = meter.step(skipped=True)
    assert (window.num_steps, window.num_skipped, window.tokens) == (1, 1, 10)


def test_other_models_of_a_step_cost_what_they_cost_and_their_tokens_are_not_counted_again():
    reference = replace(COST_MODEL, name="reference", rows=(replace(COST_MODEL.rows[0], forward=7),))
    meter = Meter(COST_MODEL, peak=PEAK, log_every=1, others=[reference])
    meter.count(Workload([10]))
    meter.count(Workload([10]), forward_only=True)
    meter.count(Workload([10]), forward_only=True, cost_model=reference)
    window = meter.step()
    assert window.flops.forward == 10 * (30 + 30 + 7)
    assert (window.flops.total, window.tokens, window.num_batches) == (10 * (PER_TOKEN + 30 + 7), 10, 1)
    with pytest.raises(UsageError, match="does not know the cost model one-linear: pass it to Meter as others"):
        meter.count(Workload([10]), cost_model=replace(COST_MODEL))


def test_recomputed_flops_enter_hfu_alone():
    _, (window,) = run([(1.0, [Workload([10])])], log_every=1, recompute="full")
    assert window.hfu == pytest.approx(window.mfu * 4 / 3)


def test_a_real_model_is_traced_once_and_its_batches_are_read():
    model = tiny_model("qwen3")
    meter = Meter(model, peak=PEAK, log_every=1)
    ids = torch.randint(7, 20, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    meter.count({"input_ids": ids, "attention_mask": mask})
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    window = meter.step()
    assert window.flops == trace(model).count(Workload([12, 9], slots=24))


def test_nothing_is_read_from_tensors_of_the_model_or_the_device_between_logs():
    """`.item()` and copies are what stalls an accelerator: on the CPU they show as dispatched operations."""

    class Dispatched(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    meter = Meter(COST_MODEL, peak=PEAK, log_every=100)
    batch = {"input_ids": torch.zeros(2, 9, dtype=torch.long), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    meter.start()
    with Dispatched() as dispatched:
        for _ in range(3):
            meter.count(batch)
            meter.step()
    names = {func._overloadpacket.__name__ for func in dispatched.seen}
    assert names <= {"detach", "alias"}, names


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_never_waited_for_between_logs():
    model = linear_on("cuda")
    meter = Meter(model, peak=PEAK, log_every=100)
    ids = torch.zeros(2, 9, dtype=torch.long, device="cuda")
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    meter.start()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            meter.count({"input_ids": ids, "attention_mask": mask})
            model(ids).sum().backward()
            meter.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meter.close().tokens == 5 * 13


@pytest.mark.own_peak
def test_an_unknown_device_has_no_mfu_and_says_what_to_do():
    with pytest.warns(UserWarning, match="no MFU will be shown.*HEADWAY_PEAK_FLOPS"):
        meter = Meter(linear_on("meta"), log_every=1)
    meter.count(Workload([1]))
    record = meter.step().to_dict()
    assert record["mfu"] is None
    assert record["tokens"] == 1


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def linear_on(device):
    return Tokens().to(device)


def test_a_model_on_two_devices_is_refused():
    model = Tokens()
    model.head.to("meta")
    with pytest.raises(UsageError, match="lies on several devices, cpu, meta"):
        Meter(model)


def test_a_step_without_a_batch_has_no_work_and_is_warned_of_once():
    meter = Meter(COST_MODEL, peak=PEAK, clock=(clock := Clock()), log_every=1)
    meter.count(Workload())  # as a rank says it that knows
    clock.now_s += 1.0
    assert (meter.step().tokens, meter.close().tokens) == (0, 0)
    meter = Meter(COST_MODEL, peak=PEAK, clock=clock, log_every=1)
    meter.start()
    clock.now_s += 1.0
    with pytest.warns(
        UserWarning, match=r"step 1 ends without a batch .* call count\(batch\) .* count\(Workload\(\)\)"
    ):
        empty = meter.step()
    clock.now_s += 1.0
    meter.step()  # once is enough
    meter.count(Workload([10]))
    clock.now_s += 1.0
    full = meter.step()
    assert (empty.tokens, empty.mfu, empty.padding_share, empty.slowest_rank) == (
        0,
        0.0,
        pytest.approx(nan, nan_ok=True),
        None,
    )
    assert (full.tokens, full.flops.total, meter.close().wall_s) == (10, 10 * PER_TOKEN, 3.0)


def test_a_clock_that_steps_back_makes_a_step_of_no_time():
    meter = Meter(COST_MODEL, peak=PEAK, clock=(clock := Clock()), log_every=1)
    meter.count(Workload([10]))
    clock.now_s -= 5
    record = meter.step().to_dict()
    assert (record["wall_s"], record["tokens_per_s"], record["mfu"], record["tokens"]) == (0.0, None, None, 10)


def test_mistakes_are_named():
    with pytest.raises(UsageError, match="log_every=0"):
        Meter(COST_MODEL, peak=PEAK, log_every=0)
    with pytest.raises(UsageError, match="a cost model does not say on what device"):
        Meter(COST_MODEL)


def test_a_loop_that_never_logs_still_has_its_run_at_the_end():
    meter, windows = run([(1.0, [Workload([10])])] * 3, log_every=1000)
    assert windows == []
    assert meter.close().tokens == 30


def test_an_mfu_above_one_is_warned_about_with_likely_causes():
    meter, _ = run([(1e-7, [Workload([10**9])])], log_every=1000)
    with pytest.warns(UserWarning, match="above 100 %.*Likely causes"):
        meter.close()


LOOP = """
import os, sys, warnings
from pathlib import Path
import torch.distributed as dist
from headway.count import Workload, models
from headway.devices import Peak
from headway.meter import Goodput, Meter
from headway.log.jsonl import read_jsonl
from headway.meter.model_traffic import traffic_of

path, fate, num_steps, log_every = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo")
rank = dist.get_rank()
peak = Peak("test", 1e9, "fp32", "test")
meter = Meter(models.load(Path(path)), peak=peak, log_every=log_every, timeout_s=5 if fate == "dies" else 300)
for step in range(num_steps):
    meter.count(Workload([10 * (rank + 1)]))
    if fate == "dies" and rank == 1 and step == 2:
        os._exit(3)
    if fate == "compiles" and step == (1, num_steps - 1)[rank]:
        import torch
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        window = meter.step()
    for warning in caught:
        print("warning", warning.message)
    if window is not None:
        print("window", window.step, window.world_size, window.flops.total, window.rank_flops, f"{window.balance:.3f}")
        print("steps", window.num_steps, window.num_left_out, window.left_out_s > 0)
"""


def run_two(tmp_path, fate, num_steps=4, log_every=2):
    from headway.count import models

    path = tmp_path / "model.json"
    models.save_cost_model(COST_MODEL, path)
    script = tmp_path / "loop.py"
    script.write_text(textwrap.dedent(LOOP))
    ended = run_processes([sys.executable, script, path, fate, num_steps, log_every], 2, check=False)
    return [rank.stdout for rank in ended], [rank.returncode for rank in ended]


@pytest.mark.dist
def test_two_ranks_add_up_to_the_flop(tmp_path):
    outputs, codes = run_two(tmp_path, "lives")
    assert codes == [0, 0]
    # per window of two steps: 20 tokens on the first rank, 40 on the second
    line = f"2 {60 * PER_TOKEN} ({20 * PER_TOKEN}, {40 * PER_TOKEN}) 0.750"
    for output in outputs:
        assert output.splitlines() == [f"window 2 {line}", "steps 2 0 False", f"window 4 {line}", "steps 2 0 False"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("num_steps", "log_every"), [(4, 2), (300, 300)])
def test_a_step_in_which_any_rank_compiles_is_left_out_on_all(tmp_path, num_steps, log_every):
    """The first rank compiles in the second step, the other in the last; each waits for the other in a collective."""
    outputs, codes = run_two(tmp_path, "compiles", num_steps, log_every)
    assert codes == [0, 0]
    windows = num_steps // log_every
    counted, left_out = log_every - 2 // windows, 2 // windows
    for output in outputs:
        lines = output.splitlines()
        assert lines[1::2] == [f"steps {counted} {left_out} True"] * windows
        flops = [10 * rank * counted * PER_TOKEN for rank in (1, 2)]
        end = f"2 {sum(flops)} ({flops[0]}, {flops[1]}) 0.750"
        assert lines[::2] == [f"window {log_every * (n + 1)} {end}" for n in range(windows)]


@pytest.mark.dist
def test_a_rank_that_dies_does_not_hang_the_log(tmp_path):
    outputs, codes = run_two(tmp_path, "dies")
    assert codes == [0, 3]
    assert "rank 0 of 2 could not add its numbers up" in outputs[0]
    assert f"window 4 1 {20 * PER_TOKEN}" in outputs[0]


def test_a_loop_that_never_logs_holds_no_batches():
    meter, _ = run([(1.0, [Workload([10])])] * 1000, log_every=10**9)
    assert len(meter._pending.steps) < 128
    assert meter.close().tokens == 10_000


def test_smoothed_numbers_are_those_of_the_last_windows_together():
    steps = [(1.0, [Workload([10])]), (3.0, [Workload([10])]), (2.0, [Workload([40])])]
    _, windows = run(steps, log_every=1, smooth_over=2)
    assert windows[0].smoothed is None
    assert "mfu_smoothed" not in windows[0].to_dict()
    assert windows[1].to_dict()["tokens_per_s_smoothed"] == 20 / 4.0
    last = windows[2].to_dict()
    assert (last["tokens_per_s"], last["tokens_per_s_smoothed"], last["step_s_smoothed"]) == (20.0, 10.0, 2.5)
    assert last["mfu_smoothed"] == pytest.approx(50 * PER_TOKEN / 5.0 / PEAK.flops_per_s)


def test_fill_is_of_the_room_in_the_micro_batches():
    _, (window,) = run([(1.0, [Workload([10, 5]), Workload([9])])], log_every=1, packing_length=16)
    assert window.to_dict()["fill"] == 24 / 32
    _, (window,) = run([(1.0, [Workload([10])])], log_every=1)
    assert window.to_dict()["fill"] is None


def test_windows_are_written_where_the_loop_asks(tmp_path):
    meter, windows = run([(1.0, [Workload([10])])] * 4, log_every=2, log_to=[tmp_path / "metrics.jsonl"])
    meter.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records == [window.to_dict() for window in windows]
    assert [record["step"] for record in records] == [2, 4]
    assert records[0]["flops_share_by_component"] == {"language.mlp": 1.0}


def test_goodput_is_moved_along_with_the_loop(tmp_path):
    clock = Clock()
    ledger = Goodput(tmp_path / "goodput.jsonl", clock=lambda: int(clock.now_s * 1e9), heartbeat_s=1000)
    clock.now_s += 7  # set-up
    meter = Meter(COST_MODEL, peak=PEAK, clock=clock, goodput=ledger, log_every=2)

    def loader():
        for _ in range(2):
            clock.now_s += 0.25
            yield Workload([10])

    for workload in meter.batches(loader()):
        meter.count(workload)
        clock.now_s += 1
        meter.step()
        with meter.away():
            clock.now_s += 30
        meter.leave("checkpoint")
        clock.now_s += 4
        meter.back()
    meter.close()
    clock.now_s += 3
    seconds = ledger.report().seconds
    ledger.close()
    assert {bucket: s for bucket, s in seconds.items() if s} == {
        "set-up": 7,
        "data wait": 0.5,
        "step": 2,
        "evaluation": 60,
        "checkpoint": 8,
        "idle": 3,
    }


def test_compiling_has_a_bucket_of_its_own(tmp_path):
    clock = Clock()

    def slow_backend(graph, _inputs):
        clock.now_s += 20
        return graph.forward

    compiled = torch.compile(nn.Linear(3, 5), backend=slow_backend)
    with Goodput(tmp_path / "goodput.jsonl", clock=lambda: int(clock.now_s * 1e9), heartbeat_s=1000) as ledger:
        meter = Meter(COST_MODEL, peak=PEAK, clock=clock, goodput=ledger, log_every=1)
        for _ in range(2):
            meter.count(Workload([7]))
            compiled(torch.zeros(7, 3)).sum().backward()
            clock.now_s += 1
            window = meter.step()
        meter.close()
        seconds = ledger.report().seconds
    assert (seconds["compile"], seconds["step"]) == (20, 2)
    assert (window.num_steps, window.wall_s) == (1, 1.0)


def test_mbu_is_what_the_steps_must_move_over_what_memory_could():
    """Two micro-batches, one update by plain SGD of a 4 x 11 layer with bias behind an embedding of 11 x 4."""
    model = linear_on("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"peak": PEAK, "clock": (clock := Clock()), "log_every": 1}
    meter = Meter(model, optimizer=optimizer, memory_bytes_per_s=1e4, **options)
    for _ in range(2):
        meter.count({"input_ids": torch.zeros(1, 3, dtype=torch.long)})
    clock.now_s += 2.0
    window = meter.step()
    weight = 4 * 11 * 4  # of the head, in fp32: read in both forwards and for both gradients of its input
    least = 4 * weight
    traffic = traffic_of(model, optimizer, cost_model=meter.cost_model)
    expected = traffic.bytes_of(Workload([3, 3]), num_batches=2).total
    assert window.bytes_moved == expected > least
    assert window.to_dict()["mbu"] == pytest.approx(expected / 2.0 / 1e4)
    without = Meter(model, memory_bytes_per_s=1e4, **options)
    without.count(Workload([3]))
    clock.now_s += 1.0
    assert without.step().to_dict()["mbu"] is None
    with pytest.raises(UsageError, match="a cost model has no weights for an optimizer"):
        Meter(COST_MODEL, peak=PEAK, optimizer=optimizer)


def test_a_closed_meter_keeps_its_run_and_takes_no_more():
    with Meter(COST_MODEL, peak=PEAK, log_every=1) as meter:
        meter.count(Workload([10]))
        meter.step()
        run_ = meter.close()
    assert meter.close() is run_
    assert run_.tokens == 10
    with pytest.raises(UsageError, match="the meter is closed"):
        meter.count(Workload([10]))


def test_ledgers_of_no_steps_are_not_an_mfu():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Meter(COST_MODEL, peak=PEAK) as meter:
            pass
    assert meter.num_steps == 0
    assert isinstance(meter.cost_model, CostModel)


def test_a_rank_that_shares_a_batch_counts_nothing_of_its_own():
    meter = Meter(COST_MODEL, peak=PEAK, log_every=2)
    meter.count(Workload([10]))
    meter.step()
    meter.count(Workload())
    assert meter.step().flops.total == 10 * PER_TOKEN


def test_a_meter_that_was_never_closed_does_not_keep_its_model_alive():
    model = linear_on("cpu")
    meter = Meter(model, peak=PEAK, log_every=1)
    meter.count({"input_ids": torch.zeros(1, 3, dtype=torch.long)})
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    assert meter.step().rank_busy_s[0] > 0
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
