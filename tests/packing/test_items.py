from dataclasses import dataclass, field

import numpy as np
import pytest

from headway.count import Workload, load_cost_model
from headway.errors import ConfigError, DataError
from headway.packing import Budget, Items
from headway.packing.pieces import TargetRuns


@dataclass
class Rows:
    """Lengths of a source's rows, as an index has them; a cost of 3 FLOPs a token and 2 a patch."""

    tokens: np.ndarray
    patches: np.ndarray
    media_end: np.ndarray
    first_target: np.ndarray
    ok: np.ndarray = field(init=False)
    blank: tuple[int, ...] = ()

    def __init__(self, *rows):
        self.blank = tuple(place for place, row in enumerate(rows) if row is EMPTY)
        tokens, patches, media_end, first_target = zip(*rows, strict=True)
        self.tokens, self.patches = np.array(tokens, dtype=np.int32), np.array(patches, dtype=np.int32)
        self.media_end, self.first_target = np.array(media_end), np.array(first_target)
        self.ok = self.tokens > 0

    def segments_of(self, _row):
        return ()

    @property
    def empty(self):
        return np.array([row in self.blank for row in range(len(self.tokens))])

    @property
    def targets(self):
        runs = [(first, tokens) for first, tokens in zip(self.first_target, self.tokens, strict=True)]
        return TargetRuns(np.arange(len(runs)), np.array(runs))

    def costs(self, cost_model):
        return np.array([cost_model.count(Workload([n])).total if n else 0 for n in self.tokens.tolist()]) * 1.0


# tokens, patches, media_end, first_target
FITS = (10, 0, 0, 4)
LONG_TEXT = (25, 0, 0, 4)
LONG_WITH_EARLY_IMAGE = (25, 8, 6, 8)
LONG_WITH_LATE_IMAGE = (25, 8, 20, 22)
LONG_WITH_LATE_ANSWER = (25, 0, 0, 10)
TOO_MANY_PATCHES = (9, 80, 8, 8)
BAD = (0, 0, 0, 0)
EMPTY = [0, 0, 0, 0]
ROWS = (FITS, LONG_TEXT, LONG_WITH_EARLY_IMAGE, LONG_WITH_LATE_IMAGE, LONG_WITH_LATE_ANSWER, TOO_MANY_PATCHES, BAD)
BUDGET = Budget(10, 50)


def build(policy, *rows, budget=BUDGET):
    items, counts = Items.build({"first": Rows(FITS), "second": Rows(*rows)}, budget, policy)
    place = items.locate(np.arange(len(items)))
    pieces = list(zip(*(column.tolist() for column in place[:4]), strict=True))
    assert pieces[0] == (0, 0, 0, 10)
    assert [piece[3] - piece[2] for piece in pieces] == items.tokens.tolist()
    return [piece[1:] for piece in pieces[1:]], counts["second"]


def test_rows_that_fit_are_items_as_they_are():
    pieces, counts = build("error", FITS, FITS)
    assert pieces == [(0, 0, 10), (1, 0, 10)]
    assert (counts.read, counts.used, counts.items, counts.tokens, counts.tokens_dropped) == (2, 2, 2, 20, 0)


@pytest.mark.parametrize("policy", ["error", "drop", "truncate", "split"])
def test_empty_rows_are_left_out_under_every_policy_and_counted_apart(policy):
    pieces, counts = build(policy, EMPTY, FITS, EMPTY, BAD, FITS)
    assert pieces == [(1, 0, 10), (4, 0, 10)]
    assert (counts.read, counts.empty, counts.bad, counts.used, counts.dropped) == (5, 2, 1, 2, 0)
    assert (counts.tokens, counts.tokens_dropped) == (20, 0)


def test_drop_leaves_out_whatever_exceeds_a_pack():
    pieces, counts = build("drop", *ROWS)
    assert pieces == [(0, 0, 10)]
    assert (counts.read, counts.bad, counts.used, counts.dropped) == (7, 1, 1, 5)
    assert (counts.tokens, counts.tokens_dropped) == (10, 4 * 25 + 9)


