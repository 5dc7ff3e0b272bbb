"""Pictures that sentences ask for, drawn by models whose family can draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from PIL import Image as Pillow

from headway.answer.model_folder import OpenedModel
from headway.errors import ConfigError, UsageError
from headway.plugins import families_with, family_hook

Renorm = Literal["none", "global", "channel", "text-channel"]


@dataclass(frozen=True)
class Guidance:
    """The way in which the velocity is led away from what the model would draw without being asked.

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


class Drawer(Protocol):
    """Draws pictures that sentences ask for."""

    @property
    def largest(self) -> int:
        """Longest side of a picture [pixels]."""

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
        """Draw one picture for each text.

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


def open_drawer(opened: OpenedModel) -> Drawer:
    """Make what draws with a model.

    Raises:
        UsageError: the model draws no images.
    """
    drawer = family_hook(opened.model.config, "drawer")
    if drawer is None:
        types = ", ".join(name for family in families_with("drawer") for name in family.model_types)
        raise UsageError(
            f"{opened.location.path} draws no images: its model type is {opened.model.config.model_type!r}. Models of "
            f"the type {types} do; `headway demo draw` trains a small one."
        )
    opened_drawer: Drawer = drawer(opened)
    return opened_drawer
