"""Phases that a loop names: they add up to the step, whatever they run, on which devices and on how many ranks."""

import sys
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import Generation, Meter, Peak, Workload
from headway.errors import UsageError
from headway.meter.model_traffic import forward_traffic, traffic_of
from headway.meter.step_phases import REST
from headway.tracing import trace
from helpers.device import COST_MODEL, Clock, Device
from helpers.models import tiny_model
from helpers.processes import run_processes
from helpers.runs import read_metrics

PEAK = Peak("a test", 1e5, "fp32", "made up")
HIGH = Peak("a test", 1e15, "fp32", "made up")  # for real models


def metered(clock, **options):
    windows = []
    return Meter(COST_MODEL, peak=PEAK, clock=clock, on_window=windows.append, **options), windows


# a loop as a list of what it does: spend time, count something, enter or leave a phase, go away, end a step
names = st.sampled_from(["rollout", "reference", "update"])
events = st.lists(
    st.one_of(
        st.tuples(st.just("spend"), st.integers(1, 5)),
        st.tuples(st.just("train"), st.integers(1, 50)),
        st.tuples(st.just("score"), st.integers(1, 50)),
        st.tuples(st.just("generate"), st.integers(1, 9)),
        st.tuples(st.just("enter"), names),
        st.tuples(st.just("leave"), st.none()),
        st.tuples(st.just("away"), st.integers(1, 5)),
        st.tuples(st.just("wait"), st.integers(1, 5)),
        st.tuples(st.just("step"), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(events, st.integers(1, 3))
def test_phases_and_the_rest_add_up_to_the_steps(happenings, log_every):
    """Times by a model of the loop in the test: an innermost phase owns what is spent, but what is spent away."""
    clock = Clock()
    meter, windows = metered(clock, log_every=log_every)
    meter.start()
    entered, expected_s, expected_flops, pending_s, pending_flops, steps = [], {}, {}, {}, {}, 0
    meter.count(Workload())
    for what, how in happenings:
        inner = entered[-1][0] if entered else REST
        if what == "spend":
            clock.now_s += how
            pending_s[inner] = pending_s.get(inner, 0) + how
        elif what in ("train", "score", "generate"):
            work = Generation([how], [3]) if what == "generate" else Workload([how])
            meter.count(work, forward_only=what == "score")
            tokens = how + 2 if what == "generate" else how
            only = what != "train" or inner == "rollout"
            pending_flops[inner] = pending_flops.get(inner, 0) + tokens * (30 if only else 90)
        elif what == "enter":
            context = meter.phase(how, forward_only=how == "rollout")
            context.__enter__()
            entered.append((how, context))
        elif what == "leave" and entered:
            entered.pop()[1].__exit__(None, None, None)
        elif what == "away":
            with meter.away():
                clock.now_s += how
        elif what == "wait":
            meter.await_data()
            clock.now_s += how
            meter.got_data()
            pending_s[inner] = pending_s.get(inner, 0) + how
        elif what == "step":
            meter.step()
            meter.count(Workload())
            steps += 1
            for sums, pending in ((expected_s, pending_s), (expected_flops, pending_flops)):
                for name, number in pending.items():
                    sums[name] = sums.get(name, 0) + number
                pending.clear()
    while entered:
        entered.pop()[1].__exit__(None, None, None)
    if not steps:
        meter.abandon()
        return
    for run in (meter.close(), *windows):
        if not run.phases:
            continue
        parts = run.phases.values()
        assert sum(phase.loop_s for phase in parts) == pytest.approx(run.wall_s)
        assert sum(phase.flops.total for phase in parts) == run.flops.total
        for kind in ("forward", "dgrad", "wgrad", "recompute"):
            assert sum(getattr(phase.flops, kind) for phase in parts) == getattr(run.flops, kind)
    if run := meter.close().phases:
        for name, phase in run.items():
            assert phase.loop_s == pytest.approx(expected_s.get(name, 0))
            assert phase.flops.total == expected_flops.get(name, 0)
        assert run.keys() >= {name for name, seconds in expected_s.items() if seconds and name != REST}
        assert list(run)[-1] == REST


def test_a_loop_without_phases_has_none_in_its_record():
    meter, _ = metered(Clock(), log_every=1)
    meter.count(Workload([5]))
    record = meter.step().to_dict()
    assert (record["phases"], record["mfu_of_all_devices"]) == ({}, record["mfu"])


def test_a_phase_has_the_rates_of_its_own_time():
    clock = Clock()
    meter, _ = metered(clock, log_every=1)
    with meter.phase("rollout", forward_only=True):
        meter.count(Generation([10, 10], [5, 3], batch_size=2))
        clock.now_s += 4.0
    with meter.phase("update"):
        meter.count(Workload([28]).with_counts(supervised=8))
        clock.now_s += 1.0
    record = meter.step().to_dict()
    rollout, update, rest = (record["phases"][name] for name in ("rollout", "update", REST))
    assert rollout["flops"]["total"] == (20 + 4 + 2) * 30
    assert (rollout["prompt_tokens"], rollout["generated_tokens"], rollout["tokens"], rollout["slots"]) == (
        20,
        8,
        26,
        28,
    )
    assert rollout["mfu"] == pytest.approx(26 * 30 / 4.0 / 1e5)
    assert rollout["generated_tokens_per_s"] == 2.0
    assert (update["mfu"], update["flops"]["total"]) == (pytest.approx(28 * 90 / 1e5), 28 * 90)
    assert (rest["wall_s"], rest["flops"]["total"]) == (0.0, 0)
    # the step's tokens are those that it learns from, its time and FLOPs those of all phases
    assert (record["tokens"], record["supervised"], record["wall_s"]) == (28, 8, 5.0)
    assert record["mfu"] == pytest.approx((26 * 30 + 28 * 90) / 5.0 / 1e5)


def test_devices_of_a_phase_are_told_apart():
    clock = Clock()
    meter, _ = metered(clock, log_every=1)
    server = Peak("a server's", 1e6, "fp8", "made up")
    with meter.phase("rollout", peak=server, num_devices=4) as rollout:
        meter.count(Generation([100], [51]))
        clock.now_s += 2.0  # the loop waits for a part of it
        rollout.busy_s = 10.0
    with meter.phase("update"):
        meter.count(Workload([150]))
        clock.now_s += 8.0
    window = meter.step()
    record = window.to_dict()
    here = 150 * 90
    assert record["flops"]["total"] == here
    assert record["mfu"] == pytest.approx(here / 10.0 / 1e5)
    elsewhere = record["phases"]["rollout"]
    assert (elsewhere["wall_s"], elsewhere["devices_s"], elsewhere["num_devices"]) == (2.0, 10.0, 4)
    assert elsewhere["mfu"] == pytest.approx(150 * 30 / 10.0 / 4e6)
    assert record["mfu_of_all_devices"] == pytest.approx((here + 150 * 30) / 10.0 / (1e5 + 4e6))
    assert sum(phase["wall_s"] for phase in record["phases"].values()) == record["wall_s"]


def test_times_are_the_devices_and_nothing_waits_for_it():
    device = Device()
    with device.stands_in():
        meter = Meter(COST_MODEL, peak=PEAK, log_every=1000)
        meter.start()
        waits = device.num_waits
        for _ in range(5):
            for name, seconds in (("rollout", 0.5), ("update", 0.25)):
                with meter.phase(name):
                    meter.count(Workload([1]))
                    device.launch(seconds)
            device.launch(0.125)
            meter.step()
        assert device.num_waits == waits
        run = meter.close()
    assert {name: phase.loop_s for name, phase in run.phases.items()} == {"rollout": 2.5, "update": 1.25, REST: 0.625}


def test_bytes_of_phases_are_those_of_what_runs_in_them():
    """Weights once a forward; keys and values by hand: each step reads those of all tokens up to its own."""
    model = tiny_model("qwen3")
    optimizer = torch.optim.AdamW(model.parameters())
    clock = Clock()
    meter = Meter(model, peak=HIGH, clock=clock, optimizer=optimizer, memory_bytes_per_s=1e6, log_every=1)
    prompts, answers = [7, 5], [4, 2]
    with meter.phase("rollout", forward_only=True):
        meter.count(Generation(prompts, answers, batch_size=2))
        clock.now_s += 1.0
    with meter.phase("reference", forward_only=True):
        meter.count(Workload([11, 7]))
        clock.now_s += 1.0
    with meter.phase("update"):
        meter.count(Workload([11, 7]))
        clock.now_s += 1.0
    record = meter.step().to_dict()
    config = model.config
    itemsize = model.lm_head.weight.element_size()
    products = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    weights = sum(p.numel() for p in products) * itemsize
    if config.tie_word_embeddings:
        weights += model.lm_head.weight.numel() * itemsize
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * itemsize
    # a prefill and three decode steps: a prompt's keys are written and read, a step's written and read with all before
    steps_read = sum(p + i + 1 for p, a in zip(prompts, answers, strict=True) for i in range(a - 1))
    cache = per_token * (2 * sum(prompts) + sum(a - 1 for a in answers) + steps_read)
    phases = record["phases"]
    assert phases["rollout"]["bytes_moved"] == 4 * weights + cache
    assert phases["rollout"]["weight_bytes"] == 4 * weights
    assert phases["rollout"]["mbu"] == pytest.approx((4 * weights + cache) / 1e6)
    assert phases["reference"]["bytes_moved"] == weights
    update = traffic_of(model, optimizer).bytes_of(Workload([11, 7])).total
    assert phases["update"]["bytes_moved"] == update
    assert record["bytes_moved"] == 4 * weights + cache + weights + update
    assert phases[REST]["bytes_moved"] is None


def test_tokens_that_a_frozen_model_scores_are_those_of_one_model():
    """A reference and a reward model in one phase run on the same tokens: 30, not 60; in each of two updates, 60."""
    others = [replace(COST_MODEL, name=name) for name in ("reference", "reward")]
    clock = Clock()
    meter, _ = metered(clock, others=others, log_every=2)
    for times in (1, 2):
        for _ in range(times):
            with meter.phase("score", forward_only=True):
                for other in others:
                    meter.count(Workload([10, 20]), cost_model=other)
                meter.count(Workload([10, 20]))  # of the trained model itself, which changes
        meter.count(Workload([30]))
        clock.now_s += 1.0
        window = meter.step()
    phases = window.to_dict()["phases"]
    assert (phases["score"]["scored_tokens"], phases["score"]["tokens"]) == (30 + 60, 3 * 90)
    assert phases[REST]["scored_tokens"] == 0


def test_what_a_phase_is_bound_by():
    model = tiny_model("qwen3")
    for memory, bound in ((1e3, "memory"), (1e18, "compute"), (nan, None)):
        clock = Clock()
        meter = Meter(model, cost_model=trace(model), peak=HIGH, clock=clock, memory_bytes_per_s=memory, log_every=1)
        with meter.phase("rollout", forward_only=True):
            meter.count(Generation([7], [4]))
            clock.now_s += 1e9
        assert meter.step().phases["rollout"].bound == bound


def test_a_models_bytes_are_not_known_where_its_ledger_is_another_ones():
    assert forward_traffic(tiny_model("qwen3"), COST_MODEL) is None


def test_forwards_in_a_phase_without_backward_are_not_timed_one_by_one():
    model = tiny_model("qwen3").train()
    meter = Meter(model, peak=HIGH, log_every=1)
    ids = torch.randint(7, 20, (2, 6))
    with meter.phase("rollout", forward_only=True), torch.no_grad():
        with meter.phase("within", forward_only=True):
            model(ids)
        model(ids)
        meter.count({"input_ids": ids})
    assert meter._forwards.take() == []
    meter.count({"input_ids": ids})
    model(ids).logits.sum().backward()
    window = meter.step()
    assert len(window.rank_busy_s) == 1
    assert window.rank_busy_s[0] > 0
    assert window.rank_busy_flops[0] * 2 == window.flops.forward


def test_the_inner_phases_of_a_sampled_step_have_a_place_for_it():
    clock, model = Clock(), tiny_model("qwen3")
    meter = Meter(model, peak=HIGH, clock=clock, log_every=1)
    ids = torch.randint(7, 20, (2, 6))
    with meter.phase("rollout", forward_only=True):
        clock.now_s += 3.0
    meter.count({"input_ids": ids})
    model(ids).logits.sum().backward()
    clock.now_s += 1.0
    window = meter.step()
    assert window.entries["phases_s"]["inference"] == 3.0
    assert sum(window.entries["phases_s"].values()) == pytest.approx(window.wall_s)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "a phase cannot be called ''"),
        ({"name": REST}, "'rest' is what no phase claims"),
        ({"name": "rollout", "num_devices": 0}, "num_devices=0"),
        ({"name": "rollout", "peak": PEAK}, "say num_devices="),
        ({"name": "rollout", "memory_bytes_per_s": 1e9}, "say num_devices="),
    ],
)
def test_what_cannot_be_a_phase_is_refused_and_the_loop_goes_on(options, message):
    meter, _ = metered(Clock(), log_every=1)
    with pytest.raises(UsageError, match=message), meter.phase(**options):
        pass
    meter.count(Workload([5]))
    assert meter.step().tokens == 5


