"""`headway pack`: plan packs and steps from lengths alone, and compare the strategies."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from headway.cli import options
from headway.cli.index import build_indices
from headway.cli.output import needs_extra, print_result
from headway.cli.resolve import resolve_cost_model
from headway.errors import DataError, UsageError
from headway.files import write_output
from headway.log.working import working
from headway.report import Column, format_count, format_flops, format_share, render_lines, render_pairs, render_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headway.packing import Budget, OverlongCounts, PlanReport
    from headway.packing.items import Lengths

Name = TypeVar("Name", bound=str)

_BINS, _FILLS = 60, 401  # bins of a plot's histogram, and points of its curves
TEXT_MODEL, IMAGE_MODEL = "qwen2.5-7b", "qwen2.5-vl-7b"
"""Whose costs balance lengths for which no model is named."""


def pack(
    data: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DATA]...", help="Files, folders, globs or URLs of datasets, indexed by MODEL first."),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of DATA: CSV or Parquet with a column `tokens` and, optionally, `patches`, or `grids` "
            "(1x32x48;1x16x16).",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model whose FLOPs are balanced, and whose processor measures DATA. Default with --lengths: "
            f"{TEXT_MODEL}, or {IMAGE_MODEL} for lengths with patches.",
        ),
    ] = None,
    packing_length: Annotated[
        int | None, typer.Option(metavar="L", min=1, help="Token budget of a pack [tokens].")
    ] = None,
    patches: Annotated[
        int | None,
        typer.Option(metavar="P", min=0, help="Vision patch budget of a pack [patches]. Default: none."),
    ] = None,
    items: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Most samples in a pack. Default: no limit.")
    ] = None,
    ranks: Annotated[int, typer.Option(metavar="R", min=1, help="Data-parallel ranks that share a step.")] = 1,
    accumulation: Annotated[int, typer.Option(metavar="A", min=1, help="Packs of each rank in a step.")] = 1,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Strategy: balanced, best_fit, first_fit, next_fit or none. Repeatable. Default: all."
        ),
    ] = None,
    overlong: Annotated[
        str,
        typer.Option(
            metavar="POLICY", help=("Treatment of samples that exceed a pack: error, drop, truncate or split.")
        ),
    ] = "error",
    window: Annotated[
        int | None,
        typer.Option(
            metavar="W",
            min=1,
            help=("Number of samples planned together. Default: 131072, or the samples of 16 steps."),
        ),
    ] = None,
    balance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0,
            max=1,
            help=(
                "Balance (mean / max FLOPs over ranks) that `balanced` aims at. A smaller value mixes better. "
                "Default: 0.986."
            ),
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Seed of the shuffle and of the plan.")] = 0,
    column: options.ColumnOption = None,
    max_characters: options.MaxCharactersOption = None,
    media: options.MediaOption = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw lengths and the fill of packs as an SVG file.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Plan one pass over the data and show fill, balance over ranks and mixing of each strategy; trains nothing.

    Example: headway pack --lengths lengths.csv --packing-length 51200 --ranks 32
    """
    from headway.packing import STRATEGIES, Budget, Items, Order, Plan, measure
    from headway.packing.items import OVERLONG
    from headway.packing.steps import BALANCE

    if packing_length is None:
        raise UsageError(
            "--packing-length is missing. Give the number of tokens that a pack holds, such as --packing-length 51200."
        )
    wanted = [one_of(name, "packing strategy", STRATEGIES) for name in dict.fromkeys(strategy or STRATEGIES)]
    policy = one_of(overlong, "policy for over-long samples", OVERLONG)
    if plot is not None:
        _check_plot_path(plot)
    budget = Budget(packing_length, patches, items)
    # The samples' lengths and, by a model's ledger, their FLOPs, which balance needs.
    sources = _lengths(data, lengths, model, max_characters, options.column_names(column), media)
    has_patches = any(source.patches.any() for source in sources.values())
    name = model or (IMAGE_MODEL if has_patches else TEXT_MODEL)
    # The head runs on labelled tokens alone, as in training, where the data say which tokens have a label.
    planned, counts = Items.build(sources, budget, policy, resolve_cost_model(name), skips_unlabelled=bool(data))
    if not len(planned):
        num_read = sum(count.read for count in counts.values())
        raise DataError(f"None of {num_read} samples fits a pack of {packing_length} tokens. Raise --packing-length.")
    # Every strategy packs one epoch in the same order.
    order = Order.epochs(planned.sizes, 1, seed=seed)
    chosen: dict[str, Any] = {"seed": seed, "window": window, "accumulation": accumulation}
    chosen["balance"] = BALANCE if balance is None else balance
    with working(f"planning packs of {len(planned):,} samples"):
        plans = [Plan(planned, order, budget, ranks * accumulation, strategy=strategy, **chosen) for strategy in wanted]
        measured = [measure(plan, ranks) for plan in plans]
    if plot is not None:
        _draw(plot, planned.tokens, {report.strategy: fill for report, fill in measured}, budget)
    # The record holds the settings and the results of each strategy.
    settings = {
        "model": name,
        "model_given": model is not None,
        "packing_length": packing_length,
        "patches": patches,
        "items": items,
        "ranks": ranks,
        **chosen,
        "overlong": policy,
    }
    reports = [report for report, _ in measured]
    rows = {source: count.to_dict() for source, count in counts.items()}
    strategies = {report.strategy: report.to_dict() for report in reports}
    print_result(
        lambda: {**settings, "sources": rows, "strategies": strategies},
        lambda: _text(settings, counts, reports, has_labels=bool(data)),
        as_json=as_json,
    )


