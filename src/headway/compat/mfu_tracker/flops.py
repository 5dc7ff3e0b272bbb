"""Profiles of a model under mfu-tracker's names: numbers of FLOPs that remember what they were counted from."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.compat.mfu_tracker.blocks import ledger_of
from headway.compat.mfu_tracker.ledgers import Ledger, param_bytes
from headway.count.masks import causal_pairs, full_pairs
from headway.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FlopProfile", "flash_attn_flops", "param_bytes", "profile_flops", "profile_flops_with_hfu"]


class AttentionFlops(int):
    """FLOPs of one call of attention; see `flash_attn_flops`."""

    flops_per_pair: int  # FLOPs of its forward for one query and key

    def __new__(cls, flops: int, flops_per_pair: int) -> "AttentionFlops":
        self = super().__new__(cls, flops)
        self.flops_per_pair = flops_per_pair
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.flops_per_pair)


class ProfiledFlops(int):
    """FLOPs of a sample, as a number, and the ledgers of the models that it was counted from.

    It prints, divides and compares as the number of FLOPs of its sample. Where it is handed to `track`, the models'
    forwards in the block are counted instead, so that a sample of another size than the batches does no harm.

    Adding a plain number adds FLOPs that no ledger knows of, and they are kept; adding another profile joins the
    models; adding `flash_attn_flops` of attention that the ledger holds already changes nothing, and a warning says so.
    Multiplying by a whole number multiplies the number (and what was added), not what is counted. `int(profile)` is the
    bare number, which `track` takes as stated.
    """

    ledgers: tuple[Ledger, ...]  # one for each model
    added: int  # FLOPs that plain numbers have added

    def __new__(cls, flops: int, ledgers: tuple[Ledger, ...], added: int = 0) -> "ProfiledFlops":
        self = super().__new__(cls, flops)
        self.ledgers, self.added = ledgers, added
        return self

    def __add__(self, other: Any) -> Any:
        if isinstance(other, ProfiledFlops):
            joined = dict.fromkeys((*self.ledgers, *other.ledgers))
            return ProfiledFlops(int(self) + int(other), tuple(joined), self.added + other.added)
        if isinstance(other, AttentionFlops) and self._holds(other):
            warnings.warn(
                "the profile holds this attention already, exactly and in every layer: flash_attn_flops is not added "
                "to it a second time.",
                stacklevel=2,
            )
            return self
        if not isinstance(other, int):
            return super().__add__(other)
        return ProfiledFlops(int(self) + int(other), self.ledgers, self.added + int(other))

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return super().__mul__(other)
        return ProfiledFlops(int(self) * int(other), self.ledgers, self.added * int(other))

    __rmul__ = __mul__

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)  # models do not travel with a number

    def _holds(self, attention: AttentionFlops) -> bool:
        rows = (row for ledger in self.ledgers for cost_model in ledger.traced() for row in cost_model.rows)
        return any(row.op == "attention" and row.forward == attention.flops_per_pair for row in rows)


@dataclass(frozen=True)
class FlopProfile:
    """FLOPs of one sample: useful ones, and with what activation checkpointing runs again.

    Attributes:
        flops: useful FLOPs, the numerator of MFU.
        hfu_flops: with the recomputed ones, the numerator of HFU.
    """

    flops: ProfiledFlops
    hfu_flops: ProfiledFlops


def profile_flops(
    model: "nn.Module",
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    with_backward: bool = True,
    results: Any = None,
) -> ProfiledFlops:
    """Count the useful FLOPs of one forward of a model, and of its backward, without running it.

    Exact by the convention `useful/1` (docs/counting.md): the pairs that the masks allow, no padding, and the gradients
    that autograd computes given `requires_grad`, the first layer's missing one and frozen weights included. From here
    on the model's forwards can be counted in `track` blocks; call this before torch.compile has compiled it, or pass
    the compiled model.

    Args:
        model: any module; whatever wraps, compiles or shards it is left out of the count.
        args: a sample of the forward's arguments by position.
        kwargs: a sample of those by name.
        with_backward: whether the number includes the backward.
        results: from which of its results the model's backward starts, as for `headway.trace`; kept from then on.

    Returns:
        FLOPs of the sample. A `track` block counts what it really runs.

    Raises:
        TraceError: an operation of the model cannot be explained.
        WorkloadError: the sample does not say what it asks the model to compute.
        UsageError: the model lies on several devices.

    >>> import torch
    >>> int(profile_flops(torch.nn.Linear(8, 4), (torch.zeros(2, 8),)))  # 2 * 2 * 8 * 4, and no gradient of the input
    256
    """
    return profile_flops_with_hfu(model, args, kwargs, with_backward=with_backward, results=results).flops


def profile_flops_with_hfu(
    model: "nn.Module",
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    with_backward: bool = True,
    results: Any = None,
) -> FlopProfile:
    """Count as `profile_flops` does, and with what activation checkpointing runs a second time.

    The attention that a causal mask hides is in neither number: no model asks for it.

    Args:
        model: as for `profile_flops`; its checkpointing is read off it as transformers switches it on.
        args: as for `profile_flops`.
        kwargs: as for `profile_flops`.
        with_backward: whether the numbers include the backward, and with it the recomputation.
        results: as for `profile_flops`.

    Raises:
        TraceError, WorkloadError, UsageError: as for `profile_flops`.
    """
    ledger = ledger_of(model)
    ledger.setup.look_again()  # adapters may have been added
    setup = ledger.setup.read()
    ledger.start_backward_from(results)
    ledger.prepare()
    call = ledger.note(args or (), kwargs or {}).arrived()
    count, _ = ledger.count(call, setup, forward_only=not with_backward)
    own = (ledger,)
    return FlopProfile(ProfiledFlops(count.total, own), ProfiledFlops(count.total + count.recompute, own))


def flash_attn_flops(
    batch_size: int | None = None,
    seq_len: int = 0,
    num_heads: int = 0,
    head_dim: int = 0,
    *,
    batch: int | None = None,
    causal: bool = True,
    with_backward: bool = False,
) -> AttentionFlops:
    """Count the FLOPs of one call of attention: scores and values, for exactly the pairs that the mask allows.

    A profile holds the attention of its model already, that of direct `flash_attn` calls included. This is for
    attention that runs outside any profiled model, and for arithmetic on paper.

    Args:
        batch_size: sequences.
        seq_len: length of each [tokens].
        num_heads: query heads.
        head_dim: size of a head, of keys and of values.
        batch: another name of `batch_size`.
        causal: whether a query sees only itself and what comes before; the diagonal counts.
        with_backward: add the backward, twice the forward.

    Raises:
        UsageError: a size below 1, or the batch given twice or not at all.

    Source: 4 FLOPs per pair, head and element; sum over t of t = s (s + 1) / 2 causal pairs.

    >>> flash_attn_flops(batch_size=1, seq_len=3, num_heads=1, head_dim=2)  # 4 * 2 * (1 + 2 + 3)
    48
    """
    if (batch_size is None) == (batch is None):
        raise UsageError("give flash_attn_flops the number of sequences once, as batch_size or as batch.")
    sequences = batch_size if batch_size is not None else batch
    sizes = {"batch_size": sequences, "seq_len": seq_len, "num_heads": num_heads, "head_dim": head_dim}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise UsageError(f"{name}={size!r} is not a size of attention; give a whole number of at least 1.")
    assert sequences is not None
    pairs = sequences * (causal_pairs if causal else full_pairs)([seq_len])
    per_pair = 4 * num_heads * head_dim
    return AttentionFlops(pairs * per_pair * (3 if with_backward else 1), per_pair)
