"""Bagel's architecture: equal to transformers' own blocks, packed as alone, counted as PyTorch counts it."""

import re

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3ForCausalLM, SiglipVisionModel

from bagels import (
    EDIT,
    PICTURE,
    QUESTION,
    TEXT,
    TOWER,
    VAE,
    bagel_config,
    contents,
    dense_mask,
    pack,
    tiny_bagel,
)
from headway.count import Workload, splits
from headway.errors import ConfigError, DataError, TrainingError
from headway.models.kernels import gated_mlps, rms_norms, rotary_functions
from headway.models.load import load_model
from headway.packing.parts import SamplePart
from headway.plugins import register_families
from headway.tracing import trace
from headway.tracing.verify import verify
from headway_bagel import vae
from headway_bagel.inputs import Drawings
from headway_bagel.layout import lay_out
from headway_bagel.model import BagelConfig


@pytest.fixture(scope="module")
def model():
    return tiny_bagel()


def qwen3_of(model, copy):
    """Transformers' Qwen3 with the weights of one of the two copies."""
    alone = Qwen3ForCausalLM._from_config(model.config.text_config, attn_implementation="sdpa")
    weights = {}
    for name, weight in model.language_model.state_dict().items():
        if ("_moe_gen" in name) == bool(copy) or name.startswith(("lm_head", "model.embed_tokens")):
            weights[name.replace("_moe_gen", "")] = weight
    alone.load_state_dict(weights)
    return alone.train()


def test_text_alone_is_transformers_qwen3(model):
    given, _ = pack([[SamplePart("text", 13, 12)]], model.config)
    theirs = qwen3_of(model, "")(input_ids=given["input_ids"]).logits[0]
    torch.testing.assert_close(model(**given).logits, theirs[:-1])


def test_a_drawn_image_runs_through_the_other_copy_of_qwen3(model):
    parts = [SamplePart("noised", rows=3, columns=2)]
    given, _ = pack([parts], model.config)
    seen = {}
    hook = model.language_model.model.layers[0].register_forward_pre_hook(lambda _m, args: seen.update(x=args[0]))
    flow = model(**given).flow
    hook.remove()
    latents = seen["x"][:, 2:]  # behind the two tokens around it, which a lone image sees; here they are cut out
    alone = qwen3_of(model, "_moe_gen").model
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    cut = {"position_ids": torch.zeros(1, 6, dtype=torch.long), "attention_mask": mask}
    theirs = alone(inputs_embeds=latents, **cut, use_cache=False).last_hidden_state
    whole = dense_mask([parts], model.config)
    whole[..., 1:-1, 0] = whole[..., 1:-1, -1] = False  # hide the two
    ours = model(**given | {"attention_mask": whole}).flow
    torch.testing.assert_close(ours, model.llm2vae(theirs[0]))
    assert not torch.allclose(ours, flow)


def test_the_tower_is_transformers_siglip_on_an_image_of_its_own_size(model):
    theirs = SiglipVisionModel._from_config(model.config.vision_config, attn_implementation="sdpa")
    weights = dict(model.vit_model.vision_model.state_dict())
    embedding = "embeddings.patch_embedding.weight"
    weights[embedding] = weights[embedding].view(-1, 6, 6, 3).permute(0, 3, 1, 2)
    own = theirs.state_dict()
    prefix = "vision_model." if any(name.startswith("vision_model.") for name in own) else ""
    missing, unexpected = theirs.load_state_dict({prefix + n: w for n, w in weights.items()}, strict=False)
    assert not unexpected
    assert all("head" in name for name in missing)
    image = torch.randn(1, 3, 24, 24)
    patches = vae.patches(image[0], 6)
    cu = torch.tensor([0, 16], dtype=torch.int32)
    ours = model.vit_model(patches, torch.arange(16), cu, 16)
    torch.testing.assert_close(ours, theirs.train()(image).last_hidden_state[0])


