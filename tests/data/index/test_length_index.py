import subprocess
import sys
from itertools import chain

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headway.count import Workload, load_cost_model
from headway.data.index import LengthIndex
from headway.data.index.length_index import METADATA
from headway.data.index.table import LAYOUT, join_tables, read_rows, table_of, write_table
from headway.data.samples import Origin, SampleError, SampleLengths
from headway.errors import DataError, WorkloadError
from headway.packing import Budget, Items

DESCRIPTION = {METADATA: b'{"layout": %d, "source": "chats"}' % LAYOUT}
ROWS = [
    SampleLengths(tokens=20, supervised=5, first_target=3, targets=((3, 6), (8, 10))),
    SampleLengths(
        tokens=300, supervised=40, first_target=250, media_end=200, media={"images": ((1, 8, 12), (1, 4, 4))}
    ),
    SampleError(Origin("chats", "chats.jsonl", 2, "line 3"), "the image is cut short"),
    SampleLengths(
        tokens=900, supervised=2, first_target=898, media_end=800, media={"videos": ((4, 8, 8),), "audio": (300,)}
    ),
    SampleLengths(tokens=20, supervised=7, first_target=1, media_end=9, media={"images": ((1, 4, 4),)}),
]


@pytest.fixture
def file(tmp_path):
    """The rows in three parts, joined to one file."""
    parts = []
    for number, (start, stop) in enumerate([(0, 2), (2, 3), (3, 5)]):
        parts.append(tmp_path / f"{number}.parquet")
        write_table(parts[-1], table_of(ROWS[start:stop]))
    join_tables(chain.from_iterable(map(read_rows, parts)), tmp_path / "index.parquet", DESCRIPTION, group_rows=2)
    return tmp_path / "index.parquet"


def test_what_was_measured_is_what_is_read(file):
    index = LengthIndex.load(file)

    assert index.tokens.tolist() == [20, 300, 0, 900, 20]
    assert index.supervised.tolist() == [5, 40, 0, 2, 7]
    assert index.first_target.tolist() == [3, 250, 0, 898, 1]
    assert index.media_end.tolist() == [0, 200, 0, 800, 9]
    assert [runs.tolist() for runs in index.targets] == [[[3, 6], [8, 10]], [], [], [], []]
    assert index.patches.tolist() == [0, 8 * 12 + 16, 0, 4 * 64, 16]
    assert [grids.tolist() for grids in index.media["images"]] == [[], [[1, 8, 12], [1, 4, 4]], [], [], [[1, 4, 4]]]
    assert [grids.tolist() for grids in index.media["videos"]] == [[], [], [], [[4, 8, 8]], []]
    assert [clips.tolist() for clips in index.media["audio"]] == [[], [], [], [300], []]
    assert index.ok.tolist() == [True, True, False, True, True]
    assert list(index.bad) == [2]
    assert str(index.bad[2]) == "chats.jsonl, line 3: the image is cut short"
    assert index.bad[2].origin == ROWS[2].origin
    assert index.description["source"] == "chats"
    assert len(index) == 5


def test_the_summary_counts_usable_rows_alone(file):
    summary = LengthIndex.load(file).summary()

    assert (summary.samples, summary.bad) == (5, 1)
    assert (summary.tokens, summary.supervised, summary.patches) == (1240, 54, 384)
    assert summary.items == {"images": 3, "videos": 1, "audio": 1}
    assert summary.length_percentiles[0] == 20
    assert summary.length_percentiles[50] == 20  # two of four rows do not exceed it
    assert summary.length_percentiles[90] == 900


def test_an_index_without_usable_rows_has_a_summary(tmp_path):
    write_table(tmp_path / "part", table_of([ROWS[2], ROWS[2]]))
    join_tables(read_rows(tmp_path / "part"), tmp_path / "index.parquet", DESCRIPTION)
    index = LengthIndex.load(tmp_path / "index.parquet")

    assert index.summary().length_percentiles == {}
    assert index.costs(load_cost_model("gpt2")).tolist() == [0, 0]


def test_pandas_reads_the_file(file):
    frame = pandas.read_parquet(file)

    assert frame.tokens.tolist() == [20, 300, 0, 900, 20]
    assert frame[frame.bad.isna()].tokens.sum() == 1240
    assert frame.bad[2]["reason"] == "the image is cut short"
    assert list(frame.image_grids[1]) == [{"t": 1, "h": 8, "w": 12}, {"t": 1, "h": 4, "w": 4}]


def test_the_file_holds_no_floats_and_is_compressed(file):
    assert not [field for field in pq.read_schema(file) if pa.types.is_floating(field.type)]
    groups = pq.read_metadata(file)
    assert groups.row_group(0).column(0).compression == "ZSTD"


def test_costs_are_those_of_the_whole_row(tmp_path):
    model = load_cost_model("qwen2.5-vl-7b")
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(30):
        images = tuple((1, int(h), int(w)) for h, w in 2 * rng.integers(1, 20, (rng.integers(0, 4), 2)))
        videos = tuple((int(t), 8, 12) for t in rng.integers(1, 5, rng.integers(0, 2)))
        patches = sum(t * h * w for t, h, w in images + videos)
        tokens = patches // 4 + int(rng.integers(10, 500))
        rows.append(SampleLengths(tokens, 3, 7, tokens - 5 if patches else 0, {"images": images, "videos": videos}))

    costs = _index_of(rows, tmp_path).costs(model)

    for row, cost in zip(rows, costs, strict=True):
        step = Workload([row.tokens], images=row.media["images"], videos=row.media["videos"])
        assert cost == pytest.approx(model.count(step).total, rel=1e-12)


def test_an_index_can_be_planned_over(file, tmp_path):
    index = LengthIndex.load(file)
    model = load_cost_model("qwen2.5-7b")

    items, counts = Items.build({"text": _index_of([ROWS[0]], tmp_path), "chats": index}, Budget(600), "drop")
    (costs,) = _index_of([ROWS[0]], tmp_path).costs(model)

    assert items.tokens.tolist() == [20, 20, 300, 20]
    assert items.locate(np.arange(4)).row.tolist() == [0, 0, 1, 4]
    assert (counts["chats"].bad, counts["chats"].dropped) == (1, 1)
    assert costs == model.count(Workload([20])).total


def test_a_model_without_eyes_does_not_cost_images(tmp_path):
    with pytest.raises(WorkloadError, match="no vision tower"):
        _index_of([ROWS[1]], tmp_path).costs(load_cost_model("gpt2"))


def test_a_file_cut_short_is_named(file):
    file.write_bytes(file.read_bytes()[:-20])

    with pytest.raises(DataError, match=r"index\.parquet cannot be read"):
        LengthIndex.load(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.parquet cannot be read"):
        LengthIndex.load(tmp_path / "nothing.parquet")


def test_a_parquet_file_of_something_else_is_refused(tmp_path):
    pq.write_table(pa.table({"tokens": [1, 2]}), tmp_path / "lengths.parquet")

    with pytest.raises(DataError, match="no length index of layout"):
        LengthIndex.load(tmp_path / "lengths.parquet")


def test_reading_an_index_needs_no_torch(file):
    program = (
        "import sys\nfrom headway.data.index import LengthIndex\n"
        f"assert len(LengthIndex.load({str(file)!r})) == 5\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def _index_of(rows, folder):
    write_table(folder / "part.parquet", table_of(rows))
    join_tables(read_rows(folder / "part.parquet"), folder / "rows.parquet", DESCRIPTION)
    return LengthIndex.load(folder / "rows.parquet")
