"""The facts of one step that go into a profile: its workload and its FLOPs, as plain numbers for JSON."""

from typing import Any

from headway.count.cost_model import CostModel
from headway.count.flop_count import FlopCount
from headway.count.workload import Workload
from headway.errors import WorkloadError


def step_facts(count: FlopCount, workload: Workload, padding_flops: int | None) -> dict[str, Any]:
    """Give the facts of a step's work.

    Args:
        count: its FLOPs by component.
        workload: what it was asked to compute.
        padding_flops: what it spent on padding; None where that is not known.
    """
    useful: dict[str, dict[str, int]] = {}
    again: dict[str, int] = {}
    for row in count.rows:
        phases = useful.setdefault(row.name, {"forward": 0, "backward": 0})
        phases["forward"] += row.forward
        phases["backward"] += row.dgrad + row.wgrad
        if row.recompute:
            again[row.name] = again.get(row.name, 0) + row.recompute
    return {
        "workload": workload.to_dict(),
        "tokens": workload.tokens,
        "slots": workload.slots,
        "useful_flops": useful,
        "recomputed_flops": again,
        "padding_flops": padding_flops,
    }


def components_of(*cost_models: CostModel) -> dict[str, str]:
    """Name the component of each module that computes; the first model that has a module says which."""
    components: dict[str, str] = {}
    for row in (row for cost_model in cost_models for row in cost_model.rows):
        components.setdefault(row.module, row.component)
    return components


def flops_on_padding(
    cost_model: CostModel, workload: Workload, recompute: str, ranks: int = 1, *, forward_only: bool = False
) -> int | None:
    """Count the FLOPs of padding in layers that run on every slot, without attention; None where unknown.

    Args:
        cost_model: of the model.
        workload: of the step.
        recompute: as for `CostModel.count`.
        ranks: how many share the work; the first one's part is counted.
        forward_only: as for `CostModel.count`.
    """
    padding = workload.slots - workload.tokens
    if not padding:
        return 0
    try:
        count = cost_model.count(Workload([padding]), recompute=recompute, forward_only=forward_only)
    except WorkloadError:  # a model that reads an encoder: its padding is the decoder's or the encoder's
        return None
    rows = [row for row in count.split(ranks)[0].rows if row.driver == "tokens"]
    return sum(row.total + row.recompute for row in rows)
