"""A cached sample is the encoded one to the bit, or is not there: whatever is changed, damaged, killed or full."""

import errno
import json
import os
import shutil
import sys
import textwrap
import time
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from headway.data import sample_block, sample_cache
from headway.data.encoded import EncodedSample
from headway.data.media.joining import Joinable, Joining
from headway.data.media.tensors import MediaTensors
from headway.data.sample_block import entry_of, read_entry
from headway.data.sample_cache import CacheCounts, SampleCache, folder_of, samples_root
from headway.data.samples import Origin
from headway.data.sources import open_source
from headway.data.transfer import to_block
from headway.packing.parts import SamplePart
from helpers.cases import examples
from helpers.data import ROWS, Pipeline, sound, write_shards
from helpers.processes import start_processes


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return Pipeline(tmp_path_factory.mktemp("pipeline"))


def plain(value):
    """A sample as values that Python compares: tensors by type, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, EncodedSample):
        return {part.name: plain(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, dict):
        return [(name, plain(part)) for name, part in value.items()]
    return [plain(part) for part in value] if isinstance(value, tuple) else value


def settled(*files):
    """Wait until a change of files that were just written is seen by their times."""
    time.sleep(0.06)
    return files


def opened(source, name="of", **settings):
    return SampleCache((source,), folder_of(name), **{"with_text": True, **settings})


def fill(cache, encoder, rows):
    """Encode rows and write them; what they are encoded to."""
    settled()
    source = cache._sources[0]
    encoded = [cache.encoded(0, row, source[row], encoder.encode) for row in rows]
    cache.flush()
    cache.tend()
    return encoded


@pytest.fixture
def pictured(tmp_path, write):
    """Eight chats with a picture each, but for the last, which has none."""
    lines = []
    for number in range(8):
        parts = [{"type": "image", "image": f"{number}.png"}] if number < 7 else []
        question = {"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}
        lines.append({"messages": [question, {"role": "assistant", "content": f"It is {number}."}]})
    return open_source(write(*lines, pictures={f"{number}.png": (16 + 16 * (number % 3), 40) for number in range(7)}))


# The law, on every kind of data.


def test_every_sample_is_read_as_it_was_encoded_whatever_the_data(pipeline):
    wholes = {place: encoded for place, (_, encoded) in pipeline.wholes.items()}
    settled()
    for name, path in pipeline.paths.items():
        source, read = open_source(path, name=name), 0
        written = opened(source)
        for row in range(len(source)):
            written.encoded(0, row, source[row], pipeline.encoder.encode)
        written.flush()
        cache = opened(source)  # as another process has it
        cache.tend()
        for row in range(len(source)):
            sample = cache.read(0, row)
            assert sample is not None, (name, row)
            assert plain(sample) == plain(wholes[name, source[row].origin.file, source[row].origin.row])
            read += 1
        assert read == ROWS[name] == cache.take_counts().hits


def test_a_sound_is_read_as_it_was_encoded(hearing, tmp_path):
    (tmp_path / "tone.wav").write_bytes(sound().data)
    turns = [{"type": "audio", "audio": "tone.wav"}, {"type": "text", "text": "What is that?"}]
    row = {"messages": [{"role": "user", "content": turns}, {"role": "assistant", "content": "A tone."}]}
    (tmp_path / "tones.jsonl").write_text(json.dumps(row))
    cache = opened(open_source(tmp_path / "tones.jsonl", name="of"), with_text=False)
    (encoded,) = fill(cache, hearing, [0])
    assert plain(cache.read(0, 0)) == plain(encoded)
    assert encoded.media["audio"].features.dtype == torch.float32


@pytest.mark.parametrize("ranks", [1, 3])
def test_packs_are_the_same_from_the_cache_on_every_number_of_ranks(pipeline, ranks):
    stages = [pipeline.mix(**{name: {"epochs": 2} for name in pipeline.paths})]
    settled()
    packs, read = [], []
    for cache in ("off", "1GiB", "1GiB"):
        players = pipeline.play(stages, ranks, tokens_per_pack=256, cache_encoded=cache)
        packs.append([plain_pack(batch) for step in players.steps() for batch in step])
        read.append(sum(feed.cached.hits for feed in players.feeds))
        players.close()
    assert packs[0] == packs[1] == packs[2]
    assert read[2] > 0.9 * 2 * sum(ROWS.values()) >= read[1] >= read[0] == 0


def plain_pack(batch):
    block = to_block(batch, lambda size: torch.zeros(size, dtype=torch.uint8))
    return block.block[: block.start].numpy().tobytes(), batch.origins


TENSORS = st.sampled_from(
    [torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
).flatmap(lambda dtype: st.lists(st.integers(0, 4), max_size=4).map(lambda shape: torch.ones(shape).mul(3).to(dtype)))
INTS = st.lists(st.integers(0, 2**40), max_size=3).map(tuple)
RULES = st.builds(Joining, st.none() | st.integers(0, 3), st.none() | st.sampled_from([0.0, -1.5, float("inf")]))
NAMES = st.text(max_size=5).filter(lambda name: "\0" not in name)
SAMPLES = st.builds(
    EncodedSample,
    input_ids_S=TENSORS,
    labels_S=TENSORS,
    position_ids_RS=TENSORS,
    origin=st.builds(Origin, st.just("of"), st.just("file"), st.just(7), NAMES),
    token_types_S=st.none() | TENSORS,
    types_name=NAMES,
    media=st.dictionaries(NAMES, st.builds(MediaTensors, TENSORS, st.none() | TENSORS), max_size=3),
    processed=st.dictionaries(NAMES, st.builds(Joinable, TENSORS, RULES), max_size=3),
    media_end=st.integers(0, 2**40),
    segments=INTS,
    answers=INTS,
    prompt=st.integers(0, 2**40),
    desirable=st.lists(st.booleans(), max_size=3).map(tuple),
    parts=st.lists(
        st.builds(SamplePart, st.sampled_from(["text", "noised"]), *[st.integers(0, 9)] * 5), max_size=2
    ).map(tuple),
    latent_images=st.lists(TENSORS, max_size=2).map(tuple),
)


@settings(max_examples=examples(60, 400), deadline=None)
@given(sample=SAMPLES, files=st.lists(st.tuples(NAMES, st.tuples(*[st.integers(0, 2**60)] * 4)), max_size=3))
def test_every_field_of_a_sample_survives(sample, files):
    entry = read_entry(np.frombuffer(bytearray(entry_of(sample, files, 0.25)), np.uint8), "of", "file", 7)
    assert plain(entry.sample) == plain(sample)
    assert (entry.files, entry.encoding_s) == (tuple(files), 0.25)


@settings(max_examples=examples(60, 400), deadline=None)
@given(sample=SAMPLES, data=st.data())
def test_numbers_that_nobody_wrote_are_a_miss(sample, data):
    """Even where the checksum is right, as a stranger would make it."""
    content = np.frombuffer(bytearray(entry_of(sample, (), 0.0)), np.uint8)
    words = content.view(np.int64)
    place = data.draw(st.integers(1, len(words) - 1))
    words[place] = data.draw(st.sampled_from([-1, -(2**62), 2**62, 10**9, 5]))
    assert read_entry(content, "of", "file", 7) is None  # by its checksum
    words[0] = sample_block.crc32(content[8:])
    read_entry(content, "of", "file", 7)  # another sample, or none; no other end


def test_a_damaged_byte_anywhere_is_a_miss(pictured, encoder):
    wanted = [plain(sample) for sample in fill(opened(pictured), encoder, range(8))]
    (block,) = samples_root().glob("*/*")
    whole, rng = block.read_bytes(), np.random.default_rng(0)
    for place in [*range(0, 64, 3), *rng.integers(0, len(whole), 40).tolist(), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        block.write_bytes(damaged)
        cache = opened(pictured)
        cache.tend()
        read = [cache.read(0, row) for row in range(8)]
        assert all(sample is None or plain(sample) == other for sample, other in zip(read, wanted, strict=True))
    for size in (0, 5, 31, 32, 200, len(whole) - 1):  # cut short
        block.write_bytes(whole[:size])
        cache = opened(pictured)
        cache.tend()
        assert all(cache.read(0, row) is None for row in range(8))


# Nothing is stale.


def rewritten(file):
    """Another picture of the same size, with the times of the one before."""
    before = file.stat()
    with Image.open(file) as image:
        other = Image.fromarray(255 - np.asarray(image))
    other.save(file)
    with file.open("ab") as end:
        end.write(bytes(max(0, before.st_size - file.stat().st_size)))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = {
    "rewritten with its old time": rewritten,
    "touched": os.utime,
    "removed": lambda file: file.unlink(),
    "replaced": lambda file: shutil.move(shutil.copy2(file, file.with_name("copy.png")), file),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_picture_is_encoded_anew(pictured, encoder, tmp_path, change):
    cache = opened(pictured)
    fill(cache, encoder, range(8))
    settled()
    change(tmp_path / "3.png")
    for other in (cache, opened(pictured)):
        other.tend()
        assert [row for row in range(8) if other.read(0, row) is None] == [3]
    if (tmp_path / "3.png").exists():
        (again,) = fill(cache, encoder, [3])
        assert plain(cache.read(0, 3)) == plain(again) == plain(encoder.encode(pictured[3]))
        newest = opened(pictured)
        newest.tend()
        assert plain(newest.read(0, 3)) == plain(again)


def test_a_frame_more_in_a_folder_of_frames_is_seen(write, encoder, tmp_path):
    turns = [{"type": "video", "video": "clip"}, {"type": "text", "text": "What?"}]
    row = {"messages": [{"role": "user", "content": turns}, {"role": "assistant", "content": "Noise."}]}
    source = open_source(write(row, pictures={f"clip/{number}.png": (32, 32) for number in range(4)}))
    cache = opened(source)
    fill(cache, encoder, [0])
    assert cache.read(0, 0) is not None
    shutil.copy(tmp_path / "clip/3.png", tmp_path / "clip/4.png")
    assert cache.read(0, 0) is None


def test_a_picture_that_changed_just_now_is_not_kept(pictured, encoder, tmp_path, monkeypatch):
    """Within a tick of the file system's clock it may change again without a trace."""
    monkeypatch.setattr(sample_cache, "_FINE_NS", 10**11)
    cache = opened(pictured)
    fill(cache, encoder, range(8))
    assert [row for row in range(8) if cache.read(0, row) is not None] == [7]


