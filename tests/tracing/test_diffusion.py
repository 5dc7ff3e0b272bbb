"""Diffusion models as plain modules: conditioned on a time step, attending in both directions, traced on any size."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.count import Workload
from headway.tracing import trace
from helpers.counter import counted, dispatched

WIDTH, HEADS, CHANNELS, PATCH, TEXT, TEXT_WIDTH = 24, 3, 4, 2, 7, 10


def attend(q, k, v):
    heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


def sinusoids(time, width):
    angles = time[:, None] * torch.exp(torch.arange(width // 2) * (-math.log(10_000) / (width // 2)))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Block(nn.Module):
    """Attention over all patches, over the text too where there is one, and an MLP, scaled and shifted by the time."""

    def __init__(self, crosses):
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.cross_q = nn.Linear(WIDTH, WIDTH) if crosses else None
        self.cross_kv = nn.Linear(TEXT_WIDTH, 2 * WIDTH) if crosses else None

    def forward(self, x, condition, text):
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        y = self.norms[0](x) * (1 + scale_1) + shift_1
        x = x + gate_1 * self.out(attend(*self.qkv(y).chunk(3, dim=-1)))
        if self.cross_q is not None:
            x = x + attend(self.cross_q(x), *self.cross_kv(text).chunk(2, dim=-1))
        return x + gate_2 * self.mlp(self.norms[1](x) * (1 + scale_2) + shift_2)


class DiffusionTransformer(nn.Module):
    """Predicts the noise in latents [batch, channels, frames, height, width]."""

    def __init__(self, crosses=False):
        super().__init__()
        self.embed = nn.Conv3d(CHANNELS, WIDTH, (1, PATCH, PATCH), stride=(1, PATCH, PATCH))
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block(crosses) for _ in range(2))
        self.head = nn.Linear(WIDTH, CHANNELS * PATCH * PATCH)

    def forward(self, latents, time, text=None):
        x = self.embed(latents).flatten(2).transpose(1, 2)
        condition = self.time(sinusoids(time, WIDTH).to(x.dtype))
        for block in self.blocks:
            x = block(x, condition, text)
        return self.head(x)


class UNet(nn.Module):
    """Convolutions at two resolutions, with attention at the lower one, between a way down and a way up."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.time = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.norm, self.mix = nn.GroupNorm(4, WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.qkv, self.out = nn.Conv1d(WIDTH, 3 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2)
        self.leave = nn.Conv2d(2 * WIDTH, CHANNELS, 3, padding=1)

    def forward(self, latents, time):
        first = self.enter(latents)
        x = self.down(first + self.time(sinusoids(time, WIDTH).to(first.dtype))[..., None, None])
        x = x + self.mix(F.silu(self.norm(x)))
        y = x.flatten(2)
        y = y + self.out(attend(*self.qkv(y).transpose(1, 2).chunk(3, dim=-1)).transpose(1, 2))
        return self.leave(torch.cat([first, self.up(y.unflatten(2, x.shape[2:]))], dim=1))


class OneByOne(nn.Module):
    """Runs a model on images and videos of any sizes, one after another."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, latents, *conditions):
        return torch.cat([self.model(x[None], *(c[None] for c in conditions)).flatten() for x in latents])


def patches(workload, text=False):
    """Latents of one patch per PATCH x PATCH pixels."""
    latents = [torch.randn(CHANNELS, t, h * PATCH, w * PATCH) for t, h, w in workload.grids.tolist()]
    time = torch.rand(())
    return (latents, time, torch.randn(TEXT, TEXT_WIDTH)) if text else (latents, time)


def pixels(workload):
    """Latents of one pixel per patch; the frames of a video are images of their own."""
    return [torch.randn(CHANNELS, h, w) for t, h, w in workload.grids.tolist() for _ in range(t)], torch.rand(())


STEP = Workload(images=[(1, 8, 12), (3, 4, 4), (1, 16, 8)])


@pytest.mark.parametrize("crosses", [False, True])
def test_a_diffusion_transformer_follows_its_patches(crosses):
    model = OneByOne(DiffusionTransformer(crosses))

    def inputs(workload):
        return patches(workload, text=crosses)

    cost = trace(model, inputs=inputs)
    assert cost.unknown == ()
    drivers = {row.module.removeprefix("model."): row.driver for row in cost.rows}
    assert drivers["embed"] == drivers["blocks.0.qkv"] == drivers["head"] == "patches"
    assert drivers["time.0"] == drivers["blocks.1.modulation.1"] == "grids"
    attention = [row.driver for row in cost.rows if row.op == "attention"]
    # the text has so many tokens for each image: its keys are one factor, and the patches what grows
    assert attention == (["patch_pairs:grid", "patches"] if crosses else ["patch_pairs:grid"]) * 2
    assert counted(cost, STEP) == dispatched(model, *inputs(STEP))
    model.model.blocks[0].requires_grad_(False)
    model.model.embed.requires_grad_(False)
    model.model.time.requires_grad_(False)
    assert counted(trace(model, inputs=inputs), STEP) == dispatched(model, *inputs(STEP))


def test_a_diffusion_transformer_of_one_size_costs_so_much_an_image():
    def inputs(workload):
        n = len(workload.grids)
        return {"latents": torch.randn(n, CHANNELS, 1, 16, 16), "time": torch.rand(n)}

    model = DiffusionTransformer()
    cost = trace(model, inputs=inputs)
    assert {row.driver for row in cost.rows} == {"grids"}
    step = Workload(images=[(1, 8, 8)] * 5)
    assert counted(cost, step) == dispatched(model, **inputs(step))


def test_a_u_net_follows_its_pixels_at_each_resolution():
    model = OneByOne(UNet())
    cost = trace(model, inputs=pixels)
    drivers = {row.module.removeprefix("model."): row.driver for row in cost.rows if row.op != "attention"}
    assert drivers["enter"] == "patches"
    assert drivers["qkv"] == "patches/4"
    assert drivers["time"] == "frames"
    assert [row.driver for row in cost.rows if row.op == "attention"] == ["patch_pairs:frame"]
    forward, backward = dispatched(model, *pixels(STEP))
    # PyTorch's formula is wrong for the backward of a grouped convolution: what it says of that one is taken out. Each
    # channel meets 9 pixels of its own, for the gradient of the input and for that of the weight
    positions = STEP.patches // 4
    grouped = 2 * (2 * 9 * WIDTH * positions)
    ours = counted(cost, STEP)
    assert ours[0] == forward
    assert ours[1] - grouped == backward - pytorchs_grouped(positions)


def pytorchs_grouped(positions):
    """Let PyTorch count the backward of the U-Net's grouped convolution alone, over so many positions."""
    mix = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
    x = torch.randn(1, WIDTH, positions, 1, requires_grad=True)
    return dispatched(mix, x)[1]
