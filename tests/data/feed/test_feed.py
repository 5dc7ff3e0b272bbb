"""No sample is lost or repeated: over epochs, and over stops and goings-on with other ranks and workers."""

import time
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.cli.resolve import resolve_cost_model
from headway.count import Workload
from headway.data import transfer
from headway.data.feed.lane import Streaming
from headway.data.index.build import build_index
from headway.data.samples import SampleLengths
from headway.errors import CheckpointError, ConfigError
from headway.packing.items import Items
from headway.packing.order import Stage, StageSource
from helpers.cases import IS_QUICK, examples
from helpers.data import Data, RememberingEncoder, samples_of

KINDS = ("indexed", "stream")


@pytest.fixture
def text_encoder(text_encoder):
    return RememberingEncoder.of(text_encoder)


def expected(sources):
    """Every row of "many" once and of "few" twice."""
    wanted = Counter()
    for source, times in zip(sources, (1, 2), strict=True):
        for row in range(len(source)):
            origin = source[row].origin
            wanted[origin.source, origin.file, origin.place] += times
    return wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (4, 1), (2, 2)])
def test_an_epoch_holds_every_sample_once(two_sources, text_encoder, kind, ranks, accumulation):
    together = Data(two_sources, text_encoder).ranks(kind, ranks, accumulation=accumulation)
    steps = list(together.steps())
    assert Counter(one for step in steps for one in samples_of(step)) == expected(two_sources)
    assert all(len(batches) in (0, accumulation) for step in steps for batches in step)
    assert all(batch.tokens <= 120 for step in steps for batches in step for batch in batches)
    counts = together.counts()
    assert {name: counts.samples[name]["used"].samples for name in ("many", "few")} == {"many": 37, "few": 22}
    assert counts.samples.total("used").tokens == counts.tokens == sum(b.tokens for s in steps for r in s for b in r)
    assert together.step() is None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(6, 12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=4))
