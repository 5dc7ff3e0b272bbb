"""Drawing images with a trained model: Euler steps from noise to an image, guided towards the request.

Tensor letters as in the package; N images that are drawn together, in one pack, R latent patches of one of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal

import torch

from headway.count import Workload
from headway.errors import ConfigError
from headway.packing.parts import SamplePart
from headway_bagel.layout import lay_out

Renorm = Literal["none", "global", "channel", "text-channel"]


@dataclass(frozen=True)
class Guidance:
    """Settings that lead the velocity away from the image that the model would draw without a request.

    Attributes:
        text: how far it goes from that of the request without its text through that of the whole, and beyond; 1 for no
            guidance.
        image: likewise, from that of the request without its images, on what text guidance gives.
        interval: times of the flow at which it is led, above the first and up to the second; 1 is noise, 0 the image.
        renorm: what keeps a velocity from growing longer than that of the whole request: "global", its length over an
            image; "channel", over the numbers of a latent patch; "text-channel", as channel, before images guide.
        renorm_min: a velocity is shortened to no less than this share of itself.

    Raises:
        ConfigError: a value that cannot take effect.

    Source: classifier-free guidance, Ho and Salimans 2022, arXiv:2207.12598; two scales, interval and renorm as in
    `Bagel._forward_flow` of ByteDance-Seed/Bagel.
    """

    text: float = 2.0
    image: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)
    renorm: Renorm = "none"
    renorm_min: float = 0.0

    def __post_init__(self) -> None:
        low, high = self.interval
        if not 0.0 <= low < high <= 1.0:
            raise ConfigError(
                f"The interval of guidance is {low} to {high}: times grow from 0, the image, to 1, noise."
            )
        if not 0.0 <= self.renorm_min <= 1.0:
            raise ConfigError(f"renorm_min is {self.renorm_min}: it is a share of a velocity, from 0 to 1.")
        if self.renorm == "none" and self.renorm_min:
            raise ConfigError(f"renorm_min {self.renorm_min} has no effect without renorm: choose global or channel.")
        unused = self.interval != (0.0, 1.0) or self.renorm != "none"
        if unused and self.text == 1.0 and self.image == 1.0:
            raise ConfigError("An interval or renorm of guidance has no effect where both of its scales are 1.")

    def acts_at(self, time: float) -> bool:
        """Say whether velocities are led at a time of the flow."""
        return (self.text != 1.0 or self.image != 1.0) and self.interval[0] < time <= self.interval[1]

    def lead(
        self, full_NRC: torch.Tensor, no_text_NRC: torch.Tensor | None, no_images_NRC: torch.Tensor | None
    ) -> torch.Tensor:
        """Lead the velocity of whole requests away from those without their text, and without their images."""
        led = full_NRC
        if no_text_NRC is not None:
            led = no_text_NRC + self.text * (full_NRC - no_text_NRC)
        if self.renorm == "text-channel":
            led = self._shortened(led, full_NRC, (-1,))
        if no_images_NRC is not None:
            led = no_images_NRC + self.image * (led - no_images_NRC)
        if self.renorm in ("global", "channel"):
            led = self._shortened(led, full_NRC, (-2, -1) if self.renorm == "global" else (-1,))
        return led

    def _shortened(self, led: torch.Tensor, full: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
        longest, length = (x.square().sum(axes, keepdim=True).sqrt() for x in (full, led))
        return led * (longest / (length + 1e-8)).clamp(self.renorm_min, 1.0)


@dataclass(frozen=True)
class Request:
    """The text and images behind which an image is drawn.

    Attributes:
        parts: texts, and images that are read and referred to, in order; none for an image of anything.
        ids: their tokens, any at patches, shape (T,).
        pixels: patches that are read, as the tower takes them; None without.
        latents: clean latent patches of the images that are referred to; None without.
    """

    parts: tuple[SamplePart, ...] = ()
    ids: tuple[int, ...] = ()
    pixels: torch.Tensor | None = None
    latents: torch.Tensor | None = None


@torch.no_grad()
def draw_images(
    model: Any,
    requests: Sequence[Request],
    rows: int,
    columns: int,
    mask_of: Callable[[Workload], Any],
    *,
    around: tuple[int, int],
    no_text: Sequence[Request],
    no_images: Sequence[Request],
    guidance: Guidance,
    steps: int = 24,
    shift: float = 1.0,
    seed: int = 0,
) -> torch.Tensor:
    """Draw an image behind each request.

    What stands in a request is computed again in every step, as are those of guidance: each of its scales but 1 is a
    request more.

    Args:
        model: a `BagelModel` in evaluation mode.
        requests: what is asked for, N of them.
        rows: of latent patches.
        columns: of latent patches.
        mask_of: makes the attention mask of a pack that a workload describes.
        around: ids of the tokens before and after an image.
        no_text: each request without its text, or with another, which guidance leads away from.
        no_images: each request without its images.
        guidance: how far.
        steps: Euler's.
        shift: of the times towards noise, as in training.
        seed: of the noise.

    Returns:
        The images, -1 to 1, shape (N, 3, height, width), where pixels are drawn; else their latents.

    Raises:
        ConfigError: no step.

    Source: dx/dt = velocity, from t = 1 (noise) to 0.
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}: an image is drawn in 1 step or more.")
    # the requests, then what guidance leads away from, all in one pack; the requests alone at times without guidance
    variants = [list(requests)]
    if guidance.text != 1.0:
        variants.append(list(no_text))
    if guidance.image != 1.0:
        variants.append(list(no_images))
    image = SamplePart("noised", rows=rows, columns=columns)
    led, plain = (_Pack(model, [*chain(*which)], image, around, mask_of) for which in (variants, variants[:1]))
    config = model.config
    generator = torch.Generator().manual_seed(seed)

    # Noise is drawn image by image, so that the first image's does not depend on how many follow.
    noise = [torch.randn(rows * columns, config.latent_features, generator=generator) for _ in requests]
    x_NRC = torch.stack(noise).to(led.device)

    # Euler's steps from noise to image, at times that are shifted towards noise
    even = torch.linspace(1, 0, steps + 1)
    times = (shift * even / (1 + (shift - 1) * even)).tolist()
    for now, following in pairwise(times):
        if guidance.acts_at(now):
            flows = list(led.velocity(x_NRC.repeat(len(variants), 1, 1), now).split(len(requests)))
            full_NRC, free = flows[0], flows[1:]
            no_text_NRC = free.pop(0) if guidance.text != 1.0 else None
            velocity = guidance.lead(full_NRC, no_text_NRC, free[0] if free else None)
        else:
            velocity = plain.velocity(x_NRC, now)
        x_NRC = x_NRC + (following - now) * velocity

    # rows of latent patches as an image: channels, height, width
    patch = config.latent_patch_size
    squares = x_NRC.view(len(requests), rows, columns, patch, patch, -1).permute(0, 5, 1, 3, 2, 4)
    return squares.reshape(len(requests), -1, rows * patch, columns * patch)


