import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from headway.data import Encoder
from headway.data.bad_rows import BadSamples
from headway.data.index import build, build_index, index_folder
from headway.data.index.build import measure_unit, units_of
from headway.data.sources import open_source
from headway.errors import ConfigError, DataError
from headway.models import load_processor
from headway.synthetic.processor import write_processor
from helpers.processes import running


@pytest.fixture
def small_units(monkeypatch):
    """Units of 32 rows, so that a few hundred rows are many."""
    monkeypatch.setattr(build, "_LEAST_ROWS", 32)


def parts_of(folder):
    return sorted((folder / "parts").glob("*.parquet"))


@pytest.mark.parametrize("rows", [0, 1, 256, 257, 15_999, 130_000, 10_000_001])
def test_units_cover_every_row_once(rows):
    units = units_of(rows)

    assert [unit.start for unit in units] == [0, *(unit.stop for unit in units)][: len(units)]
    assert sum(map(len, units)) == rows
    assert len(units) <= 4096


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_index_holds_what_encoding_gives(chats, encoder, tmp_path, workers):
    source = chats(300)

    index = build_index(source, encoder, tmp_path / "indices", workers=workers)

    for row in range(300):
        encoded = encoder.encode(source[row])
        assert (index.tokens[row], index.supervised[row]) == (encoded.tokens, encoded.num_supervised)
    assert index.ok.all()
    assert index.description["rows"] == 300
    assert not (index.path.parent / "parts").exists()


def test_a_second_run_reads_what_the_first_wrote(chats, encoder, tmp_path):
    source = chats(50)
    first = build_index(source, encoder, tmp_path, workers=0)
    written = first.path.stat().st_mtime_ns
    told = []
    reopened = open_source(source.shards[0].name)

    second = build_index(reopened, encoder, tmp_path, progress=lambda *seen: told.append(seen))

    assert second.path.stat().st_mtime_ns == written
    assert np.array_equal(first.tokens, second.tokens)
    assert not told


def write_files(folder, sizes):
    """JSON Lines of so many rows each, by name; the last row of each is none."""
    folder.mkdir(exist_ok=True)
    for name, rows in sizes.items():
        lines = [f'{{"text": "{"word " * (row % 7)}{name} {row}"}}' for row in range(rows - 1)]
        text = "\n".join([*lines, "{"])
        if not (folder / name).exists() or (folder / name).read_text() != text:
            (folder / name).write_text(text)


