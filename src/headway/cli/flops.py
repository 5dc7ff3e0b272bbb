"""`headway flops`: the exact FLOPs of one training step of a model."""

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli import options
from headway.cli.parse import parse_grids, parse_lora, parse_segments
from headway.cli.resolve import resolve_cost_model
from headway.errors import UnknownConventionError, UsageError, WorkloadError
from headway.report import Column, format_count, format_flops, format_share, render_pairs, render_table

if TYPE_CHECKING:
    from headway.count import CostModel, FlopCount, FlopRow, Workload

SCHEMA_VERSION = 1


class By(StrEnum):
    """What a row of the ledger stands for."""

    component = "component"
    module = "module"


def flops(
    model: options.ModelArgument,
    segments: options.SegmentsOption = None,
    images: options.ImagesOption = None,
    videos: options.VideosOption = None,
    slots: options.SlotsOption = None,
    freeze: options.FreezeOption = None,
    lora: options.LoraOption = None,
    recompute: options.RecomputeOption = "none",
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="Count the forward pass alone, as for evaluation or prefill.")
    ] = False,
    convention: Annotated[
        str | None, typer.Option(metavar="NAME", help="Rule for what is counted; `useful/1` if not given.")
    ] = None,
    by: Annotated[
        By, typer.Option(help="Rows per component (language.mlp) or per module (model.layers.*.mlp.up_proj).")
    ] = (By.component),
    as_json: options.JsonOption = False,
) -> None:
    """Count the exact FLOPs of one training step: forward, input gradients (dgrad) and weight gradients (wgrad).

    Example: headway flops qwen3-vl-8b --segments 4096*3,512 --images 1x32x48*2
    """
    _check_options(convention, recompute, forward_only)
    workload = _workload(segments, images, videos, slots)
    cost_model = resolve_cost_model(model)
    if lora is not None:
        cost_model = cost_model.lora(*parse_lora(lora))
    if freeze:
        cost_model = cost_model.freeze(freeze)
    _check_vision_tokens(cost_model, workload)

    count = cost_model.count(workload, recompute=recompute, forward_only=forward_only)
    by_module = None
    if by is By.module:
        by_module = cost_model.count(workload, recompute=recompute, forward_only=forward_only, by="module")
    for unknown in cost_model.unknown:
        print(f"Warning: {unknown} could not be explained; its FLOPs are missing from every number.", file=sys.stderr)
    if as_json:
        print(json.dumps(_record(cost_model, workload, count, by_module)))
    else:
        print(_render(cost_model, workload, count, by_module))


def _check_options(convention: str | None, recompute: str, forward_only: bool) -> None:
    from headway.count.flop_count import USEFUL

    if convention is not None and convention not in {USEFUL, USEFUL.partition("/")[0]}:
        raise UnknownConventionError(
            f"--convention {convention!r} is not known. This version counts by {USEFUL!r} (docs/counting.md says what "
            "that includes); leave the option out."
        )
    if forward_only and recompute != "none":
        raise UsageError(
            f"--forward-only and --recompute {recompute} contradict each other: recomputation happens in the backward "
            "pass. Leave one of them out."
        )


def _workload(segments: str | None, images: str | None, videos: str | None, slots: int | None) -> "Workload":
    """Build the step's workload from the options.

    Raises:
        WorkloadError: an option cannot be read, or the slots cannot hold the tokens.
    """
    if segments is None:
        raise WorkloadError(
            "--segments is missing, so there is nothing to count. Give the lengths of the step's segments in tokens, "
            "those of images and videos included, for example --segments 4096*3,512."
        )
    from headway.count import Workload

    lengths = parse_segments(segments)
    tokens = sum(lengths)
    if slots is not None and slots < tokens:
        raise WorkloadError(
            f"--slots {slots} cannot hold the {tokens} tokens of --segments {segments}: slots are all positions "
            f"computed, tokens and padding. Give {tokens} or more, or leave --slots out where nothing is padded."
        )
    return Workload(
        segments=lengths,
        images=[] if images is None else parse_grids("--images", images),
        videos=[] if videos is None else parse_grids("--videos", videos),
        slots=slots,
    )


def _check_vision_tokens(cost_model: "CostModel", workload: "Workload") -> None:
    """Refuse grids that need more tokens than the segments have."""
    if not cost_model.has_vision or not workload.patches:
        return
    group = cost_model.merge_group
    needed = workload.patches // group
    if needed > workload.tokens:
        raise WorkloadError(
            f"The images and videos hold {workload.patches} patches, which {cost_model.name} merges {group} to 1 into "
            f"{needed} tokens, but the segments have only {workload.tokens} tokens. Segment lengths include the tokens "
            f"of images and videos: give --segments {needed} or more, or smaller grids."
        )


def _record(
    cost_model: "CostModel", workload: "Workload", count: "FlopCount", by_module: "FlopCount | None"
) -> dict[str, Any]:
    """Build the JSON object; its keys are a contract, `schema_version` names it."""
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "model": cost_model.name,
        "convention": count.convention,
        "workload": {
            "segments": workload.num_segments,
            "tokens": workload.tokens,
            "slots": workload.slots,
            "images": workload.num_images,
            "videos": workload.num_videos,
            "patches": workload.patches,
        },
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
    return record


def _row_record(row: "FlopRow") -> dict[str, Any]:
    return {
        "name": row.name,
        "driver": row.driver,
        "forward": row.forward,
        "dgrad": row.dgrad,
        "wgrad": row.wgrad,
        "total": row.total,
        "recompute": row.recompute,
    }


def _render(cost_model: "CostModel", workload: "Workload", count: "FlopCount", by_module: "FlopCount | None") -> str:
    ledger = count if by_module is None else by_module
    heading = "component" if by_module is None else "module"
    columns = [Column(heading, "left"), Column("driver", "left")]
    columns += [Column(name) for name in ("forward", "dgrad", "wgrad", "total", "share")]
    rows = [[row.name, row.driver, *_phases(row), format_share(row.total / count.total)] for row in ledger.rows]
    table = render_table(columns, rows, footer=["total", "", *_phases(count), format_share(1.0)])
    params = cost_model.params
    pairs = [
        ("model", cost_model.name),
        ("workload", _describe(workload)),
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


def _describe(workload: "Workload") -> str:
    parts = [_plural(workload.num_segments, "segment"), _plural(workload.tokens, "token")]
    if workload.slots > workload.tokens:
        parts.append(
            f"{format_count(workload.slots)} slots (padding {format_share(1 - workload.tokens / workload.slots)})"
        )
    if workload.num_images:
        parts.append(_plural(workload.num_images, "image"))
    if workload.num_videos:
        parts.append(_plural(workload.num_videos, "video"))
    if workload.patches:
        parts.append(f"{format_count(workload.patches)} patches")
    return ", ".join(parts)


def _plural(number: int, noun: str) -> str:
    return f"{format_count(number)} {noun}{'' if number == 1 else 's'}"
