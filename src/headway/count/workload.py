"""The work of one step: segment lengths, vision grids, clips and slots, independent of any model.

A workload is built on the CPU, in the collator, from whatever the batch carries: lengths, `cu_seqlens`, an attention
mask or restarting positions. What it holds beside text are rows of `headway.count.modalities`. Workloads add up, so
micro-batches and ranks are summed with `+`.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from headway.count import splits as runs
from headway.count.integers import (
    NONE,
    Ints,
    IntsLike,
    boundaries_of,
    concatenate_rows,
    joined_per_segment,
    lengths_of,
    per_segment,
    segments_of_mask,
    segments_of_positions,
)
from headway.count.modalities import MODALITIES, media_towers
from headway.errors import WorkloadError


class Workload:
    """The work that one step was asked to do; immutable, additive.

    Args:
        segments: segment lengths [tokens], shape (N,), each >= 1, the tokens of images and videos included.
        images: image grids t, h, w [patches, before merging], shape (M, 3).
        videos: video grids t, h, w [patches, before merging], shape (V, 3).
        slots: token positions that the kernels compute, real and padding; the number of tokens when None.
        sources: what the encoder reads for each segment, where the model cross-attends: source tokens, or feature
            frames of speech; shape (N,), each >= 0.
        past: tokens before each segment whose keys and values are cached, for inference; shape (N,), each >= 0. A
            decode step of one token after 4,096 is a segment of 1 with a past of 4,096.
        packs: forward passes that the segments make up; 1 when None. Work on weights alone, such as DoRA's norms, is
            done once in each.
        splits: where a segment's tokens do not all see each other causally, its runs of (mode, tokens), one list per
            segment: `[[("causal", 102), ("noise", 4098)]]`. They may stand in place of `segments`. See
            `headway.count.splits`.
        supervised: tokens whose next token is learnt [tokens]; when None, those of causal runs and branches.
        logits: tokens that the head runs on, where it leaves some out, as it does with all but the last of a prompt
            that is answered [tokens]; all of them when None.
        media: sizes of other kinds of input, by their names in `headway.count.modalities`: `audio`, the lengths of
            clips whose tokens lie in the segments [feature frames], shape (A,); `latents`, grids of the latent images
            that the model denoises, and `references`, of the clean ones that its tokens read [latent patches],
            shapes (D, 3) and (C, 3).

    Raises:
        TypeError: a kind of input that there is not.
        WorkloadError: a length or grid below 1, fewer slots than tokens, sources or past that are not one per segment,
            splits that do not add up to their segments, more latent patches or supervised tokens than there are
            tokens, more logits than tokens, or values that are not whole numbers.

    >>> step = Workload([4096, 512], images=[(1, 32, 48)]) + Workload([100], slots=128)
    >>> step.tokens, step.slots, step.patches, step.num_segments
    (4708, 4736, 1536, 3)
    """

    __slots__ = (
        "_logits", "_media", "_packs", "_past", "_segments", "_slots", "_sources", "_splits", "_supervised", "_tokens",
    )  # fmt: skip
    _segments: Ints
    _media: dict[str, Ints]  # by modality, in the order of the table; only those that there are
    _sources: Ints
    _past: Ints
    _splits: Ints
    _tokens: int
    _slots: int
    _packs: int
    _supervised: int | None
    _logits: int | None

    def __init__(
        self,
        segments: IntsLike = (),
        images: IntsLike = (),
        videos: IntsLike = (),
        slots: int | None = None,
        *,
        sources: IntsLike = (),
        past: IntsLike = (),
        packs: int | None = None,
        splits: Any = (),
        supervised: int | None = None,
        logits: int | None = None,
        **media: IntsLike,
    ) -> None:
        # segments, which splits may stand in place of
        lengths = lengths_of(segments, "segments", "a segment holds at least 1 token")
        split = runs.NO_RUNS
        if len(splits):
            split, lengths = runs.runs_of(splits, lengths if lengths.size else None)
        # slots hold tokens and padding; tokens lie in a pack at least
        tokens = int(lengths.sum())
        if slots is not None and slots < tokens:
            raise WorkloadError(f"{slots} slots cannot hold {tokens} tokens. Slots count padding and tokens together.")
        if packs is not None and packs < min(tokens, 1):
            raise WorkloadError(f"{packs} packs cannot hold {tokens} tokens. Give the number of forward passes.")
        if logits is not None and not 0 <= logits <= tokens:
            raise WorkloadError(
                f"logits={logits} is not allowed, because the head runs on 0 to {tokens} tokens of the workload."
            )

        # each latent patch is a token, of a run that may hold it
        sizes = _read(images=images, videos=videos, **media)
        noised, clean = (_num_units(sizes, name) for name in ("latents", "references"))
        runs.check_kinds(tokens, split, noised, clean, supervised)
        self._set(
            tokens,
            tokens if slots is None else slots,
            packs,
            supervised,
            logits,
            sizes,
            _segments=lengths,
            _sources=per_segment(sources, "sources", "a segment reads 0 tokens or more", lengths),
            _past=per_segment(past, "past", "a segment follows 0 tokens or more", lengths),
            _splits=split,
        )

    @classmethod
    def _of_lengths(cls, lengths: Ints, images: IntsLike, videos: IntsLike, slots: int) -> "Workload":
        """Build a workload of lengths that were counted here, each at least 1 and together within the slots."""
        workload = object.__new__(cls)
        nothing = {"_sources": NONE, "_past": NONE, "_splits": runs.NO_RUNS}
        sizes = _read(images=images, videos=videos)
        workload._set(int(lengths.sum()), slots, None, None, None, sizes, _segments=lengths, **nothing)
        return workload

    def _set(
        self,
        tokens: int,
        slots: int,
        packs: int | None,
        supervised: int | None,
        logits: int | None,
        media: dict[str, Ints],
        **arrays: Ints,
    ) -> None:
        for name, value in arrays.items():
            object.__setattr__(self, name, _frozen(value))
        object.__setattr__(self, "_media", {name: _frozen(sizes) for name, sizes in media.items()})
        object.__setattr__(self, "_tokens", tokens)
        object.__setattr__(self, "_slots", int(slots))
        object.__setattr__(self, "_supervised", supervised)
        object.__setattr__(self, "_logits", logits)
        holds_work = bool(media) or any(a.size for a in arrays.values())
        object.__setattr__(self, "_packs", int(holds_work) if packs is None else packs)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Workload is immutable. Build a new one instead of setting {name!r}")

    @property
    def segments(self) -> Ints:
        """Segment lengths [tokens], shape (N,)."""
        return self._segments

    @property
    def media(self) -> Mapping[str, Ints]:
        """Sizes of the kinds of input that there are, by their names in `headway.count.modalities`."""
        return MappingProxyType(self._media)

    def sizes(self, modality: str) -> Ints:
        """Sizes of one kind of input, by its name: grids t, h, w, shape (M, 3), or lengths, shape (M,)."""
        sizes = self._media.get(modality)
        return MODALITIES[modality].none if sizes is None else sizes

    @property
    def images(self) -> Ints:
        """Image grids t, h, w [patches], shape (M, 3)."""
        return self.sizes("images")

    @property
    def videos(self) -> Ints:
        """Video grids t, h, w [patches], shape (V, 3)."""
        return self.sizes("videos")

    @property
    def grids(self) -> Ints:
        """Image grids, then video grids [patches], shape (M + V, 3)."""
        return concatenate_rows([self.images, self.videos], 3)

    @property
    def sources(self) -> Ints:
        """Lengths that the encoder reads for each segment [tokens or feature frames], shape (N,); (0,) for none."""
        return self._sources

    @property
    def audio(self) -> Ints:
        """Lengths of audio clips [feature frames], shape (A,)."""
        return self.sizes("audio")

    @property
    def past(self) -> Ints:
        """Cached tokens before each segment [tokens], shape (N,); (0,) where nothing is."""
        return self._past

    @property
    def splits(self) -> Ints:
        """Runs (mode, tokens) of all segments laid end to end, shape (R, 2); (0, 2) where every segment is causal."""
        return self._splits

    @property
    def latents(self) -> Ints:
        """Grids t, h, w of the latent images that are denoised [latent patches], shape (D, 3)."""
        return self.sizes("latents")

    @property
    def references(self) -> Ints:
        """Grids t, h, w of the clean latent images that are read [latent patches], shape (C, 3)."""
        return self.sizes("references")

    @property
    def noised(self) -> int:
        """Latent patches that are denoised."""
        return _num_units(self._media, "latents")

    @property
    def latent_patches(self) -> int:
        """Latent patches, denoised and clean."""
        return self.noised + _num_units(self._media, "references")

    @property
    def supervised(self) -> int:
        """Tokens whose next token is learnt; those of causal runs and branches where the workload was not told."""
        if self._supervised is not None:
            return self._supervised
        return runs.causal_tokens(self._splits) if self._splits.size else self._tokens

    @property
    def knows_supervised(self) -> bool:
        """True if the workload was told how many tokens are learnt."""
        return self._supervised is not None

    @property
    def logits(self) -> int | None:
        """Tokens that the head runs on; None where it runs on all."""
        return self._logits

    def with_counts(self, *, supervised: int | None = None, logits: int | None = None) -> "Workload":
        """Return this workload with what was left open: labelled tokens, and those that the head runs on.

        Args:
            supervised: as for `Workload`; no more than there are tokens that can be learnt.
            logits: as for `Workload`; no more than there are tokens.
        """
        if supervised is None and logits is None:
            return self
        workload = object.__new__(Workload)
        for name in self.__slots__:
            object.__setattr__(workload, name, getattr(self, name))
        if supervised is not None and self._supervised is None:
            object.__setattr__(workload, "_supervised", min(supervised, self._tokens - self.latent_patches))
        if logits is not None and self._logits is None:
            object.__setattr__(workload, "_logits", min(logits, self._tokens))
        return workload

    def with_full_head(self) -> "Workload":
        """Return this workload with the head on all of its tokens."""
        return _rebuilt({**self._state(), "logits": None})

    @property
    def runs_towers(self) -> bool:
        """True if it holds anything that a tower beside the text reads: images, videos, audio."""
        return any(MODALITIES[name].tower in media_towers() for name in self._media)

    @property
    def slots(self) -> int:
        """Token positions that the kernels compute, padding included."""
        return self._slots

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return self._tokens

    @property
    def patches(self) -> int:
        """Vision patches before merging, images and videos together."""
        return _num_units(self._media, "images") + _num_units(self._media, "videos")

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return len(self._segments)

    @property
    def num_packs(self) -> int:
        """Number of forward passes: 1 unless given, and as many as were added up."""
        return self._packs

    @property
    def num_images(self) -> int:
        """Number of images."""
        return len(self.images)

    @property
    def num_videos(self) -> int:
        """Number of videos."""
        return len(self.videos)

    @classmethod
    def total(cls, workloads: Iterable["Workload"]) -> "Workload":
        """Add workloads up, all at once.

        >>> Workload.total([Workload([3]), Workload([4], slots=8)])
        Workload(2 segments, 7 tokens, 11 slots)
        """
        parts = list(workloads)
        if len(parts) == 1:
            return parts[0]
        total = object.__new__(cls)
        total._set(
            sum(w._tokens for w in parts),
            sum(w._slots for w in parts),
            sum(w._packs for w in parts),
            None if all(w._supervised is None for w in parts) else sum(w.supervised for w in parts),
            None
            if all(w._logits is None for w in parts)
            else sum(w._tokens if w._logits is None else w._logits for w in parts),
            _joined_media(parts),
            _segments=concatenate_rows([w._segments for w in parts]),
            _sources=joined_per_segment([w._segments for w in parts], [w._sources for w in parts]),
            _past=joined_per_segment([w._segments for w in parts], [w._past for w in parts]),
            _splits=runs.joined_runs([w._segments for w in parts], [w._splits for w in parts]),
        )
        return total

    def __add__(self, other: "Workload") -> "Workload":
        if not isinstance(other, Workload):
            return NotImplemented
        return Workload.total((self, other))

    def __radd__(self, other: int) -> "Workload":
        """Let `sum(workloads)` start from 0."""
        return self if other == 0 else NotImplemented

    def _state(self) -> dict[str, Any]:
        names = ("segments", "slots", "sources", "past", "packs", "splits", "supervised", "logits")
        return {**{name: getattr(self, f"_{name}") for name in names}, **self._media}

    def _key(self) -> tuple[Any, ...]:
        return tuple(
            (name, part.tobytes() if isinstance(part, np.ndarray) else part) for name, part in self._state().items()
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Workload) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._state(),)

    def to_dict(self) -> dict[str, Any]:
        """Write the workload as plain lists by the names of its arguments, without latents, references and splits."""
        lists = {name: self.sizes(name).tolist() for name, row in MODALITIES.items() if row.tower != "latents"}
        lists |= {name: getattr(self, name).tolist() for name in ("segments", "sources", "past")}
        logits = {} if self._logits is None else {"logits": self._logits}
        return {**lists, "slots": self.slots, "packs": self.num_packs, **logits}

    def __repr__(self) -> str:
        parts = [f"{self.num_segments} segments", f"{self._tokens} tokens", f"{self._slots} slots"]
        if self._sources.size:
            parts.append(f"{int(self._sources.sum())} source tokens")
        if self._past.size:
            parts.append(f"{int(self._past.sum())} past tokens")
        if self._logits is not None:
            parts.append(f"{self._logits} logits")
        parts += [f"{tokens} {mode}" for mode, tokens in runs.by_mode(self._splits).items()]
        for name, sizes in self._media.items():
            row = MODALITIES[name]
            parts.append(f"{row.number(len(sizes))} of {row.units(sizes)} {row.unit}")
        return f"Workload({', '.join(parts)})"

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: IntsLike,
        *,
        unpadded: IntsLike | None = None,
        argmin: int | None = None,
        images: IntsLike = (),
        videos: IntsLike = (),
        slots: int | None = None,
    ) -> "Workload":
        """Build a workload from cumulative segment boundaries.

        Args:
            cu_seqlens: boundaries [tokens], shape (N + 1,) or (1, N + 1), starting at 0. A tail of -1 or of repeated
                boundaries, as fixed-size buffers carry it, is cut.
            unpadded: boundaries of the real tokens where `cu_seqlens` also holds each segment's padding; lengths are
                then taken from here and slots from `cu_seqlens`.
            argmin: number of valid entries in `cu_seqlens` (and `unpadded`), as Megatron hands it over; 0 cuts nothing.
            images: image grids [patches], shape (M, 3).
            videos: video grids [patches], shape (V, 3).
            slots: positions that the kernels compute, when more than the last boundary.

        Raises:
            WorkloadError: the boundaries do not start at 0, or decrease.

        >>> Workload.from_cu_seqlens([0, 3, 8, -1, -1]).segments.tolist()
        [3, 5]
        """
        padded = boundaries_of(cu_seqlens, argmin, "cu_seqlens")
        real = padded if unpadded is None else boundaries_of(unpadded, argmin, "unpadded cu_seqlens")
        lengths = real[1:] - real[:-1]
        end = int(padded[-1]) if padded.size else 0
        return cls(lengths[lengths > 0], images, videos, slots=end if slots is None else slots)

    @classmethod
    def from_attention_mask(
        cls, attention_mask: IntsLike, *, images: IntsLike = (), videos: IntsLike = ()
    ) -> "Workload":
        """Build a workload from a padding mask, or from a mask of segment numbers.

        Args:
            attention_mask: shape (batch, slots): 0 for padding, 1 for a token; or 1, 2, 3, ... where a row holds
                several segments. Booleans count as 0 and 1.
            images: image grids [patches], shape (M, 3).
            videos: video grids [patches], shape (V, 3).

        Raises:
            WorkloadError: the mask is not two-dimensional, or holds a negative number.

        >>> Workload.from_attention_mask([[1, 1, 1, 0], [1, 1, 2, 2]]).segments.tolist()
        [3, 2, 2]
        """
        lengths, slots = segments_of_mask(attention_mask)
        return cls._of_lengths(lengths, images, videos, slots)

    @classmethod
    def from_position_ids(
        cls,
        position_ids: IntsLike,
        *,
        attention_mask: IntsLike | None = None,
        images: IntsLike = (),
        videos: IntsLike = (),
    ) -> "Workload":
        """Build a workload from positions that restart where a segment starts.

        Args:
            position_ids: shape (slots,) or (batch, slots); or M-RoPE's (3, batch, slots), where a segment starts at
                (0, 0, 0), or (4, batch, slots), whose first plane holds the text positions.
            attention_mask: shape (batch, slots), 0 for padding; without it every slot is a token.
            images: image grids [patches], shape (M, 3).
            videos: video grids [patches], shape (V, 3).

        Raises:
            WorkloadError: the shape is none of these, or the mask's shape differs.

        >>> Workload.from_position_ids([0, 1, 2, 0, 1]).segments.tolist()
        [3, 2]
        """
        lengths, slots = segments_of_positions(position_ids, attention_mask)
        return cls._of_lengths(lengths, images, videos, slots)


def _read(**media: IntsLike) -> dict[str, Ints]:
    """Check the sizes of each kind of input, in the order of the table; empty kinds are left out."""
    unknown = media.keys() - MODALITIES.keys()
    if unknown:
        raise TypeError(
            f"Workload has no argument {min(unknown)!r}. The kinds of input beside text are {', '.join(MODALITIES)}."
        )
    sizes = {name: row.read(media[name]) for name, row in MODALITIES.items() if name in media}
    return {name: array for name, array in sizes.items() if array.size}


def _num_units(media: Mapping[str, Ints], modality: str) -> int:
    return MODALITIES[modality].units(media[modality]) if modality in media else 0


def _joined_media(workloads: Sequence[Workload]) -> dict[str, Ints]:
    """Lay the sizes of several workloads end to end, each kind by itself."""
    there_are = {name for w in workloads for name in w._media}
    return {name: concatenate_rows([w.sizes(name) for w in workloads]) for name in MODALITIES if name in there_are}


def _frozen(array: Ints) -> Ints:
    """Return the array, or a copy that nobody else holds, which cannot be written."""
    if array.base is not None or array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


def _rebuilt(arguments: dict[str, Any]) -> Workload:
    return Workload(**arguments)