def test_a_picture_that_changes_while_it_is_encoded_is_not_kept(pictured, encoder, tmp_path):
    def encode(sample):
        encoded = encoder.encode(sample)
        os.utime(tmp_path / "2.png")
        return encoded

    settled()
    cache = opened(pictured)
    cache.encoded(0, 2, pictured[2], encode)
    cache.flush()
    cache.tend()
    assert cache.read(0, 2) is None


def test_rows_of_a_changed_data_file_are_encoded_anew_and_those_of_others_are_read(tmp_path, text_encoder):
    folder = write_shards(tmp_path / "shards", 12, 3)
    source = open_source(folder)
    fill(opened(source), text_encoder, range(12))
    file = folder / "part-01.jsonl"
    file.write_text(file.read_text().replace("Which?", "Where?"))
    cache = opened(open_source(folder))
    cache.tend()
    assert [row for row in range(12) if cache.read(0, row) is None] == [4, 5, 6, 7]


def test_a_processor_that_draws_at_random_is_never_cached(pictured, encoder):
    def encode(sample):
        """Shift the pixels of each picture."""
        encoded = encoder.encode(sample)
        shift = next(shifts)
        return replace(
            encoded,
            media={name: MediaTensors(m.sizes, m.features + shift) for name, m in encoded.media.items()},
        )

    shifts = iter(range(1, 100))
    settled()
    cache = opened(pictured)
    for row in range(7):
        cache.encoded(0, row, pictured[row], encode)
    cache.flush()
    assert "gives other values each time" in cache.take_counts().trouble
    assert not list(samples_root().glob("*/*"))


