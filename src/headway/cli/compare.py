"""`headway compare`: one step as every tool would print it."""

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli import options
from headway.cli.flops import note_row_length
from headway.cli.output import print_result, warn, warn_of_unknown
from headway.cli.resolve import resolve_architecture, stated_peak
from headway.cli.workload import WorkloadOptions, describe_workload, resolve_for, workload_record
from headway.errors import UsageError
from headway.report import (
    Column,
    format_count,
    format_duration,
    format_flops,
    format_rate,
    format_share,
    render_pairs,
    render_table,
)

if TYPE_CHECKING:
    from headway.audit import ComparisonRow
    from headway.conventions import Step
    from headway.devices import Peak


StepTimeOption = Annotated[
    float | None, typer.Option("--step-time", metavar="S", help="Wall time of the step, data wait included [s].")
]


@options.spread(without=["past", "logits"])
def compare(
    model: options.ModelArgument,
    others: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    *,
    work: WorkloadOptions,
    seq_len: options.SeqLenOption = None,
    freeze: options.FreezeOption = None,
    recompute: options.RecomputeOption = "none",
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    step_time: StepTimeOption = None,
    ranks: options.RanksOption = 1,
    convention: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Show this convention alone beside `useful`. Repeatable."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show one step in every convention: FLOPs, rate and MFU as each tool would print them, and why they differ.

    The segments, images and slots are those of all ranks together.

    Example: headway compare qwen3-vl-8b --segments 4096*3,512 --images 1x32x48*2 --device H100 --step-time 1.9
    """
    if others:
        raise UsageError(
            f"`headway compare` shows one step of one MODEL as every tool would print it, but got {others[0]} too. "
            "To check that two runs trained on the same samples, use `headway check RUN OTHER`."
        )
    from headway.audit import compare as compare_step
    from headway.conventions import Step, get_convention

    if device is None or step_time is None:
        missing = "--device" if device is None else "--step-time"
        raise UsageError(
            f"{missing} is missing, but an MFU needs the device and the step's wall time in seconds, for example "
            "--device H100 --step-time 1.9. To count FLOPs alone, use `headway flops --convention NAME`."
        )
    chosen = {get_convention(name).name for name in convention or ()}
    # One step as tools see it: its workload, and the row length that those without segments bill.
    workload = work.in_patches(model).build()
    row_length = _seq_len(seq_len, workload.slots, ranks, int(workload.segments.max()))
    peak = stated_peak(device, dtype)
    assert peak is not None, "a device is given"
    cost_model = resolve_for(model, workload, work.supervised, freeze)
    step = Step(workload, row_length, recompute)
    if seq_len is None:
        note_row_length(workload, row_length)
    # A multiply-accumulate is two FLOPs; papers print the forward pass in these.
    forward_macs = cost_model.count(workload).forward // 2
    rows = compare_step(resolve_architecture(model, cost_model), step, step_time, peak, ranks)
    if chosen:
        rows = [row for row in rows if row.convention.name in {"useful", *chosen}]
    warn_of_unknown(cost_model.unknown)
    compared = cost_model.name, step, step_time, ranks, peak, rows
    print_result(
        lambda: {**_record(*compared), "forward_macs": forward_macs},
        lambda: _text(*compared, forward_macs),
        as_json=as_json,
    )
    # Other conventions may pass 100 %; a useful MFU cannot, so an input is wrong.
    impossible = [row.convention.name for row in rows if row.mfu is not None and row.mfu > 1]
    if "useful" in impossible:
        warn(
            "a useful MFU above 100 % is impossible. Likely causes: the step time is not that of this workload "
            f"({format_duration(step_time)} for {describe_workload(workload)}), --ranks {ranks} is too low for it, "
            f"or --device {device} is not the device."
        )
        raise typer.Exit(1)


def _seq_len(seq_len: int | None, slots: int, ranks: int, longest: int) -> int:
    """Take the row length that tools are configured with: given, or one row of all slots per rank."""
    length = seq_len or max(math.ceil(slots / max(ranks, 1)), longest)
    if longest > length:
        raise UsageError(
            f"--seq-len {length} contradicts --segments: the longest segment has {longest} tokens and cannot lie in a "
            f"row of {length}. Give --seq-len {longest} or more."
        )
    return length


def _record(
    model: str, step: "Step", step_s: float, ranks: int, peak: "Peak", rows: "list[ComparisonRow]"
) -> dict[str, Any]:
    return {
        "model": model,
        "workload": workload_record(step.workload),
        "seq_len": step.seq_len,
        "step_s": step_s,
        "ranks": ranks,
        "device": {"name": peak.name, "dtype": peak.dtype, "peak_flops_per_s": peak.flops_per_s, "source": peak.source},
        "conventions": [
            {
                "name": row.convention.name,
                "version": row.convention.version,
                "flops": row.bill.flops,
                "flops_per_s": row.flops_per_s,
                "peak_flops_per_s": row.peak_flops_per_s if math.isfinite(row.peak_flops_per_s) else None,
                "mfu": row.mfu,
                "ratio_to_useful": row.ratio,
                "tokens_billed": row.bill.tokens,
                "parts": dict(row.bill.parts),
                "why": row.why,
            }
            for row in rows
        ],
    }


def _text(
    model: str, step: "Step", step_s: float, ranks: int, peak: "Peak", rows: "list[ComparisonRow]", forward_macs: int
) -> str:
    columns = [Column("convention", "left"), Column("FLOPs"), Column("TFLOP/s"), Column("peak"), Column("MFU")]
    columns += [Column("x useful")]
    table = render_table(columns, [_cells(row) for row in rows])
    dtype = "" if peak.dtype == "bf16" else f" in {peak.dtype}"
    macs = format_flops(forward_macs).replace("FLOP", "MAC")
    devices = f"{peak.name} x {ranks}, {format_rate(peak.flops_per_s)} each{dtype} ({peak.source.partition(' (')[0]})"
    pairs = [
        ("model", model),
        ("workload", describe_workload(step.workload)),
        ("row length", f"{format_count(step.seq_len)} tokens, what tools that bill the configured length take"),
        ("forward", f"{macs}, what papers and vision libraries call FLOPs"),
        ("step time", format_duration(step_s)),
        ("device", devices),
    ]
    why = render_pairs([(row.convention.name, row.why) for row in rows])
    return f"{table}\n\n{why}\n\n{render_pairs(pairs)}"


def _cells(row: "ComparisonRow") -> list[str]:
    peak = f"{row.peak_flops_per_s / 1e12:.1f}" if math.isfinite(row.peak_flops_per_s) else "unknown"
    if row.bill.flops is None or row.flops_per_s is None or row.mfu is None or row.ratio is None:
        return [row.convention.name, "-", "-", peak, "-", "-"]
    rate = f"{row.flops_per_s / 1e12:.1f}"
    return [row.convention.name, format_flops(row.bill.flops), rate, peak, format_share(row.mfu), f"{row.ratio:.3f}"]
