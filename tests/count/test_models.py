"""Shipped models: sizes against published ones, files against a fresh trace, and no torch on the way."""

import subprocess
import sys

import pytest

from headway.count import load_cost_model, shipped_models, storage
from headway.count.models import FOLDER
from headway.errors import UnknownModelError

# Parameters in billions as the makers publish them (model cards and technical reports), total and active per token.
PUBLISHED = {
    "deepseek-v2-lite": (15.7, 2.4), "deepseek-v3": (671, 37), "gemma-3-27b": (27.0, None), "gemma-3-4b": (3.88, None),
    "gpt-oss-120b": (116.83, 5.13), "gpt-oss-20b": (20.91, 3.61), "gpt2": (0.124, None), "llama-3.1-70b": (70.6, None),
    "llama-3.1-8b": (8.03, None), "mistral-7b-v0.1": (7.24, None), "mixtral-8x7b": (46.7, 12.9),
    "qwen2.5-0.5b": (0.49, None), "qwen2.5-1.5b": (1.54, None), "qwen2.5-72b": (72.7, None), "qwen2.5-7b": (7.61, None),
    "qwen2.5-vl-7b": (8.29, None), "qwen3-0.6b": (0.6, None), "qwen3-30b-a3b": (30.5, 3.3), "qwen3-32b": (32.8, None),
    "qwen3-4b": (4.0, None), "qwen3-8b": (8.2, None), "qwen3-vl-2b": (2.13, None), "qwen3-vl-30b-a3b": (31.07, 3.3),
    "qwen3-vl-4b": (4.44, None), "qwen3-vl-8b": (8.77, None),
}  # fmt: skip
# Active parameters as published leave out the input embedding, or the vision tower; ours are all that a token may read.
LEFT_OUT = {
    "deepseek-v2-lite": 102400 * 2048, "gpt-oss-120b": 201088 * 2880, "gpt-oss-20b": 201088 * 2880,
    "qwen3-vl-30b-a3b": 31_070_754_032 - 30_532_122_624,
}  # fmt: skip


def test_every_model_has_a_published_size_to_hold():
    assert sorted(PUBLISHED) == shipped_models()


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameter_counts_are_the_published_ones(name):
    total, active = PUBLISHED[name]
    params = load_cost_model(name).params
    assert params.total / 1e9 == pytest.approx(total, rel=0.012)
    if active is None:
        assert params.active == params.total
    else:
        assert (params.active - LEFT_OUT.get(name, 0)) / 1e9 == pytest.approx(active, rel=0.025)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_ledgers_are_complete(name):
    model = load_cost_model(name)
    assert model.unknown == ()
    assert model.name == name
    assert all(row.forward > 0 for row in model.rows)


def retraced(name, tmp_path):
    """Trace a preset again; versions of the libraries may differ from those that wrote the file."""
    from headway.count.models.__main__ import trace_preset

    fresh = trace_preset(name)
    storage.save(fresh, tmp_path / "fresh.json")
    old = load_cost_model(name)
    return tuple((model.rows, model.parameters, model.source["embeddings"]) for model in (fresh, old))


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5-0.5b", "qwen3-vl-2b"])
def test_a_fresh_trace_of_small_models_gives_the_shipped_file(name, tmp_path):
    fresh, shipped = retraced(name, tmp_path)
    assert fresh == shipped


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - {"gpt2", "qwen2.5-0.5b", "qwen3-vl-2b"}))
def test_a_fresh_trace_gives_the_shipped_file(name, tmp_path):
    fresh, shipped = retraced(name, tmp_path)
    assert fresh == shipped


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UnknownModelError, match=r"'qwen3-vl-9b'.*qwen3-vl-8b"):
        load_cost_model("qwen3-vl-9b")


def test_counting_loads_neither_torch_nor_transformers():
    code = (
        "import sys; from headway.count import Workload, load_cost_model; "
        "load_cost_model('qwen3-vl-8b').lora(16).count(Workload([4096], images=[(1, 16, 24)]), recompute='full'); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_each_file_in_the_folder_is_a_shipped_model():
    assert sorted(p.stem for p in FOLDER.glob("*.json") if p.stem != "presets") == shipped_models()
