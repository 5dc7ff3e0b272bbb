"""Proteins that a text reads by cross attention, which transformers registers among the models of images (Evolla)."""

import inspect
from typing import Any, Self

import torch

from headway.count.workload import Workload
from headway.tracing.inputs.form import Floats, InputForm


class Proteins(InputForm):
    """One sequence of amino acids with each text: the segment's source, so many residues long."""

    takes = "protein_input_ids"
    drivers = ("sources", "source_pairs:full")

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Read the form off a model's signature."""
        return cls() if cls.takes in inspect.signature(model.forward).parameters else None

    def sizes(self, run: int) -> dict[str, Any]:
        """Give one sequence of another length in each run."""
        return {"sources": [(149, 283, 571, 409)[run]]}

    def fill(self, batch: dict[str, Any], _start: int, workload: Workload, _floats: Floats) -> None:
        """Add the sequence, without padding."""
        residues = int(workload.sources.sum())
        batch[self.takes] = torch.full((1, residues), 5)  # any residue; small numbers are special
        batch["protein_attention_mask"] = torch.ones((1, residues), dtype=torch.long)
