"""Profiles of real loops: what the file holds, that the window changes nothing else, and what goes wrong."""

import copy
import gc
import gzip
import json
import pickle
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import headway
from headway.count import Workload
from headway.count.models import from_dict, to_dict
from headway.errors import UsageError
from headway.explain.breakdown import break_down
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.meter import Meter, pauses
from headway.meter.annotations import _compiled_around
from headway.meter.trace_file import digest_of
from headway.models.compiling import CompileWatch, compile_blocks
from headway.models.recompute import recompute_blocks
from helpers.device import COST_MODEL
from helpers.loops import PEAK, tiny
from helpers.runs import read_metrics
from helpers.traces import share_of_operators_with_an_owner

LENGTHS = [5, 9, 14, 8, 8]


def read(path):
    with gzip.open(path) as file:
        return json.load(file)


def annotations(path):
    return [event for event in read(path)["traceEvents"] if event.get("cat") == "user_annotation"]


def is_in(event, outer):
    return outer["ts"] <= event["ts"] and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"]


def batch_of(length):
    row = torch.arange(length)[None] % 7 + 3
    return {"input_ids": row, "labels": row}


def run(model, meter, *, call=None):
    """Train on one segment a step; returns the losses."""
    call = model if call is None else call
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in meter.batches(map(batch_of, LENGTHS)):
        meter.count(batch)
        loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        meter.step()
    meter.close()
    return losses


def num_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """A plain loop that recomputes its blocks, steps 3 and 4 profiled: its model, meter, lines, file and losses."""
    model, lines = tiny(), []
    recompute_blocks(model.train(), "full,-attention")
    meter = Meter(model, peak=PEAK, recompute="full,-attention", log_every=2)
    before = num_hooks(model)
    with headway.profile(
        meter, tmp_path_factory.mktemp("p") / "deep", steps=range(3, 5), report=lines.append
    ) as window:
        losses = run(model, meter)
    assert num_hooks(model) < before  # the meter's own are gone too
    return model, meter, lines, window.path, losses


def test_records_tell_the_steps_that_were_recorded_and_the_file_what_that_adds(tmp_path):
    model = tiny()
    meter = Meter(model, peak=PEAK, log_every=1, log_to=[tmp_path / "metrics.jsonl"])
    with headway.profile(meter, tmp_path / "p", steps=range(3, 5), report=lambda _: None) as window:
        run(model, meter)
    records = read_metrics(tmp_path / "metrics.jsonl")
    profiled = {record["step"]: record["num_profiled"] for record in records if record["kind"] == "step"}
    assert profiled == {1: 0, 2: 0, 3: 1, 4: 1, 5: 0}
    added = read(window.path)["headway"]["host"]["added_ns"]
    assert added["operator_ns"] >= 0
    assert added["module_ns"] > 0  # whose hooks write two annotations
    assert added["phases_ns"] == {}  # of two steps before it, fewer than can be compared


def test_a_trace_names_steps_phases_and_modules(profiled):
    model, _, lines, path, _ = profiled
    assert path.name == "steps-000003-000004-rank-0.json.gz"
    assert [path.name for path in path.parent.iterdir()] == [path.name]  # nothing else is left there
    names = Counter(event["name"] for event in annotations(path))
    assert [name for name in names if name.startswith("ProfilerStep")] == ["ProfilerStep#3", "ProfilerStep#4"]
    phases = {name: count for name, count in names.items() if name.startswith("phase:")}
    assert phases == {"phase:data_wait": 2, "phase:forward": 2, "phase:logging": 1}  # the window of steps 1 and 2
    paths = {name.removeprefix("module:") for name in names if name.startswith("module:")}
    assert paths == {path for path, module in model.named_modules() if path and not isinstance(module, nn.ModuleList)}
    (line,) = lines
    assert line.startswith(f"profile of steps 3 to 4: {path}; a step took ")
    assert "(medians of 2 and 1); starting and stopping it took" in line


