"""Gaps in which the host is late, in traces written by hand: a cause is named where the trace shows it, else none."""

import pytest

from headway.explain.findings.gaps import purpose_of
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from helpers.traces import BACKWARD_THREAD, MAIN, US, WrittenTrace, sidecar

MS = 1000 * US


def steps_of(step, *, num_steps=3, begin=1000 * MS):
    """Host steps of 10 ms; `step` writes each one's events, given the trace, its beginning and a number of its own."""
    trace = WrittenTrace()
    trace.steps(*(begin + 10 * MS * i for i in range(num_steps + 1)))
    for i in range(num_steps):
        step(trace, begin + 10 * MS * i, 1000 * (i + 1))
    return trace


def findings_of(tmp_path, trace, **beside):
    result = explain([read_trace(trace.write(tmp_path / "t.json", **beside))])
    return {finding.id: finding for finding in result.findings}


def paused(trace, at, number, *, call="cudaLaunchKernel"):
    """Kernels of 3 ms at the step's beginning and end, 4 ms of nothing between them, each launched just before."""
    trace.launched("k", at, at + US, 3 * MS, number + 1, operator="aten::add")
    trace.call(call, at + 7 * MS - 2 * US, US, number + 2)
    trace.kernel("k", at + 7 * MS, 3 * MS, number + 2)


LATE = {"host-pause", "launch-bound", "allocation", "first-use", "graph-late", "garbage-collection", "synchronisation"}


def test_a_long_gap_of_which_the_trace_shows_nothing_has_no_cause(tmp_path):
    found = findings_of(tmp_path, steps_of(paused))
    assert LATE & found.keys() == {"host-pause"}
    assert found["host-pause"].ns == pytest.approx(4 * MS, abs=3 * US)
    assert "1.0 pauses a step" in found["host-pause"].seen
    assert "shows nothing" in found["host-pause"].seen
    assert found["host-pause"].cause.startswith("not known")


SHOWN = {  # what an event of the host in a gap is called in the finding, by its kind
    "cpu_op": "aten::upsample_nearest2d",
    "python_function": "forward_batch_info.py(443): init_new",  # SGLang's, in a trace of TraceLens
    "user_annotation": "gather the replay buffer",
    "cuda_runtime": "cudaGetDeviceProperties_v2",
}


@pytest.mark.parametrize("kind", SHOWN)
@pytest.mark.parametrize("thread", [MAIN, BACKWARD_THREAD])
def test_what_the_host_did_in_a_gap_is_named_with_steps_and_without(tmp_path, kind, thread):
    """The thread that launched the kernel behind the gap shows it, as well as the loop's."""

    def step(trace, at, number):
        trace.launched("k", at, at + US, 3 * MS, number + 1, operator="aten::add")
        for i in range(3):  # by which the main thread has launched most
            trace.launched("k", at + (9 + i) * US, at + 3 * MS + (9 + i) * US, US, number + 3 + i, operator="aten::add")
        trace.event(kind, SHOWN[kind], at + 3 * MS + 50 * US, 3 * MS + 900 * US, tid=thread)
        trace.call("cudaLaunchKernel", at + 7 * MS - 2 * US, US, number + 2, tid=thread)
        trace.kernel("k", at + 7 * MS, 3 * MS, number + 2)

    seen = []
    for has_steps in (True, False):
        trace = steps_of(step, num_steps=2)
        if not has_steps:
            trace.events = [event for event in trace.events if not event["name"].startswith("ProfilerStep")]
        found = findings_of(tmp_path, trace)
        assert LATE & found.keys() == {"host-pause"}
        assert "shows nothing" not in found["host-pause"].seen
        assert SHOWN[kind] in found["host-pause"].seen
        seen.append(found["host-pause"].seen.partition("It was")[2])
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("calls", "rule"), [(1, "host-pause"), (4, "first-use")])
@pytest.mark.parametrize("kind", ["cpu_op", "cuda_runtime"])
def test_a_first_use_has_a_second_use_to_compare_with(tmp_path, calls, rule, kind):
    name = {"cpu_op": "aten::unique_dim", "cuda_runtime": "cudaLaunchKernelExC"}[kind]

    def step(trace, at, number):
        paused(trace, at, number)
        if number == 2000:  # the second of three steps has the pause
            trace.event(kind, name, at + 3 * MS + 9 * US, 4 * MS - 20 * US)
        for i in range(calls - 1 if number == 3000 else 0):
            trace.event(kind, name, at + 10 * US + i * 30 * US, 20 * US)

    trace = steps_of(step)
    pauses = [e for e in trace.events if e["name"] == "cudaLaunchKernel"]
    assert len(pauses) == 6
    found = findings_of(tmp_path, trace)
    assert rule in found
    assert name in found[rule].seen
    assert ("first-use" in found) == (calls > 1)


