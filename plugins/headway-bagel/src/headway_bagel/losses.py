"""Losses of a model that draws: cross-entropy of words, and the error of the flow's velocity on drawn patches."""

from dataclasses import replace
from typing import Any

import torch

from headway.models.head import LossOptions, ModelWithLoss, PackLoss
from headway_bagel.settings import DrawingConfig


class LossOfDrawing(ModelWithLoss):
    """Losses of a model that draws: of supervised tokens, on which alone it runs its head, and of drawn patches.

    Args:
        words: computes the loss of tokens.
        settings: of the family; their `flow_weight` is a factor on the mean squared error of the flow's velocity.
    """

    def __init__(self, words: ModelWithLoss, settings: DrawingConfig | None = None) -> None:
        super().__init__(words.model)
        self._words, self._flow_weight = words, (settings or DrawingConfig()).flow_weight

    def run(self, inputs: dict[str, Any], labels_T: torch.Tensor, options: LossOptions) -> tuple[PackLoss, Any]:
        """Run the model; see `ModelWithLoss`. The error of drawn patches is a mean over those of the pack."""
        loss, _, output = self.of_pack(inputs, labels_T, options)
        return loss, output

    def of_pack(
        self, inputs: dict[str, Any], labels_T: torch.Tensor, options: LossOptions, per_drawn: int | None = None
    ) -> tuple[PackLoss, torch.Tensor | None, Any]:
        """Run the model, words and pictures together.

        Args:
            inputs: as `run` takes them.
            labels_T: as `run` takes them.
            options: of the losses of words.
            per_drawn: divisor of the summed error of drawn patches, such as those of a whole step; those of the pack
                when None.

        Returns:
            The losses; the squared error of each drawn patch, mean over its numbers, shape (K,), without gradient, or
            None where none is drawn; and what the model returned.
        """
        # words are judged on the slots that the head ran on; all others are right and lose nothing
        slots_S = inputs["understood_slots"][inputs["supervised_rows"]]
        options = replace(options, labelled_K=torch.arange(len(slots_S), device=slots_S.device))
        loss, output = self._words.run(inputs, labels_T[slots_S], options)
        loss_T = loss.loss_T.new_zeros(len(labels_T)).index_copy(0, slots_S, loss.loss_T)
        right_T = None
        if loss.right_T is not None:
            right_T = torch.ones_like(loss_T, dtype=torch.bool).index_copy(0, slots_S, loss.right_T)
        if output.flow is None:
            return PackLoss(loss.total, loss_T, right_T), None, output
        # drawn patches by the error of their velocity
        wide = torch.promote_types(output.flow.dtype, torch.float32)
        drawn_K = (output.flow.to(wide) - output.flow_target.to(wide)).square().mean(-1)
        total = loss.total + self._flow_weight * drawn_K.sum() / (per_drawn or max(1, len(drawn_K)))
        return PackLoss(total, loss_T, right_T), drawn_K.detach(), output
