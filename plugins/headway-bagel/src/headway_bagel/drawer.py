"""Drawing pictures with a trained model that draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Pillow

from headway.answer.model_folder import OpenedModel
from headway.data.samples import Chat, ImagePart, Media, Message, Origin, TextPart
from headway.errors import UsageError
from headway.models.attention.splits import SplitMask
from headway_bagel.configuration import BagelConfig
from headway_bagel.encoding import DrawingEncoder
from headway_bagel.sampling import Guidance, Request, draw_images
from headway_bagel.vae import encode, patches


class BagelDrawer:
    """Draws the pictures of a request in one pack, by Euler's method.

    Args:
        opened: a model of the family, with its tokenizer.
    """

    def __init__(self, opened: OpenedModel) -> None:
        self._model: Any = opened.model
        config: Any = opened.model.config
        self._encoder = DrawingEncoder(opened.processor, config)

    @property
    def largest(self) -> int:
        """Longest side of a picture [pixels]."""
        config = self._encoder.config
        return config.max_latent_size * config.latent_pixels

    def draw(
        self,
        texts: Sequence[str],
        *,
        size: tuple[int, int] | None = None,
        images: Sequence[Path] = (),
        guidance: Guidance | None = None,
        away_from: str | None = None,
        steps: int = 24,
        shift: float | None = None,
        seed: int = 0,
    ) -> list[Pillow.Image]:
        """Draw one picture for each text, all of them in one pack.

        Args:
            texts: what is asked for.
            size: height and width of the pictures [pixels]; when None that of the last image, shrunk until the model
                has positions for it, or the largest.
            images: pictures that each request shows first, to be edited.
            guidance: how far to go beyond what is asked for.
            away_from: a text that asks for nothing in particular, in place of each when guidance leaves texts out; when
                None nothing stands there.
            steps: of the solver, each a forward pass.
            shift: of the times towards noise; the model's own when None.
            seed: of the noise that they begin as.

        Raises:
            UsageError: sides that the model cannot draw, or guidance that has nothing to lead away from.
        """
        guidance = guidance or Guidance()
        if guidance.image != 1.0 and not images:
            raise UsageError(f"Guidance for images is {guidance.image} and the request shows none. Give one, or 1.")
        if away_from is not None and guidance.text == 1.0:
            raise UsageError(f"{away_from!r} to lead away from has no effect where guidance for text is 1.")
        requests = [self._request(text, images) for text in texts]
        rows, columns = self._sides(size, requests[0])
        device = next(self._model.parameters()).device
        drawn = draw_images(
            self._model,
            requests,
            rows,
            columns,
            lambda workload: SplitMask.of(workload).map_tensors(lambda tensor: tensor.to(device)),
            around=self._encoder.around_images,
            no_text=[self._request(away_from, images)] * len(texts),
            no_images=[self._request(text, ()) for text in texts],
            guidance=guidance,
            steps=steps,
            shift=self._encoder.config.timestep_shift if shift is None else shift,
            seed=seed,
        )
        return [_picture(image) for image in self._decoded(drawn)]

    def _sides(self, size: tuple[int, int] | None, request: Request) -> tuple[int, int]:
        """Rows and columns of latent patches."""
        unit = self._encoder.config.latent_pixels
        if size is None:
            shown = [(part.rows, part.columns) for part in request.parts if part.kind == "clean"]
            return shown[-1] if shown else (self.largest // unit, self.largest // unit)
        height, width = size
        if height % unit or width % unit or not (0 < height <= self.largest and 0 < width <= self.largest):
            raise UsageError(
                f"A picture of {height} x {width} pixels cannot be drawn: each side is a multiple of {unit} pixels, at "
                f"most {self.largest}."
            )
        return height // unit, width // unit

    def _request(self, text: str | None, images: Sequence[Path]) -> Request:
        texts = () if text is None else (TextPart(text),)
        shown = tuple(ImagePart(Media(str(path))) for path in images)
        if not texts and not shown:
            return Request()
        chat = Chat((Message("user", (*shown, *texts)),), Origin("request", "the request", 0, repr(text)))
        encoded = self._encoder.encode_request(chat)
        latents = [self._latents(image) for image in encoded.latent_images]
        return Request(
            encoded.parts,
            tuple(encoded.input_ids_S.tolist()),
            encoded.media["images"].features if "images" in encoded.media else None,
            torch.cat(latents) if latents else None,
        )

    @torch.no_grad()
    def _latents(self, image: torch.Tensor) -> torch.Tensor:
        vae, patch = self._model.vae_model, self._encoder.config.latent_patch_size
        if vae is None:
            return patches(image, patch)
        return encode(vae, image.to(next(vae.parameters()).device), patch)

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


def open_drawer(opened: OpenedModel) -> BagelDrawer:
    """Make the drawer of a model.

    Raises:
        UsageError: the model draws no images.
    """
    config: Any = opened.model.config
    if config.model_type != BagelConfig.model_type:
        raise UsageError(
            f"{opened.location.path} draws no images: its model type is {config.model_type!r}. Models of the type "
            f"{BagelConfig.model_type} do; `headway demo draw` trains a small one."
        )
    return BagelDrawer(opened)
