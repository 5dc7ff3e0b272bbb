"""Devices with their prices: which devices, and how many, train a run within a time, and at what cost.

Each offer is planned on 1, 2, 4, ... devices, as `headway plan --scale` plans each size: with its real packs, memory,
exchanges and time. Where a size does not fit, the settings that `ways_to_fit` finds are tried, but for those that
change what is trained: adapters, and packs that samples exceed.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from headway.config import TrainConfig, changed_config
from headway.config.read import load_yaml
from headway.devices import Device, named_device
from headway.errors import HeadwayError, PlanError, UnknownDeviceError, first_line
from headway.files import SETTINGS_BYTES, read_text
from headway.packing.lengths import LengthTable
from headway.predict.communication import Links
from headway.predict.fitting import room_of
from headway.predict.packs import Packs
from headway.predict.prediction import Prediction, RunTotals
from headway.predict.predictor import Predictor
from headway.predict.scale import at_size
from headway.predict.speeds import Speeds
from headway.report import format_bytes, format_duration
from headway.report.quantity import MONEY, examples, parse_number

MOST_DEVICES = 1024
"""Most devices of one offer, if its list says no other number."""
_FORMS = "a mapping as `H100: 2.5`, a list with device and price in each entry, or CSV with these two columns"
_KEYS = ("device", "price", "most", "offer")
_SHOWN = 2  # sizes of an offer: the smallest that is in time, and the next one, which is faster


@dataclass(frozen=True)
class Offer:
    """Devices of a kind at a price."""

    device: Device  # device of the table
    price: float  # price of a device-hour, in any currency
    most: int = MOST_DEVICES  # devices that can be had
    name: str = ""  # name of the seller; "" for nobody

    @property
    def title(self) -> str:
        """Name for people."""
        return f"{self.device.title} ({self.name})" if self.name else self.device.title


@dataclass(frozen=True)
class PricedRun:
    """A run on so many devices of an offer."""

    offer: Offer  # offer of the devices
    size: Prediction  # memory and time of a step
    settings: tuple[str, ...]  # assignments that make it fit; none if it fits without
    totals: RunTotals  # time and cost of the whole run

    @property
    def cost(self) -> float:
        """Expected cost of the whole run, in the currency of the price."""
        assert self.totals.cost is not None
        return self.totals.cost.expected

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; of each time and cost the best, the expected and the worst case."""
        totals = self.totals.to_dict()
        return {
            "device": self.offer.device.title,
            "offer": self.offer.name or None,
            "price": self.offer.price,
            "devices": self.size.devices,
            "settings": [*self.settings],
            **{name: totals[name] for name in ("tokens", "seconds", "cost")},
            "memory_bytes": self.size.memory.peak,
            "step": self.size.step.to_dict(),
        }


@dataclass(frozen=True)
class OfferResult:
    """Sizes of an offer that are in time, or why none is."""

    offer: Offer  # offer that was planned
    runs: tuple[PricedRun, ...]  # sizes in time, the fewest devices first
    why: str = ""  # reason why there is no size in time
    fastest: PricedRun | None = None  # fastest size, if none is in time; None if none could be planned


def read_offers(path: Path) -> tuple[Offer, ...]:
    """Read a price list: JSON, YAML or CSV.

    Args:
        path: of the file; `.csv` is CSV, and all else YAML, of which JSON is a part.

    Raises:
        PlanError: it cannot be read, names a device that is unknown, or has no price for one.
    """
    try:
        text = read_text(path, most=SETTINGS_BYTES)
        rows = list(csv.DictReader(io.StringIO(text))) if path.suffix.lower() == ".csv" else _entries(load_yaml(text))
    except OSError as error:
        raise PlanError(f"the price list {path} cannot be read: {error.strerror or error}. Give {_FORMS}.") from error
    except (yaml.YAMLError, csv.Error, ValueError, RecursionError) as error:
        raise PlanError(f"the price list {path} cannot be read: {first_line(error)}. Give {_FORMS}.") from error
    if not isinstance(rows, list) or not rows:
        raise PlanError(f"the price list {path} holds no price. Give {_FORMS}.")
    return tuple(_offer(row, f"{path}, entry {number}") for number, row in enumerate(rows, start=1))


