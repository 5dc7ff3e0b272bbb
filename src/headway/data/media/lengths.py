"""What a sample occupies in a pack, known without decoding a pixel."""

from dataclasses import dataclass

from headway.packing.budget import Size

Grid = tuple[int, int, int]
"""(t, h, w) of an image or video [patches]."""


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """Sizes of one encoded sample.

    Attributes:
        tokens: length, placeholders of images, videos and sounds included [tokens].
        supervised: targets that the loss counts [tokens].
        first_target: place of the first supervised token that another one predicts, so at least 1 [tokens].
        media_end: one past the last placeholder of an image, video or sound; 0 without any [tokens].
        image_grids: (t, h, w) of each image [patches].
        video_grids: (t, h, w) of each video [patches].
        audio_lengths: feature frames of each sound [frames].
    """

    tokens: int
    supervised: int
    first_target: int
    media_end: int = 0
    image_grids: tuple[Grid, ...] = ()
    video_grids: tuple[Grid, ...] = ()
    audio_lengths: tuple[int, ...] = ()

    @property
    def patches(self) -> int:
        """Vision patches of images and videos, before merging [patches]."""
        return sum(t * h * w for t, h, w in self.image_grids + self.video_grids)

    @property
    def size(self) -> Size:
        """What the sample takes of a pack."""
        return Size(self.tokens, self.patches)
