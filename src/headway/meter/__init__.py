"""The step meter: wall-clock time against exact FLOPs, without synchronising the device.

`StepMeter` times steps; each gives a `StepUtilisation`, the run a `RunUtilisation`. Pure Python, no torch.
"""

from headway.meter.step import StepMeter
from headway.meter.utilisation import RunUtilisation, StepUtilisation

__all__ = ["RunUtilisation", "StepMeter", "StepUtilisation"]