def _entries(content: Any) -> Any:
    """The entries of a list, or of a mapping by device; None of anything else."""
    if isinstance(content, Mapping):
        return [
            {"device": name, **(price if isinstance(price, Mapping) else {"price": price})}
            for name, price in content.items()
        ]
    return content


def _offer(row: Any, where: str) -> Offer:
    if not isinstance(row, Mapping) or row.get("device") in (None, ""):
        raise PlanError(f"{where} names no device: {_json(row)}. Give {_FORMS}.")
    name = str(row["device"]).strip()
    if strange := [str(key) for key in row if key not in _KEYS]:
        raise PlanError(
            f"{where} ({name}) has {strange[0]!r}, which means nothing there. Known are {', '.join(_KEYS)}."
        )
    try:
        device = named_device(name)
    except UnknownDeviceError as error:
        raise PlanError(f"{where}: ", *error.pieces) from error
    price = _number(row.get("price"), MONEY)
    if price is None or not 0 < price < float("inf"):
        value = row.get("price")
        what = "no price" if value in (None, "") else f"{_json(value)} as its price"
        raise PlanError(f"{where}: {name} has {what}. Write the price of one device for an hour, {examples(MONEY)}.")
    most = row.get("most")
    count = MOST_DEVICES if most in (None, "") else _number(most, "devices")
    if not isinstance(count, int) or count < 1:
        raise PlanError(f"{where}: {name} has {_json(most)} as the most devices. Write a whole number, such as 64.")
    return Offer(device, float(price), count, str(row.get("offer") or ""))


def _number(value: Any, unit: str) -> int | float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return parse_number(value, unit) if isinstance(value, str) else None


def _json(value: Any) -> str:
    return json.dumps(value, default=str)[:80]


