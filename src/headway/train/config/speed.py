"""What makes a step faster or smaller without changing what it computes."""

from headway.train.config.sections import Section


class SpeedConfig(Section):
    """Compilation, kernels and recomputation."""
