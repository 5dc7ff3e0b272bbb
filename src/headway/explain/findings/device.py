"""Rules about the device itself."""

from collections.abc import Mapping

from headway.explain.findings.evidence import Evidence, Observation, as_number


def throttled_clocks(evidence: Evidence) -> Observation | None:
    """The device's clock is below what it can be, so what computes takes longer."""
    slower = 0.0
    for rank in evidence.ranks:
        clocks = evidence.fact("clocks", rank)
        if isinstance(clocks, Mapping):
            now, most = as_number(clocks.get("sm_mhz")), as_number(clocks.get("most_sm_mhz"))
            slower = max(slower, 1 - now / most if now and most else 0.0)
    if not slower:
        return None
    ns = round(slower * evidence.matmul_ns)
    return Observation(
        ns,
        f"the device's clock was {slower:.0%} below its highest at the end of the profile.",
        "the device is at its power limit or too hot, or its clocks are set low.",
        "nvidia-smi -q -d PERFORMANCE,CLOCK for the reason; a higher power limit, better cooling, or less of both "
        "where the limit is meant: then MFU is to be read against the lower clock.",
    )
