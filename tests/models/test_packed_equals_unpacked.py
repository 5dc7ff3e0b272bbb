"""A pack's loss and gradients are those of its samples run alone, by transformers' own eager attention.

The reference never sees a pack, Headway's attention, its positions or its shifted labels: each sample goes through the
model by itself, the model computes positions and loss its own way, and the losses are weighted by supervised tokens.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from headway.data import Batch, Encoder
from headway.data.collate import Collator
from headway.data.encoded import EncodedSample
from headway.data.media.tensors import MediaTensors
from headway.models import load_model, rope_index
from headway.models.video import normalised
from helpers.cases import some
from helpers.models import FAMILIES, VISION_FAMILIES

TOLERANCE = 1e-5  # largest difference allowed, relative to the gradient's own norm; float32
LEAK = 1e-3  # a leak must show at least this much
LEAKY = {
    "gpt2",
    "gemma3_sliding",
    "gpt_oss_sinks",
    "qwen3_moe",
    "qwen2_5_vl",
    "qwen3_vl",
}  # whose leaks are tried often

collate = Collator()

Gradients = dict[str, torch.Tensor]
Result = tuple[float, Gradients]


def _gradients(model: torch.nn.Module, loss: torch.Tensor) -> Gradients:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def packed(model: torch.nn.Module, batch: Batch) -> Result:
    logits = model(**batch.model_inputs()).logits
    loss = F.cross_entropy(logits[0].float(), batch.labels_1T[0], reduction="sum") / batch.num_supervised
    return loss.item(), _gradients(model, loss)


def alone(model: torch.nn.Module, samples: list[EncodedSample]) -> Result:
    losses, counts = [], []
    for sample in samples:
        inputs = {"input_ids": sample.input_ids_S[None], "labels": sample.labels_S[None]}
        if "images" in sample.media:
            types = (sample.input_ids_S == model.config.image_token_id).int()[None]
            inputs |= {
                "pixel_values": sample.media["images"].features,
                "image_grid_thw": sample.media["images"].sizes,
                "mm_token_type_ids": types,
            }
        losses.append(model(**inputs, use_cache=False).loss)
        counts.append(int((sample.labels_S[1:] != -100).sum()))
    loss = sum(n * each for n, each in zip(counts, losses, strict=True)) / sum(counts)
    return loss.item(), _gradients(model, loss)


def difference(result: Result, reference: Result) -> float:
    """Largest relative difference of the loss and of any parameter's gradient."""
    assert result[1].keys() == reference[1].keys()
    found = [abs(result[0] - reference[0]) / abs(reference[0])]
    scale = max(g.norm().item() for g in reference[1].values())
    for name, expected in reference[1].items():
        norm = max(
            expected.norm().item(), 1e-6 * scale
        )  # gradients that vanish, such as key biases', are rounding noise
        found.append((result[1][name] - expected).norm().item() / norm)
    return max(found)


def as_read(sample: EncodedSample, encoder: Encoder) -> EncodedSample:
    """The sample with patches as the model reads them."""
    if "images" not in sample.media:
        return sample
    grids_M3, pixels_PD = sample.media["images"]
    return replace(sample, media={"images": MediaTensors(grids_M3, normalised(pixels_PD, encoder.pixel_scale))})


class Pair:
    """One model twice, with the same weights: as transformers made it, and as Headway trains it."""

    def __init__(self, config_of: Callable, family: str, processor, chats) -> None:
        sees = family in VISION_FAMILIES
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        self.reference = kind.from_config(config_of(family), attn_implementation="eager").train()
        with torch.no_grad():  # norms and biases start at one and zero, which hides mistakes in their gradients
            for parameter in self.reference.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        self.model = load_model(config_of(family), random_init=True).train()
        self.model.load_state_dict(self.reference.state_dict())
        encoder = Encoder(processor if sees else processor.tokenizer, rope_index(self.model))
        usable = chats if sees else [chat for chat in chats if not chat.images] * 2
        self.samples = [as_read(encoder.encode(chat), encoder) for chat in usable]


@pytest.fixture
def pair(request, tiny_config, processor, chats) -> Pair:
    return Pair(tiny_config, request.param, processor, chats)


