"""Models of transformers count as they run, beside an independent counter: small ones, each of its own class.

The counter sees a real eager step (`helpers.counter`). Pairs that a mask forbids, which eager attention computes, are
derived, not waved through. A model that cannot be counted is refused with the reason that the table names.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers.counter import Example, torchvision

if importlib.util.find_spec("torchvision") is not None:
    torchvision()  # before transformers imports it, whose import fails beside kernels of another torch

WIDTH, HEADS, LAYERS, VOCABULARY, BATCH, LENGTH = 16, 2, 2, 64, 2, 9
SIZE = WIDTH // HEADS


def causal(layers: int = LAYERS, heads: int = HEADS, size: int = SIZE, length: int = LENGTH, batch: int = BATCH) -> int:
    """Derive what eager attention computes over pairs that a causal mask forbids: s (s - 1) / 2 for each head."""
    return batch * layers * heads * 2 * (size + size) * (length * (length - 1) // 2)


# what configurations call their sizes; each takes those that it has
_TINY = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "decoder_hidden_size", "encoder_hidden_size"), WIDTH
    ),
    **dict.fromkeys(("embedding_size", "emb_dim", "projection_dim", "decoder_embed_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "d_ff", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 24),
    **dict.fromkeys(("dim_feedforward", "decoder_intermediate_size", "encoder_intermediate_size"), 24),
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), LAYERS
    ),
    **dict.fromkeys(("num_decoder_layers", "decoder_num_hidden_layers", "encoder_num_hidden_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads", "decoder_num_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size"), SIZE),
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "layerdrop": 0.0,
    "use_cache": False,
}


def _transformers(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Build a class of transformers from its own configuration class, small."""

    def build() -> nn.Module:
        import transformers

        cls: Any = getattr(transformers, name)
        known = {**vars(cls.config_class()), **getattr(cls.config_class, "attribute_map", {})}
        config = cls.config_class(**({k: v for k, v in _TINY.items() if k in known} | settings))
        return cls(config)

    return build


def text(length: int = LENGTH, **more: Any) -> Callable[[], Any]:
    return lambda: {"input_ids": torch.randint(3, VOCABULARY, (BATCH, length))} | {k: v() for k, v in more.items()}


def image(size: int = 32, channels: int = 3) -> Callable[[], Any]:
    return lambda: {"pixel_values": torch.randn(BATCH, channels, size, size)}


def named(**shapes: tuple[int, ...]) -> Callable[[], Any]:
    return lambda: {name: torch.randn(shape) for name, shape in shapes.items()}


def _ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


_BOTH = text(decoder_input_ids=_ids)
_ENCODERS = (
    "BertModel", "RobertaModel", "AlbertModel", "DistilBertModel", "ElectraModel", "MPNetModel", "DebertaV2Model",
    "DebertaModel", "ConvBertModel", "SqueezeBertModel", "EsmModel", "LayoutLMModel", "NystromformerModel", "XLMModel",
    "RoFormerModel", "MegatronBertModel", "CamembertModel", "FNetModel", "IBertModel", "MraModel", "BertForPreTraining",
    "BertForMaskedLM", "BertForSequenceClassification", "CanineModel", "ModernBertModel", "SplinterModel", "YosoModel",
    "BertForQuestionAnswering",
)  # fmt: skip
_MORE = {
    "SqueezeBertModel": {
        "q_groups": 1,
        "k_groups": 1,
        "v_groups": 1,
        "post_attention_groups": 1,
        "intermediate_groups": 1,
        "output_groups": 1,
    },
    "ConvBertModel": {"num_groups": 1, "head_ratio": 1, "conv_kernel_size": 3},
    "EsmModel": {"position_embedding_type": "absolute", "mask_token_id": 3},
    "ModernBertModel": {"local_attention": 128},
    "CanineModel": {
        "num_hash_buckets": 32,
        "local_transformer_stride": 4,
        "downsampling_rate": 3,
        "type_vocab_size": 2,
    },
}
_CAUSAL = (
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "GPTNeoXForCausalLM",
    "BloomForCausalLM",
    "GemmaForCausalLM",
    "PhiForCausalLM",
    "FalconForCausalLM",
    "BioGptForCausalLM",
    "GPT2DoubleHeadsModel",
    "Olmo2ForCausalLM",
    "CohereForCausalLM",
)
_VISION = (
    "ViTModel",
    "ViTForImageClassification",
    "DeiTModel",
    "Dinov2Model",
    "BeitModel",
    "ViTMAEForPreTraining",
    "CLIPVisionModel",
    "SiglipVisionModel",
    "DPTForDepthEstimation",
    "YolosForObjectDetection",
    "ViTMSNModel",
    "IJepaModel",
    "DINOv3ViTModel",
    "Data2VecVisionModel",
)
_SHAPED = {
    "DPTForDepthEstimation": {
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 8, 8],
        "fusion_hidden_size": 8,
        "num_hidden_layers": 4,
    },
    "YolosForObjectDetection": {"image_size": [32, 32], "num_detection_tokens": 5},
    "ViTMAEForPreTraining": {"decoder_num_hidden_layers": 1},
}

