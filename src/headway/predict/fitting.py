"""Settings, or a number of devices, with which a run fits a device's memory, the least harmful first.

First what changes no result and costs time, then fewer bits for what the optimizer keeps and for the weights, then
smaller packs and more devices. Where none is enough by itself, they are put together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.config import TrainConfig, changed_config
from headway.devices import Device
from headway.errors import ConfigError, UsageError

USABLE = 0.9
"""Share of a device's memory that a plan may fill; the rest is for memory that the plan does not count."""
PRICES = {
    "speed.loss_chunk": "none",
    "speed.compile": "a minute of compilation",
    "speed.recompute=full,-attention,-projections,-mlp": "backward recomputes the elementwise operations of each block",
    "speed.recompute=full,-attention": "backward recomputes each block except its attention",
    "speed.recompute=full": "backward recomputes each block",
    "speed.offload": "blocks' inputs go to the host's memory and back",
    "parallel.reshard": "blocks are gathered again in backward",
    "optim.state": "moments are rounded, stochastically",
    "run.dtype": "weights and gradients are rounded to bfloat16",
    "model.lora.rank": "adapters learn, and the model's own weights stay as they are",
    "model.base": "the frozen weights are rounded to 4 bits",
    "data.tokens_per_pack": "longer samples are cut or dropped, and a step has fewer tokens",
    "optim.accumulation": "longer samples are cut or dropped",
    "parallel.offload": "a step waits for the host's memory",
}
"""Price of each setting, by its name, or by its name and value."""

LORA_RANK = 16
"""Rank of the adapters that are proposed: PEFT's tutorials and LLaMA-Factory's examples use 8 to 64."""
_IN_4_BITS = "model.base=nf4"
_PACK, _PACKS = "data.tokens_per_pack", "optim.accumulation"
_FEWEST_TOKENS = 1024  # in a pack that is still worth a step
_MOST_DOUBLED = 10  # times that devices are doubled
_WORTH = 0.99  # share of the present peak; settings that save less are not named

Peak = Callable[[TrainConfig, int], int]
"""The most that each device holds under a configuration, with so many devices [bytes]."""


@dataclass(frozen=True)
class Way:
    """Settings, or a number of devices, that need less memory.

    Attributes:
        settings: assignments such as `optim.state=8bit`.
        devices: of the run, a process each.
        peak_bytes: the most that each then holds.
    """

    settings: tuple[str, ...]
    devices: int
    peak_bytes: int

    @property
    def price(self) -> str:
        """Price of the settings, in words."""
        names = [_name(setting) for setting in self.settings]
        # shorter packs with more of them in a step have the price of the latter
        settings = [setting for setting in self.settings if not (_name(setting) == _PACK and _PACKS in names)]
        return "; ".join(PRICES.get(setting) or PRICES[_name(setting)] for setting in settings) or "more devices"

    def __str__(self) -> str:
        return " and ".join(self.settings) or f"{self.devices:,} devices"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"settings": list(self.settings), "devices": self.devices, "peak_bytes": self.peak_bytes}


def room_of(device: Device | None) -> int | None:
    """Memory of a device that a plan may fill [bytes]; None where nobody says how much it has."""
    return None if device is None or device.total_memory_bytes is None else room_in(device.total_memory_bytes)


def room_in(total_bytes: int) -> int:
    """Memory that a plan may fill, of so much that a device's driver reports [bytes]."""
    return int(USABLE * total_bytes)


def ways_to_fit(config: TrainConfig, devices: int, room_bytes: int, peak: Peak) -> tuple[Way, ...]:
    """Find settings, or a number of devices, with which a run fits.

    Args:
        config: as it is.
        devices: of the run, a process each.
        room_bytes: what a device may hold.
        peak: asks the memory plan.

    Returns:
        Single settings that are enough, those that harm least first, or where none is, several together; then how
        often devices must be doubled to be enough. Where nothing is: all settings together, whose peak is above
        `room_bytes`.
    """
    now = peak(config, devices)
    enough: list[Way] = []
    for settings in gentlest_first(config):
        way = _tried(config, settings, devices, peak)
        if way is not None and way.peak_bytes <= min(room_bytes, _WORTH * now):
            is_repeated = any(_name(settings[0]) == _name(other.settings[0]) for other in enough)
            enough += [] if is_repeated else [way]
    together = () if enough else (_together(config, devices, room_bytes, peak),)
    if together and together[0].peak_bytes <= room_bytes:
        enough += together
    for doubled in range(1, _MOST_DOUBLED + 1):
        way = _tried(config, (), devices << doubled, peak)
        if way is not None and way.peak_bytes <= room_bytes:
            enough.append(way)
            break
    return tuple(enough) or together


