"""Build the step's workload from the options that several commands share, and describe it in words."""

from typing import TYPE_CHECKING, Any

from headway.cli.output import warn
from headway.cli.parse import parse_grids, parse_latents, parse_segments, parse_splits
from headway.errors import WorkloadError
from headway.report import format_count, format_share

if TYPE_CHECKING:
    from headway.count import CostModel, Workload
    from headway.packing.lengths import LengthTable


def build_workload(
    segments: str | None,
    *,
    images: str | None = None,
    videos: str | None = None,
    slots: int | None = None,
    sources: str | None = None,
    audio: str | None = None,
    past: str | None = None,
    splits: str | None = None,
    latents: str | None = None,
    references: str | None = None,
    supervised: int | None = None,
) -> "Workload":
    """Build the step's workload from the options.

    Raises:
        WorkloadError: an option cannot be read, or the slots cannot hold the tokens.
    """
    runs = [] if splits is None else parse_splits(splits)
    if segments is None and splits is None:
        raise WorkloadError(
            "--segments is missing, so there is nothing to count. Give the lengths of the step's segments in tokens, "
            "those of images and videos included, for example --segments 4096*3,512."
        )
    from headway.count import Workload

    lengths = [sum(n for _, n in segment) for segment in runs] if segments is None else parse_segments(segments)
    tokens = sum(lengths)
    if slots is not None and slots < tokens:
        raise WorkloadError(
            f"--slots {slots} cannot hold the {tokens} tokens of --segments {segments or splits}: slots are all "
            f"positions computed, tokens and padding. Give {tokens} or more, or leave --slots out where nothing is "
            "padded."
        )
    return Workload(
        segments=lengths,
        images=[] if images is None else parse_grids("--images", images),
        videos=[] if videos is None else parse_grids("--videos", videos),
        slots=slots,
        sources=[] if sources is None else parse_segments(sources, "--sources"),
        audio=[] if audio is None else parse_segments(audio, "--audio"),
        past=[] if past is None else parse_segments(past, "--past"),
        splits=runs,
        latents=[] if latents is None else parse_latents("--latents", latents),
        references=[] if references is None else parse_latents("--references", references),
        supervised=supervised,
    )


def samples_in_turn(
    cost_model: "CostModel", segments: str | None, images: str | None, videos: str | None
) -> "LengthTable | None":
    """Read samples that a run repeats: their lengths, with the pictures and videos dealt to them in equal numbers.

    Args:
        cost_model: of the model.
        segments: length of each sample, those of its pictures included [tokens]; None where none were given.
        images: grids of all samples' pictures, those of the first sample first.
        videos: likewise.

    Returns:
        None where nothing was given.

    Raises:
        WorkloadError: pictures without lengths, that cannot be dealt evenly, or that need more tokens than there are.
    """
    import numpy as np

    from headway.count import Workload
    from headway.packing.lengths import LengthTable

    kinds = {name: text for name, text in (("--images", images), ("--videos", videos)) if text is not None}
    by_kind = {name: parse_grids(name, text) for name, text in kinds.items()}
    if segments is None:
        for name, grids in by_kind.items():
            needed = sum(t * h * w for t, h, w in grids) // cost_model.merge_group
            cost_model.count(
                Workload([needed], images=grids)
            )  # of a model without a tower that is the first thing to tell
            raise WorkloadError(
                f"{name} {kinds[name][:80]} says what the samples' pictures are, and nothing how long the samples are: "
                f"give --segments too, the tokens of pictures included; these take {format_count(needed)} tokens."
            )
        return None
    lengths = parse_segments(segments)
    for name, grids in by_kind.items():
        if len(grids) % len(lengths):
            raise WorkloadError(
                f"{name} names {format_count(len(grids))}, which cannot be dealt to the {format_count(len(lengths))} "
                f"samples of --segments {segments[:80]} in equal numbers. Give each sample as many, such as "
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
            f"--supervised {supervised} has no effect: {cost_model.name} runs its head on every token. Leave it out."
        )
    if not len(workload.splits):
        if workload.latent_patches:
            raise WorkloadError(
                "--latents and --references need --splits, which say who sees the latent patches: an image that is "
                'drawn is a noise run, a reference a full one, for example --splits "causal:102,noise:4098".'
            )
        return cost_model
    if "pairs:splits" not in drivers:
        warn(f"{cost_model.name}'s own mask is causal; its attention is counted under --splits in place of it.")
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
                f"The images hold {workload.patches} patches, each a token of a full run of {cost_model.name}, and "
                f"such runs have {room} tokens for them: R x C patches are a run full:N of N = R x C + 2 tokens."
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
        "images": workload.num_images,
        "videos": workload.num_videos,
        "patches": workload.patches,
        "source_tokens": int(workload.sources.sum()),
        "audio_clips": len(workload.audio),
        "audio_frames": int(workload.audio.sum()),
        "past_tokens": int(workload.past.sum()),
        "splits": by_mode(workload.splits),
        "latent_patches": workload.latent_patches,
        "drawn_patches": workload.drawn,
        "supervised": workload.supervised,
    }


def describe(workload: "Workload") -> str:
    """Say what a workload holds: "4 segments, 12,800 tokens, 2 images, 3,072 patches"."""
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
    if len(workload.sources):
        parts.append(_plural(int(workload.sources.sum()), "source token"))
    if len(workload.audio):
        parts += [_plural(len(workload.audio), "audio clip"), f"{format_count(int(workload.audio.sum()))} frames"]
    if len(workload.past):
        parts.append(f"{format_count(int(workload.past.sum()))} cached tokens before them")
    if len(workload.splits):
        from headway.count.splits import by_mode

        parts += [f"{format_count(tokens)} {mode}" for mode, tokens in by_mode(workload.splits).items()]
    if workload.latent_patches:
        parts.append(f"{format_count(workload.latent_patches)} latent patches")
    return ", ".join(parts)


def _plural(number: int, noun: str) -> str:
    return f"{format_count(number)} {noun}{'' if number == 1 else 's'}"
