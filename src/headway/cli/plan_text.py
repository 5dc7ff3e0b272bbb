"""Text of predictions, for every command that prints one: memory by part, ways to fit, FLOPs, packs, time by line."""

import math
import sys
from collections.abc import Callable
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from headway.cli.links import note_on_links
from headway.cli.output import needs_extra
from headway.report import (
    Column,
    format_bytes,
    format_count,
    format_duration,
    format_flops,
    format_share,
    render_lines,
    render_pairs,
    render_table,
)
from headway.report.table import coloured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.predict.packs import Packs
    from headway.predict.prediction import OtherPacks, Prediction, RunTotals
    from headway.predict.speeds import Cases
    from headway.predict.step_time import StepForecast

_LEAST_GAIN = 0.001  # share of a step that is worth a package
_NO_ROOM = "DOES NOT FIT"
_MOST_OF_LOOPS = 1.25  # times the planned memory, which an eager loop that was published held
LABELS = {"base": "weights, base", "casts": "weights, cast", "gathered": "weights, gathered",
    "reducing": "gradients, summing", "passing": "gradients, passing", "head": "logits and loss",
    "updating": "optimizer, working"}  # fmt: skip


def plan_record(planned: "Prediction", totals: "RunTotals | None") -> dict[str, Any]:
    """The prediction, where its rates are from, and the whole run, as plain JSON types."""
    speeds = planned.speeds
    assert speeds is not None
    source = {"device": speeds.name, "source": speeds.source, "measured": speeds.is_measured}
    others = [other.to_dict() for other in planned.others]
    return {**planned.to_dict(), "same_step": others, "speeds": source, "run": totals and totals.to_dict()}


def plan_text(planned: "Prediction", totals: "RunTotals | None") -> str:
    """Format a plan: totals, then ways to fit if the run does not fit, then the step's lines and their sources."""
    packs, time, speeds, shape, params = planned.work, planned.step, planned.speeds, planned.shape, planned.params
    assert speeds is not None
    copies = f", {shape.replicate:,} copies of {shape.fsdp:,} shards" if shape.replicate > 1 else ""
    data = planned.config.data
    pairs = [
        ("model", f"{planned.model}, {params.total:,} parameters, {params.trainable:,} of them trained"),
        ("devices", f"{planned.devices:,} x {speeds.name}{copies}"),
        ("packs", f"{data.tokens_per_pack:,} tokens, {format_share(packs.report.fill)} full"),
        ("lengths", packs.lengths.partition(":")[0]),
        ("memory", memory_text(planned)),
        ("step", cases_text(time.seconds, format_duration)),
        ("MFU", cases_text(time.mfu, format_share)),
        ("tokens/s", cases_text(time.tokens_per_s, lambda rate: format_count(round(rate)))),
        ("launches", _launches_text(time)),
    ]
    if packs.reference is not None:
        flops = format_flops(packs.reference.total)
        text = f"a forward of each step without adapters, {flops} of its {format_flops(time.flops)}"
        if planned.refers == "once":
            once = cases_text(time.reference, format_duration)
            text = f"stored: before the first step a forward of the data, for a step's packs {flops} in {once}"
        pairs.append(("reference", text))
    sections = [render_pairs(pairs + ([] if totals is None else _totals_pairs(totals)))]
    if planned.ways:
        sections.append(ways_text(planned))
    sections += [other_packs_text(other) for other in planned.others]
    on_links = note_on_links(planned.links, planned.devices)
    if planned.links is None and planned.devices > 1:  # every number above is a best case, which is said first
        sections.append(render_lines([on_links]))
        on_links = ""
    notes = [*planned.notes, note_on_loops(planned), f"Rates: {speeds.source}.", on_links]
    if planned.making_s is not None:
        notes.append(
            f"Data: a worker makes {format_count(round(1 / planned.making_s))} tokens/s on this machine. Workers of a "
            f"device: {format_count(max(1, data.workers))}."
        )
    return in_red("\n\n".join([*sections, _lines(time), render_lines([note for note in notes if note])]))


def other_packs_text(other: "OtherPacks") -> str:
    """Say what a step of as many tokens in other packs reaches, how many samples are longer, and the settings."""
    choice = other.choice
    packs, tokens = choice.config.optim.accumulation, format_count(choice.config.data.tokens_per_pack)
    where = f"{packs:,} packs" if packs > 1 else "1 pack"
    longer = "No sample is longer than a pack."
    if other.samples:
        share, of_tokens = f"{100 * other.samples:.2g} %", format_share(other.tokens)
        longer = f"{share} of the samples, with {of_tokens} of the tokens, are longer than a pack."
    if choice.config.plan.mix is not None:
        longer += f" Headway assumes the lengths of {choice.work.lengths.partition(':')[0]}, because yours are unknown."
    sizes = f"MFU {format_share(choice.step.mfu.expected)} in {format_bytes(choice.memory.peak)} of memory"
    settings = wrap(" ".join(f"--set\xa0{setting}" for setting in choice.settings), 76, break_long_words=False)
    pasted = " \\\n  ".join(settings).replace("\xa0", " ")
    return f"{render_lines([f'In {where} of {tokens} tokens, the same step reaches {sizes}. {longer}'])}\n  {pasted}"


