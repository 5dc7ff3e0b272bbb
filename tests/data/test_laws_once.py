"""Nothing is lost and nothing repeated: every token of every kind of source, over stops, other ranks and workers."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.packing import STRATEGIES
from helpers.cases import IS_QUICK, examples
from helpers.data import Pipeline, pieces_of

NAMES = ("pictures", "saved", "shard", "text", "ids")
STREAM = {"lanes": 8, "shuffle": 5, "open_packs": 2}
TOKENS = 200


def packs_of(step):
    """What the packs of a step hold; packs of padding alone are left out."""
    return sorted(pieces_of(batch) for batch in step if batch.num_segments)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("laws")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_CACHE", str(folder / "cache"))
        yield Pipeline(folder, encodes_once=True)


def epoch(pipeline, names=NAMES, epochs=1):
    return [pipeline.mix(**{name: {"epochs": epochs} for name in names})]


def trained(steps):
    return Counter(piece for step in steps for batch in step for piece in pieces_of(batch))


@pytest.mark.parametrize("stream", [None, pytest.param(STREAM, marks=pytest.mark.slow)], ids=["indexed", "stream"])
@settings(max_examples=examples(3, 10))
@given(data=st.data(), strategy=st.sampled_from(STRATEGIES), epochs=st.integers(1, 2))
def test_every_token_is_trained_on_once_an_epoch_however_often_it_is_interrupted(
    pipeline, stream, data, strategy, epochs
):
    how = {"tokens_per_pack": TOKENS, "strategy": strategy, "stream": stream, "seed": data.draw(st.integers(0, 99))}
    if stream is None:
        how["window"] = data.draw(st.sampled_from([None, 1, 16]))
    seen, state = Counter(), None
    for _ in range(data.draw(st.integers(1, 4))):
        ranks, accumulation = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.sampled_from([1, 3]))
        players = pipeline.play(epoch(pipeline, epochs=epochs), ranks, accumulation, state=state, **how)
        seen += trained(players.steps(data.draw(st.integers(0, 5))))
        state = players.state()
        players.close()
    players = pipeline.play(epoch(pipeline, epochs=epochs), 2, state=state, **how)
    seen += trained(players.steps())
    expected = pipeline.expected(NAMES, TOKENS, epochs)
    assert seen == expected
    report = players.counts()
    assert report.tokens == sum(len(ids) * times for (_, ids), times in expected.items())
    for name in NAMES:
        wholes = [whole.tokens for key, (_, whole) in pipeline.wholes.items() if key[0] == name]
        assert report.samples[name]["used"] == (len(wholes) * epochs, sum(wholes) * epochs)
        assert report.samples[name]["skipped"] == report.samples[name]["dropped"] == (0, 0)


@pytest.mark.parametrize("strategy", ["balanced", pytest.param("next_fit", marks=pytest.mark.slow)])
def test_the_steps_of_a_plan_are_the_same_however_many_ranks_share_them(pipeline, strategy):
    """Eight packs a step, over 8, 4, 2 and 1 ranks: run through, and from one to the other."""
    how = {"tokens_per_pack": TOKENS, "strategy": strategy, "window": 24}
    stages = epoch(pipeline, epochs=2)
    whole = [packs_of(step) for step in pipeline.play(stages, 8, **how).steps()]
    assert len(whole) > 8
    state, steps = None, []
    for ranks in (1, 4, 2, 8):
        players = pipeline.play(stages, ranks, 8 // ranks, state=state, **how)
        steps += [packs_of(step) for step in players.steps(2 if ranks < 8 else 10**6)]
        state = players.state()
    assert steps == whole
    for ranks in (2,) if IS_QUICK else (1, 4, 2, 8):
        assert [packs_of(step) for step in pipeline.play(stages, ranks, 8 // ranks, **how).steps()] == whole


def test_the_steps_of_a_stream_are_the_same_as_long_as_all_lanes_go_on(pipeline):
    how = {"tokens_per_pack": TOKENS, "stream": STREAM}
    stages = epoch(pipeline, epochs=3)
    runs = [list(feed) for feed in pipeline.play(stages, 8, **how).feeds]
    common = min(map(len, runs))
    assert common >= 3
    whole = [packs_of([batch for run in runs for batch in run[number]]) for number in range(common)]
    state, steps = None, []
    for ranks in (4, 2, 8):
        players = pipeline.play(stages, ranks, 8 // ranks, state=state, **how)
        steps += [packs_of(step) for step in players.steps(1 if ranks < 8 else common - 2)]
        state = players.state()
    assert steps == whole


@pytest.mark.slow
@pytest.mark.parametrize("stream", [None, STREAM], ids=["indexed", "stream"])
def test_workers_of_any_number_hand_out_the_same_packs(pipeline, stream):
    """Ranks 4, 2 and 8 without, with two and without workers, and four workers of one rank at last."""
    how = {"tokens_per_pack": TOKENS, "stream": stream}
    names = (*NAMES, "films", "table")
    stages = epoch(pipeline, names)
    seen, state = Counter(), None
    for ranks, workers, most in ((4, 0, 2), (2, 2, 2), (8, 0, 1), (1, 4, 10**6)):
        players = pipeline.play(stages, ranks, state=state, workers=workers, prefetch_bytes=100_000, **how)
        alone = pipeline.play(stages, ranks, state=state, prefetch_bytes=0, **how)
        steps = list(players.steps(most))
        assert [packs_of(step) for step in steps] == [packs_of(step) for step in alone.steps(most)]
        seen += trained(steps)
        state = players.state()
        assert state == alone.state()
        players.close()
    assert seen == pipeline.expected(names, TOKENS)
