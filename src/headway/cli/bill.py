"""Print what another tool's convention charges for a step: `headway flops --convention NAME`."""

from typing import TYPE_CHECKING

from headway.cli.output import print_json, say, warn
from headway.cli.workload import describe, workload_record
from headway.errors import UnknownConventionError
from headway.report import Column, format_count, format_flops, format_share, render_pairs, render_table

if TYPE_CHECKING:
    from headway.conventions import Architecture, Convention, Step
    from headway.count import CostModel, Workload


def note_row_length(workload: "Workload", seq_len: int) -> None:
    """Say which row length is taken where none is given, if the segments look like rows of their own.

    Args:
        workload: the step.
        seq_len: the row length that is taken [tokens].
    """
    lengths = set(workload.segments.tolist())
    if len(lengths) == 1 and max(lengths) < seq_len:
        length = lengths.pop()
        say(
            f"Note: no --seq-len is given, so rows of {format_count(seq_len)} tokens are taken where the configured "
            f"length is billed, with several segments in each. If each is a row of its own, give --seq-len {length}.",
            on_stderr=True,
        )


def print_bill(
    cost_model: "CostModel",
    workload: "Workload",
    model: "Architecture",
    convention: "Convention",
    step: "Step",
    as_json: bool,
) -> None:
    """Print what another tool's convention charges for the step, part by part, beside the useful FLOPs.

    Raises:
        UnknownConventionError: the convention has no number for this model.
    """
    bill, useful = convention.bill(model, step), cost_model.count(workload).total
    if bill.note:
        warn(f"{bill.note}.")
    if bill.flops is None:
        raise UnknownConventionError(
            f"--convention {convention.name} has no number for {cost_model.name}: {bill.reason}. `headway compare` "
            "shows which conventions do."
        )
    if as_json:
        record = {
            "model": cost_model.name,
            "convention": convention.full_name,
            "workload": workload_record(workload),
            "seq_len": step.seq_len,
            "flops": {"total": bill.flops, "useful": useful},
            "tokens_billed": bill.tokens,
            "components": [{"name": name, "total": flops} for name, flops in bill.parts.items() if flops],
            "ratio_to_useful": bill.flops / useful,
            "unknown": list(cost_model.unknown),
        }
        print_json(record)
        return
    columns = [Column("part", "left"), Column("total"), Column("share")]
    rows = [
        [name, format_flops(flops), format_share(flops / bill.flops)] for name, flops in bill.parts.items() if flops
    ]
    table = render_table(columns, rows, footer=["total", format_flops(bill.flops), format_share(1.0)])
    pairs = [
        ("model", cost_model.name),
        ("workload", describe(workload)),
        ("billed", f"{format_count(bill.tokens)} token positions; row length {format_count(step.seq_len)}"),
        ("useful", f"{format_flops(useful)}; this convention bills {bill.flops / useful:.3f} times that"),
        ("convention", f"{convention.full_name}; {convention.why}"),
    ]
    print(f"{table}\n\n{render_pairs(pairs)}")
