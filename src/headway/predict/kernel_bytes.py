"""Bytes, launches and times of kernels that are no products: the update, the loss, and rows for experts."""

from headway.count import CostModel
from headway.count.units import head_features, head_parameter
from headway.count.updating import AT_ONCE, NEWTON_SCHULZ, ONE_PASS_FROM, RULES, rules_of
from headway.predict.activations import BFLOAT16, FLOAT32
from headway.predict.engine import Update
from headway.predict.recipe import State
from headway.predict.speeds import Shape
from headway.predict.weights import muon_matrices

COPIED, ROUNDED, CODED = 2, 30, 46
"""Bytes that "separate" moves beside those of float32 for a number held in another type: how often it is read or
written in that type and, as often, in float32; rounding to bfloat16 (a random number drawn, which takes as long as 10
bytes, added, and bits cut off: 4 bytes for each operand and result); codes of 8 bits from and to a table likewise.

Source of the 10: a profile of 16.1 billion numbers on a H200, whose random numbers took 126 ms; 2026-11-26.
"""

TENSORS_AT_ONCE, NUMBERS_AT_ONCE = {1: 110, 2: 64, 3: 48, 4: 36}, 320 * 65536
"""Tensors, by the number of lists that an operator takes, and numbers that PyTorch gives to one kernel for lists.

Source: depth_to_max_tensors, depth_to_max_blocks and kChunkSize of ATen/native/cuda/MultiTensorApply.cuh, 2.13.
"""

LOG_SOFTMAX_READS = 3
"""Times that log-softmax reads a row of logits: for its largest, its sum and its result.

Source: cunn_SoftMaxForward of PyTorch's SoftMax.cu, 2.11.
"""
SUMMED = 0.22
"""Share of the memory's rate at which a kernel adds up the rows of a slot's experts, which it finds by index.

Source, like those of the two below: 24 layers of Qwen3-VL-30B-A3B on a H200, 65,536 rows of 2,048 numbers: 0.73 TB/s
(forward's sum) and 0.93 (backward's) of 3.84; a profile of 2026-11-26.
"""
SORTS_S = 110e-6
"""Time of sorting rows by their expert, and of its inverse [s]: 16 passes of 6.6 us, which the rows hardly lengthen."""
TOP_K_S = 8.5e-9
"""Time of finding a slot's experts among its router's scores [s]."""


def own_update(state: State, rule: str) -> Update:
    """Kernels by which `headway.optim` updates numbers in other types than float32, by the rule that updates them.

    >>> [own_update(State(moment_bytes=held, one_pass=True), "adamw") for held in (2, 1)]
    ['one pass', 'separate']
    """
    makes_one_pass = state.one_pass and RULES[rule].one_pass and state.moment_bytes >= BFLOAT16
    return "one pass" if makes_one_pass else "separate"


def update_bytes(state: State, trained: int, update: Update, rule: str = "adamw") -> float:
    """Count the bytes that an update moves, in all its passes, beside Muon's products.

    Args:
        state: dtypes of weights, gradients and moments.
        trained: weights that learn by the rule.
        update: how the optimizer computes.
        rule: of updating.

    >>> update_bytes(State(weight_bytes=2, moment_bytes=2), 1, "one pass")
    14
    >>> update_bytes(State(weight_bytes=2, moment_bytes=2), 1, "separate")
    160
    """
    moments = trained * len(RULES[rule].moments)
    if update == "one pass":
        return 3 * state.weight_bytes * trained + 2 * state.moment_bytes * moments
    # in float32, of which weights and moments are read and written, gradients read
    num_bytes = FLOAT32 * (3 * trained + 2 * moments) + RULES[rule].moved * trained
    if state.weight_bytes < FLOAT32:
        copied = state.weight_bytes + FLOAT32
        num_bytes += (copied + COPIED * copied + ROUNDED) * trained
    if state.moment_bytes < FLOAT32:
        rounded = ROUNDED if state.moment_bytes >= BFLOAT16 else CODED
        num_bytes += round((COPIED * (state.moment_bytes + FLOAT32) + rounded) * moments)
    return num_bytes


def clipping_bytes(state: State, trained: int, update: Update) -> int:
    """Count the bytes that the norm of gradients and clipping move.

    The norm reads gradients. A kernel that makes one pass scales them as it reads them; others have them scaled first,
    in float32: gradients themselves or copies.

    Args:
        state: dtypes of weights, which gradients have, and of moments.
        trained: weights that learn.
        update: how the optimizer computes.

    >>> clipping_bytes(State(weight_bytes=2, moment_bytes=2), 1, "one pass")
    2
    >>> clipping_bytes(State(weight_bytes=4, moment_bytes=4), 1, "one pass")
    12
    """
    is_kernel_s = update == "one pass" and BFLOAT16 <= min(state.weight_bytes, state.moment_bytes) < FLOAT32
    scaled = 2 * FLOAT32 if state.clips and not is_kernel_s else 0
    return (state.weight_bytes + scaled) * trained


