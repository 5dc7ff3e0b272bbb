"""Samples that are made of parts, some of which are left out at random: what is left of each, and what it costs.

Such a sample is a row of parts: texts, images that a tower reads, latents that are clean or noised. Its conditions are
the parts before its last noised latents of which nothing is learnt. Training leaves some of them out, so that guidance
has something to lead away from. What is left out depends on a seed, on where the sample came from and on its epoch
alone; so a plan knows every length beforehand.

Letters after names: N samples, M parts of all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.count import CostModel, Workload
from headway.packing.order import key_of, mixed

Kind = Literal["text", "image", "clean", "noised"]
Numbers = NDArray[Any]

MODE_OF_PART = {"text": "causal", "image": "full", "clean": "full", "noised": "noise"}
"""Modes of the runs that a sample's parts are, in `headway.count.splits`."""
KINDS = tuple(MODE_OF_PART)
"""Kinds of parts, by the numbers that stand for them."""
COLUMNS = ("kind", "tokens", "supervised", "rows", "columns")
"""Facts of a part: its kind's number, its tokens, of these the supervised ones, and the patches of an image."""
_TEXT, _IMAGE, _CLEAN, _NOISED = range(4)
_MODES = tuple(MODE_OF_PART.values())


@dataclass(frozen=True)
class SamplePart:
    """One piece of a sample.

    Attributes:
        kind: `text`; `image`, which the tower reads; `clean`, an image's latents that later parts read; or `noised`, an
            image's latents that are learnt from noise.
        tokens: of text [tokens].
        supervised: of these, the last ones, each learnt from the token before it [tokens].
        rows: of an image [patches, or latent patches].
        columns: of an image [patches, or latent patches].
        skipped: positions that are left free before it: those of images that were left out.
    """

    kind: Kind
    tokens: int = 0
    supervised: int = 0
    rows: int = 0
    columns: int = 0
    skipped: int = 0

    @property
    def length(self) -> int:
        """Tokens, with the tokens around an image."""
        return self.tokens if self.kind == "text" else self.rows * self.columns + 2

    @property
    def numbers(self) -> tuple[int, ...]:
        """The part by `COLUMNS`."""
        return [*MODE_OF_PART].index(self.kind), self.length, self.supervised, self.rows, self.columns


class PartTable(NamedTuple):
    """The parts of samples.

    Attributes:
        offsets: where each sample's parts begin, and where the last one's end, shape (N + 1,).
        values: all parts end to end, by `COLUMNS`, shape (M, 5).
        keys: a number for where each sample came from, shape (N,).
    """

    offsets: Numbers
    values: Numbers
    keys: Numbers

    def take(self, samples: Numbers) -> "PartTable":
        """The parts of some samples, each as often as it is named."""
        offsets = np.concatenate([[0], np.cumsum(np.diff(self.offsets)[samples])])
        return PartTable(offsets, self.values[self.places(samples)], self.keys[samples])

    def places(self, samples: Numbers) -> Numbers:
        """Find the places of some samples' parts among all parts."""
        starts, counts = self.offsets[:-1][samples], np.diff(self.offsets)[samples]
        places: Numbers = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return places

    @property
    def sample(self) -> Numbers:
        """The sample of each part, shape (M,)."""
        sample: Numbers = np.repeat(np.arange(len(self.keys)), np.diff(self.offsets))
        return sample

    def conditions(self) -> Numbers:
        """Mask of the parts that are conditions, shape (M,)."""
        kind, place = self.values[:, 0], np.arange(len(self.values))
        last = np.full(len(self.keys), -1)
        noised = kind == _NOISED
        np.maximum.at(last, self.sample[noised], place[noised])
        is_condition: Numbers = (place < last[self.sample]) & ~noised & (self.values[:, 2] == 0)
        return is_condition

    def sizes(self, is_left: Numbers | None = None) -> tuple[Numbers, Numbers]:
        """Count the tokens and the vision patches of each sample's parts that are left, shape (N,) each."""
        kind, tokens, _, rows, columns = self.values.T.astype(np.int64)
        left = np.ones(len(kind), dtype=bool) if is_left is None else is_left
        per = [left * tokens, left * (kind == _IMAGE) * rows * columns]
        summed = [np.bincount(self.sample, values, minlength=len(self.keys)) for values in per]
        return summed[0].astype(np.int64), summed[1].astype(np.int64)


