"""Bagel (Deng et al. 2025, arXiv:2505.14683): a mixture of two transformers that reads and draws images.

Tensor letters: T slots of a pack, U understood tokens (text and patches that are read), L latent patches, P patches
that are read, M images that are read, G latent grids, K drawn latent patches, S supervised tokens, D hidden size, C
numbers per latent patch, V vocabulary.
"""

from headway.architectures.bagel.configuration import BagelConfig
from headway.architectures.bagel.model import BagelModel, BagelOutput

__all__ = ["BagelConfig", "BagelModel", "BagelOutput"]