def outputs(model, samples, seeds):
    given, _ = pack(samples, model.config, seeds)
    out = model(**given)
    return out.logits, out.flow


def test_packed_samples_give_what_each_gives_alone(model):
    samples = [PICTURE, QUESTION, EDIT, PICTURE]
    logits, flow = outputs(model, samples, [3, 4, 5, 6])
    alone = [outputs(model, [parts], [seed]) for parts, seed in zip(samples, [3, 4, 5, 6], strict=True)]
    torch.testing.assert_close(logits, torch.cat([one for one, _ in alone]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(flow, torch.cat([one for _, one in alone if one is not None]), atol=1e-5, rtol=1e-5)


def test_eager_attention_sees_the_same(model):
    given, _ = pack([EDIT, QUESTION], model.config)
    ours, eager = model(**given), tiny_bagel(attention="eager")(**given)
    torch.testing.assert_close(eager.logits, ours.logits)
    torch.testing.assert_close(eager.flow, ours.flow)


def gradient(model, samples, choose):
    """Which latents and patches the chosen outputs depend on: sums of the absolute gradients, by place."""
    given, _ = pack(samples, model.config)
    given["latents"].requires_grad_()
    given["noise"].requires_grad_()
    given["pixel_values"].requires_grad_()
    choose(model(**given)).sum().backward()
    return [given[name].grad.abs().sum(1) for name in ("latents", "noise", "pixel_values")]


def test_what_follows_sees_clean_latents_and_never_noised_ones(model):
    latents, noise, pixels = gradient(model, [EDIT, QUESTION], lambda out: out.logits[:4])  # of the edit's last text
    assert (latents[:4] > 0).all()
    assert (pixels[:2] > 0).all()
    assert not latents[4:].any()
    assert not noise.any()
    assert not pixels[2:].any()  # of the other sample


def test_the_drawn_image_sees_its_own_sample_alone(model):
    latents, _, pixels = gradient(model, [EDIT, QUESTION, PICTURE], lambda out: out.flow[:4])
    assert (latents[:8] > 0).all()
    assert (pixels[:2] > 0).all()
    assert not latents[8:].any()
    assert not pixels[2:].any()


def test_a_leak_would_be_seen(model):
    given, _ = pack([EDIT], model.config)
    runs = lay_out([EDIT], model.config)[1].splits.copy()
    runs[runs[:, 0] == splits.NOISE, 0] = splits.FULL
    given["attention_mask"] = torch.from_numpy(splits.mask_of_runs(runs))[None, None]
    given["noise"].requires_grad_()
    model(**given).logits.sum().backward()
    assert given["noise"].grad.any()


def test_names_are_those_of_bagels_checkpoints():
    names = {re.sub(r"\.\d+\.", ".N.", name) for name in tiny_bagel(qk_norm=True, model_type="qwen2").state_dict()}
    block, twice = "language_model.model.layers.N.", ("", "_moe_gen")
    expected = {"language_model.model.embed_tokens.weight", "language_model.lm_head.weight"}
    expected |= {f"language_model.model.norm{copy}.weight" for copy in twice}
    for copy in twice:
        expected |= {f"{block}{name}{copy}.weight" for name in ("input_layernorm", "post_attention_layernorm")}
        expected |= {f"{block}mlp{copy}.{name}_proj.weight" for name in ("gate", "up", "down")}
        expected |= {f"{block}self_attn.{name}_norm{copy}.weight" for name in "qk"}
        expected |= {f"{block}self_attn.{name}_proj{copy}.weight" for name in "qkvo"}
        expected |= {f"{block}self_attn.{name}_proj{copy}.bias" for name in "qkv"}
    layer, kinds = "vit_model.vision_model.encoder.layers.N.", ("weight", "bias")
    modules = [*(f"{layer}self_attn.{name}_proj" for name in ("q", "k", "v", "out")), f"{layer}mlp.fc1"]
    modules += [
        f"{layer}mlp.fc2",
        f"{layer}layer_norm1",
        f"{layer}layer_norm2",
        "vit_model.vision_model.post_layernorm",
    ]
    modules += ["vit_model.vision_model.embeddings.patch_embedding", "connector.fc1", "connector.fc2"]
    modules += ["time_embedder.mlp.N", "vae2llm", "llm2vae"]
    expected |= {f"{module}.{kind}" for module in modules for kind in kinds}
    expected |= {"vit_model.vision_model.embeddings.position_embedding.weight"}
    expected |= {"vit_pos_embed.pos_embed", "latent_pos_embed.pos_embed"}
    assert names == expected


@pytest.mark.parametrize("with_vae", [None, VAE], ids=["pixels", "vae"])
def test_every_module_counts_what_pytorch_dispatches(with_vae):
    model = tiny_bagel(with_vae, attention="eager")
    lines, _ = verify(model, Drawings(model).workloads()[1])
    assert [line for line in lines if line.explanation is None] == []
    billed = {line.module.split(".")[0] for line in lines}
    assert {"language_model", "vit_model", "connector", "vae2llm", "llm2vae", "time_embedder"} <= billed
    assert ("vae_model" in billed) == (with_vae is not None)


@pytest.mark.parametrize("part", ["vit_model", "language_model", "llm2vae", "connector", "_moe_gen"])
def test_a_frozen_part_counts_what_pytorch_dispatches(part):
    model = tiny_bagel(attention="eager")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part not in name)
    lines, _ = verify(model, Drawings(model).workloads()[2])
    assert [line for line in lines if line.explanation is None] == []


def test_the_head_is_billed_on_supervised_tokens_and_each_copy_on_its_own():
    model = tiny_bagel()
    cost = trace(model)
    _, workload = lay_out([PICTURE, QUESTION], model.config)
    rows = {row.name: row for row in cost.count(workload).rows}
    assert rows["language.head"].forward == 2 * 32 * 97 * 5
    by_module = {row.module: row for row in cost.rows}
    mlp = "language_model.model.layers.0.mlp"
    assert by_module[f"{mlp}.up_proj"].driver == "understood"
    assert by_module[f"{mlp}_moe_gen.up_proj"].driver == "latents"
    assert by_module["llm2vae"].driver == "noised"
    other_copy = sum(p.numel() for name, p in model.named_parameters() if "_moe_gen" in name)
    assert cost.params.total - cost.params.active == other_copy  # norms and biases too


def test_a_frozen_vae_costs_its_forward_alone():
    cost = trace(tiny_bagel(VAE))
    rows = [row for row in cost.rows if row.module.startswith("vae_model")]
    assert rows
    assert not any(row.gradients for row in rows)
    assert all(row.module.startswith("vae_model.encoder") for row in rows)
    assert cost.unknown == ()
    assert cost.source["unused"] == "vae_model.decoder"


def test_its_configuration_and_weights_open_like_any_other(tmp_path):
    model = tiny_bagel(VAE)
    model.save_pretrained(tmp_path)
    register_families()
    assert isinstance(AutoConfig.from_pretrained(tmp_path), BagelConfig)
    opened = load_model(tmp_path)
    given, _ = pack([EDIT], model.config)
    expected = model(**given)
    found = opened.train()(**given)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.flow, expected.flow)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert {n: w.sum().item() for n, w in again.state_dict().items()} == {
        n: w.sum().item() for n, w in model.state_dict().items()
    }


