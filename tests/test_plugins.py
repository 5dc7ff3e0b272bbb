"""A family of models that another distribution brings is served at every seam that it names, and at no other."""

import subprocess
import sys

import pytest

from headway.plugins import families, families_with, family_hook
from helpers.processes import ROOT

# A plain diffusion transformer: two linear layers on latent patches, moved by one vector of each image. It reads no
# text, so nothing that a language model has is there.
PACKAGE = """
from headway.plugins import Family

FAMILY = Family(
    model_types=("plain_dit",), package=__name__, hooks={"inputs": "parts:Latents", "register": "parts:register"}
)
"""
PARTS = """
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from headway import Workload
from headway.tracing.phantom import phantom_floats


class DitConfig(PreTrainedConfig):
    model_type = "plain_dit"

    def __init__(self, width=12, features=4, **more):
        self.width, self.features = width, features
        super().__init__(**more)


class Dit(PreTrainedModel):
    config_class = DitConfig

    def __init__(self, config):
        super().__init__(config)
        self.inside = nn.Linear(config.features, config.width)
        self.condition = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.features)
        self.post_init()

    def forward(self, latents, conditions, images):
        states = torch.relu(self.inside(latents)) + self.condition(conditions)[images]
        return self.out(states)


def workload_of(grids):  # each latent patch is a token of the segment of its image
    return Workload([t * h * w for t, h, w in grids], latents=grids)


class Latents:
    strided = ()
    notes = {}
    drivers = ("latents", "latent_grids")

    def __init__(self, model):
        self.config = model.config

    def workloads(self, _longest_window=0):
        packs = ([(1, 4, 3)], [(1, 5, 7), (1, 7, 6)], [(1, 6, 6)], [(1, 3, 8), (1, 8, 4)])
        return [workload_of(grids) for grids in packs]

    def arguments(self, workload, device=None):
        def floats(*shape):
            return phantom_floats(shape) if device is None else torch.randn(shape, device=device)

        sizes = torch.tensor([t * h * w for t, h, w in workload.latents.tolist()])
        images = torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(device)
        latents = floats(int(sizes.sum()), self.config.features)
        return {"latents": latents, "conditions": floats(len(sizes), self.config.width), "images": images}


def register():
    AutoConfig.register("plain_dit", DitConfig, exist_ok=True)
    AutoModel.register(DitConfig, Dit, exist_ok=True)
"""
USE = """
from headway import trace
from headway.plugins import families_with, register_families
from plain_dit.parts import Dit, DitConfig, workload_of
from transformers import AutoConfig

register_families()
assert isinstance(AutoConfig.for_model("plain_dit"), DitConfig)
model = trace(Dit(DitConfig()))
for grids in ([(1, 2, 3)], [(1, 2, 3), (1, 9, 9)]):
    patches = sum(t * h * w for t, h, w in grids)
    linear = 2 * (patches * 4 * 12 + len(grids) * 12 * 12 + patches * 12 * 4)  # FLOPs of a forward pass
    count = model.count(workload_of(grids))
    assert count.forward == linear, (count.forward, linear)
    assert count.total == 3 * linear - 2 * (patches * 4 * 12 + len(grids) * 12 * 12)  # no gradients of what is given
print([name for family in families_with("inputs") for name in family.model_types])
"""


def install(site, name, package, parts=PARTS):
    """Put a distribution into a folder as pip leaves it: a package, and metadata with an entry point."""
    package_folder, metadata = site / name, site / f"{name}-1.0.dist-info"
    package_folder.mkdir()
    metadata.mkdir()
    (package_folder / "__init__.py").write_text(package)
    (package_folder / "parts.py").write_text(parts)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[headway.families]\n{name} = {name}\n")


def run_with(site, program):
    """Run a program in a process of its own, which finds the distributions of a folder."""
    environment = {"PYTHONPATH": f"{site}:{ROOT / 'src'}", "PATH": "", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment, cwd=site
    )
    assert run.returncode == 0, run.stderr
    return run


@pytest.mark.slow
def test_an_installed_distribution_brings_a_family(tmp_path):
    install(tmp_path, "plain_dit", PACKAGE)
    assert "plain_dit" in run_with(tmp_path, USE).stdout


BROKEN = """
from headway.errors import PluginError
from headway.plugins import families, families_with, family_hook, register_families
from transformers import AutoConfig

register_families()
register_families()
assert AutoConfig.for_model("qwen3").model_type == "qwen3" and AutoConfig.for_model("plain_dit")
assert {"plain_dit", "its_parts"} <= {name for family in families() for name in family.model_types}
assert family_hook(AutoConfig.for_model("qwen3"), "inputs") is None
assert family_hook(AutoConfig.for_model("plain_dit"), "inputs")
try:
    family_hook(type("Config", (), {"model_type": "its_parts"})(), "inputs")
except PluginError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_broken_distribution_is_named_and_the_models_of_others_go_on(tmp_path):
    install(tmp_path, "plain_dit", PACKAGE)
    install(tmp_path, "lacks_module", "import notthere")
    install(tmp_path, "lacks_family", "")
    install(tmp_path, "no_python", "def (")
    install(tmp_path, "its_parts", PACKAGE.replace("plain_dit", "its_parts"), "raise OSError('no such library')")
    install(tmp_path, "its_hook", PACKAGE.replace("plain_dit", "its_hook"), "def register():\n    1 / 0")
    run = run_with(tmp_path, BROKEN)
    for name in ("lacks_module", "lacks_family", "no_python", "its_parts", "its_hook"):
        assert run.stderr.count(f"RuntimeWarning: the plug-in {name} 1.0 (entry point") == 1, run.stderr
    assert "is broken: ModuleNotFoundError: No module named 'notthere'. Install the plug-in again" in run.stderr
    assert "plug-in its_parts 1.0" in run.stdout


@pytest.mark.parametrize("family", families(), ids=lambda family: family.package)
def test_every_hook_of_a_family_is_there(family):
    for name in family.hooks:
        assert family.hook(name) is not None
    assert family in families_with(next(iter(family.hooks)))


def test_what_belongs_to_no_family_has_no_hook():
    assert family_hook(None, "encoder") is None
    assert family_hook(type("Config", (), {"model_type": "qwen3"})(), "encoder") is None


WITHOUT = """
import json, sys
from importlib import metadata

found = metadata.entry_points
metadata.entry_points = lambda **given: () if given.get("group") == "headway.families" else found(**given)
from headway.count.models import load_cost_model
from headway.errors import UnknownModelError
from headway.models.load import load_model_config
from pathlib import Path

Path("config.json").write_text(json.dumps({"model_type": "bagel"}))
for ask, name in ((load_cost_model, "bagel-7b-mot"), (load_model_config, "config.json")):
    try:
        ask(name)
    except UnknownModelError as error:
        print(error)
print([name for name in sys.modules if "bagel" in name])
"""


@pytest.mark.slow
def test_without_the_plugin_a_model_of_its_family_is_refused_with_what_to_install(tmp_path):
    by_name, by_type, modules = run_with(tmp_path, WITHOUT).stdout.splitlines()
    for line in (by_name, by_type):
        assert "named headway-bagel (`pip install ./plugins/headway-bagel`" in line
    assert "config.json is a model of type 'bagel', which neither transformers" in by_type
    assert modules == "[]"


def test_rows_of_preferences_are_the_first_that_a_data_worker_may_import(tmp_path):
    assert run_with(tmp_path, "import headway.objectives.preferences.rows as rows; print(rows.rule_of)").stdout