def _together(config: TrainConfig, devices: int, room_bytes: int, peak: Peak) -> Way:
    """Add settings until the run fits, then drop the settings that turn out not to be needed."""
    chosen: list[tuple[str, ...]] = []  # settings that go together are added and dropped together
    best = Way((), devices, peak(config, devices))
    for settings in gentlest_first(config):
        if best.peak_bytes <= room_bytes:
            break
        others = [group for group in chosen if _name(group[0]) != _name(settings[0])]
        way = _tried(config, _joined([*others, settings]), devices, peak)
        if way is not None and way.peak_bytes < _WORTH * best.peak_bytes:
            best, chosen = way, [*others, settings]
    for settings in [*chosen]:
        fewer = [group for group in chosen if group != settings]
        way = _tried(config, _joined(fewer), devices, peak)
        if way is not None and way.peak_bytes <= room_bytes:
            best, chosen = way, fewer
    return best


def _joined(groups: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(setting for group in groups for setting in group)


def _name(setting: str) -> str:
    return setting.partition("=")[0]


def gentlest_first(config: TrainConfig) -> Iterator[tuple[str, ...]]:
    """Settings that may need less memory than the present ones."""
    speed, parallel, optim = config.speed, config.parallel, config.optim
    yield from _differing(
        {"speed.loss_chunk=2048": speed.loss_chunk is None, "speed.compile=auto": speed.compile is False}
    )
    for recompute in ("full,-attention,-projections,-mlp", "full,-attention", "full"):
        if speed.recompute not in ("full", recompute):
            yield (f"speed.recompute={recompute}",)
    is_on_device = speed.offload == "none" and not config.run.device.startswith("cpu")
    yield from _differing({"speed.offload=inputs": is_on_device, "parallel.reshard=true": not parallel.reshard})
    for state in ("bfloat16", "8bit"):
        if optim.state not in ("8bit", state):
            yield (f"optim.state={state}",)
    if config.run.dtype in ("auto", "float32", "bfloat16-autocast") and not config.run.device.startswith("cpu"):
        yield ("run.dtype=bfloat16-params",)
    if not parallel.offload:
        yield ("parallel.offload=true",)
    yield from _of_adapters(config)
    # shorter packs: first as many more of them, whose gradients are added up, then fewer tokens a step
    tokens, packs = config.data.tokens_per_pack, config.optim.accumulation
    halvings = range(1, 1 + max(0, (tokens // _FEWEST_TOKENS).bit_length() - 1))
    yield from ((f"{_PACK}={tokens >> times}", f"{_PACKS}={packs << times}") for times in halvings)
    yield from ((f"{_PACK}={tokens >> times}",) for times in halvings)


def _differing(settings: Mapping[str, bool]) -> Iterator[tuple[str, ...]]:
    return ((setting,) for setting, differs in settings.items() if differs)


def _of_adapters(config: TrainConfig) -> Iterator[tuple[str, ...]]:
    """Adapters, where all weights learn, and beside adapters a base in 4 bits."""
    adapters = () if config.model.lora is not None else (f"model.lora.rank={LORA_RANK}",)
    if adapters:
        yield adapters
    if config.model.base != "nf4":
        yield (*adapters, _IN_4_BITS)


def _tried(config: TrainConfig, settings: tuple[str, ...], devices: int, peak: Peak) -> Way | None:
    """Memory plan with some settings on top of a configuration; None if they cannot take effect."""
    try:
        changed = changed_config(config, {}, settings)
        return Way(settings, devices, peak(changed, devices))
    except (ConfigError, UsageError):
        return None
