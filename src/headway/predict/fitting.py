"""Settings, or a number of devices, with which a run fits a device's memory, the least harmful first.

First what changes no result and costs time, then fewer bits for what the optimizer keeps and for the weights, then
smaller packs and more devices. Where none is enough by itself, they are put together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.config import TrainConfig, changed_config
from headway.devices import Device
from headway.errors import ConfigError, UsageError

USABLE = 0.9
"""Share of a device's memory that a plan may fill; the rest is for memory that the plan does not count."""
LORA_RANK = 16
"""Rank of the adapters that are proposed: PEFT's tutorials and LLaMA-Factory's examples use 8 to 64."""
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
        price: of the settings, in words.
    """

    settings: tuple[str, ...]
    devices: int
    peak_bytes: int
    price: str = "more devices"

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
    for rung in _ladder(config):
        way = _tried(config, [rung], devices, peak)
        if way is not None and way.peak_bytes <= min(room_bytes, _WORTH * now):
            is_repeated = any(rung.name == _name(other.settings[0]) for other in enough)
            enough += [] if is_repeated else [way]
    together = () if enough else (_together(config, devices, room_bytes, peak),)
    if together and together[0].peak_bytes <= room_bytes:
        enough += together
    for doubled in range(1, _MOST_DOUBLED + 1):
        way = _tried(config, [], devices << doubled, peak)
        if way is not None and way.peak_bytes <= room_bytes:
            enough.append(way)
            break
    return tuple(enough) or together


def _together(config: TrainConfig, devices: int, room_bytes: int, peak: Peak) -> Way:
    """Add settings until the run fits, then drop the settings that turn out not to be needed."""
    chosen: list[_Rung] = []
    best = Way((), devices, peak(config, devices))
    for rung in _ladder(config):
        if best.peak_bytes <= room_bytes:
            break
        others = [*(other for other in chosen if other.name != rung.name), rung]
        way = _tried(config, others, devices, peak)
        if way is not None and way.peak_bytes < _WORTH * best.peak_bytes:
            best, chosen = way, others
    for rung in [*chosen]:
        fewer = [other for other in chosen if other != rung]
        way = _tried(config, fewer, devices, peak)
        if way is not None and way.peak_bytes <= room_bytes:
            best, chosen = way, fewer
    return best


class _Rung(NamedTuple):
    """Settings that go together, and their price in words."""

    settings: tuple[str, ...]
    price: str

    @property
    def name(self) -> str:
        """Name of the first setting; settings of one name exclude each other."""
        return _name(self.settings[0])


def _name(setting: str) -> str:
    return setting.partition("=")[0]


def gentlest_first(config: TrainConfig) -> Iterator[tuple[str, ...]]:
    """Settings that may need less memory than the present ones."""
    return (rung.settings for rung in _ladder(config))


def _ladder(config: TrainConfig) -> list[_Rung]:
    """Settings that may need less memory than the present ones, the least harmful first."""
    speed, parallel, state, dtype = config.speed, config.parallel, config.optim.state, config.run.dtype
    on_cpu = config.run.device.startswith("cpu")
    lora = () if config.model.lora is not None else (f"model.lora.rank={LORA_RANK}",)
    learn = "adapters learn, and the model's own weights stay as they are"
    frozen = "; ".join([learn] * bool(lora) + ["the frozen weights are rounded to 4 bits"])
    prices = {
        "full,-attention,-projections,-mlp": "backward recomputes the elementwise operations of each block",
        "full,-attention": "backward recomputes each block except its attention",
        "full": "backward recomputes each block",
    }
    rounded = "moments are rounded, stochastically"
    rows: list[tuple[bool, tuple[str, ...], str]] = [
        (speed.loss_chunk is None, ("speed.loss_chunk=2048",), "none"),
        (speed.compile is False, ("speed.compile=auto",), "a minute of compilation"),
        *((speed.recompute not in ("full", r), (f"speed.recompute={r}",), price) for r, price in prices.items()),
        (
            speed.offload == "none" and not on_cpu,
            ("speed.offload=inputs",),
            "blocks' inputs go to the host's memory and back",
        ),
        (not parallel.reshard, ("parallel.reshard=true",), "blocks are gathered again in backward"),
        (state not in ("8bit", "bfloat16"), ("optim.state=bfloat16",), rounded),
        (state != "8bit", ("optim.state=8bit",), rounded),
        (
            dtype in ("auto", "float32", "bfloat16-autocast") and not on_cpu,
            ("run.dtype=bfloat16-params",),
            "weights and gradients are rounded to bfloat16",
        ),
        (not parallel.offload, ("parallel.offload=true",), "a step waits for the host's memory"),
        (bool(lora), lora, learn),
        (config.model.base != "nf4", (*lora, "model.base=nf4"), frozen),
    ]
    # shorter packs: first as many more of them, whose gradients are added up, then fewer tokens a step
    tokens, packs, cut = config.data.tokens_per_pack, config.optim.accumulation, "longer samples are cut or dropped"
    halved = range(1, 1 + max(0, (tokens // _FEWEST_TOKENS).bit_length() - 1))
    shorter = [f"data.tokens_per_pack={tokens >> times}" for times in halved]
    more = [f"optim.accumulation={packs << times}" for times in halved]
    rows += [(True, pair, cut) for pair in zip(shorter, more, strict=True)]
    rows += [(True, (pack,), f"{cut}, and a step has fewer tokens") for pack in shorter]
    return [_Rung(settings, price) for is_change, settings, price in rows if is_change]


def _tried(config: TrainConfig, rungs: Sequence[_Rung], devices: int, peak: Peak) -> Way | None:
    """Memory plan with some settings on top of a configuration; None if they cannot take effect."""
    settings = tuple(setting for rung in rungs for setting in rung.settings)
    price = "; ".join(rung.price for rung in rungs) or "more devices"
    try:
        return Way(settings, devices, peak(changed_config(config, {}, settings), devices), price)
    except (ConfigError, UsageError):
        return None
