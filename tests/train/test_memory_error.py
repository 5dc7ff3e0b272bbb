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

from headway.config import parse_config
from headway.config.optim import EmaConfig
from headway.count import Workload, load_cost_model
from headway.models.load import load_model
from headway.optim import WeightAverage
from headway.train import memory
from headway.train.memory import Explanation, asked_bytes, held_bytes
from headway.train.watch import LoopPhase
from helpers.models import tiny_config

SOURCE = Path(__file__).parents[2] / "src"
OUT_OF_MEMORY = """
import resource
from pathlib import Path
from headway.cli.app import main
from headway.devices import cpu_products
from headway.train import loop
cpu_products._ONEDNN_IS_FASTER = False  # oneDNN crashes where there is no room for the code that it makes
calls = []
def before_forward(model, now, original=loop.reduce_gradients):
    calls.append(1)
    if len(calls) == 3:  # from now on there is room for 6 MB more, enough for what a kernel sets up
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 6_000_000,) * 2)
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
        timeout=240,
    )
    said = " ".join(done.stderr.split())
    assert done.returncode == 1, said
    assert "Traceback" not in said
    assert "Error: out of memory on cpu (rank 0) in step 3, forward" in said
    assert re.search(r"when [\d.]+ \w+ more were asked for", said), said
    size = r"[\d.]+ \w+"
    rest = rf"activations and temporaries {size}, the program {size}\."
    assert re.search(rf"In use: {size}: weights {size}, .*optimizer {size}, {rest}", said), said
    assert re.search(r"The pack had [\d,]+ tokens in [\d,]+ segments .* and [\d,]+ vision patches", said), said
    assert "need less memory, the gentlest first: speed.recompute=full,-attention,-projections,-mlp; " in said, said
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


@pytest.fixture
def on_cuda(run, raw, monkeypatch):
    """An explanation of a full fine-tuning on a pretended device of so much memory."""

    def explain(total_bytes, **sections):
        raw["model"] = {"path": "Qwen/Qwen2.5-VL-7B-Instruct"}
        raw["data"]["tokens_per_pack"] = 51_200
        raw["run"]["device"] = "auto"
        config = parse_config({**raw, **sections})
        run.device, run.ranks.size = torch.device("cuda", 0), 1
        run.trained = SimpleNamespace(cost_model=load_cost_model("qwen2.5-vl-7b"))
        monkeypatch.setattr(memory, "used_memory", lambda _: 2**30)
        total = SimpleNamespace(total_memory=total_bytes)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: total)
        place = LoopPhase(3)
        place.at("forward", batch=SimpleNamespace(workload=Workload([50_652], images=[(1, 336, 378)])))
        return Explanation(run, config, place)(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))

    return explain


def test_on_cuda_the_memory_plan_says_what_fits(on_cuda):
    said = on_cuda(int(139.8 * 2**30), speed={"recompute": "full"})
    assert re.search(
        r"The memory plan expects 1[45]\d\.\d GiB of this pack, where 139\.8 GiB are there; it is fullest in \w+, and "
        r"most of that is [a-z]+, [\w' ,]+: [\d.]+ GiB \(then [a-z]+ [\d.]+ GiB, .*\)\. What fits",
        said,
    )
    assert "No snapshot of the allocator could be written: " in said
    size, less = r"(\d+\.\d) GiB", r"[\d.]+ GiB less"
    ways = (
        "optim.state=bfloat16",
        "run.dtype=bfloat16-params",
        "model.lora.rank=16",
        "data.tokens_per_pack=12800",
        "2 devices",
    )
    found = re.search("gentlest first: " + "; ".join(f"{way}: {size}, {less}" for way in ways) + r"\.", said)
    assert found, said
    assert all(float(each) < 0.9 * 139.8 for each in found.groups())


def test_on_cuda_settings_are_named_where_the_pack_fits_by_the_plan(on_cuda):
    said = on_cuda(2**40, speed={"recompute": "full"})
    assert "where 1.0 TiB are there; " in said
    assert re.search(r"What fits, by the plan, the gentlest first: speed\.offload=inputs: [\d.]+ GiB, ", said)


def test_on_cuda_it_is_said_where_no_setting_helps(on_cuda):
    said = on_cuda(2 * 2**30, optim={"steps": 6, "lr": 1e-5, "state": "8bit"})
    assert "and no settings that fit; the least is speed.recompute=full and speed.offload=inputs and " in said


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
    message = Explanation(run, parse_config(raw), LoopPhase(3))(MemoryError())
    assert "These settings need less memory, the gentlest first: speed.loss_chunk=2048; " in message
    assert "more processes, which share the weights (2 now)" in message
    assert not any(setting in message for setting in ("speed.recompute", "optim.state", "run.dtype"))