def _lengths(
    data: list[str] | None,
    lengths: Path | None,
    model: str | None,
    max_characters: int | None,
    columns: dict[str, str],
    media: list[str] | None,
) -> "Mapping[str, Lengths]":
    """Read a table of lengths, or measure datasets and count their bad rows."""
    from headway.packing.lengths import read_lengths

    if bool(data) == (lengths is not None):
        raise UsageError(
            f"There is {'more than one thing' if data else 'nothing'} to plan. Give DATA, or --lengths FILE, a CSV or "
            "Parquet file with a column `tokens`."
        )
    if lengths is not None:
        of_data = {"--max-characters": max_characters, "--column": next(iter(columns), None)}
        for option, value in (of_data | {"--media": media[0] if media else None}).items():
            if value is not None:
                raise UsageError(
                    f"{option} {value} is for DATA, so it cannot take effect with --lengths. Leave it out."
                )
        return {lengths.stem: read_lengths(lengths)}
    if model is None:
        raise UsageError(
            "DATA needs --model, a folder or a Hub id, because the model's tokenizer and processor measure the "
            "samples. A table of lengths needs no model: give it as --lengths FILE."
        )
    with needs_extra("indexing"):
        from headway.data.processor_settings import ProcessorSettings
        from headway.data.sources import open_source
        from headway.data.sources.opening import own_names
    data = list(dict.fromkeys(data or []))
    names = zip(data, own_names(data), strict=True)
    sources = [open_source(path, name=name, columns=columns) for path, name in names]
    settings = ProcessorSettings(sizes=options.media_bounds(media))
    indices = build_indices(sources, model, options.text_limit(max_characters), settings=settings)
    return {source.name: index for source, index in zip(sources, indices, strict=True)}


def one_of(name: str, what: str, allowed: "Sequence[Name]") -> "Name":
    """The value of an option that allows a few.

    Raises:
        UsageError: it is none of them.
    """
    for choice in allowed:
        if name == choice:
            return choice
    raise UsageError(f"Unknown {what} {name!r}. Allowed: {', '.join(allowed)}.")


