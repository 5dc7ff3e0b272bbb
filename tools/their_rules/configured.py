"""verl's kind, TRL and NeMo: counted from a configuration, by its type or its fields."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import typing
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tools.their_rules.cases import hf_config
from tools.their_rules.checkouts import load
from tools.their_rules.sizes import nothing

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.their_rules.cases import Case
    from tools.their_rules.checkouts import Checkouts, Source
    from tools.their_rules.sizes import Count, Make


def _frames(case: Case) -> list[int]:
    return [h * w for t, h, w in case.step.workload.grids.tolist() for _ in range(t)]


def by_lengths(make_counter: Callable[[str], Any], *, pictures: bool) -> Make:
    """Make a rule of a counter of verl's kind: its class is given a configuration, its method the samples' lengths."""

    def make(checkouts: Checkouts, source: Source) -> Count:
        counter = make_counter(checkouts.text(source))

        def count(case: Case) -> float | None:
            lengths = case.step.workload.segments.tolist()
            images = {"images_seqlens": _frames(case)} if pictures and len(case.step.workload.grids) else {}
            try:  # over one second, in TFLOP; 0 for a type that it does not list
                found = counter(copy.deepcopy(hf_config(case.model))).estimate_flops(lengths, 1.0, **images)
            except (AttributeError, TypeError):  # of a configuration without a size that it reads
                return None
            flops = found[0][0] if isinstance(found[0], tuple) else found[0]
            return float(flops) * 1e12 or None

        return count

    return make


def verl_counter(text: str) -> Any:
    """Compile verl's class that is given a configuration."""
    space: dict[str, Any] = {"inspect": inspect, "get_device_flops": lambda: 1.0, "print": nothing}
    return load(text, space, ["_estimate*", "_compute*", "_count*", "FlopsCounter", "ESTIMATE_FUNC", "VALID_*"])[
        "FlopsCounter"
    ]


def veomni_counter(text: str) -> Any:
    """Compile VeOmni's class that is given a configuration."""
    quiet = SimpleNamespace(warning_rank0=nothing)
    space: dict[str, Any] = {"VeOmniLoraConfig": type("VeOmniLoraConfig", (), {}), "LORA_MODULES_BY_MODEL_TYPE": {}}
    space = load(text, {**space, "logger": quiet, "get_device_flops": lambda: 1.0}, ["VeomniFlopsCounter"])
    return space["VeomniFlopsCounter"]


def lmms_counter(text: str) -> Any:
    """Compile LMMs-Engine's class that is given a configuration."""
    import torch

    space: dict[str, Any] = {"logger": SimpleNamespace(warning=nothing), "torch": torch, "Iterable": deque}
    space["TrainUtilities"] = SimpleNamespace(get_device_flops=lambda: 1.0)
    return load(text, space)["FlopsCounter"]


def trl(*, of_text: bool = False) -> Make:
    """Call TRL's function for the FLOPs of a token, times the positions of whole rows.

    Args:
        of_text: whether it is called with the text part of a configuration, as the trainers of 1.16.0 do.
    """

    def make(checkouts: Checkouts, source: Source) -> Count:
        import transformers
        from packaging.version import Version

        space = load(
            checkouts.text(source), {"transformers": transformers, "Version": Version}, ["compute_flops_per_token"]
        )

        def count(case: Case) -> float | None:
            config = copy.deepcopy(hf_config(case.model))
            try:
                config = config.get_text_config() if of_text else config
                per_token = space["compute_flops_per_token"](config, case.step.seq_len)
            except (AttributeError, TypeError):
                return None
            return float(per_token * case.step.row_slots)

        return count

    return make


def automodel(checkouts: Checkouts, source: Source) -> Count:
    """Call NeMo Automodel's class with the shape of the rows, as its recipes do."""
    formulas = load(checkouts.text(source), {})
    space: dict[str, Any] = {"math": math, "logger": SimpleNamespace(debug=nothing, warning=nothing)}
    space |= {"get_flops_formula_for_hf_config": formulas["get_flops_formula_for_hf_config"]}
    space |= {"PathLike": str, "torch": SimpleNamespace(Tensor=type("Tensor", (), {}))}
    automatic = checkouts.text(dataclasses.replace(source, path="nemo_automodel/_transformers/mfu.py"))
    load(automatic, space, ["AutoMFU", "_validate*", "get_device_flops", "_DEVICE*", "_UN*", "_CONFIG*"])

    def count(case: Case) -> float | None:
        config = copy.deepcopy(hf_config(case.model))
        found = space["AutoMFU"].from_config(config, device="H100").get_flops((case.step.num_rows, case.step.seq_len))
        return None if found is None else float(found)

    return count


def nemo_rl(checkouts: Checkouts, source: Source) -> Count:
    """Call NeMo RL's tracker with the samples' lengths, as its policy does."""
    import transformers

    space: dict[str, Any] = {name: getattr(typing, name) for name in ("List", "Optional", "Union")}
    space["dataclass"] = dataclass
    load(checkouts.text(source), space)
    names = ("LlamaConfig", "Qwen2Config", "Qwen3Config", "Qwen3MoeConfig", "PretrainedConfig")
    space |= {name: getattr(transformers, name) for name in names} | {"asdict": dataclasses.asdict}
    tracker = dataclasses.replace(source, path="nemo_rl/utils/flops_tracker.py")
    load(checkouts.text(tracker), space, ["convert_config_to_flops_config", "FLOPTracker"])

    def count(case: Case) -> float | None:
        try:
            tracked = space["FLOPTracker"].from_config(case.model, copy.deepcopy(hf_config(case.model)))
        except (ValueError, AttributeError):  # a type that it does not have
            return None
        tracked.track_batch(case.step.workload.segments.tolist())
        return float(tracked.total_flops)

    return count


def prime_rl(checkouts: Checkouts, source: Source) -> Count:
    """Call prime-rl's function for the FLOPs of a token, times the positions of whole rows."""
    adapters = {"has_lora_layers": nothing, "MultiLoRAModule": type("MultiLoRAModule", (), {})}
    counter = load(checkouts.text(source), adapters, ["PerfCounter"])["PerfCounter"]

    def count(case: Case) -> float | None:
        asked = object.__new__(counter)  # its constructor asks for a device
        asked.model = None
        try:
            per_token = asked._get_num_flop_per_token(copy.deepcopy(hf_config(case.model)), case.step.seq_len)
        except (AttributeError, TypeError):  # of a configuration without a size that it reads
            return None
        return float(per_token * case.step.row_slots)

    return count
