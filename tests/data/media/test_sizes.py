"""Bounds on media, of a run and of a source: what is fed is what the model's own processor makes by them."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from headway.data import Encoder
from headway.data.encode import _settings
from headway.data.index import build_index
from headway.data.media.sizes import MediaSizes
from headway.data.media.videos import Clip
from headway.data.samples import Chat, Message, Origin, TextPart, VideoPart
from headway.data.sources import open_source
from headway.errors import ConfigError
from headway.models import load_model_config, load_processor
from headway.models.video import VideoProcessor
from headway.models.vision import patch_size_of
from headway.packing.budget import Budget
from headway.packing.order import Stage, StageSource
from helpers.data import Data
from helpers.data import video as written
from helpers.folders import VLM_FOLDERS, write_vlm

# transformers' GLM-4V joins pictures in a way that numpy 2 warns of
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
RUN, OWN = MediaSizes(max_pixels=4096), MediaSizes(min_pixels=9000, max_pixels=12_000)
PICTURES = {"a.png": (40, 52), "b.png": (90, 131), "c.png": (33, 200)}
STAGES = (Stage((StageSource("plain", epochs=1), StageSource("own", epochs=1))),)
WHERE_PIXELS_ARE_BOUNDED = {
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_vl", "qwen2_5_omni_thinker", "exaone4_5"),
    *("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "paddleocr_vl"),
}  # by their code: `smart_resize` between size.shortest_edge and size.longest_edge


@pytest.fixture
def chats(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    noise = np.random.default_rng(0)
    for name, (height, width) in PICTURES.items():
        Image.fromarray(noise.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(tmp_path / name)
    rows = [[name] for name in PICTURES] + [["a.png", "b.png"]]
    file = tmp_path / "chats.jsonl"
    parts = [[{"type": "image", "image": name} for name in row] + [{"type": "text", "text": "?"}] for row in rows]
    answer = {"role": "assistant", "content": "Two."}
    file.write_text("\n".join(json.dumps({"messages": [{"role": "user", "content": p}, answer]}) for p in parts))
    return file


def encoder_of(folder, sizes):
    processor = load_processor(folder)
    sizes.write_into(processor)
    return Encoder(processor, patch_size=patch_size_of(load_model_config(folder)))


@pytest.mark.parametrize("family", sorted(WHERE_PIXELS_ARE_BOUNDED.intersection(VLM_FOLDERS)))
def test_what_is_indexed_and_fed_is_what_the_plain_processor_makes_by_the_same_bounds(chats, tmp_path, family):
    folder = write_vlm(tmp_path / "model", family)
    encoder = encoder_of(folder, RUN)
    plain = load_processor(folder)
    least = _settings(plain.image_processor)["size"]["shortest_edge"]
    bounds = {
        "plain": {"shortest_edge": least, "longest_edge": RUN.max_pixels},
        "own": {"shortest_edge": OWN.min_pixels, "longest_edge": OWN.max_pixels},
    }
    sources = [open_source(chats, name="plain"), open_source(chats, name="own", sizes=OWN)]
    for source in sources:
        index = build_index(source, encoder, workers=0)
        for row in range(len(source)):
            sample = source[row]
            encoded = encoder.encode(sample)
            pictures = [Image.open(media.path) for media in sample.images]
            text = encoder.template.views(sample)[0].text
            # the folder's own processor, its size given with the call
            given = plain(text=[text], images=[pictures], size=bounds[source.name], return_tensors="pt")
            assert torch.equal(encoded.input_ids_S, given["input_ids"][0])
            assert torch.equal(encoded.media["images"].sizes, given["image_grid_thw"])
            pixels_PD = encoded.media["images"].features
            if encoder.pixel_scale is not None:
                scale_D, shift_D = encoder.pixel_scale
                frames = given["pixel_values"].shape[1] // pixels_PD.shape[1]
                channels = pixels_PD.view(len(pixels_PD), 3, 1, -1).expand(-1, -1, frames, -1)
                pixels_PD = channels.reshape(len(pixels_PD), -1) * scale_D + shift_D
            assert torch.allclose(pixels_PD, given["pixel_values"].float(), rtol=0, atol=1e-5)
            assert (index.tokens[row], index.patches[row]) == (encoded.tokens, encoded.patches)
    for kind in ("indexed", "stream"):
        together = Data(sources, encoder, STAGES, budget=Budget(4000, None, 1), lanes=1).ranks(kind, 1)
        fed = {}
        for batch in (batch for step in together.steps() for batches in step for batch in batches):
            (origin,) = batch.origins
            fed[origin.source, origin.row] = (batch.tokens, int(batch.media["images"].sizes.prod(1).sum()))
        expected = [encoder.encode(source[row]) for source in sources for row in range(len(source))]
        assert fed == {(each.origin.source, each.origin.row): (each.tokens, each.patches) for each in expected}


@pytest.mark.parametrize("family", sorted(set(VLM_FOLDERS) - WHERE_PIXELS_ARE_BOUNDED))
def test_a_processor_that_bounds_no_pixels_says_what_it_has_instead(tmp_path, family):
    processor = load_processor(write_vlm(tmp_path, family))
    has = r"It has instead .*: .*" if hasattr(processor, "image_processor") else "no image processor"
    with pytest.raises(ConfigError, match=f"^max_pixels 4096 cannot take effect: .*{has}"):
        RUN.write_into(processor)


def test_bounds_that_cannot_take_effect_are_refused_by_value_and_way_out(processor):
    for sizes, message in [
        (MediaSizes(max_pixels=10), "max_pixels 10 cannot hold: min_pixels would be .* Give both"),
        (MediaSizes(video_min_pixels=2**40), "video_min_pixels 1099511627776 cannot hold"),
    ]:
        with pytest.raises(ConfigError, match=message):
            sizes.written_into(processor)
    with pytest.raises(ConfigError, match="max_pixels 4096 cannot take effect: the model has no image processor"):
        RUN.written_into(processor.tokenizer)
    with pytest.raises(ConfigError, match=r"fps 2.0 and max_frames 8 cannot take effect: no videos .*Leave it out"):
        MediaSizes(fps=2.0, max_frames=8).written_into(processor.tokenizer)


@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_a_source_whose_bounds_the_model_has_not_is_refused_before_anything_is_read(text_encoder, chats, kind):
    source = open_source(chats, name="plain", sizes=RUN)
    stages = (Stage((StageSource("plain", epochs=1),)),)
    with pytest.raises(ConfigError, match="max_pixels 4096 cannot take effect"):
        Data([source], text_encoder, stages).ranks(kind, 1)


def test_every_bound_changes_the_keys_of_index_and_stream(processor, chats):
    every = [
        MediaSizes(max_pixels=50_000),
        MediaSizes(min_pixels=5000),
        MediaSizes(video_max_pixels=200_000_000),
        MediaSizes(video_min_pixels=5000),
        MediaSizes(fps=1.5),
        MediaSizes(max_frames=9),
    ]
    of_runs = [Encoder(sizes.written_into(processor)).fingerprint() for sizes in [MediaSizes(), *every]]
    sources = [open_source(chats, sizes=sizes) for sizes in [None, *every]]
    assert len(set(of_runs)) == len(every) + 1
    assert len({source.fingerprint() for source in sources}) == len(every) + 1
    assert len({source.schema_fingerprint() for source in sources}) == len(every) + 1


def test_bounds_of_a_run_are_saved_with_the_processor(processor, tmp_path):
    changed = MediaSizes(max_pixels=50_000, fps=1.5, max_frames=9).written_into(processor)
    changed.save_pretrained(tmp_path)
    again = load_processor(tmp_path)
    assert Encoder(again).fingerprint() == Encoder(changed).fingerprint() != Encoder(processor).fingerprint()
    saved = json.loads((tmp_path / "processor_config.json").read_text())
    assert saved["image_processor"]["size"]["longest_edge"] == 50_000
    assert (saved["video_processor"]["fps"], saved["video_processor"]["max_frames"]) == (1.5, 9)


@pytest.mark.parametrize(("fps", "most"), [(1.0, None), (4.0, None), (4.0, 6), (None, 4)])
@pytest.mark.parametrize("pixels", [None, 6000])
def test_frames_and_sizes_of_videos_are_those_of_transformers_by_the_same_arguments(processor, fps, most, pixels):
    clip = Clip(written(num_frames=40, size=(50, 70)), "here", 10**6)
    sizes = MediaSizes(
        fps=fps, max_frames=most, video_min_pixels=None if pixels is None else 500, video_max_pixels=pixels
    )
    changed = sizes.written_into(processor).video_processor if sizes else processor.video_processor
    own = processor.video_processor
    theirs = Qwen3VLVideoProcessor(**{name: value for name, value in own.settings.items() if name != "processor_class"})
    metadata = VideoMetadata(total_num_frames=clip.num_frames, fps=clip.fps)
    theirs.max_frames = theirs.max_frames if most is None else most
    places = theirs.sample_frames(metadata, fps=fps)
    assert clip.sample(changed) == places.tolist()
    size = own.settings["size"] if pixels is None else {"shortest_edge": 500, "longest_edge": pixels}
    patches = theirs.get_num_of_video_patches(len(places), *clip.size, {"size": size})
    assert np.prod(changed.grid(len(places), *clip.size)) == patches


def test_a_rate_takes_the_place_of_a_number_of_frames():
    folder = VideoProcessor({"num_frames": 5}, "Qwen2VLVideoProcessor")
    assert len(folder.sample(100, 10.0)) == 4
    assert len(folder.with_settings(fps=1.0).sample(100, 10.0)) == 10
    assert len(folder.with_settings(max_frames=2).sample(100, 10.0)) == 2


def test_frames_of_a_source_with_its_own_rate_differ_from_those_of_the_run(processor):
    shown = Message("user", (VideoPart(written(num_frames=40, size=(50, 70))),))
    said = Message("assistant", (TextPart("Two."),))
    encoder = Encoder(MediaSizes(fps=1.0).written_into(processor))
    rows = {}
    for name, sizes in {"run": MediaSizes(), "own": MediaSizes(fps=4.0)}.items():
        sample = Chat((shown, said), Origin(name, name, 0, name), sizes=sizes)
        encoded = encoder.encode(sample)
        assert encoder.measure(sample) == encoded.lengths
        rows[name] = int(encoded.media["videos"].sizes[0, 0])
    assert rows == {"run": 3, "own": 10}  # 5 s at 8 frames/s: 5 and 20 frames, two to a patch


def test_small_pictures_are_enlarged(processor):
    reader = Encoder(processor).reader_of(MediaSizes(min_pixels=40_000, max_pixels=50_000))
    assert 40_000 <= np.prod(reader.images.grid(20, 20)) * processor.image_processor.patch_size**2 <= 50_000
