"""Bagel's forward: understood tokens and noised latents through one mixture of transformers.

What decides how much is computed (where tokens lie, boundaries, masks) comes with the batch, made on the CPU; nothing
here reads a number back from the device.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.utils.generic import ModelOutput

from headway.errors import TrainingError
from headway_bagel.blocks import MixtureModel, TokenOrder
from headway_bagel.configuration import BagelConfig
from headway_bagel.towers import Connector, GridPositions, TimestepEmbedder, VisionTower, for_backend
from headway_bagel.vae import encode, load_vae


@dataclass
class BagelOutput(ModelOutput):
    """The outputs of a forward.

    Attributes:
        logits: of the supervised tokens, shape (S, V).
        flow: predicted velocity of the drawn latent patches, from data to noise, shape (K, C).
        flow_target: the velocity that they should have, shape (K, C); without gradient.
    """

    trained: ClassVar[tuple[str, ...]] = ("logits", "flow")  # the outputs that losses are made of

    logits: torch.Tensor | None = None
    flow: torch.Tensor | None = None
    flow_target: torch.Tensor | None = None


class LanguageModel(nn.Module):
    """The blocks and the head, under the names of BAGEL's checkpoints."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = MixtureModel(config, Qwen2RotaryEmbedding(config))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


class BagelModel(PreTrainedModel):
    """A mixture of transformers that reads text and images and draws images by flow matching."""

    config_class = BagelConfig
    config: BagelConfig
    base_model_prefix = "language_model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MixtureBlock", "SiglipEncoderLayer"]  # noqa: RUF012  # as transformers has it
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_attention_backend = True
    main_input_name = "input_ids"

    def __init__(self, config: BagelConfig) -> None:
        super().__init__(config)
        text, vision = config.text_config, config.vision_config
        size = text.hidden_size
        self.language_model = LanguageModel(text)
        self.vit_model = VisionTower(vision)
        self.connector = Connector(vision.hidden_size, size, config.connector_act)
        self.vit_pos_embed = GridPositions(config.image_side, size)
        self.time_embedder = TimestepEmbedder(size)
        self.vae2llm = nn.Linear(config.latent_features, size)
        self.llm2vae = nn.Linear(size, config.latent_features)
        self.latent_pos_embed = GridPositions(config.max_latent_size, size)
        self.vae_model = load_vae(config.vae_config) if config.vae_config is not None else None
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Open a saved model; the autoencoder stays frozen, which transformers' reading of weights forgets."""
        opened: Any = super().from_pretrained(*args, **kwargs)
        model = opened[0] if isinstance(opened, tuple) else opened  # with output_loading_info
        if model.vae_model is not None:
            model.vae_model.requires_grad_(False)
        return opened

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module that no checkpoint fills; the answer of the flow starts at zero."""
        if isinstance(module, GridPositions):
            module.fill()
        elif self.vae_model is not None and module in self.vae_model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.reset_parameters()  # type: ignore[operator]  # as diffusers does: convolutions, linear, norms
        else:
            super()._init_weights(module)
            if module is self.llm2vae:
                module.weight.zero_()
                module.bias.zero_()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of text."""
        return self.language_model.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of text."""
        self.language_model.model.embed_tokens = value  # type: ignore[assignment]  # an embedding, by contract

    def get_output_embeddings(self) -> nn.Module:
        """Return the head over text."""
        return self.language_model.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Any,
        understood_slots: torch.Tensor,
        supervised_rows: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_rows: torch.Tensor | None = None,
        image_places: torch.Tensor | None = None,
        image_cu_seqlens: torch.Tensor | None = None,
        image_longest: int = 0,
        latents: torch.Tensor | None = None,
        latent_pixels: list[torch.Tensor] | None = None,
        encoder_noise: torch.Tensor | None = None,
        latent_slots: torch.Tensor | None = None,
        latent_places: torch.Tensor | None = None,
        latent_grids: torch.Tensor | None = None,
        timesteps: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
        drawn_rows: torch.Tensor | None = None,
        logits_to_keep: torch.Tensor | None = None,
        latents_before: int = 0,
        image_split: Any = None,
        **kwargs: Any,
    ) -> BagelOutput:
        """Run one pack; `headway_bagel.layout` makes the arguments that say where things lie.

        Of a pack that several processes share, each is given its own slots (`headway_bagel.deal`).

        Args:
            input_ids: tokens, any at patches, shape (1, T).
            position_ids: rotary positions, one for all tokens of an image, shape (1, T).
            attention_mask: the mask of the pack's splits: what `headway_flash` takes, or booleans (1, 1, T, T).
            understood_slots: slots of the understood tokens, shape (U,).
            supervised_rows: rows among these whose next token is learnt, shape (S,).
            pixel_values: patches that are read, shape (P, channels * patch size**2).
            image_rows: rows among the understood tokens that they take, shape (P,), or fewer: the rest are blank.
            image_places: place of each in a square of the largest image, shape (P,).
            image_cu_seqlens: boundaries of the images [patches], int32, shape (M + 1,).
            image_longest: patches of the largest image.
            latents: clean latent patches, shape (L, C), already scaled.
            latent_pixels: in their place, the images that the VAE encodes, each (3, height, width) from -1 to 1.
            encoder_noise: which latents of the VAE's distribution are taken, shape (L, C); its mean when None.
            latent_slots: their slots, shape (L,).
            latent_places: place of each in a square of the largest drawn image, shape (L,).
            latent_grids: which grid each belongs to, shape (L,).
            timesteps: time of the flow of each grid, 0 where it is clean, shape (G,).
            noise: shape (L, C); drawn here when None.
            drawn_rows: the latent patches that are drawn, shape (K,).
            logits_to_keep: slots of understood tokens whose logits are returned in place of the supervised ones'.
            latents_before: latent patches of the first of `latent_pixels` that another process holds.
            image_split: how several processes share the patches that are read; the tower's attention is told.
            **kwargs: handed to attention; `past_key_values`, a cache of transformers', goes before the pack's own keys.

        Raises:
            TrainingError: latent patches without their places, times, or what they are of.
        """
        # understood tokens: text, and the features of patches that are read
        x_UD = self._understood(input_ids[0, understood_slots], pixel_values, image_rows, image_places,
                                image_cu_seqlens, image_longest, image_split)  # fmt: skip
        slots_T, target = understood_slots, None
        if latent_slots is not None and latent_slots.numel():
            if latent_places is None or latent_grids is None or timesteps is None:
                missing = {"latent_places": latent_places, "latent_grids": latent_grids, "timesteps": timesteps}
                names = ", ".join(name for name, value in missing.items() if value is None)
                raise TrainingError(
                    f"{len(latent_slots)} latent patches were given without {names}: each has a place and a grid, and "
                    "each grid a time of the flow, 0 where it is clean."
                )
            # latent patches on their way from clean (time 0) to noise (time 1), whose velocity is noise - clean
            clean = self._encoded(latent_pixels, encoder_noise) if latents is None else latents
            clean = clean[latents_before : latents_before + len(latent_slots)]
            noise = torch.randn_like(clean) if noise is None else noise
            time_L1 = timesteps.to(clean.dtype)[latent_grids, None]
            noised = (1 - time_L1) * clean + time_L1 * noise
            target = noise - clean
            x_LD = self.vae2llm(noised) + self.time_embedder(timesteps)[latent_grids]
            x_LD = x_LD + self.latent_pos_embed(latent_places).to(x_LD.dtype)
            x_UD = torch.cat([x_UD, x_LD.to(x_UD.dtype)])
            slots_T = torch.cat([slots_T, latent_slots])

        # both kinds through the blocks, then a head for each
        order = TokenOrder(len(understood_slots), slots_T, torch.argsort(slots_T))
        attention_mask = for_backend(attention_mask, self.config.text_config, x_UD.dtype)
        x_TD = self.language_model.model(x_UD[None], order, position_ids, attention_mask, **kwargs)[0]
        rows = supervised_rows if logits_to_keep is None else order.rows_T[logits_to_keep]
        logits = self.language_model.lm_head(x_TD[: order.understood][rows])
        if target is None or drawn_rows is None:
            return BagelOutput(logits=logits)
        flow = self.llm2vae(x_TD[order.understood :][drawn_rows])
        return BagelOutput(logits=logits, flow=flow, flow_target=target[drawn_rows].detach())

    def _understood(
        self,
        ids_U: torch.Tensor,
        pixel_values: torch.Tensor | None,
        rows: torch.Tensor | None,
        places: torch.Tensor | None,
        cu_M: torch.Tensor | None,
        longest: int,
        split: Any,
    ) -> torch.Tensor:
        """Embed text, and put the features of patches in their places: (U, D)."""
        x_UD: torch.Tensor = self.language_model.model.embed_tokens(ids_U)
        if pixel_values is None:
            return x_UD
        assert rows is not None
        assert places is not None
        assert cu_M is not None
        seen_PD = self.connector(self.vit_model(pixel_values, places, cu_M, longest, split))
        seen_PD = (seen_PD + self.vit_pos_embed(places)).to(x_UD.dtype)
        blank = 0.0 * seen_PD[len(rows) :].sum()  # patches that no row takes keep the towers of all processes in step
        return x_UD.index_copy(0, rows, seen_PD[: len(rows)] + blank)

    def _encoded(self, images: list[torch.Tensor] | None, noise_LC: torch.Tensor | None) -> torch.Tensor:
        """Encode images into clean latent patches: (L, C)."""
        if images is None or self.vae_model is None:
            state = "neither latents nor latent_pixels" if images is None else "latent_pixels and no autoencoder"
            raise TrainingError(
                f"There are latent patches, and {state}. Give latents, clean and scaled, or latent_pixels to a model "
                "whose configuration has a vae_config."
            )
        patch, unit = self.config.latent_patch_size, self.config.latent_pixels
        parts: Any = [None] * len(images)
        if noise_LC is not None:
            parts = noise_LC.split([image[0].numel() // unit**2 for image in images])
        vae = self.vae_model
        return torch.cat([encode(vae, image, patch, noise) for image, noise in zip(images, parts, strict=True)])


def register() -> None:
    """Make the classes known to transformers' Auto classes; doing so again changes nothing."""
    AutoConfig.register(BagelConfig.model_type, BagelConfig, exist_ok=True)
    AutoModelForImageTextToText.register(BagelConfig, BagelModel, exist_ok=True)


def vision_tower(model: Any) -> nn.Module:
    """The tower that reads images."""
    tower: nn.Module = model.vit_model
    return tower
