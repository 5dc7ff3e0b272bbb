"""A run may end and go on with any number of ranks, again and again: each sample is trained once an epoch all the same.

Five runs are restarted four times each, with ranks, layouts, workers and ways to end that are drawn from SEED: a signal
to any of the ranks, a kill of one or all, the end of a shorter run. Twelve packs make a step, which 1, 2, 3 and 4 ranks
share evenly; two steps of the pictures have nothing but broken ones, and the last step has fewer packs than ranks.
"""

import json
import random
import signal

import pytest
import yaml

from headway.config import parse_config
from headway.meter.goodput_report import read_goodput
from headway.train.check import check_run
from headway.train.run import train
from helpers.processes import TRAIN, interrupt, start_processes
from helpers.runs import recorded, trained

SEED, PACKS, EPOCHS, RESTARTS = 30, 12, 2, 4
PARTS = {"first": PACKS, "broken": PACKS, "rest": 10 * PACKS + 1}  # stages of the pictures [samples]
LAYOUTS = {
    1: [{}],
    2: [{}, {"replicate": 2, "shard": 1}, {"sequence": 2}],
    3: [{}, {"replicate": 3, "shard": 1}],
    4: [{}, {"replicate": 2, "shard": 2}, {"sequence": 2}],
}
WAYS = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGKILL of one", "SIGKILL of all", "end")
STREAM = {"lanes": PACKS, "shuffle": 1, "open_packs": 1}
RUNS = {
    "text, indexed": ("text", None, {}),
    "text, streamed, 8-bit": ("text", STREAM, {"state": "8bit"}),
    "pictures, indexed, 8-bit": ("pictures", None, {"state": "8bit", "ema": {"decay": 0.9}}),
    "pictures, streamed": ("pictures", STREAM, {}),
    "pictures, indexed, Muon": ("pictures", None, {"name": "muon"}),
}
pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def rows(digits, tmp_path_factory):
    """Chats about a picture each, of which a stage's are broken behind their header; and chats without pictures."""
    folder, texts = tmp_path_factory.mktemp("rows"), []
    lines = iter((digits / "data/one_digit.jsonl").read_text().splitlines())
    for name, count in PARTS.items():
        pictures = []
        for number in range(count):
            row = json.loads(next(lines))
            picture, words = sorted(row["messages"][0]["content"], key=lambda part: part["type"])
            content = (digits / "data" / picture["image"]).read_bytes()
            picture["image"] = f"{name}-{number}.png"
            (folder / picture["image"]).write_bytes(content[: len(content) // 2] if name == "broken" else content)
            pictures.append(json.dumps(row) + "\n")
            chat = [{"role": "user", "content": words["text"] * (1 + number % 2)}, row["messages"][1]]
            texts.append(json.dumps({"messages": chat}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(pictures))
    (folder / "text.jsonl").write_text("".join(texts))
    return folder


def recipe(digits, rows, folder, name):
    """A sample a pack, and a step's packs in the data's order, so that a stage of broken pictures fills whole steps."""
    kind, stream, optim = RUNS[name]
    stages = [{"path": str(rows / f"{part}.jsonl"), "epochs": EPOCHS} for part in (PARTS if kind != "text" else [kind])]
    data = {"stages": stages, "tokens_per_pack": 40, "samples_per_pack": 1, "strategy": "first_fit", "stream": stream}
    data |= {"workers": 0, "prefetch_bytes": 0, "bad": {"policy": "skip", "fraction": None}}
    return {
        "model": {"path": str(digits / "model"), "random_init": True},
        "data": data,
        "optim": {"lr": 2e-3, "schedule": "constant", "steps": 1000} | optim,  # the data end before
        "checkpoint": {"every": 2, "export": "never"},
        "run": {"folder": str(folder), "device": "cpu", "threads": 1, "watchdog_s": 200.0},
    }


def samples_of(records):
    """The sum of all digests, and all tokens: of the same samples, in whichever steps."""
    return sum(int(r["samples_digest"], 16) for r in records) % 2**64, sum(r["tokens"] for r in records)


def leave(way, running, folder, step, rng):
    """End a run after the record of a step, and wait for all its ranks."""
    if way != "end":
        number = getattr(signal, way.split()[0])
        hits = None if way == "SIGKILL of all" else [rng.choice(running).pid]
        interrupt(running, lambda: recorded(folder) >= step, number, hits)
    codes = [process.wait(timeout=300) for process in running]
    texts = [process.err.read_text() for process in running]
    assert not any("Traceback" in text for text in texts), texts
    assert set(codes) <= ({0} if "KILL" not in way else {1, -signal.SIGKILL}), texts


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in RUNS])
def test_every_sample_is_trained_once_an_epoch_whatever_ranks_go_on(digits, rows, tmp_path, name):
    raw = recipe(digits, rows, tmp_path / "peace", name)
    raw["optim"]["accumulation"] = PACKS
    train(parse_config(raw))
    expected = trained(tmp_path / "peace")

    rng, folder, path, ranks = random.Random(f"{SEED} {name}"), tmp_path / "run", tmp_path / "recipe.yaml", 1
    for restart in range(RESTARTS + 1):
        raw = recipe(digits, rows, folder, name)
        ranks = rng.choice([count for count in LAYOUTS if count != ranks])
        raw["parallel"] = rng.choice(LAYOUTS[ranks])
        raw["optim"]["accumulation"] = PACKS * raw["parallel"].get("sequence", 1) // ranks
        raw["data"]["workers"] = rng.choice([0, 1])
        way, step = rng.choice(WAYS), recorded(folder) + rng.randint(2, 3)
        if restart == RESTARTS:
            way = "end"
        elif way == "end":
            raw["optim"]["steps"] = step
        path.write_text(yaml.safe_dump(raw))
        running = start_processes([*TRAIN, path, "--resume-if-any"], ranks, tmp_path)
        leave(way, running, folder, step, rng)

    records = trained(folder)
    assert samples_of(records) == samples_of(expected)
    assert [r["samples_digest"] for r in records] == [r["samples_digest"] for r in expected]
    # Sums go another way round on other ranks; Muon's products make more of their rounding.
    for record, peaceful in zip(records, expected, strict=True):
        assert (record["loss"] is None) == (peaceful["loss"] is None)
        if record["loss"] is None:
            continue
        assert record["loss"] == pytest.approx(peaceful["loss"], rel=1e-3 if "Muon" in name else 1e-5)
    assert [r["step"] for r in records if r["loss"] is None] == ([3, 4] if "pictures" in name else [])
    check = check_run(folder)
    assert (check.faults, check.proved, check.resumes) == ((), ((1, len(records)),), RESTARTS)
    assert (read_goodput(folder).restarts, read_goodput(folder).warnings) == (RESTARTS, ())
