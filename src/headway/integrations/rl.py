"""Steps of trainers whose workers hold lengths and times: verl, NeMo RL, slime, miles, prime-rl, OpenRLHF.

Nothing is metered: what a worker holds anyhow becomes the record that a meter around the step would have written.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from headway.count import CostModel, Generation, Workload, load_cost_model
from headway.count.generation import Prefix
from headway.count.integers import IntsLike
from headway.devices import Peak
from headway.errors import UsageError
from headway.meter.clock import Mark, Span
from headway.meter.memory_traffic import forward_traffic_of
from headway.meter.pending import Billing, PendingStep, PendingSteps
from headway.meter.step_clock import StepTime
from headway.meter.step_phases import PhaseDevices, PhaseTimes
from headway.meter.tally import Sums, Tally
from headway.meter.window import Window

_SLACK = 0.01  # by how much times of phases may add up to more than the step's, as rounded ones do


@dataclass(frozen=True, slots=True)
class Trainer:
    """Names of a trainer's times.

    Attributes:
        form: key of a time in its logs, with {} for its name.
        total: name of the whole step's time.
        phases: name of each time -> what its models run in it: `answers`, a forward of `policy`, `reference` or
            `critic`, an `update` or a `critic update`; nothing of what moves weights or computes rewards.
    """

    form: str
    total: str
    phases: Mapping[str, tuple[str, ...]]

    def times(self, logged: Mapping[str, Any]) -> dict[str, float]:
        """Pick the times of phases, and the step's, out of the numbers of a worker or a log, by name [s]."""
        keys = {name: (name, self.form.format(name)) for name in (*self.phases, self.total)}
        return {name: float(logged[key]) for name, pair in keys.items() for key in pair[::-1] if key in logged}


