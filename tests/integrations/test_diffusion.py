"""Loops of diffusion models: what their steps run beside the denoiser is counted by itself, to the FLOP.

The witness is PyTorch's FlopCounterMode around what the loop really runs, with attention as plain products, which it
counts in full; masks of text encoders, where there are any, are taken out by hand.
"""

import copy
import pickle
from contextlib import contextmanager
from unittest import mock

import diffusers
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from headway.devices import Peak
from headway.integrations import AccelerateMeter
from headway.meter import Meter
from helpers.denoisers import TEXT_WIDTH, adapted, autoencoder, batch, denoiser, titans_flux

PEAK = Peak("test", 1e12, "fp32", "made up for a test")
SAMPLES, SIDE, WORDS = 2, 16, 20


def text_encoder():
    """A frozen CLIP; its scores above the diagonal are multiplied, and hidden."""
    config = CLIPTextConfig(
        vocab_size=99, hidden_size=TEXT_WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return CLIPTextModel(config).requires_grad_(False).eval()


def hidden_scores(samples=SAMPLES, words=WORDS):
    """FLOPs of the pairs that CLIP's causal mask hides: 4 for each feature of two layers."""
    return samples * 2 * 4 * TEXT_WIDTH * (words * words - words * (words + 1) // 2)


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
    meter = Meter(loop.unet, peak=PEAK, watch=True, others=[loop.vae, loop.text], log_every=1, on_window=windows.append)
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
    # shapes are traced once, in no step's time
    assert [window.compile_s for window in windows] == [0, 0]  # tracing compiles nothing
    assert windows[0].mfu > 0
    assert windows[0].entries["images"] == SAMPLES
    assert windows[0].entries["patches"] == SAMPLES * (SIDE // 2) ** 2


class FluxLoop:
    """The steps of diffusers' FLUX LoRA script, in small, with Accelerate: packed latents, two text encoders, a VAE."""

    def __init__(self, accelerator, *, checkpointed=False, cached=False, trained_text=False):
        torch.manual_seed(0)
        self.vae, self.clip = autoencoder(), text_encoder()
        config = T5Config(
            vocab_size=99, d_model=TEXT_WIDTH, d_kv=8, num_heads=2, d_ff=24, num_layers=2, decoder_start_token_id=0
        )
        self.t5 = T5EncoderModel(config).requires_grad_(trained_text).train(trained_text)
        flux = denoiser(
            "FluxTransformer2DModel", in_channels=16, pooled_projection_dim=TEXT_WIDTH, guidance_embeds=True
        )
        flux.requires_grad_(False)
        flux.add_adapter(lora("to_q", "to_k", "to_v", "to_out.0"))
        if checkpointed:
            flux.enable_gradient_checkpointing()
        self.accelerator, self.cached = accelerator, cached
        parameters = [p for model in (flux, self.t5) for p in model.parameters() if p.requires_grad]
        self.transformer, self.optimizer = accelerator.prepare(flux, torch.optim.AdamW(parameters))
        self.cache = self.encode()

    def encode(self):
        with torch.no_grad():
            latents = self.vae.encode(torch.randn(SAMPLES, 3, SIDE, SIDE)).latent_dist.sample()
            pooled = self.clip(torch.randint(2, 99, (SAMPLES, WORDS))).pooler_output
        with torch.set_grad_enabled(next(self.t5.parameters()).requires_grad):
            states = self.t5(torch.randint(2, 99, (SAMPLES, WORDS)))[0]
        return latents, pooled, states

    def step(self):
        latents, pooled, states = self.cache if self.cached else self.encode()
        inputs, target, times = noised(latents, "flow")
        side = SIDE // 4  # of a picture's VAE, then of squares of 2 x 2 latents
        with self.accelerator.accumulate(self.transformer):
            prediction = self.transformer(
                hidden_states=diffusers.FluxPipeline._pack_latents(inputs, SAMPLES, 4, SIDE // 2, SIDE // 2),
                timestep=times / 1000,
                guidance=torch.ones(SAMPLES),
                pooled_projections=pooled,
                encoder_hidden_states=states,
                txt_ids=torch.zeros(WORDS, 3),
                img_ids=torch.zeros(side * side, 3),
                return_dict=False,
            )[0]
            loss = F.mse_loss(
                prediction, diffusers.FluxPipeline._pack_latents(target, SAMPLES, 4, SIDE // 2, SIDE // 2)
            )
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()


def lora(*targets):
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=[*targets])


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_accelerates_loop_of_flux_counts_its_encoders(cached, accumulation):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    loop = FluxLoop(accelerator, cached=cached)
    windows = []
    others = [loop.vae, loop.clip, loop.t5]
    meter = AccelerateMeter(
        accelerator, loop.transformer, others=others, peak=PEAK, log_every=1, on_window=windows.append
    )
    flops = []
    for _ in range(2 * accumulation):
        with counting() as total:
            loop.step()
        flops.append(sum(total) - (0 if cached else hidden_scores()))
        meter.step()
    run = meter.close()
    assert meter.failure is None
    assert [window.flops.total for window in windows] == [
        sum(flops[i : i + accumulation]) for i in range(0, len(flops), accumulation)
    ]
    assert run.num_steps == 2
    assert run.entries["images"] == 2 * accumulation * SAMPLES


def test_checkpointed_blocks_run_twice_in_hfu_alone():
    plain, again = (FluxLoop(Accelerator(cpu=True), checkpointed=checkpointed) for checkpointed in (False, True))
    with counting() as without:
        plain.step()
    accelerator = Accelerator(cpu=True)
    meter = AccelerateMeter(accelerator, again.transformer, others=[again.vae, again.clip, again.t5], peak=PEAK)
    with counting() as total:
        again.step()
    meter.step()
    run = meter.close()
    assert run.flops.total == sum(without) - hidden_scores()
    assert run.flops.recompute == sum(total) - sum(without)
    assert run.hfu > run.mfu


def test_a_text_encoder_that_is_trained_too_has_a_backward():
    accelerator = Accelerator(cpu=True)
    loop = FluxLoop(accelerator, trained_text=True)
    meter = AccelerateMeter(accelerator, loop.transformer, others=[loop.vae, loop.clip, loop.t5], peak=PEAK)
    with counting() as total:
        loop.step()
    meter.step()
    run = meter.close()
    assert meter.failure is None
    assert run.flops.total == sum(total) - hidden_scores()
    assert any(row.wgrad for row in run.flops.rows if row.name.startswith("T5EncoderModel"))
    assert run.entries["images"] == 0  # states that ask for a gradient: the denoiser was traced by its shapes


class Transformer(nn.Module):
    """A denoiser whose forward nobody calls: a function of the pipeline runs its parts, as DiffSynth's do."""

    def __init__(self):
        super().__init__()
        self.patch_embedding = nn.Conv3d(4, 16, (1, 2, 2), stride=(1, 2, 2))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 16)


def run_parts(model, latents, *, checkpointed=False):
    x = model.patch_embedding(latents).flatten(2).transpose(1, 2)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
    return model.head(x)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_that_runs_in_parts_is_counted_part_by_part(checkpointed, frozen):
    torch.manual_seed(0)
    model = Transformer()
    if frozen:  # what lies below the first trained block has no gradient
        model.patch_embedding.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    windows, flops = [], []
    meter = Meter(model, peak=PEAK, watch=True, log_every=1, on_window=windows.append)
    for frames in (2, 3):
        latents = torch.randn(SAMPLES, 4, frames, 8, 8)
        with counting() as total:
            run_parts(model, latents).square().mean().backward()
        flops.append(sum(total))
        if checkpointed:  # the same gradients again, with blocks that run twice: none of that is useful work
            meter.step()
            run_parts(model, latents, checkpointed=True).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step()
    meter.close()
    assert meter.failure is None
    expected = [n for n in flops for _ in range(2 if checkpointed else 1)]
    assert [window.flops.total for window in windows] == expected


def test_torchtitans_flux_is_counted_by_its_shapes(monkeypatch):
    flux = titans_flux(monkeypatch)
    torch.manual_seed(0)
    sizes = {"in_channels": 16, "out_channels": 16, "vec_in_dim": 12, "context_in_dim": TEXT_WIDTH, "hidden_size": 32}
    model = flux.FluxModel(flux.FluxModelArgs(**sizes, num_heads=2, depth=2, depth_single_blocks=2, axes_dim=(4, 6, 6)))
    model.init_weights()
    vae = autoencoder()
    meter = Meter(model, peak=PEAK, watch=True, others=[vae])
    optimizer = torch.optim.AdamW(model.parameters())
    attend = mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention)
    with counting() as total, attend as attention:
        with torch.no_grad():
            latents = vae.encode(torch.randn(SAMPLES, 3, SIDE, SIDE)).latent_dist.sample()
        packed = diffusers.FluxPipeline._pack_latents(latents, SAMPLES, 4, SIDE // 2, SIDE // 2)
        prediction = model(
            img=packed, img_ids=torch.zeros(SAMPLES, packed.shape[1], 3), txt=torch.randn(SAMPLES, WORDS, TEXT_WIDTH),
            txt_ids=torch.zeros(SAMPLES, WORDS, 3), y=torch.randn(SAMPLES, 12), timesteps=torch.rand(SAMPLES),
        )  # fmt: skip
        F.mse_loss(prediction, torch.randn_like(packed)).backward()
    optimizer.step()
    meter.step()
    run = meter.close()
    assert meter.failure is None
    # it chooses a kernel of its own, which PyTorch counts as nothing: 4 FLOPs for each feature and pair, and twice that
    # in the backward. Version 0.2.2 leaves `is_causal` at its default, True, so that no text sees its picture
    places = WORDS + packed.shape[1]
    calls = [call.kwargs["is_causal"] for call in attention.call_args_list if call.args[0].shape[-2] == places]
    pairs = sum(places * (places + 1) // 2 if is_causal else places**2 for is_causal in calls)
    assert len(calls) == 4
    assert run.flops.total == sum(total) + 3 * 4 * 32 * SAMPLES * pairs
    assert {row.name.partition(".")[0] for row in run.flops.rows} == {"FluxModel", "AutoencoderKL"}


class Kernel(torch.autograd.Function):
    """A product that no ledger reads."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.flatten(0, -2).T @ gradient.flatten(0, -2)


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return Kernel.apply(x, self.weight)


@pytest.mark.parametrize("through", ["meter", "accelerate"])
@pytest.mark.parametrize("trained", [False, True])
def test_what_cannot_be_counted_is_named_once_and_the_loop_goes_on_without_mfu(through, trained):
    torch.manual_seed(0)
    opaque, plain = Opaque(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, other = (opaque, plain) if trained else (plain, opaque)
    other.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    windows = []
    options = {"others": [other], "peak": PEAK, "log_every": 1, "on_window": windows.append}
    meter = (
        Meter(model, watch=True, **options)
        if through == "meter"
        else AccelerateMeter(Accelerator(cpu=True), model, **options)
    )
    before = [p.clone() for p in model.parameters()]

    def train():
        for _ in range(3):
            with torch.no_grad():
                x = other(torch.randn(2, 4))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            meter.step()

    with pytest.warns(RuntimeWarning) as caught:
        train()
    meter.close()
    told = [str(w.message) for w in caught if "Kernel" in str(w.message)]
    assert len(told) == 1
    assert "multiplies matrices inside Kernel" in told[0]
    assert meter.failure is not None
    assert all(not window.mfu > 0 for window in windows)
    assert all((new != old).any() for new, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "blocks"])
def test_compiled_denoisers_are_counted_as_they_run(how):
    flux = denoiser("FluxTransformer2DModel")
    arguments = batch("FluxTransformer2DModel", SAMPLES)
    with counting() as total:
        flux(**arguments, return_dict=False)[0].square().mean().backward()
    model = torch.compile(flux, backend="eager") if how == "torch.compile" else flux
    if how == "module.compile":
        flux.compile(backend="eager")
    for block in flux.transformer_blocks if how == "blocks" else ():
        block.compile(backend="eager")
    windows = []
    meter = Meter(model, peak=PEAK, watch=True, log_every=1, on_window=windows.append)
    for _ in range(3):
        model(**arguments, return_dict=False)[0].square().mean().backward()
        meter.step()
    meter.close()
    assert meter.failure is None
    assert windows  # steps that compile are left out
    assert {window.flops.total for window in windows} == {sum(total)}


def test_a_copy_of_a_watched_model_is_not_counted():
    unet = denoiser("UNet2DConditionModel")
    meter = Meter(unet, peak=PEAK, watch=True)
    meter.start()
    average = copy.deepcopy(unet)  # as averages of weights are made
    pickle.loads(pickle.dumps(unet))
    arguments = batch("UNet2DConditionModel", SAMPLES)
    with counting() as total:
        unet(**arguments, return_dict=False)[0].square().mean().backward()
    average(**arguments)
    meter.step()
    assert meter.close().flops.total == sum(total)
