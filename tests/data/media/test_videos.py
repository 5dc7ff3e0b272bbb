"""Videos written by PyAV, read as transformers' own rules for Qwen2-VL and Qwen3-VL say."""

from io import BytesIO

import av
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from headway.data import Chat, Encoder, Media, Message, Origin, TextPart
from headway.data.media.videos import Clip
from headway.data.samples import ImagePart, VideoPart
from headway.errors import DataError
from headway.models import load_model, load_processor, rope_index
from headway.models.video import VideoProcessor
from headway.synthetic.processor import write_processor
from helpers.data import sound
from helpers.data import video as written
from helpers.models import tiny_config

HERE = Origin("made", "made.jsonl", 0, "line 1")
LIMIT = 10**8
QWEN2, QWEN3 = "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"


def brightness(clip, places):
    return [frame[8, 8].mean() for frame in clip.frames(places)]


def chat(*parts):
    return Chat((Message("user", (*parts, TextPart("Which?"))), Message("assistant", (TextPart("Two."),))), HERE)


@pytest.mark.parametrize(
    ("form", "codec"),
    [("mp4", "libx264"), ("mp4", "mpeg4"), ("matroska", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mjpeg")],
)
def test_frames_rate_and_size_are_known_and_any_frame_is_found(form, codec):
    clip = Clip(written(form=form, codec=codec), "here", LIMIT)
    assert (clip.num_frames, clip.fps, clip.size) == (20, 8.0, (48, 64))
    # Lossy colour: each frame is within 4 of its brightness, and frames lie 5 apart.
    assert brightness(clip, [0, 7, 7, 19]) == pytest.approx([0, 35, 35, 95], abs=4)


def test_frames_that_no_header_counts_are_counted_by_packets():
    media = written(form="matroska")
    with av.open(BytesIO(media.data)) as container:
        assert container.streams.video[0].frames == 0
    assert Clip(media, "here", LIMIT).num_frames == 20


@pytest.mark.parametrize(("rotation", "dark"), [(0, (8, 8)), (90, (-8, 8)), (180, (-8, -8)), (-90, (8, -8))])
def test_rotated_videos_are_turned_upright(rotation, dark):
    """The stored left half is dark; turned counter-clockwise by 90 degrees, left becomes bottom."""
    clip = Clip(written(num_frames=3, rotation=rotation), "here", LIMIT)
    assert clip.size == ((48, 64) if rotation % 180 == 0 else (64, 48))
    (frame,) = clip.frames([0])
    assert frame.shape == (*clip.size, 3)
    assert frame[dark].mean() < 10
    opposite = (-1 - dark[0], -1 - dark[1])
    assert frame[opposite].mean() > 245


def test_of_a_variable_rate_the_mean_counts():
    # Ten frames at ticks of 1/8 s, the second half three times as slow: 5 + 15 ticks, so 10 frames in 2.5 s.
    clip = Clip(written(num_frames=10, times=[0, 1, 2, 3, 4, 5, 8, 11, 14, 17], form="matroska"), "here", LIMIT)
    assert clip.num_frames == 10
    assert brightness(clip, [9]) == pytest.approx([45], abs=4)
    assert 3 < clip.fps < 8.1


def test_the_names_of_what_is_wrong(tmp_path):
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1,\nother.mp4\n#EXT-X-ENDLIST\n")
    (tmp_path / "other.mp4").write_bytes(written().data)
    (tmp_path / "sound.wav").write_bytes(sound().data)
    expected = {
        "missing.mp4": r"missing.mp4 \(missing\) cannot be read",
        "empty.mp4": r"empty.mp4 \(0 bytes\) cannot be read",
        "text.mp4": r"text.mp4 \(8 bytes\) cannot be read",
        "sound.wav": r"sound.wav \(\d+ bytes\) cannot be read: it has no video stream",
        "list.m3u8": r"list.m3u8",  # a playlist may not open other files
    }
    for name, message in expected.items():
        with pytest.raises(DataError, match=message) as caught:
            Clip(Media(str(tmp_path / name)), "chats.jsonl, line 3", LIMIT)
        assert str(caught.value).startswith("chats.jsonl, line 3: the video ")
    with pytest.raises(DataError, match="its frames have 64 x 48 pixels"):
        Clip(written(), "here", 48 * 64 - 1)


def test_a_video_that_is_cut_off_is_refused_when_its_end_is_needed(tmp_path):
    whole = written(num_frames=60, size=(64, 64), folder=tmp_path, movflags="faststart")
    cut = Media(data=whole.data[: int(len(whole.data) * 0.7)])
    clip = Clip(cut, "here", LIMIT)
    assert clip.num_frames == 60
    assert len(list(clip.frames([0, 1]))) == 2
    with pytest.raises(DataError, match=r"the video \d+ bytes within the sample"):
        list(clip.frames([59]))


def test_a_video_whose_header_is_cut_off_is_refused():
    whole = written()
    with pytest.raises(DataError, match="cannot be read"):
        Clip(Media(data=whole.data[: len(whole.data) // 2]), "here", LIMIT)


@pytest.mark.parametrize(
    "made", [written(8, form=form, codec=codec).data for form, codec in (("mp4", "libx264"), ("webm", "libvpx-vp9"))]
)
def test_damage_anywhere_gives_frames_or_one_clear_error(made):
    rng = np.random.default_rng(0)
    said = set()
    for trial in range(80):
        damaged = bytearray(made if trial % 3 else made[: rng.integers(len(made))])
        for place in rng.integers(max(len(damaged), 1), size=min(len(damaged), 6)):
            damaged[place] = rng.integers(256)
        try:
            clip = Clip(Media(data=bytes(damaged)), "chats.jsonl, line 3", 10**6)
            list(clip.frames([0, clip.num_frames - 1]))
        except DataError as error:
            said.add(str(error)[:30])
    assert said == {"chats.jsonl, line 3: the video"}


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "fps": st.sampled_from([0.5, 1, 2, 3.3, 24]),
        "min_frames": st.sampled_from([2, 4, 9]),
        "max_frames": st.sampled_from([10, 64, 768]),
        "cap_pixels_per_frame": st.booleans(),
        "max_video_tokens": st.sampled_from([64, 768]),
        "size": st.builds(
            lambda low, times: {"shortest_edge": low, "longest_edge": low * times},
            st.sampled_from([3136, 131072]),
            st.sampled_from([4, 60]),
        ),
    },
)


@given(SETTINGS, st.integers(2, 3000), st.floats(1, 120), st.integers(8, 2000), st.integers(8, 2000))
def test_qwen3_rules_are_those_of_transformers(settings, num_frames, fps, height, width):
    theirs, ours = Qwen3VLVideoProcessor(**settings), VideoProcessor(settings, QWEN3)
    places = ours.sample(num_frames, fps)
    metadata = VideoMetadata(total_num_frames=num_frames, fps=fps)
    assert places == theirs.sample_frames(metadata).tolist()
    try:
        patches = theirs.get_num_of_video_patches(len(places), height, width, {})
    except ValueError:
        with pytest.raises(ValueError, match="aspect ratio"):
            ours.grid(len(places), height, width)
        return
    assert np.prod(ours.grid(len(places), height, width)) == patches


@given(st.integers(1, 3000), st.floats(1, 120), st.sampled_from([0.5, 1, 2, 3.3]), st.sampled_from([4, 9]))
def test_qwen2_frames_are_those_of_qwen_vl_utils(num_frames, fps, wanted, least):
    """The count by the formula of qwen-vl-utils' `smart_nframes`, the places evenly spread from the first on."""
    ours = VideoProcessor({"fps": wanted, "min_frames": least, "max_frames": 64}, QWEN2)
    places = ours.sample(num_frames, fps)
    if num_frames < 2:
        assert places == [0, 0]
        return
    low, high = least, min(64, num_frames) // 2 * 2
    expected = min(max(num_frames / fps * wanted, low), high, num_frames) // 2 * 2
    assert len(places) == max(expected, 2)
    assert places == sorted(set(places))
    assert places[0] == 0
    assert places[-1] < num_frames
    step = num_frames / len(places)
    assert all(abs(place - i * step) < 1.01 for i, place in enumerate(places))


def test_a_qwen2_frame_is_as_large_as_a_picture_of_its_size():
    """Qwen2-VL resizes each frame by the rule of its images."""
    size = {"shortest_edge": 3136, "longest_edge": 100_000}
    images, videos = Qwen2VLImageProcessorPil(size=size), VideoProcessor({"size": size}, QWEN2)
    for height, width in [(30, 40), (480, 640), (100, 900)]:
        t, h, w = videos.grid(6, height, width)
        assert (t, h * w) == (3, images.get_number_of_image_patches(height, width))


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def seeing(request, tmp_path_factory):
    """An encoder of each family, and the processor of its own class."""
    folder = write_processor(tmp_path_factory.mktemp(request.param), ["Which? Two. 0.5 seconds"], patch_size=8)
    names = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
    for file in folder.glob("*processor*config.json"):
        content = file.read_text().replace("Qwen3VLProcessor", names[request.param])
        if request.param != "qwen3_vl":
            content = content.replace(QWEN3, QWEN2)
        file.write_text(content)
    processor = load_processor(folder)
    assert type(processor).__name__ == names[request.param]
    if request.param == "qwen2_vl":
        return Encoder(processor), None
    ids = {f"{kind}_token_id": getattr(processor, f"{kind}_token_id") for kind in ("image", "video")}
    model = load_model(tiny_config(request.param, len(processor.tokenizer), ids), random_init=True)
    return Encoder(processor, rope_index(model)), model


def picture():
    file = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)).save(file, "PNG")
    return Media(data=file.getvalue())


@pytest.mark.parametrize("num_frames", [1, 2, 20, 33])
def test_tokens_and_patches_are_those_of_the_real_processor(seeing, num_frames):
    encoder, _ = seeing
    processor = encoder.processor
    media = written(num_frames=num_frames, size=(50, 70))
    sample = chat(VideoPart(media), ImagePart(picture()), VideoPart(written(num_frames=12)))
    encoded = encoder.encode(sample)
    assert encoder.measure(sample) == encoded.lengths
    # The real processor's own call, given whole videos: placeholders and timestamps are its.
    text = encoder.template.views(sample)[0].text
    videos, known = [], []
    for video in sample.media("video"):
        clip = Clip(video, "here", LIMIT)
        videos.append(np.stack(list(clip.frames(range(clip.num_frames)))))
        known.append(VideoMetadata(total_num_frames=clip.num_frames, fps=clip.fps))
    images = [Image.open(BytesIO(sample.images[0].data))]
    out = processor(text=[text], images=images, videos=videos, video_metadata=known, return_tensors="pt")
    assert torch.equal(encoded.input_ids_S, out["input_ids"][0])
    assert torch.equal(encoded.token_types_S.long(), out["mm_token_type_ids"][0])
    assert torch.equal(encoded.media["videos"].sizes, out["video_grid_thw"])
    pixels_PD = encoded.media["videos"].features
    if pixels_PD.dtype == torch.uint8:  # else videos are normalised otherwise than images, and cannot share their scale
        pixels_PD = pixels_PD * encoder.pixel_scale[0] + encoder.pixel_scale[1]
    assert (encoded.media["videos"].features.dtype == torch.uint8) == (type(processor).__name__ == "Qwen3VLProcessor")
    assert torch.allclose(pixels_PD, out["pixel_values_videos"], rtol=0, atol=1e-6)
    assert encoded.patches == int(
        encoded.media["images"].sizes.prod(1).sum() + encoded.media["videos"].sizes.prod(1).sum()
    )
    assert encoded.media_end == int((encoded.token_types_S > 0).nonzero()[-1]) + 1


@pytest.mark.parametrize(("num_frames", "rate"), [(2, 2.0), (3, 2.0), (9, 0.5)])
def test_pictures_of_frames_are_read_as_the_real_processor_reads_frames_that_are_not_sampled_again(
    seeing, num_frames, rate
):
    encoder, _ = seeing
    frames_FHWC = np.random.default_rng(1).integers(0, 256, (num_frames, 50, 70, 3), dtype=np.uint8)
    pictures = []
    for frame in frames_FHWC:
        Image.fromarray(frame).save(file := BytesIO(), "PNG")
        pictures.append(Media(data=file.getvalue()))
    sample = chat(VideoPart(Media(frames=tuple(pictures), frames_per_s=rate)))
    encoded = encoder.encode(sample)
    assert encoder.measure(sample) == encoded.lengths
    text = encoder.template.views(sample)[0].text
    known = [VideoMetadata(total_num_frames=num_frames, fps=rate, frames_indices=list(range(num_frames)))]
    out = encoder.processor(
        text=[text], videos=[frames_FHWC], video_metadata=known, do_sample_frames=False, return_tensors="pt"
    )
    assert torch.equal(encoded.input_ids_S, out["input_ids"][0])  # with the times of frames that Qwen3-VL writes
    assert torch.equal(encoded.media["videos"].sizes, out["video_grid_thw"])
    pixels_PD = encoded.media["videos"].features
    if pixels_PD.dtype == torch.uint8:
        pixels_PD = pixels_PD * encoder.pixel_scale[0] + encoder.pixel_scale[1]
    assert torch.allclose(pixels_PD, out["pixel_values_videos"], rtol=0, atol=1e-6)


def test_pictures_of_frames_have_one_size_and_are_named_where_damaged(encoder, tmp_path):
    sizes = [(40, 30), (40, 30), (30, 40)]
    for number, size in enumerate(sizes, 1):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
    frames = tuple(Media(str(tmp_path / f"{number}.png")) for number in (1, 2, 3))
    with pytest.raises(DataError, match=r"the video of 3 frames from .*1\.png on cannot be used: frame 3 has 30 x 40"):
        encoder.measure(chat(VideoPart(Media(frames=frames, frames_per_s=2.0))))
    (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:-30])
    with pytest.raises(DataError, match=r"the image .*2\.png \(\d+ bytes\) cannot be read"):
        encoder.encode(chat(VideoPart(Media(frames=frames[:2], frames_per_s=2.0))))


