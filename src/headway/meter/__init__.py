"""The meter: exact FLOPs against the wall clock, without synchronising the device.

`Meter` measures any loop, over all ranks, and gives a `Window` now and then; `log_to` names where their records go
(`open_sink`, `Sinks`), `Goodput` keeps where every second of a run went. `StepMeter` times single steps of workloads
that are known on every rank, and needs no torch.
"""

from headway.meter.batches import workload_of
from headway.meter.goodput import Goodput
from headway.meter.goodput_report import GoodputReport
from headway.meter.meter import Meter
from headway.meter.sinks import Sink, Sinks, open_sink
from headway.meter.step import StepMeter
from headway.meter.utilisation import RunUtilisation, StepUtilisation
from headway.meter.window import Window

__all__ = [
    "Goodput",
    "GoodputReport",
    "Meter",
    "RunUtilisation",
    "Sink",
    "Sinks",
    "StepMeter",
    "StepUtilisation",
    "Window",
    "open_sink",
    "workload_of",
]
