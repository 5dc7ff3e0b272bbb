"""No token attends across samples and no target crosses a segment: from files of every kind to a real model's outputs.

Packs come out of the whole pipeline. Each of their segments is held against its sample alone: what stands in the pack
by derivation, the logits by transformers' eager attention run on the sample by itself, and isolation by the gradient of
one segment's loss, which must be exactly zero everywhere else.
"""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from headway.models.attention import use_attention
from headway.models.video import normalised
from headway.packing import STRATEGIES
from helpers.cases import examples
from helpers.data import Pipeline, key_of

NAMES = ("pictures", "table", "shard", "saved", "films", "text", "ids")
STREAM = {"lanes": 2, "shuffle": 4, "open_packs": 3}
TOLERANCE = 1e-5  # largest difference of logits allowed, relative to the largest of them; float32
END = "<|im_end|>"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("laws")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_CACHE", str(folder / "cache"))
        made = Pipeline(folder)
        made.alone = copy.deepcopy(made.model)
        use_attention(made.alone, "eager")
        for parameter in [*made.model.parameters(), *made.alone.parameters()]:
            parameter.requires_grad_(False)
        yield made


def segments_of(pipeline, batch, tokens_per_pack):
    """Check what stands in a pack; its segments, each with the part of its sample that it is."""
    bounds, found = batch.cu_seqlens_N.tolist(), []
    assert bounds[0] == 0
    assert bounds[-1] == batch.slots
    assert batch.max_seqlen == max(stop - start for start, stop in pairwise(bounds))
    for number, origin in enumerate(batch.origins):
        sample, whole = pipeline.wholes[key_of(origin)]
        start, stop = bounds[number : number + 2]
        ids = batch.input_ids_1T[0, start:stop]
        first = next(
            first
            for first in range(0, whole.tokens, tokens_per_pack)
            if torch.equal(whole.input_ids_S[first : first + tokens_per_pack], ids)
        )
        labels = batch.labels_1T[0, start:stop]
        assert labels[-1] == -100, "the last token of a segment has no target"
        assert all(target in (-100, following) for target, following in zip(labels, ids[1:], strict=False))
        learnt = labels[labels != -100]
        if hasattr(sample, "messages"):
            answers = [message.text + END for message in sample.messages if message.role == "assistant"]
            assert pipeline.encoder.tokenizer.decode(learnt) == "".join(answers)
        else:
            assert torch.equal(learnt, ids[1:])
        positions = batch.position_ids_R1T[:, 0, start:stop]
        assert positions[:, 0].tolist() == [0, 0, 0]
        if not whole.media_end:
            assert torch.equal(positions, torch.arange(stop - start).expand(3, -1))
        found.append((start, stop, whole, first))
    padding = bounds[len(batch.origins)]
    assert len(bounds) - 1 - len(batch.origins) == int(padding < batch.slots)
    assert (batch.labels_1T[0, padding:] == -100).all()
    return found


def logits_alone(pipeline, whole, first, length):
    inputs = {"input_ids": whole.input_ids_S[None, first : first + length]}
    if whole.media_end:
        inputs["mm_token_type_ids"] = whole.token_types_S[None]
        if "images" in whole.media:
            inputs |= {
                "pixel_values": normalised(whole.media["images"].features, pipeline.encoder.pixel_scale),
                "image_grid_thw": whole.media["images"].sizes,
            }
        if "videos" in whole.media:
            inputs["pixel_values_videos"] = normalised(whole.media["videos"].features, pipeline.encoder.pixel_scale)
            inputs["video_grid_thw"] = whole.media["videos"].sizes
    return pipeline.alone(**inputs, use_cache=False).logits[0]


