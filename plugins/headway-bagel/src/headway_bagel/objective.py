"""The objective of a model that draws: cross-entropy of its words, and the error of its flow's velocity."""

from typing import Any

from headway.data import Batch
from headway.models.head import LossOptions
from headway.train.objective import LoopStep, Objective
from headway.train.share import Counts, StepShare
from headway.train.step_numbers import PackSums, StepNumbers
from headway_bagel.losses import LossOfDrawing


class Drawing(Objective):
    """Learns words by cross-entropy, and pictures by the squared error of the velocity of each patch that is drawn."""

    terms = ("flow",)

    def counts(self, batch: Batch) -> Counts:
        """Targets of each source; patches that are drawn."""
        return super().counts(batch)._replace(others=(batch.workload.noised,))

    def pack_loss(self, batch: Batch, step: LoopStep) -> PackSums:
        """Run the model on a pack, words and pictures together."""
        local = batch.local_slots(self.parts.group)
        (drawn,) = step.share.counts.others
        losses = self.parts.model_with_loss
        assert isinstance(losses, LossOfDrawing)
        with self.parts.autocast():
            pack, drawn_K, _ = losses.of_pack(
                batch.model_inputs(), batch.labels_1T[0, local], LossOptions(step.share.divisor), max(1, drawn)
            )
        sums = PackSums(pack.total, pack.loss_T, batch.source_of_slots()[local])
        return sums if drawn_K is None else sums._replace(terms={"flow": drawn_K.sum()})

    def record(self, numbers: StepNumbers, share: StepShare) -> dict[str, Any]:
        """The loss of words, and that of pictures."""
        (drawn,) = share.counts.others
        flow = numbers.terms["flow"] / drawn if drawn else None
        return {**super().record(numbers, share), "flow_loss": flow}