def _text(
    settings: dict[str, Any],
    counts: "Mapping[str, OverlongCounts]",
    reports: "Sequence[PlanReport]",
    *,
    has_labels: bool,
) -> str:
    # All strategies pack the same samples, so that the first one's totals are everyone's.
    total = reports[0]
    left = [
        f"{number:,} {what}"
        for what in ("bad", "empty", "dropped", "truncated", "split")
        if (number := sum(getattr(count, what) for count in counts.values()))
    ]
    if tokens_dropped := sum(count.tokens_dropped for count in counts.values()):
        left.append(f"{tokens_dropped:,} tokens left out")
    limits = [
        f"{settings[name]:,} {unit}"
        for name, unit in (("packing_length", "tokens"), ("patches", "patches"), ("items", "samples"))
        if settings[name] is not None
    ]
    pairs = [
        ("FLOPs of", settings["model"] + ("" if settings["model_given"] else "  (not given; name yours with --model)")),
        ("data", ", ".join([f"{total.samples:,} samples", f"{total.tokens:,} tokens", *left])),
        ("pack", f"at most {', '.join(limits)}"),
        ("step", f"{settings['ranks']:,} ranks x {settings['accumulation']:,} packs"),
    ]
    # A row for each strategy.
    columns = [Column("strategy", "left")] + [
        Column(heading)
        for heading in ("packs", "steps", "fill", "balance", "mixing", "step", "MFU lost waiting", "us/sample")
    ]
    rows = [
        [
            report.strategy,
            format_count(report.packs),
            format_count(report.steps),
            f"{report.fill:.4f}",
            f"{report.balance:.4f}",
            f"{report.mixing:.2f}",
            format_flops(report.step_flops),
            format_share(report.straggler_loss),
            f"{report.us_per_sample:.2f}",
        ]
        for report in reports
    ]
    best = max(reports, key=lambda report: report.balance)
    notes = [
        "fill: share of the packs' room that holds tokens, without the last step. Empty room is not computed.",
        "balance: mean FLOPs of the ranks / FLOPs of the heaviest rank, as a mean over the steps.",
        "mixing: spread of the mean segment length from step to step. Random packing has 1.",
        f"If each pack of {best.strategy} were a padded batch, {format_share(best.padding_loss)} would be padding.",
    ]
    if not has_labels:
        notes.append("--lengths does not say which tokens have a label, so the head's FLOPs are those of all tokens.")
    return "\n\n".join([render_pairs(pairs), render_table(columns, rows), render_lines(notes)])


def _check_plot_path(path: Path) -> None:
    if path.suffix.lower() != ".svg":
        raise UsageError(
            f"--plot {path}: a plot is an .svg file, but this name has {path.suffix or 'no ending'}. Name "
            f"{path.with_suffix('.svg')}. Browsers show it, and print it as PDF."
        )
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: the folder {path.parent} does not exist. Make the folder, or name another.")


def _draw(path: Path, tokens: Any, fills: "Mapping[str, Any]", budget: "Budget") -> None:
    """Draw sample lengths, and the fill of packs for each strategy.

    Args:
        path: SVG file.
        tokens: length of each sample [tokens], shape (N,).
        fills: fill of each pack, a fraction, by strategy.
        budget: what a pack holds.

    Raises:
        ConfigError: the file cannot be written.
    """
    import numpy as np

    from headway.report.charts import DrawnLine, histogram, lines_chart
    from headway.report.page import svg_file

    of_tokens = f"Share of all tokens by length of their sample [tokens], {len(tokens):,} samples"
    of_packs = f"Share of packs by fill: at most so much of {budget.tokens:,} tokens [%]"
    lengths = histogram(
        of_tokens,
        np.log10(np.maximum(1, tokens)),
        form=lambda exponent: f"{10**exponent:,.0f}",
        num_bins=_BINS,
        shares=tokens / tokens.sum(),
    )
    filled = np.linspace(0, 1, _FILLS)
    lines = [
        DrawnLine(name, 100 * filled, np.searchsorted(np.sort(fill), filled + 1e-9, side="right") / len(fill))
        for name, fill in fills.items()
    ]
    charts = {of_tokens: lengths, of_packs: lines_chart(of_packs, lines, form="share", x_name="fill [%]")}
    write_output(path, svg_file(charts), option="--plot")