def test_a_phase_keeps_its_devices():
    meter, _ = metered(Clock(), log_every=1)
    with meter.phase("rollout", num_devices=2):
        pass
    with pytest.raises(UsageError, match="'rollout' had other devices before"), meter.phase("rollout", num_devices=3):
        pass


def test_an_error_within_a_phase_ends_it():
    clock = Clock()
    meter, _ = metered(clock, log_every=1)

    def answer():
        clock.now_s += 1.0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), meter.phase("rollout"):
        answer()
    clock.now_s += 1.0
    meter.count(Workload([5]))
    assert {name: phase.loop_s for name, phase in meter.step().phases.items()} == {"rollout": 1.0, REST: 1.0}


def test_steps_that_are_left_out_are_in_no_phase():
    clock = Clock()
    meter, _ = metered(clock, log_every=3, num_warmup_steps=1)
    for _ in range(3):
        with meter.phase("update"):
            meter.count(Workload([5]))
            clock.now_s += 1.0
        window = meter.step()
    assert (window.phases["update"].loop_s, window.phases["update"].tokens) == (2.0, 10)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_add_their_phases_up_and_need_not_name_the_same_ones(tmp_path, num_ranks):
    path = tmp_path / "metrics.jsonl"
    run_processes([sys.executable, Path(__file__).with_name("named_ranks.py"), f"jsonl:{path}"], num_ranks)
    records = read_metrics(path)
    assert len(records) == 3
    ranks = range(num_ranks)
    for number, record in enumerate(records):
        phases = record["phases"]
        rollout = sum(2 * (2 * (10 + rank) + 3 + 5) for rank in ranks if rank != 1)
        assert (phases["rollout"]["tokens"], phases["rollout"]["wall_s"]) == (rollout, 4.0)
        assert phases["update"]["flops"]["total"] == sum(2 * (100 + rank) * 90 for rank in ranks)
        assert record["supervised"] == 80 * num_ranks
        assert ("repair on the last rank" in phases) == (number == 1)
        assert sum(phase["flops"]["total"] for phase in phases.values()) == record["flops"]["total"]
        assert sum(phase["wall_s"] for phase in phases.values()) == pytest.approx(record["wall_s"])
        assert phases["rollout"]["mfu"] == pytest.approx(rollout * 30 / (4.0 * 1e5 * num_ranks))


def test_labelled_tokens_are_counted_where_every_batch_has_labels():
    model = tiny_model("qwen3")
    meter = Meter(model, peak=HIGH, log_every=1)
    ids = torch.randint(7, 20, (2, 6))
    labels = ids.clone()
    labels[:, :3] = -100
    meter.count({"input_ids": ids, "labels": labels})
    record = meter.step().to_dict()
    assert (record["supervised"], record["tokens"]) == (2 * 3, 12)
    meter.count({"input_ids": ids, "labels": labels})
    meter.count({"input_ids": ids})
    record = meter.step().to_dict()
    assert (record["supervised"], record["supervised_per_s"]) == (None, None)


def test_a_head_that_runs_on_some_tokens_is_billed_for_these():
    model = tiny_model("qwen3")
    cost = trace(model)
    ids, mask = torch.randint(7, 20, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    meter = Meter(model, cost_model=cost, peak=HIGH, log_every=1)
    meter.count({"input_ids": ids, "attention_mask": mask, "logits_to_keep": 3})
    assert meter.step().flops == cost.count(Workload([6, 4], slots=12, logits=3 + 1))
