"""The contract of the engine: however a run is spread over processes, it is the same run.

One process that computes four packs a step is what every case is held against: 5 steps (20 in `make test-long`) with
the same losses and gradient norms to 1e-5 in float32, and the same tokens and logical FLOPs. A new way of running is a
row of `CASES`.
"""

import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from helpers.models import VISION_FAMILIES
from helpers.processes import run_processes
from helpers.runs import IS_LONG, STEPS, configuration, read_metrics, write_data, write_model

RUNS = Path(__file__).with_name("compiled_training.py")
FAMILIES = ("qwen3", "qwen3_vl", "qwen3_vl_moe")
SEEING, MIXTURES = FAMILIES[1:2], FAMILIES[2:]


class Case(NamedTuple):
    """A way of running that must change nothing.

    Attributes:
        name: what the test is called.
        processes: how many train together.
        overrides: sections of the configuration and what is changed in them.
        families: models that it is tried with.
        like: the case that it is held against.
    """

    name: str
    processes: int
    overrides: dict[str, dict[str, Any]]
    families: tuple[str, ...] = FAMILIES
    like: str = "one process"


COMPILED, RECOMPUTED = {"compile": True, "recompiles": "error"}, {"recompute": "full"}
OFFLOADED = {"recompute": "full", "offload": "inputs"}
KEEPING = {"recompute": "full,-attention"}
PRODUCTS_KEPT = {"recompute": "language:full,-attention,-projections"}
FROZEN = {"model": {"freeze": ["vision"]}}
CASES = (
    Case("one process", 1, {}),
    Case("one process, compiled", 1, {"speed": COMPILED}),
    Case("one process, recomputed", 1, {"speed": RECOMPUTED}),
    Case("one process, inputs offloaded", 1, {"speed": OFFLOADED}),
    Case("one process, attention kept", 1, {"speed": KEEPING}),
    Case("one process, products kept", 1, {"speed": PRODUCTS_KEPT}),
    Case("one process, frozen vision", 1, FROZEN, FAMILIES[1:], "one process, frozen vision"),
    Case("fsdp2 x 2", 2, {}),
    Case("fsdp2 x 4", 4, {}),
    Case("fsdp2 x 2, compiled and recomputed", 2, {"speed": COMPILED | RECOMPUTED}, SEEING),
    Case("fsdp2 x 2, inputs offloaded", 2, {"speed": OFFLOADED}, SEEING),
    Case("fsdp2 x 2, compiled, inputs offloaded", 2, {"speed": COMPILED | OFFLOADED}, SEEING),
    Case("fsdp2 x 2, compiled, attention kept", 2, {"speed": COMPILED | KEEPING}, FAMILIES[1:]),
    Case("fsdp2 x 2, compiled, products kept", 2, {"speed": COMPILED | PRODUCTS_KEPT}, FAMILIES[1:]),
    Case("hsdp 2 x 2", 4, {"parallel": {"replicate": 2}}, FAMILIES[1:]),
    Case("replicas x 2", 2, {"parallel": {"replicate": 2, "shard": 1}}),
    Case("weights kept gathered", 2, {"parallel": {"reshard": False}}, SEEING),
    Case("gradients summed once a step", 2, {"parallel": {"reduce": "step"}}, SEEING),
    Case("replicas, summed once a step", 2, {"parallel": {"replicate": 2, "shard": 1, "reduce": "step"}}, FAMILIES[1:]),
    Case("sequence x 2", 2, {"parallel": {"sequence": 2}}),
    Case("sequence x 2, recomputed", 2, {"parallel": {"sequence": 2}, "speed": RECOMPUTED}, SEEING),
    Case("sequence x 2, inputs offloaded", 2, {"parallel": {"sequence": 2}, "speed": OFFLOADED}, SEEING),
    Case("sequence x 2, compiled", 2, {"parallel": {"sequence": 2}, "speed": COMPILED}, SEEING),
    Case("sequence x 2, experts x 2", 2, {"parallel": {"sequence": 2, "expert": 2}}, MIXTURES),
    Case("sequence x 3, heads that do not divide", 3, {"parallel": {"sequence": 3}}, FAMILIES[:2]),
    Case("sequence x 4, more processes than key heads", 4, {"parallel": {"sequence": 4}}),
    Case("fsdp2 x 2, sequence x 2", 4, {"parallel": {"sequence": 2}}),
    Case("frozen vision x 2", 2, FROZEN, FAMILIES[1:], "one process, frozen vision"),
    Case("frozen vision x 4", 4, FROZEN, SEEING, "one process, frozen vision"),
    Case("experts x 2", 2, {"parallel": {"expert": 2}}, MIXTURES),
    Case("experts x 2, compiled", 2, {"parallel": {"expert": 2}, "speed": COMPILED}, MIXTURES),
    Case("experts x 4", 4, {"parallel": {"expert": 4}}, MIXTURES),
    Case("experts x 2, fsdp2 x 2", 4, {"parallel": {"expert": 2}}, MIXTURES),
    Case("experts x 2, replicas x 2", 4, {"parallel": {"expert": 2, "replicate": 2}}, MIXTURES),
)
# What `make test` has time for: packs shared by processes, experts spread, weights sharded, with a
# model that reads text, sees and has experts, so that one run of one process is enough.
CORE = ("sequence x 2, experts x 2", "fsdp2 x 2")
# What continuous integration has time for: each mechanism once, with the model that has most to lose by it.
OFTEN = {
    "one process, compiled": SEEING,
    "one process, attention kept": MIXTURES,
    "fsdp2 x 2": FAMILIES,
    "fsdp2 x 2, compiled, inputs offloaded": SEEING,
    "sequence x 2, inputs offloaded": SEEING,
    "fsdp2 x 2, compiled, attention kept": SEEING,
    "replicas, summed once a step": SEEING,
    "sequence x 2": SEEING,
    "frozen vision x 2": SEEING,
    "experts x 2, compiled": MIXTURES,
    "experts x 2, fsdp2 x 2": MIXTURES,
    "fsdp2 x 2, sequence x 2": SEEING,
}


