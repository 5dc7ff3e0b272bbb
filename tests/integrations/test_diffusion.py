"""Loops of diffusion models: what their steps run beside the denoiser is counted by itself, to the FLOP.

The witness is PyTorch's FlopCounterMode around what the loop really runs, with attention as plain products, which it
counts in full; masks of text encoders, where there are any, are taken out by hand.
"""

import warnings
from contextlib import ExitStack, contextmanager

import diffusers
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from headway import Workload, trace
from headway.devices import Peak
from headway.integrations import AccelerateMeter
from headway.meter import Meter
from helpers.diffusion import WIDTH, adapted, autoencoder, batch, denoiser

PEAK = Peak("test", 1e12, "fp32", "made up for a test")
SAMPLES, SIDE, WORDS = 2, 16, 20


def text_encoder():
    """A frozen CLIP; its scores above the diagonal are multiplied, and hidden."""
    config = CLIPTextConfig(
        vocab_size=99, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return CLIPTextModel(config).requires_grad_(False).eval()


def hidden_scores(samples=SAMPLES, words=WORDS):
    """FLOPs of the pairs that CLIP's causal mask hides: 4 for each feature of two layers."""
    return samples * 2 * 4 * WIDTH * (words * words - words * (words + 1) // 2)


@contextmanager
def counting():
    """Count what runs inside: yields a list whose sum are its FLOPs."""
    counter = FlopCounterMode(display=False)
    total = []
    with sdpa_kernel(SDPBackend.MATH), counter:
        yield total
    total.append(counter.get_total_flops())


def noised(latents, loss):
    """Make the denoiser's input, its target and its times, for flow matching or for the noise (epsilon)."""
    noise = torch.randn_like(latents)
    if loss == "flow":
        sigmas = torch.rand(len(latents)).view(-1, *[1] * (latents.dim() - 1))
        return (1 - sigmas) * latents + sigmas * noise, noise - latents, sigmas.flatten() * 1000
    scheduler = diffusers.DDPMScheduler()
    times = torch.randint(0, 1000, (len(latents),))
    return scheduler.add_noise(latents, noise, times), noise, times


class Loop:
    """The steps of diffusers' text-to-image script, in small: a UNet, a VAE and CLIP, cached or run."""

    def __init__(self, *, cached=False, loss="epsilon", lora=False):
        torch.manual_seed(0)
        self.unet, self.vae, self.text = denoiser("UNet2DConditionModel"), autoencoder(), text_encoder()
        if lora:
            self.unet = adapted(self.unet, ["to_q", "to_k", "to_v", "to_out.0"])
        self.cached, self.loss = cached, loss
        self.optimizer = torch.optim.AdamW([p for p in self.unet.parameters() if p.requires_grad])
        self.latents, self.states = self.encode(SIDE)

    @torch.no_grad()
    def encode(self, side):
        latents = self.vae.encode(torch.randn(SAMPLES, 3, side, side)).latent_dist.sample()
        return latents, self.text(torch.randint(2, 99, (SAMPLES, WORDS)), return_dict=False)[0]

    def step(self, side=SIDE):
        latents, states = (self.latents, self.states) if self.cached else self.encode(side)
        inputs, target, times = noised(latents, self.loss)
        prediction = self.unet(inputs, times, states, return_dict=False)[0]
        F.mse_loss(prediction, target).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("loss", ["epsilon", "flow"])
@pytest.mark.parametrize("cached", [False, True])
def test_what_a_step_runs_is_counted_by_itself(cached, loss, lora):
    loop = Loop(cached=cached, loss=loss, lora=lora)
    windows = []
    meter = Meter(
        loop.unet, peak=PEAK, watch=True, others=[loop.vae, loop.text], log_every=1, on_window=windows.append
    )
    flops = []
    with meter:
        for _ in range(2):
            with counting() as total:
                loop.step()
            flops.append(sum(total) - (0 if cached else hidden_scores()))
            meter.step()
    assert [window.flops.total for window in windows] == flops
    towers = {row.name.partition(".")[0] for row in windows[0].flops.rows}
    assert towers == ({"denoiser"} if cached else {"denoiser", "AutoencoderKL", "CLIPTextModel"})
    frozen = [row for row in windows[0].flops.rows if not row.name.startswith("denoiser")]
    assert all(row.dgrad == row.wgrad == 0 for row in frozen)
    assert windows[0].mfu > 0
    assert windows[0].media["images"] == SAMPLES
    assert windows[0].media["patches"] == SAMPLES * (SIDE // 2) ** 2