@dataclass
class OfferSearch:
    """Looks for the sizes of offers that train a run in time.

    Sizes are planned one after the other, the smallest first, but for those that no device could be in time on: the
    run's FLOPs at their peak take longer.
    """

    config: TrainConfig  # recipe
    predictor: Predictor  # predictor of its model, on no device yet
    pattern: tuple[str, LengthTable] | None  # name and table of the samples; None for the recipe's plan section
    total: Callable[[Packs], float]  # tokens to train on, of packs that are planned
    speeds: Callable[[Device], Speeds]  # rates of a device
    within_s: float | None = None  # time that the run may take [s]; None for any
    devices: int | None = None  # number of devices; None to look for it
    passes: float = 1.0  # passes over the data, at least 1
    _flops: float = field(default=0.0, init=False)  # useful ones of the whole run, once a size of any offer is planned

    def run(self, offers: Sequence[Offer]) -> list[OfferResult]:
        """Plan each offer.

        Raises:
            PlanError: no device is in time, or none can be planned; the fastest is named.
        """
        results = [self._price(offer) for offer in offers]
        if any(result.runs for result in results):
            return results
        planned = [result.fastest for result in results if result.fastest is not None]
        if not planned or self.within_s is None:
            raise PlanError(
                "no offer can train it: " + "; ".join(f"{result.offer.title}: {result.why}" for result in results) + "."
            )
        fastest = min(planned, key=lambda run: run.totals.seconds.expected)
        took = format_duration(fastest.totals.seconds.expected)
        raise PlanError(
            f"no offer trains {fastest.totals.tokens:,.0f} tokens within {format_duration(self.within_s)}. The fastest "
            f"is {fastest.size.devices:,} x {fastest.offer.title}: {took}, cost {fastest.cost:,.4g}. Allow as much "
            "time, train on less, or offer more devices."
        )

    def _price(self, offer: Offer) -> OfferResult:
        try:
            predictor = self._predictor(offer.device)
        except HeadwayError as error:
            return OfferResult(offer, (), str(error).rstrip("."))
        assert predictor.speeds is not None
        peak, counts = predictor.speeds.peak_flops_per_s, self._counts(offer)
        if not counts:
            return OfferResult(offer, (), f"{self.devices:,} are more than are offered")
        runs: list[PricedRun] = []
        slower: list[PricedRun] = []
        why = ""
        for count in counts:
            # Other settings, or another mesh, may fit at the next size: only the peak rules a size out beforehand.
            if count < counts[-1] and self._flops > count * peak * (self.within_s or math.inf):
                continue
            try:
                fitting = self._at(offer, predictor, count)
            except HeadwayError as error:
                fitting = str(error).rstrip(".")
            if isinstance(fitting, str):
                why = fitting if count == 1 else f"{count:,} of them: {fitting}"
                continue
            in_time = [run for run in fitting if run.totals.seconds.expected <= (self.within_s or math.inf)]
            runs += in_time[:1]
            slower += [] if in_time else fitting
            if len(runs) == _SHOWN:
                break
        fastest = min(slower, key=lambda run: run.totals.seconds.expected, default=None)
        if runs or fastest is None:
            return OfferResult(offer, tuple(runs), why + self._limit(counts[-1]))
        took, cost = format_duration(fastest.totals.seconds.expected), f"{fastest.cost:,.4g}"
        why = f"{fastest.size.devices:,} of them take {took}, cost {cost}"
        return OfferResult(offer, (), why + self._limit(fastest.size.devices), fastest)

    def _limit(self, most: int) -> str:
        """Reason why there are no more than so many devices."""
        return "" if self.devices is not None or most >= MOST_DEVICES else "; more are not offered"

    def _counts(self, offer: Offer) -> list[int]:
        """Numbers of devices to plan, ascending."""
        if self.devices is not None:
            counts = [self.devices]
        else:
            counts = [2**power for power in range(offer.most.bit_length())]
            counts += [offer.most] if offer.most not in counts else []
        return [count for count in counts if count <= offer.most]

    def _predictor(self, device: Device) -> Predictor:
        if device.total_memory_bytes is None:
            raise PlanError("its memory is not known")
        return replace(self.predictor, device=device, speeds=self.speeds(device), links=Links.of_device(device))

    def _at(self, offer: Offer, predictor: Predictor, count: int) -> list[PricedRun] | str:
        """The run on so many devices, or the reason why it does not fit.

        With the least harmful settings that make it fit, and without, where it is tight.
        """
        size = at_size(predictor, self.config, count, self.pattern)
        self._flops = size.work.flops.total * self.total(size.work) / size.step.tokens
        if size.fit in ("fits", None):
            return [self._priced(offer, size, ())]
        room = room_of(offer.device) or 0
        tight = [self._priced(offer, size, ())] if size.fit == "tight" else []
        for settings in self._harmless(size, room):  # the gentlest first
            fitting = at_size(predictor, changed_config(self.config, {}, settings), count, self.pattern)
            if fitting.fit == "fits":
                return [self._priced(offer, fitting, settings), *tight]
        if tight:
            return tight
        need = f"{format_bytes(size.memory.peak)} do not fit {format_bytes(room)}"
        adapters = [way for way in size.ways if any("lora" in setting for setting in way.settings)]
        return f"{need}{', but adapters would: model.lora' if adapters and adapters[0].peak_bytes <= room else ''}"

    def _harmless(self, size: Prediction, room: int) -> Iterator[tuple[str, ...]]:
        """Settings that make a size fit and leave the training as it is."""
        longest = 1 if self.pattern is None else int(self.pattern[1].tokens.max())
        for way in size.ways:
            names = dict(setting.partition("=")[::2] for setting in way.settings)
            cuts = self.pattern is None or int(names.get("data.tokens_per_pack", longest)) < longest
            is_other = "model.lora.rank" in names or ("data.tokens_per_pack" in names and cuts)
            if way.devices == size.devices and way.settings and way.peak_bytes <= room and not is_other:
                yield way.settings

    def _priced(self, offer: Offer, size: Prediction, settings: tuple[str, ...]) -> PricedRun:
        totals = size.totals(self.total(size.work), passes=self.passes, price=offer.price)
        return PricedRun(offer, size, settings, totals)


def of_device(offers: Sequence[Offer], device: Device) -> tuple[Offer, ...]:
    """The offers of one device.

    Raises:
        PlanError: there are none.
    """
    chosen = tuple(offer for offer in offers if offer.device.key == device.key)
    if not chosen:
        names = ", ".join(dict.fromkeys(offer.device.title for offer in offers))
        raise PlanError(f"the price list has no price for {device.title}; it has {names}.")
    return chosen
