"""One encoded sample: what a model reads of it, as tensors on the CPU.

Tensor letters: S tokens of one sample, R rows of positions (1, or 3 for M-RoPE), P patches, D values per patch, M
images or videos, A sounds, F feature frames; the M of AMF is mel bands.
"""

from dataclasses import dataclass, field, fields, replace

import torch

from headway.data.media.lengths import SampleLengths
from headway.data.samples import Origin
from headway.packing.budget import Size

IGNORED = -100  # the label that PyTorch's cross entropy leaves out


def _no_grids() -> torch.Tensor:
    return torch.zeros(0, 3, dtype=torch.long)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSample:
    """One chat or document as tensors on the CPU.

    Attributes:
        input_ids_S: token ids, placeholders expanded.
        labels_S: the token's own id where it is supervised, else -100; not shifted.
        position_ids_RS: positions; one row, or three for M-RoPE.
        origin: where the sample came from.
        token_types_S: 0 for text, 1 for images, 2 for videos, 3 for sounds; None for models that do not read it.
        pixels_PD: patches of all images, end to end; bytes of one frame where the encoder has a `pixel_scale`, else
            what the model reads; None without images.
        grids_M3: (t, h, w) of each image [patches].
        video_pixels_PD: patches of all videos, likewise, with all their frames.
        video_grids_M3: (t, h, w) of each video [patches].
        audio_features_AMF: features of each sound, as the model reads them; None without sounds.
        audio_lengths_A: feature frames that are sound and not padding [frames].
        media_end: one past the last placeholder of an image, video or sound; 0 without any [tokens].
    """

    input_ids_S: torch.Tensor
    labels_S: torch.Tensor
    position_ids_RS: torch.Tensor
    origin: Origin
    token_types_S: torch.Tensor | None = None
    pixels_PD: torch.Tensor | None = None
    grids_M3: torch.Tensor = field(default_factory=_no_grids)
    video_pixels_PD: torch.Tensor | None = None
    video_grids_M3: torch.Tensor = field(default_factory=_no_grids)
    audio_features_AMF: torch.Tensor | None = None
    audio_lengths_A: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    media_end: int = 0

    @property
    def where(self) -> str:
        """File and place, for messages to people."""
        return str(self.origin)

    @property
    def tokens(self) -> int:
        """Length [tokens]."""
        return self.input_ids_S.shape[0]

    @property
    def patches(self) -> int:
        """Vision patches of images and videos, before merging [patches]."""
        return sum(pixels.shape[0] for pixels in (self.pixels_PD, self.video_pixels_PD) if pixels is not None)

    @property
    def size(self) -> Size:
        """What the sample takes of a pack."""
        return Size(self.tokens, self.patches)

    @property
    def num_supervised(self) -> int:
        """Targets that the loss counts: supervised tokens, except a first one, which nothing predicts."""
        return int((self.labels_S[1:] != IGNORED).sum())

    @property
    def num_bytes(self) -> int:
        """Memory held [bytes]."""
        held = (getattr(self, part.name) for part in fields(self))
        return sum(value.numel() * value.element_size() for value in held if isinstance(value, torch.Tensor))

    @property
    def lengths(self) -> SampleLengths:
        """The sizes that `Encoder.measure` gives of the same sample."""
        targets = (self.labels_S[1:] != IGNORED).nonzero()
        return SampleLengths(
            tokens=self.tokens,
            supervised=len(targets),
            first_target=int(targets[0]) + 1 if len(targets) else 0,
            media_end=self.media_end,
            image_grids=tuple((t, h, w) for t, h, w in self.grids_M3.tolist()),
            video_grids=tuple((t, h, w) for t, h, w in self.video_grids_M3.tolist()),
            audio_lengths=tuple(self.audio_lengths_A.tolist()),
        )

    def truncated(self, tokens: int) -> "EncodedSample | None":
        """The sample cut to its first tokens, or None if that would cut its media or leave nothing to learn."""
        if tokens < self.media_end:
            return None
        types = None if self.token_types_S is None else self.token_types_S[:tokens].clone()
        cut = replace(
            self,
            input_ids_S=self.input_ids_S[:tokens].clone(),
            labels_S=self.labels_S[:tokens].clone(),
            position_ids_RS=self.position_ids_RS[:, :tokens].clone(),
            token_types_S=types,
        )
        return cut if cut.num_supervised else None
