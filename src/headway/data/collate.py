"""Encoded samples laid end to end: one pack, with its segment boundaries, targets and workload.

Tensor letters: T slots of the pack, L of them that a process computes, K of these with a label, N segments, R rows of
positions, P patches, D values per patch, M images or videos.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from headway.count import Workload
from headway.count.modalities import MODALITIES
from headway.count.splits import branched
from headway.data.answers import Answers, answers_of
from headway.data.encoded import EncodedSample
from headway.data.media.joining import joined_tensors
from headway.data.media.tensors import MediaTensors, joined_media, model_arguments
from headway.data.samples import Origin
from headway.errors import ConfigError, DataError
from headway.models.attention.splits import SplitMask
from headway.models.losses import IGNORED, labelled_slots
from headway.models.parallel.sequence import local_slots
from headway.models.vision import VisionGeometry
from headway.models.waits import Placeholders, Segments, segments_of

PADDING_TOKEN = 0  # any id but a placeholder's: nothing attends to it and nothing is learnt from it


@dataclass(frozen=True)
class FamilyInputs(ABC):
    """Tensors that only packs of one family of models hold: layouts, masks, noise.

    Attributes:
        inputs: tensors, and lists of them, by the names of the model's arguments.
        mask: who sees whom, as `headway.models.attention` takes it.
        slots_H: of a pack that several processes share, the slots that this one holds; None of a whole pack.
    """

    inputs: dict[str, Any]
    mask: Any
    slots_H: torch.Tensor | None = field(default=None, kw_only=True)

    @abstractmethod
    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "FamilyInputs":
        """The same with every tensor changed: moved, or pinned."""

    @abstractmethod
    def noised(self, origins: Sequence[Origin], seed: int, step: int) -> "FamilyInputs":
        """The same with a step's noise; arguments as `Batch.noised`."""

    @abstractmethod
    def dealt(self, arguments: dict[str, Any], group: ProcessGroup) -> "FamilyInputs":
        """The slots of this process alone, of a pack that a group shares; arguments by the model's names."""

    @abstractmethod
    def with_blank_image(self) -> "tuple[torch.Tensor, FamilyInputs]":
        """The pixels of an image that no token takes, shape (P, D), and the same with that image."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One pack.

    Attributes:
        input_ids_1T: token ids.
        labels_1T: the target of each position, already shifted; -100 where there is none, so at every segment's end.
        position_ids_R1T: positions, restarting with each segment; one row, or three for M-RoPE.
        cu_seqlens_N: segment boundaries [tokens], int32; the padding's segment, if there is one, comes last.
        max_seqlen: the longest segment [tokens].
        media: tensors of each kind of media that there is, by the names of `headway.count.modalities`; patches are
            uint8 of one frame or float32.
        processed: tensors of all images, by the model's own names, where they are as its processor gives them.
        token_types_1T: 1 on image and 2 on video placeholders (PaliGemma: on answers); None for models without.
        types_name: the model's argument that takes them.
        pixel_scale_2D: factor and summand that turn uint8 patches into the model's; None where they are so already.
        vision: tensors that the vision tower would derive from the grids, as keyword arguments of the model.
        placeholders: where those of images and videos are; None where the collator has no vision geometry.
        source_ids_N: number of each segment's source among the collator's; 0 for padding.
        workload: lengths, grids and slots of the pack, for counting FLOPs; stays on the CPU.
        supervised: targets of each sample that the loss counts [tokens].
        origins: where each sample came from.
        sample_tokens: length of each sample, all of its segments [tokens].
        family_inputs: what a model of a family of its own takes beside tokens and positions; None for other models.
        answers: of the rows that have several; None of a pack without such rows.
        companion: another pack of the same rows, which the objective asked for and which stays on the CPU; else None.
        splits: who sees whom where answers share a prompt, as `headway.models.attention` takes it; None where segments
            say it.
        segments: lengths and positions of the segments of a pack that is on a device, which nobody has to wait for.
        labelled_K: slots with a label, numbered among those that this process computes; None until the pack is dealt.
    """

    input_ids_1T: torch.Tensor
    labels_1T: torch.Tensor
    position_ids_R1T: torch.Tensor
    cu_seqlens_N: torch.Tensor
    max_seqlen: int
    media: dict[str, MediaTensors]
    processed: dict[str, torch.Tensor]
    token_types_1T: torch.Tensor | None
    types_name: str
    pixel_scale_2D: torch.Tensor | None
    vision: dict[str, Any]
    placeholders: Placeholders | None
    source_ids_N: torch.Tensor
    workload: Workload
    supervised: tuple[int, ...]
    origins: tuple[Origin, ...]
    sample_tokens: tuple[int, ...]
    family_inputs: "FamilyInputs | None" = None
    answers: Answers | None = None
    companion: "Batch | None" = None
    splits: SplitMask | None = None
    segments: Segments | None = None
    labelled_K: torch.Tensor | None = None

    @property
    def slots(self) -> int:
        """Positions that the kernels compute, padding included [tokens]."""
        return self.input_ids_1T.shape[1]

    @property
    def tokens(self) -> int:
        """Real tokens [tokens]."""
        return self.workload.tokens

    @property
    def num_samples(self) -> int:
        """Samples in the pack."""
        return len(self.origins)

    @property
    def num_segments(self) -> int:
        """Segments of samples in the pack: one for each, or one for each view of a chat that has several."""
        return self.workload.num_segments

    @property
    def num_supervised(self) -> int:
        """Targets that the loss counts [tokens]."""
        return sum(self.supervised)

    def work(self, *, skips_unlabelled: bool) -> Workload:
        """Workload with its labelled tokens, on which alone the head may run."""
        return self.workload.with_counts(
            supervised=self.num_supervised, logits=self.num_supervised if skips_unlabelled else None
        )

    @property
    def num_answers(self) -> tuple[int, ...]:
        """Number of answers of each row; none of a pack without rows that have several."""
        return () if self.answers is None else self.answers.counts

    @property
    def sources(self) -> tuple[str, ...]:
        """File and place of each sample."""
        return tuple(str(origin) for origin in self.origins)

    def source_of_slots(self) -> torch.Tensor:
        """Number of each slot's source, shape (T,), where the pack is."""
        lengths_N = self.cu_seqlens_N.diff()
        return torch.repeat_interleave(self.source_ids_N, lengths_N, output_size=self.slots)

    @property
    def num_images(self) -> int:
        """Images in the pack."""
        return len(self.workload.images)

    def to(self, device: torch.device | str) -> "Batch":
        """The same pack on a device; the copy does not wait where the memory is pinned."""
        moved = self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))
        if torch.device(device).type != "cpu":
            moved = replace(moved, segments=self._segments())
        if not self.vision:
            return moved
        # With everything ready-made, the model only lists the grids: on the host, so that it need not wait for them.
        media = dict(moved.media)
        for name, tensors in self.media.items():
            if MODALITIES[name].shape == "grids":
                media[name] = media[name]._replace(sizes=tensors.sizes)
        return replace(moved, media=media)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the tensors on a device from being used again before a stream is done with them."""

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)
            return tensor

        self._map_tensors(keep)

    def noised(self, seed: int, step: int) -> "Batch":
        """The same pack with a step's random numbers, where its family takes any; see `FamilyInputs.noised`."""
        if self.family_inputs is None:
            return self
        return replace(self, family_inputs=self.family_inputs.noised(self.origins, seed, step))

    def dealt(self, group: ProcessGroup | None) -> "Batch":
        """This process's part of a pack: its labels, and what a family laid out; models cut the rest themselves.

        Raises:
            TrainingError: as `local_slots` has it.
        """
        dealt = self
        if group is not None and self.family_inputs is not None:
            inputs = {"input_ids": self.input_ids_1T, "position_ids": self.position_ids_R1T[0]}
            inputs |= self._pixels()
            dealt = replace(self, media={}, family_inputs=self.family_inputs.dealt(inputs, group))
        labelled_K = labelled_slots(self.labels_1T[0, dealt.local_slots(group)])
        return replace(dealt, labelled_K=labelled_K.pin_memory() if self.labels_1T.is_pinned() else labelled_K)

    def local_slots(self, group: ProcessGroup | None) -> slice | torch.Tensor:
        """The slots that this process computes, by which labels and source ids are cut; all slots of an unshared pack.

        Raises:
            TrainingError: the pack has fewer slots than the group has processes.
        """
        if self.family_inputs is not None:
            return slice(0, self.slots) if self.family_inputs.slots_H is None else self.family_inputs.slots_H
        return local_slots(self.slots, group)

    def pin_memory(self) -> "Batch":
        """The same pack in page-locked memory, from which a CUDA device copies without waiting."""
        return self._map_tensors(torch.Tensor.pin_memory)

    def _map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        values: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        changed = {name: change(value) for name, value in values.items() if isinstance(value, torch.Tensor)}
        media = {name: tensors.map_tensors(change) for name, tensors in self.media.items()}
        processed = {name: change(tensor) for name, tensor in self.processed.items()}
        vision = {k: change(v) if isinstance(v, torch.Tensor) else v for k, v in self.vision.items()}
        placeholders = None if self.placeholders is None else self.placeholders.moved(change)
        family_inputs = None if self.family_inputs is None else self.family_inputs.map_tensors(change)
        answers = None if self.answers is None else self.answers.map_tensors(change)
        splits = None if self.splits is None else self.splits.map_tensors(change)
        parts = {"media": media, "processed": processed, "vision": vision, "placeholders": placeholders}
        parts |= {"family_inputs": family_inputs, "answers": answers, "splits": splits}
        return replace(self, **{**values, **changed, **parts})

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward, labels left out; uint8 patches are normalised here."""
        positions = self.position_ids_R1T if self.position_ids_R1T.shape[0] > 1 else self.position_ids_R1T[0]
        if self.family_inputs is not None:
            arguments = {"input_ids": self.input_ids_1T, "position_ids": positions, "pixel_values": None}
            return arguments | self._pixels() | self.family_inputs.inputs | {"attention_mask": self.family_inputs.mask}
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids_1T,
            "position_ids": positions,
            "pack_cu_seqlens": self.cu_seqlens_N,
            "pack_max_seqlen": self.max_seqlen,
            "pack_segments": self._segments(),
            "use_cache": False,
        }
        if self.splits is not None:
            inputs["pack_splits"] = self.splits
        if self.placeholders is not None:
            inputs["pack_placeholders"] = self.placeholders
        if self.token_types_1T is not None:
            inputs[self.types_name] = self.token_types_1T
        scale = None if self.pixel_scale_2D is None else (self.pixel_scale_2D[0], self.pixel_scale_2D[1])
        return inputs | model_arguments(self.media, scale) | self.processed | self.vision

    def _segments(self) -> Segments:
        return segments_of(self.cu_seqlens_N, self.position_ids_R1T) if self.segments is None else self.segments

    def _pixels(self) -> dict[str, torch.Tensor]:
        """Patches of images, which a family's own model takes without their grids."""
        features_PD = self.media["images"].features if "images" in self.media else None
        return {} if features_PD is None else {"pixel_values": features_PD}


