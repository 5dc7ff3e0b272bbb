"""The meter in other people's loops: Hugging Face's and TRL's trainers, Accelerate, Lightning, torchtitan, Megatron.

`TrainerPhases` makes the record of trainers that generate (verl, slime, ...) out of lengths and times.
"""

from typing import TYPE_CHECKING

from headway.exports import exported

if TYPE_CHECKING:
    from headway.integrations.accelerate import AccelerateMeter
    from headway.integrations.huggingface import HeadwayCallback
    from headway.integrations.lightning import HeadwayMonitor
    from headway.integrations.megatron import FlopsAccumulator
    from headway.integrations.rl import TrainerPhases
    from headway.integrations.torchtitan import with_headway

# Each integration needs the library that it joins.
_HOMES = {
    "headway.integrations.accelerate": ("AccelerateMeter",),
    "headway.integrations.huggingface": ("HeadwayCallback",),
    "headway.integrations.lightning": ("HeadwayMonitor",),
    "headway.integrations.megatron": ("FlopsAccumulator",),
    "headway.integrations.rl": ("TrainerPhases",),
    "headway.integrations.torchtitan": ("with_headway",),
}

__all__ = ["AccelerateMeter", "FlopsAccumulator", "HeadwayCallback", "HeadwayMonitor", "TrainerPhases", "with_headway"]

__getattr__ = exported(__name__, _HOMES)