def marks(case, family):
    """In which of the suites a row runs."""
    if case.name in CORE and family in MIXTURES:
        return ()
    return pytest.mark.slow if family in OFTEN.get(case.name, ()) else pytest.mark.long


ROWS = [
    pytest.param(
        case,
        family,
        id=f"{case.name}-{family}",
        marks=marks(case, family),
    )
    for case in CASES
    for family in case.families
    if case.name != case.like
]


def backend(case):
    """The backend of torch.compile: inductor makes the code that runs, graphs and guards are any backend's."""
    return "inductor" if IS_LONG or case.name == "one process, compiled" else "aot_eager"


@pytest.fixture(scope="module")
def steps_of(tmp_path_factory):
    """Train as a case says, once for each model; its steps as they were recorded."""
    folder = tmp_path_factory.mktemp("engine")
    data = write_data(folder / "data")
    models = {family: write_model(folder / family, family) for family in FAMILIES}

    @functools.cache
    def steps(name, family):
        (case,) = (each for each in CASES if each.name == name)
        run = folder / f"{name}-{family}"
        kind = "vision" if family in VISION_FAMILIES else "text"
        raw = configuration(models[family], data[kind], run, processes=case.processes, overrides=case.overrides)
        path = run.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(raw))
        run_processes([sys.executable, RUNS, backend(case), path], case.processes)
        return [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "step"]

    return steps


@pytest.mark.dist
@pytest.mark.parametrize(("case", "family"), ROWS)
def test_every_way_of_running_is_the_same_run(steps_of, case, family):
    expected, found = steps_of(case.like, family), steps_of(case.name, family)
    assert len(found) == len(expected) == STEPS
    for one, other in zip(expected, found, strict=True):
        for name in ("loss", "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-5), f"{name} of step {one['step']}"
        assert other["world_size"] == case.processes
        assert (other["flops"]["recompute"] > 0) == ("recompute" in case.overrides.get("speed", {}))
        once, again = ({kind: n for kind, n in step["flops"].items() if kind != "recompute"} for step in (one, other))
        assert again == once, f"FLOPs of step {one['step']}"
        for name in ("tokens", "flops_by_component"):
            assert other[name] == one[name], f"{name} of step {one['step']}"
