"""All ranks learn by one configuration, model and data, wherever their copies lie; what differs is named."""

import json
import shutil
import sys

import pytest
import yaml
from safetensors.torch import load_file, save_file

from headway.config import load_config
from headway.models.load import load_model
from headway.models.load import load_model_config as model_config
from headway.train.run import train
from helpers.processes import run_processes
from helpers.runs import read_metrics

# One process of a group that begins one run after the other. The last rank has other settings, and says how each ended.
RUNS = """
import json, os, sys
from pathlib import Path
from headway.config import load_config
from headway.errors import HeadwayError
from headway.train.run import train

is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
for all_have, last_has, variables in json.loads(Path(sys.argv[2]).read_text()):
    before = dict(os.environ)
    os.environ.update(variables if is_last else {})
    try:
        train(load_config(Path(sys.argv[1]), (*all_have, *(last_has if is_last else ()))))
        print("trained")
    except HeadwayError as error:
        print(error.exit_code, error)
    os.environ.update(before)
"""


@pytest.fixture(scope="module")
def copies(digits, tmp_path_factory):
    """A model with weights, chats and a template; and a copy of all of it in which something may be changed."""
    folder = tmp_path_factory.mktemp("copies")
    shutil.copytree(digits / "model", folder / "model")
    model = load_model(model_config(digits / "model"), random_init=True)
    model.save_pretrained(folder / "model")
    shutil.copy(digits / "data/train.jsonl", folder / "train.jsonl")
    shutil.copytree(digits / "data/images", folder / "images")
    raw = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl"), "tokens_per_pack": 160, "workers": 0, "strategy": "best_fit"},
        "optim": {"steps": 2, "lr": 2e-3},
        "checkpoint": {"export": "never"},
        "run": {"folder": str(folder / "run"), "device": "cpu", "auto_profile": False},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(raw))
    return folder


def rotated(path):
    """The same rows, the second half first."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[len(lines) // 2 :] + lines[: len(lines) // 2]))


def permuted(path):
    """Rows of one weight exchanged: the same numbers at other places."""
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    save_file(tensors | {name: tensors[name].flip(0).contiguous()}, path, metadata={"format": "pt"})


def longer(path):
    path.write_text(path.read_text() + "\n")


def differences(copies):
    """Settings of all ranks, those of the last one alone, its variables, and words of the error."""
    settings = [
        ((), "optim.lr=0.1", "optim.lr is 0.002 on ranks 0, 1 and 0.1 on rank 2"),
        ((), "optim.weight_decay=5", "optim.weight_decay is 0.1 on ranks 0, 1 and 5.0 on rank 2"),
        ((), "optim.clip=0.01", "optim.clip"),
        ((), "optim.steps=3", "optim.steps"),
        ((), "optim.schedule=wsd", "optim.schedule"),
        (("optim.accumulation=2",), "optim.accumulation=1", "optim.accumulation"),
        ((), "run.seed=1", "run.seed"),
        ((), "run.dtype=bfloat16-params", "run.dtype"),
        ((), "speed.recompute=full", "speed.recompute"),
        (("preference={}",), "preference.beta=2", "preference.beta is None on ranks 0, 1 and 2.0 on rank 2"),
        (("model.lora={rank: 4}",), "model.lora.rank=8", "model.lora.rank"),
        ((), f"data.eval={copies}/train.jsonl", "data.eval"),
        ((), f"model.chat_template={copies}/model/chat_template.jinja", "model.chat_template is not set on ranks 0, 1"),
    ]
    cases = [(shared, (own,), {}, words) for shared, own, words in settings]
    cases.append(((), (), {"HEADWAY_PEAK_FLOPS": "1e12"}, "HEADWAY_PEAK_FLOPS is 100e9 on ranks 0, 1 and 1e12"))
    # A copy of the model with one file changed.
    changed_files = {"model.safetensors": permuted, "tokenizer.json": longer, "chat_template.jinja": longer}
    for name, change in changed_files.items():
        shutil.copytree(copies / "model", copies / name)
        change(copies / name / name)
        cases.append(((), (f"model.path={copies / name}",), {}, f"{name} of the model folder is SHA-256"))
    # A copy of the data, as training data and as held-out ones.
    for place in ("node", "held-out"):
        shutil.copytree(copies / "images", copies / place / "images")
        shutil.copy(copies / "train.jsonl", copies / place)
    rotated(copies / "held-out/train.jsonl")
    other = f"{copies}/held-out/train.jsonl"
    cases.append(((), (f"data.train={other}",), {}, "file 0 of the source train is train.jsonl"))
    evaluated = ("eval.at_end=true", f"data.eval={copies}/train.jsonl")
    cases.append((evaluated, (f"data.eval={other}",), {}, "file 0 of the source train is train.jsonl"))
    shutil.copytree(copies / "model", copies / "same")
    same = (f"model.path={copies}/same", f"data.train={copies}/node/train.jsonl", "run.threads=1", "data.workers=1")
    return [*cases, ((), same, {}, "")]


@pytest.mark.dist
def test_ranks_that_differ_are_refused_by_what_differs_and_copies_elsewhere_train(copies, tmp_path):
    cases = differences(copies)
    (tmp_path / "runs.json").write_text(json.dumps([case[:3] for case in cases]))
    ended = run_processes([sys.executable, "-c", RUNS, copies / "recipe.yaml", tmp_path / "runs.json"], 3)
    for process in ended:
        lines = process.stdout.splitlines()
        outcomes = [line for line in lines if line.startswith("2 ") or line == "trained"]
        assert len(outcomes) == len(cases), process.stdout
        wanted = [f"2 the ranks of this run would train differently: {words}" for *_, words in cases if words]
        pairs = zip(outcomes, [*wanted, "trained"], strict=True)
        assert not [(outcome, words) for outcome, words in pairs if words not in outcome]
    # What the copies gave is what ranks without copies give.
    train(load_config(copies / "recipe.yaml", (f"run.folder={tmp_path / 'alone'}", "optim.accumulation=3")))
    losses = [[r["loss"] for r in read_metrics(f / "metrics.jsonl")] for f in (copies / "run", tmp_path / "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