def test_a_profile_is_explained_by_the_phases_that_the_loop_names(tmp_path):
    """A phase within another interrupts it, and one that goes on in the next step is in both."""
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = Meter(model, peak=PEAK, log_every=1)
    with headway.profile(meter, tmp_path, steps=range(2, 5), report=str) as profiled:
        for number, batch in enumerate(map(batch_of, LENGTHS), start=1):
            with meter.phase("reference", forward_only=True), torch.no_grad():
                meter.count(batch)
                model(**batch)
            with meter.phase("update"):
                meter.count(batch)
                model(**batch).loss.backward()
                with meter.phase("score"):
                    time.sleep(0.01)
                optimizer.step()
                if number == 3:
                    meter.step()
            if number != 3:
                meter.step()
    explanation = explain([read_trace(profiled.path)])
    assert [step.step for step in explanation.steps] == [2, 3, 4]
    for step in explanation.steps:
        assert sum(phase.ns for phase in step.phases) == step.duration_ns
        phases = {phase.name: phase.ns for phase in step.phases}
        assert {*phases} == {"reference", "update", "score", "rest"}
        assert phases["score"] >= 9_000_000
        assert min(phases["reference"], phases["update"]) > 0
    loops = [event["name"] for event in annotations(profiled.path) if event["name"].startswith("loop:")]
    assert Counter(loops) == {"loop:reference": 3, "loop:update": 4, "loop:score": 3}
    meter.close()


def test_recomputation_is_a_modules_second_event_outside_of_forward(profiled):
    events = annotations(profiled[3])
    forwards = [event for event in events if event["name"] == "phase:forward"]
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    modules = [event for event in events if event["name"].startswith("module:")]
    assert all(any(is_in(event, step) for step in steps) for event in modules)  # also where recomputation stops early
    for name, again in [("module:model.layers.0.mlp.up_proj", 2), ("module:lm_head", 1)]:
        found = [event for event in events if event["name"] == name]
        assert len(found) == 2 * again  # of two steps
        assert sum(any(is_in(event, forward) for forward in forwards) for event in found) == 2


def test_the_head_of_the_file_explains_it_alone(profiled):
    _, meter, _, path, _ = profiled
    facts = read(path)["headway"]
    assert [facts[name] for name in ("schema_version", "rank", "world_size")] == [1, 0, 1]
    assert (facts["device"], facts["peak_flops_per_s"], facts["peak_source"]) == (
        PEAK.name,
        PEAK.flops_per_s,
        PEAK.source,
    )
    assert (facts["ceiling_flops_per_s"], facts["convention"], facts["recompute"]) == (
        None,
        "useful/1",
        "full,-attention",
    )
    assert 0 < facts["memory"]["peak_bytes"] < facts["memory"]["total_bytes"]
    assert facts["clocks"] is None  # a CPU's
    assert facts["versions"]["torch"] == torch.__version__
    assert isinstance(facts["profiler_overhead_s"], float)
    assert facts["components"]["model.layers.0.mlp.up_proj"] == "language.mlp"
    assert facts["components"] == {row.module: row.component for row in meter.cost_model.rows}
    assert facts["cost_model"] == {"name": meter.cost_model.name, "digest": digest_of(meter.cost_model)}
    assert list(facts["steps"]) == ["3", "4"]
    step, count = facts["steps"]["3"], meter.cost_model.count(Workload([14]), recompute="full,-attention")
    assert Workload(**step["workload"]) == Workload([14])
    assert (step["tokens"], step["slots"], step["padding_flops"]) == (14, 14, 0)
    useful = {name: sum(phases.values()) for name, phases in step["useful_flops"].items()}
    assert useful == count.by_component()
    assert sum(phases["forward"] for phases in step["useful_flops"].values()) == count.forward
    assert sum(step["recomputed_flops"].values()) == count.recompute > 0
    (pack,) = step["packs"]
    assert Workload(**pack["workload"]) == Workload([14])
    pairs = 14 * 15 // 2
    forward = 4 * pairs * 32  # two products of 2 FLOPs for each pair and channel; their results are kept
    layers = [f"model.layers.{i}.self_attn" for i in range(2)]
    assert pack["attention"] == {layer: [forward, 2 * forward, 0] for layer in layers}


def test_a_digest_is_that_of_the_rows_wherever_they_come_from():
    again = from_dict(json.loads(json.dumps(to_dict(COST_MODEL))), "a test")
    assert digest_of(again) == digest_of(COST_MODEL) != digest_of(COST_MODEL.freeze(["language"]))


