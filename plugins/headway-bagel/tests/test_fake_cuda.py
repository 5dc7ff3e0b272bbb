"""A training step of a model that draws on a pretended CUDA device: the kernels are called, and no host waits."""

import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from bagels import VAE, chat, image, write_model
from fake_cuda import steps
from fake_cuda.device import instead_of_flex, pretend_cuda
from fake_cuda.watch import Watch
from headway.data import read_samples
from headway.data.encoders import collator_of
from headway.models.load import load_processor
from headway.models.precision import choose_precision
from headway.tracing.build import preset_config, with_layers
from headway_bagel.encoding import DrawingEncoder

RECIPE = Path(__file__).parents[1] / "recipes" / "bagel-7b-mot-10240"
SIDES = [(64, 48), (32, 80), (96, 96)]


@pytest.fixture
def samples(tmp_path):
    """A picture to draw, an edit and a question, and an encoder for BAGEL-7B-MoT's sizes."""
    rng = np.random.default_rng(0)
    for number, sides in enumerate(SIDES):
        Image.fromarray(rng.integers(0, 255, (*sides, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    rows = [
        chat("Draw a red square.", [image("0.png")]),
        chat([image("1.png"), {"type": "text", "text": "Make it blue."}], [image("2.png")]),
        chat([image("2.png"), {"type": "text", "text": "What is this?"}], "a square"),
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = with_layers(preset_config("bagel-7b-mot"), 2)
    config.vae_config = {**VAE, "block_out_channels": [4, 8, 8, 8], "down_block_types": ["DownEncoderBlock2D"] * 4}
    config.vae_config |= {"up_block_types": ["UpDecoderBlock2D"] * 4, "latent_channels": 16}
    encoder = DrawingEncoder(load_processor(write_model(tmp_path / "model")), config)
    return config, [encoder.encode(sample) for sample in read_samples(tmp_path / "rows.jsonl")], encoder


def test_a_step_does_not_wait_for_the_device(samples):
    config, encoded, encoder = samples
    settings = steps.recipe(RECIPE, "speed.recompute=none")
    batch = collator_of(encoder, bucket_tokens=128)(encoded).noised(0, 1)
    with pretend_cuda() as device, steps._environment(ahead=True):
        precision = choose_precision(settings.run, device)
        trained = steps._trained(settings, config, precision, device)
        with Watch() as watch, patch("headway.models.attention.splits._flex", lambda: instead_of_flex):
            watch.sites = None
            steps._place(trained.model, device)
            found = steps._step(settings, trained, precision, batch, device, watch)
    assert found.waits == ()
    assert found.ops["aten::_fused_adamw_"] > 0
    assert found.patches > 0
    assert isinstance(batch.family_inputs.inputs["latent_pixels"][0], torch.Tensor)
