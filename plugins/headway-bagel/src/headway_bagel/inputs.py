"""Packs of a model that reads and draws images, Bagel's: splits, patches and latents side by side."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from headway.count import splits
from headway.count.workload import Workload
from headway.packing.parts import Kind, SamplePart
from headway.tracing.phantom import phantom_floats
from headway_bagel.layout import lay_out

# text, supervised tokens, and the images that are read, referred to and drawn (rows x columns): each driver grows in
# a way of its own
_RUNS: tuple[tuple[int, int, dict[Kind, list[tuple[int, int]]]], ...] = (
    (37, 11, {"image": [(4, 3)], "clean": [(1, 2)], "noised": [(2, 2)]}),
    (53, 29, {"image": [(2, 4), (3, 3)], "clean": [(2, 2)], "noised": [(1, 3), (2, 3), (4, 4)]}),
    (71, 17, {"image": [(3, 1)], "clean": [(3, 2), (3, 4)], "noised": [(4, 2)]}),
    (101, 43, {"image": [(4, 4), (1, 2), (2, 3)], "clean": [(1, 1)], "noised": [(3, 3), (4, 3)]}),
)


class Drawings:
    """One segment: text, an image that is read, one that is referred to, and one that is drawn."""

    strided: Sequence[str] = ()
    notes: ClassVar[dict[str, str]] = {}
    drivers = (
        "tokens", "understood", "supervised", "noised", "latents", "latent_grids", "latent_pairs:frame", "patches",
        "patch_pairs:frame", "pairs:splits", "grids", "segments",
    )  # fmt: skip

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self._parts: dict[Workload, list[SamplePart]] = {}
        for text, supervised, images in _RUNS:
            parts = [SamplePart(kind, rows=h, columns=w) for kind, sides in images.items() for h, w in sides]
            parts.insert(2, SamplePart("text", text, supervised))
            self._parts[lay_out([parts], self.config)[1]] = parts

    def workloads(self, _longest_window: int = 0) -> list[Workload]:
        """Plan four packs of unlike proportions."""
        return [*self._parts]

    def text_alone(self) -> dict[str, Any]:
        """Make the arguments of a pack without an image."""
        parts = [SamplePart("text", 37, 11)]
        arguments, workload = lay_out([parts], self.config)
        return arguments | {
            "input_ids": torch.zeros(1, workload.tokens, dtype=torch.long),
            "attention_mask": torch.from_numpy(splits.mask_of_runs(splits.all_causal(workload.segments)))[None, None],
        }

    def arguments(self, workload: Workload, device: torch.device | None = None) -> dict[str, Any]:
        """Make the arguments of one forward; its mask is drawn cell by cell.

        Args:
            workload: one of `workloads`.
            device: of a real model, which gets random floats; None for a phantom twin, which gets phantoms.
        """
        parts, config = self._parts[workload], self.config
        arguments, _ = lay_out([parts], config)

        def floats(*shape: int) -> torch.Tensor:
            return phantom_floats(shape) if device is None else torch.randn(shape)

        tower = config.vision_config
        pixels = config.latent_pixels
        drawn = [part for part in parts if part.kind in ("clean", "noised")]
        arguments |= {
            "input_ids": torch.zeros(1, workload.tokens, dtype=torch.long),
            "attention_mask": torch.from_numpy(splits.mask_of_runs(workload.splits))[None, None],
            "pixel_values": floats(workload.patches, tower.num_channels * tower.patch_size**2),
            "timesteps": floats(len(drawn)),
            "noise": floats(workload.latent_patches, config.latent_features),
        }
        if config.vae_config is None:
            arguments["latents"] = floats(workload.latent_patches, config.latent_features)
        else:
            arguments["latent_pixels"] = [floats(3, p.rows * pixels, p.columns * pixels) for p in drawn]
        if device is None:
            return arguments
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