def update_launches(
    cost_model: CostModel, state: State, shards: int, packs: int = 1, update: Update | None = None
) -> int:
    """Count the kernels that a step launches for sums of gradients, their norm, clipping and the update.

    Args:
        cost_model: of the model, with what is frozen frozen.
        state: dtypes of weights and moments, and the rule.
        shards: processes that each update as much of every parameter.
        packs: micro-batches of a step; the gradients of each but the first are added to earlier ones.
        update: kernels of another engine.
    """
    rules, numels = rules_of(cost_model, state.rule), dict[str, list[int]]()
    for p in cost_model.parameters:
        if p.trainable:
            numels.setdefault(rules[p.name], []).append(-(-p.numel // shards))
    # four kernels join the norms of tensors and of processes; four more make the factor of clipping and apply its bound
    tensors = [numel for parts in numels.values() for numel in parts]
    if not tensors:
        return 0
    count = (packs - 1) * len(tensors) + _listed(tensors, 1) + 4 + (4 if state.clips else 0)
    reads = 1 if state.moment_bytes >= BFLOAT16 else 5  # codes and scales are laid together, looked up and multiplied
    writes = 5 if state.moment_bytes >= BFLOAT16 else 9  # rounded with a random number; or scales and codes are found
    in_float32 = state.weight_bytes == state.moment_bytes == FLOAT32
    for rule, parts in numels.items():
        count += 2 * _listed(parts[:1], 1)  # steps are counted for parameters that decay, and for others
        if rule == "adamw" and in_float32:
            count += 2 * _listed(parts, 4) + (2 * _listed(parts, 1) if state.clips else 0)
            continue
        in_one_pass = [n for n in parts if n >= ONE_PASS_FROM and (update or own_update(state, rule)) == "one pass"]
        count += len(in_one_pass) + (13 if in_one_pass else 0)  # 13 make the numbers that kernels read
        lists = -(-(sum(parts) - sum(in_one_pass)) // AT_ONCE)
        # copies of weights, gradients and moments, the factor, the update, and all but gradients written back
        count += lists * (4 + 5 + len(RULES[rule].moments) * (reads + writes))
    if RULES[state.rule].iterations:
        for (rows, columns), matrices in muon_matrices(cost_model).items():
            stacks = -(-matrices * rows * columns // AT_ONCE)
            count += stacks * (5 + 3 * RULES[state.rule].iterations + 9)  # laid together and normed; applied in float32
    return count


def _listed(numels: list[int], lists: int) -> int:
    """Count the kernels of an operator on lists of tensors of so many numbers.

    >>> _listed([1] * 100, 4), _listed([2**30], 1), _listed([], 1)
    (3, 52, 0)
    """
    return max(-(-len(numels) // TENSORS_AT_ONCE[lists]), -(-sum(numels) // NUMBERS_AT_ONCE))


def loss_bytes(cost_model: CostModel, slots: float, state: State, *, fused: bool, learns: bool = True) -> float:
    """Count the bytes that a pack's loss moves beside its products; 0 without a language head.

    PyTorch's operations cast logits to float32, take their log-softmax, exponentiate that in place and cast it back. A
    fused kernel, such as Liger's, reads logits twice and writes their slopes over them. The weight's gradient is
    zeroed, scaled and cast, and scaled again in backward. A pass for losses alone ends with the log-softmax.

    Args:
        cost_model: of the model.
        slots: whose logits this process computes [slots].
        state: dtypes.
        fused: whether one kernel makes the loss and its slopes.
        learns: whether slopes are made.
    """
    features, number = head_features(cost_model), head_parameter(cost_model)
    if features is None:
        return 0.0
    width, vocabulary = features
    compute, stored = state.compute_bytes, state.weight_bytes
    casts = compute + FLOAT32 if compute < FLOAT32 else 0
    losses_alone = casts + (LOG_SOFTMAX_READS + 1) * FLOAT32  # bytes of a logit in a pass for losses alone
    if not learns:
        return slots * vocabulary * losses_alone
    weight = FLOAT32 + (FLOAT32 + stored) + 2 * stored  # zeroed, cast, scaled by the slope of the loss
    if fused:
        logit, weight = 3 * compute, weight + 2 * stored
    else:
        logit, weight = 2 * casts + (LOG_SOFTMAX_READS + 1 + 2) * FLOAT32, weight + 2 * FLOAT32
    logit += losses_alone if state.weighs else 0
    has_gradient = number is not None and cost_model.parameters[number].trainable
    return slots * vocabulary * logit + (width * vocabulary * weight if has_gradient else 0)


def muon_products(cost_model: CostModel) -> list[tuple[Shape, int]]:
    """List the products by which Muon orthogonalises its matrices: a shape that stands for them, and FLOPs of all.

    Args:
        cost_model: of the model, with what is frozen frozen.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/: of an m x n matrix with m <= n an iteration
    is X X' (2 m m n), its square (2 m m m) and its product with X (2 m m n).
    """
    products = []
    for (rows, columns), count in muon_matrices(cost_model).items():
        m, n = min(rows, columns), max(rows, columns)
        products.append(((m, m, n), count * NEWTON_SCHULZ * (4 * m * m * n + 2 * m**3)))
    return products