ROW = batch_of(14)
PAIR = {key: torch.cat([value, value]) for key, value in ROW.items()}  # chosen and rejected, as TRL's DPO joins them
COUNTED = {
    "arguments of a forward": lambda meter: meter.count(ROW),
    "a pair of answers": lambda meter: meter.count({**PAIR, "attention_mask": torch.ones_like(PAIR["input_ids"])}),
    "a workload": lambda meter: meter.count(Workload([3, 9], slots=20)),
    "answers": lambda meter: meter.count(headway.Generation([8, 5], [4, 0, 7, 2], group=2, batch_size=2)),
    "another model": lambda meter: meter.count(ROW, cost_model=COST_MODEL, forward_only=True),
    "a forward alone": lambda meter: meter.count(ROW, forward_only=True),
}


@pytest.mark.parametrize("counted", [*([name] for name in COUNTED), list(COUNTED)], ids="+".join)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_profile_has_the_flops_of_whatever_the_loop_counts_here_as_its_record_has(tmp_path, counted, elsewhere):
    """The forms that `Meter.count` takes, and a rollout on devices of its own, which the trace does not hold."""
    model = tiny()
    with (
        Meter(model, others=[COST_MODEL], peak=PEAK, log_every=1, log_to=[tmp_path / "metrics.jsonl"]) as meter,
        headway.profile(meter, tmp_path, steps=range(2, 4), report=str) as window,
    ):
        for _ in range(4):
            if elsewhere:
                with meter.phase("rollout", forward_only=True, num_devices=2):
                    COUNTED["answers"](meter)
            for name in counted:
                COUNTED[name](meter)
            model(**ROW).loss.backward()
            meter.step()
    records = {r["step"]: r for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "step"}
    steps = read(window.path)["headway"]["steps"]
    assert list(steps) == ["2", "3"]
    for number, facts in steps.items():
        useful = {name: sum(parts.values()) for name, parts in facts["useful_flops"].items()}
        assert sum(useful.values()) == records[int(number)]["flops"]["total"] > 0
    for step in explain([read_trace(window.path)]).steps:
        assert {row.name for row in break_down(step, "component") if row.flops} <= {*useful}
        break_down(step, "attention")


def test_losses_are_the_same_to_the_bit_without_a_window(profiled):
    model = tiny()
    recompute_blocks(model.train(), "full,-attention")
    assert run(model, Meter(model, peak=PEAK)) == profiled[4]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.down(self.up(x))


class Held(nn.Module):
    """A model whose blocks hold two layers, and a loss."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


def compiled_outside(model):
    return torch.compile(model, backend="eager"), set()


def compiled_in_place(model):
    for block in model.blocks:
        block.compile(backend="eager")
    return model, {"blocks.0", "blocks.1"}


def compiled_forwards(model):
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="eager")
    return model, {"blocks.0", "blocks.1"}


def compiled_wrappers(model):
    model.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in model.blocks)
    return model, {"blocks.0", "blocks.1"}


def train_held(compile_it, window):
    """Take three steps; returns the compilations and the modules' names in the trace."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Held()
    meter = Meter(model, cost_model=COST_MODEL, peak=PEAK, log_every=9)
    call, named = compile_it(model)
    num_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    records = len(torch._dynamo.utils.get_compilation_metrics())
    with window(meter) as profile:
        for _ in range(3):
            meter.count(Workload([4]))
            call(torch.ones(4, 3)).backward()
            meter.step()
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"] - num_before
    return (made, len(torch._dynamo.utils.get_compilation_metrics()) - records), profile, named


@pytest.mark.parametrize(
    ("compile_it", "first"),  # the first step is before anything is compiled, the second after it
    [
        (compiled_outside, 1),
        (compiled_outside, 2),
        (compiled_in_place, 1),
        (compiled_forwards, 1),
        (compiled_wrappers, 2),
    ],
)
def test_a_window_compiles_nothing_again_and_a_compiled_module_is_one_unit(tmp_path, compile_it, first):
    plain, _, named = train_held(compile_it, lambda _: nullcontext())
    with_window, profile, _ = train_held(
        compile_it, lambda meter: headway.profile(meter, tmp_path, steps=range(first, first + 1))
    )
    assert with_window[0] == plain[0] > 0
    assert with_window[1] <= plain[1]  # hooks of the meter, which hold no operation, are looked at by the compiler too
    found = {event["name"].removeprefix("module:") for event in annotations(profile.path) if "module:" in event["name"]}
    assert found == named


