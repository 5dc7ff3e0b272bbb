"""The peak that each tool divides by, found the way it finds it: substrings of the device's name, in its own order.

These are other people's rules, wrong ones included; the peaks to trust are in `headway.devices`.
"""

import re
from dataclasses import dataclass
from math import inf

# Each entry: substrings that must all occur, then FLOP/s; the first that matches wins.
_Rules = tuple[tuple[tuple[str, ...], float], ...]

# pytorch/torchtitan, torchtitan/tools/utils.py, get_peak_flops (commit b5bcd76c6, 21 Aug 2026): MI355X since e43621cf0
# (17 Oct 2025), H20 since 62daeb32a (1 Feb 2026), GB200 and GB300 since f113706c4 (28 Feb 2026), A6000 and B300 since
# ff95477ea (8 Apr 2026), TPUs since 363709fda (22 July 2026); before, each was an A100, and a GB200 a B200. Where
# `lspci` is installed it first replaces the name by the bus's lines that say H100, which other Hopper devices do too.
_TORCHTITAN: _Rules = (
    (("A100",), 312e12),
    (("A6000",), 154.85e12),
    (("H100", "NVL"), 835e12),
    (("H100", "PCIe"), 756e12),
    (("H100",), 989e12),
    (("H200",), 989e12),
    (("H20",), 148e12),
    (("GB200",), 2.5e15),
    (("GB300",), 2.5e15),
    (("B300",), 2.25e15),
    (("B200",), 2.25e15),
    (("MI355X",), 2.5e15),
    (("MI300X",), 1300e12),
    (("MI325X",), 1300e12),
    (("MI250X",), 191.5e12),
    (("Data Center GPU Max 1550", "448 engines"), 298.1888e12),  # 512 x engines x 1.3 GHz, which it asks the device for
    (("Data Center GPU Max 1550",), 340.7872e12),
    (("l40s",), 362e12),
    (("TPU", "v4"), 275e12),
    (("TPU", "v5e"), 197e12),
    (("TPU", "v5p"), 459e12),
    (("TPU", "v6e"), 918e12),
    (("TPU", "v7"), 1153.5e12),
)
# EvolvingLMMs-Lab/lmms-engine, src/lmms_engine/utils/train_utils.py, get_device_flops (commit 19992ec, 2026, which
# alone has B300; release 0.1.4, 6 Aug 2026, which alone has A6000).
_LMMS_ENGINE: _Rules = (
    (("B200",), 2.25e15),
    (("B300",), 2.25e15),
    (("MI300X",), 1336e12),
    (("H100",), 989e12),
    (("H800",), 989e12),
    (("H200",), 989e12),
    (("A100",), 312e12),
    (("A800",), 312e12),
    (("L40",), 181.05e12),
    (("L20",), 119.5e12),
    (("H20",), 148e12),
    (("910B",), 354e12),
    (("A6000",), 154.8e12),
    (("RTX 3070 Ti",), 21.75e12),
)
# ByteDance-Seed/VeOmni, veomni/utils/count_flops.py, get_device_flops (commit ab70b669, 5 Aug 2026, which took boost
# clocks for Blackwell, 2,250 before; up to aa88bf4a of 28 Jan 2026 an H200 was an H20).
_VEOMNI: _Rules = (
    (("H100",), 989e12),
    (("H800",), 989e12),
    (("H200",), 989e12),
    (("A100",), 312e12),
    (("A800",), 312e12),
    (("L40",), 181.05e12),
    (("L20",), 119.5e12),
    (("H20",), 148e12),
    (("910B",), 354e12),
    (("910_93",), 354e12),
    (("GB200",), 2565e12),
    (("B200",), 2382e12),
    (("GB300",), 2.5e15),
    (("B300",), 2.25e15),
)
# ByteDance-Seed/Bagel, train/pretrain_unified_navit.py, detect_peak_tflops (commit 056b5fd, 27 Oct 2025), on the
# upper-cased name.
_BAGEL: _Rules = (
    (("MI300X",), 1336e12),
    (("H100",), 989e12),
    (("H800",), 989e12),
    (("H200",), 989e12),
    (("A100",), 312e12),
    (("A800",), 312e12),
    (("L40",), 181.05e12),
    (("L20",), 119.5e12),
    (("H20",), 148e12),
    (("910B",), 354e12),
    (("RTX 3070 TI",), 21.75e12),
)
# verl-project/verl, verl/utils/flops_counter.py, _DEVICE_FLOPS in reverse alphabetical order (commit 220e90399, 10 July
# 2026; MI300X was 1,336 and the other AMD devices unknown before 9481350ec of 6 July 2026).
_VERL: _Rules = (
    (("RTX 3070 Ti",), 21.75e12),
    (("MI355X",), 2.5e15),
    (("MI350X",), 2.3e15),
    (("MI300X",), 1307e12),
    (("L40S",), 362.05e12),
    (("L40",), 181.05e12),
    (("L20",), 119.5e12),
    (("H800",), 989e12),
    (("H200",), 989e12),
    (("H20",), 148e12),
    (("H100",), 989e12),
    (("GB200",), 2.5e15),
    (("CPU",), 448e9),
    (("B200",), 2.25e15),
    (("Ascend950DT",), 432e12),
    (("Ascend910",), 354e12),
    (("A800",), 312e12),
    (("A40",), 149.7e12),
    (("A2G3",), 354e12),
    (("A100",), 312e12),
    (("910B",), 354e12),
)
# karpathy/nanochat, nanochat/common.py, get_peak_flops (commit 92d63d4, 3 July 2026), on the lower-cased name.
_NANOCHAT: _Rules = (
    (("gb200",), 2.5e15),
    (("grace blackwell",), 2.5e15),
    (("b200",), 2.25e15),
    (("b100",), 1.8e15),
    (("h200", "nvl"), 836e12),
    (("h200", "pcie"), 836e12),
    (("h200",), 989e12),
    (("h100", "nvl"), 835e12),
    (("h100", "pcie"), 756e12),
    (("h100",), 989e12),
    (("h800", "nvl"), 989e12),
    (("h800",), 756e12),
    (("a100",), 312e12),
    (("a800",), 312e12),
    (("a40",), 149.7e12),
    (("a30",), 165e12),
    (("l40s",), 362e12),
    (("l40-s",), 362e12),
    (("l40 s",), 362e12),
    (("l4",), 121e12),
    (("mi355",), 2.5e15),
    (("mi325",), 1307.4e12),
    (("mi300x",), 1307.4e12),
    (("mi300a",), 980.6e12),
    (("mi250x",), 383e12),
    (("mi250",), 362.1e12),
    (("data center gpu max 1550", "448 engines"), 298.1888e12),  # as torchtitan
    (("data center gpu max 1550",), 340.7872e12),
    (("5090",), 209.5e12),
    (("4090",), 165.2e12),
    (("3090",), 71e12),
)
# allenai/OLMo-core, src/olmo_core/train/callbacks/speed_monitor.py (commit fa6c5014c, 22 June 2026).
_OLMO_CORE: _Rules = (
    (("H100", "NVL"), 835.5e12),
    (("H100", "PCIe"), 756.5e12),
    (("H100",), 989.5e12),
    (("B200",), 2.25e15),
)
# NVIDIA-NeMo/Automodel, nemo_automodel/_transformers/mfu.py, _DEVICE_FLOPS, the longest key first, on the lower-cased
# name (commit 36044ad3d, 22 Aug 2026).
_AUTOMODEL: _Rules = (
    (("rtx pro 6000 blackwell max-q workstation edition",), 438.9e12),
    (("rtx pro 6000 blackwell workstation edition",), 503.8e12),
    (("rtx 3070 ti",), 21.75e12),
    (("ascend910",), 354e12),
    (("mi300x",), 1336e12),
    (("gb200",), 2.5e15),
    (("b200",), 2.25e15),
    (("h100",), 989e12),
    (("h800",), 989e12),
    (("h200",), 989e12),
    (("a100",), 312e12),
    (("a800",), 312e12),
    (("l40s",), 362.05e12),
    (("910b",), 354e12),
    (("cpu",), 448e9),
    (("l40",), 181.05e12),
    (("a40",), 149.7e12),
    (("l20",), 119.5e12),
    (("h20",), 148e12),
)
# NVIDIA-NeMo/RL, nemo_rl/utils/flops_tracker.py, THEORETICAL_TFLOPS of bfloat16, by the whole name (commit 7ea279abf,
# 22 Aug 2026).
_NEMO_RL = {
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA B200": 2.25e15,
    "NVIDIA B300": 2.25e15,
    "NVIDIA GB200": 2.45e15,
    "NVIDIA GB300": 2.45e15,
}
# radixark/miles, miles/utils/device_flops.py, peak_bf16_tflops, the longest first, on the words of the name in capitals
# (commit 31f1ca961, 21 Aug 2026); `--mfu-peak-tflops` states another.
_MILES: _Rules = (
    ((" H100 PCIE ",), 756e12),
    ((" GH200 ",), 989e12),
    ((" GB200 ",), 2.5e15),
    ((" GB300 ",), 2.5e15),
    ((" A100 ",), 312e12),
    ((" H100 ",), 989e12),
    ((" H200 ",), 989e12),
    ((" B200 ",), 2.25e15),
    ((" B300 ",), 2.25e15),
)
# PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/perf.py, PerfCounter._get_peak_flops (commit 559b44772, 21 Aug 2026;
# B300, GB200 and GB300 were unknown before 2ffe374e0 of 1 Aug 2026).
_PRIME_RL: _Rules = (
    (("A100",), 312e12),
    *(((name, form), peak) for form, peak in (("NVL", 835e12), ("PCIe", 756e12), ("", 989e12))
      for name in ("H100", "H200")),
    (("GB200",), 2.5e15),
    (("GB300",), 2.5e15),
    (("B200",), 2.25e15),
    (("B300",), 2.25e15),
    (("MI300X",), 1307.4e12),
    (("MI325X",), 1307.4e12),
)  # fmt: skip
# mosaicml/composer, composer/callbacks/speed_monitor.py, get_gpu_flops_available in bf16, else fp16, on the lower-cased
# name (commit 640518880, 29 Apr 2026).
_COMPOSER: _Rules = (
    (("h200",), 989.5e12),
    (("h100", "hbm3"), 989.5e12),
    (("h100", "pcie"), 756.5e12),
    (("h100", "hbm2e"), 756.5e12),
    (("a100",), 312e12),
    (("a10",), 125e12),
    (("v100-sxm",), 125e12),
    (("v100-pcie",), 112e12),
    (("t4",), 65e12),
)
# huggingface/trl, trl/trainer/utils.py, _PEAK_FLOPS_BY_DEVICE in bf16, on whole words of the name (release 1.16.0,
# 15 Oct 2026).
_TRL: _Rules = (
    ((" GB300 ",), 2.5e15),
    ((" GB200 ",), 2.5e15),
    ((" B300 ",), 2.25e15),
    ((" B200 ",), 2.25e15),
    ((" H100 NVL ",), 835e12),
    ((" H100 PCIE ",), 756e12),
    ((" H100 ",), 989e12),
    ((" H200 NVL ",), 835e12),
    ((" H200 ",), 989e12),
    ((" H20 ",), 148e12),
    ((" RTX PRO 6000 ",), 500e12),
    ((" A100 ",), 312e12),
    ((" A6000 ",), 154.85e12),
    ((" A10G ",), 125e12),
    ((" A10 ",), 125e12),
    ((" L40S ",), 362e12),
    ((" L4 ",), 121e12),
    ((" MI355X ",), 2.5e15),
    ((" MI325X ",), 1300e12),
    ((" MI300X ",), 1300e12),
    ((" MI250X ",), 191.5e12),
)
_NO_MFU = -1.0  # what a device gets that a tool prints no MFU on
_TABLES: dict[str, tuple[_Rules, float]] = {  # with what an unknown device gets
    "torchtitan": (_TORCHTITAN, 312e12),
    "lmms-engine": (_LMMS_ENGINE, inf),
    "bagel": (_BAGEL, inf),
    "veomni": (_VEOMNI, inf),
    "verl": (_VERL, inf),
    "nanochat": (_NANOCHAT, inf),
    "nemo-automodel": (_AUTOMODEL, inf),
    "nemo-rl": (tuple(((name,), peak) for name, peak in _NEMO_RL.items()), _NO_MFU),
    "miles": (_MILES, _NO_MFU),
    "prime-rl": (_PRIME_RL, 312e12),
    "llm-foundry": (_COMPOSER, _NO_MFU),
    "olmo-core": (_OLMO_CORE, 312e12),
    "nanogpt": ((), 312e12),  # model.py, estimate_mfu: an A100, whatever the device
    "trl": (_TRL, _NO_MFU),
    "trl-2026-07": ((), 989.5e12),  # compute_mfu's default (47b377888, 7 May 2026): an H100, unless the caller objects
}


