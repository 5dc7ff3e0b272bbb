"""Text and record of `headway plan --scale`: a prediction for each number of devices, and what they assume."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headway.cli.plan_text import ways_text
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
    from collections.abc import Sequence

    from headway.predict.failures import Reliability
    from headway.predict.prediction import Prediction, RunTotals

    Sizes = Sequence[tuple[Prediction, RunTotals | None]]

SCHEMA_VERSION = 1
_MUCH_PADDING = 1.1  # numbers gathered over weights, from which on it is told
_FITS = {"fits": "yes", "tight": "tight", "does not fit": "NO", None: "not known"}
_EXPOSED, _WAITING = "communication.transfer", "communication.waiting"


def scale_record(sizes: "Sizes", reliability: "Reliability | None") -> dict[str, Any]:
    """The prediction for each number of devices, and the assumptions behind it, as plain JSON types.

    Args:
        sizes: the recipe at each number of devices, and what a whole run takes; None where its length is not known.
        reliability: of a device; None where nothing is said of failures.
    """
    first = sizes[0][0]
    speeds, links = first.speeds, first.links
    assert speeds is not None
    assert links is not None
    return {
        "schema_version": SCHEMA_VERSION,
        "model": first.model,
        "speeds": {"device": speeds.name, "source": speeds.source},
        "links": {
            "link_bytes_per_s": links.inside.bytes_per_s,
            "network_bytes_per_s": links.between.bytes_per_s,
            "devices_per_node": links.per_node,
            "source": links.source,
        },
        "lengths": first.work.lengths,
        "sizes": [size_record(size, totals) for size, totals in sizes],
        "assumptions": _assumptions([size for size, _ in sizes], reliability),
    }


def scale_text(sizes: "Sizes", reliability: "Reliability | None") -> str:
    """Format the prediction for each number of devices as tables, followed by the assumptions behind it.

    Args:
        sizes: as for `scale_record`.
        reliability: likewise.
    """
    first = sizes[0][0]
    speeds, links = first.speeds, first.links
    assert speeds is not None
    assert links is not None
    network = f"network {_gb(links.between.bytes_per_s)} each"
    pairs = [
        ("model", first.model),
        ("device", speeds.name),
        ("nodes", f"{links.per_node:,} devices, links {_gb(links.inside.bytes_per_s)} each, {network}"),
        ("packs", f"{first.config.data.tokens_per_pack:,} tokens, {first.config.optim.accumulation:,} a step and rank"),
        ("lengths", first.work.lengths.partition(":")[0]),
    ]
    predictions = [size for size, _ in sizes]
    parts = [render_pairs(pairs), _runs(sizes)]
    # Settings with which the first size that does not fit would.
    if size := next((size for size in predictions if size.ways), None):
        parts.append(f"{size.devices:,} devices do not fit as they are.\n{ways_text(size)}")
    parts.append(_steps(predictions))
    if reliability is not None:
        parts.append(_failures(predictions))
    parts.append(render_lines(_assumptions(predictions, reliability)))
    return "\n\n".join(parts)


def size_record(size: "Prediction", totals: "RunTotals | None") -> dict[str, Any]:
    """A size of a run as plain JSON types, and what a whole run takes on it."""
    exposed, waiting = (size.step.line(key) for key in (_EXPOSED, _WAITING))
    record = size.to_dict()
    return {
        **{name: record[name] for name in ("devices", "mesh", "fits", "fit", "ways", "time")},
        "planned_steps": size.planned_steps,
        "fill": size.work.report.fill,
        "balance": size.work.report.balance,
        "memory_bytes": size.memory.peak,
        "padding": size.padding,
        "exposed_s": [*exposed],
        "waiting_s": [*waiting],
        "interruptions": None if size.interruptions is None else asdict(size.interruptions),
        "lasting_tokens_per_s": size.lasting_tokens_per_s,
        "run": totals and totals.to_dict(),
    }


def _runs(sizes: "Sizes") -> str:
    """Table of the sizes: memory that fits or not, speed, and time and cost of the whole run."""
    first = sizes[0][1]
    headings = ["fits", "memory", "step", "MFU", "tokens/s"]
    if first is not None:
        headings += [f"{format_count(round(first.tokens))} tokens", "device-hours"]
        headings += ["cost"] if first.cost is not None else []
    rows = []
    for size, totals in sizes:
        time = size.step
        cells = [f"{size.devices:,}", _FITS[size.fit], format_bytes(size.memory.peak), format_duration(time.step_s)]
        cells += [format_share(time.mfu.expected), format_count(round(time.tokens_per_s.expected))]
        if totals is not None:
            cells += [format_duration(totals.seconds.expected), f"{totals.device_hours.expected:,.4g}"]
            cells += [f"{totals.cost.expected:,.4g}"] if totals.cost is not None else []
        rows.append(cells)
    return render_table([Column("devices"), *map(Column, headings)], rows)


def _steps(sizes: "Sequence[Prediction]") -> str:
    headings = ("mesh", "tokens", "exposed", "waiting", "fill", "balance")
    rows = []
    for size in sizes:
        time, shape, report = size.step, size.shape, size.work.report
        others = [(shape.sequence, "sp"), (shape.expert, "ep")]
        mesh = f"{shape.replicate}x{shape.shard}" + "".join(f" {name}{ranks}" for ranks, name in others if ranks > 1)
        shares = [format_share(time.line(key).expected / time.step_s) for key in (_EXPOSED, _WAITING)]
        tokens = format_count(round(time.tokens))
        rows.append([f"{size.devices:,}", mesh, tokens, *shares, f"{report.fill:.4f}", f"{report.balance:.4f}"])
    return render_table([Column("devices"), *map(Column, headings)], rows)


def _failures(sizes: "Sequence[Prediction]") -> str:
    headings = ("fails every", "failures/day", "save every", "steps", "goodput", "tokens/s that last")
    rows = []
    for size in sizes:
        lost = size.interruptions
        assert lost is not None
        rows.append(
            [
                f"{size.devices:,}",
                format_duration(lost.mtbf_s),
                f"{lost.per_day:,.3g}",
                format_duration(lost.interval_s),
                f"{max(1, round(lost.interval_s / size.step.step_s)):,}",
                format_share(lost.goodput),
                format_count(round(size.lasting_tokens_per_s)),
            ]
        )
    return render_table([Column("devices"), *map(Column, headings)], rows)


def _assumptions(sizes: "Sequence[Prediction]", reliability: "Reliability | None") -> list[str]:
    """Assumptions behind the numbers, a sentence each."""
    first = sizes[0]
    speeds, links = first.speeds, first.links
    assert speeds is not None
    assert links is not None
    steps = min(size.planned_steps for size in sizes)
    shards = "over all devices" if first.config.parallel.shard == "auto" else "as set, and copies of them take the rest"
    # Assumptions of every size.
    sentences = [
        "These are expected values. --json has the best and the worst case too.",
        "mesh: copies x shards. tokens: of a step of all devices. exposed, waiting: shares of the step that exchanges "
        "take and computing does not hide, and that a mean rank waits for the heaviest.",
        "Each rank keeps its packs, so a step's tokens grow with the devices. Check the learning rate and the batch "
        "size.",
        f"Packs: the planner of training, over {steps:,} steps of all ranks at each size.",
        f"Shards: {shards}.",
        f"Rates: {speeds.source}.",
        f"Links: {links.source}, of which collectives reach 80 %; rings as in NCCL, trees for all-reduce where "
        "they take less; nobody else on the network.",
        "Gathers and sums hide behind the computing of the block beside them, and slow it down by nothing.",
        "A step does not contain loading data, stragglers among equal devices, messages between hosts, or evaluations.",
    ]
    # Sentences on slices that are filled up and on failures, which only some inputs bring.
    uneven = [size for size in sizes if size.padding > _MUCH_PADDING]
    if uneven:
        worst = max(uneven, key=lambda size: size.padding)
        sentences.append(
            f"Slices: tensors are cut by rows, and those with fewer rows than shards are filled up. {worst.devices:,} "
            f"devices hold and gather {worst.padding:,.3g} times the weights; fewer shards and copies of them (--set "
            "parallel.shard=32) do not."
        )
    if reliability is not None:
        sentences.append(
            f"Failures: at random, one in {reliability.mtbf_s / 3600:,.0f} h of each device, each stops the job; it "
            f"stands still {format_duration(reliability.save_s)} for a checkpoint and takes "
            f"{format_duration(reliability.restart_s)} to start again. The interval is Daly's."
        )
    return sentences


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.4g} GB/s"
