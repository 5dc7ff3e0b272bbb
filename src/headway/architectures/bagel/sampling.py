"""Drawing images with a trained model: steps of Euler from noise to an image, guided away from what nobody asked for.

Tensor letters as in the package; N images that are drawn together, in one pack.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from headway.architectures.bagel.layout import SamplePart, lay_out
from headway.count import Workload
from headway.errors import ConfigError


@torch.no_grad()
def draw_images(
    model: Any,
    texts: Sequence[Sequence[int]],
    rows: int,
    columns: int,
    mask_of: Callable[[Workload], Any],
    *,
    around: tuple[int, int],
    away_from: Sequence[int] | None = None,
    steps: int = 24,
    guidance: float = 2.0,
    shift: float = 1.0,
    seed: int = 0,
) -> torch.Tensor:
    """Draw an image behind each text.

    Args:
        model: a `BagelModel` in evaluation mode.
        texts: token ids, those around a text included.
        rows: of latent patches.
        columns: of latent patches.
        mask_of: makes the attention mask of a pack that a workload describes.
        around: ids of the tokens before and after an image.
        away_from: a text that asks for nothing in particular, which guidance leads away from; None for no guidance.
        steps: forward passes.
        guidance: how far the velocity goes from that of `away_from` through that of the text; 1 for no guidance.
        shift: of the times towards noise, as in training.
        seed: of the noise.

    Returns:
        The images, -1 to 1, shape (N, 3, height, width), where pixels are drawn; else their latents.

    Raises:
        ConfigError: no step, or guidance without anything to lead away from.

    Source: dx/dt = velocity, from t = 1 (noise) to 0; classifier-free guidance, Ho and Salimans 2022, arXiv:2207.12598.
    """
    if steps < 1:
        raise ConfigError(f"steps is {steps}: an image is drawn in 1 step or more.")
    if guidance != 1.0 and away_from is None:
        raise ConfigError(
            f"guidance is {guidance}, and away_from gives no text to lead away from. Give one, or guidance 1."
        )
    config = model.config
    free = [away_from] if guidance != 1.0 and away_from is not None else []
    samples = [*texts, *(free * len(texts))]
    parts = [[SamplePart("text", len(ids)), SamplePart("draw", rows=rows, columns=columns)] for ids in samples]
    given, workload = lay_out(parts, config)
    image = [around[0], *[0] * (rows * columns), around[1]]
    device = next(model.parameters()).device
    given = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    given["input_ids"] = torch.tensor([[token for ids in samples for token in (*ids, *image)]], device=device)
    given["attention_mask"] = mask_of(workload)
    drawn = torch.Generator().manual_seed(seed)
    x_NLC = torch.randn(len(texts), rows * columns, config.latent_features, generator=drawn).to(device)
    even = torch.linspace(1, 0, steps + 1)
    times = (shift * even / (1 + (shift - 1) * even)).tolist()
    for now, following in pairwise(times):
        x_LC = x_NLC.repeat(1 + len(free), 1, 1).flatten(0, 1)
        at = torch.full((len(samples),), now, device=device)
        # What stands in place of the clean latents is what the flow has come to: noise in equal part changes nothing.
        flow = model(**given, latents=x_LC, noise=x_LC, timesteps=at).flow.view(1 + len(free), *x_NLC.shape)
        velocity = flow[0] if not free else flow[1] + guidance * (flow[0] - flow[1])
        x_NLC = x_NLC + (following - now) * velocity
    patch = config.latent_patch_size
    squares = x_NLC.view(len(texts), rows, columns, patch, patch, -1).permute(0, 5, 1, 3, 2, 4)
    return squares.reshape(len(texts), -1, rows * patch, columns * patch)
