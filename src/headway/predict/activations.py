"""Activations: bytes that blocks keep from forward to backward, heads of attention, and a pack's pixels."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from headway.count import CostModel, Workload, drivers
from headway.count.activations import SavedActivations, bytes_of
from headway.count.recompute import PRODUCTS, result_kind, rows_by_block
from headway.count.units import remembered

FLOAT32, BFLOAT16 = 4, 2
"""Bytes of a number."""


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """Activations that one block keeps from forward to backward [bytes]."""

    saved: int  # all of them, where it is not recomputed
    entry: int  # input of the block, kept where the block is recomputed
    # kept beside the entry where these do not run again
    attention: int = 0
    projections: int = 0
    mlp: int = 0

    def kept(self, kinds: Collection[str] = ()) -> int:
        """Bytes that the block keeps where it is recomputed, with the results of some kinds."""
        results: int = sum(getattr(self, kind) for kind in kinds)
        return min(self.saved, self.entry + results)


@remembered
def block_bytes(
    cost_model: CostModel,
    saved: SavedActivations,
    pack: Workload,
    *,
    fused: bool,
    compute_bytes: int,
    sequence: int = 1,
) -> dict[str, BlockBytes]:
    """List the activations that each block of the backward keeps on one device, by name.

    Args:
        cost_model: of the model, with what is frozen frozen.
        saved: what autograd saves of it, in the precision of its forward.
        pack: one micro-batch.
        fused: whether blocks are compiled or run on fused kernels.
        compute_bytes: of a number that a product gives.
        sequence: processes that share the pack.
    """
    alive = cost_model.blocks_in_backward
    products = _products(cost_model)
    amounts = {driver: drivers.parse_driver(driver)(pack) for driver in {row.driver for row in cost_model.rows}}
    sizes: dict[tuple[int, Any], BlockBytes] = {}  # blocks of one stack are mostly one object
    for name, block in saved.blocks.items():
        key = (id(block), products.get(name))
        if key not in sizes:
            parts = (block.fused if fused else block.plain, block.entry, block.attention)
            of_saved = [-(-bytes_of(rows, pack) // sequence) for rows in parts]
            of_products = [
                compute_bytes * sum(values * amounts[driver] for driver, values in layers) // sequence
                for layers in products.get(name, ())
            ]
            sizes[key] = BlockBytes(*of_saved, *of_products)
    return {
        name: sizes[id(block), products.get(name)] for name, block in saved.blocks.items() if name and name in alive
    }


@remembered
def _products(cost_model: CostModel) -> dict[str, tuple[tuple[tuple[str, int], ...], ...]]:
    """List what each of `PRODUCTS` keeps of each block: drivers, and values for a unit of each."""
    products = {}
    for name, rows in rows_by_block(cost_model.rows).items():
        kinds: list[Counter[str]] = []
        for kind in PRODUCTS:
            kinds.append(Counter())
            sizes = {row.features for row in rows if row.recomputed and result_kind(row) == kind}
            for row in rows:
                if row.features and row.features in sizes:  # 2 FLOPs for each value and feature that goes in
                    kinds[-1][row.driver] += row.forward // (2 * row.features[0])
        products[name] = tuple(tuple(kind.items()) for kind in kinds)
    return products


@dataclass(frozen=True, slots=True)
class Attention:
    """Heads of one attention, and who computes it."""

    block: str  # block that computes it
    driver: str  # tokens of the language model, or patches
    heads: int  # heads of queries
    key_heads: int  # heads of keys and values; divides `heads`
    size: int  # numbers of a query or key in a head
    value_size: int  # numbers of a value in a head

    def sent(self, pack: Workload, degree: int, unit: int) -> dict[str, int]:
        """Values that the first of `degree` processes sends: tokens for heads and back, forward and backward."""
        tokens = drivers.parse_driver(self.driver)(pack)
        local = -(-(tokens // unit) // degree) * unit
        shares = [(self.heads + degree - 1 - rank) // degree for rank in range(degree)]
        readers, keys, start = self.heads // self.key_heads, [], 0
        for share in shares:  # key heads that each process's query heads read
            keys.append((start + share - 1) // readers - start // readers + 1 if share else 0)
            start += share
        pair = self.size + self.value_size
        return {
            "tokens for heads": local * (self.heads * self.size + sum(keys) * pair),
            "heads for tokens": tokens * shares[0] * self.value_size,
            "gradients of tokens": local * self.heads * self.value_size,
            "gradients of heads": tokens * (shares[0] * self.size + keys[0] * pair),
        }


@remembered
def attentions(cost_model: CostModel, saved: SavedActivations, compute_bytes: int) -> list[Attention]:
    """Read heads off the rows: a module's linear ones before its attention make queries, keys and values.

    What attention saves is its output and, in float32, one number for each query and head.
    """
    attentions = []
    for place, row in enumerate(cost_model.rows):
        if row.op != "attention" or row.block not in saved.blocks:
            continue
        # the linear layers within the same module, before and after its attention
        inside = [
            (number > place, other.features)
            for number, other in enumerate(cost_model.rows)
            if other.features and other.block == row.block and other.module.startswith(f"{row.module}.")
        ]
        before = [features for is_after, features in inside if not is_after]
        after = [features for is_after, features in inside if is_after]
        saved_rows = saved.blocks[row.block].attention
        if not before or not after or not saved_rows:
            continue
        # the projection after attention reads its output; 2 FLOPs a pair for each value of queries and outputs
        output = after[0][0]
        queries = row.forward // 2 - output
        # beyond the output it saves float32, one number for each head
        heads = max(1, int(sum(saved_rows.values()) - output * compute_bytes) // FLOAT32)
        # grouped queries: of three projections before it the middle one makes the keys
        key_heads = heads
        if len(before) > 2 and before[-2][1] * output == before[-1][1] * queries:
            key_heads = max(1, before[-2][1] * heads // queries)
        # attention keeps results of all its tokens, but a projection may have some alone
        attentions.append(
            Attention(row.block, next(iter(saved_rows)), heads, key_heads, queries // heads, output // heads)
        )
    return attentions


PADDED_SUMS = 2
"""Numbers in float32 that cuDNN's attention keeps for each head and each place of a segment as long as the longest.