def test_another_encoding_lies_elsewhere():
    folders = {folder_of(*parts) for parts in (("a",), ("b",), ("a", "b"), ("ab",), (1,), ("1",), ())}
    assert len(folders) == 7
    assert folder_of("a") == folder_of("a")


# Several processes, kills, limits.

WRITER = """
import sys
from headway.data.samples import Origin
from headway.data.sample_cache import SampleCache, folder_of
from headway.data.encoded import EncodedSample
from headway.data.sources import open_source
from headway.data.transfer import to_block
import torch

source = open_source(sys.argv[1])
cache = SampleCache((source,), folder_of("of"), with_text=True)
def encode(sample):
    ids = torch.arange(30_000) + sample.origin.row
    return EncodedSample(input_ids_S=ids, labels_S=ids, position_ids_RS=ids[None], origin=sample.origin)
print("ready", flush=True)
while True:
    for row in range(len(source)):
        cache.encoded(0, row, source[row], encode)
        cache.flush()
"""


def test_writers_that_are_killed_at_any_moment_leave_right_values_or_none(tmp_path):
    folder = write_shards(tmp_path / "shards", 12, 1)
    source = open_source(folder)
    len(source)
    rng, read = np.random.default_rng(0), 0
    for _ in range(examples(2, 6)):
        writers = start_processes([sys.executable, "-c", WRITER, folder], 2, tmp_path)
        while not all(writer.out.read_text() for writer in writers):
            assert all(writer.poll() is None for writer in writers), writers[0].err.read_text()
            time.sleep(0.01)
        time.sleep(float(rng.uniform(0.05, 0.3)))
        for writer in writers:
            writer.kill()
            writer.wait(60)
        cache = opened(source)
        cache.tend()
        for row in range(12):
            sample = cache.read(0, row)
            read += sample is not None
            assert sample is None or sample.input_ids_S.equal(torch.arange(30_000) + row)
    assert read > 0


