"""The step meter: wall-clock time against exact FLOPs, without synchronising the device.

`StepMeter` times steps; each gives a `StepUtilisation`, the run a `RunUtilisation`. Pure Python, no torch.
"""

from headway.meter.batches import workload_of
from headway.meter.meter import Meter
from headway.meter.step import StepMeter
from headway.meter.utilisation import RunUtilisation, StepUtilisation
from headway.meter.window import Window

__all__ = ["Meter", "RunUtilisation", "StepMeter", "StepUtilisation", "Window", "workload_of"]
