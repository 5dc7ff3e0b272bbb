"""Models of torchvision, timm and diffusers count as they run, beside an independent counter.

Each is built small from its library's own class with random weights. The counter sees a real eager step
(`helpers.counter`).
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.counter import Example, torchvision

if importlib.util.find_spec("torchvision") is not None:
    torchvision()  # before transformers imports it, whose import fails beside kernels of another torch


def _vision(name: str, size: int = 64, **settings: Any) -> Example:
    def build() -> nn.Module:
        families = torchvision().models
        home = (
            families.segmentation
            if hasattr(families.segmentation, name)
            else families.video
            if hasattr(families.video, name)
            else families
        )
        return getattr(home, name)(weights=None, **settings)

    shape = (1, 3, 4, size, size) if name.startswith("r3d") else (2, 3, size, size)
    return Example(build, lambda: (torch.randn(shape),))


TORCHVISION = {
    name: _vision(name, size, **settings)
    for name, size, settings in [
        ("resnet18", 64, {}),
        ("resnext50_32x4d", 64, {}),
        ("mobilenet_v2", 64, {}),
        ("mobilenet_v3_small", 64, {}),
        ("efficientnet_b0", 64, {}),
        ("regnet_y_400mf", 64, {}),
        ("shufflenet_v2_x0_5", 64, {}),
        ("densenet121", 64, {}),
        ("squeezenet1_1", 64, {}),
        ("mnasnet0_5", 64, {}),
        ("convnext_tiny", 64, {}),
        ("swin_v2_t", 64, {}),
        ("vgg11", 64, {}),
        ("vit_b_32", 64, {"image_size": 64}),
        ("r3d_18", 32, {}),
        ("fcn_resnet50", 64, {"weights_backbone": None, "aux_loss": True}),
        ("googlenet", 96, {"aux_logits": True, "init_weights": False}),
    ]
}


def _timm(name: str, size: int, **settings: Any) -> Example:
    def build() -> nn.Module:
        torchvision()
        return importlib.import_module("timm").create_model(name, pretrained=False, num_classes=5, **settings)

    return Example(build, lambda: (torch.randn(2, 3, size, size),))


_SIZED = {"img_size": 64}
TIMM = {
    name: _timm(name, size, **settings)
    for name, size, settings in [
        ("vit_tiny_patch16_224", 64, _SIZED),
        (
            "samvit_base_patch16",
            64,
            {
                "img_size": 64,
                "embed_dim": 48,
                "depth": 2,
                "num_heads": 3,
                "global_attn_indexes": (1,),
                "window_size": 3,
            },
        ),
        ("deit_tiny_distilled_patch16_224", 64, _SIZED),
        ("beit_base_patch16_224", 64, {"img_size": 64, "depth": 2}),
        ("eva02_tiny_patch14_224", 56, {"img_size": 56, "depth": 2}),
        ("swin_tiny_patch4_window7_224", 64, {"img_size": 64, "window_size": 4}),
        ("swinv2_tiny_window8_256", 64, _SIZED),
        ("cait_xxs24_224", 64, {"img_size": 64, "depth": 2}),
        ("xcit_nano_12_p16_224", 64, {"depth": 2}),
        ("crossvit_tiny_240", 240, {"depth": ((1, 2, 0), (1, 2, 0), (1, 2, 0))}),
        ("convit_tiny", 64, {"img_size": 64, "depth": 2}),
        ("coat_tiny", 64, _SIZED),
        ("levit_128s", 64, _SIZED),
        ("mobilevit_xxs", 64, {}),
        ("mobilevitv2_050", 64, {}),
        ("efficientformer_l1", 224, {}),
        ("convnext_atto", 64, {}),
        ("convmixer_768_32", 64, {}),
        ("mixer_s32_224", 64, _SIZED),
        ("resmlp_12_224", 64, _SIZED),
        ("gmlp_ti16_224", 64, _SIZED),
        ("halonet26t", 256, {}),
        ("lambda_resnet26t", 64, {}),
        ("botnet26t_256", 256, {}),
        ("resnet26d", 64, {}),
        ("regnety_002", 64, {}),
        ("efficientnet_b0", 64, {}),
        ("ghostnet_050", 64, {}),
        ("mvitv2_tiny", 64, _SIZED),
        ("gcvit_xxtiny", 224, {}),
        ("volo_d1_224", 224, {}),
        ("davit_tiny", 64, {"depths": (1, 1, 1, 1)}),
        ("maxvit_nano_rw_256", 64, {"img_size": 64}),
        ("sequencer2d_s", 64, {"img_size": 64, "layers": (1, 1, 1, 1)}),
        ("poolformer_s12", 64, {}),
        ("hiera_tiny_224", 64, {"img_size": 64}),
    ]
}


def _diffusers(name: str, arguments: Callable[[], Any], **settings: Any) -> Example:
    return Example(lambda: getattr(importlib.import_module("diffusers"), name)(**settings), arguments)


def _latents(*shape: int, **more: Any) -> Callable[[], Any]:
    return lambda: (
        {"hidden_states": torch.randn(shape), "timestep": torch.tensor([3])} | {k: v() for k, v in more.items()}
    )


def _floats(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(shape)


_BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
DIFFUSERS = {
    "DiTTransformer2DModel": _diffusers(
        "DiTTransformer2DModel",
        _latents(1, 4, 8, 8, class_labels=lambda: torch.tensor([1])),
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
    ),
    "PixArtTransformer2DModel": _diffusers(
        "PixArtTransformer2DModel",
        _latents(
            1,
            4,
            8,
            8,
            encoder_hidden_states=_floats(1, 5, 16),
            added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None},
        ),
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=1,
        sample_size=8,
        caption_channels=16,
        cross_attention_dim=16,
    ),
    "SD3Transformer2DModel": _diffusers(
        "SD3Transformer2DModel",
        _latents(1, 4, 8, 8, encoder_hidden_states=_floats(1, 5, 16), pooled_projections=_floats(1, 16)),
        sample_size=8,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
    ),
    "FluxTransformer2DModel": _diffusers(
        "FluxTransformer2DModel",
        _latents(
            1,
            16,
            4,
            encoder_hidden_states=_floats(1, 5, 16),
            pooled_projections=_floats(1, 16),
            img_ids=lambda: torch.zeros(16, 3),
            txt_ids=lambda: torch.zeros(5, 3),
            guidance=lambda: torch.tensor([1.0]),
        ),
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
        guidance_embeds=True,
    ),
    "SanaTransformer2DModel": _diffusers(
        "SanaTransformer2DModel",
        _latents(1, 4, 8, 8, encoder_hidden_states=_floats(1, 5, 16)),
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=8,
    ),
    "LTXVideoTransformer3DModel": _diffusers(
        "LTXVideoTransformer3DModel",
        _latents(
            1,
            12,
            4,
            encoder_hidden_states=_floats(1, 5, 16),
            encoder_attention_mask=lambda: torch.ones(1, 5),
            num_frames=lambda: 3,
            height=lambda: 2,
            width=lambda: 2,
        ),
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=16,
    ),
    "CogVideoXTransformer3DModel": _diffusers(
        "CogVideoXTransformer3DModel",
        _latents(1, 3, 4, 8, 8, encoder_hidden_states=_floats(1, 5, 16)),
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=4,
        text_embed_dim=16,
        num_layers=1,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        patch_size=2,
        max_text_seq_length=5,
    ),
    "AuraFlowTransformer2DModel": _diffusers(
        "AuraFlowTransformer2DModel",
        _latents(1, 4, 8, 8, encoder_hidden_states=_floats(1, 5, 16)),
        sample_size=8,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=64,
    ),
    "HunyuanVideoTransformer3DModel": _diffusers(
        "HunyuanVideoTransformer3DModel",
        _latents(
            1,
            4,
            3,
            4,
            4,
            encoder_hidden_states=_floats(1, 6, 16),
            encoder_attention_mask=lambda: torch.ones(1, 6),
            pooled_projections=_floats(1, 8),
            guidance=lambda: torch.tensor([1.0]),
        ),
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
        guidance_embeds=True,
    ),
    "Lumina2Transformer2DModel": _diffusers(
        "Lumina2Transformer2DModel",
        _latents(
            1,
            4,
            8,
            8,
            encoder_hidden_states=_floats(1, 5, 16),
            encoder_attention_mask=lambda: torch.ones(1, 5, dtype=torch.bool),
        ),
        sample_size=8,
        in_channels=4,
        hidden_size=16,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(2, 2, 4),
        axes_lens=(20, 20, 20),
        cap_feat_dim=16,
    ),
    "WanTransformer3DModel": _diffusers(
        "WanTransformer3DModel",
        _latents(1, 4, 2, 8, 8, encoder_hidden_states=_floats(1, 5, 16)),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=24,
        num_layers=1,
    ),
    "UNet2DModel": _diffusers(
        "UNet2DModel",
        lambda: {"sample": torch.randn(1, 3, 16, 16), "timestep": torch.tensor([3])},
        sample_size=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        **_BLOCKS,
    ),
    "UNet2DConditionModel": _diffusers(
        "UNet2DConditionModel",
        lambda: {
            "sample": torch.randn(1, 4, 16, 16),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": torch.randn(1, 5, 16),
        },
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        **_BLOCKS,
    ),
    "ControlNetModel": _diffusers(
        "ControlNetModel",
        lambda: {
            "sample": torch.randn(1, 4, 16, 16),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": torch.randn(1, 5, 16),
            "controlnet_cond": torch.randn(1, 3, 128, 128),
        },
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        conditioning_embedding_out_channels=(8, 8, 8, 8),
        **_BLOCKS,
    ),
    "AutoencoderKL": _diffusers(
        "AutoencoderKL",
        lambda: {"sample": torch.randn(1, 3, 16, 16)},
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        sample_size=16,
        **_BLOCKS,
    ),
}
LIBRARIES = {"torchvision": TORCHVISION, "timm": TIMM, "diffusers": DIFFUSERS}
FOREIGN = {f"{library}.{name}": model for library, models in LIBRARIES.items() for name, model in models.items()}
# one of each kind of output, attention and layer, all of them fast
SAMPLE = (
    "diffusers.HunyuanVideoTransformer3DModel",
    "diffusers.ControlNetModel",
    "diffusers.Lumina2Transformer2DModel",
    "diffusers.DiTTransformer2DModel",
    "diffusers.AutoencoderKL",
)


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in FOREIGN]
)
def test_models_of_other_libraries_count_as_they_run(name):
    library = name.partition(".")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    FOREIGN[name].check()
