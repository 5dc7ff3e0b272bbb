"""One case of benchmarks/engine_gpu.py, measured in a process of its own; what is known is told after every few steps.

An engine case is what `headway train` makes of a recipe: the same model, kernels, recomputation, compiled blocks, loss,
clipping and optimizer, on packs that lie on the device; without its feed, records and checkpoints. A GPT-2 case is a
plain loop with PyTorch's AdamW, as on mfu-tracker's page.
"""

import gc
import itertools
import math
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoConfig

from engine_memory import DIVIDED, Memory, fitting, fullest_recompute, predicted_memory
from engine_setups import Setup, setup_named
from engine_train import measure_run
from headway.conventions import Step, architecture, get_convention
from headway.count import CostModel, Workload
from headway.count.models import presets
from headway.data.collate import Batch
from headway.devices import peak_for
from headway.devices.ceilings import matmul_ceiling
from headway.meter import Meter, Window
from headway.meter.profile import ProfiledSteps, profile
from headway.models import load_model
from headway.models.parallel.mesh import clipping_factor, gradient_norm
from headway.models.parallel.ranks import Ranks
from headway.models.precision import choose_device, choose_precision
from headway.optim import learning_rate, make_optimizer, set_learning_rate
from headway.predict.fitting import room_in
from headway.tracing import trace
from headway.train.build import build_trained
from record import environment
from step_clock import OneAhead

OTHERS = ("lmms-engine", "torchtitan", "torchtitan-2025-12-vlm")  # what these would have printed for the same run
STEADY = 0.03  # change of the rate from one warm-up step to the next below which warm-up ends
TELL_EVERY_S = 5.0  # between two tellings of what is known so far
PROFILED = 1  # steps in a case's profile
PROFILE_STEPS = PROFILED + 3  # that it takes the time of: the first is not in it, and the file is written
SPARE_S = 3.0  # kept of a case's time for what comes after its last step

Tell = Callable[[dict[str, Any]], None]


class OutOfTimeError(Exception):
    """The time of a case ended before a step was counted."""


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        name: unique, as the record and the table have it.
        setup: of the engine's, by name; "gpt2" for the plain loop.
        kernels: of the engine: "torch" or "liger".
        is_compiled: whether blocks (of the plain loop, the model) are compiled.
        layers: language layers; None for all of them, or as many as the device's memory holds in short packs.
        steps: most counted steps.
        rows: of the plain loop's batch.
        attention: of the plain loop.
        weight: of the time that is shared out among the cases that are left.
        is_run: whether `headway train` itself runs, with its feed.
    """

    name: str
    setup: str
    kernels: str = "torch"
    is_compiled: bool = False
    layers: int | None = None
    steps: int = 30
    rows: int = 0
    attention: str = ""
    weight: float = 1.0
    is_run: bool = False


@dataclass(frozen=True)
class Conditions:
    """What all cases have in common.

    Attributes:
        is_small: sizes for a smoke test.
        num_packs: packs that are drawn once and taken in turn.
        recompute: as `speed.recompute`; None for the recipe's own, "fullest" for `memory:SIZE` with the most that fits.
        attention: as `speed.attention`; None for the recipe's own.
        profiles: folder of a profile of each case; None for none.
        most_warmup: steps after which warm-up ends even if the rate has not settled.
        tokens_per_pack: as `data.tokens_per_pack`; None for the recipe's own [tokens].
        accumulation: packs of a step, as `optim.accumulation` [packs].
        separate_updates: whether AdamW runs in separate passes where one pass is there.
        settings: further ones of the recipe, as `--set` takes them.
    """

    is_small: bool
    num_packs: int
    recompute: str | None
    most_warmup: int
    attention: str | None = None
    profiles: Path | None = None
    tokens_per_pack: int | None = None
    accumulation: int = 1
    separate_updates: bool = False
    settings: tuple[str, ...] = ()


def describe_machine(tell: Tell) -> None:
    """Tell hardware, versions, and the measured ceiling: the best of all matmuls, and the median of the largest."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = matmul_ceiling(device, dtype_name(device))
    largest = max(found.measurements, key=lambda measured: measured.work)
    ceiling = {"best_flops_per_s": found.best.best_per_s, "best_shape": list(found.best.shape)}
    ceiling |= {"sustained_flops_per_s": largest.median_per_s, "sustained_shape": list(largest.shape)}
    tell({"device_type": device.type, "environment": environment(device), "ceiling": ceiling})