def _launches_text(time: "StepForecast") -> str:
    """Number of operators that the host launches in a step, its time for them, and whether the device hides it."""
    shown = time.line("idle.launch").expected
    place = f"{format_duration(shown)} of it show" if shown else "hidden behind the device"
    return f"{format_count(time.launches)} a step, {format_duration(time.launching.expected)} of the host, {place}"


def plans_text(names: "Sequence[str]", plans: "Sequence[tuple[Prediction, RunTotals | None]]") -> str:
    """Format several plans side by side: a column of expected values for each."""
    rows = [_side_by_side(planned, totals) for planned, totals in plans]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[key, *(row.get(key, "-") for row in rows)] for key in keys]
    table = render_table([Column("", "left"), *map(Column, names)], cells)
    note = (
        "The table has expected values. `headway plan` of one model also prints the best and the worst case, the lines "
        "of the step, and ways to fit."
    )
    return in_red(f"{table}\n\n{render_lines([note])}")


def _side_by_side(planned: "Prediction", totals: "RunTotals | None") -> dict[str, str]:
    time, speeds, device = planned.step, planned.speeds, planned.device
    assert speeds is not None
    room = None if device is None else device.total_memory_bytes
    row = {
        "model": planned.model,
        "devices": f"{planned.devices:,} x {speeds.name}",
        "pack": f"{planned.config.data.tokens_per_pack:,} tokens",
        "memory": format_bytes(planned.memory.peak),
        "of the device": "-" if room is None else format_share(planned.memory.peak / room),
        "fits": {"does not fit": _NO_ROOM, None: "-"}.get(planned.fit, planned.fit or "-"),
        "step": format_duration(time.seconds.expected),
        "MFU": format_share(time.mfu.expected),
        "tokens/s": format_count(round(time.tokens_per_s.expected)),
    }
    if totals is not None:
        row |= {
            "tokens": format_count(round(totals.tokens)),
            "time": format_duration(totals.seconds.expected),
            "device-hours": f"{totals.device_hours.expected:,.4g}",
        }
        row |= {} if totals.cost is None else {"cost": f"{totals.cost.expected:,.4g}"}
        row |= {} if totals.energy_kwh is None else {"energy": f"{totals.energy_kwh.expected:,.4g} kWh"}
    return row


def dry_run_text(planned: "Prediction") -> str:
    """Format a dry run: parameters, memory by part and moment, ways to fit, FLOPs and packs."""
    shape, params, packs = planned.shape, planned.params, planned.packs
    experts = f"; experts over {shape.expert}" if shape.expert > 1 else ""
    pairs = [
        ("model", f"{planned.config.model.path}  (cost model of {planned.model})"),
        ("parameters", f"{params.total:,}, {params.trainable:,} of them trained; a token uses {params.active:,}"),
        (
            "devices",
            f"{shape.world_size:,} = {shape.replicate} replicas x {shape.shard} shards x {shape.sequence} that share "
            f"each pack{experts}",
        ),
    ]
    sections = [render_pairs(pairs), _memory_table(planned)]
    sections += [ways_text(planned)] if planned.ways else []
    sections += [] if packs is None else [_flops_table(planned, packs), _packs_pairs(planned, packs)]
    notes = [note for note in (*planned.notes, note_on_loops(planned), _left_out(planned)) if note]
    return in_red("\n\n".join([*sections, render_lines(notes)]))


def in_red(text: str) -> str:
    """Colour the text that memory does not suffice, if stdout is a terminal."""
    return text.replace(_NO_ROOM, coloured(_NO_ROOM, "red", sys.stdout))


def _totals_pairs(totals: "RunTotals") -> list[tuple[str, str]]:
    """Name and text of each quantity of a whole run."""
    a_step = format_count(round(totals.tokens / totals.steps))
    pairs = [
        ("steps", f"{format_count(max(1, round(totals.steps)))} of {a_step} tokens"),
        (f"{format_count(round(totals.tokens))} tokens", cases_text(totals.seconds, format_duration)),
        ("device-hours", cases_text(totals.device_hours, lambda hours: f"{hours:,.4g}")),
    ]
    if totals.cost is not None:
        pairs.append(("cost", cases_text(totals.cost, lambda cost: f"{cost:,.4g}")))
    if totals.energy_kwh is not None:
        pairs.append(("energy", cases_text(totals.energy_kwh, lambda kwh: f"{kwh:,.4g} kWh") + ", boards alone"))
    return pairs


