"""The settings that `headway tune` tries: every way to make steps of so many tokens that recipe and devices admit.

With the tokens of a step given, ranks and accumulation say how long a pack is, so both are one axis. The others are
what is recomputed, how processes share model and packs, and how much of the logits exists at a time. The
configuration's own checks decide which of them go together.
"""

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from headway.config import TrainConfig, changed_config, load_config
from headway.config.read import EXTENDS
from headway.errors import ConfigError, PlanError
from headway.packing.lengths import LengthTable
from headway.predict.lengths import policies_of
from headway.report.quantity import parse_number
from headway.words import Argument

ACCUMULATIONS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
_PRODUCTS_KEPT = ("full,-attention,-projections,-mlp", "full,-attention,-projections")
RECOMPUTES = ("none", "every:4", "every:3", "every:2", *_PRODUCTS_KEPT, "full,-attention", "every:2,-attention", "full")
CHUNKS = (512, 2048, 8192, None)
LEFT = "left"
"""Value that stands for `memory:SIZE` of the room that the limit leaves for activations."""

TOLERANCE = 0.05
_DEGREES = (1, 2, 4, 8)  # processes of a node, that share packs or experts
_FEWEST_TOKENS = 64  # in a pack
_MOST_DIVIDED = 8  # packs that one pack is divided into, or joined from, where packs alone are searched
_KEPT_BITS = 7  # a packing length is rounded to so many binary digits, which is 0.8 % at most
_PATCH_ROOM = 1.08  # times a pack's mean patches, as a limit
_TOLERANCE_SIGN = re.compile(r"\+-|\+/-|±")

Values = Mapping[str, Any]
"""Settings by their dotted names."""


