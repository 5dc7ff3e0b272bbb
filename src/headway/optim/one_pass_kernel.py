"""AdamW in one pass over memory, in Triton; `headway.optim.adamw` says when it runs, and launches it.

Importing this file needs Triton. Letters: V values of half a block.
"""

import triton
import triton.language as tl

HALF = 1024
"""Values that a program takes at a time: 8 of each of 128 threads, 16 bytes in bfloat16. It does so twice."""

NUMBERS = ("rate", "root", "decay", "skip", "factor")
"""Numbers of a parameter's step, on the device: see `headway.optim.adamw.numbers_of`."""

# The fewest with which no statistical test of TestU01's BigCrush fails.
# Source: Philox4x32, Salmon et al., SC 2011 (doi:10.1145/2063384.2063405), table 2.
_ROUNDS = tl.constexpr(7)


@triton.jit(do_not_specialize=["numel", "seed"])
def adamw_one_pass(
    weights,
    gradients,
    first,
    second,
    numbers,
    numel: tl.int64,
    seed: tl.int64,
    beta1: tl.float32,
    beta2: tl.float32,
    rest1: tl.float32,
    rest2: tl.float32,
    eps: tl.float32,
    HALF: tl.constexpr,
):
    """Update one block of a parameter in place.

    Args:
        weights: pointer to them; float32 or bfloat16, as are the next three.
        gradients: pointer to them; only read.
        first: pointer to the mean of gradients.
        second: pointer to the mean of squared gradients.
        numbers: pointer to the parameter's `NUMBERS`, in float32.
        numel: values of the parameter.
        seed: of the noise; the same gives the same.
        beta1: decay rate of the first mean.
        beta2: decay rate of the second.
        rest1: 1 - beta1.
        rest2: 1 - beta2.
        eps: added to the root of the second mean.
        HALF: values of half a block.
    """
    if tl.load(numbers + 3) > 0:
        return
    block, lanes_V = tl.program_id(0), tl.arange(0, HALF)
    # 128 bits of noise for one value of each half, by their place in the parameter: 16 for each number that is rounded
    zeros_V = lanes_V * 0
    a_V, b_V, c_V, d_V = tl.philox(seed, lanes_V, zeros_V + block, zeros_V, zeros_V, n_rounds=_ROUNDS)
    start = block.to(tl.int64) * (2 * HALF)
    tensors, settings = (weights, gradients, first, second), (beta1, beta2, rest1, rest2, eps)
    # only the last block has a mask, which keeps the compiler from loading 16 bytes at a time
    if start + 2 * HALF <= numel:
        _update(tensors, numbers, start + lanes_V, None, (a_V, b_V), settings)
        _update(tensors, numbers, start + HALF + lanes_V, None, (c_V, d_V), settings)
    else:
        left = numel - start
        _update(tensors, numbers, start + lanes_V, lanes_V < left, (a_V, b_V), settings)
        _update(tensors, numbers, start + HALF + lanes_V, HALF + lanes_V < left, (c_V, d_V), settings)


@triton.jit
def _update(tensors, numbers, places_V, mask_V, noise, settings):
    """Update some values of a parameter, of which two words of noise each are rounded with."""
    weights, gradients, first, second = tensors
    beta1, beta2, rest1, rest2, eps = settings
    rate, root, decay, factor = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 4)
    gradient_V = factor * tl.load(gradients + places_V, mask=mask_V).to(tl.float32)
    first_V = beta1 * tl.load(first + places_V, mask=mask_V).to(tl.float32) + rest1 * gradient_V
    second_V = beta2 * tl.load(second + places_V, mask=mask_V).to(tl.float32) + rest2 * gradient_V * gradient_V
    weight_V = tl.load(weights + places_V, mask=mask_V).to(tl.float32)
    weight_V -= decay * weight_V + rate * first_V / (tl.sqrt(second_V) * root + eps)
    tl.store(weights + places_V, _rounded(weight_V, noise[0], weights.dtype.element_ty), mask=mask_V)
    tl.store(first + places_V, _rounded(first_V, noise[0] >> 16, first.dtype.element_ty), mask=mask_V)
    tl.store(second + places_V, _rounded(second_V, noise[1], second.dtype.element_ty), mask=mask_V)


@triton.jit
def _rounded(values_V, noise_V, dtype: tl.constexpr):
    """Round as `headway.optim.parts.round_stochastically_` does, with the low 16 bits of the noise."""
    result_V = values_V.to(dtype)
    if dtype == tl.bfloat16:
        bits_V = (values_V.to(tl.uint32, bitcast=True) + (noise_V & 0xFFFF)) & 0xFFFF0000
        is_number_V = values_V == values_V  # noqa: PLR0124 - noise would carry the bits of NaN over to zero
        result_V = tl.where(is_number_V, bits_V.to(tl.float32, bitcast=True), values_V).to(dtype)
    return result_V
