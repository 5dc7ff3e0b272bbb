"""`headway audit`: a tool's log, restated in `useful`, and the difference explained."""

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli import options
from headway.cli.output import print_result, warn
from headway.cli.resolve import resolve_architecture, resolve_cost_model, stated_peak
from headway.cli.workload import WorkloadOptions, check_vision_tokens, describe_workload, prepared
from headway.errors import LogError, UsageError
from headway.files import check_plain, read_text
from headway.log.run_files import METRICS, run_copy
from headway.report import (
    Column,
    format_count,
    format_duration,
    format_rate,
    format_share,
    render_pairs,
    render_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from headway.audit import Audit, Log
    from headway.audit.by_phase import PhaseRow
    from headway.audit.rows import Interval, Reading, RestatedRow
    from headway.conventions import Step
    from headway.count import CostModel, Workload

_WIDTH = 120

LogArgument = Annotated[
    Path,
    typer.Argument(
        metavar="LOG",
        help="Log of torchtitan, MaxText, Megatron-LM, Megatron-Bridge, Primus, nanoGPT, nanochat, OLMo-core, "
        "llm-foundry, NeMo RL, NeMo Automodel, ms-swift, Lightning, verl, slime, miles, prime-rl, OpenRLHF, "
        "LMMs-Engine, TRL or diffusers, a trainer_state.json, or Headway's metrics.jsonl or run folder.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help=("Model that was trained, as for `headway flops`. Headway's own records need no model.")
    ),
]
SeqLenOption = Annotated[
    int | None,
    typer.Option(
        metavar="S",
        min=1,
        help="Row length that the run was configured with [tokens]. Default: Headway searches for the length.",
    ),
]
MeanSegmentOption = Annotated[
    int | None,
    typer.Option(
        "--mean-segment",
        metavar="L",
        min=1,
        help="Instead of --segments: rows hold samples of L tokens each.",
    ),
]
RanksOption = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Number of devices of the job, if the log does not say.")
]
ResumedOption = Annotated[
    int | None,
    typer.Option(
        "--resumed-at",
        metavar="STEP",
        min=0,
        help=("For a trainer_state.json: the step from which the run was resumed, or 0."),
    ),
]
SkipOption = Annotated[int, typer.Option(metavar="N", min=0, help="Rows to leave out at the start (warm-up).")]


@options.spread(without=["audio", "past", "logits"], between={"images": ["mean_segment"]})
def audit(
    log: LogArgument,
    model: ModelOption = None,
    seq_len: SeqLenOption = None,
    *,
    work: WorkloadOptions,
    mean_segment: MeanSegmentOption = None,
    freeze: options.FreezeOption = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    ranks: RanksOption = None,
    resumed_at: ResumedOption = None,
    skip: SkipOption = 0,
    as_json: options.JsonOption = False,
) -> None:
    """Find out how a log's MFU was counted, recompute it by useful FLOPs, and name the factors of the difference.

    --segments or --splits, --images, --latents and --slots describe a piece of the data, such as one row. If you give
    no segments, a row holds one sample of --seq-len tokens.

    Example: headway audit train.log --model qwen3-vl-30b-a3b --seq-len 12288 --device H200
    """
    from headway.audit import audit as audit_log
    from headway.audit import own, read_log
    from headway.audit.by_phase import sample_workload

    if (work.segments is not None or work.splits is not None) and mean_segment is not None:
        option = "--segments" if work.splits is None else "--splits"
        raise UsageError(
            f"{option} and --mean-segment contradict each other, because both set the length of the samples. "
            "Leave one out."
        )
    # A run folder stands for its records.
    log = run_copy(log)
    path = log / METRICS if log.is_dir() else log
    parsed = read_log(_log_text(path), str(path), resumed_at=resumed_at)
    peak = stated_peak(device, dtype)
    # Headway's own records hold model, workload and ranks; stating them again could only contradict.
    if parsed.recorded is not None:
        others = {"--seq-len": seq_len, "--mean-segment": mean_segment, "--freeze": freeze, "--ranks": ranks}
        _refuse(path, {"--model": model, **work.typed(), **others})
        result, name = own(parsed, device=peak, skip=skip), None
    elif model is None:
        raise UsageError(
            "--model is missing, and a log does not say what was trained. Give the model as for `headway flops`."
        )
    else:
        # Other tools' logs say tokens and rates; the model and what a row stands for come from the options.
        cost_model, workload, work = resolve_cost_model(model), None, work.in_patches(model)
        if {"--segments", "--splits", "--latents", "--references", "--supervised"} & work.typed().keys():
            workload = work.build()
            cost_model = prepared(cost_model, workload, work.supervised)
        trained, name = cost_model.freeze(freeze) if freeze else cost_model, cost_model.name
        if workload is None and seq_len is None and mean_segment is None and not _says_per_token(parsed):
            workload = sample_workload(parsed)  # the log's own lengths
            seq_len = None if workload is None else int(workload.segments.max())
        result = audit_log(
            parsed,
            resolve_architecture(model, cost_model),
            _steps(cost_model, seq_len, mean_segment, work, workload),
            seq_len=seq_len,
            device=peak,
            num_ranks=ranks,
            trained=resolve_architecture(model, trained) if freeze else None,
            skip=skip,
            mean_sample=mean_segment,
        )
    print_result(lambda: _record(result, name), lambda: _text(result, name), as_json=as_json)
    for warning in result.warnings:
        warn(warning)


