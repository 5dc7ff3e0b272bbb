"""Running out of memory is told with what held it, the pack that asked for more, and what would need less."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from headway.count import Workload
from headway.models.load import load_model
from headway.train.config import parse_config
from headway.train.config.optim import EmaConfig
from headway.train.memory_error import asked_bytes, held_bytes, possible_savings
from headway.train.optim import WeightAverage
from headway.train.watch import Place
from tiny_models import tiny_config

SOURCE = Path(__file__).parents[2] / "src"
OUT_OF_MEMORY = """
import resource
from pathlib import Path
from headway.cli.app import main
from headway.train import loop
calls = []
def before_forward(model, now, original=loop.reduce_gradients):
    calls.append(1)
    if len(calls) == 3:  # from now on there is room for 2 MB more
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2_000_000,) * 2)
    original(model, now)
loop.reduce_gradients = before_forward
main()
"""


@pytest.mark.slow
def test_a_process_without_memory_says_what_held_it(raw, digits, tmp_path):
    raw["data"] |= {"train": [{"path": str(digits / "data/one_digit.jsonl")}], "tokens_per_pack": 1500}
    raw["checkpoint"] = {"every": 1, "asynchronous": False}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(raw))
    # Tensors of 64 KiB and more go back to the system when they are freed, so the next step needs room for its own.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)}
    environment["MALLOC_ARENA_MAX"] = "1"  # and no thread has an arena with room in reserve
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY, "train", str(path)],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = " ".join(done.stderr.split())
    assert done.returncode == 1, said
    assert "Traceback" not in said
    assert "Error: out of memory on cpu (rank 0) in step 3, forward and backward" in said
    assert re.search(r"when [\d.]+ \w+ more were asked for", said), said
    size = r"[\d.]+ \w+"
    rest = rf"activations and temporaries {size}, the program {size}\."
    assert re.search(rf"Held were {size}: weights {size}, .*optimizer {size}, {rest}", said), said
    assert re.search(r"The pack had [\d,]+ tokens in [\d,]+ segments .* and [\d,]+ vision patches", said), said
    assert re.search(r"data.tokens_per_pack=750 \(from 1500\): about [\d.]+ \w+ less", said), said
    assert (tmp_path / "run/checkpoints/step-000002/manifest.json").exists()


@pytest.fixture
def run():
    """A model that has taken a step, as the loop holds it."""
    model = load_model(tiny_config("qwen3"), random_init=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None], use_cache=False).loss.backward()
    optimizer.step()
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        ema=WeightAverage(model, EmaConfig(decay=0.5)),
        device=torch.device("cpu"),
        ranks=SimpleNamespace(size=2, rank=0),
        mesh=None,
        precision=SimpleNamespace(compute=torch.float32),
    )


def test_each_part_is_what_its_tensors_take(run):
    held = held_bytes(run)
    numel = sum(parameter.numel() for parameter in run.model.parameters())
    buffers = sum(buffer.nbytes for buffer in run.model.buffers() if buffer.data_ptr())
    shared = 4 * numel  # rotary frequencies and their originals may share storage
    assert shared < held["weights"] <= shared + buffers
    assert held["gradients"] == 4 * numel
    assert held["optimizer"] == 8 * numel + 4 * len(list(run.model.parameters()))  # two moments, and a step each
    assert held["average"] == 4 * numel


def test_estimates_follow_from_what_is_held(run, raw):
    raw["optim"]["ema"] = {"decay": 0.5}
    place = Place(3)
    place.at("forward", batch=SimpleNamespace(workload=Workload([60, 40])))
    held = {"weights": 100, "gradients": 100, "optimizer": 200, "average": 100}
    savings = dict(possible_savings(held, 1_000_000, run, parse_config(raw), place))
    # Of 2 layers, one's activations and the inputs of both: 100 slots x 32 values x 4 bytes each.
    assert savings["speed.recompute=full"] == 500_000 - 2 * 100 * 32 * 4
    assert "speed.loss_chunk=2048" not in savings
    assert savings["data.tokens_per_pack=80 (from 160)"] == 500_000
    assert savings["twice the processes that share the weights (2 train now)"] == 250
    assert savings["optim.state=bfloat16"] == 100
    assert savings["optim.state=8bit"] == 150
    assert savings["no optim.ema"] == 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.81 GiB", 20 * 2**20),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("std::bad_alloc", None),
    ],
)
def test_what_was_asked_for_is_read_from_the_error(text, expected):
    assert asked_bytes(RuntimeError(text)) == expected


def test_only_settings_that_are_not_yet_made_are_named(run, raw):
    raw["speed"] = {"recompute": "full", "loss_chunk": None}
    raw["optim"]["state"] = "8bit"
    place = Place(3)
    place.at("forward", batch=SimpleNamespace(workload=Workload([3000, 48])))
    held = {"weights": 100, "gradients": 100, "optimizer": 200, "average": 0}
    savings = dict(possible_savings(held, 1_000_000, run, parse_config(raw), place))
    # 1,000 of 3,048 slots' logits and gradients would be gone, for 160 words, 4 bytes each.
    assert savings["speed.loss_chunk=2048"] == 1000 * 160 * 8
    assert not {"speed.recompute=full", "optim.state=8bit", "optim.state=bfloat16"} & savings.keys()
