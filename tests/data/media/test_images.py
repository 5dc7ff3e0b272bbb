"""Pictures as people have them: each kind is written by Pillow and read back as the upright RGB it stands for."""

import subprocess
import sys
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from headway.data import Encoder, Media
from headway.data.media.images import Picture
from headway.errors import ConfigError, DataError

RED, BLUE = (200, 30, 40), (20, 60, 220)


def halves(size=(24, 16), left=RED, right=BLUE):
    """A picture of two colours, side by side."""
    image = Image.new("RGB", size, right)
    image.paste(left, (0, 0, size[0] // 2, size[1]))
    return image


def saved(image, form, **options):
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def read(encoded, **options):
    with Picture(Media(data=encoded), "chats.jsonl, line 3", **options) as picture:
        decoded = picture.decode()
        assert (decoded.height, decoded.width) == picture.size
    assert decoded.mode == "RGB"
    return np.asarray(decoded).astype(int)


def near(pixel, colour, tolerance=0):
    return abs(np.asarray(pixel) - np.asarray(colour)).max() <= tolerance


@pytest.mark.parametrize(
    ("form", "options", "tolerance"),
    [
        ("PNG", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("BMP", {}, 0),
        ("TIFF", {}, 0),
        ("JPEG", {"quality": 95, "subsampling": 0}, 6),
        ("JPEG", {"quality": 95, "subsampling": 0, "progressive": True}, 6),
        ("GIF", {}, 1),
        ("PPM", {}, 0),
    ],
)
def test_common_formats(form, options, tolerance):
    pixels = read(saved(halves(), form, **options))
    assert pixels.shape == (16, 24, 3)
    assert near(pixels[4, 4], RED, tolerance)
    assert near(pixels[4, 20], BLUE, tolerance)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientations_are_applied(form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if form == "WEBP" else {"quality": 95, "subsampling": 0} if form == "JPEG" else {}
    pixels = read(saved(halves(), form, exif=exif, **options))
    # EXIF 2.32, tag 0x0112: where the stored row 0 and column 0 are to be seen. Red is stored on the left, column 0.
    red_is_at = {1: "left", 2: "right", 3: "right", 4: "left", 5: "top", 6: "top", 7: "bottom", 8: "bottom"}
    place = {"left": (8, 2), "right": (8, -2), "top": (2, 8), "bottom": (-2, 8)}[red_is_at[orientation]]
    assert pixels.shape == ((16, 24, 3) if orientation < 5 else (24, 16, 3))
    assert near(pixels[place], RED, 6)


def test_cmyk_is_converted():
    pixels = read(saved(halves(left=(255, 0, 0), right=(0, 0, 255)).convert("CMYK"), "JPEG", quality=95))
    assert near(pixels[4, 4], (255, 0, 0), 12)
    assert near(pixels[4, 20], (0, 0, 255), 12)


def test_transparency_is_laid_over_white():
    image = halves().convert("RGBA")
    image.putalpha(Image.new("L", image.size, 255))
    image.paste((0, 0, 0, 0), (0, 0, 4, 16))
    image.paste((*RED, 51), (4, 0, 8, 16))
    pixels = read(saved(image, "PNG"))
    assert near(pixels[4, 1], (255, 255, 255))
    # 51 of 255 opaque: a fifth of the colour, four fifths of white.
    assert near(pixels[4, 6], [0.2 * c + 0.8 * 255 for c in RED], 1)
    assert near(pixels[4, 10], RED)
    assert near(pixels[4, 20], BLUE)


@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_a_palette_with_a_transparent_colour(form):
    image = halves().quantize(4)
    background = image.getpixel((2, 2))
    pixels = read(saved(image, form, transparency=background))
    assert near(pixels[4, 2], (255, 255, 255))
    assert near(pixels[4, 20], BLUE, 2)


def test_grey_with_alpha_and_a_colour_that_is_transparent():
    grey = Image.new("LA", (8, 8), (100, 0))
    assert near(read(saved(grey, "PNG"))[4, 4], (255, 255, 255))
    keyed = read(saved(halves(), "PNG", transparency=RED))
    assert near(keyed[4, 4], (255, 255, 255))
    assert near(keyed[4, 20], BLUE)


def test_16_bit_grey_is_scaled_and_not_clipped():
    levels = np.array([[0, 257, 128 * 257, 65535]], np.uint16)
    for form in ("PNG", "TIFF"):
        assert read(saved(Image.fromarray(levels), form))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_numbers_without_an_agreed_white_are_refused():
    floats = Image.fromarray(np.array([[0.0, 0.5]], np.float32))
    with pytest.raises(DataError, match="floating-point numbers"):
        read(saved(floats, "TIFF"))
    wide = Image.fromarray(np.array([[0, 70000]], np.int32))
    with pytest.raises(DataError, match="run from 0 to 70000"):
        read(saved(wide, "TIFF"))


def test_one_bit_pictures():
    image = Image.new("1", (8, 8))
    image.paste(1, (4, 0, 8, 8))
    assert read(saved(image, "PNG"))[0, :, 1].tolist() == [0] * 4 + [255] * 4


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_read(form):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if form == "WEBP" else {}
    encoded = saved(frames[0], form, save_all=True, append_images=frames[1:], duration=40, **options)
    with Image.open(BytesIO(encoded)) as opened:
        assert opened.n_frames == 3
    assert near(read(encoded)[4, 4], (255, 0, 0))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
@pytest.mark.parametrize("keep", [0, 1, 30, 0.5, 0.95])
def test_a_picture_that_is_cut_off_is_refused(form, keep):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    whole = saved(image, form)
    kept = keep if isinstance(keep, int) else int(len(whole) * keep)
    with pytest.raises(
        DataError, match=rf"^chats.jsonl, line 3: the image {kept} bytes within the sample \({kept} bytes"
    ):
        read(whole[:kept])


@given(
    form=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"]),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8),
)
@settings(max_examples=300)
def test_damage_anywhere_gives_pixels_or_one_clear_error(form, changes):
    rng = np.random.default_rng(1)
    damaged = bytearray(saved(Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)), form))
    for place, value in changes:
        damaged[place % len(damaged)] = value
    try:
        read(bytes(damaged), max_pixels=10_000)
    except DataError as error:
        said = str(error)
    else:
        said = None
    assert said is None or said.startswith("chats.jsonl, line 3: the image ")


def test_a_decompression_bomb_is_refused_from_its_header(monkeypatch):
    bomb = saved(Image.new("1", (5000, 4000)), "PNG")
    assert len(bomb) < 5000  # 20 million pixels of nothing
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("pixels were decoded"))
    with pytest.raises(DataError, match=r"5000 x 4000 pixels, more than the limit of 10000000"):
        Picture(Media(data=bomb), "here", max_pixels=10_000_000)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_beyond_pillows_own_limit():
    giant = saved(Image.new("1", (20_000, 5_000)), "PNG")  # 100 million pixels
    with pytest.raises(DataError, match="20000 x 5000 pixels, more than the limit of 89478485"):
        Picture(Media(data=giant), "here")
    with Picture(Media(data=giant), "here", max_pixels=100_000_000) as picture:
        assert picture.size == (5_000, 20_000)


def chunks_of(png):
    place = 8
    while place < len(png):
        size = int.from_bytes(png[place : place + 4], "big")
        yield png[place : place + 12 + size]
        place += 12 + size


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("write", ["add_text", "add_itxt"])
def test_long_texts_of_a_png_are_left_out_and_its_orientation_stays(write, is_late):
    """ComfyUI's workflows: texts that decompress beyond Pillow's bound, before the pixels or behind them."""
    texts = PngInfo()
    getattr(texts, write)("workflow", "node " * 500_000, zip=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    png = saved(halves(), "PNG", pnginfo=texts, exif=exif)
    if is_late:
        chunks = list(chunks_of(png))
        long = next(chunk for chunk in chunks if b"workflow" in chunk)
        png = png[:8] + b"".join(chunk for chunk in chunks[:-1] if chunk is not long) + long + chunks[-1]
    with pytest.raises(ValueError, match="MAX_TEXT_CHUNK"), Image.open(BytesIO(png)) as image:
        image.load()
    turned = ImageOps.exif_transpose(Image.open(BytesIO(saved(halves(), "PNG", exif=exif))))
    assert (read(png) == np.asarray(turned).astype(int)).all()


@pytest.mark.parametrize(("top", "found"), [(4095, 4095), (65535, 65535), (None, None)])
def test_the_range_of_16_bit_grey_is_known(top, found):
    image = halves() if top is None else Image.fromarray(np.array([[0, top]], np.uint16))
    with Picture(Media(data=saved(image, "PNG")), "here") as picture:
        assert picture.brightest_of_16_bits() == found


@pytest.mark.parametrize("limit", [0, -1, 10**9])
def test_a_limit_that_cannot_take_effect_is_refused(processor, limit):
    with pytest.raises(ConfigError, match=rf"max_image_pixels is {limit}; allowed are 1 to 178956970"):
        Encoder(processor, max_image_pixels=limit)


def test_files_do_not_stay_open(tmp_path):
    """A run over many damaged pictures must not use up the process's file descriptors."""
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 40)
    halves().save(tmp_path / "good.png")
    script = f"""
import gc, os, warnings
warnings.simplefilter("error")
gc.disable()
from headway.data import Media
from headway.data.media.images import Picture
from headway.errors import DataError
def count():
    for name in ("good.png", "bad.png"):
        for _ in range(20):
            try:
                with Picture(Media({str(tmp_path)!r} + "/" + name), "here") as picture:
                    picture.decode()
            except DataError:
                pass
    return len(os.listdir("/proc/self/fd"))
assert count() == count()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_files_and_urls_are_read_alike(tmp_path):
    halves().save(tmp_path / "a.png")
    for path in (str(tmp_path / "a.png"), f"file://{tmp_path}/a.png"):
        with Picture(Media(path), "here") as picture:
            assert near(np.asarray(picture.decode())[4, 4], RED)
