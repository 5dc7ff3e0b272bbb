"""The part of `headway plan` that compares offers: which devices, how many of them, what they cost."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.output import print_result
from headway.errors import UsageError
from headway.log.working import working
from headway.report import (
    Column,
    format_bytes,
    format_count,
    format_duration,
    format_share,
    render_lines,
    render_pairs,
    render_table,
)

if TYPE_CHECKING:
    from headway.cli.plan_data import RunRequest
    from headway.config import TrainConfig
    from headway.count import CostModel
    from headway.devices import Device
    from headway.predict.offers import Offer, OfferResult, OfferSearch, PricedRun
    from headway.predict.speeds import Speeds


def chosen_offers(
    price_list: Path | None, device: "Device | None", price: float | None, others: Mapping[str, Any]
) -> "tuple[Offer, ...]":
    """The offers to compare: the entries of a price list, or the one device that has a price.

    Args:
        price_list: its file.
        device: the only one to look at.
        price: of a device-hour, where there is no list.
        others: options that cannot take effect beside, by name.

    Raises:
        UsageError: two prices or none, or an option that cannot take effect.
    """
    from headway.predict.offers import Offer, of_device, read_offers

    for key, value in others.items():
        if value:
            name, text = f"--{key}".replace("_", "-"), value[0] if isinstance(value, list) else value
            raise UsageError(
                f"{name} {text} cannot take effect beside --price-list or --within, because these plan many devices "
                "from the table alone. Leave it out."
            )
    if price_list is not None and price is not None:
        raise UsageError(
            f"--price {price:g} and --price-list {price_list} both set the price of devices. Give one of them."
        )
    if price_list is not None:
        offers = read_offers(price_list)
        return offers if device is None else of_device(offers, device)
    if device is None or price is None:
        raise UsageError("--within needs prices: give --price-list FILE, or --device and --price.")
    return (Offer(device, price),)


def print_offers(
    request: "RunRequest",
    offers: "Sequence[Offer]",
    speeds_of: "Callable[[TrainConfig, CostModel, Device, int], Speeds]",
    within_days: float | None,
    devices: int | None,
    *,
    as_json: bool,
) -> None:
    """Plan each offer and print them, the cheapest first, then why others are not among them.

    Args:
        request: the run.
        offers: devices and prices.
        speeds_of: gives the rates of a device, or of so many of them.
        within_days: time that the run may take [days]; None for any.
        devices: number of devices; None for any.
        as_json: one JSON object instead of tables.

    Raises:
        PlanError: no device is in time.
    """
    from headway.predict.offers import MOST_DEVICES, OfferSearch

    search = OfferSearch(
        request.config,
        request.predictor,
        request.pattern or request.own,
        lambda packs: request.length.total(packs, request.rows) or 0.0,
        lambda kind: speeds_of(request.config, request.cost_model, kind, devices or MOST_DEVICES),
        None if within_days is None else 86400 * within_days,
        devices,
        request.length.passes,
    )
    with working(f"planning {len(offers)} offers"):
        results = search.run(offers)
    runs = sorted((run for result in results for run in result.runs), key=lambda run: run.cost)
    print_result(lambda: _record(search, results, runs), lambda: _table(search, results, runs), as_json=as_json)


def _record(search: "OfferSearch", results: "Sequence[OfferResult]", runs: "Sequence[PricedRun]") -> dict[str, Any]:
    return {
        "model": search.predictor.cost_model.name,
        "within_s": search.within_s,
        "lengths": runs[0].size.work.lengths,
        "runs": [run.to_dict() for run in runs],
        "others": [
            {
                "device": result.offer.device.title,
                "offer": result.offer.name or None,
                "why": result.why,
                "fastest": result.fastest and result.fastest.to_dict(),
            }
            for result in results
            if not result.runs
        ],
    }


def _table(search: "OfferSearch", results: "Sequence[OfferResult]", runs: "Sequence[PricedRun]") -> str:
    """The runs as a table, the cheapest first; then a line for each offer that has none."""
    pairs = [
        ("model", search.predictor.cost_model.name),
        ("train on", f"{format_count(round(runs[0].totals.tokens))} tokens"),
        ("within", "any time" if search.within_s is None else format_duration(search.within_s)),
        ("packs", f"{format_count(search.config.data.tokens_per_pack)} tokens"),
        ("lengths", runs[0].size.work.lengths.partition(":")[0]),
    ]
    columns = [Column("cost"), Column("devices", "left"), *map(Column, ("time", "at worst", "MFU", "memory"))]
    columns += [Column("tokens a step"), Column("settings that make it fit", "left")]
    rows = [
        [
            f"{run.cost:,.4g}",
            f"{run.size.devices:,} x {run.offer.title}",
            format_duration(run.totals.seconds.expected),
            format_duration(run.totals.seconds.worst),
            format_share(run.size.step.mfu.expected),
            format_bytes(run.size.memory.peak),
            format_count(round(run.size.step.tokens)),
            " ".join(run.settings) or "-",
        ]
        for run in runs
    ]
    parts = [render_pairs(pairs), render_table(columns, rows)]
    for heading, is_late in (("Not in time", True), ("Cannot be planned, or does not fit", False)):
        missing = [result for result in results if not result.runs and (result.fastest is not None) == is_late]
        if missing:
            parts.append(f"{heading}\n{render_lines([f'{result.offer.title}: {result.why}.' for result in missing])}")
    parts.append(
        render_lines(
            [
                "Cost and time are expected values. --json has the best and the worst case too. A step's tokens grow "
                "with the devices, so check the learning rate and the batch size.",
                "Each offer shows the smallest number of devices (1, 2, 4, ...) that is in time, and the next larger "
                "number. Failures, evaluations, checkpoints and loading data take extra time.",
            ]
        )
    )
    return "\n\n".join(parts)
