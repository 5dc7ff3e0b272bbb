"""Samples that exceed a pack: what is planned can be encoded, and every learnt token is learnt once or counted."""

import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.sources import open_source
from headway.data.sources.opening import samples_of
from headway.errors import DataError
from headway.models.losses import IGNORED
from headway.packing.budget import Budget
from headway.packing.order import Stage, StageSource
from helpers.cases import examples
from helpers.data import Data, RememberingEncoder

STAGES = (Stage((StageSource("chats", epochs=1),)),)
SHORT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
ROUND = st.tuples(st.integers(1, 60), st.integers(1, 40), st.booleans())
CHATS = st.lists(st.lists(ROUND, min_size=1, max_size=3), min_size=1, max_size=4)


def row(rounds):
    """A chat of rounds, each words that are asked and answered, and whether the answer is learnt; the last one is."""
    turns = []
    for place, (asked, answered, learnt) in enumerate(rounds, start=1):
        turns.append({"role": "user", "content": "Which digits " * asked})
        turns.append({"role": "assistant", "content": "one, two " * answered, "loss": learnt or place == len(rounds)})
    return {"messages": turns}


def pieces_by_hand(labels, policy, most):
    """Places of the tokens of each piece of a sample, by the labels alone."""
    if len(labels) <= most:
        return [range(len(labels))]
    cut = {"truncate": [range(most)], "drop": [], "split": [range(a, a + most) for a in range(0, len(labels), most)]}
    pieces = [range(piece.start, min(piece.stop, len(labels))) for piece in cut[policy]]
    return [piece for piece in pieces if any(labels[place] != IGNORED for place in piece[1:])]


@pytest.mark.slow
@settings(max_examples=examples(12, 60), deadline=None)
@given(chats=CHATS, most=st.integers(24, 90), policy=st.sampled_from(["truncate", "drop", "split"]))
def test_every_planned_piece_encodes_and_every_learnt_token_is_learnt_once_or_left_out(
    text_encoder, chats, most, policy
):
    encoder = RememberingEncoder.of(text_encoder)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_CACHE", f"{folder}/cache")
        file = Path(folder) / "chats.jsonl"
        file.write_text("\n".join(map(json.dumps, [SHORT, *map(row, chats)])))
        source = open_source(file, name="chats")
        wholes = [encoder.encode(source[number]) for number in range(len(source))]
        wanted, learnt = Counter(), 0
        for whole in wholes:
            ids, labels = whole.input_ids_S.tolist(), whole.labels_S.tolist()
            for piece in pieces_by_hand(labels, policy, most):
                wanted[whole.origin.place, tuple(ids[piece.start : piece.stop])] += 1
                learnt += sum(labels[place] != IGNORED for place in piece[1:])
        for kind in ("indexed", "stream"):
            data = Data([source], encoder, STAGES, budget=Budget(most), overlong=policy, lanes=2)
            together = data.ranks(kind, 1)
            batches = [batch for step in together.steps() for batches in step for batch in batches]
            assert Counter(piece for batch in batches for piece in pieces_of(batch)) == wanted
            assert sum(sum(batch.supervised) for batch in batches) == learnt
            report = together.counts()
            counts, planned = report.samples["chats"], report.planned.get("chats")
            total = sum(whole.tokens for whole in wholes)
            used = sum(batch.tokens for batch in batches)
            assert counts["skipped"].samples == 0
            if planned:
                assert planned["tokens"] + planned["tokens_dropped"] == total
                assert planned["tokens"] == used
                assert planned["used"] == counts["used"].samples
            else:
                assert counts["used"].tokens + counts["dropped"].tokens + counts["truncated"].tokens == total
                assert counts["used"].samples + counts["dropped"].samples == len(wholes)


@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_samples_of_each_source_that_exceed_a_pack_follow_its_own_policy(text_encoder, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    policies, most = {"cut": "truncate", "pieces": "split", "left": "drop"}, 40
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, [SHORT, row([(3, 30, True)])])))
    sources = [open_source(file, name=name) for name in policies]
    wanted = Counter()
    for source, policy in zip(sources, policies.values(), strict=True):
        for place in range(len(source)):
            whole = text_encoder.encode(source[place])
            ids, labels = whole.input_ids_S.tolist(), whole.labels_S.tolist()
            for piece in pieces_by_hand(labels, policy, most):
                wanted[source.name, whole.origin.place, tuple(ids[piece.start : piece.stop])] += 1
    stages = (Stage(tuple(StageSource(name, epochs=1) for name in policies)),)
    together = Data(sources, text_encoder, stages, budget=Budget(most), overlong=policies, lanes=2).ranks(kind, 1)
    batches = [batch for step in together.steps() for batches in step for batch in batches]
    pieces = Counter(
        (origin.source, place, ids)
        for batch in batches
        for origin, (place, ids) in zip(batch.origins, pieces_of(batch), strict=True)
    )
    assert pieces == wanted
    counts = together.counts().samples
    cut = {name: (counts[name]["truncated"].samples, counts[name]["split"].samples) for name in policies}
    assert cut == {"cut": (1, 0), "pieces": (0, 1), "left": (0, 0)}
    strict = Data(sources, text_encoder, stages, budget=Budget(most), overlong=policies | {"left": "error"}, lanes=1)
    with pytest.raises(
        DataError, match="left.*more than a pack's budget of 40 tokens" if kind == "indexed" else "more"
    ):
        list(strict.ranks(kind, 1).steps())


@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_documents_without_words_are_left_out_and_counted_by_themselves(text_encoder, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    texts = ["Which digits?", "", "  \n", "one, two", ""]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    source = open_source(file, name="chats")
    together = Data([source], text_encoder, STAGES, lanes=1).ranks(kind, 1)
    batches = [batch for step in together.steps() for batches in step for batch in batches]
    assert sorted(place for batch in batches for place, _ in pieces_of(batch)) == ["line 1", "line 4"]
    report = together.counts()
    counts, planned = report.samples["chats"], report.planned.get("chats")
    assert (counts["used"].samples, counts["skipped"].samples) == (2, 0)
    if planned:
        assert (planned["read"], planned["used"], planned["empty"], planned["bad"], planned["dropped"]) == (
            5,
            2,
            3,
            0,
            0,
        )
    else:
        assert counts["dropped"].samples == 3
    assert [sample.content for sample in samples_of(source)] == ["Which digits?", "one, two"]


def pieces_of(batch):
    ids, bounds = batch.input_ids_1T[0].tolist(), batch.cu_seqlens_N.tolist()
    return [
        (origin.place, tuple(ids[start:stop]))
        for origin, start, stop in zip(batch.origins, bounds, bounds[1:], strict=False)
    ]