def test_many_short_gaps_are_launches(tmp_path):
    def step(trace, at, number):
        for i in range(100):
            begin = at + 100 * US * i
            trace.launched("k", begin, begin + 2 * US, 40 * US, number + i, operator="aten::add")

    found = findings_of(tmp_path, steps_of(step))
    assert LATE & found.keys() == {"launch-bound"}
    assert found["launch-bound"].share == pytest.approx(0.6, abs=0.01)
    assert "101 gaps a step" in found["launch-bound"].seen


def test_what_the_profiler_adds_is_not_the_hosts_fault(tmp_path):
    def step(trace, at, number):
        for i in range(100):
            begin = at + 100 * US * i
            trace.launched("k", begin, begin + 2 * US, 40 * US, number + i, operator="aten::add")

    found = findings_of(tmp_path, steps_of(step), headway=sidecar(profiler_overhead_s=2e-3))
    assert found["launch-bound"].share == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize(("call", "rule"), [("cudaMalloc", "allocation"), ("cuModuleLoadData", "first-use")])
def test_a_gap_in_a_call_of_the_runtime_is_what_the_call_does(tmp_path, call, rule):
    def step(trace, at, number):
        paused(trace, at, number)
        trace.operator("aten::max_pool2d", at + 3 * MS, 4 * MS - 5 * US)
        trace.call(call, at + 3 * MS + US, 4 * MS - 8 * US, number + 50)

    found = findings_of(tmp_path, steps_of(step))
    assert LATE & found.keys() == {rule}
    assert "aten::max_pool2d" in found[rule].seen


def test_waiting_for_memory_is_no_read_of_a_number(tmp_path):
    def step(trace, at, number):
        trace.launched("k", at, at + US, 3 * MS, number + 1, operator="aten::add")
        trace.operator("aten::empty", at + MS, 5 * MS)
        trace.call("cudaMalloc", at + MS + US, 5 * MS - 5 * US, number + 50)
        trace.launched("k", at + 7 * MS - 2 * US, at + 7 * MS, 3 * MS, number + 2, operator="aten::add")

    assert LATE & findings_of(tmp_path, steps_of(step)).keys() == {"allocation"}


@pytest.mark.parametrize(("later_ms", "is_first_use"), [(0.1, True), (3.9, False)])
def test_the_first_call_of_an_operator_is_first_use_where_later_ones_are_short(tmp_path, later_ms, is_first_use):
    numbers = []

    def step(trace, at, number):
        paused(trace, at, number)
        is_first = not numbers
        numbers.append(number)
        duration = 4 * MS - 5 * US if is_first else round(later_ms * MS)
        trace.operator("aten::cudnn_convolution", at + 3 * MS + 2 * US, duration)

    trace = steps_of(step)
    read = read_trace(trace.write(tmp_path / "t.json"))
    found = {finding.id: finding for finding in explain([read], step=1).findings}
    assert LATE & found.keys() == ({"first-use"} if is_first_use else {"host-pause"})
    assert "aten::cudnn_convolution" in next(iter(found.values())).seen


def test_a_graph_that_is_replayed_late_is_no_storm_of_launches(tmp_path):
    def step(trace, at, number):
        paused(trace, at, number, call="cudaGraphLaunch")

    found = findings_of(tmp_path, steps_of(step))
    assert LATE & found.keys() == {"graph-late"}
    assert "before a graph was replayed" in found["graph-late"].seen


