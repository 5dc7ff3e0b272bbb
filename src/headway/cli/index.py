"""`headway index`: every sample's lengths in a pack, measured once and cached."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import (
    ChatTemplateOption,
    ColumnOption,
    JsonOption,
    MaxCharactersOption,
    MediaOption,
    column_names,
    media_bounds,
    text_limit,
)
from headway.cli.output import needs_extra, print_result, warn
from headway.count.modalities import MODALITIES
from headway.errors import UsageError
from headway.log.working import measuring_rows, working
from headway.report import format_count, format_share, render_lines, render_pairs
from headway.report.secrets import hide_secrets
from headway.stores import refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headway.data.bad_rows import BadSamples
    from headway.data.index import LengthIndex
    from headway.data.processor_settings import ProcessorSettings
    from headway.data.sources import Source

_SHOWN_BAD = 5


def index(
    data: Annotated[list[str], typer.Argument(metavar="DATA...", help="Files, folders, globs or URLs of datasets.")],
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="M", help=("Model whose tokenizer and processor measure: a folder or a Hub id.")
        ),
    ],
    schema: Annotated[
        str, typer.Option(metavar="NAME", help="Layout of the rows. Default: recognised by each row's columns.")
    ] = "auto",
    column: ColumnOption = None,
    root: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help=("Folder or URL that media paths start from. Default: each file's own folder.")
        ),
    ] = None,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Let rows name media on the web.")] = False,
    on_bad: Annotated[
        str,
        typer.Option(
            metavar="error|skip", help=("Treatment of rows that cannot be used: error stops, skip counts them.")
        ),
    ] = "error",
    quarantine: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=("With --on-bad skip: file for the list of bad rows with their reasons.")),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", max=1024, help="Number of worker processes. Default: one per usable core."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of all indices. Default: `index` in $HEADWAY_CACHE."),
    ] = None,
    refresh: Annotated[
        bool,
        typer.Option("--refresh", help=("Measure again, for example after you replaced images under the same names.")),
    ] = False,
    max_characters: MaxCharactersOption = None,
    chat_template: ChatTemplateOption = None,
    media: MediaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure tokens, patches and grids of every sample, exactly, without decoding pixels.

    The lengths are kept as Parquet, so a stopped run continues, and a second run is immediate. The summary goes to
    stdout, and progress goes to stderr. docs/data-formats.md describes the file.

    Example: headway index chats.jsonl --model Qwen/Qwen2.5-VL-7B-Instruct
    """
    refuse(cache or Path(), "--cache")
    with needs_extra("indexing"):
        from headway.data.bad_rows import BadSamples
        from headway.data.chat_settings import ChatSettings
        from headway.data.processor_settings import ProcessorSettings
        from headway.data.sources import open_source
        from headway.data.sources.opening import own_names
    if on_bad not in ("error", "skip"):
        raise UsageError(f"--on-bad {on_bad!r} is neither error nor skip.")
    if workers is not None and workers < 0:
        raise UsageError(f"--workers {workers} is not a number of processes. Give 0 or more.")

    policy = BadSamples("skip" if on_bad == "skip" else "error", limit=None, fraction=None, quarantine=quarantine)
    options: dict[str, Any] = {"schema": schema, "root": root, "allow_remote": allow_remote}
    options["columns"] = column_names(column)
    data = list(dict.fromkeys(data))
    names = own_names(data)  # a typo in a path is told before anything is measured
    sources = [open_source(path, name=name, **options) for path, name in zip(data, names, strict=True)]
    measuring: dict[str, Any] = {"cache": cache, "workers": workers, "refresh": refresh}
    settings = ProcessorSettings(ChatSettings.of(chat_template), media_bounds(media))
    index_ = build_indices(sources, model, text_limit(max_characters), policy, settings=settings, **measuring)
    indices = dict(zip(data, index_, strict=True))
    print_result(
        lambda: {"model": model, "indices": [_record(path, index_) for path, index_ in indices.items()]},
        lambda: "\n\n".join(_text(path, index_) for path, index_ in indices.items()),
        as_json=as_json,
    )