class Watched:
    """A pack run through the model with gradients of its token embeddings and pixels."""

    def __init__(self, model, batch):
        self.embeddings = []

        def watch(_module, _inputs, output):
            self.embeddings.append(output.detach().requires_grad_())
            return self.embeddings[0]

        inputs = batch.model_inputs()
        kinds = [kind for kind in ("pixel_values", "pixel_values_videos") if kind in inputs]
        self.pixels = {kind: inputs[kind].detach().clone().requires_grad_() for kind in kinds}
        handle = model.get_input_embeddings().register_forward_hook(watch)
        try:
            self.logits_TV = model(**inputs | self.pixels).logits[0]
        finally:
            handle.remove()

    def gradients(self, loss):
        watched = [self.embeddings[0], *self.pixels.values()]
        found = torch.autograd.grad(loss, watched, retain_graph=True, allow_unused=True, materialize_grads=True)
        return found[0][0], dict(zip(self.pixels, found[1:], strict=True))


def check_outputs(pipeline, batch, segments, chosen):
    watched = Watched(pipeline.model, batch)
    for start, stop, whole, first in segments:
        expected = logits_alone(pipeline, whole, first, stop - start)
        assert (watched.logits_TV[start:stop] - expected).abs().max() < TOLERANCE * expected.abs().max()
    start, stop, whole, _ = segments[chosen % len(segments)]
    if batch.supervised[chosen % len(segments)] == 0:
        return
    loss = F.cross_entropy(watched.logits_TV[start:stop], batch.labels_1T[0, start:stop])
    embeddings_TH, pixels = watched.gradients(loss)
    assert embeddings_TH[start:stop].any()
    assert not embeddings_TH[:start].any()
    assert not embeddings_TH[stop:].any()
    places = {"pixel_values": "images", "pixel_values_videos": "videos"}
    for kind, gradient_PD in pixels.items():
        own = [w.media.get(places[kind]) for _, _, w, _ in segments]
        counts = [0 if media is None else len(media.features) for media in own]
        before = sum(counts[: chosen % len(segments)])
        after = before + counts[chosen % len(segments)]
        assert bool(gradient_PD[before:after].any()) is (after > before)
        assert not gradient_PD[:before].any()
        assert not gradient_PD[after:].any()


@settings(max_examples=examples(8, 15))
@given(
    names=st.sets(st.sampled_from(NAMES), min_size=1),
    strategy=st.sampled_from(STRATEGIES),
    stream=st.sampled_from([None, STREAM]),
    tokens_per_pack=st.sampled_from([160, 330]),
    buckets=st.sampled_from([{}, {"bucket_tokens": 64, "bucket_patches": 48}]),
    seed=st.integers(0, 10**6),
)
def test_every_segment_of_every_pack_is_its_sample_alone(
    pipeline, names, strategy, stream, tokens_per_pack, buckets, seed
):
    stages = [pipeline.mix(**{name: {"epochs": 1} for name in sorted(names)})]
    limits = {"tokens_per_pack": tokens_per_pack, "patches_per_pack": 400}
    players = pipeline.play(stages, stream=stream, strategy=strategy, seed=seed, **limits, **buckets)
    batches = [batch for step in players.steps() for batch in step]
    assert {origin.source for batch in batches for origin in batch.origins} == names
    run = seed % len(batches)
    for number, batch in enumerate(batches):
        segments = segments_of(pipeline, batch, tokens_per_pack)
        assert len(segments) == 1 or strategy != "none"
        if number == run:
            check_outputs(pipeline, batch, segments, chosen=seed)


def merged(batch):
    bounds = batch.cu_seqlens_N[[0, *range(2, len(batch.cu_seqlens_N))]]
    return replace(batch, cu_seqlens_N=bounds, max_seqlen=int(bounds.diff().max()))


def test_a_leak_between_two_segments_is_noticed(pipeline):
    """The same pack with one boundary left out."""
    stages = [pipeline.mix(saved={"epochs": 1}, pictures={"epochs": 1})]
    batches = [batch for step in pipeline.play(stages, tokens_per_pack=330).steps() for batch in step]
    batch = next(batch for batch in batches if batch.num_segments > 2)
    segments = segments_of(pipeline, batch, 330)
    check_outputs(pipeline, batch, segments, chosen=1)
    with pytest.raises(AssertionError):
        check_outputs(pipeline, merged(batch), segments, chosen=1)
    with pytest.raises((AssertionError, StopIteration)):
        segments_of(pipeline, merged(batch), 330)
