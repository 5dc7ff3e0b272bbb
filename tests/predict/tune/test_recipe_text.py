"""The recipe that is written: what it extends and what it changes."""

import pytest
import yaml

from headway.config import load_config
from headway.predict.tune.space import changed_config, recipe_text
from helpers.processes import ROOT


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b-video-51200", "qwen3-vl-8b-video-51200-sp2"])
def test_it_reads_back_as_what_was_found(name, tmp_path):
    base = ROOT / "recipes" / f"{name}.yaml"
    values = {"data.tokens_per_pack": 40_960, "optim.accumulation": 3, "speed.loss_chunk": None, "parallel.sequence": 4}
    config = changed_config(load_config(base), {**values, "plan.device": "H100", "speed.recompute": "memory:12.5GiB"})
    target = tmp_path / "best.yaml"
    target.write_text(recipe_text(base, config, target, "A remark."), encoding="utf-8")
    assert load_config(target) == config
    assert target.read_text().startswith("# A remark.\nextends: ")


def test_it_holds_no_more_than_what_changes(tmp_path):
    base = ROOT / "recipes/qwen2.5-7b-text-81920.yaml"
    config = changed_config(load_config(base), {"optim.accumulation": 2})
    written = yaml.safe_load(recipe_text(base, config, ROOT / "best.yaml", "A remark."))
    assert written == {"extends": "recipes/qwen2.5-7b-text-81920.yaml", "optim": {"accumulation": 2}}