def test_positions_of_videos_are_the_models_own(seeing):
    encoder, model = seeing
    encoded = encoder.encode(chat(VideoPart(written(num_frames=20)), ImagePart(picture())))
    if model is None:
        assert torch.equal(encoded.position_ids_RS, torch.arange(encoded.tokens)[None])
        return
    arguments = {"image_grid_thw": encoded.media["images"].sizes, "video_grid_thw": encoded.media["videos"].sizes}
    if model.config.model_type == "qwen2_5_vl":
        # 20 frames at 8 per second are 2.5 s; at 2 frames per second 5 are asked for, 4 read; a patch spans two of
        # them, so 2.5 / 4 * 2 seconds.
        assert encoded.media["videos"].sizes[0, 0] == 2
        arguments["second_per_grid_ts"] = [1.25]
    expected, _ = model.model.get_rope_index(
        input_ids=encoded.input_ids_S[None], mm_token_type_ids=encoded.token_types_S[None], **arguments
    )
    assert torch.equal(encoded.position_ids_RS, expected[:, 0])


def test_the_patches_of_a_video_are_those_of_transformers_own_layout():
    frames_FCHW = np.random.default_rng(0).integers(0, 256, (5, 3, 64, 96), dtype=np.uint8)
    theirs, t, h, w = Qwen3VLVideoProcessor().patchify(torch.from_numpy(frames_FCHW)[None], 16, 2, 2)
    ours = VideoProcessor({}, QWEN3).lay_out(frames_FCHW)
    assert (t, h, w) == (3, 4, 6)
    assert torch.equal(ours, theirs[0])


def test_frames_are_resized_as_pillow_resizes_them():
    """torchvision resizes tensors of bytes by this operator, which follows Pillow's: two passes, rounded in between."""
    frame = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    resized_CHW = VideoProcessor({}, QWEN3).resize(frame, 32, 48)
    expected = np.asarray(Image.fromarray(frame).resize((48, 32), Image.Resampling.BICUBIC)).astype(int)
    assert abs(resized_CHW.transpose(1, 2, 0) - expected).max() <= 1


def test_a_model_without_videos_refuses_them_by_name(encoder, text_encoder):
    sample = chat(VideoPart(written()))
    with pytest.raises(DataError, match=r"line 1: the chat holds 1 videos, but the model reads text alone"):
        text_encoder.measure(sample)


def test_settings_of_videos_are_saved_with_the_processor(seeing, tmp_path):
    encoder, _ = seeing
    encoder.processor.save_pretrained(tmp_path)
    again = load_processor(tmp_path)
    assert again.video_processor.to_dict() == encoder.processor.video_processor.to_dict()
    assert Encoder(again).fingerprint() == encoder.fingerprint()
