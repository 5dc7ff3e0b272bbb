"""Records of other trainers' steps from their lengths and times: what a meter around the same step would have said."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import Generation, Meter, Peak, Workload
from headway.errors import UsageError, WorkloadError
from headway.integrations.rl import TRAINERS, TrainerPhases
from headway.meter.step_phases import REST, PhaseDevices
from headway.tracing import trace
from helpers.device import COST_MODEL, Clock
from helpers.models import tiny_model

PEAK = Peak("a test", 1e12, "bf16", "made up")
CRITIC = replace(COST_MODEL, name="critic")
POLICY = trace(tiny_model("qwen3"))
# what each time of a trainer is of, written out apart from its table: (model, with a backward)
RUNS = {
    "verl": {"old_log_prob": ["policy"], "ref": ["policy"], "values": ["critic"], "update_actor": ["policy+"],
             "update_critic": ["critic+"], "reward": [], "adv": []},
    "nemo-rl": {"policy_and_reference_logprobs": ["policy", "policy"], "value_inference": ["critic"],
                "policy_training": ["policy+"], "value_training": ["critic+"], "weight_sync": []},
    "slime": {"log_probs": ["policy"], "ref_log_probs": ["policy"], "actor_train": ["policy+"], "update_weights": []},
    "miles": {"log_probs": ["policy"], "ref_log_probs": ["policy"], "actor_train": ["policy+"], "sleep": []},
    "prime-rl": {"forward_backward": ["policy+"], "wait_for_batch": [], "broadcast_weights": []},
    "openrlhf": {"make_experience": ["policy", "policy", "critic"], "ppo_train": ["policy+", "critic+"],
                 "broadcast": []},
}  # fmt: skip
GENERATES = {"verl": "gen", "nemo-rl": "generation", "slime": "rollout", "miles": "rollout", "prime-rl": "rollout",
             "openrlhf": "generation"}  # fmt: skip


def metered(trainer, prompts, answers, group, spans_s, rest_s):
    """The step's record by a meter, whose clock the test moves."""
    clock = Clock()
    meter = Meter(POLICY, others=[CRITIC], peak=PEAK, clock=clock, log_every=1)
    samples = [prompt + answers[i * group + k] for i, prompt in enumerate(prompts) for k in range(group)]
    meter.count(Workload())
    for name, seconds in spans_s.items():
        with meter.phase(name):
            if name == GENERATES[trainer]:
                meter.count(Generation(prompts, answers, group=group, prefix="computed once"))
            for run in RUNS[trainer].get(name, ()):
                whole = Workload(samples).with_counts(supervised=sum(answers))
                model = CRITIC if run.startswith("critic") else None
                meter.count(whole, cost_model=model, forward_only=not run.endswith("+"))
            clock.now_s += seconds
    clock.now_s += rest_s
    return meter.step()


def same(ours, theirs, without=frozenset()):
    assert ours.keys() == theirs.keys()
    assert ours["flops"] == theirs["flops"]
    keys = ours.keys() - {"flops", *without}
    assert {key: ours[key] for key in keys} == pytest.approx({key: theirs[key] for key in keys})


@settings(max_examples=40, deadline=None)
@given(
    trainer=st.sampled_from(sorted(TRAINERS)),
    group=st.integers(1, 3),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=4),
    seconds=st.lists(st.integers(0, 4000), min_size=9, max_size=9),
    rest=st.integers(1, 2000),
    data=st.data(),
)
def test_lengths_and_times_give_the_record_that_a_meter_writes(trainer, group, lengths, seconds, rest, data):
    prompts = [prompt for prompt, _ in lengths]
    answers = [answer + k for _, answer in lengths for k in range(group)]
    names = data.draw(st.lists(st.sampled_from([GENERATES[trainer], *RUNS[trainer]]), min_size=1, unique=True))
    ordered = [name for name in TRAINERS[trainer].phases if name in names]
    spans_s = {name: ms / 1024 for name, ms in zip(ordered, seconds, strict=False)}
    times = {**spans_s, TRAINERS[trainer].total: sum(spans_s.values()) + rest / 1024}
    phases = TrainerPhases(trainer, POLICY, PEAK, group=group, critic=CRITIC)
    window = phases.window(times, prompts, answers)
    expected = metered(trainer, prompts, answers, group, spans_s, rest / 1024)
    assert list(window.phases) == [*ordered, REST]
    # MBU is what this knows and a meter of a cost model does not
    for name in {*window.phases} & {*expected.phases}:
        same(
            window.phases[name].to_dict(),
            expected.phases[name].to_dict(),
            without={"mbu", "bytes_moved", "bound", "weight_bytes"},
        )
    assert {*expected.phases} <= {*window.phases}
    assert window.flops.total == expected.flops.total == sum(p.flops.total for p in window.phases.values())
    assert sum(p.loop_s for p in window.phases.values()) == pytest.approx(window.wall_s)
    ours, theirs = window.to_dict(), expected.to_dict()
    for key in ("mfu", "tokens", "supervised", "segments", "flops", "wall_s", "num_steps", "tokens_per_s", "kind"):
        assert ours[key] == pytest.approx(theirs[key]), key
    assert ours.keys() >= {*theirs} - {"anomaly_mode", "weights_dtype"}


VERL = {"timing_s/gen": 4.0, "timing_s/old_log_prob": 1.0, "timing_s/update_actor": 2.0, "timing_s/step": 8.0}


