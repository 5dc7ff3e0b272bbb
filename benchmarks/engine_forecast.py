"""A step of a case of benchmarks/engine_gpu.py by line, as `headway plan` predicts it and as its profile went."""

import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_memory import with_layers
from engine_setups import SETUPS, without_data
from engine_table import attention_kernel
from headway.count.activations import shipped_activations
from headway.count.models import load_cost_model
from headway.devices import named_device
from headway.errors import UnknownDeviceError
from headway.explain.breakdown import NO_ATTENTION, NO_KERNEL, break_down
from headway.explain.explanation import StepWaterfall
from headway.predict.dry_run import precision_of, recompute_of, state_of
from headway.predict.speeds import KERNELS, Speeds
from headway.predict.step_time import StepTimes, StepWork
from headway.report.step_lines import NAMES
from headway.tracing import trace

_SETTINGS = {"FlashAttention-2": "torch", "FlashAttention-3": "fa3", "cuDNN's ragged attention": "cudnn"}
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
        named = {**self.computed_s, NAMES["memory"]: self.memory_s, NAMES["optimizer"]: self.optimizer_s}
        return {**named, OTHERS: round(self.step_s - sum(named.values()), 9) + 0.0}  # + 0.0: no -0.0


def predicted_lines(case: dict[str, Any], device: str) -> StepLines | None:
    """Predict the step of a case on the first pack that it had; None where the table has no such device.

    Args:
        case: its row of the record, of full size.
        device: as the driver names it.
    """
    setup, layers = SETUPS[case["setup"]], case["layers"]
    try:
        target = named_device(device)
    except UnknownDeviceError:
        return None
    # The recipe with the settings of the case, and the ledger of as many layers as ran.
    setting = _SETTINGS.get(attention_kernel(case), "auto")
    attention = setting if setting in KERNELS else "auto"
    settings = {
        "run.device": "cuda",
        "run.dtype": case["dtype"],
        "speed.kernels": case["kernels"],
        "speed.compile": str(case["compiled"]).lower(),
        "speed.recompute": case["recompute"],
        "optim.accumulation": 1,
    }
    model_config = setup.config(layers=layers, is_small=False)
    with tempfile.TemporaryDirectory() as folder:
        config = setup.recipe_for(Path(folder), model_config, settings)
    is_whole = layers == case["of_layers"]
    cost_model = load_cost_model(setup.model) if is_whole else trace(without_data(model_config))
    precision = precision_of(config, 1)
    saved = with_layers(shipped_activations(setup.model, precision), layers)
    # One pack on one device, at the rates of its table.
    (batch,) = setup.batches(1, is_small=False)
    pack = batch.workload
    speeds = Speeds.of_device(target, "bf16", attention=attention)
    recompute = recompute_of(config, cost_model, {precision: saved}, config.parallel.mesh_shape(1))
    state = state_of(config, precision, recompute)
    times = StepTimes(cost_model, saved, speeds)
    work = StepWork(flops=cost_model.count(pack), pack=pack, packs=1, tokens=pack.tokens)
    step = times.predict(work, state)
    # Components by tower; attention's products are components of their own.
    computed, attention_s = Counter[str](), 0.0
    for name, cases in times.computed_s(work, state).items():
        computed[_tower(name)] += cases.expected
        attention_s += cases.expected if name.endswith(".attention") else 0.0
    of_key = {line.key: line.seconds.expected for line in step.lines}
    source = f"attention at the rates of speed.attention={attention}; {speeds.source}"
    return StepLines(dict(computed), attention_s, of_key["memory"], of_key["optimizer"], step.step_s, source)


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
