"""Loss of a step to vision towers whose work differs between ranks, although the planner makes whole packs equal.

    .venv/bin/python benchmarks/tower_balance.py     # two minutes of one core; nothing is trained

Packs of the recipes are planned as training plans them, one pack a rank and step. Time is FLOPs at one rate. Ranks that
meet only at a step's end lose what the heaviest pack has over the mean. Under FSDP they meet at every gather: a unit's
weights arrive once every rank has begun the unit before it, where its gather is issued. Forward runs the tower's blocks
and then the language model's, backward the other way round, with twice the work and what is recomputed.

Writes benchmarks/results/tower_balance_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.cli.plan import named_recipe
from headway.count import CostModel
from headway.packing import Budget, Items, Order, Plan
from headway.packing.budget import grid_costs
from headway.predict.lengths import enough_lengths
from headway.predict.saved import learning_model
from headway.predict.scale import sized
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, write

RECIPES = (
    "qwen2.5-vl-7b-image-61440",
    "qwen3-vl-8b-image-61440",
    "qwen2.5-vl-7b-video-51200",
    "qwen3-vl-30b-a3b-vqa-8192",
)
RANKS = (8, 64, 256)
Floats = NDArray[np.float64]


def main() -> None:
    """Plan every recipe at every size, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of data-parallel ranks")
    options = parser.parse_args()
    rows = [loss_of(recipe, int(ranks)) for recipe in RECIPES for ranks in options.ranks.split(",")]
    record = {"what": "tower_balance", "environment": environment(torch.device("cpu")), "rows": rows}
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def loss_of(recipe: str, ranks: int) -> dict[str, Any]:
    """Plan a recipe's packs for so many ranks, and sum up over steps what towers cost."""
    cost_model, config = named_recipe(f"recipes/{recipe}.yaml", ("optim.accumulation=1",))
    learning, config = learning_model(config.model, cost_model), sized(config, ranks)
    tower_SP, language_SP = work_of(config, learning, ranks)
    whole_SP = tower_SP + language_SP
    blocks = [sum(tower == kind for tower in cost_model.block_towers.values()) for kind in ("vision", "language")]
    mean, met = whole_SP.mean(axis=1).sum(), sum(map(met_s, tower_SP, language_SP, [blocks] * len(tower_SP)))
    # with patches of a step shared equally, ranks differ by their text alone, which a plan would then balance
    return {
        "recipe": recipe,
        "ranks": ranks,
        "steps": len(whole_SP),
        "tower_share": float(tower_SP.sum() / whole_SP.sum()),
        "tower_spread": float((tower_SP.max(axis=1) / tower_SP.mean(axis=1)).mean()),
        "loss_at_the_end": float(1 - mean / whole_SP.max(axis=1).sum()),
        "loss_at_every_unit": float(1 - mean / met),
        "loss_with_equal_towers": float(1 - mean / (tower_SP.mean(axis=1) + language_SP.max(axis=1)).sum()),
    }


def work_of(config: Any, cost_model: CostModel, ranks: int) -> tuple[Floats, Floats]:
    """FLOPs of the vision tower and of the rest in the pack of each rank, shape (steps, ranks)."""
    data, shape = config.data, config.parallel.mesh_shape(ranks)
    (name, table), _ = enough_lengths(config, cost_model, shape)
    budget = Budget(data.tokens_per_pack, data.patches_per_pack, data.samples_per_pack)
    items, _ = Items.build({name: table}, budget, "drop", cost_model)
    order = Order.epochs(items.sizes, 1, seed=data.seed)
    plan = Plan(items, order, budget, ranks, strategy=data.strategy)
    steps = [step for step, _ in plan.steps()][:-1]  # the last one is short
    assert table.grids is not None
    assert table.grid_rows is not None
    of_rows = np.bincount(table.grid_rows, grid_costs(cost_model, table.grids), minlength=len(table.tokens))
    tower_SP = np.array([[of_rows[items.locate(pack).row].sum() for pack in step.packs] for step in steps])
    return tower_SP, np.array([step.costs for step in steps]) - tower_SP


def met_s(tower_P: Floats, language_P: Floats, blocks: list[int]) -> float:
    """Time until the last rank has passed forward and backward, where each unit's gather needs all ranks."""
    of_units = [tower_P / blocks[0]] * blocks[0] + [language_P / blocks[1]] * blocks[1]
    done_P, begun_P = np.zeros_like(tower_P), np.zeros_like(tower_P)
    # a third of the work forward, then the rest backward from the last unit on
    for unit_P in [unit_P / 3 for unit_P in of_units] + [2 * unit_P / 3 for unit_P in reversed(of_units)]:
        arrived = begun_P.max()  # issued when the unit before began on the last rank
        begun_P = np.maximum(done_P, arrived)
        done_P = begun_P + unit_P
    return float(done_P.max())


def render(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    cells = [
        [row["recipe"], str(row["ranks"]), str(row["steps"]), f"{100 * row['tower_share']:.0f} %",
         f"{row['tower_spread']:.2f}", *(f"{100 * row[key]:.1f} %" for key in
         ("loss_at_the_end", "loss_at_every_unit", "loss_with_equal_towers"))]
        for row in record["rows"]
    ]  # fmt: skip
    headings = ["recipe", "ranks", "steps", "tower's share of FLOPs", "heaviest / mean tower",
                "lost if ranks meet at the step's end", "if at every unit (FSDP)",
                "at every unit, towers shared equally"]  # fmt: skip
    return (
        "# What unequal vision towers cost\n\n"
        f"{describe_environment(record)}\n\n"
        "Planned, nothing was trained: packs as training plans them, FLOPs at one rate, a pack a rank and step. The "
        "last column takes the same packs, the towers' work shared out equally and sent for free.\n\n"
        f"{markdown_table(headings, cells)}"
    )


if __name__ == "__main__":
    main()
