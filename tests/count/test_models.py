"""Shipped models: sizes against published ones, files against a fresh trace, and no torch on the way."""

import subprocess
import sys
from pathlib import Path

import pytest

from headway.count import Workload, load_cost_model, shipped_models, storage
from headway.count.models import FOLDER
from headway.errors import UnknownModelError
from helpers.published_models import UNSHIPPED

PAGE = Path(__file__).parents[2] / "docs" / "published-figures.md"
_, _SHIPPED, _UNSHIPPED = PAGE.read_text(encoding="utf-8").split("\n## ")


def rows(part):
    """Read a table of the page: the cells of each model, after its name."""
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    return {name.strip("`"): cells for name, *cells in lines}


def computed(model):
    """What the page shows of a cost model, in the order of its columns."""
    step = model.count(Workload([4096]))
    params = [f"{number / 1e9:.3f}" for number in (model.params.total, model.params.active)]
    return [*params, f"{step.forward / 4096 / 1e9:,.2f}", f"{step.total / 4096 / 1e9:,.2f}"]


PUBLISHED, UNSHIPPED_FIGURES = rows(_SHIPPED), rows(_UNSHIPPED)
# Active parameters as published leave out the input embedding, or the vision tower; ours are all that a token may read.
LEFT_OUT = {
    "deepseek-v2-lite": 102400 * 2048, "gpt-oss-120b": 201088 * 2880, "gpt-oss-20b": 201088 * 2880,
    "qwen3-vl-30b-a3b": 31_070_754_032 - 30_532_122_624,
}  # fmt: skip


def test_every_model_has_a_published_size_to_hold():
    assert sorted(PUBLISHED) == shipped_models()


def check_figures(name, model, cells, share):
    total, ours, active, our_active, forward, step, *_ = cells
    assert [ours, our_active, forward, step] == computed(model)
    assert model.params.total / 1e9 == pytest.approx(float(total.replace(",", "")), rel=share)
    if active == "-":
        assert model.params.active == model.params.total
    else:
        assert (model.params.active - LEFT_OUT.get(name, 0)) / 1e9 == pytest.approx(float(active), rel=0.025)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_page_shows_what_is_computed_and_that_is_what_was_published(name):
    check_figures(name, load_cost_model(name), PUBLISHED[name], 0.012)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(UNSHIPPED_FIGURES))
def test_models_that_do_not_ship_have_their_published_sizes_too(name):
    transformers = pytest.importorskip("transformers")
    from headway.tracing import trace

    model = trace(transformers.AutoConfig.for_model(**UNSHIPPED[name]), name=name)
    check_figures(name, model, UNSHIPPED_FIGURES[name], 0.015)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_ledgers_are_complete(name):
    model = load_cost_model(name)
    assert model.unknown == ()
    assert model.name == name
    assert all(row.forward > 0 for row in model.rows)


def retraced(name, tmp_path):
    """Trace a preset again; versions of the libraries may differ from those that wrote the file."""
    from tools.shipped_models import trace_preset

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