@dataclass(frozen=True, slots=True)
class ToolPeak:
    """The peak that a tool divides by on a device."""

    # FLOP/s of one device; infinite where the tool does not know it and prints 0; None where the tool prints no MFU at
    # all
    flops_per_s: float | None
    note: str = ""  # what is odd about it, "" for nothing


def tool_peak(tool: str, device_name: str) -> ToolPeak:
    """Find the peak that a tool divides by.

    Args:
        tool: key of a convention's `tool`; "" for one that prints no MFU.
        device_name: what `torch.cuda.get_device_name()` prints.

    >>> tool_peak("torchtitan", "NVIDIA L4")
    ToolPeak(flops_per_s=312000000000000.0, note='unknown device, taken for an A100')
    """
    if tool not in _TABLES:
        return ToolPeak(None, "prints no MFU; the datasheet peak is used")
    rules, unknown = _TABLES[tool]
    lowered = {"nanochat", "nemo-automodel", "llm-foundry"}
    name = device_name.lower() if tool in lowered else device_name.upper() if tool == "bagel" else device_name
    if tool in ("miles", "trl"):
        name = f" {re.sub('[^A-Za-z0-9]+', ' ', device_name).upper().strip()} "
    if tool == "nemo-rl" and name not in _NEMO_RL:
        rules = ()
    for substrings, flops_per_s in rules:
        if all(substring in name for substring in substrings):
            return ToolPeak(flops_per_s)
    if unknown == _NO_MFU:
        return ToolPeak(None, "unknown device, on which it prints no MFU; the datasheet peak is used")
    if unknown == inf:
        return ToolPeak(inf, "unknown device, infinite peak: prints an MFU of 0")
    if not rules:
        return ToolPeak(unknown, f"always {unknown / 1e12:g} TFLOP/s, whatever the device")
    return ToolPeak(unknown, "unknown device, taken for an A100")


def plausible_peaks(tools: frozenset[str] = frozenset(_TABLES)) -> list[float]:
    """List every finite peak that some of the tools divide by [FLOP/s], ascending."""
    tables = [table for tool, table in _TABLES.items() if tool in tools]
    peaks = {peak for rules, unknown in tables for peak in (*(flops for _, flops in rules), unknown)}
    return sorted(peaks - {inf, _NO_MFU})