def test_truncate_keeps_the_beginning_unless_media_or_all_targets_would_go():
    pieces, counts = build("truncate", *ROWS)
    assert pieces == [(0, 0, 10), (1, 0, 10), (2, 0, 10)]
    assert (counts.used, counts.dropped, counts.truncated) == (3, 3, 2)
    assert (counts.tokens, counts.tokens_dropped) == (30, 15 + 15 + 25 + 25 + 9)


def test_split_makes_a_packs_worth_each_of_text_and_leaves_out_long_samples_with_media():
    pieces, counts = build("split", *ROWS)
    # Of the last row nothing would be learnt from the first pack's worth.
    assert pieces == [(0, 0, 10), (1, 0, 10), (1, 10, 20), (1, 20, 25), (4, 10, 20), (4, 20, 25)]
    assert (counts.used, counts.dropped, counts.split, counts.items) == (3, 3, 2, 6)
    assert (counts.tokens, counts.tokens_dropped) == (50, 25 + 25 + 9 + 10)


def test_of_a_rows_items_the_first_that_is_trained_on_counts_the_row():
    items, _ = Items.build({"a": Rows(LONG_WITH_LATE_ANSWER, FITS), "b": Rows(LONG_WITH_LATE_ANSWER)}, BUDGET, "split")
    places = items.locate(np.arange(len(items)))
    assert places.start.tolist() == [10, 20, 0, 10, 20]
    assert places.is_first.tolist() == [True, False, True, True, False]


def test_error_names_source_and_row():
    with pytest.raises(
        DataError, match=r"Row 1 \(counted from 0\) of second has 25 tokens and 0 vision patches, more than"
    ):
        build("error", FITS, LONG_TEXT)
    with pytest.raises(DataError, match=r"Row 0 \(counted from 0\) of second has 9 tokens and 80 vision patches"):
        build("error", TOO_MANY_PATCHES)


def test_without_a_patch_budget_patches_do_not_matter():
    pieces, _ = build("error", TOO_MANY_PATCHES, budget=Budget(10))
    assert pieces == [(0, 0, 9)]


@pytest.mark.parametrize(("policy", "lengths"), [("truncate", [10]), ("split", [10, 10, 5])])
def test_pieces_cost_what_the_model_computes_for_them(policy, lengths):
    model = load_cost_model("gpt2")
    items, _ = Items.build({"text": Rows(LONG_TEXT)}, BUDGET, policy, model)
    assert items.costs.tolist() == [model.count(Workload([length])).total for length in lengths]


@pytest.mark.parametrize(("policy", "segments"), [("truncate", [[4, 6]]), ("split", [[4, 6], [10], [5]])])
def test_pieces_of_a_chat_with_several_views_cost_its_segments(policy, segments):
    class Viewed(Rows):
        def segments_of(self, _row):
            return [4, 21]

        def costs(self, cost_model):
            return np.array([cost_model.count(Workload([4, 21])).total * 1.0])

    model = load_cost_model("gpt2")
    items, _ = Items.build({"chats": Viewed(LONG_TEXT)}, BUDGET, policy, model)
    assert items.costs.tolist() == [model.count(Workload(lengths)).total for lengths in segments]


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match=r"'shorten'. Allowed: error, drop, truncate, split"):
        build("shorten", FITS)


def test_the_fingerprint_changes_with_any_item():
    prints = {
        Items.of(tokens, patches, costs).fingerprint()
        for tokens, patches, costs in [([1, 2], None, None), ([1, 3], None, None), ([1, 2], [0, 4], None),
                                       ([1, 2], None, [5.0, 6.0]), ([1, 2, 3], None, None)]
    }  # fmt: skip
    assert len(prints) == 5
    assert Items.of([1, 2]).fingerprint() in prints


def test_sizes_name_the_sources():
    items, _ = Items.build({"a": Rows(FITS, FITS), "b": Rows(FITS)}, BUDGET)
    assert items.sizes == {"a": 2, "b": 1}
