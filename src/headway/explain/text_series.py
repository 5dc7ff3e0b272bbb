"""Choice of the steps that an overview of many shows: some places in their order, and those that fall out of it."""

from collections.abc import Sequence
from statistics import median

from headway.explain.waterfall import StepWaterfall

MOST_STEPS = 20  # that are shown each
_MOST_SLOW = 5
_PLACES = (("fastest", 0.0), ("10 %", 0.1), ("median", 0.5), ("90 %", 0.9), ("slowest", 1.0))


def overview_steps(waterfalls: Sequence[StepWaterfall]) -> list[tuple[str, StepWaterfall]]:
    """Choose the steps of an overview.

    Args:
        waterfalls: at least one.

    Returns:
        All of them with empty places, up to MOST_STEPS; of more, those at some places by duration, then up to five that
        took more than twice the median, in their order.
    """
    if len(waterfalls) <= MOST_STEPS:
        return [("", waterfall) for waterfall in waterfalls]
    by_duration = sorted(waterfalls, key=lambda waterfall: waterfall.duration_ns)
    last = len(by_duration) - 1
    chosen = [(name, by_duration[int(place * last)]) for name, place in _PLACES]
    usual_ns = median(waterfall.duration_ns for waterfall in waterfalls)
    slow = [waterfall for waterfall in waterfalls if waterfall.duration_ns > 2 * usual_ns]
    dearest = sorted(slow, key=lambda waterfall: -waterfall.duration_ns)[:_MOST_SLOW]
    in_order = sorted(dearest, key=lambda waterfall: (waterfall.step, waterfall.rank))
    return [*chosen, *((f"1 of {len(slow)} slow", waterfall) for waterfall in in_order)]
