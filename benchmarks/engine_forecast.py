"""A step of a case of benchmarks/engine_gpu.py by line, as `headway plan` predicts it and as its profile went."""

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_memory import cost_model_of, predicted_memory, saved_of
from engine_setups import SETUPS
from engine_table import attention_kernel
from headway.count import CostModel, Workload
from headway.devices import named_device
from headway.errors import UnknownDeviceError
from headway.explain.breakdown import NO_ATTENTION, NO_KERNEL, break_down
from headway.explain.explanation import StepWaterfall
from headway.predict.engine import Engine
from headway.predict.memory import MemoryPlan
from headway.predict.recipe import State, recompute_of, state_of
from headway.predict.speeds import Speeds
from headway.predict.step_time import StepTimes, StepWork
from headway.report.step_lines import NAMES

_SETTINGS = {"FlashAttention-2": "torch", "FlashAttention-3": "fa3", "cuDNN's ragged attention": "cudnn"}
ONE_PASS_NOTE = "AdamW on CUDA: in one pass"  # beginning of a run's note that one kernel updates the weights
_HEAD = "language.head"  # apart from the tower that it stands behind
OTHERS = "copies, idle, the rest"


@dataclass(frozen=True)
class StepLines:
    """A step by line.

    Attributes:
        computed_s: products and attention by tower, and of the head [s].
        attention_s: the part of these that is attention [s].
        memory_s: memory-bound kernels [s].
        optimizer_s: update and clipping [s].
        step_s: all of it [s].
        source: of the rates, or which step of a profile.
    """

    computed_s: dict[str, float]
    attention_s: float
    memory_s: float
    optimizer_s: float
    step_s: float
    source: str

    def to_dict(self) -> dict[str, float]:
        """Seconds by name, a tower's being those of its products and attention; they add up to the step."""
        return self._with_rest(self.computed_s)

    def by_kind(self) -> dict[str, float]:
        """Seconds by name, those of products and of attention apart; they add up to the step."""
        products_s = sum(self.computed_s.values()) - self.attention_s
        return self._with_rest({"products": products_s, "attention": self.attention_s})

    def _with_rest(self, computed_s: dict[str, float]) -> dict[str, float]:
        named = {**computed_s, NAMES["memory"]: self.memory_s, NAMES["optimizer"]: self.optimizer_s}
        return {**named, OTHERS: round(self.step_s - sum(named.values()), 9) + 0.0}  # + 0.0: no -0.0


