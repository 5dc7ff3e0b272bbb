import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headway.count import Workload, load_cost_model
from headway.errors import DataError, WorkloadError
from headway.packing.lengths import MIXES, PATCHES_PER_TOKEN, LengthTable, SamplePlaces, read_lengths
from headway.packing.pieces import TargetRuns


@pytest.fixture
def table(tmp_path):
    def write(content, name="lengths.csv"):
        path = tmp_path / name
        if isinstance(content, dict):
            pq.write_table(pa.table(content), path)
        else:
            path.write_text(content, encoding="utf-8")
        return path

    return write


def test_csv_and_parquet_say_the_same(table):
    for path in (
        table("patches,name,tokens\n16,a,300\n0,b,5\n"),
        table({"name": ["a", "b"], "tokens": [300, 5], "patches": [16, 0]}, "lengths.parquet"),
    ):
        lengths = read_lengths(path)
        assert lengths.tokens.tolist() == [300, 5]
        assert lengths.patches.tolist() == [16, 0]
        assert lengths.media_end.tolist() == [300, 0]
        assert lengths.ok.all()


def test_patches_may_be_left_out(table):
    lengths = read_lengths(table("tokens\n7\n8\n"))
    assert lengths.tokens.tolist() == [7, 8]
    assert lengths.patches.tolist() == [0, 0]


def test_grids_cost_what_the_model_computes_for_them(table):
    model = load_cost_model("qwen2.5-vl-7b")
    counted = model.count(Workload([900], images=[(1, 32, 48), (1, 16, 16)])).total
    for path in (
        table("tokens,grids\n900,1x32x48;1x16x16\n5,\n"),
        table({"tokens": [900, 5], "grids": [[[1, 32, 48], [1, 16, 16]], []]}, "lengths.parquet"),
    ):
        lengths = read_lengths(path)
        assert lengths.patches.tolist() == [32 * 48 + 16 * 16, 0]
        assert lengths.costs(model).tolist() == pytest.approx([counted, model.count(Workload([5])).total], rel=1e-12)


def test_patches_need_a_model_with_eyes(table):
    lengths = read_lengths(table("tokens,patches\n300,16\n"))
    with pytest.raises(WorkloadError, match="no vision tower"):
        lengths.costs(load_cost_model("gpt2"))


def test_samples_that_are_picked_are_what_they_were():
    """Each with its grids, views, targets and dataset, however often and in whatever order."""
    rng = np.random.default_rng(0)
    counts, runs = rng.integers(0, 3, 20), rng.integers(0, 4, 20)
    owners, of_run = np.repeat(np.arange(20), counts), np.repeat(np.arange(20), runs)
    order = rng.permutation(len(owners))  # images stand in any order
    table = LengthTable(
        rng.integers(1, 99, 20),
        counts * 4,
        rng.integers(1, 9, (len(owners), 3))[order],
        owners[order],
        {3: (5, 6), 17: (7,)},
        SamplePlaces(
            rng.integers(1, 9, 20), rng.integers(0, 9, 20), TargetRuns(of_run, rng.integers(1, 9, (len(of_run), 2)))
        ),
        rng.integers(0, 2, 20),
        (("a", "drop"), ("b", None), ("none of it", "split")),
    )

    def samples(table):
        return [
            (
                *(int(column[row]) for column in (table.tokens, table.patches, table.first_target, table.media_end)),
                table.grids[table.grid_rows == row].tolist(),
                table.targets.values[table.targets.rows == row].tolist(),
                table.segments_of(row),
                table.sources[table.source[row]],
            )
            for row in range(len(table.tokens))
        ]

    whole = samples(table)
    rows = rng.integers(0, 20, 50)
    assert samples(table.take(rows)) == [whole[row] for row in rows]
    assert list(table.parts) == ["a", "b"]
    for name, part in table.parts.items():
        assert samples(part.table) == [whole[row] for row in part.rows]
        assert {sample[-1] for sample in samples(part.table)} == {(name, part.overlong)}


