import numpy as np
import pytest

from headway.packing.length_mixes import MIXES, PATCHES_PER_TOKEN


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