@dataclass(frozen=True)
class Collator:
    """Lays encoded samples end to end for one model.

    Attributes:
        geometry: the model's vision geometry; with it, what the tower derives from grids is computed here.
        pixel_scale: factor and summand per value of a uint8 patch, each of shape (D,).
        position_rows: rows of positions that the model takes, 1 or 3; what a pack without a sample has.
        blank: a blank image alone, for models whose images are as their processor gives them (`Encoder.blank_image()`).
        sources: names of all sources, so that losses can be told apart; one if not given.
        bucket_tokens: slots are padded up to a multiple of this [tokens]; None pads nothing.
        bucket_patches: patch buffers are padded up to a multiple of this [patches]; None pads nothing.
        shares_prompts: whether every pack says who sees whom, as answers may share a prompt; otherwise packs where some
            do.

    Padding is one segment more, at the end, without targets: nothing attends to it, and it is counted as slots, never
    as work. Padding patches are blank images of their own, whose placeholders stand in that segment.

    Raises:
        ConfigError: a bucket that cannot be filled.
    """

    geometry: VisionGeometry | None = None
    pixel_scale: tuple[torch.Tensor, torch.Tensor] | None = None
    position_rows: int = 1
    blank: EncodedSample | None = None
    sources: tuple[str, ...] = ()
    bucket_tokens: int | None = None
    bucket_patches: int | None = None
    shares_prompts: bool = False

    def __post_init__(self) -> None:
        if self.bucket_tokens is not None and self.bucket_tokens < 1:
            raise ConfigError(f"bucket_tokens is {self.bucket_tokens}; it must be at least 1, or none for no padding.")
        if self.bucket_patches is None:
            return
        if self.geometry is None:
            raise ConfigError(
                "bucket_patches has no effect: this model has no vision tower whose patches Headway can pad. Leave it "
                "out."
            )
        unit = self.geometry.merge_size**2
        if self.bucket_patches < 1 or self.bucket_patches % unit:
            raise ConfigError(
                f"bucket_patches is {self.bucket_patches}; it must be a multiple of {unit}, the patches of one token."
            )

    def __call__(self, samples: Sequence[EncodedSample]) -> Batch:
        """Lay samples end to end, in the order given; no sample gives a pack of padding alone.

        Raises:
            DataError: a mixture of one-row and M-RoPE positions.
        """
        # One-row and three-row (M-RoPE) positions cannot stand in one tensor.
        rows = {sample.position_ids_RS.shape[0] for sample in samples} or {self.position_rows}
        if len(rows) > 1:
            raise DataError(
                f"The samples of a pack have {sorted(rows)} rows of positions; encode all of them with one Encoder."
            )
        # The segments that attend to themselves: the views of a chat count one by one.
        views = [sample.segments or (sample.tokens,) for sample in samples]
        lengths = [length for segments in views for length in segments]
        # Media end to end, in the order of their samples.
        samples_media = joined_media([sample.media for sample in samples])
        sizes: dict[str, Any] = {name: tensors.sizes for name, tensors in samples_media.items()}
        ids = [sample.input_ids_S for sample in samples]
        # Labels are shifted here: slot t holds token t + 1, and a segment's last slot learns nothing.
        labels = [pad(sample.labels_S[1:], (0, 1), value=IGNORED) for sample in samples]
        positions = [sample.position_ids_RS for sample in samples]
        types = [sample.token_types_S for sample in samples if sample.token_types_S is not None]
        like = samples[0] if samples else self.blank  # all of a model take types, or none

        # Padding up to the next bucket is one more segment, so that no sample sees it.
        padding_S, media = self._pad(sum(lengths), samples_media)
        if len(padding_S):
            ids.append(padding_S)
            labels.append(torch.full_like(padding_S, IGNORED))
            positions.append(torch.arange(len(padding_S)).expand(rows.pop(), -1))
            if like is None or like.token_types_S is not None:
                types.append(self.types(padding_S))
        segments_N = torch.tensor([*lengths, *([len(padding_S)] if len(padding_S) else [])])
        # Positions and boundaries of patches are made here, on the CPU, so that the tower need not wait.
        vision: dict[str, Any] = {}
        if self.geometry is not None:
            for name, tensors in media.items():
                if MODALITIES[name].tower == "vision":
                    vision |= self.geometry.inputs(tensors.sizes, f"{MODALITIES[name].kind}_")
        input_ids_1T = torch.cat(ids)[None]
        # Work is counted of the samples' own media, without the padding that fills buckets.
        branches = any(sample.prompt for sample in samples)
        workload = Workload(
            lengths,
            slots=int(segments_N.sum()),
            packs=1,
            splits=[runs for sample in samples for runs in _splits(sample)] if branches else (),
            **sizes,
        )
        processed = joined_tensors([sample.processed for sample in samples])
        # Source of each segment, by which losses are reported; padding counts to the first, with no label.
        numbers = [self.sources.index(sample.origin.source) if self.sources else 0 for sample in samples]
        source_ids = [number for number, segments in zip(numbers, views, strict=True) for _ in segments]
        return Batch(
            input_ids_1T=input_ids_1T,
            labels_1T=torch.cat(labels)[None],
            position_ids_R1T=torch.cat(positions, dim=1)[:, None],
            cu_seqlens_N=pad(segments_N.cumsum(0), (1, 0)).to(torch.int32),
            max_seqlen=int(segments_N.max()),
            media=media,
            processed={name: joinable.tensor_X for name, joinable in processed.items()},
            token_types_1T=torch.cat(types)[None] if len(types) == len(ids) else None,
            types_name="mm_token_type_ids" if like is None else like.types_name,
            pixel_scale_2D=self._scale(media),
            vision=vision,
            placeholders=self.placeholders(input_ids_1T),
            source_ids_N=torch.tensor(source_ids + [0] * (len(segments_N) - len(source_ids))),
            workload=workload,
            supervised=tuple(sample.num_supervised for sample in samples),
            origins=tuple(sample.origin for sample in samples),
            sample_tokens=tuple(sample.tokens for sample in samples),
            answers=answers_of(samples, numbers),
            splits=SplitMask.of(workload) if branches or self.shares_prompts else None,
        )

    def _pad(self, tokens: int, media: Mapping[str, MediaTensors]) -> tuple[torch.Tensor, dict[str, MediaTensors]]:
        """The padding segment's token ids, and the media with patch buffers filled up to the next bucket."""
        ids, filled = [], dict(media)
        for name, (grids_M3, pixels_PD) in media.items():
            if self.bucket_patches is None or MODALITIES[name].tower != "vision" or pixels_PD is None:
                continue
            assert self.geometry is not None  # whoever has a bucket has it
            missing = -len(pixels_PD) % self.bucket_patches
            if not missing:
                continue
            blank_PD = pixels_PD.new_zeros(missing, pixels_PD.shape[1])
            blank_grids_M3 = self.geometry.padding_grids(missing)
            filled[name] = MediaTensors(torch.cat([grids_M3, blank_grids_M3]), torch.cat([pixels_PD, blank_PD]))
            placeholder = getattr(self.geometry, f"{MODALITIES[name].kind}_token")
            ids.append(torch.full((missing // self.geometry.merge_size**2,), placeholder))
        used = tokens + sum(len(part) for part in ids)
        bucket = self.bucket_tokens or 1
        ids.append(torch.full((-used % bucket if used else bucket,), PADDING_TOKEN))
        return torch.cat(ids), filled

    def _scale(self, media: Mapping[str, MediaTensors]) -> torch.Tensor | None:
        features = [tensors.features for tensors in media.values() if tensors.features is not None]
        if not any(part.dtype == torch.uint8 for part in features):
            return None
        if self.pixel_scale is None:
            raise DataError("The patches are bytes, but how they are normalised was not given; pass pixel_scale.")
        return torch.stack(self.pixel_scale)

    def placeholders(self, ids_1T: torch.Tensor) -> Placeholders | None:
        """Find the placeholders among a pack's tokens; None without a vision geometry."""
        geometry = self.geometry
        return None if geometry is None else Placeholders.of(ids_1T[0], geometry.image_token, geometry.video_token)

    def types(self, ids_S: torch.Tensor) -> torch.Tensor:
        """Token types of the placeholders among a padding segment's tokens, shape (S,)."""
        if self.geometry is None:
            return torch.zeros_like(ids_S, dtype=torch.int32)
        return (ids_S == self.geometry.image_token).int() + 2 * (ids_S == self.geometry.video_token).int()


def _splits(sample: EncodedSample) -> list[list[tuple[str, int]]]:
    """The runs of each segment of a sample; none of one that is causal."""
    return [branched(sample.prompt, sample.answers)] if sample.prompt else [[] for _ in sample.segments or (0,)]
