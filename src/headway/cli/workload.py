"""Options of several commands that describe a step's workload; the workload that they make, and its description."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from headway.cli.options import table_of_options
from headway.cli.output import warn
from headway.cli.parse import parse_grids, parse_lora, parse_media, parse_segments, parse_splits
from headway.cli.resolve import in_patches, resolve_cost_model, saved_denoiser, sizes_of_latents
from headway.count.modalities import MODALITIES, totals
from headway.errors import WorkloadError
from headway.report import format_count, format_share

if TYPE_CHECKING:
    from headway.count import CostModel, Workload
    from headway.packing.lengths import LengthTable


def _media_options() -> dict[str, Any]:
    """Declare an option for each kind of input beside text."""
    return {
        name: Annotated[str | None, typer.Option(metavar=row.metavar, help=row.help)]
        for name, row in MODALITIES.items()
    }


@dataclass(frozen=True)
class WorkloadOptions:
    """Options that describe what a step computes on, as they were typed: a row for each, in the order of `--help`.

    A row's type holds its help and, where text is typed, the function that reads it; `Workload` has an argument of the
    same name. `media` holds what was typed for kinds of input beside text, by the names of `headway.count.modalities`.
    """

    segments: Annotated[
        str | None,
        typer.Option(
            metavar="L*N,L,...",
            help="Segment lengths [tokens], the tokens of images and videos included; L*N means N segments of L "
            "tokens.",
        ),
        parse_segments,
    ] = None
    media: Mapping[str, str] = table_of_options(_media_options)
    sources: Annotated[
        str | None,
        typer.Option(
            metavar="L*N,L,...",
            help="Length that an encoder reads for each segment [tokens, or frames of speech].",
        ),
        parse_segments,
    ] = None
    past: Annotated[
        str | None,
        typer.Option(
            metavar="L*N,L,...",
            help=(
                "Cached tokens before each segment, with --forward-only [tokens]. A decode step of 64 sequences is "
                "--segments 1*64 --past 4096*64."
            ),
        ),
        parse_segments,
    ] = None
    slots: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Token slots computed, padding included [tokens]. Default: the sum of the segments."
        ),
    ] = None
    splits: Annotated[
        str | None,
        typer.Option(
            metavar="MODE:N,...;...",
            help=(
                "Attention within segments, instead of --segments: runs of causal, full, noise or branch tokens, with "
                "`;` between segments, such as causal:102,noise:4098;full:4902,causal:302. (...)*N repeats a segment."
            ),
        ),
        parse_splits,
    ] = None
    supervised: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Labelled tokens, for models that run their head on these alone. Default: the causal tokens.",
        ),
    ] = None
    logits: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Tokens that the head runs on, such as the last token of each prompt. Default: all.",
        ),
    ] = None

    def typed(self) -> dict[str, Any]:
        """Options that were typed, by their names on the command line."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "media"}
        return {f"--{name}": value for name, value in {**own, **self.media}.items() if value is not None}

    def in_patches(self, model: str) -> "WorkloadOptions":
        """Turn images whose size was typed in pixels into grids of the model's patches; errors of `in_patches`.

        Of a model of diffusers, each image or video is a sample of its own.
        """
        if (path := saved_denoiser(model)) is not None:
            return self._of_latents(path)
        images = in_patches(model, self.media.get("images"))
        return self if images is None else replace(self, media={**self.media, "images": images})

    def _of_latents(self, path: Path) -> "WorkloadOptions":
        """Describe a batch of latents: a segment for each grid, whose source is the text.

        Raises:
            WorkloadError: segments are given, or the size of the latents is given nowhere.
        """
        kind, patches = sizes_of_latents(path)
        if self.segments is not None or self.splits is not None:
            raise WorkloadError(
                f"A sample of {kind} consists of latents. Leave --segments and --splits out, and give --images "
                "1x64x64*4 [patches of the latents]. If the model reads a text, give --sources 512*4 [tokens] too."
            )
        kinds = {name: text for name, text in self.media.items() if MODALITIES[name].tower == "vision"}
        if not kinds and patches is None:
            raise WorkloadError(
                f"The configuration of {kind} states no size of latents. Give it in patches: --images 1x64x64 for one "
                "picture of 64 x 64, --videos 21x30x52 for frames of it, *N for N samples."
            )
        media = dict(self.media) if kinds else {**self.media, "images": "1x{}x{}".format(*patches)}  # type: ignore[misc]
        grids = [grid for name in (*kinds, *([] if kinds else ["images"])) for grid in parse_grids(media[name], name)]
        # one length of text stands for all samples
        sources = self.sources
        if sources is not None and len(parse_segments(sources, "--sources")) == 1:
            sources = f"{sources}*{len(grids)}" if "*" not in sources else sources
        lengths = ",".join(str(t * h * w) for t, h, w in grids)
        return replace(self, segments=lengths, media=media, sources=sources)

    def build(self, lengths: list[int] | None = None) -> "Workload":
        """Build the step's workload.

        Args:
            lengths: of the segments [tokens], where the options do not say them.

        Raises:
            WorkloadError: an option cannot be read, or the slots cannot hold the tokens.
        """
        from headway.count import Workload

        if self.segments is None and self.splits is None and lengths is None:
            raise WorkloadError(
                "--segments is missing, so there is nothing to count. Give the lengths of the step's segments in "
                "tokens, including the tokens of images and videos, for example --segments 4096*3,512."
            )
        # The function in a value's annotation reads what was typed; numbers need none.
        values: dict[str, Any] = {name: parse_media(name, text) for name, text in self.media.items()}
        for name, hint in get_type_hints(WorkloadOptions, include_extras=True).items():
            value = getattr(self, name)
            if value is not None and name != "media":
                parsers = [part for part in get_args(hint)[1:] if callable(part)]
                values[name] = parsers[0](value, f"--{name}") if parsers else value
        if lengths is not None:
            return Workload(**{"segments": lengths, **values})
        values.setdefault("segments", [sum(count for _, count in runs) for runs in values.get("splits", ())])
        tokens = sum(values["segments"])
        if self.slots is not None and self.slots < tokens:
            raise WorkloadError(
                f"--slots {self.slots} cannot hold the {tokens} tokens of --segments {self.segments or self.splits}, "
                f"because slots are all computed positions (tokens and padding). Give {tokens} or more. If nothing "
                "is padded, leave --slots out."
            )
        return Workload(**values)