@pytest.mark.slow
def test_blocks_that_the_engine_compiles_are_units(tmp_path):
    torch._dynamo.reset()
    model = tiny().train()
    compile_blocks(model, CompileWatch(), "eager")
    meter = Meter(model, peak=PEAK)
    with headway.profile(meter, tmp_path, steps=range(2, 3)) as window:
        run(model, meter)
    names = {event["name"] for event in annotations(window.path)}
    assert {"module:model.layers.0", "module:model.norm", "module:lm_head"} <= names
    assert not [name for name in names if name.startswith("module:model.layers.0.")]
    (waterfall,) = explain([read_trace(window.path)]).steps
    rows = {row.name: row for row in break_down(waterfall, "component")}
    assert share_of_operators_with_an_owner(waterfall) > 0.95
    ran = meter.cost_model.count(Workload([LENGTHS[1]])).by_component()
    products = {name: flops for name, flops in ran.items() if name not in ("language.head", "language.attention")}
    assert rows["language.products"].flops == sum(products.values())
    assert rows["language.attention"].flops == ran["language.attention"]
    assert not products.keys() & rows.keys()


def loop(meter, *, before_step=lambda _: None, closes=False):
    for number in range(4):
        meter.count(Workload([4], slots=6))
        before_step(number + 1)
        meter.step()
    if closes:
        meter.close()


def plain_meter(**options):
    return Meter(COST_MODEL, peak=PEAK, device=torch.device("cpu"), **options)


def test_a_run_that_goes_on_in_the_middle_of_the_window_records_the_rest_of_it(tmp_path):
    meter = plain_meter(steps_before=10)
    with headway.profile(meter, tmp_path, steps=range(9, 13)) as window:
        loop(meter)
    assert window.path.name == "steps-000011-000012-rank-0.json.gz"
    steps = read(window.path)["headway"]["steps"]
    assert list(steps) == ["11", "12"]
    assert steps["11"]["padding_flops"] == 2 * 90  # of two slots


def test_the_file_of_each_rank_that_shares_a_batch_has_its_share_of_the_work(tmp_path, monkeypatch):
    steps = []
    for rank in (0, 1):
        monkeypatch.setattr("headway.meter.batch_share.rank_and_size", lambda rank=rank: (rank, 2))
        meter = plain_meter(batch_ranks=2)
        with headway.profile(meter, tmp_path / str(rank), steps=range(1, 2)) as window:
            meter.count(Workload([4], slots=6))
            meter.step()
            assert meter.close().tokens == (4 if rank == 0 else 0)  # counted once
        steps.append(read(window.path)["headway"]["steps"]["1"])
    assert steps[0] == steps[1]
    assert steps[0]["useful_flops"] == {"language.mlp": {"forward": 60, "backward": 120}}  # half of 4 tokens' 30
    assert (steps[0]["tokens"], steps[0]["padding_flops"]) == (4, 90)


def test_a_loop_that_ends_within_the_window_leaves_what_there_is(tmp_path):
    meter = plain_meter()
    with headway.profile(meter, tmp_path, steps=range(4, 9)) as window:
        loop(meter, closes=True)
    assert window.path.name == "steps-000004-000004-rank-0.json.gz"


@pytest.mark.parametrize("closes", [True, False])
def test_a_window_that_the_loop_does_not_reach_is_a_warning(tmp_path, closes):
    meter = plain_meter(steps_before=2)
    words = r"steps 9 to 10 were to be profiled, but the loop took steps 3 to 6: there is no trace"
    with pytest.warns(UserWarning, match=words), headway.profile(meter, tmp_path, steps=range(9, 11)) as window:
        loop(meter, closes=closes)
    assert window.path is None