@dataclass(frozen=True)
class PlannedCase:
    """A case of a record as `headway plan` sees it: the recipe with its settings, on the packs that it was measured on.

    Attributes:
        cost_model: of as many layers as ran.
        times: of the device, and of the optimizer that ran.
        state: dtypes, and how forward computes.
        memory: of the device.
    """

    cost_model: CostModel
    times: StepTimes
    state: State
    memory: MemoryPlan
    source: str

    @staticmethod
    def of(case: dict[str, Any], device: str, packs: Sequence[Workload]) -> "PlannedCase":
        """Read a case as it ran.

        Args:
            case: its row of the record, of full size.
            device: as the driver names it.
            packs: that it was measured on.

        Raises:
            UnknownDeviceError: the table has no such device.
        """
        setup, layers, target = SETUPS[case["setup"]], case["layers"], named_device(device)
        setup = setup.with_packs_of(case.get("tokens_per_pack"))
        attention = _SETTINGS.get(attention_kernel(case), "auto")
        settings = {
            "run.device": "cuda",
            "run.dtype": case["dtype"],
            "speed.attention": attention,
            "speed.kernels": case["kernels"],
            "speed.compile": str(case["compiled"]).lower(),
            "speed.recompute": case["recompute"],
            "data.tokens_per_pack": setup.packing_length,
            "optim.accumulation": case.get("accumulation", 1),
        } | dict(setting.split("=", 1) for setting in case.get("settings", ()))
        with tempfile.TemporaryDirectory() as folder:
            config = setup.recipe_for(Path(folder), setup.config(layers=layers, is_small=False), settings)
        cost_model = cost_model_of(setup, layers)
        ((precision, saved),) = saved_of(setup, config, layers, is_small=False).items()
        recompute = recompute_of(config, cost_model, {precision: saved}, config.parallel.mesh_shape(1))
        speeds = Speeds.of_device(target, "bf16", attention=attention, float8=config.run.dtype == "float8")
        is_one_pass = any(note.startswith(ONE_PASS_NOTE) for note in case["notes"])
        return PlannedCase(
            cost_model,
            StepTimes(
                cost_model, saved, speeds, engine=Engine("headway", update="one pass" if is_one_pass else "separate")
            ),
            state_of(config, precision, recompute),
            predicted_memory(setup, config, cost_model, layers, packs, is_small=False),
            f"attention at the rates of speed.attention={attention}; {speeds.source}",
        )

    def lines(self, packs: Sequence[Workload]) -> StepLines:
        """Predict a step of some packs."""
        total = Workload.total(packs)
        # a pack like the mean one stands for all, as far as bytes and shapes go
        mean = total.patches / len(packs)
        pack = min(packs, key=lambda pack: (pack.patches == 0 < mean, abs(pack.patches - mean)))
        work = StepWork(flops=self.cost_model.count(total), pack=pack, packs=len(packs), tokens=total.tokens)
        step = self.times.predict(work, self.state)
        # components by tower; attention's products are components of their own
        computed, attention_s = Counter[str](), 0.0
        for name, cases in self.times.computed_s(work, self.state).items():
            computed[_tower(name)] += cases.expected
            attention_s += cases.expected if name.endswith(".attention") else 0.0
        of_key = {line.key: line.seconds.expected for line in step.lines}
        return StepLines(dict(computed), attention_s, of_key["memory"], of_key["optimizer"], step.step_s, self.source)


def predicted_lines(case: dict[str, Any], device: str) -> StepLines | None:
    """Predict the step of a case on the first packs that it had; None where the table has no such device.

    Args:
        case: its row of the record, of full size.
        device: as the driver names it.
    """
    packs = packs_of(case["setup"], case.get("accumulation", 1), case.get("tokens_per_pack"))
    packs = as_run(case, packs)
    try:
        return PlannedCase.of(case, device, packs).lines(packs)
    except UnknownDeviceError:
        return None


def as_run(case: dict[str, Any], packs: Sequence[Workload]) -> list[Workload]:
    """Give packs the head that a case ran: on labelled tokens if its row names them, else on every token."""
    return [*packs] if "head" in case else [pack.with_full_head() for pack in packs]


def packs_of(setup: str, count: int, tokens_per_pack: int | None = None) -> list[Workload]:
    """The first packs of a set-up of full size, as the engine's benchmark draws them."""
    batches, _ = SETUPS[setup].with_packs_of(tokens_per_pack).batches(count, is_small=False)
    return [batch.work(skips_unlabelled=True) for batch in batches]


def measured_lines(waterfall: StepWaterfall) -> StepLines:
    """Add up the step of a profile by the same lines."""
    computed = Counter[str]()
    for row in break_down(waterfall, "component"):
        if row.matmul_ns:
            computed[_tower(row.name)] += row.matmul_ns
    attention = [row.ns for row in break_down(waterfall, "attention") if row.name not in (NO_ATTENTION, NO_KERNEL)]
    of_key = {line.key: line.ns / 1e9 for line in waterfall.lines}
    return StepLines(
        {name: ns / 1e9 for name, ns in computed.items()},
        sum(attention) / 1e9,
        of_key["memory"],
        of_key["optimizer"],
        waterfall.duration_ns / 1e9,
        f"step {waterfall.step} of the profile",
    )


def _tower(component: str) -> str:
    """The tower of a component, as the ledger or `headway explain` names it: "language (compiled)" is "language".

    >>> [_tower(name) for name in ("vision.mlp", "language (compiled)", "language.head")]
    ['vision', 'language', 'language.head']
    """
    return component if component == _HEAD else re.split(r"[. ]", component)[0]
