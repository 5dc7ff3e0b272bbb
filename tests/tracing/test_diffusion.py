"""Diffusion models, those of diffusers and plain modules: conditioned on a time step, attending in both directions.

One ledger holds for any size of latents and any length of text.
"""

import math

import diffusers
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from headway.count import Workload
from headway.errors import TraceError, WorkloadError
from headway.meter import workload_of
from headway.models.denoisers import denoiser_on_shapes
from headway.tracing import trace
from headway.tracing.classify import checkpointing_of
from helpers.counter import counted, dispatched
from helpers.denoisers import DENOISERS, adapted, batch, denoiser

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


def real_step(model, arguments):
    """Count a real step with PyTorch's counter, attention as plain products: FLOPs of forward, and of backward."""
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH):
        with forward:
            prediction = model(**arguments, return_dict=False)[0]
        with backward:
            prediction.sum().backward()
    model.zero_grad()
    return forward.get_total_flops(), backward.get_total_flops()


# samples, sides of the latents, tokens of text; diffusers' DiT takes squares alone
SHAPES = [(1, (8, 8), 3), (2, (16, 16), 11), (3, (8, 16), 5)]
ATTENTION = ["to_q", "to_k", "to_v"]


@pytest.mark.parametrize("trained", ["all", "lora", "last"])
@pytest.mark.parametrize("name", DENOISERS)
def test_a_model_of_diffusers_follows_its_latents_and_its_text(name, trained):
    model = denoiser(name)
    if trained == "lora":
        model = adapted(model, ATTENTION)
    if trained == "last":  # what lies below the last layers needs no gradient
        model.requires_grad_(False)
        [*model.children()][-1].requires_grad_(True)
    cost = trace(model)
    assert cost.unknown == ()
    assert {row.component.partition(".")[0] for row in cost.rows} == {"denoiser"}
    for samples, side, text in SHAPES[: 2 if name.startswith("DiT") else None]:
        arguments = batch(name, samples, side, text=text)
        assert counted(cost, workload_of(arguments, cost)) == real_step(model, arguments)


def mask(samples, tokens):
    return torch.ones(samples, tokens, dtype=torch.long)


