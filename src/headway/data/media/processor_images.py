"""Images as a model's own processor gives them: any tensors, and any text in place of a placeholder.

This is the general way, for models whose processors give more than patches and their grids. What a processor writes,
which tensors it makes, how those of several samples join and whether a sample's images depend on each other is found
out by running it on three pictures, apart and together.
"""

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image as Pillow

from headway.data.media.joining import Joinable, Joining, joined_tensors, joining_of
from headway.data.samples import Grid
from headway.errors import ConfigError

SMALLEST_TRIED = (41, 67)
"""(width, height) of a picture that every processor here has been run on [pixels]."""

# Pictures that a processor is tried with [pixels]: of unlike proportions, and so of other numbers of tiles.
_TRIED_WH = (SMALLEST_TRIED, (797, 531), (251, 31))
# Options of a run that is after sizes alone: pixels are neither interpolated nor normalised.
_SIZES_ALONE: dict[str, Any] = {"resample": Pillow.Resampling.NEAREST, "do_rescale": False, "do_normalize": False}
REFUSALS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError)
"""Exceptions that processors raise on pictures that they cannot read."""

_MOST_CACHED = 1 << 16  # combinations of sizes of which the lengths are kept
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels")

_Size = tuple[int, int]


def reads_processed_images(processor: Any) -> bool:
    """Tell whether a model's images are as its own processor gives them, rather than patches with grids alone."""
    images = getattr(processor, "image_processor", None)
    return images is not None and "image_grid_thw" not in getattr(images, "model_input_names", ())


class ImageLengths(NamedTuple):
    """Tokens and patches of a sample's pictures, by their sizes alone.

    Attributes:
        written: text in place of each picture's placeholder.
        grids: (frames, rows, columns) of patches that the vision tower computes, at least one for each picture.
    """

    written: tuple[str, ...]
    grids: tuple[Grid, ...]

    @classmethod
    def total(cls, parts: Sequence["ImageLengths"]) -> "ImageLengths":
        """The lengths of several groups of pictures together."""
        written, grids = zip(*parts, strict=True)
        return cls(tuple(chain.from_iterable(written)), tuple(chain.from_iterable(grids)))


