"""`headway models`: the models whose cost models ship with the package."""

from typing import TYPE_CHECKING

from headway.cli.options import JsonOption
from headway.cli.output import print_json
from headway.report import Column, format_count, render_table

if TYPE_CHECKING:
    from headway.count import CostModel


def models(as_json: JsonOption = False) -> None:
    """List the shipped models: name, kind, and parameters in total and active for one token."""
    from headway.count import load_cost_model, shipped_models

    shipped = [(name, load_cost_model(name)) for name in shipped_models()]
    if as_json:
        entries = [
            {
                "name": name,
                "kind": kind(cost_model),
                "params": {"total": cost_model.params.total, "active": cost_model.params.active},
            }
            for name, cost_model in shipped
        ]
        print_json({"models": entries})
        return
    columns = [Column("name", "left"), Column("kind", "left"), Column("parameters"), Column("active per token")]
    rows = [
        [name, kind(cost_model), format_count(cost_model.params.total), format_count(cost_model.params.active)]
        for name, cost_model in shipped
    ]
    print(render_table(columns, rows))


def kind(cost_model: "CostModel") -> str:
    """Say what a model is made of: "text" or "vision-language", and "experts" where it has any."""
    base = "vision-language" if cost_model.has_vision else "text"
    return f"{base}, experts" if any(row.op == "experts" for row in cost_model.rows) else base
