"""Configuration of Bagel: sizes of its language model, its vision tower and its autoencoder."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig, SiglipVisionConfig

from headway.errors import ConfigError


class BagelConfig(PreTrainedConfig):
    """Sizes of a Bagel model.

    Args:
        text_config: of the language model, Qwen2's or Qwen3's; `qk_norm` says of Qwen2 whether queries and keys are
            normalised per head, as BAGEL-7B-MoT's are.
        vision_config: of the SigLIP tower that reads images; its `num_hidden_layers` are those that run.
        vae_config: arguments of diffusers' `AutoencoderKL`, whose latents are drawn; None where pixels are drawn.
        latent_patch_size: latents, or pixels without a VAE, along the side of a latent patch, which is a token.
        max_latent_size: latent patches along the longest side of a drawn image.
        connector_act: activation of the connector between tower and text.
        timestep_shift: shift of the flow's times towards noise, in training and in drawing; 1 leaves them as they are.

    Raises:
        ConfigError: a text model of another kind, or a tower with rotary positions.
    """

    model_type = "bagel"
    sub_configs = {"text_config": AutoConfig, "vision_config": SiglipVisionConfig}  # noqa: RUF012  # as transformers has it

    def __init__(
        self,
        text_config: Any = None,
        vision_config: Any = None,
        vae_config: dict[str, Any] | None = None,
        latent_patch_size: int = 2,
        max_latent_size: int = 64,
        connector_act: str = "gelu_pytorch_tanh",
        timestep_shift: float = 1.0,
        **kwargs: Any,
    ) -> None:
        self.text_config = _text(text_config)
        self.vision_config = _vision(vision_config)
        self.vae_config = vae_config
        self.latent_patch_size = latent_patch_size
        self.max_latent_size = max_latent_size
        self.connector_act = connector_act
        self.timestep_shift = timestep_shift
        super().__init__(**kwargs)

    @property
    def image_side(self) -> int:
        """Patches along the side of the largest image that is read."""
        size: Any = self.vision_config.image_size
        return int(size // self.vision_config.patch_size)

    @property
    def read_pixels(self) -> int:
        """Pixels along the side of a patch that is read."""
        size: Any = self.vision_config.patch_size
        return int(size)

    @property
    def latent_features(self) -> int:
        """Elements of a latent patch."""
        channels = 3 if self.vae_config is None else int(self.vae_config["latent_channels"])
        return channels * self.latent_patch_size**2

    @property
    def latent_pixels(self) -> int:
        """Pixels along the side of a latent patch."""
        levels = 1 if self.vae_config is None else len(self.vae_config["block_out_channels"])
        return int(self.latent_patch_size * 2 ** (levels - 1))


def _text(config: Any) -> PreTrainedConfig:
    values = {"model_type": "qwen2"} if config is None else config
    if isinstance(values, dict):
        values = dict(values)
        values = AutoConfig.for_model(values.pop("model_type", "qwen2"), **values)
    if values.model_type not in ("qwen2", "qwen3"):
        raise ConfigError(
            f"text_config of a Bagel model is of type {values.model_type!r}: its blocks are Qwen2's or Qwen3's. Give "
            "model_type qwen2 or qwen3."
        )
    return values


def _vision(config: Any) -> SiglipVisionConfig:
    vision = SiglipVisionConfig(**(config or {})) if config is None or isinstance(config, dict) else config
    if getattr(vision, "rope", False):
        raise ConfigError(
            "vision_config.rope is true: the tower has learnt positions here, as BAGEL-7B-MoT's has. Leave rope out."
        )
    return vision