def test_a_step_of_verl_to_the_flop():
    # 30 FLOPs a token, 90 with a backward; 8 devices share it; logs' keys and workers' names are the same to it
    phases = TrainerPhases("verl", COST_MODEL, PEAK, num_devices=8, group=2, memory_bytes_per_s=1e6)
    window = phases.window(VERL, [10, 20], [5, 6, 7, 0], extra={"reward": 0.5})
    record = window.to_dict()
    flops = {name: phase["flops"]["total"] for name, phase in record["phases"].items()}
    tokens = 2 * 30 + 18  # each prompt with both its answers
    assert flops == {"gen": 30 * (30 + 4 + 5 + 6), "old_log_prob": 30 * tokens, "update_actor": 90 * tokens, "rest": 0}
    assert record["phases"]["gen"]["mfu"] == pytest.approx(30 * 45 / 4.0 / 8e12)
    assert (record["wall_s"], record["phases"]["rest"]["wall_s"], record["reward"]) == (8.0, 1.0, 0.5)
    assert (record["tokens"], record["supervised"]) == (tokens, 18)
    assert (record["world_size"], record["balance"], len(record["rank_flops"])) == (8, 1.0, 8)
    # 15 weights of 2 bytes in the prefill and in each of the 6 steps of the longest answer; a forward reads them once
    assert record["phases"]["gen"]["bytes_moved"] == 30 * 7
    assert record["phases"]["old_log_prob"]["bytes_moved"] == 30
    assert record["phases"]["gen"]["mbu"] == pytest.approx(30 * 7 / 4.0 / 8e6)
    bare = {name.removeprefix("timing_s/"): seconds for name, seconds in VERL.items()}
    assert phases.window(bare, [10, 20], [5, 6, 7, 0], extra={"reward": 0.5}).to_dict() == record


def test_engines_read_the_weights_each_for_itself():
    # the longest answers of both engines: 6 and 9
    one, two = (
        TrainerPhases("verl", COST_MODEL, PEAK, num_engines=n).window(VERL, [5, 5, 5, 5], [6, 2, 9, 1]) for n in (1, 2)
    )
    assert (one.phases["gen"].bytes_moved, two.phases["gen"].bytes_moved) == (30 * 9, 30 * (1 + 5 + 8))
    assert one.flops == two.flops


def test_bytes_are_those_that_a_meter_finds_on_the_model():
    clock, model = Clock(), tiny_model("qwen3")
    meter = Meter(model, peak=PEAK, clock=clock, log_every=1, memory_bytes_per_s=1e9)
    generation = Generation([9, 5], [4, 7])
    with meter.phase("gen", forward_only=True):
        meter.count(generation)
        clock.now_s += 1.0
    meter.count(generation.samples)
    expected = meter.step().phases["gen"]
    meter.close()
    phases = TrainerPhases("verl", meter.cost_model, PEAK, memory_bytes_per_s=1e9, element_bytes=4)
    gen = phases.window({"gen": 1.0, "step": 1.0}, [9, 5], [4, 7]).phases["gen"]
    assert gen.bytes_moved == expected.bytes_moved > 0
    same(gen.to_dict(), expected.to_dict())


def test_devices_that_generate_beside_the_loop():
    server = PhaseDevices(Peak("a server's", 1e6, "fp8", "made up"), 4, math.nan)
    phases = TrainerPhases("prime-rl", COST_MODEL, PEAK, rollout=server)
    times = {"time/step": 3.0, "time/wait_for_batch": 1.0, "time/forward_backward": 2.0, "rollout": 2.5}
    window = phases.window(times, [10], [5])
    rollout = window.phases["rollout"]
    assert (rollout.loop_s, rollout.wall_s, rollout.world_size, rollout.is_elsewhere) == (0.0, 2.5, 4, True)
    assert rollout.mfu == pytest.approx(30 * 14 / 2.5 / 4e6)
    assert window.flops.total == 90 * 15
    assert sum(phase.loop_s for phase in window.phases.values()) == window.wall_s == 3.0


def test_pictures_of_prompts_are_read_by_every_phase():
    phases = TrainerPhases("verl", "qwen3-vl-8b", PEAK, group=2)
    grids = [(1, 16, 16)]
    window = phases.window(VERL, [100], [30, 40], media={"images": grids})
    update = window.phases["update_actor"]
    expected = phases.models["policy"].count(Workload([130, 140], [*grids, *grids]))
    assert update.flops.total == expected.total
    assert window.phases["old_log_prob"].flops.total == expected.forward
    assert window.to_dict()["images"] == 2


@pytest.mark.parametrize(
    ("options", "times", "answers", "error"),
    [
        ({"trainer": "verrl"}, VERL, [1], r"trainer='verrl' is not known; known are verl, nemo-rl"),
        ({"num_engines": 0}, VERL, [1], r"num_engines=0: give a whole number, 1 or more"),
        ({}, {"timing_s/generate": 3.0}, [1], r"\['timing_s/generate'\] name no phase of verl; its phases are gen, "),
        ({}, {"gen": -1.0}, [1], r"gen=-1.0: a time is 0 s or more"),
        ({}, {"gen": float("nan")}, [1], r"gen=nan: a time"),
        ({}, {"gen": 3.0, "update_actor": 2.0, "step": 4.0}, [1], r"phases of 5 s do not fit into a step of 4 s: "),
        ({}, {"values": 3.0}, [1], r"values is of the critic, which is not given: critic= takes its cost model"),
        ({"reference": False}, {"ref": 3.0}, [1], r"ref is of the reference, which is not given"),
        ({}, VERL, [1, 2], r"2 answers to 1 prompts in groups of 1"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_named(options, times, answers, error):
    with pytest.raises((UsageError, WorkloadError), match=error):
        TrainerPhases(**{"trainer": "verl", "policy": COST_MODEL, "peak": PEAK, **options}).window(times, [5], answers)


def test_a_worker_needs_no_torch_for_it():
    code = "import sys, headway.integrations.rl; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