def resolve_for(
    model: str, workload: "Workload", supervised: int | None, freeze: list[str] | None = None, lora: str | None = None
) -> "CostModel":
    """Resolve the cost model that a workload is counted on: with its adapters, its frozen parameters and its mask.

    Args:
        model: as of MODEL.
        workload: what it is to be counted on.
        supervised: as of `--supervised`.
        freeze: as of `--freeze`.
        lora: as of `--lora`.

    Raises:
        HeadwayError: as `resolve_cost_model` and `prepared`, or a pattern or adapter that matches nothing.
    """
    cost_model = resolve_cost_model(model)
    if lora is not None:
        cost_model = cost_model.lora(*parse_lora(lora))
    if freeze:
        cost_model = cost_model.freeze(freeze)
    return prepared(cost_model, workload, supervised)


def samples_in_turn(cost_model: "CostModel", work: WorkloadOptions) -> "LengthTable | None":
    """Read samples that a run repeats: their lengths, with equal numbers of pictures and videos.

    Args:
        cost_model: of the model.
        work: --segments is the length of each sample, its pictures included [tokens]; --images and --videos are the
            grids of all samples, those of the first sample first.

    Returns:
        None where nothing was given.

    Raises:
        WorkloadError: pictures without lengths, that cannot be dealt evenly, or that need more tokens than there are.
    """
    import numpy as np

    from headway.count import Workload
    from headway.packing.lengths import LengthTable

    segments = work.segments
    kinds = {f"--{name}": text for name, text in work.media.items() if MODALITIES[name].tower == "vision"}
    by_kind = {name: parse_grids(text, name) for name, text in kinds.items()}
    if segments is None:
        for name, grids in by_kind.items():
            needed = sum(t * h * w for t, h, w in grids) // cost_model.merge_group
            cost_model.count(Workload([needed], images=grids))  # refuses a model without a tower first
            raise WorkloadError(
                f"{name} {kinds[name][:80]} gives the samples' pictures, but not the length of the samples. Give "
                f"--segments too, including the tokens of pictures, which are {format_count(needed)} tokens."
            )
        return None
    lengths = parse_segments(segments)
    for name, grids in by_kind.items():
        if len(grids) % len(lengths):
            raise WorkloadError(
                f"{name} names {format_count(len(grids))}, which cannot be dealt to the {format_count(len(lengths))} "
                f"samples of --segments {segments[:80]} in equal numbers. Give each sample the same number, such as "
                f"--segments 900*2 {name} 1x32x48*2."
            )
    rows = [row for grids in by_kind.values() for row in np.repeat(range(len(lengths)), len(grids) // len(lengths))]
    all_grids = np.array([grid for grids in by_kind.values() for grid in grids], dtype=np.int64).reshape(-1, 3)
    patches = np.bincount(np.array(rows, dtype=np.int64), all_grids.prod(axis=1), len(lengths)).astype(np.int64)
    # The sample with the least room for words stands for all: a model without a tower, or too many patches.
    tightest = int((np.array(lengths) * cost_model.merge_group - patches).argmin())
    workload = Workload([lengths[tightest]], images=[all_grids[at] for at, row in enumerate(rows) if row == tightest])
    check_vision_tokens(cost_model, workload)
    cost_model.count(workload)
    return LengthTable(np.array(lengths, dtype=np.int64), patches, all_grids, np.array(rows, dtype=np.int64))


def with_text(cost_model: "CostModel", work: WorkloadOptions, tokens: int) -> WorkloadOptions:
    """Describe a sample by its text: the length of its segment, with the tokens of its pictures and videos.

    Args:
        cost_model: of the model.
        work: --images and --videos are all of one sample, in patches.
        tokens: of its text.

    Raises:
        WorkloadError: segments are given too, or how many tokens a picture takes is not known.
    """
    if work.segments is not None:
        raise WorkloadError(
            f"--segments {work.segments[:80]} and --tokens-per-sample {tokens} both set the length of a sample. "
            "Give one of them."
        )
    kinds = {name: text for name, text in work.media.items() if MODALITIES[name].tower == "vision"}
    patches = sum(t * h * w for name, text in kinds.items() for t, h, w in parse_grids(text, f"--{name}"))
    if patches and cost_model.has_vision and cost_model.merge_group == 1:
        raise WorkloadError(
            f"In {cost_model.name} the number of tokens of a picture does not follow from its patches. Give "
            "--segments, the tokens of a sample with its pictures, instead of --tokens-per-sample."
        )
    return replace(work, segments=str(tokens + patches // cost_model.merge_group))


def prepared(cost_model: "CostModel", workload: "Workload", supervised: int | None) -> "CostModel":
    """Check a model against a workload, and put the workload's splits in place of a causal mask.

    Args:
        cost_model: of the model.
        workload: what it is to be counted on.
        supervised: labelled tokens, if they were given.

    Raises:
        WorkloadError: the workload does not fit the model, or something given would change nothing.
    """
    check_vision_tokens(cost_model, workload)
    drivers = {row.driver for row in cost_model.rows}
    if supervised is not None and "supervised" not in drivers:
        raise WorkloadError(
            f"--supervised {supervised} has no effect, because {cost_model.name} runs its head on every token. "
            "Leave it out."
        )
    if not len(workload.splits):
        if workload.latent_patches:
            raise WorkloadError(
                "--latents and --references need --splits, because splits say who sees the latent patches. A "
                "denoised image is a noise run, and a reference is a full run, for example --splits "
                '"causal:102,noise:4098".'
            )
        return cost_model
    if "pairs:splits" not in drivers:
        warn(f"{cost_model.name}'s own mask is causal, but its attention is counted under --splits instead.")
    return cost_model.with_splits()


def check_vision_tokens(cost_model: "CostModel", workload: "Workload") -> None:
    """Refuse grids that need more tokens than there are for them, where patches are known to be tokens.

    Raises:
        WorkloadError: they do.
    """
    from headway.count.splits import FULL, tokens_of

    if "latents" in cost_model.towers:  # each patch is a token of a full run, beside clean latents
        referred = int(workload.references.prod(axis=1).sum())
        room = (tokens_of(workload.splits, FULL) if len(workload.splits) else workload.tokens) - referred
        if workload.patches > room:
            raise WorkloadError(
                f"The images hold {workload.patches} patches, each a token of a full run of {cost_model.name}, but "
                f"the full runs have room for {room} tokens. R x C patches need a run full:N with N = R x C + 2 "
                "tokens."
            )
    group = cost_model.merge_group
    if group == 1 or not workload.patches:  # a resampler, a class token, cross attention: positions are not patches
        return
    needed = workload.patches // group
    if needed > workload.tokens:
        raise WorkloadError(
            f"The images and videos hold {workload.patches} patches, which {cost_model.name} merges {group} to 1 into "
            f"{needed} tokens, but the segments have only {workload.tokens} tokens. Segment lengths include the tokens "
            f"of images and videos: give --segments {needed} or more, or smaller grids."
        )


def workload_record(workload: "Workload") -> dict[str, Any]:
    """Put a workload's totals into JSON-ready numbers."""
    from headway.count.splits import by_mode

    return {
        "segments": workload.num_segments,
        "tokens": workload.tokens,
        "slots": workload.slots,
        **totals(workload.media),
        "source_tokens": int(workload.sources.sum()),
        "past_tokens": int(workload.past.sum()),
        "splits": by_mode(workload.splits),
        "noised_patches": workload.noised,
        "supervised": workload.supervised,
        "logits": workload.tokens if workload.logits is None else workload.logits,
    }


def describe_workload(workload: "Workload") -> str:
    """Describe a workload: "4 segments, 12,800 tokens, 2 images, 3,072 patches"."""
    parts = [_plural(workload.num_segments, "segment"), _plural(workload.tokens, "token")]
    if workload.slots > workload.tokens:
        parts.append(
            f"{format_count(workload.slots)} slots (padding {format_share(1 - workload.tokens / workload.slots)})"
        )
    # the items of each kind of input, then the patches or frames of all kinds that share the unit
    rows = [(MODALITIES[name], sizes) for name, sizes in workload.media.items()]
    units: dict[str, int] = {}
    for row, sizes in rows:
        units[row.unit] = units.get(row.unit, 0) + row.units(sizes)
    for unit, number in units.items():
        parts += [row.number(len(sizes)) for row, sizes in rows if row.unit == unit and row.items_key]
        parts.append(f"{format_count(number)} {unit}")
    if len(workload.sources):
        parts.append(_plural(int(workload.sources.sum()), "source token"))
    if len(workload.past):
        parts.append(f"{format_count(int(workload.past.sum()))} cached tokens before them")
    if workload.logits is not None:
        parts.append(f"logits of {_plural(workload.logits, 'token')}")
    if len(workload.splits):
        from headway.count.splits import by_mode

        parts += [f"{format_count(tokens)} {mode}" for mode, tokens in by_mode(workload.splits).items()]
    return ", ".join(parts)


def _plural(number: int, noun: str) -> str:
    return f"{format_count(number)} {noun}{'' if number == 1 else 's'}"
