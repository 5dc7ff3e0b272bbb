"""Errors that a user can act on.

Each message says what was wrong, the value got, what is allowed and what to do next. The command line prints the
message as one paragraph and exits with `exit_code`: 2 for a wrong use, 1 for everything else.
"""

from headway.report.secrets import presentable


class HeadwayError(Exception):
    """Base of every error that Headway raises on purpose; its text is safe to show, whatever it names."""

    exit_code = 1

    def __str__(self) -> str:
        return presentable(super().__str__())


class UsageError(HeadwayError):
    """An option or argument cannot be understood, or two contradict each other."""

    exit_code = 2


class WorkloadError(UsageError):
    """Segment lengths, grids or slots do not describe a step."""


class ConfigError(UsageError):
    """A training configuration holds an unknown key or a value that cannot take effect."""


class RunCompleteError(ConfigError):
    """A run has taken all of its steps, so nothing is left to go on with."""


class UnknownModelError(UsageError):
    """A model name is neither shipped, nor a local folder or config, nor reachable on the Hub."""


class UnknownConventionError(UsageError):
    """A counting convention has no such name."""


class NotExpressibleError(UsageError):
    """A convention has no number for a model; the text says why, and what the tool then prints."""


class UnknownDeviceError(HeadwayError):
    """A device's peak is not known; no MFU is better than a guessed one."""


class PlanError(UsageError):
    """The quantities of a plan are too few, contradict each other, or are not positive."""


class LogError(HeadwayError):
    """A log holds no line that is recognised, or numbers that no convention explains."""


class TraceError(HeadwayError):
    """A model holds an operation that the ledger cannot explain."""


class CostModelError(HeadwayError):
    """A cost model's file is not one, or is of another version."""


class DataError(HeadwayError):
    """A sample, image or dataset file cannot be used; the message names file and line."""


class CheckpointError(HeadwayError):
    """A checkpoint is incomplete, damaged or of another run."""


class TrainingError(HeadwayError):
    """Training cannot go on: a loss that is not finite, a missing device."""


class NotFiniteError(TrainingError):
    """A loss or gradient is not finite, and the weights are lost with it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that no memory was left: Python's, PyTorch's, or that of an allocator below it.

    Args:
        error: of any library.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch is not imported for it
        return True
    signs = ("can't allocate memory", "bad_alloc", "Cannot allocate memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


class OutOfMemoryError(TrainingError):
    """There was no memory left, on the device or the host; the message says what held it."""


class RankLostError(HeadwayError):
    """A rank did not answer in time when numbers were added up."""
