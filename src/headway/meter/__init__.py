"""The meter: exact FLOPs against the one clock, without synchronising the device.

`Meter` measures any loop, over all ranks, and gives a `Window` of steps now and then; `log_to` names where their
records go (`open_sink`, `Sinks`), `Goodput` keeps where every second of a run went, `profile.py` writes a profiler's
trace of some steps.
"""

from typing import TYPE_CHECKING

from headway.exports import exported

if TYPE_CHECKING:
    from headway.log.sink import Sink
    from headway.log.sinks import Sinks, open_sink
    from headway.meter.batches import workload_of
    from headway.meter.goodput import Goodput
    from headway.meter.goodput_report import GoodputReport
    from headway.meter.meter import Meter
    from headway.meter.step_phases import PhaseDevices
    from headway.meter.window import Window

_HOMES = {
    "headway.log.sink": ("Sink",),
    "headway.log.sinks": ("Sinks", "open_sink"),
    "headway.meter.batches": ("workload_of",),
    "headway.meter.goodput": ("Goodput",),
    "headway.meter.goodput_report": ("GoodputReport",),
    "headway.meter.meter": ("Meter",),
    "headway.meter.step_phases": ("PhaseDevices",),
    "headway.meter.window": ("Window",),
}

__all__ = ["Goodput", "GoodputReport", "Meter", "PhaseDevices", "Sink", "Sinks", "Window", "open_sink", "workload_of"]

__getattr__ = exported(__name__, _HOMES)