_REFUSED = {"FNetModel": "Fourier transform", "YosoModel": "YosoCumulation"}
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "out_features": ["stage2"],
}


def _pixels(size: int, **more: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: {"pixel_values": torch.randn(1, 3, size, size)} | {k: v() for k, v in more.items()}


TRANSFORMERS: dict[str, Example] = {
    **{
        name: Example(
            _transformers(name, **_MORE.get(name, {})),
            text(12 if name == "CanineModel" else LENGTH),
            refused=_REFUSED.get(name, ""),
        )
        for name in _ENCODERS
    },
    **{name: Example(_transformers(name), text(), causal()) for name in _CAUSAL},
    **{name: Example(_transformers(name, **_SHAPED.get(name, {})), image()) for name in _VISION},
    "ResNetModel": Example(
        _transformers("ResNetModel", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]), image()
    ),
    "ConvNextV2Model": Example(
        _transformers("ConvNextV2Model", hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1]), image()
    ),
    "SegformerModel": Example(
        _transformers(
            "SegformerModel",
            hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=8,
        ),
        image(64),
    ),
    "Swinv2Model": Example(
        _transformers(
            "Swinv2Model",
            embed_dim=8,
            depths=[2, 2],
            num_heads=[1, 2],
            num_attention_heads=[1, 2],
            window_size=4,
            patch_size=4,
        ),
        image(),
    ),
    "PoolFormerModel": Example(
        _transformers("PoolFormerModel", hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1]), image()
    ),
    "T5ForConditionalGeneration": Example(_transformers("T5ForConditionalGeneration"), _BOTH, causal()),
    "BartModel": Example(_transformers("BartModel"), _BOTH, causal()),
    "MarianModel": Example(_transformers("MarianModel"), _BOTH, causal()),
    "WhisperModel": Example(
        _transformers("WhisperModel", num_mel_bins=8, max_source_positions=12),
        lambda: {"input_features": torch.randn(BATCH, 8, 24), "decoder_input_ids": _ids()},
        causal(),
    ),
    "CLIPModel": Example(
        _transformers(
            "CLIPModel", text_config=_TINY | {"projection_dim": 8}, vision_config=_TINY | {"projection_dim": 8}
        ),
        text(pixel_values=lambda: torch.randn(BATCH, 3, 32, 32)),
        causal(),
    ),
    # eager alone, and its image side is handed no mask although its modules call themselves causal
    "BridgeTowerModel": Example(
        _transformers(
            "BridgeTowerModel",
            hidden_size=64,
            contrastive_hidden_size=16,
            text_config=_TINY | {"hidden_size": 64},
            vision_config=_TINY | {"hidden_size": 64},
        ),
        text(pixel_values=lambda: torch.randn(BATCH, 3, 32, 32)),
    ),
    "VJEPA2Model": Example(
        _transformers(
            "VJEPA2Model",
            crop_size=16,
            patch_size=8,
            frames_per_clip=4,
            pred_hidden_size=8,
            pred_num_attention_heads=2,
            pred_num_hidden_layers=2,
            mlp_ratio=2,
        ),
        lambda: {"pixel_values_videos": torch.randn(1, 4, 3, 16, 16)},
    ),
    "DacModel": Example(
        _transformers(
            "DacModel",
            encoder_hidden_size=8,
            downsampling_ratios=[2, 2],
            decoder_hidden_size=16,
            n_codebooks=2,
            codebook_size=8,
            codebook_dim=4,
            hidden_size=16,
        ),
        named(input_values=(1, 1, 64)),
        refused="does not depend on decoder",
    ),
    "EncodecModel": Example(
        _transformers(
            "EncodecModel",
            num_filters=4,
            hidden_size=8,
            upsampling_ratios=[2, 2],
            codebook_size=8,
            codebook_dim=8,
            num_lstm_layers=1,
            target_bandwidths=[24.0],
            sampling_rate=24000,
        ),
        named(input_values=(1, 1, 64)),
    ),
    "PatchTSTModel": Example(
        _transformers("PatchTSTModel", context_length=32, patch_length=8, patch_stride=8, num_input_channels=3),
        named(past_values=(BATCH, 32, 3)),
    ),
    **{
        name: Example(
            _transformers(
                name,
                conv_dim=(8, 8),
                conv_stride=(5, 2),
                conv_kernel=(10, 3),
                num_feat_extract_layers=2,
                num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2,
                apply_spec_augment=False,
            ),
            named(input_values=(1, 400)),
        )
        for name in (
            "Wav2Vec2Model",
            "HubertModel",
            "WavLMModel",
            "Wav2Vec2ConformerModel",
            "UniSpeechModel",
            "SEWModel",
        )
    },
    "ASTModel": Example(
        _transformers("ASTModel", num_mel_bins=16, max_length=24, patch_size=8, frequency_stride=8, time_stride=8),
        named(input_values=(1, 24, 16)),
    ),
    "VideoMAEModel": Example(
        _transformers("VideoMAEModel", num_frames=4, tubelet_size=2),
        lambda: {"pixel_values": torch.randn(1, 4, 3, 32, 32)},
    ),
    "TimesformerModel": Example(
        _transformers("TimesformerModel", num_frames=2), lambda: {"pixel_values": torch.randn(1, 2, 3, 32, 32)}
    ),
    "PerceiverModel": Example(
        _transformers(
            "PerceiverModel",
            num_latents=5,
            d_latents=8,
            d_model=8,
            num_blocks=1,
            num_self_attends_per_block=1,
            num_self_attention_heads=2,
            num_cross_attention_heads=1,
        ),
        named(inputs=(1, 12, 8)),
    ),
    "DetrForObjectDetection": Example(
        _transformers("DetrForObjectDetection", backbone_config=_RESNET, num_queries=5),
        _pixels(32, pixel_mask=lambda: torch.ones(1, 32, 32, dtype=torch.long)),
    ),
    "UperNetForSemanticSegmentation": Example(
        _transformers(
            "UperNetForSemanticSegmentation",
            backbone_config=_RESNET
            | {"hidden_sizes": [8] * 4, "depths": [1] * 4, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
            hidden_size=16,
            pool_scales=[1, 2],
            auxiliary_in_channels=8,
            auxiliary_channels=8,
            auxiliary_num_convs=1,
            auxiliary_concat_input=False,
        ),
        lambda: {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 2, (2, 64, 64))},
    ),
    "Mask2FormerForUniversalSegmentation": Example(
        _transformers(
            "Mask2FormerForUniversalSegmentation",
            backbone_config={
                "model_type": "swin",
                "embed_dim": 8,
                "depths": [1, 1, 1, 1],
                "num_heads": [1, 1, 1, 1],
                "window_size": 4,
                "image_size": 64,
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            feature_size=32,
            mask_feature_size=32,
            hidden_dim=32,
            encoder_feedforward_dim=24,
            dim_feedforward=24,
            encoder_layers=1,
            decoder_layers=2,
            num_attention_heads=2,
            num_queries=5,
        ),
        _pixels(64),
    ),
    "OwlViTForObjectDetection": Example(
        _transformers("OwlViTForObjectDetection", text_config=_TINY, vision_config=_TINY, projection_dim=16),
        lambda: {"pixel_values": torch.randn(1, 3, 32, 32), "input_ids": torch.randint(3, VOCABULARY, (2, LENGTH))},
        causal(),
    ),
    "SamModel": Example(
        _transformers(
            "SamModel",
            vision_config={
                "hidden_size": 16,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 64,
                "patch_size": 8,
                "window_size": 3,
                "global_attn_indexes": [1],
                "mlp_dim": 24,
                "num_pos_feats": 8,
            },
            prompt_encoder_config={"hidden_size": 16, "image_size": 64, "patch_size": 8},
            mask_decoder_config={
                "hidden_size": 16,
                "mlp_dim": 24,
                "num_attention_heads": 2,
                "iou_head_hidden_dim": 16,
                "num_hidden_layers": 2,
            },
        ),
        _pixels(64),
    ),
    "Siglip2VisionModel": Example(
        _transformers("Siglip2VisionModel", num_patches=16, patch_size=4),
        lambda: {
            "pixel_values": torch.randn(1, 16, 48),
            "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4]]),
        },
    ),
    "CsmForConditionalGeneration": Example(
        _transformers(
            "CsmForConditionalGeneration",
            text_vocab_size=VOCABULARY,
            vocab_size=20,
            num_codebooks=3,
            depth_decoder_config={
                "hidden_size": 16,
                "backbone_hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "vocab_size": 20,
                "num_codebooks": 3,
                "max_position_embeddings": 3,
            },
            codebook_pad_token_id=18,
            codebook_eos_token_id=0,
        ),
        lambda: {"input_ids": torch.randint(1, 18, (1, 6, 3)), "labels": torch.randint(1, 18, (1, 6, 3))},
        causal(length=6, batch=1) + causal(1, length=3, batch=6),
    ),
    "TimeSeriesTransformerModel": Example(
        _transformers(
            "TimeSeriesTransformerModel",
            prediction_length=4,
            context_length=8,
            lags_sequence=[1, 2],
            num_time_features=1,
        ),
        lambda: {
            "past_values": torch.rand(1, 10),
            "past_time_features": torch.rand(1, 10, 1),
            "past_observed_mask": torch.ones(1, 10),
            "future_values": torch.rand(1, 4),
            "future_time_features": torch.rand(1, 4, 1),
        },
        causal(length=4, batch=1),
    ),
    "VitsModel": Example(
        _transformers(
            "VitsModel",
            flow_size=16,
            spectrogram_bins=9,
            upsample_initial_channel=16,
            upsample_rates=[4, 4],
            upsample_kernel_sizes=[8, 8],
            resblock_kernel_sizes=[3],
            resblock_dilation_sizes=[[1]],
            duration_predictor_filter_channels=8,
            depth_separable_channels=2,
            posterior_encoder_num_wavenet_layers=1,
            prior_encoder_num_wavenet_layers=1,
            wavenet_dilation_rate=1,
        ),
        lambda: {"input_ids": torch.randint(3, 38, (1, LENGTH))},
        refused="Discriminant has negative values",
    ),
}
# one of each kind of output, attention and layer, all of them fast
SAMPLE = (
    "BertForPreTraining",
    "DebertaV2Model",
    "NystromformerModel",
    "GPT2LMHeadModel",
    "ViTMAEForPreTraining",
    "SiglipVisionModel",
    "T5ForConditionalGeneration",
    "VJEPA2Model",
    "DacModel",
    "Wav2Vec2Model",
    "OwlViTForObjectDetection",
    "SamModel",
    "CsmForConditionalGeneration",
    "TimeSeriesTransformerModel",
    "VitsModel",
)


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in TRANSFORMERS]
)
def test_models_of_transformers_count_as_they_run(name):
    TRANSFORMERS[name].check()
