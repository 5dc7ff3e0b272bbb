"""What makes a step faster or smaller without changing what it computes."""

from pydantic import Field

from headway.train.config.sections import Positive, Section


class SpeedConfig(Section):
    """Compilation, kernels and recomputation."""

    loss_chunk: Positive | None = Field(
        default=1024,
        description="Slots whose logits are in memory at a time; null for the logits of a whole pack [slots]",
    )
