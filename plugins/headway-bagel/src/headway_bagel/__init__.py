"""Bagel (Deng et al. 2025, arXiv:2505.14683) in Headway: a mixture of two transformers that reads and draws images.

Tensor letters: T slots of a pack, U understood tokens (text and patches that are read), L latent patches, P patches
that are read, M images that are read, G latent grids, K drawn latent patches, S supervised tokens, D hidden size, C
numbers per latent patch, V vocabulary.
"""

from headway.plugins import Family

FAMILY = Family(
    model_types=("bagel",),
    package=__name__,
    hooks={
        "register": "model:register",
        "inputs": "inputs:Drawings",
        "settings": "settings:DrawingConfig",
        "encoder": "encoding:DrawingEncoder",
        "generator": "generator:PackedGenerator",
        "losses": "losses:LossOfDrawing",
        "objective": "objective:Drawing",
        "vision_tower": "model:vision_tower",
        "small_config": "small_model:small_config",
        "small_chat": "small_model:small_chat",
        "ledgers": "conventions:LEDGERS",
        "conventions": "conventions:CONVENTIONS",
        "tool_peaks": "conventions:TOOL_PEAKS",
        "formulas": "conventions:FORMULAS",
        "commands": "command:COMMANDS",
        "demos": "demo:DEMOS",
        "sections": "demo:sections",
    },
)
