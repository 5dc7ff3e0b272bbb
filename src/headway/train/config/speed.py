"""What makes a step faster or smaller without changing what it computes."""

from typing import Literal, Self

from pydantic import Field, model_validator

from headway.train.config.sections import Positive, Section, changed


class SpeedConfig(Section):
    """Compilation, kernels and recomputation."""

    kernels: Literal["torch", "liger"] = Field(
        default="torch",
        description="Whose kernels compute norms, gated MLPs, rotary embeddings and the loss: PyTorch's, or Liger "
        "Kernel's on CUDA",
    )
    attention: Literal["auto", "torch", "flash-attn"] = Field(
        default="auto",
        description="Kernel of attention within segments on CUDA: PyTorch's (also with auto) or that of the flash-attn "
        "package",
    )
    loss_chunk: Positive | None = Field(
        default=2048,
        description="Slots whose logits are in memory at a time, Liger's own choice with its kernels; null for the "
        "logits of a whole pack [slots]",
    )

    @model_validator(mode="after")
    def _chunks_are_ours(self) -> Self:
        if self.kernels == "liger" and self.loss_chunk is not None and "loss_chunk" in changed(self):
            raise ValueError("loss_chunk has no effect with kernels 'liger', which choose their own; leave it out")
        return self
