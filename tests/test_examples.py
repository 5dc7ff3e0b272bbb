"""The scripts in examples/ run as they are, on a CPU; those of clusters start what torchrun and headway understand."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser
from typer.main import get_command

from headway import __version__
from headway.cli.app import app

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def run(script, *options):
    environment = os.environ | {"PYTHONWARNINGS": "default", "HEADWAY_PEAK_FLOPS": "1e12", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLES / script), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout


@pytest.mark.long
@pytest.mark.slow
def test_the_benchmark_prints_a_row_per_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the copy bandwidth is measured
    printed = run("benchmark_mfu.py", "--seq-len", "8", "--steps", "2", "--warmup", "1")
    rows = re.findall(r"^batch +(\d+), (\S.*?)  +([\d.]+)% +([\d.]+)% .* ([\d.]+)$", printed, flags=re.MULTILINE)
    assert [row[:2] for row in rows] == [
        ("1", "eager"), ("4", "eager"), ("8", "eager"), ("8", "sdpa"), ("8", "sdpa, checkpointed"),
    ]  # fmt: skip
    # 6 layers of width 512 and a head of 50,257, all trained: 6 FLOPs per weight and token, 12 per feature and pair
    step = 8 * 8 * 6 * (6 * 12 * 512**2 + 50257 * 512) + 8 * 6 * 12 * 512 * 36
    assert float(rows[3][4]) == round(step / 1e12, 3)
    assert float(rows[4][3]) > float(rows[4][2])  # HFU above MFU


@pytest.mark.slow
def test_the_trainers_log_has_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    printed = run(
        "hf_trainer_mfu.py", "--steps", "2", "--logging-steps", "1", "--batch-size", "2", "--gradient-checkpointing",
        "--metric-prefix", "speed",
    )  # fmt: skip
    mfu, hfu = (list(map(float, re.findall(rf"'speed/{name}': '?([\d.e-]+)", printed))) for name in ("mfu", "hfu"))
    assert len(mfu) == 2
    assert all(high > low > 0 for low, high in zip(mfu, hfu, strict=True))


# What each cluster sets in the environment of a node, for the second of two nodes with eight GPUs.
CLUSTERS = {
    "skypilot/train.yaml": (
        lambda document: document["run"],
        {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "8",
            "SKYPILOT_NODE_RANK": "1",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "RECIPE": "recipe.yaml",
            "RUN": "/runs/one",
        },
    ),
    "kubeflow/train.yaml": (
        lambda document: document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["args"][
            0
        ],
        {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "8",
            "PET_NODE_RANK": "1",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29500",
        },
    ),
}


def is_a_start(words):
    """Check a node's command by torchrun's own parser, and what it starts by headway's."""
    options = get_args_parser().parse_args(words[1:])
    assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "8", 1)
    assert (options.master_addr, options.master_port, options.no_python) == ("10.0.0.1", 29500, True)
    assert (options.training_script, options.training_script_args[:2]) == ("headway", ["train", "recipe.yaml"])
    get_command(app).get_command(None, "train").make_context("train", options.training_script_args[1:])


@pytest.mark.parametrize("example", CLUSTERS)
def test_a_node_of_a_cluster_starts_torchrun_with_its_place(tmp_path, example):
    script_of, environment = CLUSTERS[example]
    script = script_of(yaml.safe_load((EXAMPLES / example).read_text(encoding="utf-8")))
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" torchrun "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env=environment | {"PATH": path}, capture_output=True, text=True, check=True
    )
    is_a_start(done.stdout.splitlines())


def test_a_task_of_ray_starts_torchrun_with_its_place():
    torchrun = runpy.run_path(str(EXAMPLES / "ray/train.py"))["torchrun"]
    is_a_start(torchrun(1, 2, 8, "10.0.0.1", ["recipe.yaml", "--set", "run.folder=/runs/one"]))


def test_shell_scripts_are_whole():
    for script in (*EXAMPLES.glob("*/*.sh"), ROOT / ".ci/run"):
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_workflows_run_what_is_there_and_hooks_are_those_of_the_pinned_versions():
    files = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / ".github").glob("*/*.yml")}
    steps = [step.get("run", "") for name in ("ci.yml", "nightly.yml") for step in job(files[name])["steps"]]
    assert [step for step in steps if step] == [".ci/run", "make test-long"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert re.search(r"^test-long:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert f"ruff=={hooks['rev'].removeprefix('v')}" in (ROOT / "constraints.txt").read_text().splitlines()
    for form in ("bug.yml", "number.yml"):
        assert {"name", "description", "body"} <= files[form].keys()
        identifiers = [field["id"] for field in files[form]["body"]]
        assert len(set(identifiers)) == len(identifiers)


def job(workflow):
    (only,) = workflow["jobs"].values()
    return only


def test_what_is_cited_is_the_version_that_is_here():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()  # what the format's schema 1.2.0 requires
    assert str(cited["version"]) == __version__


def test_the_container_is_built_of_files_and_extras_that_are_there():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.search(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)[1].split(",")) <= extras.keys()
    for body in re.findall(r"^RUN (.*?[^\\])$", text, re.MULTILINE | re.DOTALL):
        subprocess.run(["bash", "-n", "-c", body], check=True)
