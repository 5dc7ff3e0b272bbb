"""A waterfall without a trace: what counters tell of a step, and the rest as one line that says so."""

from collections.abc import Iterable

from headway.explain.waterfall import StepWaterfall, WaterfallLine, mfu_without

UNSEPARATED = "unseparated"
NO_PROFILE_NOTE = (
    "unseparated: kernels, communication, copies, launches and synchronisation are not separable without a profile. "
    "Record some steps with `--set run.profile.start=N` of `headway train`, or with `headway.profile` in a loop of "
    "your own, and explain the run again."
)


def unprofiled(
    step: int, duration_ns: int, known_lines: Iterable[tuple[str, str, int, dict[str, int]]], device_name: str
) -> StepWaterfall:
    """Make the waterfall of a step from the lines that are known, and one line of the rest.

    Args:
        step: its number.
        duration_ns: how long it took [ns], above 0.
        known_lines: key, name, time [ns] and parts of each line that is known; "useful" is the needed work at peak.
        device_name: what it ran on.

    Returns:
        Lines that add up to the duration; the rest is below zero where the lines that are told exceed it.
    """
    amounts = list(known_lines)
    rest_ns = duration_ns - sum(ns for _, _, ns, _ in amounts)
    amounts.append((UNSEPARATED, "unseparated: no profile", rest_ns, {}))
    useful_ns = next((ns for key, _, ns, _ in amounts if key == "useful"), None)
    mfu = None if useful_ns is None else useful_ns / duration_ns

    lines = tuple(
        WaterfallLine(
            key,
            name,
            ns,
            ns / duration_ns,
            mfu,
            None if key == UNSEPARATED else mfu_without(useful_ns, duration_ns, key, ns),
            parts,
        )
        for key, name, ns, parts in amounts
    )
    return StepWaterfall(step, 0, duration_ns, mfu, lines, is_edge=False, device_name=device_name)
