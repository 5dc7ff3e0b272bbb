"""What the forwards of a model cost: how it is set up, what it checkpoints, and its traces, one per form of input."""

import inspect
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from headway.count import CostModel, FlopCount, Workload
from headway.errors import HeadwayError, UsageError, WorkloadError
from headway.meter import clock
from headway.meter.batches import input_gradients_of, read_or_copy, workload_of
from headway.meter.environment import device_of
from headway.tracing import trace
from headway.tracing.classify import checkpointable_blocks
from headway.tracing.unwrap import whole

_IDS = ("input_ids", "inputs_embeds")
_ONE = Workload([1])  # an example of arguments is billed as one segment


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is set up while a block runs."""

    trained: tuple[bool, ...]  # for each parameter, whether it is trained
    checkpointed: tuple[str, ...]  # paths of the blocks that are run again in the backward
    num_blocks: int  # blocks that could be
    to_the_end: bool  # whether they are run again to their ends, as `use_reentrant=True` does
    version: int  # changes when the model gets other parameters

    def recompute(self) -> str:
        """Say what is run again, as `CostModel.count` takes it.

        Raises:
            UsageError: a choice of blocks is run again to their ends, which no term says.
        """
        if not self.checkpointed:
            return "none"
        if len(self.checkpointed) == self.num_blocks:
            return "reentrant" if self.to_the_end else "full"
        if self.to_the_end:
            raise UsageError(
                f"{len(self.checkpointed)} of {self.num_blocks} blocks are checkpointed with use_reentrant=True, and "
                "what that runs again cannot be said. Checkpoint with use_reentrant=False, or pass recompute= (see "
                "`CostModel.count`)."
            )
        return ",".join(self.checkpointed)

    def applied_to(self, cost_model: CostModel) -> CostModel:
        """Return the cost model of the same model with these parameters trained."""
        pairs = zip(cost_model.parameters, self.trained, strict=True)
        return replace(cost_model, parameters=tuple(replace(p, trainable=trained) for p, trained in pairs))


class SetupReader:
    """Read how a model is set up, over and over, in microseconds.

    Args:
        model: is not kept alive; once it is gone, its last setup stands.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._version = 0
        self._marks: list[tuple[int, torch.Size]] = []
        self._parameters: list[Any] = []
        self.look_again()

    def look_again(self) -> None:
        """Find the model's parameters and blocks anew, as after some were added."""
        model = self._model()
        if model is None:
            return
        inner = whole(model)
        marks = [(id(parameter), parameter.shape) for parameter in inner.parameters()]
        self._version += marks != self._marks
        self._marks = marks
        self._parameters = [weakref.ref(parameter) for parameter in inner.parameters()]
        paths = checkpointable_blocks(inner)
        self._blocks = [(path, weakref.ref(module)) for path, module in inner.named_modules() if path in paths]
        self._last = self._read()

    def read(self) -> Setup:
        """Return how the model is set up now."""
        try:
            self._last = self._read()
        except AttributeError:  # one is gone: sharding puts others in their places
            self.look_again()
        return self._last

    def _read(self) -> Setup:
        on: list[tuple[str, Any]] = []
        for path, block in self._blocks:
            module = block()
            if getattr(module, "gradient_checkpointing", False):
                on.append((path, getattr(module, "_gradient_checkpointing_func", None)))
        return Setup(
            tuple([parameter().requires_grad for parameter in self._parameters]),
            tuple([path for path, _ in on]),
            len(self._blocks),
            any(getattr(function, "keywords", {}).get("use_reentrant", False) for _, function in on),
            self._version,
        )


@dataclass(slots=True)
class Call:
    """One forward of a model, as it was noted down."""

    ledger: "Ledger"
    # its workload; or its arguments, to be read later; or the error that they raised; None where it is not counted
    given: Any
    dtype: torch.dtype | None = None  # that autocast had while it ran; None without autocast
    # names of its arguments that require a gradient, where the model takes tokens
    input_gradients: tuple[str, ...] = ()

    def arrived(self) -> "Call":
        """Wait until what is read later has come from the device."""
        if not isinstance(self.given, Workload) and self.ledger.device is not None:
            clock.mark(self.ledger.device).wait()
        return self


