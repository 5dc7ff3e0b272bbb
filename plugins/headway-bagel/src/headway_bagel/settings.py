"""Settings of `model.family` for a model that draws."""

from pydantic import Field

from headway.config.sections import Fraction, Section, Share
from headway.packing.parts import Dropout


class DrawingConfig(Section):
    """Settings of training a model that draws images."""

    flow_weight: Share = Field(default=1.0, description="Factor on the loss of drawn images, beside that of tokens")
    timestep_shift: Share | None = Field(
        default=None,
        description="Shift of the flow's times towards noise: 1 leaves them as drawn, larger is noisier; null for the "
        "model's own",
    )
    drop_text: Fraction = Field(
        default=0.0,
        description="Share of the texts before a drawn image that are left out, drawn anew in each epoch, for "
        "guidance; texts that are learnt stay",
    )
    drop_read: Fraction = Field(
        default=0.0, description="Share of the images before a drawn one that the tower does not read, likewise"
    )
    drop_reference: Fraction = Field(
        default=0.0, description="Share of the images before a drawn one whose clean latents are left out, likewise"
    )

    def dropout(self, seed: int) -> Dropout | None:
        """Conditions that are left out, by a run's seed; None where none are."""
        shares = (self.drop_text, self.drop_read, self.drop_reference)
        return Dropout(*shares, seed) if any(shares) else None
