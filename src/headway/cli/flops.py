"""`headway flops`: the exact FLOPs of one training step of a model."""

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headway.cli import options
from headway.cli.output import print_result, say, warn, warn_of_unknown
from headway.cli.resolve import resolve_architecture, resolve_cost_model
from headway.cli.workload import WorkloadOptions, describe_workload, resolve_for, workload_record
from headway.errors import UnknownConventionError, UsageError
from headway.report import Column, format_count, format_flops, format_share, render_pairs, render_table

if TYPE_CHECKING:
    from headway.conventions import Architecture, Convention, Step
    from headway.count import CostModel, FlopCount, FlopRow, Workload


class By(StrEnum):
    """Kind of a row of the table: a component, or a module."""

    component = "component"
    module = "module"


@options.spread()
def flops(
    model: options.ModelArgument,
    *,
    work: WorkloadOptions,
    freeze: options.FreezeOption = None,
    lora: options.LoraOption = None,
    recompute: options.RecomputeOption = "none",
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A second model that runs forward only on the same segments: a frozen reference, a teacher.",
        ),
    ] = None,
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="Count the forward pass alone: evaluation, prefill, decoding.")
    ] = False,
    convention: Annotated[
        str, typer.Option(metavar="NAME", help="Rule of counting. docs/conventions.md lists the rules.")
    ] = "useful/1",
    seq_len: Annotated[
        int | None,
        typer.Option(
            metavar="S",
            min=1,
            help=(
                "One sample of this length, instead of --segments [tokens]. With --segments: the row length of the "
                "tool of --convention. Default: one row of all slots."
            ),
        ),
    ] = None,
    by: Annotated[
        By, typer.Option(help="Rows per component (language.mlp) or per module (model.layers.*.mlp.up_proj).")
    ] = (By.component),
    as_json: options.JsonOption = False,
) -> None:
    """Count the exact FLOPs of one training step: forward, input gradients (dgrad) and weight gradients (wgrad).

    Example: headway flops qwen3-vl-8b --segments 4096*3,512 --images 1x32x48*2
    """
    from headway.conventions import Step, get_convention

    rule = get_convention(convention)
    # --seq-len alone is one segment; with segments it is the row length that some conventions bill.
    if seq_len is not None and work.segments is None and work.splits is None:
        work = replace(work, segments=str(seq_len))
        seq_len = seq_len if rule.uses_seq_len else None
    _check_options(rule, recompute, forward_only, by, seq_len)
    if reference is not None and rule.name != "useful":
        raise UsageError(
            f"--reference {reference} cannot take effect with --convention {rule.name}, which counts one model. Leave "
            "one of them out."
        )
    if work.past is not None and not forward_only:
        raise UsageError(
            f"--past {work.past[:80]} names tokens with cached keys and values, which no gradient reaches, so it "
            "needs --forward-only. To count a training step, leave --past out."
        )
    # The trained model, and a frozen second one, which runs forward alone.
    workload = work.in_patches(model).build()
    cost_model = resolve_for(model, workload, work.supervised, freeze, lora)
    second = None if reference is None else resolve_cost_model(reference)

    warn_of_unknown((*cost_model.unknown, *(second.unknown if second is not None else ())))
    if rule.name != "useful":
        step = Step(workload, seq_len or workload.slots, recompute)
        if seq_len is None and rule.uses_seq_len:
            note_row_length(workload, step.seq_len)
        print_bill(cost_model, workload, resolve_architecture(model, cost_model), rule, step, as_json)
        return

    def count_by(what: Literal["component", "module"]) -> "FlopCount":
        count = cost_model.count(workload, recompute=recompute, forward_only=forward_only, by=what)
        return count if second is None else count + _of_reference(second.count(workload, forward_only=True, by=what))

    count = count_by("component")
    by_module = count_by("module") if by is By.module else None
    counted = cost_model, second, workload, count, by_module
    print_result(lambda: _record(*counted), lambda: _text(*counted), as_json=as_json)


def _of_reference(count: "FlopCount") -> "FlopCount":
    """Keep a reference model's rows apart from the trained model's."""
    return replace(count, rows=tuple(replace(row, name=f"reference.{row.name}") for row in count.rows))


