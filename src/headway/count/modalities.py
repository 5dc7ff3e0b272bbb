"""The kinds of input beside text, a row for each.

Workloads, drivers, the checks of a cost model, records, options of the commands, the length index and packs loop over
these rows. A further kind of input is a row here, a function that opens it (in `OPENERS` of
`headway.data.media.media_reader`), a class that lays its tensors out in a pack
(`headway.data.media.tensors.MediaLayout`), and one that hands it to a model that is traced
(`headway.tracing.inputs.form.InputForm`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headway.count.integers import NO_GRIDS, NONE, Ints, IntsLike, grids_of, lengths_of

Shape = Literal["grids", "lengths"]


@dataclass(frozen=True)
class Modality:
    """One kind of input.

    Attributes:
        name: of the workload's argument, such as `images`; `--images` is the commands' option.
        kind: of one item, such as `image`: of a part of a chat, of its placeholder, and before a driver's name.
        noun: one item in a sentence, such as "audio clip".
        plural: several of them, where that is not the noun with an s.
        tower: what reads it, as the components of a cost model name it.
        shape: whether an item's size is a grid (t, h, w) or a length.
        unit: what a size counts, such as "patches".
        items_key: name of the number of items in records; None where records don't tell it.
        units_key: name of the number of units in records; kinds of one tower may share it.
        items_driver: driver that counts items; lengths need one.
        column: of the length index that holds the sizes of each row's items; "" for kinds that chats do not hold.
        extensions: of files that hold one item.
        metavar: of the option, in `--help`.
        help: of the option.
        example: of the option's value, for errors.
    """

    name: str
    kind: str
    noun: str
    tower: str
    shape: Shape
    unit: str
    items_key: str | None = None
    units_key: str | None = None
    items_driver: str = ""
    plural: str = ""
    column: str = ""
    extensions: tuple[str, ...] = ()
    metavar: str = ""
    help: str = ""
    example: str = ""

    def __post_init__(self) -> None:
        if self.shape == "lengths" and not self.items_driver:
            raise ValueError(f"{self.name} comes in lengths: name the driver that counts its items (items_driver).")

    def number(self, items: int) -> str:
        """Say how many items there are: "1 audio clip", "2 images"."""
        return f"{items:,} {self.noun if items == 1 else self.nouns}"

    @property
    def nouns(self) -> str:
        """Several items in a sentence, such as "audio clips"."""
        return self.plural or f"{self.noun}s"

    @property
    def none(self) -> Ints:
        """The sizes of no item, shape (0, 3) or (0,)."""
        return NO_GRIDS if self.shape == "grids" else NONE

    def read(self, sizes: IntsLike) -> Ints:
        """Check the sizes of items: grids (M, 3), or lengths (M,), each at least 1.

        Raises:
            WorkloadError: they are not.
        """
        if self.shape == "grids":
            return grids_of(sizes, self.name)
        return lengths_of(sizes, self.name, f"a length is at least 1 [{self.unit}]")

    def units(self, sizes: Ints) -> int:
        """Count the units of all items: patches of grids, or frames of lengths."""
        return int((sizes.prod(axis=1) if self.shape == "grids" else sizes).sum())


MODALITIES: dict[str, Modality] = {}
"""All kinds of input beside text, by their names."""


def register(modality: Modality) -> None:
    """Add a kind of input."""
    MODALITIES[modality.name] = modality


def in_chats() -> dict[str, Modality]:
    """Return the kinds of input that a chat may hold, by the names of one item: image, video, audio."""
    return {row.kind: row for row in MODALITIES.values() if row.column}


def media_towers() -> tuple[str, ...]:
    """Return the towers of inputs beside the text, in the order of the table: vision, audio."""
    return tuple(dict.fromkeys(row.tower for row in MODALITIES.values() if row.tower != "latents"))


def totals(media: Mapping[str, Ints]) -> dict[str, int]:
    """Add up the items and units of each kind of input, by their names in records; 0 where there are none.

    >>> totals({"audio": MODALITIES["audio"].read([400, 80])})
    {'images': 0, 'videos': 0, 'audio_clips': 2, 'patches': 0, 'audio_frames': 480, 'latent_patches': 0}
    """
    numbers = [(row.items_key, len(media.get(row.name, ()))) for row in MODALITIES.values()]
    numbers += [(row.units_key, row.units(media.get(row.name, row.none))) for row in MODALITIES.values()]
    sums: dict[str, int] = {}
    for key, number in numbers:
        if key is not None:
            sums[key] = sums.get(key, 0) + number
    return sums


# formats of sizes, as `--help` shows them; `headway.cli.parse` reads each
GRID = "TxHxW*N,..."
LENGTH = "L*N,L,..."
LATENT = "HxW*N,..."
for _row in (
    Modality(
        name="images",
        kind="image",
        noun="image",
        tower="vision",
        shape="grids",
        unit="patches",
        items_key="images",
        units_key="patches",
        column="image_grids",
        extensions=("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"),
        metavar=GRID,
        help="Image grids [patches, before merging], or WxHpx in pixels, as 1024x768px; *N repeats one N times.",
        example="1x32x48*2",
    ),
    Modality(
        name="videos",
        kind="video",
        noun="video",
        tower="vision",
        shape="grids",
        unit="patches",
        items_key="videos",
        units_key="patches",
        column="video_grids",
        extensions=("mp4", "mkv", "webm", "avi", "mov", "m4v", "mpg", "mpeg"),
        metavar=GRID,
        help="Video grids [patches, before merging]; *N repeats a grid N times.",
        example="8x32x48",
    ),
    Modality(
        name="audio",
        kind="audio",
        noun="audio clip",
        tower="audio",
        shape="lengths",
        unit="frames",
        items_key="audio_clips",
        units_key="audio_frames",
        items_driver="clips",
        column="audio_lengths",
        extensions=("wav", "mp3", "flac", "ogg", "opus", "m4a"),
        metavar=LENGTH,
        help="Audio clips that lie in the segments [feature frames]; *N repeats one.",
        example="3000*2",
    ),
    # each of their patches is a token of the text too, of a run that may hold it
    Modality(
        name="latents",
        kind="latent",
        noun="latent image",
        tower="latents",
        shape="grids",
        unit="latent patches",
        units_key="latent_patches",
        metavar=LATENT,
        help="Grids of latent patches that are denoised, a token each; *N repeats one.",
        example="64x64*2",
    ),
    Modality(
        name="references",
        kind="reference",
        noun="reference",
        tower="latents",
        shape="grids",
        unit="latent patches",
        units_key="latent_patches",
        metavar=LATENT,
        help="Grids of clean latent patches that are read, as edits do; *N repeats one.",
        example="32x32",
    ),
):
    register(_row)
