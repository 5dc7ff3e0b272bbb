"""`headway mfu`: the arithmetic of step time, tokens/s, MFU, chips, training time and cost."""

from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli import options
from headway.cli.output import print_result, warn
from headway.cli.resolve import stated_peak
from headway.cli.workload import WorkloadOptions, resolve_for
from headway.errors import UsageError
from headway.report import format_count, format_duration, format_flops, format_rate, format_share, render_pairs

if TYPE_CHECKING:
    from headway.predict import Solution

_SECONDS_PER_DAY = 86400

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="Model to train, as for `headway flops`."),
]


@options.spread(without=["past", "slots", "logits"], between={"splits": ["seq_len", "freeze", "flops_per_token"]})
def mfu(
    model: ModelArgument = None,
    *,
    work: WorkloadOptions,
    seq_len: Annotated[
        int | None,
        typer.Option(metavar="S", min=1, help="Instead of --segments: samples of this length [tokens]."),
    ] = None,
    freeze: options.FreezeOption = None,
    flops_per_token: Annotated[
        float | None, typer.Option(metavar="F", help="Instead of MODEL: useful FLOPs per token, all phases [FLOP].")
    ] = None,
    tokens_per_step: Annotated[
        float | None,
        typer.Option(metavar="N", help="Real tokens of a step, on all chips. Default: the tokens of --segments."),
    ] = None,
    step_time: Annotated[float | None, typer.Option(metavar="S", help="Measured time of a step [s].")] = None,
    tokens_per_s: Annotated[float | None, typer.Option(metavar="R", help="Tokens per second of all chips.")] = None,
    tokens_per_s_per_chip: Annotated[
        float | None, typer.Option(metavar="R", help="Tokens per second of a chip.")
    ] = None,
    mfu_fraction: Annotated[
        float | None, typer.Option("--mfu", metavar="X", help="MFU, a fraction such as 0.4.")
    ] = None,
    chips: Annotated[float | None, typer.Option(metavar="N", help="Chips that train.")] = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    total_tokens: Annotated[float | None, typer.Option(metavar="T", help="Tokens to train on, such as 15e12.")] = None,
    price: Annotated[float | None, typer.Option(metavar="P", help="Price of a chip-hour, in any currency.")] = None,
    within: Annotated[float | None, typer.Option(metavar="DAYS", help="Time that training may take [days].")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Compute the MFU, step time, days, chips and cost of a run from the numbers that you know.

    Example: headway mfu llama-3.1-8b --seq-len 8192 --device H100 --chips 256 --mfu 0.4 --total-tokens 1e12 --price 2.5
    """
    from headway.predict import solve

    # Each option gives one quantity; `solve` derives the others from the identities between them.
    values = {
        "tokens_per_step": tokens_per_step,
        "step_s": step_time,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_chip": tokens_per_s_per_chip,
        "mfu": mfu_fraction,
        "num_chips": chips,
        "total_tokens": total_tokens,
        "price_per_chip_hour": price,
        "time_s": within * _SECONDS_PER_DAY if within is not None else None,
        "flops_per_token": flops_per_token,
    }
    if (peak := stated_peak(device, dtype)) is not None:
        values["peak_flops_per_s"] = peak.flops_per_s
    values |= _work(model, work, seq_len, freeze, flops_per_token, tokens_per_step)
    plan = solve({key: value for key, value in values.items() if value is not None})
    # An MFU above one is printed as it came out, and fails.
    record = {"model": model, "given": sorted(plan.inputs), **plan.values}
    record["unknown"] = [quantity.key for quantity in plan.unknown]
    print_result(lambda: record, lambda: _text(plan), as_json=as_json)
    for warning in plan.warnings:
        warn(warning)
    if plan.values.get("mfu", 0.0) > 1.0:
        raise typer.Exit(1)


def _work(
    model: str | None,
    work: WorkloadOptions,
    seq_len: int | None,
    freeze: list[str] | None,
    flops_per_token: float | None,
    tokens_per_step: float | None,
) -> dict[str, float]:
    """Count FLOPs per token of a model on samples, and tokens per step where the segments are the step."""
    lengths = next((option for option in ("--segments", "--splits") if option in work.typed()), None)
    if lengths is not None and seq_len is not None:
        raise UsageError(f"{lengths} and --seq-len contradict each other, because both set the length of the samples.")
    if model is None:
        others = {"--seq-len": seq_len, "--freeze": freeze}
        unused = [*work.typed(), *(option for option, value in others.items() if value)]
        if unused:
            raise UsageError(f"{unused[0]} cannot take effect without MODEL. Name the model, or leave it out.")
        return {}
    if flops_per_token is not None:
        raise UsageError("--flops-per-token and MODEL contradict each other, because both set the cost of a token.")
    if lengths is None and seq_len is None:
        raise UsageError(
            f"{model} alone does not determine the cost of a token, because attention depends on the samples' "
            "lengths. Give --seq-len, the length of a sample in tokens, or --segments."
        )
    workload = work.in_patches(model).build(None if seq_len is None else [seq_len])
    cost_model = resolve_for(model, workload, work.supervised, freeze)
    work_values = {"flops_per_token": cost_model.count(workload).total / workload.tokens}
    if lengths is not None and tokens_per_step is None:
        work_values["tokens_per_step"] = float(workload.tokens)
    return work_values


def _text(plan: "Solution") -> str:
    from headway.predict import QUANTITIES

    pairs = []
    for quantity in QUANTITIES:
        if quantity.key in plan.values:
            text = _format(quantity.key, quantity.unit, plan.values[quantity.key])
            pairs.append((quantity.label, f"{text}{'  (given)' if quantity.key in plan.inputs else ''}"))
    missing = ", ".join(quantity.label for quantity in plan.unknown)
    return render_pairs(pairs) + (f"\n\nnot determined: {missing}" if missing else "")


def _format(key: str, unit: str, value: float) -> str:
    number = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.2f}"
    text = f"{number} {unit}".rstrip()
    if key == "mfu":
        text = format_share(value)
    elif key == "num_chips" and value != int(value):
        text = f"{format_count(value)}, so {-int(-value // 1):,}"
    elif key in {"cost", "price_per_chip_hour"}:
        text = f"{value:,.2f}"
    elif unit == "s":
        days = f" ({value / _SECONDS_PER_DAY:,.1f} days)" if value > _SECONDS_PER_DAY else ""
        text = format_duration(value) + days
    elif unit in {"FLOP", "FLOP/s"}:
        text = format_flops(value) if unit == "FLOP" else format_rate(value)
    return text
