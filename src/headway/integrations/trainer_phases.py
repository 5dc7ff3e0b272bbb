"""Phases of a trainer's steps, found by what runs in them: generation, scoring, rewards, the update."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from headway.count import CostModel, Generation
from headway.errors import WorkloadError
from headway.integrations.generation_calls import ImageGrids, generation_of, generations_of
from headway.integrations.loops import replaced
from headway.meter import Meter, PhaseDevices
from headway.tracing.unwrap import unwrapped

if TYPE_CHECKING:
    from headway.meter.watch import ForwardWatch

ROLLOUT, REWARD, UPDATE = "rollout", "reward", "update"
POLICY, REFERENCE = "policy", "reference"
"""Scoring by the trained model, and by what it was before."""

_REWARDS = "_calculate_rewards"
"""Beginnings of the names of TRL's methods that ask reward functions and reward models, whichever trainer's."""


class TrainerCalls:
    """Names the phases of a trainer's steps to a meter, until it is closed; an error of it never leaves it.

    Args:
        meter: of the trainer's steps.
        on_error: told of the first error; nothing is measured from then on.
        devices: those that generate, where they are not the trainer's own: all of them, or how many.

    Attributes:
        is_named: whether steps have phases at all: those of a trainer that learns from its data alone have none.
        forwards: of its models, which pause while something generates.
    """

    def __init__(self, meter: Meter, on_error: Callable[[Exception], None], devices: PhaseDevices | int | None) -> None:
        self.is_named = False
        self.forwards: list[ForwardWatch] = []
        self._meter = meter
        self._on_error = on_error
        self._devices = PhaseDevices(meter.peak, devices) if isinstance(devices, int) else devices
        self._update = ExitStack()
        self._updates = False  # whether the update lasts
        self._calls: list[bool] = []  # open calls that generate, one within another; True if a call within was counted
        self._grids = ImageGrids(None)
        self._stack = ExitStack()

    def close(self) -> None:
        """Leave the trainer as it was."""
        self._on_error = _unheard  # errors of calls that still go on are not reported
        self._stack.close()

    def watch(self, trainer: Any, models: dict[nn.Module, CostModel]) -> None:
        """Find what the trainer generates with and what it asks for rewards.

        Args:
            trainer: that runs.
            models: the modules that it may generate with, and their ledgers.
        """
        self._grids = ImageGrids(getattr(trainer, "processing_class", None))
        for model, cost in ((unwrapped(module), ledger) for module, ledger in models.items()):
            for name, engine in (("generate", None), ("generate_batch", "generate_batch")):
                if callable(getattr(model, name, None)):
                    self._stack.enter_context(replaced(model, name, self._of_module(cost, engine)))
        # engines beside the models, such as vLLM's; one that serves over a network has devices of its own
        for attribute, engine in list(vars(trainer).items()):
            if isinstance(engine, nn.Module) or not callable(getattr(engine, "generate", None)):
                continue
            self.is_named = True
            self._devices = self._devices_of(engine)
            self._stack.enter_context(replaced(engine, "generate", self._of_engine(attribute)))
        if callable(getattr(trainer, "rollout_func", None)):
            self.is_named = True
            self._stack.enter_context(replaced(trainer, "rollout_func", self._of_engine("rollout_func")))
        for name in dir(type(trainer)):
            if name.startswith(_REWARDS):
                self.is_named = True
                self._stack.enter_context(replaced(trainer, name, self._of_rewards))

    def scoring(self, name: str) -> AbstractContextManager[Any]:
        """Begin the phase of a forward without a gradient."""
        return self._block(name)

    def training(self) -> AbstractContextManager[Any]:
        """Begin the update with a forward that has a backward; it lasts until `end_update`."""
        if self.is_named and not self._updates and self._meter.current_phase is None:
            self._update.enter_context(self._meter.phase(UPDATE))
            self._updates = True
        return nullcontext()

    def end_update(self) -> None:
        """End the update: its optimizer has stepped, or the next micro-batch is prepared."""
        self._updates = False
        self._update.close()

    @contextmanager
    def _block(self, name: str, devices: PhaseDevices | None = None) -> Iterator[None]:
        """Name a phase without a backward; nothing is one while the loop is away from training."""
        phase = ExitStack()
        with self._unharmed():
            if not self._meter.is_away:
                self.is_named = True
                phase.enter_context(self._meter.phase(name, forward_only=True, **_options(devices)))
        try:
            yield
        finally:
            with self._unharmed():
                phase.close()

    @contextmanager
    def _rollout(self) -> Iterator[None]:
        """Name a phase of generation; it is counted as a whole, so that no hook runs in each of its many forwards."""
        with self._block(ROLLOUT, self._devices):
            for calls in self.forwards:
                calls.pause()
            try:
                yield
            finally:
                for calls in self.forwards:
                    calls.resume()

    @contextmanager
    def _unharmed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the observer's, and the training the user's
            self._on_error(error)

    def _generated(self, call: Callable[[], Any], lengths: Callable[[Any], list[Generation]], cost: Any) -> Any:
        """Run what generates as a phase, and count it unless calls within it were."""
        is_within = bool(self._calls)
        self._calls.append(False)
        with nullcontext() if is_within else self._rollout():
            is_counted = False
            try:
                results = call()
            finally:
                is_counted = self._calls.pop()
            with self._unharmed():
                if not (is_counted or self._meter.is_away):
                    for generation in lengths(results):
                        self._meter.count(generation, cost_model=cost)
                self._calls[-1:] = [True] * len(self._calls[-1:])
        return results

    def _of_module(self, cost: CostModel, engine: str | None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def substitute(generate: Callable[..., Any]) -> Callable[..., Any]:
            def generated(*args: Any, **kwargs: Any) -> Any:
                def lengths(results: Any) -> list[Generation]:
                    if engine is not None:
                        return generations_of(engine, results)
                    return [generation_of(generate.__self__, args, kwargs, results, cost)]  # type: ignore[attr-defined]

                return self._generated(lambda: generate(*args, **kwargs), lengths, cost)

            return generated

        return substitute

    def _of_engine(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def substitute(generate: Callable[..., Any]) -> Callable[..., Any]:
            def generated(*args: Any, **kwargs: Any) -> Any:
                def lengths(results: Any) -> list[Generation]:
                    if _holds_features(args, kwargs):
                        raise WorkloadError(f"{name} is given media whose sizes cannot be read.")
                    images = kwargs.get("images")
                    return generations_of(name, results, None if images is None else self._grids.of(images))

                return self._generated(lambda: generate(*args, **kwargs), lengths, None)

            return generated

        return substitute

    def _of_rewards(self, rewards: Callable[..., Any]) -> Callable[..., Any]:
        def rewarded(*args: Any, **kwargs: Any) -> Any:
            with self._block(REWARD):
                return rewards(*args, **kwargs)

        return rewarded

    def _devices_of(self, engine: Any) -> PhaseDevices | None:
        """Find the devices of an engine: those that it was said to have, or the workers that a server tells of."""
        client = getattr(engine, "vllm_client", engine)
        serves = hasattr(client, "get_world_size")
        if self._devices is not None or not (serves or getattr(engine, "mode", None) == "server"):
            return self._devices
        # only the first rank has a client, and it writes the records
        return PhaseDevices(self._meter.peak, client.get_world_size() if serves else 1)


def _options(devices: PhaseDevices | None) -> dict[str, Any]:
    """Give the arguments of `Meter.phase` for devices of a phase's own."""
    return {} if devices is None else vars(devices)


def _holds_features(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a call of vLLM or of its client has media beside its prompts."""
    prompts = args[0] if args else kwargs.get("prompts")
    rows = prompts if isinstance(prompts, list) else []
    features = kwargs.get("features") or ()
    return any(isinstance(row, Mapping) and row.get("multi_modal_data") for row in rows) or any(features)


def _unheard(_error: Exception) -> None:
    """Let an error go: one before it has been warned of, or the measuring has ended."""