def test_a_block_in_which_no_loop_runs_is_a_warning(tmp_path):
    with (
        pytest.warns(UserWarning, match="no loop with a meter has run"),
        headway.profile(None, tmp_path, steps=range(1, 2)),
    ):
        pass
    loop(plain_meter())  # which nobody watches any more
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": range(3, 3)}, r"steps=range\(3, 3\) to profile: give steps in a row, from 1 on"),
        ({"steps": range(3)}, "from 1 on"),
        ({"steps": range(1, 9, 2)}, "in a row"),
        ({"steps": range(1, 2), "ranks": []}, r"ranks=\[\] to profile: give at least one"),
        ({"steps": range(1, 2), "ranks": [0, 2]}, "rank 2 is to be profiled, and there are 1 processes, ranks 0 to 0"),
    ],
)
def test_what_cannot_be_profiled_is_an_error(tmp_path, options, words):
    with pytest.raises(UsageError, match=words), headway.profile(meter := plain_meter(), tmp_path, **options):
        loop(meter)
    loop(plain_meter())  # nothing lasts


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    meter, words = plain_meter(), r"the folder .*file/p for profiles cannot be made: Not a directory"
    with pytest.raises(UsageError, match=words), headway.profile(meter, tmp_path / "file" / "p", steps=range(1, 2)):
        loop(meter)


def test_a_file_that_cannot_be_written_stops_no_training(tmp_path):
    meter, folder = plain_meter(), tmp_path / "p"

    def lose_the_folder(number):
        if number == 2:
            folder.rmdir()
            folder.touch()

    words = "The profile: FileExistsError: .* Training goes on without"
    with pytest.warns(RuntimeWarning, match=words), headway.profile(meter, folder, steps=range(2, 3)) as window:
        loop(meter, before_step=lose_the_folder)
    assert (meter.num_steps, window.path) == (4, None)


def test_a_second_profiler_in_the_process_is_a_warning(tmp_path):
    meter, words = plain_meter(), "step 2 is not profiled, since another profiler records in this process"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as other:
        with pytest.warns(UserWarning, match=words), headway.profile(meter, tmp_path, steps=range(2, 3)) as window:
            loop(meter)
        torch.ones(3) + 1
    assert (meter.num_steps, window.path) == (4, None)
    assert "aten::add" in {event.key for event in other.key_averages()}


def test_an_error_in_the_window_leaves_no_file_and_no_hooks(tmp_path):
    model = Held()
    before = num_hooks(model)
    meter = Meter(model, cost_model=COST_MODEL, peak=PEAK)

    def fail(number):
        if number == 2:
            assert num_hooks(model) > before + 2
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"), meter, headway.profile(meter, tmp_path, steps=range(2, 4)):
        loop(meter, before_step=fail)
    assert num_hooks(model) == before
    assert not list(tmp_path.iterdir())


def test_a_model_can_be_copied_and_pickled_in_the_window(tmp_path):
    model = Held()
    meter = Meter(model, cost_model=COST_MODEL, peak=PEAK)
    copies = []

    def take_copies(number):
        if number == 1:
            copies.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])
            for one in copies:
                one(torch.ones(1, 3))

    with headway.profile(meter, tmp_path, steps=range(1, 2)) as window:
        loop(meter, before_step=take_copies)
    assert len(copies) == 2
    assert not [event for event in annotations(window.path) if event["name"].startswith("module:")]


def test_a_loop_without_a_model_has_no_module_names_unless_it_is_given(tmp_path):
    for model, names in ((None, set()), (Held(), {"module:blocks.0", "module:blocks.0.up"})):
        meter, called = plain_meter(), Held() if model is None else model
        with headway.profile(meter, tmp_path, steps=range(1, 2), model=model) as window:
            loop(meter, before_step=lambda _, called=called: called(torch.ones(1, 3)))
        found = {event["name"] for event in annotations(window.path) if event["name"].startswith("module:")}
        assert found >= names
        assert bool(found) == (model is not None)


def paused_loop(tmp_path, action, *, steps=range(2, 4)):
    """Profile steps that do something else before their work; returns what the file's head says, and annotations."""
    meter = plain_meter()
    with headway.profile(meter, tmp_path, steps=steps, report=lambda _: None) as window:
        loop(meter, before_step=action)
    meter.abandon()
    return read(window.path)["headway"]["host"], annotations(window.path)


def spend_time(_number):
    """Keep the loop's thread busy for longer than several samples are apart."""
    end = time.perf_counter() + 0.1
    while time.perf_counter() < end:
        pass