@dataclass(frozen=True)
class Space:
    """Values of each setting that are tried.

    Attributes:
        step_tokens: of an optimizer step, all devices together [tokens].
        tolerance: by which a step may differ from that, a fraction.
        accumulations: packs per rank and step.
        sequences: processes that share a pack.
        replicates: copies of the sharded weights.
        experts: processes that the experts of a layer are spread over.
        reshards: whether gathered weights are freed after forward.
        reduces: when gradients are summed.
        recomputes: blocks that are computed again; `LEFT` for as few as the limit allows.
        chunks: slots whose logits exist at a time [slots].
        limits_patches: whether a limit on the patches of a pack is tried.
    """

    step_tokens: int
    tolerance: float = TOLERANCE
    accumulations: tuple[int, ...] = ACCUMULATIONS
    sequences: tuple[int, ...] = (1,)
    replicates: tuple[int, ...] = (1,)
    experts: tuple[int, ...] = (1,)
    reshards: tuple[bool, ...] = (True,)
    reduces: tuple[str, ...] = ("pack",)
    recomputes: tuple[str, ...] = (*RECOMPUTES, LEFT)
    chunks: tuple[int | None, ...] = CHUNKS
    limits_patches: bool = True

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        devices: int,
        *,
        num_heads: int,
        num_experts: int,
        towers: Collection[str] = (),
        step_tokens: int | None = None,
        tolerance: float = TOLERANCE,
        meshes: bool = True,
    ) -> "Space":
        """List all that a recipe can be changed to on so many devices.

        Args:
            config: the recipe.
            devices: processes, a device each.
            num_heads: query heads, which processes that share packs divide among them.
            num_experts: of a layer; 0 of a dense model.
            towers: whose blocks backward passes; where there are several, each is recomputed alone too.
            step_tokens: of an optimizer step; as many as the recipe's packs hold when None [tokens].
            tolerance: by which a step may differ from that, a fraction.
            meshes: whether processes may share model and packs in other ways than in the recipe.

        Raises:
            ConfigError: a mesh of the recipe's own that the devices do not fit.
        """
        # a step keeps its tokens whatever is tried
        shape = config.parallel.mesh_shape(devices)
        ranks = devices // shape.sequence
        own = ranks * config.optim.accumulation * config.data.tokens_per_pack
        chunks = (config.speed.loss_chunk,) if config.speed.kernels == "liger" else CHUNKS
        # the recipe's own way to share, or every one that divides devices, heads and experts
        own_mesh: dict[str, Any] = {
            "sequences": (shape.sequence,),
            "replicates": (shape.replicate,),
            "experts": (shape.expert,),
            "reshards": (config.parallel.reshard,),
            "reduces": (config.parallel.reduce,),
        }
        any_mesh: dict[str, Any] = {
            "sequences": tuple(n for n in _DEGREES if devices % n == 0 and n <= num_heads),
            "replicates": tuple(n for n in range(1, devices + 1) if devices % n == 0),
            "experts": tuple(n for n in _DEGREES if num_experts % n == 0) if num_experts else (1,),
            "reshards": (True, False),
            "reduces": ("pack", "step"),
        }
        return cls(
            step_tokens or own,
            tolerance,
            accumulations=tuple(sorted({*ACCUMULATIONS, config.optim.accumulation})),
            recomputes=tuple(dict.fromkeys([*RECOMPUTES, *_of_towers(towers), config.speed.recompute, LEFT])),
            chunks=tuple(dict.fromkeys([config.speed.loss_chunk, *chunks])),
            **(any_mesh if meshes and devices > 1 else own_mesh),
        )

    @classmethod
    def of_packs(cls, config: TrainConfig, devices: int) -> "Space":
        """List the packs of a recipe's step, from an eighth of its own length to eight times it, and what they redo.

        Args:
            config: the recipe.
            devices: processes, a device each.

        Raises:
            ConfigError: a mesh of the recipe's own that the devices do not fit.
        """
        own = config.optim.accumulation
        recomputes = (config.speed.recompute, "none", *_PRODUCTS_KEPT, "full,-attention", "full", LEFT)
        return replace(
            cls.of(config, devices, num_heads=1, num_experts=0, meshes=False),
            accumulations=tuple(
                n for n in sorted({*ACCUMULATIONS, own}) if own <= _MOST_DIVIDED * n <= _MOST_DIVIDED**2 * own
            ),
            recomputes=tuple(dict.fromkeys(recomputes)),
            chunks=(config.speed.loss_chunk,),
            limits_patches=False,
        )

    def packings(self, config: TrainConfig, devices: int, lengths: LengthTable) -> Iterator[Values]:
        """Packing lengths that give steps of the right size, with accumulation and the processes that share a pack.

        Args:
            config: the recipe.
            devices: processes, a device each.
            lengths: of the samples.
        """
        own = config.data.tokens_per_pack
        policies = policies_of(lengths, config.data.overlong_of_all)
        must_fit = [part.table.tokens.max() for name, part in lengths.parts.items() if policies[name] == "error"]
        longest = max(must_fit, default=0)
        for sequence, accumulation in product(self.sequences, self.accumulations):
            if devices % sequence:
                continue
            packs = devices // sequence * accumulation
            exact = self.step_tokens / packs
            tokens = own if abs(own / exact - 1) < 2**-_KEPT_BITS else _rounded(exact)
            if tokens < max(_FEWEST_TOKENS, longest):
                continue
            for patches in self._patches(config, tokens, lengths):
                yield {
                    "data.tokens_per_pack": tokens,
                    "data.patches_per_pack": patches,
                    "optim.accumulation": accumulation,
                    "parallel.sequence": sequence,
                }

    def _patches(self, config: TrainConfig, tokens: int, lengths: LengthTable) -> list[int | None]:
        """Limits on a pack's patches: the recipe's, in proportion, and one just above the mean."""
        limit, own = config.data.patches_per_pack, config.data.tokens_per_pack
        options = [None if limit is None else max(1, round(limit * tokens / own))]
        total = int(lengths.patches.sum())
        if self.limits_patches and total:
            mean = total / int(lengths.tokens.sum()) * tokens
            options.append(max(_rounded(_PATCH_ROOM * mean), int(lengths.patches.max())))
        return options

    def meshes(self, devices: int, sequence: int) -> Iterator[Values]:
        """Ways in which processes share the model, where so many share each pack."""
        for replicate, expert in product(self.replicates, self.experts):
            fits = devices % (replicate * sequence) == 0 and (devices // replicate) % expert == 0
            if fits:
                yield {"parallel.replicate": replicate, "parallel.shard": "auto", "parallel.expert": expert}

    def sharings(self, accumulation: int) -> Iterator[Values]:
        """Pairs of when weights are freed and when gradients are summed."""
        for reshard, reduce in product(self.reshards, self.reduces if accumulation > 1 else ("pack",)):
            yield {"parallel.reshard": reshard, "parallel.reduce": reduce}

    @property
    def thriftiest(self) -> Values:
        """Settings that need the least memory, packs and meshes aside."""
        return {
            "speed.recompute": "full",
            "speed.loss_chunk": min((chunk for chunk in self.chunks if chunk is not None), default=None),
            "parallel.reshard": self.reshards[0],
            "parallel.reduce": "pack",
        }


def _of_towers(towers: Collection[str]) -> list[str]:
    """Choices by which one tower is recomputed and the rest is not, or keeps the results of attention."""
    choices = ("{}:full", "{}:full,-attention", "full,-attention,{}:full") if len(towers) > 1 else ()
    return [choice.format(tower) for choice, tower in product(choices, sorted(towers))]


def _rounded(tokens: float) -> int:
    """Round to a few binary digits."""
    whole_tokens = math.ceil(tokens)
    step = 1 << max(0, whole_tokens.bit_length() - _KEPT_BITS)
    return max(step, round(tokens / step) * step)


def admitted(config: TrainConfig, values: Values) -> TrainConfig | None:
    """A recipe with some settings changed; None if its own checks refuse them."""
    try:
        return changed_config(config, changes(config, values))
    except ConfigError:
        return None


def differences(config: TrainConfig, changed: TrainConfig) -> dict[str, Any]:
    """Settings in which one configuration differs from another, by their dotted names."""
    before, after = config.to_dict(), changed.to_dict()
    return {
        f"{section}.{name}": value
        for section, settings in after.items()
        for name, value in (settings or {}).items()  # a section that is left out is None
        if (before[section] or {}).get(name) != value
    }


def changes(config: TrainConfig, values: Values) -> dict[str, Any]:
    """List the settings that a configuration does not have already."""
    changed = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        if getattr(getattr(config, section), key) != value:
            changed[name] = value
    return changed


def recipe_text(base: Path, config: TrainConfig, target: Path, remark: str) -> str:
    """Write a configuration as the recipe that it extends and the settings that differ.

    Args:
        base: the recipe.
        config: what it is to become.
        target: where the text will lie; the way to the recipe starts there.
        remark: said at the top, a line.

    Raises:
        ConfigError: the recipe cannot be read.
    """
    sections: dict[str, dict[str, Any]] = {}
    for name, value in differences(load_config(base), config).items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    way = os.path.relpath(base.resolve(), target.resolve().parent)
    body = yaml.safe_dump({EXTENDS: way, **sections}, sort_keys=False, allow_unicode=True)
    return f"# {remark}\n{body}"


def parse_step_tokens(text: str) -> tuple[int, float]:
    """Read the tokens of a step and their tolerance.

    Args:
        text: such as "2M", "2M +-5%" or "131072".

    Returns:
        Tokens, and the tolerance as a fraction.

    Raises:
        PlanError: it is neither, or a tolerance of 0 or of 100 % and more.

    >>> parse_step_tokens("2.5M +-4%")
    (2500000, 0.04)
    """
    counted, *tolerances = _TOLERANCE_SIGN.split(text)
    tokens = round(parse_number(counted, "tokens", whole=True) or 0)
    shares = [parse_number(share) or 0 for share in tolerances if share.rstrip().endswith("%")]
    tolerance = TOLERANCE if not tolerances else shares[0] if len(shares) == len(tolerances) == 1 else 0
    if not 1 <= tokens <= 10**12 or not 0 < tolerance < 1:
        raise PlanError(
            Argument("tokens_per_step"),
            f" {text[:40]!r} is not a number of tokens with a tolerance above 0 and below 100 %. Write "
            "'2M', '2M +-5%' or '131072 +-10%'; k, M and B are thousands, millions and thousands of millions.",
        )
    return tokens, tolerance