# other ways to lay latents out, to hand text over and to say sizes: a class, its sizes, and arguments for 2 samples
OTHERS = {
    "CogVideoXTransformer3DModel": (  # frames before channels; a place for each token of a text of one length
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "time_embed_dim": 4,
         "text_embed_dim": 16, "num_layers": 1, "sample_width": 8, "sample_height": 8, "sample_frames": 9,
         "max_text_seq_length": 8},
        lambda: {"hidden_states": torch.randn(2, 3, 4, 8, 8)},
    ),
    "QwenImageTransformer2DModel": (  # packed, with the shapes of pictures; angles that are complex numbers
        {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 16,
         "in_channels": 16, "out_channels": 4, "axes_dims_rope": (4, 6, 6)},
        lambda: {"hidden_states": torch.randn(2, 16, 16), "img_shapes": [[(1, 4, 4)]] * 2,
                 "encoder_hidden_states_mask": mask(2, 8)},
    ),
    "Lumina2Transformer2DModel": (  # refiners of text and of latents apart, then one sequence of both
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 1,
         "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2,
         "axes_dim_rope": (4, 2, 2), "axes_lens": (128, 128, 128), "cap_feat_dim": 16},
        lambda: {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_attention_mask": mask(2, 8)},
    ),
    "AuraFlowTransformer2DModel": (  # eight registers beside each text
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
         "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 16, "caption_projection_dim": 32,
         "out_channels": 4, "pos_embed_max_size": 256},
        lambda: {"hidden_states": torch.randn(2, 4, 8, 8)},
    ),
    "HunyuanVideoTransformer3DModel": (  # a mask of text, and attention of the text to itself
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1,
         "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1, "text_embed_dim": 16,
         "pooled_projection_dim": 8, "rope_axes_dim": (4, 2, 2)},
        lambda: {"hidden_states": torch.randn(2, 4, 3, 8, 8), "encoder_attention_mask": mask(2, 8),
                 "pooled_projections": torch.randn(2, 8), "guidance": torch.ones(2)},
    ),
    "UNet2DConditionModel": (  # SDXL's way: a pooled text and sizes beside the time, deeper lower levels
        {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (8, 16), "cross_attention_dim": 16,
         "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": (1, 2),
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "transformer_layers_per_block": (1, 2),
         "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "use_linear_projection": True,
         "projection_class_embeddings_input_dim": 60, "norm_num_groups": 4},
        lambda: {"sample": torch.randn(2, 4, 8, 8),
                 "added_cond_kwargs": {"text_embeds": torch.randn(2, 12), "time_ids": torch.randn(2, 6)}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_layouts_of_other_models_are_asked_of_the_model(name):
    sizes, latents = OTHERS[name]
    model = getattr(diffusers, name)(**sizes).train()
    arguments = latents() | {"encoder_hidden_states": torch.randn(2, 8, 16), "timestep": torch.tensor([3, 3])}
    cost = trace(model)
    work = workload_of(arguments, cost)
    assert counted(cost, work) == real_step(model, arguments)
    # a model that is built on shapes from what a folder says costs the same
    settings = {**model.config, "_class_name": name}
    assert trace(denoiser_on_shapes(settings)).count(work) == cost.count(work)


@pytest.mark.parametrize("name", [name for name in DENOISERS if not name.startswith("UNet")])
def test_checkpointed_blocks_of_diffusers_run_again(name):
    model, arguments = denoiser(name), batch(name, side=(8, 8))
    forward, backward = real_step(model, arguments)
    model.enable_gradient_checkpointing()
    assert checkpointing_of(model) == "full"
    cost = trace(model)
    count = cost.count(workload_of(arguments, cost), recompute="full")
    assert (count.forward, count.dgrad + count.wgrad) == (forward, backward)
    assert (forward, backward + count.recompute) == real_step(model, arguments)


def test_the_blocks_of_flux_cost_what_their_matrices_say():
    """Double blocks have two streams of text and picture, single blocks one; sizes as in the helper."""
    width, channels, pooled, text_width, times = 16, 4, 12, 16, 256
    samples, pictures, text = 2, 24, 5
    both = pictures + text
    attention = 4 * width * both**2
    # queries, keys, values, output, and an MLP four times as wide: 12 w^2 a token; two modulations of 6 w each a sample
    double = 2 * 12 * width**2 * both + 2 * 2 * 6 * width**2 + attention
    # queries, keys, values, the MLP's way up, and one matrix of both to the output; one modulation of 3 w
    single = 2 * (3 + 4 + 5) * width**2 * both + 2 * 3 * width**2 + attention
    embedders = 2 * channels * width * pictures + 2 * text_width * width * text
    embedders += 2 * (times * width + width**2) + 2 * (pooled * width + width**2)
    last = 2 * 2 * width**2 + 2 * width * channels * pictures
    forward = samples * (2 * double + 3 * single + embedders + last)
    cost = trace(denoiser("FluxTransformer2DModel"))
    work = Workload([pictures] * samples, images=[(1, 4, 6)] * samples, sources=[text] * samples)
    assert cost.count(work).forward == forward
    # the embedders of pictures and texts, of times and of pooled texts are fed by nothing that is trained
    unasked = 2 * channels * width * pictures + 2 * text_width * width * text + 2 * (times + pooled) * width
    # the last double block's text goes on into the single blocks: all else has both gradients, attention the double
    assert cost.count(work).total == 3 * forward - samples * unasked


def test_dit_xl_has_its_published_flops():
    """Peebles and Xie 2022 (arXiv 2212.09748), table 1: 118.64 "Gflops", which are multiply-adds, at 256 pixels."""
    with torch.device("meta"):
        model = diffusers.DiTTransformer2DModel(
            num_attention_heads=16, attention_head_dim=72, in_channels=4, out_channels=8, num_layers=28, sample_size=32,
            patch_size=2, num_embeds_ada_norm=1000,
        )  # fmt: skip
    cost = trace(model)
    forward = cost.count(Workload([256], images=[(1, 16, 16)])).forward
    assert forward / 2e9 == pytest.approx(118.64, abs=0.05)


def test_a_mask_of_text_leaves_padding_out():
    cost = trace(denoiser("SD3Transformer2DModel"))
    arguments = batch("SD3Transformer2DModel", 2, text=7)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    assert workload_of(arguments, cost).sources.tolist() == [7, 7]
    assert workload_of(arguments | {"encoder_attention_mask": mask}, cost).sources.tolist() == [7, 4]


def test_what_does_not_fit_is_named():
    unet = trace(denoiser("UNet2DConditionModel"))
    with pytest.raises(WorkloadError, match="The grid 1x10x16 cannot be merged"):
        unet.count(Workload([160], images=[(1, 10, 16)], sources=[5]))
    with pytest.raises(WorkloadError, match="traced on single frames"):
        unet.count(Workload([128], videos=[(2, 8, 8)], sources=[5]))
    with pytest.raises(WorkloadError, match="the batch holds latents, and no sample, the latents of UNet2D"):
        workload_of({"latents": torch.zeros(1, 4, 8, 8)}, unet)
    control = diffusers.ControlNetModel(
        block_out_channels=(8, 8), norm_num_groups=4, cross_attention_dim=16, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    )  # fmt: skip
    with pytest.raises(TraceError, match=r"needs controlnet_cond, but Headway cannot make .* trace\(model, inputs="):
        trace(control)
