"""Conditions that are left out at random: the same for a plan, a stream and a worker, and exactly planned."""

import pytest
import torch

from bagels import write_data, write_model
from headway.config import parse_config
from headway.data import read_samples
from headway.data.encoders import collator_of
from headway.models.load import load_model, load_processor
from headway.models.parallel.ranks import Ranks
from headway.packing.parts import Dropout
from headway.tracing import trace
from headway.train.data import open_feed
from headway_bagel.conditions import lengths_without, sample_without
from headway_bagel.encoding import DrawingEncoder
from headway_bagel.settings import DrawingConfig
from helpers.runs import configuration

HALF = Dropout(0.5, 0.5, 0.5, seed=3)


DROPPING = DrawingConfig(drop_text=0.4, drop_read=0.4, drop_reference=0.4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conditions")
    write_model(folder / "model")
    write_data(folder / "data")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder / "model", random_init=True)


@pytest.fixture(scope="module")
def encoder(folder, model):
    return DrawingEncoder(load_processor(folder / "model"), model.config, settings=DROPPING)


def edits(folder):
    return read_samples(folder / "data" / "all.jsonl")[1::3]


def test_lengths_without_conditions_are_those_of_the_samples_without_them(folder, encoder):
    shortened = 0
    for sample in read_samples(folder / "data" / "all.jsonl"):
        for epoch in range(6):
            measured, encoded = encoder.measure(sample), encoder.encode(sample)
            left = sample_without(encoded, HALF, epoch)
            assert lengths_without(measured, sample.origin, HALF, epoch) == left.lengths
            shortened += left.tokens < encoded.tokens
            assert left.parts[-1].kind == encoded.parts[-1].kind
    assert shortened > 40


def kinds(sample):
    return [part.kind for part in sample.parts]


def test_an_edit_without_conditions_is_what_bagels_trainer_lays_out(folder, encoder):
    """dataset_base.py: a dropped image takes a rotary position, a dropped text none; the drawn image stays."""
    seen = set()
    for sample in edits(folder):
        whole = encoder.encode(sample)
        reference, read, text, draw = (part.length for part in whole.parts)
        for epoch in range(12):
            left = sample_without(whole, HALF, epoch)
            stays = [kind in kinds(left) for kind in ("clean", "image", "text")]
            seen.add(tuple(stays))
            positions = [0] * reference * stays[0] + [1] * read * stays[1]
            positions += [*range(2, 2 + text)] * stays[2] + [2 + text * stays[2]] * draw
            batch = collator_of(encoder)([left])
            assert batch.position_ids_R1T[0, 0].tolist() == left.position_ids_RS[0].tolist() == positions
            tokens = torch.split(whole.input_ids_S, [reference, read, text, draw])
            expected = [one for one, on in zip(tokens, [*stays, True], strict=True) if on]
            assert torch.equal(batch.input_ids_1T[0], torch.cat(expected))
            assert ("images" not in batch.media) == (not stays[1])
            patches = sum(part.rows * part.columns for part in left.parts if part.kind in ("clean", "noised"))
            assert len(batch.family_inputs.inputs["latents"]) == patches
    assert len(seen) == 8


def feed_of(folder, encoder, model, cost, *, ranks=1, rank=0, epochs=None, **data):
    source = [{"path": str(folder / "data" / "all.jsonl"), "name": "all"} | ({"epochs": epochs} if epochs else {})]
    overrides = {"data": {"tokens_per_pack": 96, "overlong": "error"} | data}
    raw = configuration(folder / "model", source, folder / "unused", processes=ranks, overrides=overrides)
    return open_feed(parse_config(raw), encoder, model, cost, Ranks(rank, ranks), pin_memory=False)


def played(feed):
    """The lengths that each sample had, over its epochs."""
    found = {}
    for batches in feed:
        for batch in batches:
            lengths = batch.cu_seqlens_N.diff().tolist()
            for origin, length in zip(batch.origins, lengths, strict=False):
                found.setdefault(origin.row, []).append(length)
    return {row: sorted(lengths) for row, lengths in found.items()}


def test_what_is_planned_is_what_is_made_to_the_flop(folder, encoder, model):
    cost = trace(model)
    feed = feed_of(folder, encoder, model, cost)
    planned = feed.plan.steps()
    for _ in range(8):
        step, _ = next(planned)
        batches = next(feed)
        assert sorted(step.costs.tolist()) == sorted(cost.count(batch.workload).total for batch in batches)
        assert all(batch.tokens <= 96 for batch in batches)
    whole = encoder.encode(edits(folder)[0]).tokens
    left = played(feed_of(folder, encoder, model, cost, epochs=4))
    assert min(left[edits(folder)[0].origin.row]) < whole


@pytest.mark.parametrize(
    "other", [{"tokens_per_pack": 200}, {"strategy": "next_fit"}, {"stream": {"lanes": 1, "shuffle": 5}}]
)
def test_neither_the_packing_nor_a_stream_changes_what_is_left_out(folder, encoder, model, other):
    cost = trace(model)
    one, two = (played(feed_of(folder, encoder, model, cost, epochs=5, **how)) for how in ({}, other))
    assert one == two
    assert {len(lengths) for lengths in one.values()} == {5}
    assert sum(len(set(lengths)) > 1 for lengths in one.values()) > 12  # other conditions in other epochs
