"""Mixtures are trained on as configured: stages one after the other, sources by their shares, and all of it counted."""

from collections import Counter

import pytest

from helpers.data import Pipeline, pieces_of

TOKENS = 200
STREAM = {"lanes": 2, "shuffle": 5, "open_packs": 2}
WEIGHTS = {"pictures": 4, "saved": 3, "shard": 2, "ids": 1}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("laws")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_CACHE", str(folder / "cache"))
        yield Pipeline(folder, encodes_once=True)


def sources_of(step):
    return Counter(origin.source for batch in step for origin in batch.origins)


@pytest.mark.parametrize("stream", [None, STREAM], ids=["indexed", "stream"])
def test_shares_are_as_configured_and_counts_are_of_what_was_read(pipeline, stream):
    """What waits in a window, a buffer or open packs was drawn and is not trained on yet: some 64 samples at most."""
    stages = [pipeline.mix(**{name: {"weight": weight} for name, weight in WEIGHTS.items()})]
    how = {"stream": stream} if stream else {"window": 64}
    players = pipeline.play(stages, 2, 2, tokens_per_pack=TOKENS, **how)
    steps = list(players.steps(50))
    found = sum((sources_of(step) for step in steps), Counter())
    assert found.total() > 500
    for name, weight in WEIGHTS.items():
        assert abs(found[name] - found.total() * weight / 10) < 64 * weight / 10 + 8
    tokens = Counter()
    for step in steps:
        for batch in step:
            for (name, *_), ids in pieces_of(batch):
                tokens[name] += len(ids)
    report = players.counts()
    for name in WEIGHTS:
        assert report.samples[name]["read"] == report.samples[name]["used"] == (found[name], tokens[name])
    assert report.tokens == tokens.total() == sum(batch.tokens for step in steps for batch in step)
    players.close()


@pytest.mark.parametrize("strategy", ["balanced", "none"])
def test_a_stage_begins_when_the_one_before_has_ended(pipeline, strategy):
    """What fills no step of the first stage is packed with the second: less than two steps' worth of tokens."""
    stages = [pipeline.mix(saved={"epochs": 5}), pipeline.mix(ids={"epochs": 9}, shard={"epochs": 3})]
    players = pipeline.play(stages, 2, tokens_per_pack=TOKENS, strategy=strategy)
    steps = list(players.steps())
    assert sum((sources_of(step) for step in steps), Counter()) == {"saved": 80, "ids": 63, "shard": 30}
    second = next(number for number, step in enumerate(steps) if sources_of(step).keys() - {"saved"})
    late = [
        len(ids) for step in steps[second:] for batch in step for (name, *_), ids in pieces_of(batch) if name == "saved"
    ]
    assert second >= 8
    assert sum(late) < 2 * 2 * TOKENS


@pytest.mark.parametrize("stream", [None, STREAM], ids=["indexed", "stream"])
@pytest.mark.parametrize("limit", [1, 3, 10, 1000])
def test_a_limited_source_gives_as_many_samples_as_it_may(pipeline, stream, limit):
    stages = [pipeline.mix(saved={"epochs": 2, "limit": limit}, pictures={"epochs": 1, "limit": limit})]
    players = pipeline.play(stages, tokens_per_pack=TOKENS, stream=stream)
    found = sum((sources_of(step) for step in players.steps()), Counter())
    assert found == {"saved": 2 * min(limit, 16), "pictures": min(limit, 14)}
