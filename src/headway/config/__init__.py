"""The configuration of a training run: a YAML file, typed, plus `--set a.b=c` on top.

Sections lie by subject in `model`, `data`, `optim` and `run`; `read` puts them together and reads them. Relative paths
start from the working directory, as on any command line, but that of `extends: FILE` starts beside the file that says
so. Unknown keys are refused, and so is a setting that cannot take effect.
"""

from headway.config.model import ModelConfig, ParallelConfig, SpeedConfig
from headway.config.optim import OptimConfig
from headway.config.read import TrainConfig, changed_config, load_config, parse_config, with_overrides
from headway.config.run import CheckpointConfig, EvalConfig, PlanConfig, RunConfig

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
    "changed_config",
    "load_config",
    "parse_config",
    "with_overrides",
]
