"""A loop of reinforcement learning with times made up by a law, so that what a fault costs is known exactly.

A forward takes 1 ms a token, backward twice that, and each decode step 20 ms besides. Idle rows take what others do.
"""

from dataclasses import replace

from headway.count import Generation, Workload
from headway.devices import Peak
from headway.meter import Meter
from helpers.device import COST_MODEL, Clock

TOKEN_S, DECODE_STEP_S = 0.001, 0.020
PEAK = Peak("a test", 1e5, "fp32", "made up")  # 30 FLOPs a token and forward: 30 % of it where nothing waits
REFERENCE = replace(COST_MODEL, name="a reference")
HEALTHY = {
    "prompts": [64] * 4, "answers": [25] * 16, "batch": 16, "prefix": "computed once", "updates": 1, "references": 1,
    "reward_s": 0.01, "rest_s": 0.01, "server": None, "ahead": False,
}  # fmt: skip


def metered_loop(path, num_steps=6, log_every=1, **options):
    """Write the records of a loop, a `HEALTHY` one but for what is given; returns the time of a step [s].

    Args:
        path: of the records.
        num_steps: of the loop.
        log_every: steps in a record.
        options: lengths of prompts and answers, answers decoded together, what a group shares, updates of a rollout,
            runs of the reference, time of the reward and in no phase [s]; `server`: devices that answer in place of the
            loop's; `ahead`: whether they do so during the update.
    """
    o = {**HEALTHY, **options}
    clock = Clock()
    work = Generation(
        o["prompts"], o["answers"], group=len(o["answers"]) // len(o["prompts"]), batch_size=o["batch"],
        prefix=o["prefix"],
    )  # fmt: skip
    quantities = work.quantities()
    rollout_s = (quantities["prefill_tokens"] + quantities["decode_slots"]) * TOKEN_S
    rollout_s += quantities["decode_steps"] * DECODE_STEP_S
    tokens = quantities["sequence_tokens"]
    others_s = o["reward_s"] + o["rest_s"] + o["references"] * tokens * TOKEN_S + o["updates"] * 3 * tokens * TOKEN_S
    waited_s = max(0.0, rollout_s - others_s) if o["ahead"] else rollout_s
    sequences = Workload([tokens // len(o["answers"])] * len(o["answers"]))
    with Meter(
        COST_MODEL, others=[REFERENCE], peak=PEAK, clock=clock, memory_bytes_per_s=1e9, log_every=log_every,
        log_to=[path],
    ) as meter:  # fmt: skip
        for _ in range(num_steps):
            with meter.phase("rollout", forward_only=True, num_devices=o["server"]) as phase:
                meter.count(work)
                clock.now_s += waited_s
                if o["server"]:
                    phase.busy_s = rollout_s
            with meter.phase("reward"):
                clock.now_s += o["reward_s"]
            for _ in range(o["references"]):
                with meter.phase("reference", forward_only=True):
                    meter.count(sequences, cost_model=REFERENCE)
                    clock.now_s += tokens * TOKEN_S
            for _ in range(o["updates"]):
                with meter.phase("update"):
                    meter.count(sequences)
                    clock.now_s += 3 * tokens * TOKEN_S
            clock.now_s += o["rest_s"]
            meter.step()
    return waited_s + others_s