def test_a_vae_encodes_what_is_drawn():
    model = tiny_bagel(VAE)
    given, _ = pack([PICTURE], model.config)
    images = [torch.randn(3, 8, 12)]
    del given["latents"]
    out = model(**given, latent_pixels=images)
    latents = (model.vae_model.encode(images[0][None]).latent_dist.mean - 0.12) * 0.36
    torch.testing.assert_close(out.flow_target, given["noise"] - vae.patches(latents[0], 2))


def test_noise_says_which_latents_of_the_autoencoders_distribution_are_drawn():
    model = tiny_bagel(VAE)
    given, _ = pack([EDIT], model.config)
    del given["latents"]
    images = [torch.randn(3, 8, 8), torch.randn(3, 8, 8)]
    noise = torch.randn_like(given["noise"])
    out = model(**given, latent_pixels=images, encoder_noise=noise)
    # Kingma and Welling 2014: mean + standard deviation x noise, of the moments that the encoder itself gives
    mean, logvar = model.vae_model.encoder(images[1][None])[0].chunk(2)
    drawn = vae.patches(mean, 2) + vae.patches((0.5 * logvar).exp(), 2) * noise[4:]
    torch.testing.assert_close(out.flow_target, given["noise"][4:] - (drawn - 0.12) * 0.36)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([SamplePart("text", 0)], "0 tokens"),
        ([SamplePart("text", 3, 4)], "4 of them supervised"),
        ([SamplePart("noised", rows=5, columns=2)], "noised has 5 x 2 patches.*1 to 4"),
        ([SamplePart("image", rows=1, columns=0)], "image has 1 x 0"),
    ],
)
def test_a_part_that_does_not_fit_gets_one_clear_error(parts, said):
    with pytest.raises(DataError, match=said):
        lay_out([parts], bagel_config())