class ProcessedImages:
    """Runs a model's own processor on the images of a sample.

    Args:
        processor: the model's own.
        patch: side of a patch of the model's vision tower [pixels]; None where that is not known.

    Attributes:
        rules: how each tensor of a sample joins those of others.
        repeated: special tokens that the processor writes many times over for one picture.
        placeholder_ids: tokens that count as image in `types_name`.
        types_name: argument of the model that tells image from text, 1 on placeholders; None where it takes none.
        types_answers: whether that argument is 1 from the first answer on instead (PaliGemma).
        rewrites_prompts: whether the processor adds to a prompt more than images (PaliGemma: the beginning of text
            behind the last image, and a line's end).

    Raises:
        ConfigError: the processor cannot be run on pictures, or its tensors join by no rule.
    """

    def __init__(self, processor: Any, patch: int | None) -> None:
        self.processor, self.patch = processor, patch
        self._word = prompt_word(processor, "image") or ""
        self._cache: OrderedDict[tuple[_Size, ...], ImageLengths] = OrderedDict()
        self._texts: dict[str, str] = {}  # many sizes give the same text, which is kept once
        # Noise: joined tensors are compared by values that no two pictures share.
        noise = np.random.default_rng(0)
        tried = [
            Pillow.fromarray(noise.integers(1, 256, (height, width, 3), dtype=np.uint8)) for width, height in _TRIED_WH
        ]
        try:
            self.placeholder_ids = tuple(token for token in processor.image_token_ids if token is not None)
            # Pictures each in a run of its own, all in one text, and all in texts of their own.
            single_runs = [self._run([[picture]]) for picture in tried]
            one_text, own_texts = self._run([tried]), self._run([[picture] for picture in tried])
            self.types_name, self.types_answers = self._types(tried[0])
            # A processor that changes words beside the picture (adds prefixes, say) is found by a text of its own.
            question = f"{self._word}Qx7?"
            self.rewrites_prompts = self._run([tried[:1]], text=[question]).text != (question,)
        except REFUSALS as error:
            raise ConfigError(
                f"The processor {type(processor).__name__} could not be run on a picture, so images of this model "
                f"cannot be trained (docs/models.md lists families that can): {type(error).__name__}: {error}"
            ) from error
        written = [text for run in single_runs for text in run.written]
        rules = _rules(single_runs, one_text)
        # Pictures of one text are mostly the same as apart; if they are not (LLaVA-OneVision), samples still are.
        self._apart = None not in rules.values() and list(one_text.written) == written
        if not self._apart:
            rules = _rules(single_runs, own_texts)
        self.rules: dict[str, Joining] = {name: rule for name, rule in rules.items() if rule is not None}
        # A tensor without a rule of joining cannot be packed: refused when opened, not at some later sample.
        if len(self.rules) < len(rules):
            name = min(rules.keys() - self.rules.keys())
            shapes = [
                tuple(run.tensors[name].shape) if name in run.tensors else None for run in [*single_runs, own_texts]
            ]
            raise ConfigError(
                f"The processor {type(processor).__name__} gives {name} of shapes {shapes[:-1]} for samples alone and "
                f"of {shapes[-1]} for all of them, which follows no rule by which Headway can pack it. docs/models.md "
                "lists the families that train."
            )
        # Tokens that a processor repeats are written once and counted, which spares the tokenizer.
        special = [str(token) for token in processor.tokenizer.added_tokens_decoder.values()]
        self.repeated = tuple(token for token in special if any(token * 2 in text for text in written))
        lengths = [self._lengths(run) for run in single_runs]  # if patches cannot be told, this says so
        self._options = _SIZES_ALONE if self._tell_sizes(tried, lengths) else {}

    def read(self, pictures: Sequence[Pillow.Image]) -> tuple[ImageLengths, dict[str, Joinable]]:
        """The text in place of a sample's pictures, their grids, and their tensors.

        Args:
            pictures: at least one.

        Raises:
            REFUSALS: the processor cannot read one.
        """
        groups = [[picture] for picture in pictures] if self._apart else [list(pictures)]
        runs = [self._run([group]) for group in groups]
        tensors = [{name: Joinable(run.tensors[name], rule) for name, rule in self.rules.items()} for run in runs]
        return ImageLengths.total([self._lengths(run) for run in runs]), joined_tensors(tensors)

    def lengths(self, sizes: Sequence[_Size]) -> ImageLengths:
        """Lengths that `read` gives for pictures of these (height, width), by blank ones; cached by size.

        Raises:
            REFUSALS: the processor cannot read one.
        """
        if self._apart and len(sizes) > 1:
            return ImageLengths.total([self.lengths([size]) for size in sizes])
        key = tuple(sizes)
        if key in self._cache:
            return self._cache[key]
        blank = [Pillow.new("RGB", (width, height)) for height, width in sizes]
        written, grids = self._lengths(self._run([blank], **self._options))
        lengths = ImageLengths(tuple(self._texts.setdefault(text, text) for text in written), grids)
        while len(self._cache) >= _MOST_CACHED:
            self._cache.popitem(last=False)
        self._cache[key] = lengths
        return lengths

    def prompt(self, text: str) -> str:
        """A prompt with all that the processor adds to it, but for what stands in place of its images."""
        images = text.count(self._word)
        if not self.rewrites_prompts or not images:
            return text
        (rewritten,) = self._run([[Pillow.new("RGB", SMALLEST_TRIED)] * images], text=[text]).text
        return rewritten

    def grids_of(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Grid, ...]:
        """(frames, rows, columns) of patches that the vision tower computes, by the tensors that tell them.

        Which tensor tells is that of the form of input by which `headway.tracing` counts the tower
        (headway/tracing/inputs): grids or sizes where they are given, else frames of pixels.

        Raises:
            ConfigError: no tensor does.
        """
        pixels = next((value for name, value in tensors.items() if name.endswith("pixel_values")), None)
        for name, shapes_MX in tensors.items():
            if name == "image_grid_thw":
                return tuple((t, h, w) for t, h, w in shapes_MX.tolist())
            if name in ("spatial_shapes", "target_sizes", "image_grid_hw", "image_grid_hws"):
                return tuple((1, h, w) for h, w in shapes_MX.tolist())
            if name == "image_position_ids":  # columns and rows, -1 behind the last
                return tuple((1, int(y) + 1, int(x) + 1) for x, y in shapes_MX.amax(1).tolist())
        if pixels is None or pixels.dim() < 4 or self.patch is None:
            raise ConfigError(
                f"How many patches the model's vision tower computes of a picture cannot be told: its processor "
                f"{type(self.processor).__name__} gives {', '.join(tensors)}, and its configuration "
                f"{'no patch_size' if self.patch is None else f'patches of {self.patch} pixels'}."
            )
        if pixels.dim() == 4 and "image_sizes" in tensors:
            sizes_M2 = tensors["image_sizes"] // self.patch
            return tuple((1, h, w) for h, w in sizes_M2.tolist())
        rows, columns = (side // self.patch for side in pixels.shape[-2:])
        if pixels.dim() == 4:  # the frames, tiles or crops of one picture
            return ((pixels.shape[0], rows, columns),)
        return ((pixels.shape[1:-3].numel(), rows, columns),) * pixels.shape[0]

    def _lengths(self, run: "_Run") -> ImageLengths:
        return ImageLengths(run.written, self.grids_of(run.tensors))

    def _tell_sizes(self, pictures: list[Pillow.Image], expected: list[ImageLengths]) -> bool:
        """Tell whether runs after sizes alone give what whole runs give."""
        try:
            return [self._lengths(self._run([[picture]], **_SIZES_ALONE)) for picture in pictures] == expected
        except REFUSALS:
            return False

    def _run(self, samples: list[list[Pillow.Image]], text: list[str] | None = None, **options: Any) -> "_Run":
        """Run the processor, and note what it would write in place of placeholders.

        Args:
            samples: pictures of each text.
            text: texts with a placeholder for each; placeholders alone if None.
            **options: of the processor.
        """
        written: list[str] = []
        prompts: list[str] = []

        def note(text: list[str], images_replacements: Sequence[str] = (), *_: Any, **__: Any) -> Any:
            written.extend(images_replacements)
            prompts.extend(text)
            return text, [[] for _ in text]

        noting = copy.copy(self.processor)
        noting.get_text_with_replacements = note
        text = text or [" ".join([self._word] * len(sample)) for sample in samples]
        out = noting(text=text, images=samples, return_tensors="pt", **options)
        if len(written) != sum(map(len, samples)):
            raise ValueError(f"it writes {len(written)} texts in place of {sum(map(len, samples))} pictures")
        return _Run(
            tuple(written),
            tuple(prompts),
            {name: _as_tensor(value) for name, value in out.items() if name not in _OF_TEXT},
        )

    def _types(self, picture: Pillow.Image) -> tuple[str | None, bool]:
        """Name of the argument that tells image from text, and whether it marks answers instead."""
        out = self.processor(text=[self._word], images=[[picture]], return_tensors="pt")
        image = torch.isin(out["input_ids"], torch.tensor(self.placeholder_ids))
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in out and torch.equal(out[name].bool(), image):
                return name, False
        name = "token_type_ids"
        of_text = list(self.processor.tokenizer.model_input_names)
        answers = list(self.processor.model_input_names).count(name) > of_text.count(name)
        return (name, True) if answers else (None, False)


def prompt_word(processor: Any, kind: str) -> str | None:
    """Word that stands in a prompt for a picture, video or sound: its token, or a word for it (Qianfan-OCR's)."""
    word = getattr(processor, f"{kind}_placeholder_token", None) or getattr(processor, f"{kind}_token", None)
    return None if word is None else str(word)


def _as_tensor(value: Any) -> torch.Tensor:
    """A tensor in the types that packs have: Llama 4's processor gives bfloat16, whatever the model computes in."""
    tensor = torch.as_tensor(value)
    return tensor.float() if tensor.is_floating_point() else tensor


class _Run(NamedTuple):
    """Result of a processor: the words in place of each picture, its texts before that, and its tensors."""

    written: tuple[str, ...]
    text: tuple[str, ...]
    tensors: dict[str, torch.Tensor]


def _rules(single_runs: Sequence[_Run], together: _Run) -> dict[str, Joining | None]:
    """Find the rule by which each tensor of several samples makes the one of all; None where there is none."""
    runs = [*single_runs, together]
    rules: dict[str, Joining | None] = dict.fromkeys(name for run in runs for name in run.tensors)
    for name in rules:
        if all(name in run.tensors for run in runs):
            rules[name] = joining_of([run.tensors[name] for run in single_runs], together.tensors[name])
    return rules