def cases_text(cases: "Cases", write: Callable[[float], str]) -> str:
    """The expected case, with the best and the worst: "2.40 s (1.90 s at best, 3.80 s at worst)"."""
    return f"{write(cases.expected)} ({write(cases.best)} at best, {write(cases.worst)} at worst)"


def memory_text(planned: "Prediction") -> str:
    """The peak of memory and whether it fits; `headway train --dry-run` has the parts."""
    peak = format_bytes(planned.memory.peak)
    return f"{peak} of each device" if planned.fits is None else f"{peak}, {verdict(planned)}"


def verdict(planned: "Prediction") -> str:
    """Say whether a run fits its device, and by how much."""
    from headway.predict.fitting import USABLE

    device = planned.device
    if device is None or device.total_memory_bytes is None:
        return "name a device with --device to see whether it fits"
    peak, total = planned.memory.peak, device.total_memory_bytes
    printed = "" if device.driver_memory_bytes else " as printed"
    text = f"{format_share(peak / total)} of {device.title}'s {format_bytes(total)}{printed}"
    if planned.fit == "does not fit":
        return f"{text}: {_NO_ROOM}, {format_bytes(peak - total)} too much"
    left = f"{format_bytes(total - peak)} free"
    return (
        f"{text}: fits, {left}"
        if planned.fit == "fits"
        else f"{text}: tight, {left}, but {format_share(1 - USABLE)} should stay free"
    )


def note_on_loops(planned: "Prediction") -> str:
    """Say which kind of loop holds more than is planned, where that is more than the device has.

    Source: published peaks over planned ones: torchtitan with compiled blocks 0.96 and 1.01; eager transformers in
        ms-swift 1.08 to 1.25.
    """
    total = None if planned.device is None else planned.device.total_memory_bytes
    if not planned.fits or total is None or _MOST_OF_LOOPS * planned.memory.peak <= total:
        return ""
    return (
        "Memory: published runs with compiled blocks held 4 % less to 1 % more than planned. Eager loops of "
        f"transformers held 8 to 25 % more, so {format_bytes(total)} may be too little."
    )


def ways_text(planned: "Prediction") -> str:
    """Say which settings, or how many devices, make a run fit a device, as `--set` takes them."""
    from headway.predict.fitting import room_of

    ways, room = planned.ways, room_of(planned.device) or 0
    if ways[0].peak_bytes > room:
        adapters = "" if any("model.lora" in setting for setting in ways[0].settings) else "adapters (model.lora), "
        return render_lines(
            [
                f"No setting makes the run fit {format_bytes(room)}. The smallest one, {ways[0]}, takes "
                f"{format_bytes(ways[0].peak_bytes)}. Train {adapters}a smaller model, or on more devices."
            ]
        )
    columns = [Column("what fits, by the plan (--set)", "left"), Column("size"), Column("what it costs", "left")]
    return render_table(columns, [[str(way), format_bytes(way.peak_bytes), way.price] for way in ways])


def _residual(planned: "Prediction") -> dict[str, Any] | None:
    """Memory that the run of this recipe's folder held beyond its prediction, on this device and with this torch."""
    folder = planned.config.run.folder
    if planned.device is None or not (folder / "memory.json").is_file():  # torch is imported below
        return None
    with needs_extra("reading what a run held"):
        from headway.train.memory import last_residual

        return last_residual(folder, planned.device.names)


def _memory_table(planned: "Prediction") -> str:
    from headway.predict.memory import PARTS

    memory, residual = planned.memory, _residual(planned)
    fullest = memory.fullest
    rows = [[LABELS.get(part, part), format_bytes(size), PARTS[part]] for part, size in fullest.parts.items()]
    footer = [f"most, in {_in_words(fullest.name)}", format_bytes(memory.peak), verdict(planned)]
    columns = [Column("memory of each device", "left"), Column("size"), Column("what", "left")]
    moments = ", ".join(f"{moment.name} {format_bytes(moment.total)}" for moment in memory.moments)
    lines = [render_table(columns, rows, footer=footer), f"by moment: {moments}"]
    if residual is not None:
        sign = "+" if residual["more"] >= 0 else "-"
        lines.append(
            f"last measured {sign}{format_bytes(abs(residual['more']))} on this device, of "
            f"{format_bytes(residual['predicted'])} predicted then, with torch {residual['torch']}"
        )
    if memory.host:
        lines.append(f"in the host's memory: {format_bytes(memory.host)}")
    return "\n".join(lines)


def _in_words(moment: str) -> str:
    return "a model just built" if moment == "built" else f"the {moment}" if " " in moment else moment