BEFORE = {"b.jsonl": 40, "c.jsonl": 50, "d.jsonl": 33, "e.jsonl": 7}
# Changes of a corpus by the sizes of its files afterwards, None for one that goes; and the rows that are measured.
CHANGES = {
    "a row more in one file": ({"c.jsonl": 51}, 51),
    "a file in front": ({"a.jsonl": 5}, 5),
    "a file behind, and one changed": ({"f.jsonl": 5, "b.jsonl": 3}, 8),
    "a file less": ({"c.jsonl": None}, 0),
    "all but one changed": ({"b.jsonl": 41, "c.jsonl": 51, "d.jsonl": 34}, 126),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_measures_its_own_rows_and_the_index_is_that_of_a_first_time(
    encoder, tmp_path, small_units, name, monkeypatch
):
    folder, skip, measured = tmp_path / "corpus", BadSamples("skip", limit=None, fraction=None), []
    write_files(folder, BEFORE)
    build_index(open_source(folder), encoder, tmp_path / "indices", workers=0, policy=skip)
    sizes, rows = CHANGES[name]
    write_files(folder, {file: size for file, size in sizes.items() if size})
    for file in (file for file, size in sizes.items() if size is None):
        (folder / file).unlink()
    monkeypatch.setattr(build, "measure_unit", lambda job, unit: measured.append(unit) or measure_unit(job, unit))

    again = build_index(open_source(folder), encoder, tmp_path / "indices", workers=0, policy=skip)

    assert sum(map(len, measured)) == rows
    afresh = build_index(open_source(folder), encoder, tmp_path / "others", workers=0, policy=skip)
    assert pq.read_table(again.path).equals(pq.read_table(afresh.path))
    assert again.bad.keys() == afresh.bad.keys()
    assert [str(error) for error in again.bad.values()] == [str(error) for error in afresh.bad.values()]


def test_a_damaged_index_gives_no_rows_to_another(encoder, tmp_path, small_units):
    folder, skip = tmp_path / "corpus", BadSamples("skip", limit=None, fraction=None)
    write_files(folder, BEFORE)
    first = build_index(open_source(folder), encoder, tmp_path / "indices", workers=0, policy=skip)
    content = bytearray(first.path.read_bytes())
    content[40:60] = bytes(20)  # of its first page
    first.path.write_bytes(content)
    write_files(folder, {"f.jsonl": 9})

    again = build_index(open_source(folder), encoder, tmp_path / "indices", workers=0, policy=skip)

    afresh = build_index(open_source(folder), encoder, tmp_path / "others", workers=0, policy=skip)
    assert pq.read_table(again.path).equals(pq.read_table(afresh.path))


def test_a_refresh_measures_anew(chats, encoder, tmp_path, small_units):
    source = chats(40)
    build_index(source, encoder, tmp_path, workers=0)
    told = []

    build_index(source, encoder, tmp_path, workers=0, refresh=True, progress=lambda *seen: told.append(seen))

    assert told == [(0, 40, 0), (32, 40, 0), (40, 40, 0)]


def test_other_content_or_settings_are_another_index(chats, tmp_path):
    source = chats(10)
    write_processor(tmp_path / "same", ["Which digits"], patch_size=8)
    write_processor(tmp_path / "settings", ["Which digits"], patch_size=8, max_pixels=64 * 64)
    write_processor(tmp_path / "words", ["How many pictures"], patch_size=8)
    first, same, settings, words, template = (
        load_processor(tmp_path / name) for name in ("same", "same", "settings", "words", "same")
    )
    template.chat_template = template.chat_template.replace("assistant", "helper")

    folders = [index_folder(source, Encoder(other), tmp_path) for other in (first, settings, words, template)]
    folders += [index_folder(source, Encoder(first.tokenizer), tmp_path)]
    folders += [index_folder(chats(10, folder="elsewhere"), Encoder(first), tmp_path)]

    assert len(set(folders)) == 6
    assert index_folder(open_source(source.shards[0].name), Encoder(same), tmp_path) == folders[0]


def test_a_run_goes_on_from_finished_parts(chats, encoder, tmp_path, small_units):
    source = chats(100)
    whole = build_index(source, encoder, tmp_path / "whole", workers=0)
    folder = index_folder(source, encoder, tmp_path / "stopped")

    class StoppedError(Exception):
        pass

    def stop(measured, rows, bad):
        if measured >= 64:
            raise StoppedError

    with pytest.raises(StoppedError):
        build_index(source, encoder, tmp_path / "stopped", workers=0, progress=stop)
    kept = {part: part.stat().st_mtime_ns for part in parts_of(folder)}
    assert len(kept) == 2
    damaged = parts_of(folder)[1]
    damaged.write_bytes(damaged.read_bytes()[:50])  # as a failing disk leaves it: it is measured again
    seen = []
    index = build_index(
        source, encoder, tmp_path / "stopped", workers=0, progress=lambda measured, *_: seen.append(measured)
    )

    assert seen == [0, 32, 64, 96, 100]
    assert np.array_equal(index.tokens, whole.tokens)


@pytest.mark.slow
def test_a_killed_run_goes_on(chats, encoder, processor, tmp_path, small_units):
    source = chats(1600)
    processor.save_pretrained(tmp_path / "model")
    folder = index_folder(source, encoder, tmp_path / "indices")
    program = _program(tmp_path, source, "build._LEAST_ROWS = 32; build_index(source, encoder, cache, workers=2)")

    with running([sys.executable, program]) as process:
        _wait_for(lambda: len(parts_of(folder)) >= 3, process)
        children = _children(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()

    assert children
    _wait_for(lambda: not any(_lives(pid) for pid in children))  # workers end with the process that started them
    kept = {part: part.stat().st_mtime_ns for part in parts_of(folder)}
    assert 3 <= len(kept) < len(units_of(1600))
    again = []
    index = build_index(
        source, encoder, tmp_path / "indices", workers=0, progress=lambda measured, *_: again.append(measured)
    )
    assert len(index) == 1600
    assert index.summary().tokens == build_index(source, encoder, tmp_path / "whole", workers=0).summary().tokens


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_build_the_same_index_at_once(chats, encoder, processor, tmp_path):
    source = chats(3000)
    processor.save_pretrained(tmp_path / "model")
    program = _program(tmp_path, source, "print(build_index(source, encoder, cache, workers=0).tokens.sum())")

    programs = [running([sys.executable, program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    with programs[0] as first, programs[1] as second:
        said = [process.communicate(timeout=300)[0] for process in (first, second)]

    assert (first.returncode, second.returncode) == (0, 0)
    expected = build_index(source, encoder, tmp_path / "whole", workers=0).summary().tokens
    assert said == [f"{expected}\n"] * 2


def test_a_full_disk_is_one_error_that_says_what_is_kept(chats, encoder, tmp_path):
    source = chats(600)
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs rights that this user lacks")
    try:
        folder = index_folder(source, encoder, disk)

        def fill(measured, rows, bad):
            if measured == 256:
                free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
                (disk / "ballast").write_bytes(bytes(free))

        with pytest.raises(DataError, match=r"disk of the length index is full.* 256 of 600 rows are.*HEADWAY_CACHE"):
            build_index(source, encoder, disk, workers=0, progress=fill)
        assert len(list((folder / "parts").iterdir())) == 1  # nothing half written
        (disk / "ballast").unlink()

        assert len(build_index(source, encoder, disk, workers=0)) == 600
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.long
@pytest.mark.slow
def test_a_disk_full_in_a_worker_is_the_same_error(chats, encoder, processor, tmp_path):
    source = chats(2000)
    assert len(source) == 2000  # the table of its lines is written while files may still be large
    processor.save_pretrained(tmp_path / "model")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    program = _program(tmp_path, source, f"{limit}; build_index(source, encoder, cache, workers=2)")

    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 1
    assert "The disk of the length index is full" in done.stderr.splitlines()[-1]


def test_a_cache_that_cannot_be_written_is_named(chats, encoder, tmp_path):
    (tmp_path / "file").write_text("not a folder")

    with pytest.raises(DataError, match=r"cannot be written to .*file.*HEADWAY_CACHE"):
        build_index(chats(10), encoder, tmp_path / "file", workers=0)


def test_a_killed_worker_is_replaced(chats, encoder, tmp_path, small_units):
    source = chats(600)
    killed = []

    def kill_one(measured, rows, bad):
        if measured and not killed:
            killed.append(_children(os.getpid())[-1])
            os.kill(killed[0], signal.SIGKILL)

    with pytest.warns(RuntimeWarning, match="worker was killed"):
        index = build_index(source, encoder, tmp_path, workers=2, progress=kill_one)

    assert killed
    assert index.ok.all()
    assert index.summary().tokens == build_index(source, encoder, tmp_path / "whole", workers=0).summary().tokens


class DeadlySource:
    """A source one of whose rows ends the process that reads it, as a crashing decoder does."""

    def __init__(self, source, row):
        self.source, self.row, self.name, self.sizes = source, row, source.name, source.sizes
        self.starts, self.shards = source.starts, source.shards

    def __len__(self):
        return len(self.source)

    def __getitem__(self, row):
        if row == self.row:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.source[row]

    def fingerprint(self):
        return self.source.fingerprint()


def test_a_row_that_kills_its_worker_is_narrowed_down(chats, encoder, tmp_path, small_units):
    source = DeadlySource(chats(200), row=70)

    with (
        pytest.warns(RuntimeWarning, match="worker was killed"),
        pytest.raises(DataError, match=r"Rows 64 to 95 of chats have ended their worker process 3 times"),
    ):
        build_index(source, encoder, tmp_path, workers=2)

    kept = parts_of(index_folder(source, encoder, tmp_path))
    assert kept


def test_a_source_without_rows_is_named(chats, encoder, tmp_path):
    class Nothing(DeadlySource):
        def __len__(self):
            return 0

    with pytest.raises(DataError, match="The dataset chats holds no rows"):
        build_index(Nothing(chats(1), row=0), encoder, tmp_path)


def test_a_row_that_cannot_be_used_stops_indexing(chats, encoder, tmp_path):
    with pytest.raises(DataError, match=r"chats\.jsonl, line 8"):
        build_index(chats(20, broken=[7]), encoder, tmp_path, workers=0)


def test_a_file_that_disappears_is_no_bad_row(chats, encoder, tmp_path):
    source = chats(1000)

    def remove(measured, rows, bad):
        if measured == 256:
            from headway.data.sources import files

            files._handle.cache_clear()
            (tmp_path / "data" / "chats.jsonl").unlink()

    with pytest.raises(DataError, match=r"chats\.jsonl cannot be read.*put it back"):
        build_index(source, encoder, tmp_path, workers=0, progress=remove)


def test_workers_below_zero_are_refused(chats, encoder, tmp_path):
    with pytest.raises(ConfigError, match="workers=-1"):
        build_index(chats(10), encoder, tmp_path, workers=-1)


def _program(tmp_path, source, body):
    """A script that builds the index in a process of its own."""
    script = tmp_path / "build.py"
    script.write_text(
        f"""
from pathlib import Path
from headway.data import Encoder
from headway.data.index import build, build_index
from headway.data.sources import open_source
from headway.models import load_processor

if __name__ == "__main__":
    cache = Path({str(tmp_path / "indices")!r})
    source = open_source({source.shards[0].name!r})
    encoder = Encoder(load_processor({str(tmp_path / "model")!r}))
    {body}
"""
    )
    return script


def _wait_for(happened, process=None, patience_s=120):
    end = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < end
        assert process is None or process.poll() is None
        time.sleep(0.01)


def _status(pid):
    """State and parent of a process; a zombie has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "Z", 0
    return state, int(parent)


def _lives(pid):
    return _status(pid)[0] != "Z"


def _children(pid):
    """Processes below one, nearest first."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found = [number for number in numbers if _status(number)[1] == pid and _lives(number)]
    return found + [below for child in found for below in _children(child)]
