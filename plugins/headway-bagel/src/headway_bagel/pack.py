"""Pack of a model that draws: where its tokens lie, who sees whom, and the noise of a step.

Tensor letters: L latent patches, C numbers per latent patch, G latent grids, H slots that a process holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
from torch.distributed import ProcessGroup

from headway.data.collate import FamilyInputs
from headway.data.samples import Origin
from headway.models.attention.splits import SplitMask
from headway.models.parallel.exchange import split_over
from headway_bagel.deal import deal


@dataclass(frozen=True)
class DrawnPack(FamilyInputs):
    """The arguments of the model beside token ids and positions.

    Attributes:
        mask: who sees whom.
        grids: of each grid of latents the number of its sample, its patches, and whether it is drawn; shape (G, 3).
        features: numbers of a latent patch.
        patch_values: numbers of a patch that is read.
        shift: of the flow's times towards noise; 1 leaves them as drawn.
    """

    mask: SplitMask
    grids: tuple[tuple[int, int, bool], ...]
    features: int
    patch_values: int
    shift: float

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "DrawnPack":
        """The same with its tensors changed: moved, or pinned."""

        def changed(value: Any) -> Any:
            if isinstance(value, list):
                return [change(tensor) for tensor in value]
            return change(value) if isinstance(value, torch.Tensor) else value

        inputs = {name: changed(value) for name, value in self.inputs.items()}
        slots_H = None if self.slots_H is None else change(self.slots_H)
        return replace(self, inputs=inputs, mask=self.mask.map_tensors(change), slots_H=slots_H)

    def noised(self, origins: Sequence[Origin], seed: int, step: int) -> "DrawnPack":
        """Draw the noise of a step, the time of each image that is drawn, and the noise of an autoencoder's latents.

        Each sample has a generator of its own, so that neither the packing nor the number of processes changes what is
        drawn, nor does a resumed run.

        Args:
            origins: of the pack's samples.
            seed: of the run.
            step: number of the step.

        Source: times as sigmoid of a normal draw, shifted: Esser et al. 2024, arXiv:2403.03206, section 3.1 and
        equation 23, with the square of its root as `shift`.
        """
        if not self.grids:
            return self
        # Each image draws time, noise and the autoencoder's noise, in the order of the pack, from its sample's
        # generator.
        generators = [_generator(origin, seed, step) for origin in origins]
        noise, times, encoder_noise = [], [], []
        encodes = "latent_pixels" in self.inputs
        for sample, patches, is_drawn in self.grids:
            drawn = torch.sigmoid(torch.randn((), generator=generators[sample]))
            times.append(self.shift * drawn / (1 + (self.shift - 1) * drawn) if is_drawn else torch.zeros(()))
            noise.append(torch.randn(patches, self.features, generator=generators[sample]))
            if encodes:
                encoder_noise.append(torch.randn(patches, self.features, generator=generators[sample]))
        noise_inputs = {"noise": torch.cat(noise), "timesteps": torch.stack(times)}
        if encodes:
            noise_inputs["encoder_noise"] = torch.cat(encoder_noise)
        return replace(self, inputs={**self.inputs, **noise_inputs})

    def with_blank_image(self) -> "tuple[torch.Tensor, DrawnPack]":
        """Add a patch to read that no token takes.

        Returns:
            Its values, zeros of shape (1, D), and the pack with it.
        """
        place = torch.zeros(1, dtype=torch.long)
        blank = {"image_rows": place[:0], "image_places": place, "image_longest": 1}
        inputs = {**self.inputs, **blank, "image_cu_seqlens": torch.tensor([0, 1], dtype=torch.int32)}
        return torch.zeros(1, self.patch_values), replace(self, inputs=inputs)

    def dealt(self, arguments: dict[str, Any], group: ProcessGroup) -> "DrawnPack":
        """Cut a pack to the slots of this process; attention still spans the whole pack.

        Args:
            arguments: tokens, positions and pixels of the whole pack, by the names of the model's arguments.
            group: the processes, all with the same pack.

        Raises:
            TrainingError: the pack has fewer slots than there are processes.
        """
        split = split_over(group, arguments["input_ids"].shape[1])
        part = deal({**arguments, **self.inputs}, split.rank, split.degree)
        inputs = {**part.arguments, "pack_split": split}
        if part.patches:
            inputs["image_split"] = split_over(group, part.patches)
        return replace(self, inputs=inputs, mask=self.mask.of_rows(part.order_T), slots_H=part.slots_H)


def _generator(origin: Origin, seed: int, step: int) -> torch.Generator:
    file = origin.file.rpartition("/")[2]  # the name without its folder: data that are moved have the same noise
    name = f"{origin.source}\0{file}\0{origin.row}\0{seed}\0{step}".encode(errors="surrogatepass")
    return torch.Generator().manual_seed(int.from_bytes(blake2b(name, digest_size=8).digest(), "big") >> 1)
