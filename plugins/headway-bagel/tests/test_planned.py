"""The plan of a model that draws: what processes exchange and what a pack moves, against the engine's own code."""

import pytest
import torch
from torch import nn

from bagels import PICTURE, QUESTION, tiny_bagel
from fake_cuda import moments
from fake_cuda.exchanged import run_exchanged
from headway.data.encoded import EncodedSample
from headway.data.media.tensors import MediaTensors
from headway.data.samples import Origin
from headway.meter.model_traffic import traffic_of
from headway.models.losses import IGNORED
from headway.packing.parts import SamplePart
from headway.plugins import register_families
from headway_bagel.encoding import DrawingCollator
from headway_bagel.layout import lay_out
from headway_bagel.model import BagelConfig

_READS = {
    "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 448,
    "patch_size": 14,
}  # fmt: skip


def _batch(model):
    return DrawingCollator(config=model.config)([_sample(model.config, number) for number in range(3)])


def _sample(config, number):
    """An image to read, words of which some are learnt, and an image to draw."""
    parts = (
        SamplePart("image", rows=12, columns=10 + number),
        SamplePart("text", 150, 40),
        SamplePart("noised", rows=16, columns=9 + number),
    )
    tokens = sum(part.tokens or part.rows * part.columns + 2 for part in parts)
    ids_S = torch.arange(tokens) % 7000
    learnt = parts[0].rows * parts[0].columns + 2 + torch.arange(150)[-40:]
    labels_S = torch.full_like(ids_S, IGNORED).index_copy(0, learnt, ids_S[learnt])
    sides = [[part.rows, part.columns] for part in parts]
    pixels_PD = torch.zeros(sides[0][0] * sides[0][1], 3 * config.read_pixels**2)
    return EncodedSample(
        input_ids_S=ids_S,
        labels_S=labels_S,
        position_ids_RS=lay_out([parts], config)[0]["position_ids"],
        origin=Origin("made", "memory", number, f"sample {number}"),
        media={"images": MediaTensors(torch.tensor([[1, *sides[0]]]), pixels_PD)},
        parts=parts,
        latent_images=(torch.zeros(3, *(side * config.latent_pixels for side in sides[2])),),
    )


@pytest.fixture
def _as_a_kind(monkeypatch):
    register_families()
    text = {**moments.LITTLE_TEXT, "model_type": "qwen3"}
    monkeypatch.setitem(moments.OTHERS, "drawing", BagelConfig(text, _READS, latent_patch_size=4))
    monkeypatch.setitem(moments.BATCHES, "drawing", _batch)


@pytest.mark.slow
@pytest.mark.usefixtures("_as_a_kind")
@pytest.mark.parametrize(("processes", "more"), [(2, ()), (4, ("parallel.sequence=2", "speed.recompute=full"))])
def test_every_byte_that_is_exchanged_is_planned(processes, more):
    base = ("speed.loss_chunk=256", "parallel.reduce_dtype=float32", "run.dtype=bfloat16-autocast")
    seen, planned = run_exchanged("drawing", moments.settings(*base, *more), processes)
    assert sum(seen.num_bytes.values())
    for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"):
        assert planned.num_bytes(kind) == seen.num_bytes[kind], kind
        assert sum(each.kind == kind for each in planned.all) == seen.calls[kind], kind


def test_both_copies_of_a_mixture_of_transformers_are_read():
    model = tiny_bagel()
    _, workload = lay_out([PICTURE, QUESTION], model.config)
    step = traffic_of(model, torch.optim.AdamW(model.parameters())).bytes_of(workload)
    copies = [p for name, p in model.named_parameters() if ".layers." in name and "proj" in name and p.dim() == 2]
    alone = traffic_of(model.requires_grad_(False)).bytes_of(workload)
    linear = sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear))
    assert alone.weights == linear
    assert step.weights - alone.weights >= sum(p.nbytes for p in copies)  # and again for gradients
