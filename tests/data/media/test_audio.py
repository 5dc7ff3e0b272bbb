"""Sounds written by PyAV, read as Qwen2-Audio reads them."""

import numpy as np
import pytest
import torch

from headway.data import AudioPart, Chat, Encoder, Media, Message, Origin, TextPart
from headway.data.media.audio import Sound
from headway.errors import DataError
from headway.models import load_processor
from helpers.data import sound, video
from helpers.folders import write_vlm

HERE = Origin("made", "made.jsonl", 0, "line 1")


def chat(*parts):
    return Chat(
        (Message("user", (*parts, TextPart("What is that?"))), Message("assistant", (TextPart("A tone."),))), HERE
    )


@pytest.mark.parametrize(
    ("rate", "seconds", "form", "codec", "layout"),
    [
        (16000, 1.0, "wav", "pcm_s16le", "mono"),
        (8000, 0.5, "wav", "pcm_s16le", "stereo"),
        (44100, 1.234, "flac", "flac", "mono"),
        (44100, 2.0, "mp3", "libmp3lame", "stereo"),
        (48000, 0.7, "ogg", "libopus", "mono"),
        (22050, 1.0, "wav", "pcm_f32le", "mono"),
    ],
)
def test_sounds_are_mixed_and_resampled_to_the_models_rate(rate, seconds, form, codec, layout):
    opened = Sound(sound(seconds, rate, form, codec, layout), "here", 16000)
    waveform = opened.decode()
    assert waveform.dtype == np.float32
    assert waveform.shape == (opened.num_samples,)
    assert opened.num_samples / 16000 == pytest.approx(seconds, abs=0.1 if form in ("mp3", "ogg") else 1e-4)
    middle = waveform[len(waveform) // 4 : len(waveform) // 4 + 3200]  # 40 periods
    spectrum = abs(np.fft.rfft(middle))
    assert spectrum.argmax() == 40  # 200 Hz in 0.2 s
    # A sine of amplitude 1/2, halved by the mean with a silent channel; the root mean square is amplitude / sqrt(2).
    amplitude = 0.25 if layout == "stereo" else 0.5
    assert np.sqrt((middle**2).mean()) == pytest.approx(
        amplitude / np.sqrt(2), rel=0.1 if form in ("mp3", "ogg") else 1e-3
    )


@pytest.mark.parametrize("seconds", [0.02, 0.5, 3.0, 30.0])
def test_tokens_and_features_are_those_of_the_real_processor(hearing, seconds):
    sample = chat(AudioPart(sound(seconds, 16000)), AudioPart(sound(0.3, 16000)))
    encoded = hearing.encode(sample)
    assert hearing.measure(sample) == encoded.lengths
    text = hearing.template.views(sample)[0].text
    waveforms = [Sound(media, "here", 16000).decode() for media in sample.media("audio")]
    out = hearing.processor(text=[text], audio=waveforms, sampling_rate=16000, return_tensors="pt")
    assert torch.equal(encoded.input_ids_S, out["input_ids"][0])
    assert torch.equal(encoded.media["audio"].features, out["input_features"])
    assert encoded.media["audio"].sizes.tolist() == out["feature_attention_mask"].sum(1).tolist()
    # Whisper makes a frame of every 10 ms; Qwen2-Audio a token of four of them, by two strides of 2.
    frames = [round(seconds * 100), 30]
    assert encoded.media["audio"].sizes.tolist() == frames
    heard = encoded.input_ids_S == hearing.processor.audio_token_id
    assert int(heard.sum()) == sum((((n - 1) // 2 + 1) - 2) // 2 + 1 for n in frames)
    assert encoded.media_end == int(heard.nonzero()[-1]) + 1
    assert encoded.token_types_S is None  # the model does not take them
    assert encoded.truncated(encoded.media_end - 1) is None


def test_measuring_a_wav_file_decodes_nothing(hearing, monkeypatch):
    sample = chat(AudioPart(sound(2.0, 44100)))
    expected = hearing.encode(sample).lengths
    monkeypatch.setattr(Sound, "decode", lambda _: pytest.fail("samples were decoded"))
    assert hearing.measure(sample) == expected


def test_the_sound_of_a_video_file_and_files_without_sound(hearing):
    with pytest.raises(DataError, match="it has no audio stream"):
        hearing.measure(chat(AudioPart(video())))


def test_what_cannot_be_read_is_named(hearing, tmp_path):
    with pytest.raises(DataError, match=r"line 1: the sound .*gone.wav \(missing\) cannot be read"):
        hearing.measure(chat(AudioPart(Media(str(tmp_path / "gone.wav")))))
    with pytest.raises(DataError, match=r"it lasts 30.5 s, but the model reads 30 s"):
        hearing.measure(chat(AudioPart(sound(30.5, 8000))))
    with pytest.raises(DataError, match="cannot be read"):
        hearing.measure(chat(AudioPart(Media(data=b"RIFF"))))
    whole = sound(2.0, 16000, "flac", "flac")
    with pytest.raises(DataError, match=r"of the 32000 samples that its header promises|cannot be read"):
        hearing.encode(chat(AudioPart(Media(data=whole.data[: len(whole.data) // 2]))))


@pytest.mark.parametrize(("which", "reads"), [("encoder", "text, images, videos"), ("text_encoder", "text alone")])
def test_a_model_that_does_not_hear_refuses_sound_by_name(which, reads, request):
    encoder = request.getfixturevalue(which)
    with pytest.raises(DataError, match=f"line 1: the chat holds 1 sounds, but the model reads {reads}"):
        encoder.measure(chat(AudioPart(sound())))


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni_thinker"])
def test_families_that_hear_get_what_their_own_processors_make(tmp_path, family):
    processor = load_processor(write_vlm(tmp_path, family))
    encoder = Encoder(processor)
    media = [sound(0.3, 16000, "wav", "pcm_s16le", "mono"), sound(0.55, 16000, "wav", "pcm_s16le", "mono")]
    sample = chat(*(AudioPart(each) for each in media))
    encoded = encoder.encode(sample)
    theirs = processor(
        text=[encoder.template.views(sample)[0].text],
        audio=[Sound(each, "here", 16000).decode() for each in media],
        return_tensors="pt",
    )
    assert torch.equal(encoded.input_ids_S, theirs["input_ids"][0])
    assert torch.equal(encoded.media["audio"].features, theirs["input_features"])
    assert encoded.media["audio"].sizes.tolist() == theirs["feature_attention_mask"].sum(1).tolist()
    assert encoder.measure(sample) == encoded.lengths