def _check_options(convention: "Convention", recompute: str, forward_only: bool, by: By, seq_len: int | None) -> None:
    if forward_only and recompute != "none":
        raise UsageError(
            f"--forward-only and --recompute {recompute} contradict each other, because recomputation happens in the "
            "backward pass. Leave one of them out."
        )
    if convention.name != "useful" and (forward_only or by is By.module):
        option = "--forward-only" if forward_only else "--by module"
        raise UsageError(
            f"{option} cannot take effect with --convention {convention.name}, which has totals for parts of the "
            "model but no phases or modules. Leave one of them out."
        )
    if recompute != "none" and convention.name not in {"useful", "hardware"}:
        raise UsageError(
            f"--recompute {recompute} cannot take effect with --convention {convention.name}, which does not count "
            "recomputation. Use `hardware`, which does."
        )
    if seq_len is not None and not convention.uses_seq_len:
        raise UsageError(
            f"--seq-len {seq_len} cannot take effect with --convention {convention.name}, which counts segments and "
            "slots and ignores the row length. Leave it out."
        )


def _record(
    cost_model: "CostModel",
    reference: "CostModel | None",
    workload: "Workload",
    count: "FlopCount",
    by_module: "FlopCount | None",
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "model": cost_model.name,
        "convention": count.convention,
        "workload": workload_record(workload),
        "flops": {
            "total": count.total,
            "forward": count.forward,
            "dgrad": count.dgrad,
            "wgrad": count.wgrad,
            "recompute": count.recompute,
        },
        "components": [_row_record(row) for row in count.rows],
    }
    if by_module is not None:
        record["modules"] = [_row_record(row) for row in by_module.rows]
    params = cost_model.params
    record["params"] = {"total": params.total, "active": params.active, "trainable": params.trainable}
    record["unknown"] = list(cost_model.unknown)
    if reference is not None:
        record["reference"] = {"model": reference.name, "unknown": list(reference.unknown)}
    return record


def _row_record(row: "FlopRow") -> dict[str, Any]:
    names = ("name", "driver", "forward", "dgrad", "wgrad", "total", "recompute")
    return {name: getattr(row, name) for name in names}


def _text(
    cost_model: "CostModel",
    reference: "CostModel | None",
    workload: "Workload",
    count: "FlopCount",
    by_module: "FlopCount | None",
) -> str:
    # The ledger by component or by module, then the inputs that it holds for.
    ledger = count if by_module is None else by_module
    heading = "component" if by_module is None else "module"
    columns = [Column(heading, "left"), Column("driver", "left")]
    columns += [Column(name) for name in ("forward", "dgrad", "wgrad", "total", "share")]
    rows = [[row.name, row.driver, *_phases(row), format_share(row.total / count.total)] for row in ledger.rows]
    table = render_table(columns, rows, footer=["total", "", *_phases(count), format_share(1.0)])
    # Below the table: for which models and workload it holds, and by which convention.
    params = cost_model.params
    pairs = [("model", cost_model.name)]
    if reference is not None:
        pairs.append(("reference", f"{reference.name}, forward only"))
    pairs += [
        ("workload", describe_workload(workload)),
        ("total", f"{format_count(count.total)} FLOP, {format_flops(count.total / workload.tokens)} per token"),
    ]
    if count.recompute:
        pairs.append(("recompute", f"{format_count(count.recompute)} FLOP on top, in HFU and not in MFU"))
    pairs += [
        (
            "parameters",
            f"{format_count(params.total)}, active per token {format_count(params.active)}, "
            f"trained {format_count(params.trainable)}",
        ),
        ("convention", f"{count.convention}; a multiply-add is 2 FLOPs, real tokens and allowed pairs only"),
    ]
    return f"{table}\n\n{render_pairs(pairs)}"


def _phases(part: "FlopRow | FlopCount") -> list[str]:
    return [format_flops(value) for value in (part.forward, part.dgrad, part.wgrad, part.total)]


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
            f"Note: no --seq-len is given, so each row is taken to have {format_count(seq_len)} tokens, with several "
            f"segments. If each segment is a row, give --seq-len {length}.",
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
    """Print another convention's bill of the step, part by part, beside the useful FLOPs.

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
    # The convention's parts sum to its bill; the useful FLOPs of the same step stand beside it.
    columns = [Column("part", "left"), Column("total"), Column("share")]
    rows = [
        [name, format_flops(flops), format_share(flops / bill.flops)] for name, flops in bill.parts.items() if flops
    ]
    table = render_table(columns, rows, footer=["total", format_flops(bill.flops), format_share(1.0)])
    pairs = [
        ("model", cost_model.name),
        ("workload", describe_workload(workload)),
        ("billed", f"{format_count(bill.tokens)} token positions; row length {format_count(step.seq_len)}"),
        ("useful", f"{format_flops(useful)}; this convention bills {bill.flops / useful:.3f} times that"),
        ("convention", f"{convention.full_name}; {convention.why}"),
    ]
    print_result(lambda: record, lambda: f"{table}\n\n{render_pairs(pairs)}", as_json=as_json)
