"""Build the step's workload from the options that several commands share, and describe it in words."""

from typing import TYPE_CHECKING, Any

from headway.cli.parse import parse_grids, parse_segments
from headway.errors import WorkloadError
from headway.report import format_count, format_share

if TYPE_CHECKING:
    from headway.count import CostModel, Workload


def build_workload(
    segments: str | None,
    images: str | None,
    videos: str | None,
    slots: int | None,
    sources: str | None = None,
    audio: str | None = None,
    past: str | None = None,
) -> "Workload":
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
        sources=[] if sources is None else parse_segments(sources, "--sources"),
        audio=[] if audio is None else parse_segments(audio, "--audio"),
        past=[] if past is None else parse_segments(past, "--past"),
    )


def check_vision_tokens(cost_model: "CostModel", workload: "Workload") -> None:
    """Refuse grids that need more tokens than the segments have.

    Raises:
        WorkloadError: they do.
    """
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


def workload_record(workload: "Workload") -> dict[str, Any]:
    """Put a workload's totals into JSON-ready numbers."""
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
    return ", ".join(parts)


def _plural(number: int, noun: str) -> str:
    return f"{format_count(number)} {noun}{'' if number == 1 else 's'}"
