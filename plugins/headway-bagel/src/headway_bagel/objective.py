"""The objective of a model that draws: cross-entropy of its words, and the error of its flow's velocity."""

from typing import Any

from headway.data import Batch
from headway.train.objective import LoopStep, Objective
from headway.train.share import Counts, StepShare
from headway.train.step_numbers import PackSums, StepNumbers


class Drawing(Objective):
    """Learns words by cross-entropy, and pictures by the squared error of the velocity of each patch that is drawn."""

    terms = ("flow",)

    def counts(self, batch: Batch) -> Counts:
        """Targets of each source; patches that are drawn."""
        return super().counts(batch)._replace(others=(batch.workload.drawn,))

    def pack_loss(self, batch: Batch, step: LoopStep) -> PackSums:
        """Run the model on a pack, words and pictures together."""
        local = batch.local_slots(self.parts.group)
        (drawn,) = step.share.counts.others
        with self.parts.autocast():
            pack = self.parts.model_with_loss(
                batch.model_inputs(), batch.labels_1T[0, local], per=step.share.divisor, per_drawn=max(1, drawn)
            )
        sums = PackSums(pack.total, pack.loss_T, batch.source_of_slots()[local])
        return sums if pack.drawn_K is None else sums._replace(terms={"flow": pack.drawn_K.sum()})

    def record(self, numbers: StepNumbers, share: StepShare) -> dict[str, Any]:
        """The loss of words, and that of pictures."""
        (drawn,) = share.counts.others
        flow = numbers.terms["flow"] / drawn if drawn else None
        return {**super().record(numbers, share), "flow_loss": flow}
