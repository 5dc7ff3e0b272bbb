"""Counting rules of other tools and papers, named and versioned: each bills one step in its own way.

`get_convention(name).bill(model, Step(workload, seq_len))` gives the FLOPs that a tool would have printed, by part;
`architecture(config, name, cost_model)` reads the model's numbers that the rules need. `docs/conventions.md` explains
them. Nothing here needs torch or transformers.
"""

from headway.conventions.architecture import Architecture, ParameterGroups, Vision
from headway.conventions.convention import PARTS, Bill, Convention, Step
from headway.conventions.reading import architecture
from headway.conventions.registry import conventions, get_convention
from headway.conventions.tool_peaks import ToolPeak, tool_peak

__all__ = [
    "PARTS",
    "Architecture",
    "Bill",
    "Convention",
    "ParameterGroups",
    "Step",
    "ToolPeak",
    "Vision",
    "architecture",
    "conventions",
    "get_convention",
    "tool_peak",
]