def measure(case: Case, conditions: Conditions, deadline_s: float, tell: Tell) -> None:
    """Measure one case.

    Args:
        case: what.
        conditions: how.
        deadline_s: reading of `time.monotonic` at which the case must have ended [s].
        tell: given what is known so far, several times; later entries replace earlier ones.

    Raises:
        OutOfTimeError: no step could be counted before the deadline.
        torch.OutOfMemoryError: the device's memory does not hold the case.
    """
    if case.setup == "gpt2":
        measure_gpt2(case, conditions, deadline_s, tell)
    elif case.is_run:
        settings = settings_of(case, conditions)
        measure_run(case.setup, settings, case.steps, deadline_s, tell, is_small=conditions.is_small)
    else:
        measure_engine(case, conditions, deadline_s, tell)


def measure_engine(case: Case, conditions: Conditions, deadline_s: float, tell: Tell) -> None:
    """Train as `headway train` would, with every part of the step but its feed."""
    began_s = time.monotonic()
    setup = setup_named(case.setup).with_packs_of(conditions.tokens_per_pack)
    is_small, accumulation = conditions.is_small, conditions.accumulation
    is_cuda = torch.cuda.is_available()
    settings = settings_of(case, conditions)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layers = case.layers or setup.layers(is_small=is_small)
        if case.layers is None and is_cuda and not is_small:
            setup, accumulation, layers = fitting_device(setup, settings, conditions, folder)
            settings |= {"data.tokens_per_pack": setup.packing_length, "optim.accumulation": accumulation}
        batches, num_cut = setup.batches(conditions.num_packs * accumulation, is_small=is_small)
        packs = [batch.work(skips_unlabelled=True) for batch in batches]
        if conditions.recompute == "fullest":
            settings["speed.recompute"] = fullest_recompute(setup, settings, packs, layers, folder, is_small=is_small)
        model_config = setup.config(layers=layers, is_small=is_small)
        config = setup.recipe_for(folder, model_config, settings)
        device = choose_device(config.run)
        precision = choose_precision(config.run, device)
        torch.manual_seed(config.run.seed)
        trained = build_trained(config, None, None, precision, device)
    model, cost_model = trained.model.train(), trained.cost_model
    optimizer = make_optimizer(model, config.optim, cost_model, Ranks(0, 1))
    if conditions.separate_updates:
        optimizer.one_pass_on = None
    parameters = [p for p in model.parameters() if p.requires_grad]
    batches = [batch.dealt(None).to(device) for batch in batches]
    predicted = predicted_memory(setup, config, cost_model, layers, packs, is_small=is_small)
    memory = Memory(device, batches, predicted)
    tell(
        {
            "layers": layers,
            "of_layers": setup.layers(is_small=is_small),
            "parameters": cost_model.params.total,
            "dtype": precision.name,
            "recompute": trained.recompute,
            "head": "labelled tokens",
            "tokens_per_pack": max(pack.slots for pack in packs),
            "accumulation": accumulation,
            "settings": list(conditions.settings),
            "samples": sum(len(pack.segments) for pack in packs),
            "samples_cut": num_cut,
            "notes": [*trained.notes, *optimizer.notes],
            "set_up_s": time.monotonic() - began_s,
            **memory.record(),
        }
    )

    def step(number: int, packs: Sequence[Batch]) -> torch.Tensor:
        set_learning_rate(optimizer, learning_rate(number, config.optim))
        num_supervised, losses = sum(batch.num_supervised for batch in packs), []
        for batch in packs:
            with precision.autocast():
                pack = trained.model_with_loss(
                    batch.model_inputs(), batch.labels_1T[0], per=num_supervised, labelled_K=batch.labelled_K
                )
            torch.autograd.backward(pack.total)
            losses.append(pack.total.detach())
        norm = gradient_norm(parameters)
        optimizer.factor = None if config.optim.clip is None else clipping_factor(norm, config.optim.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    sizes = architecture(model_config.to_dict(), setup.model, cost_model)
    progress = Progress(case, deadline_s, tell, sizes, memory.record, accumulation)
    steps = [
        (batches[first : first + accumulation], Workload.total(packs[first : first + accumulation]))
        for first in range(0, len(batches), accumulation)
    ]
    peak = peak_for(device, precision.peak_dtype)
    ceiling = matmul_ceiling(device, dtype_name(device)).peak()  # `describe_machine` measured it: a profile holds it
    loop(
        progress,
        cost_model,
        partial(Meter, cost_model, peak=peak, ceiling=ceiling, recompute=trained.recompute),
        steps,
        step,
        OneAhead(device),
        most_warmup=conditions.most_warmup,
        guards=lambda: trained.compile_watch.since().guards,
        profiling=conditions.profiles
        and partial(
            profile,
            folder=conditions.profiles / folder_name(case.name),
            steps=range(2, 2 + PROFILED),
            model=model,
        ),
    )


def settings_of(case: Case, conditions: Conditions) -> dict[str, Any]:
    """Settings of a case's recipe, by their names; None leaves one as it is."""
    is_cuda = torch.cuda.is_available()
    return {
        "run.device": "cuda" if is_cuda else "cpu",
        "run.dtype": "bfloat16-params" if is_cuda else "float32",
        "speed.kernels": case.kernels,
        "speed.compile": str(case.is_compiled).lower(),
        "speed.recompute": None if conditions.recompute == "fullest" else conditions.recompute,
        "speed.attention": conditions.attention,
        "data.tokens_per_pack": conditions.tokens_per_pack or setup_named(case.setup).packing_length,
        "optim.accumulation": conditions.accumulation,
    } | dict(setting.split("=", 1) for setting in conditions.settings)


def fitting_device(
    setup: Setup, settings: dict[str, Any], conditions: Conditions, folder: Path
) -> tuple[Setup, int, int]:
    """The whole model in shorter packs before a part of it; packs that were asked for stay as they are.

    Returns:
        The set-up, packs of a step, and language layers.
    """
    room = room_in(torch.cuda.get_device_properties(0).total_memory)
    divided, accumulation = DIVIDED if conditions.tokens_per_pack is None else (1,), conditions.accumulation
    parts, layers = fitting(setup, settings, conditions.num_packs * accumulation, room, folder, divided)
    return setup.with_packs_of(setup.packing_length // parts), parts * accumulation, layers


def measure_gpt2(case: Case, conditions: Conditions, deadline_s: float, tell: Tell) -> None:
    """GPT-2 on rows of 1,024 tokens, forward, backward and PyTorch's AdamW: the table of mfu-tracker's page."""
    torch.manual_seed(0)
    values = dict(presets()["gpt2"])
    if conditions.is_small:
        values |= {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 64}
    config = AutoConfig.for_model(**values, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(config, dtype=dtype, device=device, random_init=True, attention=case.attention).train()
    cost_model = trace(model)
    trained = torch.compile(model) if case.is_compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(config.vocab_size, (case.rows, config.n_positions), device=device)

    def step(_number: int, ids: torch.Tensor) -> torch.Tensor:
        logits = trained(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    progress = Progress(case, deadline_s, tell)
    new_meter = partial(Meter, cost_model, peak=peak_for(device, dtype_name(device)))
    packs = [(ids, Workload([config.n_positions] * case.rows))]
    loop(progress, cost_model, new_meter, packs, step, OneAhead(device), most_warmup=conditions.most_warmup)


def loop(
    progress: "Progress",
    cost_model: CostModel,
    new_meter: Callable[..., Meter],
    packs: Sequence[tuple[Any, Workload]],
    step: Callable[[int, Any], torch.Tensor],
    queue: "OneAhead",
    *,
    most_warmup: int,
    guards: Callable[[], Iterable[str]] = lambda: (),
    profiling: Callable[[Meter], ProfiledSteps] | None = None,
) -> None:
    """Warm up until the rate has settled, choose how many steps the time allows, and take them under the meter.

    Where it is to be profiled, a few more steps are taken, each on the first pack.

    Raises:
        OutOfTimeError: the deadline came before a step was counted.
    """
    cycle, rates, step_s = itertools.cycle(packs), [], math.inf
    for number in range(1, most_warmup + 1):
        pack, workload = next(cycle)
        began_s = time.perf_counter()
        loss = step(number, pack)
        queue.wait()
        if number == 1:
            progress.tell({"first_loss": float(loss)})
        step_s = time.perf_counter() - began_s
        rates.append(cost_model.count(workload).total / step_s)
        progress.warmed_up(step_s)
        if len(rates) >= max(2, len(packs)) and abs(rates[-1] / rates[-2] - 1) < STEADY:
            break
    progress.recompiled(guards(), counted=False)
    # a profile takes the time of a few steps, which are set aside as long as one step is left to be counted
    profile_s = 0.0 if profiling is None else PROFILE_STEPS * step_s
    steps = affordable_steps(progress.left_s - profile_s, step_s, progress.case.steps)
    if not steps:
        profiling, profile_s = None, 0.0
        steps = affordable_steps(progress.left_s, step_s, 1)
    if not steps:
        raise OutOfTimeError(f"after {len(rates)} warm-up steps, the last of {step_s:.2f} s, there is no time for more")
    gc.collect()
    meter = new_meter(log_every=1, on_window=progress.add)  # it leaves out a step before which something compiled
    meter.start()
    for number in range(len(rates) + 1, len(rates) + 1 + steps):
        if progress.workloads and progress.left_s < step_s + profile_s:
            break
        pack, workload = next(cycle)
        loss = step(number, pack)
        progress.recompiled(guards(), counted=True)
        progress.workloads.append(workload)
        meter.count(workload)
        meter.step()
        progress.losses.append(queue.step_ended(loss))
        progress.tell_now_and_then()
    queue.wait()
    meter.close()
    progress.tell_all(is_over=True)
    if profiling is not None:
        try:
            profile_steps(new_meter(), profiling, *packs[0], step, queue)
        except Exception as error:  # noqa: BLE001 - the case has its numbers; what only looks at it costs none
            progress.tell({"profile_error": f"{type(error).__name__}: {error}"})


def profile_steps(
    meter: Meter,
    profiling: Callable[[Meter], ProfiledSteps],
    batch: Any,
    workload: Workload,
    step: Callable[[int, Any], torch.Tensor],
    queue: "OneAhead",
) -> None:
    """Take a few steps on one pack under a profile, which writes itself."""
    with profiling(meter):
        meter.start()
        for number in range(1 + PROFILED):
            meter.count(workload)
            queue.step_ended(step(number, batch))
            meter.step()
        queue.wait()
    meter.close()


def folder_name(case: str) -> str:
    """Name of the folder of a case's profile.

    >>> folder_name("text, liger, compiled")
    'text-liger-compiled'
    """
    return re.sub(r"[^a-z0-9]+", "-", case)


def affordable_steps(left_s: float, step_s: float, most: int) -> int:
    """How many steps of a length fit the time that is left.

    >>> affordable_steps(60.0, 9.0, 30), affordable_steps(600.0, 9.0, 30), affordable_steps(5.0, 9.0, 30)
    (6, 30, 0)
    """
    return max(0, int(min(most, left_s / step_s)))  # a time without end is infinite


@dataclass
class Progress:
    """What has been measured so far of one case.

    Attributes:
        case: what is measured.
        deadline_s: when it must have ended, by `time.monotonic` [s].
        tell: given the row so far.
        sizes: the model's, for other tools' rules; None where they are not asked.
        memory: what is known of memory.
        packs_per_step: packs of a step, which other tools' rules take for rows [packs].
        workloads: of the counted steps that were launched.
        losses: of the same, on the host; that of the last may not have come yet.
    """

    case: Case
    deadline_s: float
    tell: Tell
    sizes: Any = None
    memory: Callable[[], dict[str, Any]] = dict
    packs_per_step: int = 1
    workloads: list[Workload] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    _windows: list[Window] = field(default_factory=list)
    _warmup_s: list[float] = field(default_factory=list)
    _guards: list[str] = field(default_factory=list)
    _told_s: float = -math.inf

    @property
    def left_s(self) -> float:
        """Time that steps may still take [s]."""
        return self.deadline_s - SPARE_S - time.monotonic()

    def warmed_up(self, step_s: float) -> None:
        """Note a warm-up step.

        Raises:
            OutOfTimeError: the deadline has come.
        """
        self._warmup_s.append(step_s)
        self.tell({"warmup_s": list(self._warmup_s)})
        if self.left_s < 0:
            raise OutOfTimeError(f"the time ended in warm-up step {len(self._warmup_s)}, which took {step_s:.2f} s")

    def recompiled(self, guards: Iterable[str], *, counted: bool) -> None:
        """Note what was compiled again, in warm-up or in a step that the meter then leaves out."""
        self._guards += [guard if counted else f"in warm-up: {guard}" for guard in guards]

    def add(self, window: Window) -> None:
        """Take in steps that the device has passed."""
        self._windows.append(window)

    def tell_now_and_then(self) -> None:
        """Tell what is known, unless that was done a moment ago."""
        if time.monotonic() - self._told_s > TELL_EVERY_S:
            self._told_s = time.monotonic()
            self.tell_all()

    def tell_all(self, *, is_over: bool = False) -> None:
        """Tell what is known; only at the end is the last step's loss known to have come."""
        found: dict[str, Any] = {"recompilations": self._guards, **self.memory()}
        if self._windows:
            found |= self._rates()
            read = self.losses if is_over else self.losses[:-1]
            found["losses"] = [float(loss) for loss in (*read[:1], *read[-1:])]
        self.tell(found)

    def _rates(self) -> dict[str, Any]:
        windows = self._windows
        steps, wall_s = sum(w.num_steps for w in windows), sum(w.wall_s for w in windows)
        flops, tokens = sum(w.flops.total for w in windows), sum(w.tokens for w in windows)
        peak = windows[0].peak.flops_per_s
        found = {
            "steps": steps,
            "left_out": sum(w.num_left_out for w in windows),
            "step_s": wall_s / steps,
            "step_s_range": [min(w.step_s for w in windows), max(w.step_s for w in windows)],
            "step_s_median": statistics.median(w.step_s for w in windows),
            "tokens_per_s": tokens / wall_s,
            "flops_per_step": flops / steps,
            "peak_flops_per_s": peak,
            "mfu": flops / wall_s / peak,
            "hfu": sum(w.hfu * w.wall_s for w in windows) / wall_s,
        }
        if self.sizes is not None:
            num_packs = len(self.workloads) * self.packs_per_step
            whole = Step(Workload.total(self.workloads), sum(w.slots for w in self.workloads) // num_packs)
            bills = {name: get_convention(name).bill(self.sizes, whole).flops for name in OTHERS}
            rate = steps / len(self.workloads) / wall_s / peak
            found["others"] = {name: None if flops is None else flops * rate for name, flops in bills.items()}
        return found


def dtype_name(device: torch.device) -> str:
    """The dtype of matrix products here."""
    return "bf16" if device.type == "cuda" else "fp32"
