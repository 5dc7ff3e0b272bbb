"""What other tools would charge for a step of this run, for its summary."""

from collections.abc import Sequence
from typing import Any

from headway.conventions import Step, architecture, conventions
from headway.count import CostModel, Workload
from headway.data import Batch
from headway.errors import HeadwayError


def billed_by_conventions(
    model_config: dict[str, Any], cost_model: CostModel, batches: Sequence[Batch], *, row_length: int, recompute: str
) -> list[dict[str, Any]]:
    """Bill the packs that this process trained on in one step in every convention.

    Args:
        model_config: the content of the model's `config.json`.
        cost_model: of the model.
        batches: the packs.
        row_length: slots of a pack, which tools that bill the configured length take [tokens].
        recompute: which blocks are computed again in backward, as `CostModel.count` takes it.

    Returns:
        Of each convention its name, version, FLOPs, their ratio to the useful ones (both None where the rule has no
        number for this model), and what it counts differently; nothing of a model whose sizes no rule can read.
    """
    workload = Workload.total(batch.workload for batch in batches)
    step = Step(workload, max([row_length, *workload.segments.tolist()]), recompute)
    try:
        read = architecture(model_config, cost_model.name, cost_model)
        bills = [(rule, rule.bill(read, step)) for rule in conventions(read.model_type)]
    except HeadwayError:
        return []
    useful = next(bill.flops for rule, bill in bills if rule.name == "useful")
    return [
        {
            "name": rule.name,
            "version": rule.version,
            "flops": bill.flops,
            "ratio_to_useful": bill.flops / useful if bill.flops is not None and useful else None,
            "why": bill.reason or rule.why,
        }
        for rule, bill in bills
    ]
