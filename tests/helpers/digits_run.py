"""A small dataset of digits, a model of a few thousand parameters, and a configuration that trains it in seconds."""

import json
import shutil

import pytest
import torch
import yaml

from headway.config import parse_config
from headway.synthetic.digits import write_digits, write_reader


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Losses repeat bit for bit on one thread only."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A folder with data/ and model/."""
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder / "data", num_one_digit=400, num_train=80, num_eval=12, renderings=1)
    write_reader(folder / "model")
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text())
    rope = {**config["text_config"]["rope_parameters"], "mrope_section": [2, 1, 1]}
    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 1, "rope_parameters": rope}
    config["text_config"].update(small)
    config["vision_config"].update({"hidden_size": 32, "intermediate_size": 48, "depth": 1, "out_hidden_size": 32})
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def mixture(digits, tmp_path_factory):
    """The folder of the digits' model with eight experts in place of each MLP, two of them for each token."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    shutil.copytree(digits / "model", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"]}
    config["text_config"] |= {"model_type": "qwen3_vl_moe_text", "num_experts": 8, "num_experts_per_tok": 2}
    config["text_config"] |= {"moe_intermediate_size": 16, "num_hidden_layers": 2}
    config["vision_config"] |= {"model_type": "qwen3_vl_moe_vision"}
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture
def raw(digits, tmp_path):
    """A configuration as plain types, free to change."""
    return {
        "model": {"path": str(digits / "model"), "random_init": True},
        "data": {
            "train": [{"path": str(digits / "data/train.jsonl")}],
            "tokens_per_pack": 160,
            "workers": 0,
            "prefetch_bytes": 0,
        },
        "optim": {"steps": 6, "lr": 2e-3, "warmup_steps": 2},
        "run": {"folder": str(tmp_path / "run"), "device": "cpu", "threads": 1},
    }


@pytest.fixture
def config(raw):
    """The same, checked."""
    return parse_config(raw)


@pytest.fixture
def config_file(raw, tmp_path):
    """Write the configuration, with changes, to a file."""

    def write(**sections):
        for name, changes in sections.items():
            raw.setdefault(name, {}).update(changes)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    return write
