import json
from typing import NamedTuple

import pytest
import yaml

from headway.config import load_config
from tools.import_config.__main__ import main

CONFIG = """
dataset_config: {packing: true, packing_length: 4096, dataset_format: jsonl, dataset_path: a.jsonl, fps: 2}
model_config: {load_from_pretrained_path: some/model}
trainer_args: {max_steps: 600, per_device_train_batch_size: 1, use_rmpad: true, sp_ulysses_degree: 2}
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def translate(capsys):
    def run(*arguments):
        code = main([*map(str, arguments)])
        return Result(code, *capsys.readouterr())

    return run


def test_a_recipe_is_written_that_loads(translate, tmp_path):
    (tmp_path / "theirs.yaml").write_text(CONFIG)
    result = translate(tmp_path / "theirs.yaml", "-o", tmp_path / "ours.yaml", "--steps", 700)
    assert (result.code, result.out) == (0, "")
    config = load_config(tmp_path / "ours.yaml")
    assert (config.optim.steps, config.parallel.sequence, config.data.tokens_per_pack) == (700, 2, 4096)
    rows = {line.split()[0]: " ".join(line.split()) for line in result.err.splitlines() if line}
    assert "not needed packs never hold padding" in rows["trainer_args.use_rmpad"]
    assert "translated parallel.sequence=2" in rows["trainer_args.sp_ulysses_degree"]
    assert "(its default) translated optim.lr=5e-05" in rows["trainer_args.learning_rate"]
    assert (tmp_path / "ours.yaml").read_text().startswith("# From theirs.yaml, a configuration of LMMs-Engine.\n")


def test_the_recipe_goes_to_stdout_and_as_json(translate, tmp_path):
    (tmp_path / "theirs.yaml").write_text(CONFIG)
    recipe = yaml.safe_load(translate(tmp_path / "theirs.yaml").out)
    record = json.loads(translate(tmp_path / "theirs.yaml", "--json").out)
    assert record["schema_version"] == 1
    assert record["recipe"] == recipe
    fates = {key["key"]: key["fate"] for key in record["keys"]}
    assert fates["dataset_config.fps"] == "by hand"


def test_a_file_that_is_not_there_is_one_sentence(translate, tmp_path):
    result = translate(tmp_path / "gone.yaml")
    assert result.code == 2
    assert "No such file or directory" in " ".join(result.err.split())


def test_a_key_that_the_file_does_not_have_is_a_warning(translate, tmp_path):
    (tmp_path / "theirs.yaml").write_text(CONFIG)
    result = translate(tmp_path / "theirs.yaml", "--leave-out", "trainer_args.deepspeed")
    assert result.code == 0
    assert "Warning: --leave-out trainer_args.deepspeed:" in result.err
    assert yaml.safe_load(result.out)["optim"]["steps"] == 600
