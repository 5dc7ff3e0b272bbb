"""The benchmark scripts run, both sides compute the same, and each committed table is the rendering of its record."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RECORDS = sorted((BENCHMARKS / "results").glob("*.json"))


def run(script, *arguments):
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", RECORDS, ids=[path.name for path in RECORDS])
def test_a_committed_table_is_rendered_from_its_record(path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    record = json.loads(path.read_text(encoding="utf-8"))
    script = importlib.import_module(record["what"])
    assert script.render(record) == path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("mix", ["text", "images", "digits"])
def test_the_throughput_benchmark_runs_and_both_sides_agree(tmp_path, mix):
    shape = (
        "--rounds",
        1,
        "--steps",
        2,
        "--digits-steps",
        2,
        "--warmup",
        1,
        "--batch",
        2,
        "--digits-batch",
        4,
        "--threads",
        1,
    )
    run("throughput.py", "--mix", mix, *shape, "--out", tmp_path)
    (path,) = tmp_path.glob("throughput_*.json")
    (measured,) = json.loads(path.read_text())["mixes"]
    assert measured["first_loss"]["headway"] == pytest.approx(measured["first_loss"]["trainer"], rel=1e-4)
    contenders = measured["contenders"]
    assert contenders["headway"]["padding_share"] == 0
    trainer, ours = (contenders[name]["rounds"][0] for name in ("trainer", "headway"))
    assert trainer["tokens"] == ours["tokens"] > 0  # the same samples
    assert trainer["slots"] >= trainer["tokens"]
    if mix == "text":
        assert measured["first_loss"]["trainer_flattened"] == pytest.approx(measured["first_loss"]["trainer"], rel=1e-4)
        assert contenders["trainer_flattened"]["rounds"][0]["tokens"] == ours["tokens"]
        assert contenders["trainer_flattened"]["padding_share"] == contenders["trl"]["padding_share"] == 0
        assert contenders["trl"]["rounds"][0]["tokens"] > 0


@pytest.mark.slow
def test_the_engine_benchmark_counts_each_set_up_on_packs_that_are_full(tmp_path):
    run("engine_gpu.py", "--scale", "small", "--steps", 1, "--warmup", 1, "--eager", "--out", tmp_path)
    (path,) = tmp_path.glob("engine_gpu_*.json")
    record = json.loads(path.read_text())
    assert [found["setup"] for found in record["runs"]] == ["text", "image", "video", "vqa"]
    for found, length in zip(record["runs"], (81_920, 61_440, 51_200, 8_192), strict=True):
        assert found["step_s"] * found["tokens_per_s"] == pytest.approx(length // 64)
        assert found["hfu"] > found["mfu"] > 0
        assert found["layers"] == found["of_layers"] == 4
    assert [(g["rows"], g["attention"]) for g in record["gpt2"]] == [
        (1, "eager"),
        (1, "sdpa"),
        (8, "eager"),
        (8, "sdpa"),
    ]


@pytest.mark.slow
def test_the_counting_benchmark_runs_and_measures_both_sides(tmp_path):
    run("counting_cost.py", "--out", tmp_path)
    (path,) = tmp_path.glob("counting_cost_*.json")
    us = json.loads(path.read_text())["us"]
    assert all(entry["median"] > 0 for entry in us.values())
    assert us["workload_and_count"]["repeats"] > us["tiny_step_under_flop_counter"]["repeats"] > 0


@pytest.mark.slow
def test_the_answering_benchmark_runs_and_measures_each_command(tmp_path):
    run("answering.py", "--runs", 1, "--out", tmp_path)
    (path,) = tmp_path.glob("answering_*.json")
    commands = json.loads(path.read_text())["commands"]
    assert len(commands) == 4
    assert all(entry["wall_s"]["median"] > 0 and entry["memory_bytes"] > 10_000_000 for entry in commands)


@pytest.mark.slow
def test_the_metering_benchmark_times_every_meter(tmp_path):
    run("metering.py", "--rounds", 2, "--steps", 2, "--out", tmp_path)
    (path,) = tmp_path.glob("metering_*.json")
    record = json.loads(path.read_text())
    assert record["idle"]["added_us"].keys() == record["real"]["added_us"].keys()
    # what intercepts every operator costs more where there are operators: the difference is not noise
    counter = "torch FlopCounterMode"
    assert record["real"]["added_us"][counter]["median"] > record["idle"]["added_us"][counter]["median"]


@pytest.mark.slow
def test_the_packing_benchmark_measures_every_strategy_and_whole_plans(tmp_path):
    run("packing.py", "--ours", "--samples", 4000, "--large", 5000, "--out", tmp_path)
    (path,) = tmp_path.glob("packing_*.json")
    record = json.loads(path.read_text())
    assert [mix["name"] for mix in record["mixes"]] == ["text", "image", "video", "reasoning"]
    for mix in record["mixes"]:
        balanced, next_fit = (mix["contenders"][f"Headway {name}"] for name in ("balanced", "next_fit"))
        assert balanced["balance"] > next_fit["balance"]
    assert all(plan["memory_bytes"] > plan["items_bytes"] > 0 for plan in record["plans"])


@pytest.mark.slow
def test_the_plain_loop_is_metered_eager_and_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "1e15")
    run("plain_loop.py", "--tiny", "--rows", 2, "--tokens", 64, "--steps", 4, "--out", tmp_path)
    (path,) = tmp_path.glob("plain_loop_*.json")
    runs = json.loads(path.read_text())["runs"]
    assert runs["eager"]["headway"]["num_steps"] == 4
    assert runs["eager"]["headway"]["flops"] == runs["compiled"]["headway"]["flops"]


@pytest.mark.slow
def test_the_indexing_benchmark_reads_the_same_tokens_on_both_sides(tmp_path):
    run("indexing.py", "--rows", 60, "--rounds", 1, "--out", tmp_path)
    (path,) = tmp_path.glob("indexing_*.json")
    record = json.loads(path.read_text())
    assert record["text"]["tokens"]["indexed"] == record["text"]["tokens"]["bare"] > 60 * 100
    assert record["images"]["tokens"]["bare"] == 60 * 1000 * 750


@pytest.mark.slow
def test_the_optimizers_benchmark_runs_every_rule(tmp_path):
    run("optimizers.py", "--rounds", 1, "--out", tmp_path)
    (path,) = tmp_path.glob("optimizers_*.json")
    runs = json.loads(path.read_text())["runs"]
    assert {(run["rule"], run["dtype"]) for run in runs} >= {("adamw", "bfloat16"), ("muon", "float32")}
    assert all(0 < run["num_operations"] < 4 * run["num_parameters"] for run in runs)


@pytest.mark.slow
def test_the_experts_benchmark_times_implementations_that_agree(tmp_path):
    run("experts.py", "--rounds", 1, "--scale", 16, "--out", tmp_path)
    (path,) = tmp_path.glob("experts_*.json")
    for layer in json.loads(path.read_text())["layers"]:
        assert layer["ms"].keys() == layer["grad_norm"].keys() == {"eager", "grouped_mm", "headway_experts"}
        assert layer["grad_norm"]["headway_experts"] == pytest.approx(layer["grad_norm"]["eager"], rel=1e-4)
