"""Distillation: a student learns a teacher's probabilities of each next token, on the same packs.

objective:
path: examples/distil.py:Distil
options: {teacher: path/to/teacher, temperature: 2.0}
"""

from typing import Any

import torch
from torch.nn.functional import kl_div, log_softmax

from headway.data import Batch
from headway.train.objective import LoopStep, Objective, RunParts
from headway.train.share import StepShare
from headway.train.step_numbers import PackSums, StepNumbers


class Distil(Objective):
    """Learns by the divergence of a frozen teacher from the student, a mean over all supervised tokens.

    Args:
        parts: parts of the run.
        teacher: model folder, or name on the Hugging Face Hub, with the student's vocabulary.
        temperature: divisor of both models' logits.
    """

    terms = ("agreements",)  # how often both models find the same token the likeliest

    def __init__(self, parts: RunParts, *, teacher: str, temperature: float = 1.0) -> None:
        super().__init__(parts)
        self.teacher, self.temperature = self.frozen_model(teacher), temperature
        self.ledgers = [self.teacher.cost_model]

    def pack_loss(self, batch: Batch, step: LoopStep) -> PackSums:
        """Run the teacher forward, then the student; the loop runs the student backward."""
        inputs, learnt_T = batch.model_inputs(), batch.labels_1T[0] != -100
        # The teacher's forward is a phase of its own in records, with its own FLOPs.
        with torch.no_grad(), self.parts.autocast(), step.forward("teacher", batch, self.teacher.cost_model):
            wanted_TV = self.teacher.model(**inputs).logits[0]
        with self.parts.autocast():
            logits_TV = self.parts.trained.model(**inputs).logits[0]
        # Slots that are not supervised, padding among them, teach nothing.
        log_p_TV = log_softmax(logits_TV.float() / self.temperature, -1)
        log_q_TV = log_softmax(wanted_TV.float() / self.temperature, -1)
        loss_T = kl_div(log_p_TV, log_q_TV, log_target=True, reduction="none").sum(-1) * learnt_T
        agrees_T = (logits_TV.argmax(-1) == wanted_TV.argmax(-1)) & learnt_T
        # All ranks' losses are divided by all ranks' supervised tokens, here and in the log.
        total = loss_T.sum() / step.share.divisor
        return PackSums(total, loss_T.detach(), batch.source_of_slots(), {"agreements": agrees_T.sum()})

    def record(self, numbers: StepNumbers, share: StepShare) -> dict[str, Any]:
        """The mean divergence, and the share of tokens on which the models agree."""
        return super().record(numbers, share) | {"agreement": numbers.terms["agreements"] / share.divisor}
