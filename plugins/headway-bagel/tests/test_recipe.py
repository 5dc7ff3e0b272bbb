"""The recipe of a model that draws: what its dry run says, and that it trains when scaled down."""

import json

import pytest

from bagels import chat
from headway.count import load_cost_model
from headway.models.load import load_model
from helpers.processes import ROOT
from helpers.runs import scaled_down

RECIPE = ROOT / "plugins/headway-bagel/recipes/bagel-7b-mot-10240.yaml"


def test_the_recipe_of_a_model_that_draws_says_its_memory_by_part(headway, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(chat("Draw a red square.", "no")) + "\n")
    result = headway("train", RECIPE, "--dry-run", "--json", "--set", f"data.train.0.path={rows}")
    plan = json.loads(result.out)
    assert result.code == 0, result.err
    assert (plan["model"], plan["devices"], plan["fits"]) == ("bagel-7b-mot", 32, True)
    assert plan["params"]["total"] == load_cost_model("bagel-7b-mot").params.total
    memory = plan["memory"]
    assert memory["peak"] > memory["weights"] + memory["optimizer"] + memory["gradients"]


@pytest.mark.slow
def test_the_recipe_of_a_model_that_draws_trains_when_scaled_down(tmp_path):
    summary = scaled_down(RECIPE, tmp_path / "run")
    assert summary["complete"]
    assert summary["last_loss"] < summary["first_loss"]
    assert summary["last_flow_loss"] > 0
    assert summary["vision_share"] > 0
    exported = sorted((tmp_path / "run/small/run/export").iterdir())[-1]
    assert load_model(exported).config.vae_config["latent_channels"] == 16