class _Pack:
    """Requests with an image behind each, laid out once; only the image and the time change from step to step."""

    def __init__(
        self,
        model: Any,
        requests: Sequence[Request],
        image: SamplePart,
        around: tuple[int, int],
        mask_of: Callable[[Workload], Any],
    ) -> None:
        self._model = model
        weight = next(model.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        arguments, workload = lay_out([[*request.parts, image] for request in requests], model.config)
        drawn = [around[0], *[0] * (image.rows * image.columns), around[1]]
        arguments["input_ids"] = torch.tensor([[token for request in requests for token in (*request.ids, *drawn)]])
        pixels = [request.pixels for request in requests if request.pixels is not None]
        arguments["pixel_values"] = torch.cat(pixels).to(self._dtype) if pixels else None
        blank = torch.zeros(image.rows * image.columns, model.config.latent_features)
        latents = [part for request in requests for part in (request.latents, blank) if part is not None]
        kinds = [part.kind for request in requests for part in (*request.parts, image)]
        grids = [kind == "noised" for kind in kinds if kind in ("clean", "noised")]
        self._is_drawn_G = torch.tensor(grids, dtype=torch.float32, device=self.device)
        self._latents_LC = torch.cat([part.to(self.device, torch.float32) for part in latents])
        self._arguments = {n: v.to(self.device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
        self._arguments["attention_mask"] = mask_of(workload)

    def velocity(self, x_NRC: torch.Tensor, time: float) -> torch.Tensor:
        """Compute the flow's velocity at a time, of images that are on their way: shape (N, R, C)."""
        x_LC = self._latents_LC.index_copy(0, self._arguments["drawn_rows"], x_NRC.flatten(0, 1)).to(self._dtype)
        # The flow's state stands in place of the clean latents: noise in equal part changes nothing.
        out = self._model(**self._arguments, latents=x_LC, noise=x_LC, timesteps=time * self._is_drawn_G)
        flow: torch.Tensor = out.flow.float().view(x_NRC.shape)
        return flow
