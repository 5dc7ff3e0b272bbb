"""Encoded samples laid end to end: one pack, with its segment boundaries, targets and workload.

Tensor letters: T slots of the pack, N segments, R rows of positions, P patches, D values per patch, M images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from headway.count import Workload
from headway.data.encode import IGNORED, EncodedSample
from headway.errors import DataError


@dataclass(frozen=True, slots=True)
class Batch:
    """One pack.

    Attributes:
        input_ids_1T: token ids.
        labels_1T: the target of each position, already shifted; -100 where there is none, so at every segment's end.
        position_ids_R1T: positions, restarting with each segment; one row, or three for M-RoPE.
        cu_seqlens_N: segment boundaries [tokens], int32, shape (N+1,).
        max_seqlen: the longest segment [tokens].
        pixels_PD: vision patches of all images, end to end; None without images.
        grids_M3: (t, h, w) of each image [patches]; None without images.
        token_types_1T: 1 on image placeholders; None for models without images.
        workload: what the step computes, for counting; stays on the CPU.
        num_supervised: targets that the loss counts.
        sources: file and line of each segment.
    """

    input_ids_1T: torch.Tensor
    labels_1T: torch.Tensor
    position_ids_R1T: torch.Tensor
    cu_seqlens_N: torch.Tensor
    max_seqlen: int
    pixels_PD: torch.Tensor | None
    grids_M3: torch.Tensor | None
    token_types_1T: torch.Tensor | None
    workload: Workload
    num_supervised: int
    sources: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Slots, all of them real tokens."""
        return self.input_ids_1T.shape[1]

    @property
    def num_segments(self) -> int:
        """Samples in the pack."""
        return self.cu_seqlens_N.shape[0] - 1

    @property
    def num_images(self) -> int:
        """Images in the pack."""
        return 0 if self.grids_M3 is None else self.grids_M3.shape[0]

    def to(self, device: torch.device | str) -> "Batch":
        """The same pack on a device; the copy does not wait where the memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        """The same pack in page-locked memory, from which a CUDA device copies without waiting."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: change(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        return replace(self, **{**values, **tensors})

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward, labels left out."""
        positions = self.position_ids_R1T if self.position_ids_R1T.shape[0] > 1 else self.position_ids_R1T[0]
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids_1T,
            "position_ids": positions,
            "pack_cu_seqlens": self.cu_seqlens_N,
            "pack_max_seqlen": self.max_seqlen,
            "use_cache": False,
        }
        if self.token_types_1T is not None:
            inputs["mm_token_type_ids"] = self.token_types_1T
        if self.pixels_PD is not None:
            inputs["pixel_values"] = self.pixels_PD
            inputs["image_grid_thw"] = self.grids_M3
        return inputs


def collate(samples: Sequence[EncodedSample]) -> Batch:
    """Lay samples end to end, in the order given, without any padding.

    Args:
        samples: at least one; all encoded by one `Encoder`.

    Raises:
        DataError: no samples, or a mixture of one-row and M-RoPE positions.
    """
    if not samples:
        raise DataError("A pack needs at least one sample, got none. Skip empty packs before collating.")
    rows = {sample.position_ids_RS.shape[0] for sample in samples}
    if len(rows) > 1:
        raise DataError(
            f"The samples of a pack have {sorted(rows)} rows of positions; encode all of them with one Encoder."
        )
    lengths = torch.tensor([sample.tokens for sample in samples])
    labels = [torch.nn.functional.pad(sample.labels_S[1:], (0, 1), value=IGNORED) for sample in samples]
    pixels = [sample.pixels_PD for sample in samples if sample.pixels_PD is not None]
    grids_M3 = torch.cat([sample.grids_M3 for sample in samples])
    types = [sample.token_types_S for sample in samples if sample.token_types_S is not None]
    return Batch(
        input_ids_1T=torch.cat([sample.input_ids_S for sample in samples])[None],
        labels_1T=torch.cat(labels)[None],
        position_ids_R1T=torch.cat([sample.position_ids_RS for sample in samples], dim=1)[:, None],
        cu_seqlens_N=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        max_seqlen=int(lengths.max()),
        pixels_PD=torch.cat(pixels) if pixels else None,
        grids_M3=grids_M3 if pixels else None,
        token_types_1T=torch.cat(types)[None] if len(types) == len(samples) else None,
        workload=Workload(lengths, images=grids_M3),
        num_supervised=sum(sample.num_supervised for sample in samples),
        sources=tuple(sample.where for sample in samples),
    )