_FORWARDS = {"log_probs": ("policy",), "ref_log_probs": ("reference",), "values": ("critic",)}
_SLIME = Trainer(
    "perf/{}_time", "step",
    {
        "rollout": ("answers",), **_FORWARDS, "critic_train": ("critic update",), "actor_train": ("update",),
        **dict.fromkeys(("sleep", "wake_up", "update_weights", "data_preprocess"), ()),
    },
)  # fmt: skip
TRAINERS: Mapping[str, Trainer] = {
    # verl-project/verl, verl/trainer/ppo/ray_trainer.py, marked_timer, and metric_utils.py, compute_timing_metrics
    # (commit 1dda039b9, 22 Aug 2026)
    "verl": Trainer(
        "timing_s/{}", "step",
        {
            "gen": ("answers",), "reward": (), "old_log_prob": ("policy",), "ref": ("reference",),
            "values": ("critic",), "adv": (), "update_critic": ("critic update",), "update_actor": ("update",),
            "update_weights": (),
        },
    ),
    # NVIDIA-NeMo/RL, nemo_rl/algorithms/grpo.py and ppo.py, timer.time (commit 7ea279abf, 22 Aug 2026)
    "nemo-rl": Trainer(
        "timing/train/{}", "total_step_time",
        {
            "prepare_for_generation/total": (), "weight_sync": (), "generation": ("answers",),
            "exposed_generation": (), "reward_calculation": (), "data_processing": (), "logprob_inference_prep": (),
            "policy_and_reference_logprobs": ("policy", "reference"), "value_inference": ("critic",),
            "advantage_calculation": (), "training_prep": (), "policy_training": ("update",),
            "value_training": ("critic update",),
        },
    ),
    # THUDM/slime, slime/backends/megatron_utils/actor.py and observability/train_metric_utils.py (commit 624b824a8, 21
    # Aug 2026); radixark/miles, the same files (commit 31f1ca961, 21 Aug 2026)
    "slime": _SLIME,
    "miles": _SLIME,
    # PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/train.py (commit 559b44772, 21 Aug 2026); its rollout is that
    # of other devices, whose time the orchestrator has
    "prime-rl": Trainer(
        "time/{}", "step",
        {"rollout": ("answers",), "wait_for_batch": (), "load_data": (), "forward_backward": ("update",),
         "broadcast_weights": ()},
    ),
    # OpenRLHF/OpenRLHF, openrlhf/trainer/ppo_trainer.py (commit 3c3be6234, 13 Aug 2026)
    "openrlhf": Trainer(
        "timing/{}", "step_total",
        {"generation": ("answers",), "make_experience": ("policy", "reference", "critic"),
         "ppo_train": ("update", "critic update"), "broadcast": ()},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class TrainerPhases:
    """Records of a trainer's steps, by phase, from lengths and times.

    Args:
        trainer: `verl`, `nemo-rl`, `slime`, `miles`, `prime-rl` or `openrlhf`: its times are known by its own names.
        policy: cost model of the model that is trained, or the name of a shipped one.
        peak: of one device.
        num_devices: devices of the job, without those of `rollout`.
        memory_bytes_per_s: memory bandwidth of one device [B/s]; NaN where MBU is not asked for.
        group: answers to each prompt.
        prefix: what answers to one prompt share, as for `Generation`.
        num_engines: engines that generate side by side, each of which reads the weights for itself. Prompts are taken
            to be dealt to them in runs.
        rollout: devices that generate and do nothing else; None where it is all of them. Their time may go on beside
            the loop, whose own time of the phase is then at most what no other phase claims.
        reference: cost model of the reference, where it is not the policy's; False where there is none.
        critic: cost model of the critic, if there is one.
        epochs: times that each sample is trained on in a step.
        element_bytes: of weights and of cached keys and values where answers are generated and samples scored.

    Raises:
        UsageError: an unknown trainer, a number below 1.

    >>> from headway.devices import named_peak
    >>> phases = TrainerPhases("verl", "qwen3-8b", named_peak("H100", "bf16"), num_devices=8, group=2)
    >>> times = {"gen": 4.0, "old_log_prob": 0.5, "update_actor": 1.5, "step": 6.5}
    >>> window = phases.window(times, prompts=[300, 500], answers=[900, 1200, 400, 700])
    >>> {name: round(phase.mfu, 4) for name, phase in window.phases.items()}
    {'gen': 0.0019, 'old_log_prob': 0.0188, 'update_actor': 0.0188, 'rest': 0.0}
    """

    trainer: str
    policy: CostModel | str
    peak: Peak
    num_devices: int = 1
    memory_bytes_per_s: float = math.nan
    group: int = 1
    prefix: Prefix = "computed once"
    num_engines: int = 1
    rollout: PhaseDevices | None = None
    reference: CostModel | str | bool = True
    critic: CostModel | str | None = None
    epochs: int = 1
    element_bytes: int = 2

    def __post_init__(self) -> None:
        if self.trainer not in TRAINERS:
            raise UsageError(f"trainer={self.trainer!r} is not known; known are {', '.join(TRAINERS)}.")
        counts = {name: getattr(self, name) for name in ("num_devices", "num_engines", "epochs", "element_bytes")}
        if low := [f"{name}={number}" for name, number in counts.items() if number < 1]:
            raise UsageError(f"{', '.join(low)}: give a whole number, 1 or more.")

    @cached_property
    def models(self) -> dict[str, CostModel]:
        """Cost models by what runs them: the policy, and a reference and a critic of their own, if any."""
        by_role = {"policy": self.policy, "reference": self.reference, "critic": self.critic}
        return {
            name: load_cost_model(model) if isinstance(model, str) else model
            for name, model in by_role.items()
            if isinstance(model, CostModel | str)
        }

    def window(
        self,
        times: Mapping[str, Any],
        prompts: IntsLike,
        answers: IntsLike,
        *,
        media: Mapping[str, Any] | None = None,
        step: int = 1,
        extra: Mapping[str, Any] | None = None,
    ) -> Window:
        """Put together the record of a step.

        Args:
            times: of the step and its phases by the trainer's names, as its workers or its logs have them [s]; others
                are left to the rest.
            prompts: lengths of the prompts of all devices [tokens], shape (P,).
            answers: lengths of the answers [tokens], shape (P * group,), those of one prompt in a row.
            media: images and videos of the prompts, as for `Generation`.
            step: number of the step.
            extra: the loop's own numbers (loss, reward).

        Returns:
            The step as a window of one step, with its phases; `to_dict` is the record.

        Raises:
            UsageError: no phase among the times, times that contradict each other, a phase of a model that was not
                given.
            WorkloadError: lengths that `Generation` refuses.
        """
        spans_s, step_s = self._spans(times)
        work = self._generation(prompts, answers, media or {})
        batches = [batch for name in spans_s for batch in self._batches(name, work)]
        # phases one after the other, and the rest of the step behind them
        ends = np.cumsum([0.0, *spans_s.values()]).tolist()
        spans = [(name, Span(Mark(None, ends[i]), Mark(None, ends[i + 1]))) for i, name in enumerate(spans_s)]
        apart = self._apart(spans_s)
        busy_s = {name: TRAINERS[self.trainer].times(times)[name] for name in apart}
        time = StepTime(Mark(None, step_s), 0.0, {}, [], PhaseTimes(spans, busy_s), None, 0.0, compiled=False)
        # The step is finished as a meter finishes a step that its device has passed.
        models = tuple(self.models.values())
        bytes_of = {i: self._traffic(model) for i, model in enumerate(models)}
        pending = PendingSteps(models, Mark(None, 0.0), forwards=bytes_of, elsewhere=apart)
        done = PendingStep(step, time, [], skipped=False, left_out=False, batches=batches, extra=extra or {})
        pending.steps.append(done)
        sums = pending.take()
        others = [Sums() for _ in range(self.num_devices - 1)]  # devices that share the step's work
        tally = Tally(self.peak, peak_bytes_per_s=self.memory_bytes_per_s, batch_ranks=self.num_devices, devices=apart)
        window = tally.window([sums, *others], 0, step, dict(extra or {}))
        assert window is not None, "its one step is counted"
        return window

    def _spans(self, times: Mapping[str, Any]) -> tuple[dict[str, float], float]:
        """Take the loop's time of each phase, and the step's, out of the trainer's measurements [s]."""
        trainer = TRAINERS[self.trainer]
        spans_s = trainer.times(times)
        if odd := [f"{name}={seconds}" for name, seconds in spans_s.items() if not 0 <= seconds < math.inf]:
            raise UsageError(f"{', '.join(odd)}: a time is 0 s or more.")
        step_s = spans_s.pop(trainer.total, None)
        if not spans_s:
            raise UsageError(
                f"times={list(times)} name no phase of {self.trainer}; its phases are {', '.join(trainer.phases)}."
            )
        if step_s is None:
            return spans_s, sum(spans_s.values())
        for name in self._apart(spans_s):
            others_s = sum(spans_s.values()) - spans_s[name]
            spans_s[name] = min(spans_s[name], max(step_s - others_s, 0.0))
        claimed_s = sum(spans_s.values())
        if claimed_s > step_s * (1 + _SLACK):
            raise UsageError(
                f"phases of {claimed_s:g} s do not fit into a step of {step_s:g} s: {self.trainer} ran some beside the "
                "others. Say which devices generate alone: rollout=PhaseDevices(...)."
            )
        return spans_s, max(step_s, claimed_s)

    def _apart(self, phases: Iterable[str]) -> dict[str, PhaseDevices]:
        runs = TRAINERS[self.trainer].phases
        return {name: self.rollout for name in phases if self.rollout is not None and "answers" in runs[name]}

    def _generation(self, prompts: IntsLike, answers: IntsLike, media: Mapping[str, Any]) -> Generation:
        """Build the work of answering the prompts; every engine goes on until the longest of its answers."""
        work = Generation(prompts, answers, group=self.group, prefix=self.prefix, media=media)
        if self.num_engines == 1:
            return work
        longest = np.maximum(work.answers.reshape(-1, self.group).max(axis=1, initial=0) - 1, 0)
        parts = np.array_split(longest, self.num_engines)
        steps = sum(int(part.max(initial=0)) for part in parts)
        return Generation(prompts, answers, group=self.group, prefix=self.prefix, media=media, decode_steps=steps)

    def _batches(self, phase: str, work: Generation) -> list[tuple[Workload | Generation, Billing]]:
        batches: list[tuple[Workload | Generation, Billing]] = []
        places = {name: i for i, name in enumerate(self.models)}
        missing = []
        for run in TRAINERS[self.trainer].phases[phase]:
            model = {"answers": "policy", "update": "policy", "critic update": "critic"}.get(run, run)
            if model == "reference" and self.reference is True:
                model = "policy"
            if model not in places:
                missing.append(model)
                continue
            trains = run in ("update", "critic update")
            billed = Billing(places[model], forward_only=not trains, own=model == "policy", phase=phase, is_timed=False)
            batches += [(work if run == "answers" else work.samples, billed)] * (self.epochs if trains else 1)
        if missing and not batches:
            raise UsageError(f"{phase} is of the {missing[0]}, which is not given: {missing[0]}= takes its cost model.")
        return batches

    def _traffic(self, model: CostModel) -> Any:
        return forward_traffic_of(model, [self.element_bytes] * len(model.parameters), self.element_bytes)