def test_other_blocks_and_rotary_towers_are_refused():
    with pytest.raises(ConfigError, match=r"'llama'.*qwen2 or qwen3"):
        BagelConfig(text_config={"model_type": "llama"}, vision_config=TOWER)
    with pytest.raises(ConfigError, match="rope"):
        BagelConfig(text_config=TEXT, vision_config={**TOWER, "rope": True})


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (("timesteps",), "14 latent patches were given without timesteps"),
        (("latent_grids", "latent_places"), "without latent_places, latent_grids"),
        (("latents",), "neither latents nor latent_pixels"),
    ],
)
def test_latents_without_what_they_need_get_one_clear_error(model, missing, said):
    given, _ = pack([EDIT, PICTURE[1:]], model.config)
    with pytest.raises(TrainingError, match=said):
        model(**{name: value for name, value in given.items() if name not in missing})


def test_pixels_to_draw_need_an_autoencoder(model):
    given, _ = pack([PICTURE], model.config)
    del given["latents"]
    with pytest.raises(TrainingError, match="latent_pixels and no autoencoder"):
        model(**given, latent_pixels=[torch.zeros(3, 4, 6)])


def test_a_missing_diffusers_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    with pytest.raises(ConfigError, match=r"headway\[engine\].*vae_config: null"):
        tiny_bagel(VAE)


def test_positions_are_shared_by_an_image_and_stay_behind_a_drawn_one():
    given, workload = lay_out([EDIT], bagel_config())
    assert given["position_ids"][0].tolist() == [0] * 6 + [1] * 4 + [2, 3, 4, 5, 6] + [7] * 6 + [7, 8, 9, 10, 11, 12]
    assert workload == Workload(
        splits=[[("full", 6), ("full", 4), ("causal", 5), ("noise", 6), ("causal", 6)]],
        images=[(1, 2, 1)],
        references=[(1, 2, 2)],
        latents=[(1, 2, 2)],
        supervised=4,
    )
    assert np.array_equal(splits.mask_of_runs(workload.splits), dense_mask([EDIT], bagel_config())[0, 0].numpy())
    assert len(contents(EDIT, bagel_config(), 0)["input_ids"]) == workload.tokens


def test_ligers_kernels_find_their_places_in_both_copies(model):
    # a layer has two norms of its own and two of heads, in each copy, and an MLP in each; the last norm is twice too
    layers = 2
    assert len(rms_norms(model)) == layers * 2 * (2 + 2) + 2
    assert len(gated_mlps(model)) == layers * 2
    assert "headway_bagel.blocks.apply_rotary_pos_emb" in rotary_functions(model)