def host(runs=(), stacks=(), *, clock=500 * MS, preempted=(), **more):
    """What a profile records of the host; its clock is behind the trace's, whose first step begins at 1,000 ms."""
    begins = {str(number): clock + 10 * MS * (number - 1) for number in range(1, 4)}
    return {
        "step_ns": begins, "core_wait_ns": {}, "stacks": [list(stack) for stack in stacks],
        "runs": [list(run) for run in runs], "preempted": [list(row) for row in preempted],
        "anomaly_mode": False, **more,
    }  # fmt: skip


TRAINER = (
    "~call_event (transformers/trainer_callback.py:545)",
    "~_maybe_log_save_evaluate (transformers/trainer.py:2)",
)
STACKS = {
    "host-pause": ("~post (requests/api.py:59)", "tell (mine/train.py:12)"),
    "logging": ("emit (mine/handlers.py:3)", "~handle (logging/__init__.py:978)", "tell (mine/train.py:12)"),
    "checkpoint": ("~_write (torch/serialization.py:9)", "keep (mine/train.py:12)"),
    "evaluation": ("next (mine/data.py:5)", "evaluate (mine/train.py:12)"),
}


@pytest.mark.parametrize("rule", STACKS)
def test_a_sampled_stack_names_what_the_loop_did(tmp_path, rule):
    runs = [(500 * MS + 10 * MS * i + 3 * MS, 500 * MS + 10 * MS * i + 7 * MS, 0) for i in range(3)]
    beside = sidecar(host=host(runs, [STACKS[rule]]))
    found = findings_of(tmp_path, steps_of(paused), headway=beside)
    assert rule in found
    assert found[rule].ns == pytest.approx(4 * MS, abs=3 * US)
    if rule == "host-pause":
        assert "post (requests/api.py:59), called by tell (mine/train.py:12)" in found[rule].seen
        assert found[rule].cause == "a server is waited for."
    else:
        assert "host-pause" not in found
        assert "largest-loss" not in found
        assert f"Python was in {STACKS[rule][0].removeprefix('~')}" in found[rule].seen


@pytest.mark.parametrize(
    ("stack", "told"),
    [
        (("on_log (mine/train.py:3)", *TRAINER), "logging"),
        (("sleep (mine/train.py:3)", "on_step_end (mine/train.py:4)", *TRAINER), "pause"),
        (("on_save (mine/train.py:3)", *TRAINER), "checkpoint"),
        (("~evaluate (transformers/trainer.py:9)", *TRAINER), "evaluation"),
        (("~deepcopy (python3.11/copy.py:9)", "save_checkpoint (mine/train.py:3)"), "checkpoint"),
        (("~log_softmax (nn/functional.py:2)", "step (mine/train.py:3)"), "pause"),
        (("savefig (mine/curves.py:2)", "draw (mine/train.py:3)"), "pause"),
        (("step (validation/train.py:2)", "main (wandb_runs/train.py:3)"), "pause"),
        (("~log (sdk/wandb_run.py:2)", "step (mine/train.py:3)"), "logging"),
        (("slow (mine/hooks.py:2)", "~_engine_run_backward (autograd/graph.py:9)"), "pause"),
        (("~validation_loop (trainer/loops.py:2)", "fit (mine/train.py:2)"), "evaluation"),
    ],
)
def test_a_chore_is_told_by_functions_and_by_packages_and_not_by_words_in_a_path(stack, told):
    purpose = purpose_of(stack)
    assert (purpose.name if purpose.is_chore else "pause") == told


def test_stacks_of_other_moments_name_nothing(tmp_path):
    runs = [(500 * MS, 500 * MS + 2 * MS, 0)]  # while the first kernel ran
    found = findings_of(tmp_path, steps_of(paused), headway=sidecar(host=host(runs, [STACKS["checkpoint"]])))
    assert "shows nothing" in found["host-pause"].seen
    assert "checkpoint" not in found