def build_indices(
    sources: "Sequence[Source]",
    model: str,
    limits: "Mapping[str, int]",
    policy: "BadSamples | None" = None,
    *,
    settings: "ProcessorSettings | None" = None,
    cache: Path | None = None,
    workers: int | None = None,
    refresh: bool = False,
) -> "list[LengthIndex]":
    """Measure datasets, with a progress bar for each; or read what was measured before, without opening the model.

    Args:
        sources: the datasets.
        model: whose tokenizer and processor measure.
        limits: `max_image_pixels` and `max_characters`, as `open_encoder` takes them; the defaults without.
        policy: what a row that cannot be used does, one for all of them; it is left out when None.
        settings: changes of the model's processor; it is as the folder says when None.
        cache: folder of all indices; `index` in Headway's cache if None.
        workers: as `build_index` takes them.
        refresh: measure anew.
    """
    with needs_extra("indexing"):
        from headway.data.bad_rows import BadSamples, SampleCounts
        from headway.data.index.store import KnownEncoder, count_rows, stored_index
        from headway.data.processor_settings import ProcessorSettings
        from headway.hub import located

        path = located(model)  # a typo is told before torch is imported, which takes seconds
    for source in sources:
        with working(f"reading {source.name}"):  # a server may be slow, and a file large
            notes, _ = source.notes(), len(source)
        for note in notes:
            warn(note)
    policy = policy or BadSamples("skip", limit=None, fraction=None)
    settings = settings or ProcessorSettings()
    measuring = KnownEncoder(path, {**limits, "settings": settings}, cache)
    counts, indices = SampleCounts(), []
    if measuring.fingerprint is not None and not refresh:
        stored = [stored_index(source, measuring.fingerprint, cache) for source in sources]
        indices = [index for index in stored if index is not None]
        if len(indices) == len(sources):
            for index, source in zip(indices, sources, strict=True):
                count_rows(index, source.name, policy, counts)
            return indices

    with needs_extra("indexing"):
        from headway.data.encoders import open_encoder
        from headway.data.index import build_index

    with working(f"opening the processor of {model}"):
        encoder = open_encoder(path, **limits, settings=settings)
    measuring.remember(encoder.fingerprint())
    chosen: dict[str, Any] = {"cache": cache, "workers": workers, "refresh": refresh}
    indices = []
    for source in sources:
        with measuring_rows(source.name) as progress:
            indices.append(build_index(source, encoder, progress=progress, policy=policy, counts=counts, **chosen))
    return indices


def _record(path: str, index: "LengthIndex") -> dict[str, Any]:
    summary = index.summary()
    return {
        "data": hide_secrets(path),
        "path": str(index.path),
        **{name: value for name, value in asdict(summary).items() if name != "items"},
        **{str(MODALITIES[name].items_key): number for name, number in summary.items.items()},
        "bad_rows": [asdict(error.origin) | {"reason": error.reason} for error in index.bad.values()],
    }


def _text(path: str, index: "LengthIndex") -> str:
    summary = index.summary()
    pairs = [("data", hide_secrets(path)), ("samples", format_count(summary.samples))]
    if summary.bad:
        share = format_share(summary.bad / summary.samples)
        pairs.append(("bad", f"{format_count(summary.bad)} ({share}), left out of the numbers below"))
    if summary.empty:
        pairs.append(("empty", f"{format_count(summary.empty)} documents without words, left out"))
    if summary.preferences:
        count = f"{format_count(summary.preferences)}, of {format_count(summary.answers)} answers"
        pairs.append(("preferences", count))
    pairs += [
        ("tokens", format_count(summary.tokens)),
        ("supervised", format_count(summary.supervised)),
        ("patches", format_count(summary.patches)),
    ]
    pairs += [(MODALITIES[name].nouns, format_count(number)) for name, number in summary.items.items() if number]
    names = {0: "least", 50: "median", 100: "most"}
    lengths = [f"{names.get(p, f'{p} %')} {format_count(length)}" for p, length in summary.length_percentiles.items()]
    pairs += [("lengths", ", ".join(lengths)), ("index", str(index.path))]
    shown = [str(error) for error in list(index.bad.values())[:_SHOWN_BAD]]
    if len(index.bad) > len(shown):
        shown.append(f"and {format_count(len(index.bad) - len(shown))} more; --quarantine FILE or --json names all")
    return "\n".join([render_pairs(pairs), *([render_lines([f"bad: {reason}" for reason in shown])] if shown else [])])