def test_going_on_with_other_ranks_loses_and_repeats_nothing(two_sources, text_encoder, kind, stops):
    data = Data(two_sources, text_encoder)
    seen, state = Counter(), None
    for num_steps, ranks in [*stops, (10**9, 2)]:
        together = data.ranks(kind, ranks)
        if state is not None:
            together.load(state)
        for step in together.steps(num_steps):
            seen.update(samples_of(step))
        state = together.state()
    assert seen == expected(two_sources)
    assert together.counts().samples["few"]["used"].samples == 22


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_ranks_go_on_exactly(two_sources, text_encoder, kind):
    data = Data(two_sources, text_encoder)
    whole = [samples_of(step) for step in data.ranks(kind, 2).steps()]
    for stop in sorted({0, 1, 2, len(whole) // 2, len(whole) - 1}) if IS_QUICK else range(len(whole)):
        first = data.ranks(kind, 2)
        for _ in range(stop):
            first.step()
        again = data.ranks(kind, 2).load(first.state())
        assert [samples_of(step) for step in again.steps()] == whole[stop:]


@pytest.mark.parametrize("kind", KINDS)
def test_workers_change_nothing(two_sources, text_encoder, kind):
    data = Data(two_sources, text_encoder)
    alone = [samples_of(step) for step in data.ranks(kind, 1).steps()]
    with data.ranks(kind, 1).feeds[0] as before:
        begun = [samples_of([next(before)]) for _ in range(3)]
        state = before.merged([before.state_dict()])
    with data.ranks(kind, 1, workers=2, prefetch_bytes=40_000).feeds[0] as after:
        after.load_state_dict(state)
        rest, read_s = [], 0.0
        for batches in after:
            rest.append(samples_of([batches]))
            read_s += after.making_s.get("read", 0.0)
    assert begun + rest == alone
    assert read_s > 0  # in the workers


def test_no_pack_is_made_beyond_the_steps_that_are_needed(two_sources, text_encoder):
    steps = list(Data(two_sources, text_encoder).ranks("indexed", 1).steps())
    assert len(steps) > 5
    with Data(two_sources, text_encoder).ranks("indexed", 1).feeds[0] as feed:
        feed.needed = 5
        made = [samples_of([next(feed)]) for _ in range(3)]
        feed.close()  # as if workers had to begin anew
        made += [samples_of([one]) for one in feed]
    assert made == [samples_of(step) for step in steps[:5]]


def test_an_indexed_feed_gives_every_number_of_ranks_the_same_steps(two_sources, text_encoder):
    data = Data(two_sources, text_encoder)
    steps = [
        [sorted(samples_of(step)) for step in data.ranks("indexed", ranks, accumulation=4 // ranks).steps()]
        for ranks in (1, 2, 4)
    ]
    assert steps[0] == steps[1] == steps[2]


def test_a_state_of_other_data_or_settings_is_refused(two_sources, text_encoder):
    state = Data(two_sources, text_encoder).ranks("stream", 1).state()
    with pytest.raises(CheckpointError, match="lanes was 8 and is 4"):
        Data(two_sources, text_encoder, lanes=4).ranks("stream", 1).load(state)
    state = Data(two_sources, text_encoder).ranks("indexed", 1).state()
    with pytest.raises(CheckpointError, match="items was"):
        Data(two_sources[:1], text_encoder, (Stage((StageSource("many", epochs=1),)),)).ranks("indexed", 1).load(state)


def test_lanes_must_be_shared_evenly(two_sources, text_encoder):
    with pytest.raises(ConfigError, match="8 lanes cannot be shared by 3 ranks"):
        Data(two_sources, text_encoder).ranks("stream", 3)


def test_ranks_whose_lanes_end_early_wait_with_padding(two_sources, text_encoder):
    """One lane for each of 11 chats and 8 more without any: ranks end at different steps."""
    together = Data(two_sources[1:], text_encoder, (Stage((StageSource("few", epochs=1),)),), lanes=16).ranks(
        "stream", 4
    )
    steps = list(together.steps())
    assert any(not batches for batches in steps[-1])
    assert sum(len(samples_of(step)) for step in steps) == 11
    padding = together.feeds[0].padding()
    assert (padding.tokens, padding.slots, padding.num_supervised) == (0, 1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_share_out_the_samples_of_a_stage(two_sources, text_encoder, kind):
    stages = (
        Stage((StageSource("many", weight=3.0), StageSource("few", weight=1.0)), samples=80),
        Stage((StageSource("few", epochs=1, limit=5),)),
    )
    together = Data(two_sources, text_encoder, stages).ranks(kind, 2)
    by_source = Counter(name for step in together.steps() for name, _, _ in samples_of(step))
    assert by_source["many"] + by_source["few"] == 85
    assert abs(by_source["many"] - 60) <= (2 if kind == "indexed" else 8)  # a stream rounds in every lane


def test_a_stream_without_end_goes_on(two_sources, text_encoder):
    stages = (Stage((StageSource("many", weight=1.0),)),)
    together = Data(two_sources, text_encoder, stages, lanes=2).ranks("stream", 2)
    seen = Counter(one for step in together.steps(60) for one in samples_of(step))
    by_file = {file: [times for (_, name, _), times in seen.items() if name == file] for _, file, _ in seen}
    assert len(seen) == 37
    # A file belongs to one lane, which plays an epoch after the other; what waits in its buffer is one behind.
    assert all(max(times) - min(times) <= 2 for times in by_file.values())
    assert min(seen.values()) > 2


def test_a_source_smaller_than_the_lanes_cannot_keep_its_weight(two_sources, text_encoder):
    stages = (Stage((StageSource("many", weight=1.0), StageSource("few", weight=1.0))),)
    together = Data(two_sources, text_encoder, stages, lanes=12).ranks("stream", 1)
    with pytest.raises(ConfigError, match=r"'few' has no sample for lane 11 of 12.*data\.stream\.lanes"):
        list(together.steps(200))


def test_a_stream_of_long_documents_is_split_and_counted(tmp_path, text_encoder):
    from headway.data.sources import open_source

    words = "Which digits do you see? " * 60
    file = tmp_path / "documents.jsonl"
    file.write_text("\n".join(f'{{"text": "{n} {words}"}}' for n in range(6)) + '\n{"text": "short text"}\n')
    source = open_source(file, name="documents")
    stages = (Stage((StageSource("documents", epochs=1),)),)
    tokens = [text_encoder.measure(source[row]).tokens for row in range(7)]
    for kind in KINDS:
        together = Data([source], text_encoder, stages, overlong="split", lanes=2).ranks(kind, 2)
        pieces = [batch for step in together.steps() for batches in step for batch in batches]
        counts = together.counts().samples["documents"]
        assert counts["read"] == counts["used"] == (7, sum(tokens))
        assert counts["split"] == (6, sum(tokens[:6]))
        assert sum(batch.tokens for batch in pieces) == sum(tokens)
        dropped = Data([source], text_encoder, stages, overlong="drop", lanes=2).ranks(kind, 1)
        assert sum(len(samples_of(step)) for step in dropped.steps()) == 1
        report = dropped.counts()
        left_out = report.samples["documents"]["dropped"].samples + report.planned.get("documents", {}).get(
            "dropped", 0
        )
        assert left_out == 6
        cut = Data([source], text_encoder, stages, overlong="truncate", lanes=2).ranks(kind, 1)
        list(cut.steps())
        assert cut.counts().samples["documents"]["truncated"] == (6, sum(tokens[:6]) - 6 * 120)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_pinned_ahead_has_not_been_handed_out(two_sources, text_encoder, kind, workers, monkeypatch):
    """Positions and counts go by the packs that were handed out, however many wait in page-locked memory."""
    made = []

    def new_block(num_bytes):
        made.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(transfer, "pinned_block", new_block)
    data = Data(two_sources, text_encoder)
    whole = [samples_of(step) for step in data.ranks(kind, 2).steps()]
    first = data.ranks(kind, 2, workers=workers, prefetch_bytes=10**6, pin_memory=True)
    seen = [samples_of(step) for step in first.steps(3)]
    while len(made) <= 2 * 3:
        time.sleep(0.01)
    state = first.state()
    first.close()
    rest = data.ranks(kind, 2, pin_memory=True)
    rest.load(state)
    assert seen + [samples_of(step) for step in rest.steps()] == whole
    assert rest.counts().samples["few"]["used"].samples == 22
    rest.close()


def test_a_stream_and_an_index_deal_samples_by_the_flops_that_a_step_is_billed(two_sources, text_encoder):
    cost_model, source = resolve_cost_model("gpt2"), two_sources[0]
    data = Data(two_sources, text_encoder)
    streaming = Streaming(data.maker, data.stages, data.budget, cost_model=cost_model, skips_unlabelled=True)
    indices = {"many": build_index(source, text_encoder, workers=0)}
    items, _ = Items.build(indices, data.budget, cost_model=cost_model, skips_unlabelled=True)
    for row in range(len(source)):
        lengths, batch = text_encoder.measure(source[row]), data.maker.collator([text_encoder.encode(source[row])])
        billed = cost_model.count(batch.work(skips_unlabelled=True)).total
        assert billed < cost_model.count(batch.workload).total  # the question has no labels
        assert streaming.cost_of(lengths, 0, lengths.tokens) == items.costs[row] == billed
    # A piece is dealt by the labels that lie in it, its first token's left out.
    lengths, half = SampleLengths(10, 4, 5, targets=((5, 9),)), cost_model.count(Workload([4])).total
    assert streaming.cost_of(lengths, 5, 9) == half - cost_model.head_flops