def test_a_profile_holds_the_stacks_of_its_steps_and_no_others(tmp_path):
    host, _ = paused_loop(tmp_path, spend_time)
    own = [number for number, stack in enumerate(host["stacks"]) if stack[0].startswith("spend_time (")]
    assert own
    begin, end = min(host["step_ns"].values()), max(host["step_ns"].values())
    runs = [run for run in host["runs"] if run[2] in own]
    assert all(run[0] >= begin - 10**9 and run[1] <= end + 60 * 10**9 for run in runs)
    assert sum(run[1] - run[0] for run in runs) > 0
    assert len(host["step_ns"]) == 2
    assert not host["anomaly_mode"]


def test_no_thread_and_no_callback_outlasts_the_window(tmp_path):
    callbacks, threads = set(gc.callbacks), set(threading.enumerate())
    paused_loop(tmp_path, lambda _: None)
    assert {*gc.callbacks} <= callbacks  # meters of other tests may leave meanwhile
    assert {*threading.enumerate()} <= threads


@pytest.mark.slow
def test_collections_of_garbage_are_annotated_in_the_window_alone(tmp_path):
    _, named = paused_loop(tmp_path, lambda _: gc.collect())
    full = [event for event in named if event["name"] == "gc:collection of generation 2"]
    assert len(full) == 2  # one in each profiled step, of all steps


def test_anomaly_mode_is_noted(tmp_path):
    with torch.autograd.set_detect_anomaly(True):
        host, _ = paused_loop(tmp_path, lambda _: None)
    assert host["anomaly_mode"]


def test_what_is_recorded_of_the_host_is_bounded(monkeypatch):
    """Runs of stacks that never repeat are thinned: the longest stay."""
    monkeypatch.setattr(pauses, "_EVERY_S", 1e-4)
    monkeypatch.setattr(pauses, "_MOST_RUNS", 20)
    evidence = pauses.HostEvidence(lambda _: nullcontext())
    evidence.open()
    for line in range(200):
        exec(compile("\n" * line + "sum(range(20000))", "varied.py", "exec"))
    evidence.close()
    facts = evidence.facts()
    assert len(facts["runs"]) <= 20
    assert all(begin <= end for begin, end, _ in facts["runs"])
    json.dumps(facts)


def test_an_evaluation_that_logs_goes_on_as_an_evaluation(tmp_path):
    meter = plain_meter()

    def evaluate(_number):
        meter.leave("evaluation")
        with torch.no_grad():
            for watcher in meter.watchers:
                watcher.begin("logging")
                watcher.end("logging")
            torch.ones(3).exp()
        meter.back()

    with headway.profile(meter, tmp_path, steps=range(2, 4), report=lambda _: None) as window:
        loop(meter, before_step=evaluate)
    events = read(window.path)["traceEvents"]
    phases = [event for event in events if event.get("name") == "phase:evaluation"]
    assert len(phases) == 4  # before the logging and after it, in each step
    exps = [event for event in events if event.get("name") == "aten::exp"]
    assert len(exps) == 2
    assert all(any(is_in(event, phase) for phase in phases) for event in exps)


def test_importing_the_name_loads_no_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "headway.meter.profile")
    torch_before = sys.modules.pop("torch")
    try:
        assert headway.profile.__module__ == "headway.meter.profile"
        assert "torch" not in sys.modules
    finally:
        sys.modules["torch"] = torch_before


@pytest.mark.slow
def test_looking_for_compiled_modules_holds_nothing_that_other_threads_are_making():
    """A tuple that grows while somebody else holds it is a SystemError in CPython (`_PyTuple_Resize`)."""
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    failed, is_done = [], threading.Event()

    def make_tuples():
        try:
            while not is_done.is_set():
                tuple(number for number in range(200))
        except SystemError as error:
            failed.append(error)

    interval_s = sys.getswitchinterval()
    maker = threading.Thread(target=make_tuples)
    maker.start()
    try:
        sys.setswitchinterval(1e-5)
        for _ in range(10):
            assert _compiled_around()[id(model._orig_mod)] is model
    finally:
        sys.setswitchinterval(interval_s)
        is_done.set()
        maker.join()
    assert failed == []
