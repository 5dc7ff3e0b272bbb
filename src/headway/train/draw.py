"""Drawing pictures with a trained model that draws."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image as Pillow

from headway.architectures.bagel.sampling import draw_images
from headway.data.drawing import DrawingEncoder
from headway.errors import UsageError
from headway.models.split_attention import SplitMask
from headway.train.opened import OpenedModel, make_encoder


class Drawer:
    """Draws pictures that sentences ask for.

    Args:
        opened: a model that draws, with its tokenizer.

    Raises:
        UsageError: the model draws no images.
    """

    def __init__(self, opened: OpenedModel) -> None:
        self._model: Any = opened.model
        encoder = make_encoder(opened.processor, opened.model)
        if not isinstance(encoder, DrawingEncoder):
            raise UsageError(
                f"{opened.found.path} draws no images: its model type is {self._model.config.model_type!r}. Models of "
                "the type bagel do; `headway demo draw` trains a small one."
            )
        self._encoder = encoder

    @property
    def largest(self) -> int:
        """Longest side of a picture [pixels]."""
        config = self._encoder.config
        return config.max_latent_size * config.latent_pixels

    def draw(
        self,
        texts: Sequence[str],
        *,
        height: int,
        width: int,
        steps: int = 24,
        guidance: float = 2.0,
        away_from: str = "",
        seed: int = 0,
    ) -> list[Pillow.Image]:
        """Draw one picture for each text, all of them in one pack.

        Args:
            texts: what is asked for.
            height: of the pictures [pixels].
            width: of the pictures [pixels].
            steps: forward passes.
            guidance: how far to go from what `away_from` would give towards what is asked for, and beyond; 1 for none.
            away_from: a text that asks for nothing in particular.
            seed: of the noise that they begin as.

        Raises:
            UsageError: sides that are no whole number of latent patches, or longer than the model has positions for.
        """
        config = self._encoder.config
        unit = config.latent_pixels
        if height % unit or width % unit or not (0 < height <= self.largest and 0 < width <= self.largest):
            raise UsageError(
                f"A picture of {height} x {width} pixels cannot be drawn: each side is a multiple of {unit} pixels, at "
                f"most {self.largest}."
            )
        device = next(self._model.parameters()).device
        encode = self._encoder.text_ids
        drawn = draw_images(
            self._model,
            [encode(text) for text in texts],
            height // unit,
            width // unit,
            lambda workload: SplitMask.of(workload).each(lambda tensor: tensor.to(device)),
            around=self._encoder.around_images,
            away_from=encode(away_from) if guidance != 1.0 else None,
            steps=steps,
            guidance=guidance,
            shift=config.timestep_shift,
            seed=seed,
        )
        return [_picture(image) for image in self._decoded(drawn)]

    @torch.no_grad()
    def _decoded(self, drawn: torch.Tensor) -> Sequence[torch.Tensor]:
        """Make pixels of latents, one picture at a time."""
        vae = self._model.vae_model
        if vae is None:
            return [*drawn]
        scaled = drawn.to(vae.dtype) / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        return [vae.decode(latents[None]).sample[0] for latents in scaled]


def _picture(image: torch.Tensor) -> Pillow.Image:
    pixels = ((image.float().cpu().permute(1, 2, 0) + 1.0) * 127.5).round().clamp(0, 255)
    return Pillow.fromarray(pixels.to(torch.uint8).numpy())
