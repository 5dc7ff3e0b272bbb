"""All-to-all of Ulysses sequence parallelism: tokens for heads before attention, heads for tokens after it.

Outside attention each process of a group holds a part of the tokens and every head; inside it, all tokens and a part of
the heads. One all-to-all each way makes the change, and autograd runs it backwards. Neither tokens nor heads need
divide by the number of processes. All sizes are known on the host, so nothing waits for a device, and every step is an
operation that torch.compile traces.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509.

Tensor letters: T slots of the whole pack, L this process's slots, H query heads, K key/value heads, D head size, W
columns of one process's heads laid side by side, C channels. A small h or k: this process's heads.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from headway.errors import TrainingError


class Split(NamedTuple):
    """Deal of a pack's slots to the processes of a group: contiguous parts in the order of ranks.

    Attributes:
        slots: of the whole pack [tokens, or patches in a vision tower].
        unit: slots that stay together; divides `slots`.
        rank: this process in its group.
        degree: processes in the group.
        group: the group's name, by which torch knows it.
    """

    slots: int
    unit: int
    rank: int
    degree: int
    group: str

    def sizes(self) -> list[int]:
        """Slots of each process; they differ by one unit at most, and earlier ones have more."""
        return _sizes(self.slots, self.unit, self.degree)

    def local(self) -> slice:
        """This process's slots."""
        sizes = self.sizes()
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])


def split_over(group: dist.ProcessGroup, slots: int, unit: int = 1) -> Split:
    """Deal slots to the processes of a group; arguments as in `Split`.

    Raises:
        TrainingError: fewer units than processes, so that some would have none.
    """
    degree = dist.get_world_size(group)
    if slots // unit < degree:
        raise TrainingError(
            f"A pack of {slots} slots cannot be shared by {degree} processes, because each needs at least one slot. "
            "Pad packs to a multiple of parallel.sequence, or lower parallel.sequence."
        )
    return Split(slots, unit, dist.get_rank(group), degree, group.group_name)


