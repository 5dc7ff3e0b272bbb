"""Cost of failures to a run: the checkpoint interval that is best, and the share of time that makes progress.

Failures come at random, at a constant rate for each device, and any of them stops the whole job. The job then loses
what it computed since the last whole checkpoint, and the time to start again.
"""

from dataclasses import dataclass
from math import exp, sqrt

from headway.errors import PlanError


@dataclass(frozen=True, slots=True)
class Reliability:
    """Rate of a job's failures, and their cost.

    Attributes:
        mtbf_s: mean time between failures of one device, with its share of host, network and power [s].
        save_s: that training stands still for a checkpoint [s].
        restart_s: from a failure to the first step after it, with reading the checkpoint [s].
    """

    mtbf_s: float
    save_s: float
    restart_s: float

    def __post_init__(self) -> None:
        for name in ("mtbf_s", "save_s"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name} is {getattr(self, name):g}; a time between failures or for a save is above 0.")
        if self.restart_s < 0:
            raise PlanError(f"restart_s is {self.restart_s:g}; a time is at least 0.")


@dataclass(frozen=True, slots=True)
class Interruptions:
    """Interruptions of a job of some devices, and the time that they take.

    Attributes:
        mtbf_s: mean time between failures of the job [s].
        interval_s: of training between two checkpoints that loses least [s].
        goodput: share of the time that makes progress which lasts, a fraction.
    """

    mtbf_s: float
    interval_s: float
    goodput: float

    @classmethod
    def of(cls, reliability: Reliability, devices: int) -> "Interruptions":
        """Find the best interval for so many devices, and the share of the time that remains."""
        mtbf_s = reliability.mtbf_s / devices
        interval_s = best_interval_s(reliability.save_s, mtbf_s)
        return cls(mtbf_s, interval_s, goodput(interval_s, reliability, mtbf_s))

    @property
    def per_day(self) -> float:
        """Failures of the job in a day."""
        return 86400 / self.mtbf_s


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Find the time of training between checkpoints that makes a job take least [s].

    Args:
        save_s: that training stands still for a checkpoint [s].
        mtbf_s: mean time between failures of the job [s].

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", equation 37;
        its first term is Young's (1974, Communications of the ACM 17 (9)).

    >>> round(best_interval_s(save_s=300, mtbf_s=24 * 3600) / 60)
    117
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    half = save_s / (2 * mtbf_s)
    return sqrt(2 * save_s * mtbf_s) * (1 + sqrt(half) / 3 + half / 9) - save_s


def goodput(interval_s: float, reliability: Reliability, mtbf_s: float) -> float:
    """Expected share of a job's time that makes progress which lasts, a fraction.

    Args:
        interval_s: of training between two checkpoints [s].
        reliability: what a failure costs.
        mtbf_s: mean time between failures of the job [s].

    Source: Daly 2006, equation 20, a job's wall time where failures may come at any time, while it saves and starts
        again too.
    """
    try:
        wall_s = mtbf_s * exp(reliability.restart_s / mtbf_s) * (exp((interval_s + reliability.save_s) / mtbf_s) - 1)
    except OverflowError:
        return 0.0
    return interval_s / wall_s
