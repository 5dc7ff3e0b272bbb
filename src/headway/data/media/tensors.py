"""Tensors of media: of one sample, of several laid end to end, and as arguments of the model.

Tensor letters: P patches, D values per patch, M images or videos, A sounds, B mel bands, F feature frames.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from headway.models.video import Scale, normalised


class MediaTensors(NamedTuple):
    """Items of one kind, of a sample or of a pack.

    Attributes:
        sizes: grids (t, h, w) of each image or video [patches], shape (M, 3), or lengths of each sound [frames], (A,).
        features: what the model reads of all items: patches end to end, (P, D), as bytes of one frame or as the model
            reads them; features of each sound, (A, B, F). None where they are the processor's own tensors.
    """

    sizes: torch.Tensor
    features: torch.Tensor | None = None

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MediaTensors":
        """The same with every tensor changed: moved, or pinned."""
        return MediaTensors(change(self.sizes), None if self.features is None else change(self.features))


class MediaLayout(ABC):
    """Layout of the tensors of one kind of media in a pack, and the model's names of them.

    Attributes:
        rope_argument: what a model's rule of positions calls the sizes.
    """

    rope_argument: str

    @abstractmethod
    def joined(self, parts: Sequence[MediaTensors]) -> MediaTensors:
        """The tensors of several samples, joined for one pack."""

    @abstractmethod
    def arguments(self, media: MediaTensors, scale: Scale | None) -> dict[str, torch.Tensor]:
        """The model's arguments for a pack's items; empty where the processor's own tensors stand for them.

        Args:
            media: of the pack, where the model is.
            scale: factor and summand that turn bytes of patches into what the model reads, (D,) each.
        """


class PatchLayout(MediaLayout):
    """Patches of images or videos, end to end.

    Args:
        features: what the model calls the patches.
        sizes: what it calls the grids.
    """

    def __init__(self, features: str, sizes: str) -> None:
        self._features, self._sizes = features, sizes
        self.rope_argument = sizes

    def joined(self, parts: Sequence[MediaTensors]) -> MediaTensors:  # noqa: D102 - as the class above says
        features = [part.features for part in parts if part.features is not None]
        return MediaTensors(torch.cat([part.sizes for part in parts]), torch.cat(features) if features else None)

    def arguments(self, media: MediaTensors, scale: Scale | None) -> dict[str, torch.Tensor]:  # noqa: D102
        patches_PD = media.features
        if patches_PD is None:
            return {}
        if patches_PD.dtype == torch.uint8:
            assert scale is not None
            patches_PD = normalised(patches_PD, scale)
        return {self._features: patches_PD, self._sizes: media.sizes}


class SoundLayout(MediaLayout):
    """Features of sounds, each filled up to the longest, with a mask of the frames that are sound."""

    rope_argument = "audio_seqlens"

    def joined(self, parts: Sequence[MediaTensors]) -> MediaTensors:  # noqa: D102
        features = [part.features for part in parts if part.features is not None]
        longest = max(features_ABF.shape[2] for features_ABF in features)
        filled = [pad(features_ABF, (0, longest - features_ABF.shape[2])) for features_ABF in features]
        return MediaTensors(torch.cat([part.sizes for part in parts]), torch.cat(filled))

    def arguments(self, media: MediaTensors, scale: Scale | None) -> dict[str, torch.Tensor]:  # noqa: D102, ARG002
        assert media.features is not None
        frames_F = torch.arange(media.features.shape[2], device=media.sizes.device)
        return {"input_features": media.features, "feature_attention_mask": (frames_F < media.sizes[:, None]).long()}


LAYOUTS: dict[str, MediaLayout] = {
    "images": PatchLayout("pixel_values", "image_grid_thw"),
    "videos": PatchLayout("pixel_values_videos", "video_grid_thw"),
    "audio": SoundLayout(),
}
"""Layouts by the names of `headway.count.modalities`."""


def joined_media(samples: Sequence[Mapping[str, MediaTensors]]) -> dict[str, MediaTensors]:
    """Join the media of several samples, each kind by itself, in the order of the table."""
    by_kind = {name: [media[name] for media in samples if name in media] for name in LAYOUTS}
    return {name: LAYOUTS[name].joined(parts) for name, parts in by_kind.items() if parts}


def model_arguments(media: Mapping[str, MediaTensors], scale: Scale | None) -> dict[str, Any]:
    """The model's arguments for all media of a pack; see `MediaLayout.arguments`."""
    arguments: dict[str, Any] = {}
    for name, tensors in media.items():
        arguments |= LAYOUTS[name].arguments(tensors, scale)
    return arguments