class Ledger:
    """Count what the forwards of one model cost.

    A model that takes `input_ids` has one cost model, and its batches are read as `headway.meter.workload_of` reads
    them. Of any other, each new shape of arguments is traced by itself: its integers must not steer what it costs.

    Raises:
        UsageError: it lies on several devices.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.device: torch.device | None = device_of(model)
        self.names = _names(model)
        self.takes_tokens = "input_ids" in inspect.signature(whole(model).forward).parameters
        self.follows_backwards = False  # outside blocks too
        self.num_backwards = 0  # signs of a backward that were seen; one may give several
        self.name = type(model).__name__
        self.setup = SetupReader(model)
        self._param_bytes = param_bytes(model)
        self._results: Any = None  # from which backward starts
        self._traces: dict[Any, CostModel] = {}
        self._applied: dict[tuple[Any, tuple[bool, ...]], CostModel] = {}

    @property
    def model(self) -> nn.Module:
        """The model, which a ledger does not keep alive.

        Raises:
            UsageError: it is gone.
        """
        model = self._model()
        if model is None:
            raise UsageError("the model that was profiled is gone, and its forwards cannot be counted. Keep it.")
        return model

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the weights; None of a model that has none of floats."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None)

    @property
    def param_bytes(self) -> int:
        """Bytes of the weights, as last seen."""
        model = self._model()
        if model is not None:
            self._param_bytes = param_bytes(model)
        return self._param_bytes

    def start_backward_from(self, results: Any) -> None:
        """Say from which results of the model its backward starts, as for `headway.trace`."""
        if results is not None and results != self._results:
            self._results = results
            self._traces.clear()
            self._applied.clear()

    def prepare(self) -> None:
        """Trace the model ahead of its first forward, where that says nothing new.

        Raises:
            TraceError: an operation cannot be explained.
        """
        if self.takes_tokens and not self._traces:
            self.cost_model()

    def cost_model(self, given: Any = None, setup: Setup | None = None) -> CostModel:
        """Return the cost model that a forward is counted with, traced if it is the first of its kind.

        Args:
            given: its arguments by name; not needed where the model takes tokens.
            setup: says what is trained; read off the model when None.

        Raises:
            TraceError: an operation cannot be explained.
        """
        setup = setup if setup is not None else self.setup.read()
        key = (setup.version, None if self.takes_tokens else _shapes(given))
        if (key, setup.trained) not in self._applied:
            if key not in self._traces:
                inputs = None if self.takes_tokens else _on_cpu(given)
                self._traces[key] = trace(self.model, inputs=inputs, results=self._results)
            self._applied[key, setup.trained] = setup.applied_to(self._traces[key])
        return self._applied[key, setup.trained]

    def traced(self) -> Iterable[CostModel]:
        """Return what has been traced so far."""
        return self._traces.values()

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Note one forward down, without waiting for the device; what is wrong with it is said when it is counted."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        dtype = None
        if self.device is not None and torch.is_autocast_enabled(self.device.type):
            dtype = torch.get_autocast_dtype(self.device.type)
        if not self.takes_tokens:
            return Call(self, _without_data(given), dtype)
        try:
            _refuse_past(given)
            model = next(reversed(self._traces.values()))  # whoever watches has had it traced
            asked = input_gradients_of(given) if torch.is_grad_enabled() else ()
            return Call(self, read_or_copy(given, model), dtype, asked)
        except HeadwayError as error:  # a loop is not broken by being watched
            return Call(self, error, dtype)

    def count(
        self, call: Call, setup: Setup, *, recompute: str | None = None, forward_only: bool = False
    ) -> tuple[FlopCount, Workload]:
        """Count a forward that was noted down, and its backward; its copies have come.

        Returns:
            The FLOPs, and the workload; that of a model without tokens is empty.

        Raises:
            HeadwayError: the forward cannot be counted.
        """
        if isinstance(call.given, HeadwayError):
            raise call.given
        again = "none" if forward_only else setup.recompute() if recompute is None else recompute
        model = self.cost_model(call.given, setup).with_input_gradients(call.input_gradients)
        if not self.takes_tokens:
            return model.count(_ONE, recompute=again, forward_only=forward_only), Workload()
        workload = workload_of(call.given, model)
        return model.count(workload, recompute=again, forward_only=forward_only), workload


def _names(model: nn.Module) -> list[str]:
    """Name the positional arguments of a model's forward; a wrapper's are those of what it wraps."""
    for module in (model, whole(model)):
        parameters = inspect.signature(module.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if names:
            return names
    return []


def _shapes(value: Any) -> Any:
    """Reduce arguments to what their cost depends on: shapes of tensors, and whatever else is no tensor."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.is_floating_point(), value.requires_grad)
    if isinstance(value, dict):
        return tuple((name, _shapes(part)) for name, part in value.items())
    return tuple(map(_shapes, value)) if isinstance(value, tuple | list) else repr(value)


def _without_data(value: Any) -> Any:
    """Keep of floats their shape, so that no activation stays alive, and whether they require a gradient."""
    if isinstance(value, torch.Tensor):
        floats = value.is_floating_point()
        return value.detach().to("meta").requires_grad_(value.requires_grad) if floats else value.detach()
    if isinstance(value, dict):
        return {name: _without_data(part) for name, part in value.items()}
    return type(value)(map(_without_data, value)) if type(value) in (tuple, list) else value


def _on_cpu(value: Any) -> Any:
    """Take integers to the CPU; floats have no data."""
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else value.cpu()
    if isinstance(value, dict):
        return {name: _on_cpu(part) for name, part in value.items()}
    return type(value)(map(_on_cpu, value)) if type(value) in (tuple, list) else value


def _refuse_past(given: Mapping[str, Any]) -> None:
    """Refuse a forward that goes on from cached keys and values: its batch does not say how many."""
    cache = given.get("past_key_values")
    ids = next((given[name] for name in _IDS if given.get(name) is not None), None)
    if cache is None or ids is None or not hasattr(cache, "get_seq_length"):
        return
    if cache.get_seq_length() > ids.shape[1]:
        raise WorkloadError(
            "the model was called with past_key_values, as generation does: the keys that it reads are not in the "
            "batch. Leave generation out of the block, or count it with Workload(..., past=...)."
        )


def param_bytes(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Count the bytes of a model's parameters; tied ones once.

    Args:
        model: any module; of a sharded one the whole's.
        trainable_only: leave frozen parameters out.

    >>> from torch import nn
    >>> param_bytes(nn.Linear(8, 4))
    144
    """
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad or not trainable_only)