def test_a_gap_in_which_another_process_had_the_core_is_no_pause_of_the_loop(tmp_path):
    preempted = [(500 * MS + 10 * MS * i + 3 * MS, 500 * MS + 10 * MS * i + 7 * MS, 4 * MS) for i in range(3)]
    waits = {str(number): (number - 1) * 4 * MS for number in range(1, 5)}
    beside = sidecar(host=host(preempted=preempted, core_wait_ns=waits))
    found = findings_of(tmp_path, steps_of(paused), headway=beside)
    assert LATE & found.keys() == set()
    assert found["shared-cores"].share == pytest.approx(0.4, abs=0.01)
    assert "shared-cores" not in findings_of(tmp_path, steps_of(paused), headway=sidecar(host=host()))


@pytest.mark.parametrize(("places", "is_told"), [((1, 1, 1), True), ((1, 2, 3), False)])
def test_a_gap_of_a_crowded_machine_is_a_pause_if_every_step_has_it(tmp_path, places, is_told):
    """The thread had a core for 2 ms of each step of 10 ms, nobody knows which: a gap of 5 ms may be all others'."""

    def step(trace, at, number):
        place = places[number // 1000 - 1]
        for k in range(5):
            trace.operator("aten::add", at + k * MS + (5 * MS if k >= place else 0), MS)

    preempted = [(500 * MS + 10 * MS * i, 510 * MS + 10 * MS * i, 8 * MS) for i in range(3)]
    waits = {str(number): (number - 1) * 8 * MS for number in range(1, 5)}
    beside = sidecar(host=host(preempted=preempted, core_wait_ns=waits))
    found = findings_of(tmp_path, steps_of(step), headway=beside)
    assert ("host-pause" in found) == is_told
    assert not is_told or found["host-pause"].share == pytest.approx(0.5, abs=0.01)


def test_a_collection_is_told_from_other_pauses(tmp_path):
    def step(trace, at, number):
        paused(trace, at, number)
        trace.annotation("gc:collection of generation 2", at + 3 * MS + 10 * US, 3900 * US)

    found = findings_of(tmp_path, steps_of(step))
    assert LATE & found.keys() == {"garbage-collection"}
    assert found["garbage-collection"].ns == 3900 * US


def test_a_collection_while_the_device_works_costs_nothing(tmp_path):
    def step(trace, at, number):
        trace.launched("k", at, at + US, 10 * MS, number + 1, operator="aten::add")
        trace.annotation("gc:collection of generation 2", at + 3 * MS, 4 * MS)

    assert LATE & findings_of(tmp_path, steps_of(step)).keys() == set()


def on_a_cpu(trace, at, *, number_of_operators, us, gap_us):
    for i in range(number_of_operators):
        trace.operator("aten::add", at + i * (us + gap_us) * US, us * US)


def test_short_operators_on_a_cpu_are_calls_and_long_ones_work(tmp_path):
    def short(trace, at, _number):
        on_a_cpu(trace, at, number_of_operators=500, us=8, gap_us=12)

    def long(trace, at, _number):
        on_a_cpu(trace, at, number_of_operators=50, us=180, gap_us=20)

    found = findings_of(tmp_path, steps_of(short))
    assert found["launch-bound"].share == pytest.approx(1.0, abs=0.01)
    assert "launch-bound" not in findings_of(tmp_path, steps_of(long))


@pytest.mark.parametrize("count", [1, 20], ids=["one long", "many short"])
def test_collections_between_short_operators_are_no_calls(tmp_path, count):
    def step(trace, at, _number):
        on_a_cpu(trace, at, number_of_operators=500, us=4, gap_us=4)
        for i in range(count):
            trace.annotation("gc:collection of generation 2", at + (4000 + 6000 * i // count) * US, 6000 * US // count)

    found = findings_of(tmp_path, steps_of(step))
    assert found["garbage-collection"].share == pytest.approx(0.6, abs=0.01)
    assert found["launch-bound"].share == pytest.approx(0.4, abs=0.01)
    assert next(iter(found)) == "garbage-collection"