def test_what_killed_writers_left_is_removed_after_a_while(pictured, encoder):
    left = folder_of("other") / ".block.samples.host-1-1"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(1000))
    fill(opened(pictured), encoder, [0])
    assert left.exists()
    os.utime(left, (0, time.time() - 7200))
    fill(opened(pictured), encoder, [1])
    assert not left.exists()


def test_a_size_bounds_all_samples_and_what_was_used_longest_ago_goes_first(pictured, encoder):
    for name in ("old", "older"):
        fill(opened(pictured, name), encoder, range(4))
    (old,), (older,) = folder_of("old").glob("*"), folder_of("older").glob("*")
    for block, days in ((old, 1), (older, 2)):
        os.utime(block, (time.time() - 86400 * days, block.stat().st_mtime))
    size = old.stat().st_size
    cache = opened(pictured, most_bytes=int(2.6 * size))
    fill(cache, encoder, range(4))
    assert (old.exists(), older.exists()) == (True, False)
    fill(cache, encoder, range(4, 8))
    assert not old.exists()  # no block of this run went
    written = len(list(folder_of("of").glob("*")))
    assert [row for row in range(8) if cache.read(0, row) is not None] == list(range(8))
    for _ in range(3):
        fill(cache, encoder, range(4))
    assert len(list(folder_of("of").glob("*"))) <= written + 1
    assert sum(block.stat().st_size for block in samples_root().glob("*/*")) <= 2.6 * size
    assert cache.take_counts().trouble == ""  # as it was asked for


def test_without_a_size_a_tenth_of_the_free_disk_is_taken(pictured, encoder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 5000))
    fill(opened(pictured), encoder, range(8))
    assert not list(samples_root().glob("*/*"))


@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only file system")])
def test_a_disk_that_takes_nothing_is_one_trouble(pictured, encoder, monkeypatch, code, words):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(sample_block, "write_whole", refuse)
    cache = opened(pictured)
    encoded = fill(cache, encoder, range(8))
    assert plain(encoded[0]) == plain(encoder.encode(pictured[0]))
    assert words in cache.take_counts().trouble
    assert fill(cache, encoder, range(8))


def test_without_a_size_text_is_not_kept(pictured, encoder):
    cache = opened(pictured, with_text=False)
    fill(cache, encoder, range(8))
    assert [row for row in range(8) if cache.read(0, row) is None] == [7]


def test_reading_that_takes_longer_than_encoding_ends(pictured, encoder, monkeypatch):
    monkeypatch.setattr(sample_cache, "_TRIAL_S", 0.0)
    cache = opened(pictured)
    with monkeypatch.context() as slow:
        slow.setattr(sample_cache, "entry_of", lambda sample, files, _: entry_of(sample, files, 0.0))
        fill(cache, encoder, range(8))
    assert cache.read(0, 0) is not None
    assert cache.read(0, 1) is None
    assert "takes longer than encoding" in cache.take_counts().trouble


def test_a_block_that_was_deleted_is_a_miss(pictured, encoder):
    fill(opened(pictured), encoder, range(8))
    cache = opened(pictured)
    cache.tend()
    shutil.rmtree(samples_root())
    assert [cache.read(0, row) for row in range(8)] == [None] * 8
    fill(cache, encoder, range(8))
    assert cache.read(0, 0) is not None


def test_nothing_that_a_stranger_wrote_is_run(pictured, encoder, tmp_path):
    """A pickle, a script and a link in place of blocks."""
    folder = folder_of("of")
    folder.mkdir(parents=True)
    marker = tmp_path / "ran"
    (folder / "1.samples").write_bytes(b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.")
    (folder / "2.samples").write_text(textwrap.dedent(f"import os\nos.system('touch {marker}')\n"))
    (folder / "3.samples").symlink_to(tmp_path / "nowhere")
    (folder / "4.samples").mkdir()
    cache = opened(pictured)
    cache.tend()
    assert all(cache.read(0, row) is None for row in range(8))
    fill(cache, encoder, range(8))
    assert all(cache.read(0, row) is not None for row in range(8))
    assert not marker.exists()


def test_a_line_says_what_the_cache_did(pictured, encoder):
    cache = opened(pictured)
    fill(cache, encoder, range(8))
    cache.read(0, 1)
    line = cache.describe(cache.take_counts())
    assert line.startswith("encoded samples: 1 of 9 read from the cache, which holds ")
    assert str(folder_of("of")) in line
    assert opened(pictured, "others").describe(CacheCounts(0, 8)) == ""
    assert opened(pictured).describe(CacheCounts(0, 8, "the disk is full")).endswith("; the disk is full")
