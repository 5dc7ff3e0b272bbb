"""Videos and sounds made on the spot by PyAV."""

from io import BytesIO
from pathlib import Path

import av
import numpy as np

from headway.data import Media


def video(
    num_frames=20,
    rate=8,
    size=(48, 64),
    form="mp4",
    codec="libx264",
    rotation=0,
    times=None,
    folder: Path | None = None,
    **options,
) -> Media:
    """A video in whose n-th frame the left half has brightness 5 n and the right half is white.

    Some containers can only be written to a file; give a folder for it.
    """
    file = BytesIO()
    with av.open(file if folder is None else str(folder / "made"), "w", format=form, options=options) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(num_frames):
            pixels = np.full((*size, 3), 255, np.uint8)
            pixels[:, : size[1] // 2] = 5 * number % 250
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts = times[number]
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return Media(data=file.getvalue() if folder is None else (folder / "made").read_bytes())


def sound(seconds=1.0, rate=8000, form="wav", codec="pcm_s16le", layout="mono", pitch_hz=200.0) -> Media:
    """A tone of half the full loudness; in stereo, the right channel is silent."""
    file = BytesIO()
    tone = 0.5 * np.sin(2 * np.pi * pitch_hz * np.arange(round(seconds * rate)) / rate)
    channels = np.stack([tone, np.zeros_like(tone)])[: 2 if layout == "stereo" else 1].astype(np.float32)
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(channels, format="fltp", layout=layout)
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return Media(data=file.getvalue())
