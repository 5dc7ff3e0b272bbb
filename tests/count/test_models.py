"""Shipped models: sizes against published ones, files against a fresh trace, and no torch on the way."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headway.count import Workload, load_cost_model, models, shipped_models
from headway.count.models import FOLDER
from headway.errors import UnknownModelError
from helpers.cases import some

# configurations of models that do not ship, with the sizes that their makers' repositories give
UNSHIPPED = json.loads(Path(__file__).with_name("published_models.json").read_text(encoding="utf-8"))
PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "published_figures_202611.md"
_, _SHIPPED, _UNSHIPPED, *_ = PAGE.read_text(encoding="utf-8").split("\n## ")


def rows(part):
    """Read a table of the page: the cells of each model, after its name."""
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    return {name.strip("`"): cells for name, *cells in lines}


def figures(model):
    """Parameters, those that one token uses, and FLOPs of a forward and of a step of 4,096 tokens."""
    step = model.count(Workload([4096]))
    return model.params.total, model.params.active, step.forward, step.total


def shown(total, active, forward, step):
    """What the page shows of these figures, in the order of its columns."""
    params = [f"{number / 1e9:.3f}" for number in (total, active)]
    return [*params, *(f"{flops / 4096 / 1e9:,.2f}" for flops in (forward, step))]


PUBLISHED, UNSHIPPED_FIGURES = rows(_SHIPPED), rows(_UNSHIPPED)
BESIDE = {"presets", "saved_activations", "hub"}  # files of the folder that are no model's
OWN = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem not in BESIDE)
# Active parameters as published leave out the input embedding, or the vision tower; ours are all that a token may read.
LEFT_OUT = {
    "deepseek-v2-lite": 102400 * 2048, "gpt-oss-120b": 201088 * 2880, "gpt-oss-20b": 201088 * 2880,
    "qwen3-vl-30b-a3b": 31_070_754_032 - 30_532_122_624,
}  # fmt: skip


def test_every_model_has_a_published_size_to_hold():
    assert sorted(PUBLISHED) == OWN
    assert {*OWN} <= {*shipped_models()}  # plug-ins bring more


def check_figures(name, found, cells, share):
    total, ours, active, our_active, forward, step, *_ = cells
    assert [ours, our_active, forward, step] == shown(*found)
    assert found[0] / 1e9 == pytest.approx(float(total.replace(",", "")), rel=share)
    if active == "-":
        assert found[0] == found[1]
    else:
        assert (found[1] - LEFT_OUT.get(name, 0)) / 1e9 == pytest.approx(float(active), rel=0.025)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_page_shows_what_is_computed_and_that_is_what_was_published(name):
    check_figures(name, figures(load_cost_model(name)), PUBLISHED[name], 0.012)


# Layers after which a model's kinds of layers repeat, and layers before the first repetition.
PERIODS = {"gemma-2-9b": (2, 2), "llama-4-scout (text)": (4, 4), "kimi-k2": (1, 2)}


@pytest.mark.parametrize("name", some(sorted(UNSHIPPED_FIGURES), "gemma-2-9b".__eq__))
def test_models_that_do_not_ship_have_their_published_sizes_too(name):
    from transformers import AutoConfig

    from headway.tracing import trace
    from headway.tracing.build import with_layers

    config = AutoConfig.for_model(**UNSHIPPED[name])
    period, few = PERIODS.get(name, (1, 1))
    less, more = (figures(trace(with_layers(config, layers))) for layers in (few, few + period))
    periods, rest = divmod(config.num_hidden_layers - few, period)
    assert rest == 0
    every_layer = [a + periods * (b - a) for a, b in zip(less, more, strict=True)]
    check_figures(name, every_layer, UNSHIPPED_FIGURES[name], 0.015)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", sorted(UNSHIPPED_FIGURES))
def test_published_sizes_are_those_of_every_layer_traced(name):
    from transformers import AutoConfig

    from headway.tracing import trace

    model = trace(AutoConfig.for_model(**UNSHIPPED[name]), name=name)
    check_figures(name, figures(model), UNSHIPPED_FIGURES[name], 0.015)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_ledgers_are_complete(name):
    model = load_cost_model(name)
    assert model.unknown == ()
    assert model.name == name
    assert all(row.forward > 0 for row in model.rows)


# Layers that show every kind of layer that a model has, where two do not.
DEPTHS = {
    "deepseek-v3": 4, "gemma-3-4b": 6, "gemma-3-27b": 6, "qwen2.5-vl-7b": 8, "qwen3-vl-2b": 6, "qwen3-vl-4b": 6,
}  # fmt: skip
LAYER = re.compile(r"\.(?:layers|blocks|h)\.(\d+)(?=\.|$)")


def facts(model, names):
    """What is said of each parameter, and of each operation with the parameters whose training makes it run."""
    order = [parameter.name for parameter in model.parameters]
    parameters = {p.name: p for p in model.parameters if p.name in names}
    rows = {}
    for row in model.rows:
        gradients = []
        for gradient in row.gradients:
            needs = {name for i, name in enumerate(order) if name in names and gradient.needs >> i & 1}
            gradients.append((gradient.phase, gradient.flops, needs))
        said = (row.op, row.component, row.driver, row.forward, row.block, row.recomputed, row.features, gradients)
        rows.setdefault(row.module, []).append(said)
    return parameters, rows


# A dense model, experts, and what each family has of its own; sizes of one family differ in numbers alone.
OFTEN = {
    "deepseek-v3",
    "gemma-3-4b",
    "gpt-oss-20b",
    "gpt2",
    "qwen2.5-vl-7b",
    "qwen3-30b-a3b",
    "qwen3-vl-2b",
    "qwen3-4b",
}


@pytest.mark.parametrize("name", some(sorted(PUBLISHED), OFTEN.__contains__))
def test_a_fresh_trace_of_the_first_layers_gives_those_of_the_shipped_file(name):
    from headway.tracing import trace
    from headway.tracing.build import preset_config, with_layers

    depth = DEPTHS.get(name, 2)
    fresh, shipped = trace(with_layers(preset_config(name), depth)), load_cost_model(name)
    names = {parameter.name for parameter in fresh.parameters}
    (parameters, rows), (old_parameters, old_rows) = facts(fresh, names), facts(shipped, names)
    assert parameters == old_parameters
    assert rows == {module: said for module, said in old_rows.items() if module in rows}
    later = old_rows.keys() - rows.keys()
    assert all(max(map(int, LAYER.findall(path)), default=0) >= depth or "deepstack" in path for path in later)
    assert fresh.source["embeddings"] == shipped.source["embeddings"]


@pytest.mark.parametrize(
    "name",
    [name if name == "gpt2" else pytest.param(name, marks=pytest.mark.slow) for name in sorted(PUBLISHED)],
)
def test_a_fresh_trace_gives_the_shipped_file(name, tmp_path):
    from tools.shipped_models import trace_preset

    fresh, shipped = trace_preset(name), load_cost_model(name)
    assert (fresh.rows, fresh.parameters) == (shipped.rows, shipped.parameters)
    assert fresh.source["embeddings"] == shipped.source["embeddings"]  # versions of the libraries may differ
    models.save_cost_model(fresh, tmp_path / "fresh.json")
    assert models.load(tmp_path / "fresh.json").rows == shipped.rows


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