Source: of 28 layers that keep attention, in a pack of 72 segments of up to 12,968 tokens, it held 5,599,122,432 bytes
more than FlashAttention-2 on a H200, which keeps one for each token; two make 5,599,240,192
(benchmarks/results/engine_gpu_nvidia-h200_202611.json).
"""


def padding_of_sums(
    cost_model: CostModel, saved: SavedActivations, pack: Workload, padded: tuple[int, int], compute_bytes: int
) -> dict[str, int]:
    """Count bytes that attention's sums take beyond one for each head and token, by block.

    Args:
        cost_model: of the model.
        saved: names its blocks.
        pack: the largest micro-batch.
        padded: its tokens and patches if its segments were all as long as the longest.
        compute_bytes: bytes of a number of activations.
    """
    tokens, patches = padded
    added: dict[str, int] = {}
    for attention in attentions(cost_model, saved, compute_bytes):
        there = drivers.parse_driver(attention.driver)(pack)
        places = max(there, patches if attention.driver.startswith("patch") else tokens)
        added[attention.block] = FLOAT32 * attention.heads * (PADDED_SUMS * places - there)
    return added


@remembered
def pixel_bytes(cost_model: CostModel, pack: Workload, compute_bytes: int) -> int:
    """Bytes of a pack's pixels: as bytes, scaled to float32, and where autocast is, once more for the product.

    A value of a patch is multiplied into each channel of the tower once, which gives how many there are.
    """
    row = next((row for row in cost_model.rows if row.component == "vision.embed"), None)
    width = min(
        (min(r.features) for r in cost_model.rows if r.features and r.block and r.component.startswith("vision.")),
        default=0,
    )
    if row is None or not width:
        return 0
    values = row.forward * drivers.parse_driver(row.driver)(pack) // (2 * width)
    copies = FLOAT32 + (compute_bytes if compute_bytes < FLOAT32 else 0)
    return values * (1 + copies)