def _log_text(path: Path) -> str:
    try:
        if path.name == METRICS:  # a run's folder may be a stranger's; a log that a user names may come from a pipe
            check_plain(path)
        return read_text(path, errors="replace")
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror}.") from error


def _says_per_token(log: "Log") -> bool:
    """Tell whether a log's own numbers give the bill per token, so that no length is needed."""
    return any(row.flops_per_s and row.tokens_per_s for row in log.rows)


def _refuse(path: Path, described: dict[str, Any]) -> None:
    if options := [option for option, value in described.items() if value]:
        raise UsageError(
            f"{', '.join(options)} cannot take effect, because Headway wrote {path}, and its records hold the FLOPs "
            "of each step. Leave it out. To see what other tools would print for a step, use `headway compare MODEL`."
        )


def _steps(
    cost_model: "CostModel",
    seq_len: int | None,
    mean_segment: int | None,
    work: WorkloadOptions,
    workload: "Workload | None",
) -> "Callable[[int], Step]":
    """Build the function from a row length to the step that a row of the log stands for."""
    from headway.conventions import Step

    longest = mean_segment if workload is None else int(workload.segments.max())
    if seq_len is not None and longest is not None and longest > seq_len:
        raise UsageError(
            f"--seq-len {seq_len} contradicts samples of {longest} tokens, because these do not fit into a row. Give "
            f"--seq-len {longest} or more, or shorter samples."
        )

    def step_of(length: int) -> Step:
        if workload is not None:
            return Step(workload, length)
        size = length if mean_segment is None else min(mean_segment, length)
        row = work.build([size] * (length // size) + ([length % size] if length % size else []))
        if seq_len is not None:
            check_vision_tokens(cost_model, row)
        return Step(row, length)

    return step_of


def _record(result: "Audit", model: str | None) -> dict[str, Any]:
    identified, fit, recorded = result.identified, result.fit, result.log.recorded
    # One convention that fits is identified; without any, the one that the log names itself.
    convention = identified.fit.convention.name if identified.fit else recorded.convention if recorded else None
    return {
        "tool": result.log.tool,
        "model": model,
        "rows": [_row_record(row) for row in result.rows],
        "phases": [_phase_record(row) for row in result.phases],
        "identified": {
            "convention": convention,
            "seq_len": identified.fit.seq_len if identified.fit else None,
            "candidates": [
                {"convention": fit.convention.name, "seq_len": fit.seq_len, "flops_per_token": fit.flops_per_token}
                for fit in identified.fits
            ],
            "same_number": list(identified.same),
            "flops_per_token": _ends(identified.flops_per_token),
            "peak_flops_per_s": _ends(identified.peak_flops_per_s),
            "peak": identified.peak,
            "ranks": fit.num_ranks if fit else recorded.num_ranks if recorded else None,
        },
        "peak_flops_per_s": result.peak_flops_per_s,
        "peak_source": result.peak_source,
        "reported_mfu_mean": result.reported_mfu_mean,
        "useful_mfu_mean": result.useful_mfu_mean,
        "ratio": result.ratio,
        "factors": [{"name": f.name, "ratio": f.ratio, "meaning": f.meaning} for f in result.factors],
        "warnings": list(result.warnings),
        "skipped": dict(result.log.skipped),
        "notes": list(result.notes),
    }


def _row_record(row: "RestatedRow") -> dict[str, Any]:
    reported = row.row
    return {
        "step": reported.step,
        "reported": {
            "mfu": _value(reported.mfu),
            "tflops": _value(reported.flops_per_s, 1e-12),
            "tokens_per_s": _value(reported.tokens_per_s),
        },
        "useful": {"mfu": row.mfu, "flops_per_token": row.flops_per_token},
    }


def _phase_record(row: "PhaseRow") -> dict[str, Any]:
    return {
        "step": row.step,
        "phase": row.phase,
        "wall_s": row.seconds,
        "share": row.share,
        "reported": {"mfu": row.printed_mfu, "flops_per_s_per_device": row.printed_flops_per_s},
        "useful": {
            "flops": None if row.flops is None else list(row.flops),
            "flops_per_s_per_device": row.flops_per_s,
            "mfu": None if row.mfu is None else list(row.mfu),
        },
    }


def _value(reading: "Reading | None", scale: float = 1.0) -> float | None:
    return None if reading is None else round(reading.value * scale, 9)


def _ends(interval: "Interval | None") -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _text(result: "Audit", model: str | None) -> str:
    scale, unit = _unit(reading.value for row in result.rows if (reading := row.row.flops_per_s) is not None)
    columns = [Column("step"), Column("tokens/s"), Column(unit), Column("MFU printed"), Column("MFU useful")]
    mean = ["mean", "", "", _percent(result.reported_mfu_mean), _percent(result.useful_mfu_mean)]
    parts = [render_table(columns, [_cells(row, scale) for row in result.rows], footer=mean)] if result.rows else []
    parts += [_phase_table(result.phases)] if result.phases else []
    parts.append(render_pairs(_found(result, model)))
    if result.factors:
        factor_columns = [Column("factor", "left"), Column("printed / useful"), Column("why", "left")]
        rows = [[factor.name, f"{factor.ratio:.4f}", factor.meaning] for factor in result.factors]
        product = math.prod(factor.ratio for factor in result.factors)
        ratio = "" if result.ratio is None else f"printed over useful: {result.ratio:.4f}"
        parts.append(render_table(factor_columns, rows, footer=["product", f"{product:.4f}", ratio]))
    parts += [textwrap.fill(f"Note: {note}.", width=_WIDTH, break_on_hyphens=False) for note in result.notes]
    return "\n\n".join(parts)


def _found(result: "Audit", model: str | None) -> list[tuple[str, str]]:
    identified, fit = result.identified, result.fit
    pairs = [("log", f"{result.log.tool}, {len(result.rows) or len(result.log.phased)} rows")]
    if model is not None:
        pairs.append(("model", model))
    if (recorded := result.log.recorded) is not None:
        devices = "1 device" if recorded.num_ranks == 1 else f"{format_count(recorded.num_ranks)} devices"
        pairs.append(("recorded", f"{recorded.convention} on {devices}"))
    if result.step is not None:
        rows = f"{describe_workload(result.step.workload)} in rows of {format_count(result.step.seq_len)}"
        pairs.append(("row stands for", rows))
    # The log's own arithmetic: FLOP per token is TFLOP/s over tokens/s, within its rounding.
    if identified.flops_per_token is not None:
        low, high = identified.flops_per_token.low / 1e9, identified.flops_per_token.high / 1e9
        pairs.append(("implied", f"{low:.4f} to {high:.4f} GFLOP per token, from tokens/s and FLOP/s"))
    # The identified convention, or the list of those whose number lies in that range.
    if identified.fit is not None:
        name = f"{identified.fit.convention.full_name}, {identified.fit.flops_per_token / 1e9:.4f} GFLOP per token"
        pairs.append(("identified", f"{name} at {format_count(identified.fit.seq_len)}"))
        pairs.append(("", identified.fit.convention.why))
        if identified.same:
            pairs.append(("", f"the same number on this model: {', '.join(identified.same)}"))
        if identified.fit.num_ranks:
            pairs.append(("devices", format_count(identified.fit.num_ranks)))
    elif identified.fits:
        names = [f"{fit.convention.name} at {fit.seq_len} ({fit.flops_per_token / 1e9:.4f})" for fit in identified.fits]
        pairs.append(("identified", f"not identifiable: {'; '.join(names[:6])}"))
        if fit is not None:
            pairs.append(("", f"{fit.convention.name} is taken below, as the rule of the tool that wrote the log"))
    # The peak behind the printed MFU, beside the one that the useful MFU takes.
    if identified.peak_flops_per_s is not None:
        scale, unit = _unit([identified.peak_flops_per_s.high])
        low, high = identified.peak_flops_per_s.low / scale, identified.peak_flops_per_s.high / scale
        nominal = f", {identified.peak / scale:g} {unit}" if identified.peak and recorded is None else ""
        span = f"{low:.2f} to {high:.2f}" if high > low else f"{low:.2f}"
        pairs.append(("peak printed", f"{span} {unit}{nominal}"))
    if result.peak_flops_per_s is not None:
        pairs.append(
            ("peak useful", f"{format_rate(result.peak_flops_per_s)} ({result.peak_source.partition(' (')[0]})")
        )
    else:
        pairs.append(("peak useful", result.peak_source))
    counted = "that the log counts" if recorded is None else "in the first row"
    pairs += [("useful", f"{row.flops_per_token / 1e9:.4f} GFLOP per token {counted}") for row in result.rows[:1]]
    return pairs


def _phase_table(rows: "Sequence[PhaseRow]") -> str:
    """Sum phases up over their steps: time a step, and means over time."""
    scale, unit = _unit(rate for row in rows for rate in (row.printed_flops_per_s, row.flops_per_s) if rate is not None)
    columns = [
        Column("phase", "left"), Column("time a step"), Column("share"), Column(f"{unit} printed"),
        Column(f"{unit} useful"), Column("MFU printed"), Column("MFU useful"),
    ]  # fmt: skip
    steps = {row.step for row in rows}
    total_s = sum(row.seconds for row in rows)
    cells = []
    for phase in dict.fromkeys(row.phase for row in rows):
        of_phase = [row for row in rows if row.phase == phase]
        seconds = sum(row.seconds for row in of_phase)

        def mean(values: "Iterable[float | None]", of_phase: "Sequence[PhaseRow]" = of_phase) -> float | None:
            pairs = [(value, row.seconds) for value, row in zip(values, of_phase, strict=True) if value is not None]
            time_s = sum(duration for _, duration in pairs)
            return sum(value * duration for value, duration in pairs) / time_s if time_s else None

        low, high = (mean(row.mfu and row.mfu[end] for row in of_phase) for end in (0, 1))
        rates = [mean(row.printed_flops_per_s for row in of_phase), mean(row.flops_per_s for row in of_phase)]
        useful = (
            _percent(low) if high is None or _percent(low) == _percent(high) else f"{_percent(low)} to {_percent(high)}"
        )
        cells.append([
            phase, format_duration(seconds / len(steps)), _percent(seconds / total_s if total_s else None),
            *("-" if rate is None else f"{rate / scale:,.2f}" for rate in rates),
            _percent(mean(row.printed_mfu for row in of_phase)), useful,
        ])  # fmt: skip
    return render_table(columns, cells)


def _unit(rates: "Iterable[float]") -> tuple[float, str]:
    """Unit of a column of rates, and its size [FLOP/s]: tera, or giga where the largest is below one tenth of it."""
    most = max(rates, default=math.inf)
    return (1e9, "GFLOP/s") if most < 1e11 else (1e12, "TFLOP/s")


def _cells(row: "RestatedRow", scale: float) -> list[str]:
    reported = row.row
    tokens = f"{reported.tokens_per_s.value:,.0f}" if reported.tokens_per_s else "-"
    rate = f"{reported.flops_per_s.value / scale:,.2f}" if reported.flops_per_s else "-"
    return [str(reported.step), tokens, rate, _percent(reported.mfu.value if reported.mfu else None), _percent(row.mfu)]


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return format_share(value) if value >= 0.1 else f"{100 * value:.2f} %"