@pytest.mark.parametrize("pair", FAMILIES, indirect=True)
def test_loss_and_every_gradient_of_a_pack_equal_its_samples_alone(pair):
    expected = alone(pair.reference, pair.samples)
    assert len(expected[1]) == len(list(pair.reference.parameters()))
    assert difference(packed(pair.model, collate(pair.samples)), expected) < TOLERANCE


@pytest.mark.parametrize("pair", FAMILIES, indirect=True)
def test_permuting_the_segments_changes_nothing(pair):
    order = torch.randperm(len(pair.samples)).tolist()
    shuffled = collate([pair.samples[i] for i in order])
    assert difference(packed(pair.model, shuffled), packed(pair.model, collate(pair.samples))) < TOLERANCE


def _merged_into_one_segment(batch: Batch) -> Batch:
    whole = torch.tensor([0, batch.tokens], dtype=torch.int32)
    return replace(batch, cu_seqlens_N=whole, max_seqlen=batch.tokens)


def _boundary_inside_an_answer(batch: Batch) -> Batch:
    moved = batch.cu_seqlens_N.clone()
    moved[1] -= 4
    return replace(batch, cu_seqlens_N=moved, max_seqlen=batch.max_seqlen + 4)


def _target_across_a_boundary(batch: Batch) -> Batch:
    labels, end = batch.labels_1T.clone(), int(batch.cu_seqlens_N[1])
    labels[0, end - 1] = batch.input_ids_1T[0, end]
    return replace(batch, labels_1T=labels)


def _positions_that_run_on(batch: Batch) -> Batch:
    places = torch.arange(batch.tokens).expand_as(batch.position_ids_R1T)
    return replace(batch, position_ids_R1T=places.clone())


def _images_swapped(batch: Batch) -> Batch:
    assert "images" in batch.media
    grids_M3, pixels_PD = batch.media["images"]
    return replace(batch, media={"images": MediaTensors(grids_M3, pixels_PD.flip(0))})


@pytest.mark.parametrize("pair", some(FAMILIES, LEAKY.__contains__), indirect=True)
@pytest.mark.parametrize("leak", [_merged_into_one_segment, _boundary_inside_an_answer, _target_across_a_boundary])
def test_a_leak_between_segments_makes_the_comparison_fail(pair, leak):
    leaked = packed(pair.model, leak(collate(pair.samples)))
    assert difference(leaked, alone(pair.reference, pair.samples)) > LEAK


@pytest.mark.parametrize("pair", VISION_FAMILIES, indirect=True)
@pytest.mark.parametrize("mistake", [_positions_that_run_on, _images_swapped])
def test_a_mistake_in_positions_or_images_makes_the_comparison_fail(pair, mistake):
    wrong = packed(pair.model, mistake(collate(pair.samples)))
    assert difference(wrong, alone(pair.reference, pair.samples)) > LEAK


@pytest.mark.parametrize("family", ["mistral_sliding", "gemma3_sliding", "gpt_oss_sinks"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_one_key_too_wide_or_narrow_makes_the_comparison_fail(family, change, tiny_config, processor, chats):
    pair = Pair(tiny_config, family, processor, chats)
    for module in pair.model.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window += change
    pair.model.config.sliding_window += change  # Mistral's layers read it there
    wrong = packed(pair.model, collate(pair.samples))
    assert difference(wrong, alone(pair.reference, pair.samples)) > LEAK


@pytest.mark.parametrize("pair", VISION_FAMILIES, indirect=True)
def test_a_pack_of_text_alone_trains_a_model_that_could_see(pair):
    text_only = [sample for sample in pair.samples if "images" not in sample.media]
    batch = collate(text_only)
    assert text_only
    assert "images" not in batch.media
    assert difference(packed(pair.model, batch), alone(pair.reference, text_only)) < TOLERANCE


# the method has two names: the old one is all that transformers 5.17 has, the new one the only one without a warning
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("pair", ["qwen3_vl", "gemma3_sliding"], indirect=True)
def test_checkpointed_layers_give_the_same_gradients(pair):
    expected = packed(pair.model, collate(pair.samples))
    pair.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert difference(packed(pair.model, collate(pair.samples)), expected) < TOLERANCE
