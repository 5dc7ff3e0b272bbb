"""Another library's loop: the trainer that calls us, and the numbers in its log."""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any, TypeVar, cast

from headway.devices import Peak
from headway.errors import HeadwayError, UsageError
from headway.log.sink import flatten
from headway.meter import Window
from headway.meter.environment import device_of, peak_of
from headway.words import Argument

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])

LOGGED = ("mfu", "hfu", "tokens_per_s", "tokens_per_s_per_device", "padding_share", "balance")
LOGGED_OF_PHASES = ("phases/*/wall_s", "phases/*/mfu", "phases/*/mbu")


_AUTOCAST = {"bf16": "bf16", "fp16": "fp16", "bf16-mixed": "bf16", "16-mixed": "fp16"}


def peak_under(precision: str, model: Any) -> Peak | None:
    """Look up the peak in the dtype that a trainer casts matrix products to; None where it casts none.

    Args:
        precision: `mixed_precision` of Accelerate, or `precision` of Lightning.
        model: that is trained.
    """
    return peak_of(model, device_of(model), _AUTOCAST[precision]) if precision in _AUTOCAST else None


class Observer:
    """Measures the training of another library, which goes on whatever happens here.

    The first error of a hook, or of counting a forward, warns, ends the measuring and lets go of model and trainer.

    Attributes:
        failure: what ended the measuring; None while all is well.
    """

    failure: Exception | None = None
    name = ""
    """As its user calls it; the class's own name where it is empty."""
    takes = "cost_model=headway.trace(model, inputs=...), workload=..."
    """Arguments for models and batches that say too little by themselves."""

    def stop_measuring(self, error: Exception) -> None:
        """Note an error, warn of it and let go."""
        self.failure = error
        what = str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
        try:
            self._release()
        except Exception as another:  # noqa: BLE001 - what is half set up may not be let go of cleanly either
            what += f" (And {type(another).__name__}: {another})"
        name = self.name or type(self).__name__
        warnings.warn(
            f"{name} measures this training no further: {what} Training goes on without its numbers. For models and "
            f"batches that it cannot read, give it {self.takes}: a cost model, and a function that makes a "
            "headway.Workload of what each forward is given.",
            RuntimeWarning,
            stacklevel=3,
        )

    def _release(self) -> None:
        """Leave the model and the trainer as they were."""


def observing(hook: C) -> C:
    """Make a method of an observer that no error leaves; once the measuring has ended, it does nothing."""

    @functools.wraps(hook)
    def observed(self: Observer, *args: Any, **kwargs: Any) -> Any:
        if self.failure is not None:
            return None
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the observer's, and the training the user's
            self.stop_measuring(error)
            return None

    return cast(C, observed)


@contextmanager
def replaced(owner: Any, name: str, substitute: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace a method of an object, and of no other of its class, within a block.

    Args:
        owner: of the method.
        name: of the method.
        substitute: makes what stands in its place of the method.
    """
    attributes = vars(owner)
    method, own = getattr(owner, name), attributes.get(name)
    if getattr(method, "__self__", None) is owner:

        @functools.wraps(method.__func__)
        def bound(self: Any, *args: Any, **kwargs: Any) -> Any:
            return substitute(MethodType(method.__func__, self))(*args, **kwargs)  # a copy of the owner runs its own

        attributes[name] = MethodType(bound, owner)
    else:
        attributes[name] = functools.wraps(method)(substitute(method))
    try:
        yield
    finally:
        if own is None:
            attributes.pop(name, None)  # the wrapper hides the class's own method
        else:
            attributes[name] = own


def ranks_of_sequences(accelerator: Any, workload: object) -> int | None:
    """Ranks in a row that share a batch whose sequences are cut over them; None where none are cut.

    Args:
        accelerator: an `accelerate.Accelerator`, whose mesh has the ranks of one batch in a row.
        workload: what makes a batch's workload; None where forwards are to say it.

    Raises:
        UsageError: sequences are cut, and no `workload` says how long they are as a whole.
    """
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is None or parallel.cp_size * parallel.sp_size == 1:
        return None
    if workload is None:
        raise UsageError(
            f"sequences are cut over {parallel.cp_size * parallel.sp_size} ranks (ParallelismConfig's cp_size or "
            "sp_size), and a forward sees a part of them, from which nobody can tell their length. Give ",
            Argument("workload"),
            ", a function that makes a headway.Workload of the whole batch.",
        )
    ranks: int = parallel.non_data_parallel_size
    return ranks


def logged(window: Window, names: Sequence[str] = LOGGED, prefix: str = "headway") -> dict[str, int | float]:
    """Pick the numbers of a window that a loop logs, such as `headway/mfu`.

    Args:
        window: steps of a loop.
        names: keys of `Window.to_dict()`; one that holds others, such as `flops`, gives each of them. Behind a "/" they
            go on within one, `*` for any: `phases/rollout/mfu`, `phases/*/wall_s`.
        prefix: of the names in the log.

    Returns:
        Numbers by name, nested names joined by "/"; without what is not known.

    Raises:
        UsageError: a name is no key of a record.
    """
    record = window.to_dict()
    if missing := [name for name in names if name.partition("/")[0] not in record]:
        raise UsageError(f"a window has no {', '.join(missing)} to log; it has {', '.join(record)}.")
    patterns: dict[str, list[str]] = {}  # by the entry of the record that they are within
    for name in names:
        patterns.setdefault(name.partition("/")[0], []).append(name)
    flat = flatten({"step": window.step, **{entry: record[entry] for entry in patterns}})
    return {
        f"{prefix}/{key}": value
        for key, value in flat.items()
        if isinstance(value, int | float)
        and any(
            fnmatchcase(key, name) or key.startswith(f"{name}/") for name in patterns.get(key.partition("/")[0], ())
        )
    }


def caller_of(kind: type[T], called: str) -> T:
    """Find the trainer object that is running, among the callers on the stack.

    Raises:
        UsageError: no such trainer calls.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(trainer := frame.f_locals.get("self"), kind):
            return trainer
    raise UsageError(
        f"{called} is called by no {kind.__module__.partition('.')[0]}.{kind.__name__}: it finds there what a step "
        "runs. In a loop of your own use headway.Meter."
    )
