import gc
import itertools
import json
import threading
import time
from collections import Counter

import pytest
import torch

from headway.data import Batch, Budget, PackLoader, Stage, read_samples
from headway.errors import CheckpointError, ConfigError, DataError

BUDGET = Budget(300, 400)


def same(a: Batch, b: Batch) -> bool:
    return a.sources == b.sources and all(
        torch.equal(x, y) for x, y in [(a.input_ids_1T, b.input_ids_1T), (a.labels_1T, b.labels_1T)]
    )


def sources(batches) -> Counter[str]:
    return Counter(itertools.chain(*(batch.sources for batch in batches)))


def threads() -> int:
    return sum(thread.name == "headway-data" for thread in threading.enumerate())


@pytest.mark.parametrize("strategy", ["best_fit", "first_fit"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_sample_is_handed_out_once_per_epoch_within_budget(many, encoder, strategy, prefetch):
    with PackLoader(many, encoder, BUDGET, strategy, epochs=3, prefetch=prefetch) as loader:
        batches = list(loader)
    assert sources(batches) == {sample.where: 3 for sample in many}
    assert all(batch.tokens <= 300 and batch.workload.patches <= 400 for batch in batches)
    report = loader.report()
    assert (report.read, report.used, report.dropped, report.truncated) == (120, 120, 0, 0)
    assert report.packs == len(batches)
    assert report.fill == sum(batch.tokens for batch in batches) / (300 * len(batches))


def test_the_same_seed_gives_the_same_packs_and_another_seed_others(many, encoder):
    def first(seed):
        with PackLoader(many, encoder, BUDGET, seed=seed) as loader:
            return list(itertools.islice(loader, 6))

    assert all(map(same, first(1), first(1)))
    assert not all(map(same, first(1), first(2)))


def test_epochs_are_shuffled_differently_and_unshuffled_ones_keep_the_files_order(many, encoder):
    budget = Budget(300)
    with PackLoader(many, encoder, budget, epochs=2, shuffle=False, open_packs=1) as loader:
        order = [source for batch in loader for source in batch.sources]
    assert order == [sample.where for sample in many] * 2
    with PackLoader(many, encoder, budget, epochs=2, open_packs=1) as loader:
        order = [source for batch in loader for source in batch.sources]
    assert order[:40] != order[40:]


def test_the_background_thread_changes_nothing(many, encoder):
    with (
        PackLoader(many, encoder, BUDGET, epochs=2, prefetch=0) as plain,
        PackLoader(many, encoder, BUDGET, epochs=2) as ahead,
    ):
        assert all(same(a, b) for a, b in zip(plain, ahead, strict=True))


@pytest.mark.parametrize("strategy", ["best_fit", "first_fit"])
def test_resuming_after_any_pack_gives_the_packs_that_would_have_followed(many, encoder, strategy):
    def build():
        stages = [Stage(many[:15], 1), Stage(many[10:30], 2)]
        return PackLoader(many, encoder, BUDGET, strategy, stages=stages, epochs=1, seed=5)

    with build() as loader:
        states, batches = [loader.state_dict()], []
        for batch in loader:
            batches.append(batch)
            states.append(json.loads(json.dumps(loader.state_dict())))
    assert len(batches) > 5
    for place, state in enumerate(states):
        with build() as resumed:
            resumed.load_state_dict(state)
            rest = list(resumed)
            assert len(rest) == len(batches) - place
            assert all(map(same, rest, batches[place:]))
            assert resumed.report() == loader.report()


def test_a_state_taken_while_packs_wait_in_the_queue_counts_only_those_handed_out(many, encoder):
    with PackLoader(many, encoder, BUDGET, prefetch=4) as loader:
        next(loader)
        deadline = time.monotonic() + 10
        while loader._thread._queue.qsize() < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        state, following = loader.state_dict(), next(loader)
    with PackLoader(many, encoder, BUDGET) as resumed:
        resumed.load_state_dict(state)
        assert same(next(resumed), following)


def test_going_back_to_a_state_in_the_middle_of_iterating_works(many, encoder):
    with PackLoader(many, encoder, BUDGET) as loader:
        next(loader)
        state, expected = loader.state_dict(), list(itertools.islice(loader, 3))
        loader.load_state_dict(state)
        assert all(map(same, itertools.islice(loader, 3), expected))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"strategy": "first_fit"}, "strategy was best_fit and is first_fit"),
        ({"budget": Budget(500)}, "budget was"),
        ({"open_packs": 3}, "open_packs was 8 and is 3"),
    ],
)
def test_a_state_of_other_settings_is_refused_with_what_differs(many, encoder, change, says):
    state = PackLoader(many, encoder, BUDGET).state_dict()
    options = {"samples": many, "encoder": encoder, "budget": BUDGET} | change
    with pytest.raises(CheckpointError, match=says):
        PackLoader(**options).load_state_dict(state)


def test_a_state_of_another_dataset_is_refused(many, encoder):
    state = PackLoader(many, encoder, BUDGET).state_dict()
    with pytest.raises(CheckpointError, match=r"stages was \[\[40, None\]\] and is \[\[39, None\]\]"):
        PackLoader(many[1:], encoder, BUDGET).load_state_dict(state)


def test_stages_play_in_order_before_the_samples(many, encoder):
    stages = [(many[:5], 2), (many[5:8], 1)]
    with PackLoader(many[8:], encoder, Budget(300), stages=stages, epochs=1, open_packs=1) as loader:
        order = [source for batch in loader for source in batch.sources]
    assert Counter(order[:10]) == {sample.where: 2 for sample in many[:5]}
    assert set(order[10:13]) == {sample.where for sample in many[5:8]}
    assert set(order[13:]) == {sample.where for sample in many[8:]}


