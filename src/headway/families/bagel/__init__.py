"""Bagel (Deng et al. 2025, arXiv:2505.14683): a mixture of two transformers that reads and draws images.

Tensor letters: T slots of a pack, U understood tokens (text and patches that are read), L latent patches, P patches
that are read, M images that are read, G latent grids, K drawn latent patches, S supervised tokens, D hidden size, C
numbers per latent patch, V vocabulary.
"""

from headway.plugins import Family

FAMILY = Family(
    model_types=("bagel",),
    package=__name__,
    layout="ByteDance-Seed/Bagel",
    hooks={
        "register": "model:register",
        "inputs": "inputs:Drawings",
        "encoder": "encoding:DrawingEncoder",
        "generator": "generator:PackedGenerator",
        "drawer": "drawer:BagelDrawer",
        "read_checkpoint": "checkpoint:read_checkpoint",
        "small_model": "small_model:write_drawer",
        "objective": "objective:Drawing",
    },
)
