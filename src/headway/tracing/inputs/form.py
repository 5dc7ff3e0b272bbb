"""The interface of a form of input: workloads that exercise a tower, and the arguments that carry its inputs.

A `Probe` asks a model how many text positions its own towers make of an input, by running them on shapes alone.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import nn

from headway.count.workload import Workload
from headway.errors import TraceError
from headway.tracing import build
from headway.tracing.arguments import in_dtype
from headway.tracing.build import subconfigs
from headway.tracing.phantom import Phantom
from headway.tracing.record import Recorder
from headway.tracing.seams import Seams

Floats = Callable[[Sequence[int]], torch.Tensor]  # makes an input of floats of a shape: phantoms, or random numbers
# errors that a model raises on shapes that do not fit it
MISFITS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError, AttributeError)
WINDOW_SIDES = range(2, 65)  # window sizes of vision attention that are tried [patches]


class InputForm(ABC):
    """A way in which one tower of a model takes its inputs."""

    takes: ClassVar[str]  # the forward argument that carries them, such as `pixel_values`
    drivers: Sequence[str]  # candidates for what the tower's costs are proportional to
    # drivers, up to the slash, that may count frames after strided convolutions, as `audio` in `audio/2`
    strided: Sequence[str] = ()
    routes: Sequence[str] = ()  # arguments that choose another route through the model, as a finer connector
    fills: ClassVar[bool] = False  # whether the inputs fix the length of the text
    # for the ledger's `source`, such as that only single frames were traced
    notes: Mapping[str, str] = MappingProxyType({})

    def __init__(self, model: Any) -> None:
        self._config: Any = getattr(model, "config", None)

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's signature and configuration; None where the model takes no such input."""
        return cls(model) if cls._fits(model, inspect.signature(model.forward).parameters) else None

    @classmethod
    def _fits(cls, _model: Any, accepted: Mapping[str, Any]) -> bool:
        return cls.takes in accepted

    def along(self, route: str) -> "InputForm":
        """Copy the form so that it gives one of its routes' arguments."""
        raise TraceError(f"{type(self).__name__} has no other way named {route}.")

    @abstractmethod
    def sizes(self, run: int) -> dict[str, Any]:
        """Give the workload's arguments for run 0, 1, 2 or 3, such as `{"images": [(1, 12, 20)]}`."""

    def positions(self, _workload: Workload) -> int:
        """Count the text positions that the inputs take: none where they lie beside the segment, as a source does."""
        return 0

    @abstractmethod
    def fill(self, batch: dict[str, Any], start: int, workload: Workload, floats: Floats) -> None:
        """Add the arguments, and the tokens from `batch["input_ids"][0, start]` on."""


def plain_token(config: Any) -> int:
    """Pick a token number that is no special token of the model or of its towers."""
    special = {
        value
        for part in (subconfigs(config) if config is not None else ())
        for name, value in vars(part).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    return next(token for token in range(1, len(special) + 2) if token not in special)  # 0 often means padding


class Probe:
    """Runs a model's towers apart from its text."""

    def __init__(self, model: nn.Module) -> None:
        self._original = model
        self._twin: nn.Module | None = None

    @property
    def _model(self) -> nn.Module:
        if self._twin is None:
            first: object = next(self._original.parameters(), None)
            self._twin = self._original if isinstance(first, Phantom) else build.twin_of_model(self._original)
            build.use_seams(self._twin)
        return self._twin

    def has(self, name: str) -> bool:
        """Say whether the model, or a part of it, has a method of this name."""
        return any(hasattr(type(module), name) for module in self._original.modules())

    def takes(self, name: str) -> list[str]:
        """List the arguments of a method, of the model or of a part of it; the innermost that has one is asked."""
        return list(inspect.signature(self._method(name)).parameters)

    def rows(self, name: str, arguments: dict[str, Any]) -> int:
        """Count the rows of features that a method such as `get_image_features` gives: each is a text position.

        Args:
            name: of the method, of the model or of a part of it; the innermost that has one is asked.
            arguments: the forward's arguments; the method gets those that it names.
        """
        method = self._method(name)
        own = {}
        for key, parameter in inspect.signature(method).parameters.items():
            if key in arguments:
                own[key] = arguments[key]
            elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                own[key] = self._setting(key)
        output = self._run(method, own)
        if isinstance(output, dict):
            pooled = getattr(output, "pooler_output", None)  # some classes of outputs do not declare the field
            parts = (part for key, part in output.items() if key not in ("hidden_states", "attentions"))
            output = output.get("last_hidden_state", next(parts, None)) if pooled is None else pooled
        return _rows(output)

    def rows_before_text(self, arguments: dict[str, Any]) -> int:
        """Count the rows that the last part of a model to finish before its text gives; the text may then fail.

        Args:
            arguments: the forward's, whose text holds no token for what the towers read.
        """
        rows: list[int] = []
        running: list[nn.Module] = []
        model: Any = self._model
        base = getattr(model, model.base_model_prefix, model)

        def start(part: nn.Module, _args: Any) -> None:
            running.append(part)

        def finish(_part: nn.Module, _args: Any, output: Any) -> None:
            running.pop()
            output = output.get("last_hidden_state") if isinstance(output, dict) else output
            rows.append(_rows(output))

        hooks = [child.register_forward_pre_hook(start) for child in base.children()]
        hooks += [child.register_forward_hook(finish) for child in base.children()]
        try:
            self._run(self._model, arguments)
        except MISFITS:
            if running or not rows:  # a part failed, and not the text for want of its tokens
                raise
        finally:
            for hook in hooks:
                hook.remove()
        return rows[-1]

    def prepended(self, arguments: dict[str, Any]) -> int:
        """Count the positions that the model puts before its text: the logits' positions beyond the tokens."""
        logits = self._run(self._model, arguments).logits
        return int(logits.shape[1] - arguments["input_ids"].shape[1])

    def run(self, arguments: dict[str, Any]) -> Any:
        """Run the whole model forward."""
        return self._run(self._model, arguments)

    def _method(self, name: str) -> Callable[..., Any]:
        methods: list[Callable[..., Any]] = [getattr(m, name) for m in self._model.modules() if hasattr(type(m), name)]
        return methods[-1]

    def _setting(self, name: str) -> Any:
        """Look up a value of a configuration that a forward hands to its methods (Llama 4 in transformers 5.17)."""
        configs: list[Any] = build.subconfigs(self._original.config)
        return next((getattr(config, name) for config in configs if hasattr(config, name)), None)

    def _run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        with Recorder(self._model, lambda _: "") as recorder, Seams(recorder), torch.no_grad():
            return function(**in_dtype(arguments, build.common_dtype(self._model)))


def _rows(features: Any) -> int:
    """Count the rows [..., features] of a tensor, or of all tensors in a list; for pairs (layer, features), of one."""
    if isinstance(features, torch.Tensor):
        return features.numel() // features.shape[-1]
    if isinstance(features[0], tuple) and isinstance(features[0][0], int):  # each layer adds its own to the same rows
        return _rows(features[0][1])
    return sum(_rows(part) for part in features)