def test_more_open_packs_fill_better(many, encoder):
    def fill(open_packs):
        with PackLoader(many, encoder, Budget(100), epochs=5, open_packs=open_packs, overlong="drop") as loader:
            list(loader)
            return loader.report().fill

    assert fill(16) > fill(1)


def long_and_short(write, **options):
    def line(words, picture=None):
        parts = [{"type": "image", "image": picture}] if picture else []
        question = {"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}
        return {"messages": [question, {"role": "assistant", "content": "one " * words}]}

    lines = [line(1), line(200), line(2, "big.png"), line(3), line(200, "small.png")]
    return read_samples(write(*lines, pictures={"big.png": (160, 160), "small.png": (16, 16)}))


def test_an_over_long_sample_is_named_with_its_size_the_budget_and_the_options(write, encoder):
    samples = long_and_short(write)
    with PackLoader(samples, encoder, Budget(100, 64), shuffle=False) as loader, pytest.raises(DataError) as caught:
        next(loader)
    message = str(caught.value)
    tokens = encoder.encode(samples[1]).tokens
    assert message.startswith(f"{samples[1].where}: the sample has {tokens} tokens and 0 vision patches")
    assert "budget of 100 tokens and 64 patches" in message
    assert '"drop"' in message
    assert '"truncate"' in message


def test_dropped_samples_are_left_out_and_counted(write, encoder):
    samples = long_and_short(write)
    with PackLoader(samples, encoder, Budget(100, 64), epochs=2, overlong="drop") as loader:
        seen = sources(loader)
    assert seen == {samples[0].where: 2, samples[3].where: 2}
    report = loader.report()
    assert (report.read, report.used, report.dropped, report.truncated) == (10, 4, 6, 0)


def test_truncating_cuts_text_and_drops_what_exceeds_the_patches(write, encoder):
    samples = long_and_short(write)
    with PackLoader(samples, encoder, Budget(100, 64), epochs=1, overlong="truncate") as loader:
        batches = list(loader)
    assert sources(batches) == {samples[i].where: 1 for i in (0, 1, 3, 4)}
    lengths = {s: n for b in batches for s, n in zip(b.sources, b.cu_seqlens_N.diff().tolist(), strict=True)}
    assert lengths[samples[1].where] == lengths[samples[4].where] == 100
    report = loader.report()
    assert (report.read, report.used, report.dropped, report.truncated) == (5, 4, 1, 2)


def test_a_dataset_of_which_nothing_fits_is_an_error_and_not_an_endless_search(many, encoder):
    loader = PackLoader(many, encoder, Budget(5), overlong="drop")
    with loader, pytest.raises(DataError, match="The last 40 samples all exceed a pack's budget of 5 tokens"):
        next(loader)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_in_the_data_surfaces_where_the_pack_is_asked_for(write, encoder, prefetch):
    def line(name):
        question = {"role": "user", "content": [{"type": "image", "image": name}]}
        return {"messages": [question, {"role": "assistant", "content": "one"}]}

    file = write(*[line("good.png")] * 30, line("bad.png"), pictures={"good.png": (16, 16), "bad.png": (64, 64)})
    (file.parent / "bad.png").write_bytes((file.parent / "bad.png").read_bytes()[:60])
    samples = read_samples(file)
    with PackLoader(samples, encoder, Budget(100), shuffle=False, prefetch=prefetch, open_packs=1) as loader:
        with pytest.raises(DataError, match=r"line 31: the image .*bad\.png .* cannot be read"):
            list(itertools.islice(loader, 100))
        assert loader.report().packs > 2
        with pytest.raises(DataError, match="line 31"):
            next(loader)


def test_an_ended_loader_stays_ended(many, encoder):
    with PackLoader(many, encoder, BUDGET, epochs=1) as loader:
        list(loader)
        assert list(loader) == []


def test_no_thread_is_left_after_closing_or_forgetting_a_loader(many, encoder):
    before = threads()
    with PackLoader(many, encoder, BUDGET, prefetch=1) as loader:
        next(loader)
        assert threads() == before + 1
    assert threads() == before
    forgotten = PackLoader(many, encoder, BUDGET, prefetch=1)
    next(forgotten)
    del forgotten
    gc.collect()
    assert threads() == before


def test_the_cache_keeps_to_its_bytes_and_saves_encoding(many, encoder):
    calls = Counter()

    class Counting:
        pixel_scale = encoder.pixel_scale

        def encode(self, sample):
            calls[sample.where] += 1
            return encoder.encode(sample)

    def encodings(cache_bytes):
        calls.clear()
        with PackLoader(many, Counting(), BUDGET, epochs=4, prefetch=0, cache_bytes=cache_bytes) as loader:
            list(loader)
            kept = loader._producer.cache.kept.values()
            assert sum(sample.num_bytes for sample in kept) <= cache_bytes
        return sum(calls.values())

    total = sum(encoder.encode(sample).num_bytes for sample in many)
    assert encodings(total) == 40
    assert encodings(0) == 160
    assert 40 < encodings(total // 2) < 160


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"overlong": "cut"}, "'cut'. Allowed: error, drop, truncate"),
        ({"strategy": "next"}, "'next'. Allowed"),
        ({"samples": []}, "Stage 0 of the data has 0 samples"),
        ({"epochs": 0}, "0 epochs"),
        ({"open_packs": 0}, "open_packs=0"),
        ({"prefetch": -1}, "prefetch=-1"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(many, encoder, options, says):
    with pytest.raises(ConfigError, match=says):
        PackLoader(**({"samples": many, "encoder": encoder, "budget": BUDGET} | options))
