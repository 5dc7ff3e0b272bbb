"""Patches of bytes, times scale plus shift, are what each model's own image processor gives; or they are its floats."""

import importlib
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from headway.data import Media
from headway.data.media.images import Picture
from headway.data.media.media_reader import ImagePatches
from headway.errors import ConfigError
from headway.models.video import normalised

SIZES = [(301, 410), (20, 33), (900, 1300), (56, 560)]


def processor_of(family, **settings):
    module = importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    (name,) = [name for name in module.__all__ if name.endswith("ImageProcessorPil")]
    return getattr(module, name)(**settings)


def pictures():
    rng = np.random.default_rng(3)
    for height, width in SIZES:
        file = BytesIO()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
        yield Picture(Media(data=file.getvalue()), "here")


@pytest.mark.parametrize(
    ("family", "in_bytes"),
    [
        ("qwen2_vl", True),
        ("glm4v", True),
        ("video_llama_3", True),
        ("cohere_compass", True),
        ("paddleocr_vl", False),  # patches are little pictures
        ("cosmos3_edge", False),  # channels innermost
    ],
)
def test_patches_are_those_of_the_models_own_processor(family, in_bytes):
    processor = processor_of(family)
    ours = ImagePatches(processor)
    assert (ours.scale is not None) == in_bytes
    opened = list(pictures())
    theirs = processor(images=[picture.decode() for picture in opened], return_tensors="pt")
    assert [list(ours.grid(*picture.size)) for picture in opened] == theirs["image_grid_thw"].tolist()
    patches = ours.patches(opened)
    assert patches.dtype == (torch.uint8 if in_bytes else torch.float32)
    if ours.scale is not None:
        patches = normalised(patches, ours.scale)
    assert torch.allclose(patches, theirs["pixel_values"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        {"temporal_patch_size": 1, "merge_size": 1},
        {"do_normalize": False},
        {"resample": Image.Resampling.BILINEAR, "image_mean": [0.1, 0.5, 0.7]},
        {"size": {"shortest_edge": 100_000, "longest_edge": 200_000}},
    ],
)
def test_settings_of_the_folder_are_followed(settings):
    processor = processor_of("qwen2_vl", **settings)
    ours = ImagePatches(processor)
    opened = list(pictures())
    theirs = processor(images=[picture.decode() for picture in opened], return_tensors="pt")
    patches = ours.patches(opened)
    assert patches.dtype == torch.uint8
    assert torch.allclose(normalised(patches, ours.scale), theirs["pixel_values"], rtol=0, atol=1e-6)


def test_a_processor_that_does_not_resize_keeps_its_floats():
    assert ImagePatches(processor_of("qwen2_vl", do_resize=False)).scale is None


def test_models_without_grids_are_refused_by_name():
    with pytest.raises(ConfigError, match="GotOcr2ImageProcessorPil gives no patch grids"):
        ImagePatches(processor_of("got_ocr2")).grid(40, 40)