BAD = [
    ("length\n5\n", 'has no column "tokens". Its columns are length'),
    ("", 'has no column "tokens". Its columns are none'),
    ("tokens\n", "holds no rows"),
    ("tokens\n5\n0\n", "row 2: tokens is 0, but must be at least 1"),
    ("tokens,patches\n5,-4\n", "row 1: patches is -4, but must be at least 0"),
    ("tokens\n5\nmany\n", "row 2: tokens is 'many'. Write a whole number below 2[*][*]31"),
    ("tokens\n2.5\n", "row 1: tokens is '2.5'"),
    ("tokens\n5\nnan\n", "row 2: tokens is 'nan'"),
    ("tokens\n4294967296\n", "row 1: tokens is '4294967296'"),
    ("tokens\n-99999999999999999999\n", "row 1: tokens is '-9999"),
    ("tokens,grids\n5,1x2\n", "grids"),
    ("tokens,grids\n5,1x0x2\n", "at least 1"),
    ("tokens,grids\nx,1x2x2\n", "row 1: tokens is 'x'"),
    ("tokens,grids\n5,1xax2\n", "row 1: grids is '1xax2'. Write grids, such as 1x32x48"),
    ("tokens\n7\n1,024\n", "row 2 has 2 cells below 1 headings"),
    ("tokens,patches\n7\n", "row 1 has 1 cells below 2 headings"),
    ("tokens,tokens\n7,8\n", 'several columns "tokens". Keep one'),
    ("tokens;patches\n7;8\n", 'no column "tokens".*Separate columns by commas'),
    ("x" * 200_000, "field larger than field limit"),
]


@pytest.mark.parametrize(("content", "text"), BAD)
def test_a_table_that_holds_no_lengths_is_refused(table, content, text):
    with pytest.raises(DataError, match=text):
        read_lengths(table(content))


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"length": [5]}, 'has no column "tokens"'),
        ({"tokens": [5, None]}, "'tokens' has empty rows"),
        ({"tokens": [1.5]}, "holds float64 values"),
        ({"tokens": ["5"]}, "no lengths"),
        ({"tokens": pa.array([], pa.int64())}, "holds no rows"),
        ({"tokens": [5], "grids": [[[1, 2]]]}, "no list of"),
    ],
)
def test_a_parquet_table_that_holds_no_lengths_is_refused(table, columns, text):
    with pytest.raises(DataError, match=text):
        read_lengths(table(columns, "lengths.parquet"))


def test_a_file_that_cannot_be_read_is_refused(tmp_path, table):
    with pytest.raises(DataError, match="cannot be read"):
        read_lengths(tmp_path / "none.csv")
    with pytest.raises(DataError, match="cannot be read"):
        read_lengths(table("no parquet", "lengths.parquet"))


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_a_mix_draws_samples_that_hold_their_media(mix):
    table = mix.lengths(500, seed=3)
    assert len(table.tokens) == len(table.patches) == 500
    assert table.tokens.min() >= 1
    assert (mix.kind == "text") == (len(table.grids) == 0)
    assert np.array_equal(table.patches, np.bincount(table.grid_rows, table.grids.prod(axis=1), 500))
    assert (table.grids[:, 1:] % 2 == 0).all()
    # pictures are rounded up to whole rows, videos to whole frames; few samples are pictures alone
    assert table.patches.sum() <= 1.1 * PATCHES_PER_TOKEN * table.tokens.sum()
    again = mix.lengths(500, seed=3)
    assert np.array_equal(again.tokens, table.tokens)
    assert not np.array_equal(mix.lengths(500, seed=4).tokens, table.tokens)


@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("chats", 800 * np.exp(1.1**2 / 2)),  # of a lognormal; few are cut off
        ("documents", 156e9 / 365e6),  # C4's tokens over its documents
        ("videos", 14_500),
        ("vqa", 600),
    ],
)
def test_the_mean_length_is_what_its_source_says(name, mean):
    assert MIXES[name].lengths(20_000).tokens.mean() == pytest.approx(mean, rel=0.06)


def test_pictures_of_a_sample_share_its_patches():
    table = MIXES["images"].lengths(2_000)
    number = np.bincount(table.grid_rows, minlength=2_000)
    assert sorted(set(number.tolist())) == [0, 1, 2, 4]
    assert np.bincount(number)[[0, 1, 2, 4]] / 2_000 == pytest.approx([0.25, 0.55, 0.12, 0.08], abs=0.03)
