"""Bytes of frozen weights in 4 or 8 bits, and which weights of a model they are.

`nf4` keeps a code of 4 bits for each value, a scale for each 64 values in 8 bits, and for each 256 scales a factor in
float32: 4.127 bits a value. `int8` keeps a code of 8 bits, and a scale in float32 for each row of a matrix.

Source: Dettmers et al. 2023, QLoRA (arXiv:2305.14314), section 3; Dettmers et al. 2022, LLM.int8() (arXiv:2208.07339),
section 2.1, of the weights alone.
"""

from typing import Literal, get_args

from headway.count import CostModel
from headway.count.units import product_weights, remembered

Base = Literal["nf4", "int8"]
BASES: tuple[str, ...] = get_args(Base)

BLOCK = 64
"""Values that share a scale."""
SCALES = 256
"""Scales that share a factor."""
AT_ONCE = 2**24
"""Values that are dequantised at a time: what they are worked out in takes 6 bytes of each."""
_FLOAT32 = 4


def matrix_bytes(base: Base, rows: int, columns: int) -> int:
    """Bytes of one matrix.

    Args:
        base: how it is held.
        rows: of it.
        columns: of it.

    >>> 8 * matrix_bytes("nf4", 4096, 4096) / 4096**2
    4.126955032348633
    >>> 8 * matrix_bytes("int8", 4096, 4096) / 4096**2
    8.0078125
    """
    values = rows * columns
    if base == "int8":
        return _FLOAT32 * rows + values
    blocks = -(-values // BLOCK)
    factors = 1 + -(-blocks // SCALES)  # scales' factors, and the mean of all scales
    return _FLOAT32 * factors + blocks + blocks * BLOCK // 2


@remembered
def quantised_parameters(cost_model: CostModel) -> frozenset[str]:
    """Name the frozen weights that are held in 4 or 8 bits: of linear layers and experts in the repeated blocks.

    Heads, embeddings, mergers and routers are in none or are told by their component; norms and biases multiply no
    matrix.

    Args:
        cost_model: of the model, with what is frozen frozen and adapters in place.
    """
    blocks = {
        gradient.needs
        for row in cost_model.rows
        if row.block and not row.component.endswith(".router")
        for gradient in row.gradients
        if gradient.phase == "wgrad"
    }
    products = product_weights(cost_model)
    return frozenset(
        parameter.name
        for number, parameter in enumerate(cost_model.parameters)
        if parameter.name in products and 1 << number in blocks and not parameter.trainable
    )
