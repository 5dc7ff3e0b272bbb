"""Settings that no run can mean are refused where they are read, in one clear error."""

import copy
import math

import pytest

from headway.config import load_config, parse_config
from headway.errors import ConfigError

SETTINGS = {
    "model": {"path": "m"},
    "data": {"train": [{"path": "a"}], "tokens_per_pack": 16},
    "optim": {"steps": 3, "lr": 1e-3},
    "run": {"folder": "r"},
}


@pytest.mark.parametrize(
    ("section", "setting", "value"),
    [
        ("run", "watchdog_s", True),
        ("run", "watchdog_s", 1e12),
        ("run", "seed", 2**32),
        ("run", "threads", 2**31),
        ("run", "folder", "a\0b"),
        ("run", "profile", {"start": 1, "ranks": [True]}),
        ("optim", "lr", math.inf),
        ("optim", "lr", math.nan),
        ("optim", "lr_of", {"a": True}),
        ("optim", "eps", math.inf),
        ("optim", "weight_decay", math.inf),
        ("optim", "betas", [True, 0.9]),
        ("optim", "accumulation", 2**63),
        ("data", "workers", 100_000),
        ("data", "tokens_per_pack", 99999999999999999999999),
        ("data", "patches_per_pack", 2**26 + 1),
        ("data", "window", 10**12),
        ("data", "max_image_pixels", 10**12),
        ("data", "train", [{"path": "a", "epochs": 1e-300}]),
        ("data", "train", [{"path": "a", "epochs": True}]),
        ("model", "lora", {"rank": 10**20}),
    ],
)
def test_a_value_that_no_run_can_mean_is_refused_by_name(section, setting, value):
    raw = copy.deepcopy(SETTINGS)
    parse_config(copy.deepcopy(raw))
    raw[section][setting] = value
    with pytest.raises(ConfigError) as refused:
        parse_config(raw)
    assert section in str(refused.value)
    assert setting in str(refused.value)


def test_truth_values_stay_where_they_belong():
    raw = copy.deepcopy(SETTINGS)
    raw["speed"] = {"compile": True}
    raw["parallel"] = {"reshard": False}
    assert parse_config(raw).speed.compile is True


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("run: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("run: {seed: " + "9" * 5000 + "}", "out of range"),
        ("run: {folder: 2026-99-99}", "out of range"),
    ],
)
def test_yaml_that_cannot_be_read_is_one_paragraph(text, reason, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=reason) as refused:
        load_config(tmp_path / "recipe.yaml")
    assert len(str(refused.value)) < 1000
    (tmp_path / "good.yaml").write_text("run: {}")
    with pytest.raises(ConfigError, match=reason):
        load_config(tmp_path / "good.yaml", (f"optim.lr={text}",))
