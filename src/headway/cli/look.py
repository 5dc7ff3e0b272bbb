"""`headway look`: samples as tokens with their loss mask, images as patches, packs as strips."""

import os
import shutil
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli import options
from headway.cli.index import build_indices
from headway.cli.output import needs_extra, print_result, say, warn
from headway.cli.resolve import resolve_cost_model
from headway.errors import DataError, UsageError
from headway.files import is_taken, write_output
from headway.log.working import working
from headway.report import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from headway.config import TrainConfig
    from headway.data import Budget, Encoder
    from headway.data.index import LengthIndex
    from headway.data.look import DataView, ShownRow, ShownSample
    from headway.data.processor_settings import ProcessorSettings
    from headway.data.sources import Source
    from headway.packing import OverlongCounts
    from headway.packing.plan import Plan


def look(
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA...|CONFIG", help="Files, folders, globs or URLs of datasets; or a training's YAML file alone."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="M", help=("Model whose tokenizer and processor encode. A CONFIG names its own model.")
        ),
    ] = None,
    number: Annotated[
        int, typer.Option("-n", "--samples", metavar="N", min=0, help="Number of samples to show from each dataset.")
    ] = 3,
    start: Annotated[int, typer.Option(metavar="K", min=1, help="The first sample shown, counted from 1.")] = 1,
    packing_length: Annotated[
        int | None, typer.Option(metavar="L", min=1, help="Show packs of this token budget too [tokens].")
    ] = None,
    packs: Annotated[
        int | None, typer.Option(metavar="P", min=0, help="Number of packs to show, in whole steps. Default: 4.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(metavar="R", min=1, help=("Number of data-parallel ranks that share a step. Default: 1.")),
    ] = None,
    overlong: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY",
            help="Treatment of samples that exceed a pack: error, drop, truncate or split. Default: drop.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="S", help="Seed of the order of samples and packs. Default: 0.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="T",
            min=8,
            help=("Number of tokens to print from the beginning and the end of a sample. Default: 400."),
        ),
    ] = None,
    column: options.ColumnOption = None,
    max_characters: options.MaxCharactersOption = None,
    chat_template: options.ChatTemplateOption = None,
    media: options.MediaOption = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with the pictures, all tokens and packs instead.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show samples as the model sees them, and the packs that the samples make.

    Tokens that the loss counts are green, or stand between >> and << if there are no colours. | separates tokens. The
    positions of an image's tokens are written once, with their number. With a packing length or a CONFIG, the samples
    are indexed and planned as for training. The output then shows the packs too, and names the samples that were cut or
    dropped.

    Example: headway look chats.jsonl --model Qwen/Qwen2.5-VL-7B-Instruct -n 2
    """
    with needs_extra("looking at samples"):
        from headway.config import load_config
        from headway.data.chat_settings import ChatSettings
        from headway.data.processor_settings import ProcessorSettings
    # A run's YAML needs no options; datasets need at least a model.
    config = None
    planned = {"--packs": packs, "--ranks": ranks, "--overlong": overlong, "--seed": seed}
    if len(data) == 1 and Path(data[0]).suffix in (".yaml", ".yml"):
        stated = {"--model": model, "--packing-length": packing_length, "--max-characters": max_characters}
        own = {**stated, "--overlong": overlong, "--seed": seed, "--chat-template": chat_template, "--media": media}
        own["--column"] = column
        _refuse(own, f"{data[0]} sets it already. Leave the option out, or give the datasets themselves")
        config = load_config(Path(data[0]))
    elif model is None:
        raise UsageError(
            "DATA needs --model, a folder or a Hub id, because the model's tokenizer and processor encode the samples."
        )
    elif packing_length is None:
        _refuse(
            planned, "there are no packs without --packing-length. Give --packing-length too, or leave this option out"
        )
    if html is not None or as_json:
        _refuse({"--tokens": tokens}, "a page and JSON show all tokens. Leave the option out")
    if html is not None:
        _refuse({"--json": as_json or None}, "--html writes a page instead. Give one of the two")
        if is_taken(html):
            raise UsageError(f"--html {html} exists already. Give another file, or delete this one first.")
    # Samples count from 1 on the command line.
    rows = range(start - 1, start - 1 + number)
    num_packs = 4 if packs is None else packs
    if config is not None:
        shown = _of_config(config, rows, num_packs, ranks or 1)
    else:
        settings = ProcessorSettings(ChatSettings.of(chat_template), options.media_bounds(media))
        chosen: dict[str, Any] = {"ranks": ranks or 1, "overlong": overlong or "drop", "seed": seed or 0}
        chosen |= {"packing_length": packing_length, "settings": settings, "columns": options.column_names(column)}
        shown = _of_data(data, model or "", rows, num_packs, options.text_limit(max_characters), **chosen)
    # A page, JSON, or paragraphs for a terminal.
    if html is not None:
        from headway.pages.samples import samples_page

        write_output(html, samples_page(shown), option="--html", new=True)
        say(f"{html}: {format_count(len(shown.samples))} samples and {format_count(len(shown.packs))} packs")
        return
    width = max(40, shutil.get_terminal_size((100, 24)).columns)
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    from headway.cli.look_text import paragraphs

    text = partial(paragraphs, shown, width, tokens or 400, coloured=coloured)
    print_result(lambda: _record(shown), lambda: "\n\n".join(text()), as_json=as_json)


def _refuse(values: "Mapping[str, object]", why: str) -> None:
    for name, value in values.items():
        if value is not None:
            raise UsageError(f"{name} has no effect: {why}.")


def _require(rows: range, sources: "Sequence[Source]") -> None:
    """Refuse to show samples behind the last one."""
    most = max(len(source) for source in sources)
    if rows and rows.start >= most:
        raise UsageError(f"There is no sample {rows.start + 1:,} to begin with, because the data hold {most:,}.")


def _of_data(
    data: "Sequence[str]",
    model: str,
    rows: range,
    num_packs: int,
    limits: "Mapping[str, int]",
    *,
    packing_length: int | None,
    settings: "ProcessorSettings",
    columns: "Mapping[str, str]",
    ranks: int,
    overlong: str,
    seed: int,
) -> "DataView":
    from headway.cli.pack import one_of
    from headway.data.sources import open_source
    from headway.packing.items import OVERLONG, Items

    policy = one_of(overlong, "policy for over-long samples", OVERLONG)
    sources = [open_source(path, columns=columns) for path in data]  # a typo is told before torch is imported

    from headway.data import Budget
    from headway.data.encoders import open_encoder
    from headway.data.look import DataView
    from headway.packing.order import Order
    from headway.packing.plan import Plan

    _require(rows, sources)
    with working(f"opening the processor of {model}"):
        encoder = open_encoder(model, **limits, settings=settings)
    if packing_length is None:
        for note in (note for source in sources for note in source.notes()):
            warn(note)
        samples = [sample for source in sources for sample in _samples(source, rows, encoder)]
        return DataView(model, samples, (), (), None, {})
    indices = _indices(sources, model, limits, settings)
    budget = Budget(packing_length)
    items, counts = Items.build(indices, budget, policy, resolve_cost_model(model), skips_unlabelled=True)
    plan = Plan(items, Order.epochs(items.sizes, 1, seed=seed), budget, ranks, seed=seed) if len(items) else None
    return _planned(model, sources, indices, encoder, rows, plan, counts, budget, num_packs)


def _of_config(config: "TrainConfig", rows: range, num_packs: int, ranks: int) -> "DataView":
    """Packs that a training would see, by its own sources, order, budget and costs."""
    from headway.data.encoders import prepare_encoder
    from headway.data.processor_settings import ProcessorSettings
    from headway.models.load import load_model
    from headway.optim import adapt, freeze, rows_for_new_tokens
    from headway.tracing import trace
    from headway.train.data import budget_of, open_stages, plan_of
    from headway.train.prepare import encoder_of_run

    data = config.data
    if data.stream is not None:
        raise UsageError("data.stream packs samples as they come, so there is no plan to look at. Give the datasets.")
    sources, stages = open_stages(data)
    _require(rows, sources)
    # The model without weights: its ledger balances packs, its classes encode samples.
    with working(f"tracing {config.model.path}"):
        shell = load_model(config.model.path, random_init=True, device="meta", rows=rows_for_new_tokens(config.model))
        costs = adapt(shell, freeze(shell, trace(shell), config.model.freeze), config.model)
    encoder = encoder_of_run(config, shell)
    prepare_encoder(config, shell, costs, encoder)
    settings = ProcessorSettings.of(**config.of_processor())
    indices = _indices(sources, config.model.path, data.limits, settings)
    if encoder.shares_prompts:
        costs = costs.with_splits()
        indices = {name: index.with_prompts_once() for name, index in indices.items()}
    plan, counts = plan_of(config, stages, indices, costs, ranks, encoder.dropout(config.run.seed))
    budget = budget_of(data)
    return _planned(config.model.path, sources, indices, encoder, rows, plan, counts, budget, num_packs)


def _planned(
    model: str,
    sources: "Sequence[Source]",
    indices: "Mapping[str, LengthIndex]",
    encoder: "Encoder",
    rows: range,
    plan: "Plan | None",
    counts: "Mapping[str, OverlongCounts]",
    budget: "Budget",
    num_packs: int,
) -> "DataView":
    from headway.data.look import DataView, show_packs, used_of

    samples: list[ShownRow | DataError] = []
    for number, source in enumerate(sources):
        used = {row: used_of(plan.items, number, row) if plan is not None else [] for row in rows}
        samples += _samples(source, rows, encoder, used)
    bad = [error for index in indices.values() for error in index.bad.values()]
    packs = show_packs(plan, num_packs) if plan is not None and num_packs else []
    return DataView(model, samples, bad, packs, budget, counts)


def _samples(
    source: "Source", rows: range, encoder: "Encoder", used: "Mapping[int, Sequence[tuple[int, int]]] | None" = None
) -> "Iterator[ShownRow | DataError]":
    """Some rows of a dataset; the reason in place of one that cannot be used."""
    from headway.data.look import show_row

    for row in range(rows.start, min(rows.stop, len(source))):
        try:
            yield show_row(source[row], encoder, None if used is None else used[row])
        except DataError as error:
            yield error


def _indices(
    sources: "Sequence[Source]", model: str, limits: "Mapping[str, int]", settings: "ProcessorSettings"
) -> "Mapping[str, LengthIndex]":
    if len({source.name for source in sources}) < len(sources):
        raise UsageError(f"Two datasets have one name: {', '.join(source.name for source in sources)}. Rename a file.")
    indices = build_indices(sources, model, limits, settings=settings)
    return {source.name: index for source, index in zip(sources, indices, strict=True)}


def _record(shown: "DataView") -> dict[str, Any]:
    from headway.data.look import ShownSample, why_not_whole

    # Samples that can be used, with their media and tokens; of others the reason why not.
    samples: list[dict[str, Any]] = []
    for sample in shown.samples:
        if isinstance(sample, DataError):
            samples.append({"error": str(sample)})
            continue
        record: dict[str, Any] = {
            "where": sample.where,
            "lengths": asdict(sample.lengths),
            "used": sample.used,
            "left_out": why_not_whole(sample, shown.budget) if shown.budget is not None else None,
        }
        if isinstance(sample, ShownSample):
            record |= {"desirable": sample.desirable} if sample.desirable is not None else {}
            record |= _shown(sample)
        else:
            record["answers"] = [{"lengths": asdict(answer.lengths), **_shown(answer)} for answer in sample.answers]
        samples.append(record)
    # Packs in the order of their steps, and what became of the samples of each source.
    packs = [{"tokens": pack.tokens, **asdict(pack)} for pack in shown.packs]
    counts = {name: count.to_dict() for name, count in shown.counts.items()}
    bad = [str(error) for error in shown.bad]
    budget = None if shown.budget is None else shown.budget.tokens
    head = {"model": shown.model, "packing_length": budget, "sources": counts, "bad": bad}
    return {**head, "samples": samples, "packs": packs}


def _shown(sample: "ShownSample") -> dict[str, Any]:
    media = [
        {"kind": item.kind, "file": str(item.media), "size": item.size, "grid": item.grid, "frames": item.frames}
        for item in sample.media
    ]
    return {"media": media, "pieces": [asdict(piece) for piece in sample.pieces]}
