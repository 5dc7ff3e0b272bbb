"""The peaks that the tools divide by, by their own functions, for every device name that the package knows."""

from __future__ import annotations

import re
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from headway.conventions import tool_peak
from headway.devices.table import all_devices
from tools.their_rules.checkouts import Checkouts, Source, load, method
from tools.their_rules.sizes import nothing

if TYPE_CHECKING:
    from collections.abc import Callable

    Find = Callable[[str], float | None]  # FLOP/s of a device name; infinite where it prints 0, None where no MFU


def device_names() -> list[str]:
    """List every name that a driver reports, and every title, of the package's table."""
    return sorted({name for device in all_devices() for name in (*device.names, device.title)})


def _in_tera(function: str, *names: str) -> Callable[[str], Find]:
    """Make a finder of a function of verl's kind, which gives TFLOP/s of the device at hand or of a name."""

    def make(text: str) -> Find:
        space = load(text, {}, [function, *names])

        def find(name: str) -> float | None:
            space["get_device_name"] = lambda: name
            named = {} if not names else {"device_name": name}
            return float(space[function](unit="T", **named)) * 1e12

        return find

    return make


def _by_name(text: str) -> Find:
    """Make a finder of torchtitan's or nanochat's function, which asks an Intel device for its engines."""
    silent = SimpleNamespace(warning=nothing, info=nothing)

    def find(name: str) -> float | None:
        engines = 448 if "448" in name else 512
        properties = SimpleNamespace(max_compute_units=engines)
        torch = SimpleNamespace(xpu=SimpleNamespace(get_device_properties=lambda _: properties))
        space = {"torch": torch, "logger": silent, "subprocess": SimpleNamespace(run=_missing, PIPE=None)}
        return float(load(text, space, ["get_peak_flops"])["get_peak_flops"](name))

    return find


def _missing(*_: object, **__: object) -> None:
    """Stand in for `lspci`, which is not installed."""
    raise FileNotFoundError


def _nemo_rl(text: str) -> Find:
    import torch
    from packaging.version import Version

    space: dict[str, Any] = {"torch": torch, "PkgVersion": Version}
    load(text, space, ["is_using_tf32", "THEORETICAL_TFLOPS"])
    table = space["THEORETICAL_TFLOPS"]

    def find(name: str) -> float | None:
        rate = table.get((name, torch.bfloat16))
        return None if rate is None else float(rate) * 1e12

    return find


def _composer(text: str) -> Find:
    def find(name: str) -> float | None:
        cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: name)
        warnings = SimpleNamespace(warn=lambda *_, **__: None)
        space = {"torch": SimpleNamespace(cuda=cuda), "warnings": warnings, "is_xla_installed": nothing}
        function = load(text, space, ["_HSERIES_SXM", "GPU_AVAILABLE_FLOPS", "get_gpu_flops_available"])
        for precision in ("amp_bf16", "amp_fp16"):
            state = SimpleNamespace(precision=SimpleNamespace(value=precision))
            if rate := function["get_gpu_flops_available"](state):
                return float(rate)
        return None

    return find


def _miles(text: str) -> Find:
    space = load(text, {"re": re}, ["_PEAK_BF16_TFLOPS", "_MATCH_ORDER", "_words", "peak_bf16_tflops"])

    def find(name: str) -> float | None:
        rate = space["peak_bf16_tflops"](name)
        return None if rate is None else float(rate) * 1e12

    return find


def _prime_rl(text: str) -> Find:
    find = method(text, "PerfCounter", "_get_peak_flops", {})
    asked = SimpleNamespace(_logger=SimpleNamespace(warning=nothing))
    return lambda name: float(find(asked, name))


def _trl(text: str) -> Find:
    space = load(text, {"re": re}, ["get_peak_flops", "_PEAK_FLOPS_BY_DEVICE"])
    return lambda name: space["get_peak_flops"](name, "bfloat16")


PEAKS: dict[str, tuple[Source, Callable[[str], Find]]] = {
    "torchtitan": (Source("pytorch/torchtitan", "b5bcd76c6", "torchtitan/tools/utils.py"), _by_name),
    "nanochat": (Source("karpathy/nanochat", "92d63d4", "nanochat/common.py"), _by_name),
    "verl": (
        Source("verl-project/verl", "0.9.1", "verl/utils/flops_counter.py"),
        _in_tera("get_device_flops", "_DEVICE_FLOPS"),
    ),
    "veomni": (
        Source("ByteDance-Seed/VeOmni", "0.1.12", "veomni/utils/count_flops.py"), _in_tera("get_device_flops"),
    ),
    "nemo-automodel": (
        Source("NVIDIA-NeMo/Automodel", "0.7.0", "nemo_automodel/_transformers/mfu.py"),
        _in_tera("get_device_flops", "_DEVICE_FLOPS", "_UNIT_TO_SCALE"),
    ),
    "nemo-rl": (Source("NVIDIA-NeMo/RL", "7ea279abf", "nemo_rl/utils/flops_tracker.py"), _nemo_rl),
    "miles": (Source("radixark/miles", "31f1ca961", "miles/utils/device_flops.py"), _miles),
    "prime-rl": (
        Source("PrimeIntellect-ai/prime-rl", "559b44772", "src/prime_rl/trainer/perf.py"), _prime_rl,
    ),
    "trl": (Source("huggingface/trl", "1.16.0", "trl/trainer/utils.py"), _trl),
    "llm-foundry": (
        Source("mosaicml/composer", "640518880", "composer/callbacks/speed_monitor.py"), _composer,
    ),
}  # fmt: skip


def compare_peaks(tool: str, checkouts: Checkouts) -> dict[str, Any]:
    """Run a tool's function on every device name.

    Returns:
        The project, its commit and date; its FLOP/s by name, "infinite" where it prints 0 and None where it prints no
        MFU; and the names for which ours is another.
    """
    source, make = PEAKS[tool]
    commit, day = checkouts.commit_and_date(source)
    find = make(checkouts.text(source))
    theirs = {name: find(name) for name in device_names()}
    flops = {name: "infinite" if rate == inf else rate for name, rate in theirs.items()}
    differ = [name for name, rate in flops.items() if not same_peak(tool, name, rate)]
    return {
        "tool": tool,
        "project": source.project,
        "commit": commit,
        "date": day,
        "flops_per_s": flops,
        "differ": differ,
    }


def same_peak(tool: str, name: str, theirs: float | str | None) -> bool:
    """Whether our rule finds the peak that the tool's function gave."""
    ours, rate = tool_peak(tool, name).flops_per_s, inf if theirs == "infinite" else theirs
    if {None, inf} & {ours, rate}:
        return ours == rate
    return abs(ours - float(rate)) <= 1e-9 * ours