def workload_of(parts: Iterable[Sequence[int]]) -> Workload:
    """Make the workload of training on one sample from the numbers of its parts."""
    listed = list(parts)

    def grids(kind: int) -> list[tuple[int, int, int]]:
        return [(1, rows, columns) for part_kind, _, _, rows, columns in listed if part_kind == kind]

    return Workload(
        splits=[[(_MODES[kind], tokens) for kind, tokens, *_ in listed]],
        images=grids(_IMAGE),
        references=grids(_CLEAN),
        latents=grids(_NOISED),
        supervised=sum(part[2] for part in listed),
    )


@dataclass(frozen=True)
class Dropout:
    """Fractions of conditions that are left out at random, of each kind.

    Attributes:
        text: of texts.
        image: of images that are read.
        clean: of clean latents.
        seed: of the choice.
    """

    text: float = 0.0
    image: float = 0.0
    clean: float = 0.0
    seed: int = 0

    def kept(self, parts: PartTable, epochs: Numbers, source: str) -> Numbers:
        """Choose the parts that are left, shape (M,).

        Args:
            parts: of samples.
            epochs: how often each sample has played before, shape (N,).
            source: name of the source that all of them are from.
        """
        number = np.arange(len(parts.values)) - parts.offsets[:-1][parts.sample]
        source_key = int.from_bytes(blake2b(source.encode(), digest_size=8).digest(), "big")
        key = np.uint64(key_of(self.seed, source_key))
        hashed_N = mixed(parts.keys.astype(np.uint64) ^ key)
        hashed_N = mixed(hashed_N ^ mixed(epochs.astype(np.uint64) + key))
        hashed_M = mixed(hashed_N[parts.sample] ^ mixed(number.astype(np.uint64) + key))
        share = (hashed_M >> np.uint64(11)).astype(np.float64) / 2.0**53
        limits = np.array([self.text, self.image, self.clean, 0.0])[parts.values[:, 0]]
        is_left: Numbers = ~(parts.conditions() & (share < limits))
        return is_left


@dataclass(frozen=True, eq=False)
class PartCosts:
    """FLOPs of training on parts, forward and backward.

    Attributes:
        own: of each part by itself, shape (M,).
        pair: of one (query, key) pair between two parts.
    """

    own: Numbers
    pair: float

    @classmethod
    def of(cls, cost_model: CostModel, values: Numbers) -> "PartCosts":
        """Count parts: texts by the costs of a token, a target and a pair, and each grid of an image once."""

        def flops(*parts: Sequence[int]) -> int:
            return cost_model.count(workload_of(parts)).total

        one_token, two_tokens, with_target = (
            (_TEXT, tokens, supervised, 0, 0) for tokens, supervised in ((1, 0), (2, 0), (2, 1))
        )
        pair = flops(one_token, one_token) - 2 * flops(one_token)  # the second sees the first
        token, target = flops(one_token) - pair, flops(with_target) - flops(two_tokens)
        _, tokens, supervised, _, _ = values.T.astype(np.float64)
        own = token * tokens + target * supervised + pair * tokens * (tokens + 1) / 2
        is_image = values[:, 0] != _TEXT
        distinct, which = np.unique(values[is_image], axis=0, return_inverse=True)
        images = np.array([flops(part) for part in distinct.tolist()], dtype=np.float64)
        own[is_image] = images[which.reshape(-1)]
        return cls(own, float(pair))

    def take(self, places: Numbers) -> "PartCosts":
        """The costs of some of the parts."""
        return PartCosts(self.own[places], self.pair)

    def of_samples(self, parts: PartTable, is_left: Numbers | None = None) -> Numbers:
        """FLOPs of what is left of each sample, shape (N,); parts are those that were counted."""
        left = np.ones(len(self.own)) if is_left is None else is_left.astype(np.float64)
        tokens = left * parts.values[:, 1]
        visible = np.where(parts.values[:, 0] == _NOISED, 0.0, tokens)  # nobody sees what is noised
        num_visible = np.concatenate([[0.0], np.cumsum(visible)])
        before = num_visible[:-1] - num_visible[parts.offsets[:-1]][parts.sample]
        flops = left * self.own + self.pair * tokens * before
        return np.bincount(parts.sample, flops, minlength=len(parts.keys))
