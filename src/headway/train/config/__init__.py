"""The configuration of a training run: a YAML file, typed, plus `--set a.b=c` on top.

Each section has a file of its own; `whole.py` puts them together and `read.py` reads them. Relative paths start from
the working directory, as on any command line, but that of `extends: FILE` starts beside the file that says so. Unknown
keys are refused, and so is a setting that cannot take effect.
"""

from headway.train.config.model import ModelConfig
from headway.train.config.optim import OptimConfig
from headway.train.config.parallel import ParallelConfig
from headway.train.config.plan import PlanConfig
from headway.train.config.read import load_config, parse_config, with_overrides
from headway.train.config.run import CheckpointConfig, EvalConfig, RunConfig
from headway.train.config.speed import SpeedConfig
from headway.train.config.whole import TrainConfig

__all__ = [
    "CheckpointConfig",
    "EvalConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PlanConfig",
    "RunConfig",
    "SpeedConfig",
    "TrainConfig",
    "load_config",
    "parse_config",
    "with_overrides",
]