def shares(items: int, degree: int) -> list[int]:
    """Deal items as evenly as they go; earlier ones get one more.

    >>> shares(7, 3)
    [3, 2, 2]
    """
    return [(items + degree - 1 - rank) // degree for rank in range(degree)]


def tokens_to_heads(
    q_LHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, split: Split
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give up the other processes' heads for all tokens of this process's heads.

    Query heads are dealt as evenly as they go. Key and value heads go to every process whose query heads read them;
    where those read them unequally often, each is repeated for its readers after it has arrived.

    Args:
        q_LHD: this process's queries.
        k_LKD: its keys; K divides H.
        v_LKD: its values; their head size may differ from the keys'.
        split: how the pack's slots are dealt.

    Returns:
        Queries (T, h, D), keys (T, k, D) and values (T, k, Dv) of the whole pack; k divides h. A process without query
        heads, where there are fewer than processes, gets none of any.
    """
    # For each process: its query heads, the key heads that these read, and both of this process's slots side by side.
    query_heads = _ranges(q_LHD.shape[1], split.degree)
    per_key = q_LHD.shape[1] // k_LKD.shape[1]
    key_heads = [_read_by(heads, per_key) for heads in query_heads]
    parts = [
        torch.cat([q_LHD[:, own].flatten(1), k_LKD[:, keys].flatten(1), v_LKD[:, keys].flatten(1)], dim=1)
        for own, keys in zip(query_heads, key_heads, strict=True)
    ]
    # One exchange for queries, keys and values; what arrives is cut into the three again.
    x_TW = _deal_columns(parts, split)
    own, keys = query_heads[split.rank], key_heads[split.rank]
    sizes = [q_LHD.shape[2], k_LKD.shape[2], v_LKD.shape[2]]
    counts = [own.stop - own.start, keys.stop - keys.start, keys.stop - keys.start]
    columns = torch.split(x_TW, [count * size for count, size in zip(counts, sizes, strict=True)], dim=1)
    q_ThD, k_TkD, v_TkD = (
        column.view(split.slots, count, size) for column, count, size in zip(columns, counts, sizes, strict=True)
    )
    # Kernels want each key head read by equally many query heads: where it is not, it is repeated for each reader.
    readers = [
        sum(head // per_key == key for head in range(own.start, own.stop)) for key in range(keys.start, keys.stop)
    ]
    if len(set(readers)) > 1:
        k_TkD, v_TkD = (
            torch.cat([x[:, i : i + 1].expand(-1, count, -1) for i, count in enumerate(readers)], dim=1)
            for x in (k_TkD, v_TkD)
        )
    return q_ThD, k_TkD, v_TkD


def heads_to_tokens(x_ThD: torch.Tensor, local_slots: int, num_heads: int, split: Split) -> torch.Tensor:
    """Give up the other processes' tokens for all heads of this process's tokens; undoes `tokens_to_heads`.

    Args:
        x_ThD: what attention made of this process's query heads.
        local_slots: this process's slots, L.
        num_heads: query heads of all processes, H.
        split: how the pack's slots are dealt.

    Returns:
        Shape (L, H, D).
    """
    size = x_ThD.shape[2]
    widths = [count * size for count in shares(num_heads, split.degree)]
    x_TW = x_ThD.flatten(1)
    x_LW: torch.Tensor = _deal(x_TW, local_slots, widths, split.unit, split.rank, split.group, gathers=False)
    return x_LW.view(local_slots, num_heads, size)


def own_heads(x_H: torch.Tensor, split: Split) -> torch.Tensor:
    """This process's part of something that each query head has, shape (h, ...)."""
    return x_H[_ranges(x_H.shape[0], split.degree)[split.rank]]


def gather_slots(x_LC: torch.Tensor, split: Split) -> torch.Tensor:
    """Give every process all slots, shape (T, C); the gradients of all processes are added up."""
    return _deal_columns([x_LC] * split.degree, split)


def _ranges(heads: int, degree: int) -> list[slice]:
    ranges, start = [], 0
    for count in shares(heads, degree):
        ranges.append(slice(start, start + count))
        start += count
    return ranges


def _read_by(heads: slice, per_key: int) -> slice:
    """Key heads that a range of query heads reads, where each key head serves `per_key` query heads."""
    if heads.start == heads.stop:
        return slice(0, 0)
    return slice(heads.start // per_key, (heads.stop - 1) // per_key + 1)


def _deal_columns(parts: list[torch.Tensor], split: Split) -> torch.Tensor:
    """Send every process its columns of this process's slots; receive this process's columns of all slots."""
    widths = [part.shape[1] for part in parts]
    x_LW = torch.cat(parts, dim=1)
    x_TW: torch.Tensor = _deal(x_LW, split.slots, widths, split.unit, split.rank, split.group, gathers=True)
    return x_TW


# Both ways are one operator: torch.compile sees its shapes and not the sizes of the messages, whose symbolic form would
# cost it minutes.


@torch.library.custom_op("headway::deal_columns", mutates_args=())
def _deal(
    x: torch.Tensor, rows: int, widths: list[int], unit: int, rank: int, group: str, *, gathers: bool
) -> torch.Tensor:
    """Give this process's columns of all slots for all columns of its own slots, or the other way round.

    Args:
        x: shape (L, sum of widths) if `gathers`, else (T, own width).
        rows: of the result.
        widths: columns of each process.
        unit: slots that stay together.
        rank: this process.
        group: name of the processes' group.
        gathers: whether slots are gathered.
    """
    sizes, width = _sizes(rows if gathers else x.shape[0], unit, len(widths)), widths[rank]
    others, messages = [size * width for size in sizes], [(x.shape[0] if gathers else rows) * w for w in widths]
    if not gathers:
        parts = torch.split(_all_to_all(x.flatten(), others, messages, group), messages)
        return torch.cat([part.view(rows, columns) for part, columns in zip(parts, widths, strict=True)], dim=1)
    sent = x.new_empty(x.numel())
    for message, part in zip(torch.split(sent, messages), torch.split(x, widths, dim=1), strict=True):
        message.view_as(part).copy_(part)
    return _all_to_all(sent, messages, others, group).view(rows, width)


def _all_to_all(x: torch.Tensor, sent: list[int], received: list[int], group: str) -> torch.Tensor:
    """Exchange a flat tensor, cut into `sent` elements for each process."""
    ops: Any = torch.ops._c10d_functional
    out: torch.Tensor = ops.wait_tensor(ops.all_to_all_single(x.contiguous(), received, sent, group))
    return out


def _sizes(slots: int, unit: int, degree: int) -> list[int]:
    return [unit * size for size in shares(slots // unit, degree)]


@_deal.register_fake
def _(
    x: torch.Tensor, rows: int, widths: list[int], _unit: int, rank: int, _group: str, *, gathers: bool
) -> torch.Tensor:
    return x.new_empty(rows, widths[rank] if gathers else sum(widths))


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: torch.Tensor) -> None:  # noqa: ARG001
    x, _, *ctx.settings = inputs
    ctx.rows, ctx.gathers = x.shape[0], keyword_only_inputs["gathers"]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _deal(grad, ctx.rows, *ctx.settings, gathers=not ctx.gathers), None, None, None, None, None


_deal.register_autograd(_backward, setup_context=_keep)