def _left_out(planned: "Prediction") -> str:
    from headway.predict.memory import allowances

    shape = planned.shape
    groups = sum(size > 1 for size in (shape.fsdp, shape.replicate, shape.sequence, shape.expert))
    if planned.device is None and planned.config.run.device == "cpu":
        return "The plan is for this machine's processor. To plan for another device, add --device NAME."
    sizes = allowances(groups)
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    total = format_bytes(sum(sizes.values()))
    return f"A CUDA device also holds, beside the sizes above: {parts}. Together these are {total}."


def _flops_table(planned: "Prediction", packs: "Packs") -> str:
    by_name: dict[str, list[int]] = {}
    for row in packs.flops.rows:
        sums = by_name.setdefault(row.name, [0, 0])
        sums[0] += row.total
        sums[1] += row.recompute
    assert planned.flops is not None
    total = planned.flops.total
    if total > packs.flops.total:
        by_name["reference, forward without adapters"] = [total - packs.flops.total, 0]
    rows: list[list[Any]] = [
        [name, format_flops(useful), format_share(useful / total), format_flops(again) if again else "-"]
        for name, (useful, again) in sorted(by_name.items(), key=lambda item: -item[1][0])
    ]
    footer = ["step of all devices", format_flops(total), format_share(1.0)]
    footer.append(format_flops(packs.flops.recompute) if packs.flops.recompute else "-")
    columns = [Column("useful FLOPs", "left"), Column("of a step"), Column("share"), Column("recomputed")]
    return render_table(columns, rows, footer=footer)


def _packs_pairs(planned: "Prediction", packs: "Packs") -> str:
    report, config = packs.report, planned.config
    ranks = planned.shape.world_size // planned.shape.sequence
    step = ranks * config.optim.accumulation
    tokens = packs.step_tokens(config, planned.shape)
    pairs = [
        ("lengths", packs.lengths),
        ("pack", f"{config.data.tokens_per_pack:,} tokens, {packs.samples_per_pack:.1f} samples on average"),
        ("step", f"{step:,} packs, {format_count(math.floor(tokens))} tokens, {format_flops(report.step_flops)}"),
        ("fill", f"{report.fill:.4f} of the packs' tokens, by {report.strategy!r}"),
        (
            "balance",
            f"{report.balance:.4f}: mean over heaviest FLOPs of the {ranks:,} ranks that have packs of their own",
        ),
    ]
    if packs.reference is not None and planned.refers == "once":
        flops = format_flops(packs.reference.total)
        pairs.append(("reference", f"stored: a forward of the data before the first step, {flops} for a step's packs"))
    if packs.most_patches:
        pairs.append(("patches", f"at most {packs.most_patches:,} in a pack"))
    if overlong := overlong_text(packs):
        pairs.append(("over-long", f"{overlong} of {packs.counts.read:,} samples"))
    return render_pairs(pairs)


def overlong_text(packs: "Packs") -> str:
    """Say how many samples packs leave out, cut or split; "" for none."""
    numbers = ((getattr(packs.counts, what), what) for what in ("dropped", "truncated", "split"))
    return ", ".join(f"{number:,} {what}" for number, what in numbers if number)


def _lines(time: "StepForecast") -> str:
    step_s = time.step_s
    columns = [Column("where the time will go", "left"), Column("ms"), Column("share"), Column("best"), Column("worst")]
    rows = [
        [line.name, *_milliseconds(line.seconds, step_s)]
        for line in time.lines
        if abs(line.seconds.worst) >= 5e-4 * time.seconds.worst
    ]
    return render_table(columns, rows, footer=["the step", *_milliseconds(time.seconds, step_s)])


def _milliseconds(seconds: "Cases", step_s: float) -> list[str]:
    best, expected, worst = (f"{1e3 * value:,.2f}" for value in seconds)
    return [expected, format_share(seconds.expected / step_s), best, worst]


def note_on_auto(time: "StepForecast", faster: "StepForecast", more_bytes: int) -> str:
    """Say what `speed.attention=auto` is planned as, and what it takes where the package of another kernel is.

    Args:
        time: with PyTorch's FlashAttention-2.
        faster: with cuDNN's kernel where that suits a pack.
        more_bytes: that each device then holds beside.
    """
    note = "The plan takes FlashAttention-2 for speed.attention=auto, because every installation has it. "
    gain = 1 - faster.step_s / time.step_s
    if gain < _LEAST_GAIN:
        return f"{note}For these packs cuDNN's kernel would gain nothing."
    step, more = format_duration(faster.step_s), format_bytes(max(0, more_bytes))
    return (
        f"{note}If nvidia-cudnn-frontend is installed, auto takes cuDNN's kernel. A step then takes {step}, "
        f"{format_share(gain)} less, and {more} more memory."
    )
