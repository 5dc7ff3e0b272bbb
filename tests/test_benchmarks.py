"""The benchmark scripts run, both sides compute the same, and each committed table is the rendering of its record."""

import ast
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headway import Meter
from headway.count import Workload
from headway.count.models import load_cost_model
from headway.devices import Peak
from headway.tracing import trace
from helpers.processes import bare_environment, running

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RECORDS = sorted((BENCHMARKS / "results").glob("*.json"))


def run(script, *arguments, env=None, ends_with=0):
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == ends_with, done.stderr
    return done.stdout


def test_a_script_that_is_imported_leaves_the_modules_of_others_as_they_are():
    """A script that put a cache around a function as it was imported changed what later tests planned."""
    patches = [
        f"{script.name}: {ast.unparse(target)}"
        for script in BENCHMARKS.glob("*.py")
        for statement in ast.parse(script.read_text(encoding="utf-8")).body
        for target in getattr(statement, "targets", ())
        if isinstance(target, ast.Attribute | ast.Subscript)
    ]
    assert patches == []


@pytest.mark.parametrize("path", RECORDS, ids=[path.name for path in RECORDS])
def test_a_committed_table_is_rendered_from_its_record(path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    record = json.loads(path.read_text(encoding="utf-8"))
    script = importlib.import_module(record["what"])
    assert script.render(record) == path.with_suffix(".md").read_text(encoding="utf-8")


def test_the_picture_of_packing_lengths_is_drawn_from_its_record(tmp_path):
    (record,) = (path for path in RECORDS if path.name.startswith("packing_lengths_"))
    run("packing_lengths.py", "--render", record, "--draw", tmp_path / "lengths.svg")
    drawn = (tmp_path / "lengths.svg").read_text(encoding="utf-8")
    assert drawn == (BENCHMARKS.parent / "docs/packing-lengths.svg").read_text(encoding="utf-8")
    runs = json.loads(record.read_text(encoding="utf-8"))["runs"]
    images = [run for run in runs if run["recipe"].startswith("qwen2.5-vl-7b-image") and run["dropped"] <= 0.001]
    best = max(images, key=lambda run: run["best"]["mfu"][1] if run["best"] else 0)
    said = f"best {100 * best['best']['mfu'][1]:.1f} % at {best['tokens_per_pack']:,} tokens"
    assert f">images, qwen2.5-vl-7b-image: MFU [%], predicted, {said}</text>" in drawn
    for words in ("fastest that fits", "recomputing as the recipe", "limit"):
        assert f">{words}</text>" in drawn


# `headway train` is in each; the padded Trainer and group_by_length, which all are compared with, run unasked
ROWS = {
    "text": ["headway", "headway_compiled", "headway_train", "headway_train_compiled", "trainer_flattened", "trl"],
    "images": ["headway", "headway_train"],
    "digits": ["headway", "headway_train"],
    "gemma3": ["headway", "headway_train"],
    "internvl": ["headway_train"],
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mix", ROWS)
def test_the_throughput_benchmark_runs_and_all_sides_agree(tmp_path, mix):
    shape = ("--rounds", 1, "--steps", 2, "--digits-steps", 2, "--warmup", 1, "--threads", 1)
    batches = ("--batch", 2, "--digits-batch", 4, "--families-batch", 2)
    run("throughput.py", "--mix", mix, *shape, *batches, "--only", *ROWS[mix], "--out", tmp_path)
    (path,) = tmp_path.glob("throughput_*.json")
    record = json.loads(path.read_text())
    (measured,) = record["mixes"]
    losses, contenders = measured["first_loss"], measured["contenders"]
    assert {"headway", "headway_train", "trainer"} <= losses.keys()  # that of `headway train` is of a run of its own
    assert list(losses.values()) == pytest.approx([losses["trainer"]] * len(losses), rel=1e-4)
    assert contenders.keys() == {"trainer", "trainer_grouped", *ROWS[mix]}
    rounds = {name: entry["rounds"][0] for name, entry in contenders.items()}
    for name, found in rounds.items():
        assert min(found["wall_s"], found["cpu_s"], found["tokens"], found["flops"]) > 0, name
        if name.startswith("headway"):
            assert contenders[name]["padding_share"] == 0, name
    assert rounds["trainer"]["slots"] >= rounds["trainer"]["tokens"]
    same_samples = {"trainer", "headway", "headway_compiled", "trainer_flattened"} & rounds.keys()
    assert {rounds[name]["tokens"] for name in same_samples} == {rounds["trainer"]["tokens"]}
    assert {rounds[name]["flops"] for name in same_samples} == {rounds["trainer"]["flops"]}
    assert rounds["headway_train"]["recorded_s"] > 0
    if mix == "text":
        assert contenders["trainer_flattened"]["padding_share"] == contenders["trl"]["padding_share"] == 0
        assert path.with_suffix(".md").read_text().count("(dense mask)") == 2


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mix", ["text", "images"])
def test_the_benchmark_of_preferences_trains_the_same_on_both_sides(tmp_path, mix):
    shape = ("--rounds", 1, "--steps", 2, "--batch", 2, "--threads", 1)
    run("preferences.py", "--mix", mix, *shape, "--out", tmp_path)
    (path,) = tmp_path.glob("preferences_*.json")
    (measured,) = json.loads(path.read_text())["mixes"]
    steps = measured["first_steps"]
    theirs = steps["trl"]
    for name in ("headway_train", "headway_train_copies"):
        assert steps[name]["losses"] == pytest.approx(theirs["losses"], abs=4e-3)
        assert steps[name]["log_ps"] == pytest.approx(theirs["log_ps"], rel=1e-4)
    assert theirs["losses"][1] < theirs["losses"][0]  # both have learnt from the same pairs
    contenders = measured["contenders"]
    assert contenders.keys() == {"trl", "trl_reference", "headway_train", "headway_train_copies"}
    assert contenders["headway_train"]["padding_share"] == contenders["headway_train_copies"]["padding_share"] == 0
    for name, entry in contenders.items():
        (found,) = entry["rounds"]
        assert min(found["wall_s"], found["cpu_s"], found["flops"]) > 0, name
        assert 0 < found["pairs"] < measured["num_pairs"], name  # of an epoch, without its first step
    assert "padding" in path.with_suffix(".md").read_text()


def listed_packages(folder):
    """An environment whose processes find the packages that the page on benchmarks lists, and no others."""
    page = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"must have (.*?) with\s+their\s+dependencies", page, flags=re.DOTALL)
    wheels = re.findall(r"([\w-]+)==[\d.]+", page.split("pip download")[1].split("```")[0])
    return bare_environment(folder, {*re.findall(r"`([\w-]+)`", sentence), *wheels})


SMALL = ("--scale", "small", "--warmup", "1", "--packs", "1", "--eager")


def engine_record(folder):
    (path,) = folder.glob("engine_gpu_*.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def engine_folder(tmp_path_factory):
    folder, packages = tmp_path_factory.mktemp("engine"), tmp_path_factory.mktemp("packages")
    arguments = ("--steps", 1, "--only", *SETUPS, "--profiles", folder / "profiles", "--out", folder)
    run("engine_gpu.py", *SMALL, *arguments, env=listed_packages(packages))
    return folder


SETUPS = {"text": 81_920, "image": 61_440, "video": 51_200, "vqa": 8_192}  # tokens of a pack


def test_the_engine_benchmark_is_run_without_packages_that_its_page_does_not_list(tmp_path):
    names = ("torch", "pydantic", "av", "datasets", "peft", "accelerate", "sklearn")
    code = f"from importlib.util import find_spec; print([name for name in {names} if find_spec(name)])"
    env = listed_packages(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "['torch', 'pydantic']\n"


@pytest.mark.long
@pytest.mark.slow
def test_gpt2_runs_with_one_row_and_with_eight_by_both_attentions(tmp_path):
    env = listed_packages(tmp_path / "packages")
    run("engine_gpu.py", *SMALL, "--steps", 1, "--only", "gpt2", "--out", tmp_path, env=env)
    cases = engine_record(tmp_path)["cases"].values()
    assert [(found["rows"], found["attention"], found["status"]) for found in cases] == [
        (1, "eager", "done"),
        (1, "sdpa", "done"),
        (8, "eager", "done"),
        (8, "sdpa", "done"),
    ]


@pytest.mark.long
@pytest.mark.slow
def test_the_engine_benchmark_counts_each_set_up_on_packs_that_are_full(engine_folder):
    record = engine_record(engine_folder)
    cases = [record["cases"][f"{setup}, torch, eager"] for setup in SETUPS]
    assert [(found["setup"], found["status"]) for found in cases] == [(name, "done") for name in SETUPS]
    for found, length in zip(cases, SETUPS.values(), strict=True):
        assert found["step_s"] * found["tokens_per_s"] == pytest.approx(length // 64)
        assert found["hfu"] > found["mfu"] > 0
        assert found["layers"] == found["of_layers"] == 4
        assert found["memory"]["predicted"]["peak"] > 4 * 4 * found["parameters"]  # weight, gradient, two moments
        assert found["recompilations"] == []
    assert cases[0]["recompute"] == "full,-attention"  # the recipe's own
    assert record["ceiling"]["best_flops_per_s"] >= record["ceiling"]["sustained_flops_per_s"] > 0


@pytest.mark.long
@pytest.mark.slow
def test_the_same_tokens_a_step_run_in_shorter_packs(tmp_path):
    arguments = ("--steps", 1, "--only", "text", "--tokens-per-pack", 20_480, "--accumulation", 4, "--out", tmp_path)
    table = run("engine_gpu.py", *SMALL, *arguments, "--recompute", "fullest", "--separate-updates")
    ((name, found),) = engine_record(tmp_path)["cases"].items()
    assert name == "text, torch, eager, recompute fullest, packs 4 x 20,480, separate updates"
    assert found["step_s"] * found["tokens_per_s"] == pytest.approx(4 * 20_480 // 64)
    assert found["recompute"] == "none"  # of what is small, everything fits
    assert found["hfu"] == found["mfu"] > 0
    assert "| 4 x 320 |" in table


@pytest.mark.long
@pytest.mark.slow
def test_the_command_itself_is_a_row_with_its_feed(tmp_path):
    arguments = ("--steps", 1, "--only", "train", "--tokens-per-pack", 20_480, "--accumulation", 4, "--out", tmp_path)
    table = run("engine_gpu.py", *SMALL, *arguments)
    ((name, found),) = engine_record(tmp_path)["cases"].items()
    assert (name, found["status"]) == ("text, torch, eager, headway train, packs 4 x 20,480", "done")
    assert found["step_s"] * found["tokens_per_s"] == pytest.approx(4 * 20_480 // 64, rel=0.1)  # packs of a feed
    assert "| 4 x 320 |" in table


@pytest.mark.long
@pytest.mark.slow
def test_an_error_becomes_a_row_and_what_is_done_is_not_measured_again(engine_folder):
    done = engine_record(engine_folder)["cases"]
    failed = {}
    for _ in range(2):
        arguments = (*SMALL, "--steps", 1, "--only", "text", "--kernels", "liger", "--out", engine_folder)
        table = run("engine_gpu.py", *arguments, ends_with=1)
        cases, before = engine_record(engine_folder)["cases"], failed
        failed = cases.pop("text, liger, eager")
        assert failed["status"] == "error"
        assert "CUDA" in failed["error"]
        assert f"* text, liger, eager: failed: {failed['error'].partition(chr(10))[0]}" in table
        assert failed["wall_s"] != before.get("wall_s")  # an error is no measurement, so it is tried again
        assert cases == done
    run("engine_gpu.py", *SMALL, "--steps", 1, "--only", "text", "--kernels", "torch", "--out", engine_folder)
    assert engine_record(engine_folder)["cases"] == {**done, "text, liger, eager": failed}


def processes_of(parent):
    """Processes that a benchmark measures in, by id."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def has_ended(process):
    """Whether a process is gone, or a zombie that nobody has asked after."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(is_so, timeout_s=600):
    deadline_s = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return found


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_case_and_a_killed_benchmark_keep_what_they_have(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "engine_gpu.py"), *SMALL, "--only", "gpt2", "--steps", "1000000"]

    def row(name):
        return engine_record(tmp_path)["cases"].get(name, {}) if list(tmp_path.glob("*.json")) else {}

    with running([*command, "--out", tmp_path], stdout=subprocess.DEVNULL) as started:
        wait_until(lambda: row("gpt2 1 eager").get("steps"))
        (child,) = processes_of(started.pid)
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: row("gpt2 1 sdpa").get("steps"))
        killed = row("gpt2 1 eager")
        assert (killed["status"], killed["error"]) == ("error", "its process was ended by SIGKILL")
        assert killed["steps"] >= 1
        assert killed["mfu"] > 0
        (child,) = processes_of(started.pid)
        started.kill()
        started.wait()
    assert row("gpt2 1 sdpa")["status"] == "running"
    assert row("gpt2 1 eager") == killed
    wait_until(lambda: has_ended(child))  # nobody is left to tell


@pytest.fixture
def engine_case(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("engine_case")


@pytest.mark.parametrize(
    ("note", "kernel"),
    [
        ("Attention on CUDA: PyTorch's variable-length FlashAttention-2", "FlashAttention-2"),
        ("Attention on CUDA: PyTorch's variable-length FlashAttention-2; FlashAttention-3 is not", "FlashAttention-2"),
        ("Attention on CUDA: cuDNN's ragged attention (cudnn)", "cuDNN's ragged attention"),
        ("Attention on CUDA: FlashAttention-3 (flash_attn_interface) behind PyTorch's attention", "FlashAttention-3"),
        ("Liger kernels: 57 RMSNorms", "by segment"),
    ],
)
def test_the_kernel_of_attention_is_read_off_the_notes_of_the_run(engine_case, note, kernel):
    table = importlib.import_module("engine_table")
    assert table.attention_kernel({"notes": ["something else", note]}) == kernel


def test_the_fastest_attention_is_that_of_all_layers_of_a_recipe(engine_case):
    fastest = importlib.import_module("attention_gpu").fastest_kernels
    rows = [
        {"name": "vqa, language", "layers": 48, "kernels": {"torch": {"both_s": 0.1}, "cudnn": {"both_s": 0.2}}},
        {"name": "vqa, tower", "layers": 27, "kernels": {"torch": {"both_s": 0.6}, "cudnn": {"both_s": 0.4}}},
        {"name": "text, language", "layers": 28, "kernels": {"torch": {"both_s": 0.3}, "cudnn": {"error": "no"}}},
        {"name": "text, window", "layers": 0, "kernels": {"torch": {"both_s": 0.3}, "cudnn": {"both_s": 0.1}}},
    ]
    assert fastest(rows) == {"text": "torch", "vqa": "cudnn"}
    rows[0]["layers"] = 60
    assert fastest(rows)["vqa"] == "torch"


@pytest.mark.parametrize(("deadline_s", "steps"), [(100.0, 8), (1e9, 30), (39.5, 2), (25.0, None)])
def test_the_engine_benchmark_takes_as_many_steps_as_its_time_allows(engine_case, monkeypatch, deadline_s, steps):
    clock = SimpleNamespace(now_s=0.0)

    def nine_seconds(_number, _pack):
        clock.now_s += 9.0
        return torch.zeros(())

    pretended = SimpleNamespace(monotonic=lambda: clock.now_s, perf_counter=lambda: clock.now_s)
    monkeypatch.setattr(engine_case, "time", pretended)
    told = {}
    progress = engine_case.Progress(engine_case.Case("one", "gpt2", steps=30), deadline_s, told.update)
    peak = Peak("a device", 1e12, "fp32", "made up", "datasheet")
    gpt2 = load_cost_model("gpt2")
    new_meter = partial(Meter, gpt2, peak=peak, clock=lambda: clock.now_s)
    queue = engine_case.OneAhead(torch.device("cpu"))
    arguments = (progress, gpt2, new_meter, [(None, Workload([7]))], nine_seconds, queue)
    if steps is None:
        with pytest.raises(engine_case.OutOfTimeError, match=r"after 2 warm-up steps, the last of 9\.00 s"):
            engine_case.loop(*arguments, most_warmup=8)
        return
    engine_case.loop(*arguments, most_warmup=8)
    assert told["warmup_s"] == [9.0, 9.0]  # the rate has settled
    assert told["steps"] == len(progress.workloads) == steps
    assert told["step_s"] == 9.0
    assert clock.now_s <= deadline_s


@pytest.mark.parametrize(("deadline_s", "steps", "is_profiled"), [(100.0, 4, True), (66.5, 1, True), (65.5, 1, False)])
def test_the_time_of_a_profile_is_set_aside(engine_case, monkeypatch, deadline_s, steps, is_profiled):
    clock, profiled = SimpleNamespace(now_s=0.0), []

    def nine_seconds(_number, _pack):
        clock.now_s += 9.0
        return torch.zeros(())

    def profiling(_meter):
        profiled.append(clock.now_s)
        return nullcontext()

    pretended = SimpleNamespace(monotonic=lambda: clock.now_s, perf_counter=lambda: clock.now_s)
    monkeypatch.setattr(engine_case, "time", pretended)
    progress = engine_case.Progress(engine_case.Case("one", "gpt2", steps=30), deadline_s, lambda _: None)
    peak = Peak("a device", 1e12, "fp32", "made up", "datasheet")
    gpt2 = load_cost_model("gpt2")
    new_meter = partial(Meter, gpt2, peak=peak, clock=lambda: clock.now_s)
    arguments = (progress, gpt2, new_meter, [(None, Workload([7]))], nine_seconds)
    engine_case.loop(*arguments, engine_case.OneAhead(torch.device("cpu")), most_warmup=8, profiling=profiling)
    assert len(progress.workloads) == steps
    assert bool(profiled) == is_profiled
    assert clock.now_s <= deadline_s


@pytest.mark.long
@pytest.mark.slow
def test_the_engine_benchmark_runs_as_many_layers_as_the_plan_fits_into_the_device(engine_case, monkeypatch, tmp_path):
    engine_memory = importlib.import_module("engine_memory")
    setup, packs = engine_case.SETUPS["vqa"], [Workload([8_192], images=[(1, 100, 200)])]
    settings = {"run.dtype": "bfloat16-params", "speed.kernels": "torch", "speed.recompute": "full"}
    total = 141 * 10**9
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total))
    layers = engine_memory.fitting_layers(setup, settings, packs, tmp_path)
    needed = []
    for count in (layers, layers + 1):
        model_config = setup.config(layers=count, is_small=False)
        config = setup.recipe_for(tmp_path, model_config, settings)
        cost_model = trace(engine_memory.without_data(model_config))
        plan = engine_memory.predicted_memory(setup, config, cost_model, count, packs, is_small=False)
        needed.append(plan.peak)
    assert needed[0] <= engine_memory.room_in(total) < needed[1]
    assert layers < setup.layers(is_small=False)


def gpu_all(*arguments, env=None):
    """The command that runs the script's small sizes, and its environment."""
    command = [str(BENCHMARKS / "gpu_all.sh"), "--scale", "small", *map(str, arguments)]
    return command, {**(env or os.environ), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


@pytest.mark.long
@pytest.mark.slow
def test_the_script_of_all_gpu_benchmarks_goes_on_where_it_was(tmp_path):
    out, pieces = tmp_path / "out", tmp_path / "pieces"

    def call(*more, ends_with=(0,)):
        command, env = gpu_all("--out", out, "--pieces", pieces, *more, env=listed_packages(tmp_path / "packages"))
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode in ends_with, done.stdout
        return done.stdout

    # without time nothing begins, which is no success; with some the first part alone
    assert "text: its quick try has not run to the end" in call("--part", "1", "--budget-s", "10", ends_with=(1,))
    assert not list(out.glob("*.json"))
    lease = ["text", "text in 4 packs", "text in 4 packs, memory full", "text in 4 packs, separate updates"]
    lease += ["image", "image in 3 packs"]
    printed, calls = "", 0
    while not (out / "done").exists() or not {*lease} <= {*(out / "done").read_text().splitlines()}:
        printed += call("--part", "1", "--budget-s", "150", ends_with=(0, 1))  # a slow machine needs several calls
        calls += 1
        assert calls < 12, printed
    for name in SETUPS:
        assert printed.count(f"quick try of {name}: as its recipe says") == 1
    cases = engine_record(out)["cases"]
    assert {case["status"] for case in cases.values()} == {"done"}
    assert len([name for name in cases if name.startswith(("text", "image"))]) == len(lease)
    assert list((out / "profiles" / "text-torch-eager").glob("*.json.gz"))
    # the second part begins on a machine that has the pieces alone
    shutil.rmtree(out)
    out.mkdir()
    joined = b"".join(path.read_bytes() for path in sorted(pieces.glob("gpu.tar.gz.*")))
    with tarfile.open(fileobj=io.BytesIO(joined)) as archive:
        archive.extractall(out, filter="data")
    assert engine_record(out)["cases"] == cases
    printed = call("--part", "1", "--budget-s", "80", ends_with=(0, 1))
    assert "quick try of" not in printed
    assert "text: done before" in printed
    assert engine_record(out)["cases"].items() >= cases.items()
    # the report reads the pieces, and a profile of each case that has one
    run("gpu_report.py", pieces, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<h3>Where a step&#39;s time goes") >= 2
    assert "small sizes" in page.lower()


@pytest.mark.long
@pytest.mark.slow
def test_the_script_of_all_gpu_benchmarks_leaves_its_results_when_it_is_ended(tmp_path):
    command, env = gpu_all("--part", "1", "--out", tmp_path / "out", "--pieces", tmp_path / "pieces")
    with running(command, stdout=subprocess.DEVNULL, env=env) as started:
        wait_until((tmp_path / "out" / "smoke_text.log").exists)
        started.terminate()
        assert started.wait(60) == 143
        assert (tmp_path / "pieces" / "gpu.tar.gz.00").stat().st_size > 0
        wait_until(lambda: not session_of(started.pid))


def session_of(leader):
    """Processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [folder.name] if int(session) == leader and state != "Z" else []
    return found


def test_the_script_of_all_gpu_benchmarks_says_what_it_takes(tmp_path):
    command = [str(BENCHMARKS / "gpu_all.sh"), "--part", "5", "--out", str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--part 1..4 --out DIR" in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.long
@pytest.mark.slow
def test_the_page_of_a_gpu_shows_a_profile_by_line(engine_folder, tmp_path):
    run("gpu_report.py", engine_folder, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<h3>Where a step&#39;s time goes") == page.count("of 1 profiled steps") == len(SETUPS)
    assert "What to mend first" in page
    assert "no profile is here" not in page
    assert "Small sizes: a smoke test" in page
    assert "not measured" not in page


@pytest.mark.slow
def test_the_page_of_a_gpu_is_made_of_the_committed_records_without_profiles(tmp_path):
    run("gpu_report.py", "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h3>Where a step&#39;s time goes" not in page
    (record,) = (json.loads(path.read_text()) for path in RECORDS if path.name.startswith("engine_gpu_"))
    for name, case in record["cases"].items():
        assert f"{name}: no profile is here" in page or f"{name[0].upper()}{name[1:]}: no profile is here" in page
        assert f"{100 * case['mfu']:.1f} %" in page
        assert f"{case['tokens_per_s']:,.0f}" in page
    # what the plan foretells of each stands there line by line, and attention's kernels
    assert page.count(">language.head</td>") == len(record["cases"])
    assert "in one segment" in page
    assert re.search(r"<dt>video</dt>\s*<dd[^>]*>not measured", page)


@pytest.mark.long
@pytest.mark.slow
def test_peers_start_from_the_same_weights_and_learn_the_same_packs(tmp_path):
    """Of four engines three are others': their first losses are one number, in one pack and in four."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(BENCHMARKS / "flash_attn_wheel")])}
    table = run("peers.py", "--scale", "small", "--steps", 1, "--rounds", 1, "--out", tmp_path, env=env)
    (path,) = tmp_path.glob("peers_*.json")
    runs = json.loads(path.read_text())["runs"]
    assert len(runs) == 12
    assert {found["status"] for found in runs.values()} == {"done"}
    for packs in (1, 4):
        losses = {name: found["first_loss"] for name, found in runs.items() if found["way"]["packs"] == packs}
        assert {name.partition(",")[0] for name in losses} == {"trainer", "trl", "torchtitan", "headway"}
        assert [*losses.values()] == pytest.approx([losses[next(iter(losses))]] * len(losses), rel=1e-5)
    assert len({round(found["flops_per_step"]) for found in runs.values() if found["way"]["packs"] == 1}) == 1
    assert table.count("best of three") == 4


def test_a_side_that_was_not_measured_or_learns_other_things_ends_with_1(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    peers = importlib.import_module("peers")
    runs = {side: {"side": side, "way": {"packs": 1}, "first_loss": 5.0, "mfu": 0.5} for side in peers.SIDES}
    assert peers.why_not({"runs": runs}, [*peers.SIDES]) is None
    runs["trl"]["first_loss"] = 5.06
    assert "first losses of steps of 1 packs differ" in peers.why_not({"runs": runs}, [*peers.SIDES])
    del runs["torchtitan"]["mfu"]
    assert "torchtitan was not measured" in peers.why_not({"runs": runs}, [*peers.SIDES])


@pytest.fixture
def flash_attn(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "flash_attn_wheel"))
    yield importlib.import_module("flash_attn")
    for name in ("flash_attn", "flash_attn.bert_padding"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (False, (-1, -1)), (True, (3, 0)), (False, (2, 1))])
def test_the_small_wheel_attends_as_pytorch_does_behind_a_mask(flash_attn, causal, window):
    lengths, heads, kept, size = [5, 1, 9], 4, 2, 8
    total = sum(lengths)
    q, k, v = (torch.randn(total, n, size, requires_grad=True) for n in (heads, kept, kept))
    starts = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_func(q, k, v, starts, starts, 9, 9, causal=causal, window_size=window)
    of_segment = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    behind = torch.arange(total)[:, None] - torch.arange(total)
    mask = of_segment[:, None] == of_segment
    mask &= (behind >= 0) if causal else behind >= -(window[1] if window[1] >= 0 else total)
    mask &= behind <= (window[0] if window[0] >= 0 else total)
    rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)[0].transpose(
        0, 1
    )
    torch.testing.assert_close(out, expected)
    equal_rows = flash_attn.flash_attn_func(*(x[:14].unflatten(0, (2, 7)) for x in (q, k, v)), causal=causal)
    assert equal_rows.shape == (2, 7, heads, size)
    with pytest.raises(ValueError, match=r"dropout_p=0.1"):
        flash_attn.flash_attn_varlen_func(q, k, v, starts, starts, 9, 9, 0.1)
    padding = importlib.import_module("flash_attn.bert_padding")
    shown = torch.tensor([[1, 1, 0], [1, 1, 1]])
    tokens, places, ends, longest, _ = padding.unpad_input(torch.arange(12.0).reshape(2, 3, 2), shown)
    assert (ends.tolist(), longest) == ([0, 2, 5], 3)
    again = padding.pad_input(tokens, places, 2, 3)
    assert torch.equal(again, torch.arange(12.0).reshape(2, 3, 2) * shown[..., None])


@pytest.mark.slow
def test_transformers_takes_the_small_wheel_for_the_distribution(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    subprocess.run([*command, str(BENCHMARKS / "flash_attn_wheel")], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("flash_attn-*.whl")
    assert wheel.stat().st_size < 10_000
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    code = (
        "import transformers.utils.import_utils as t; t.is_torch_cuda_available = lambda: True\n"
        "from transformers.modeling_flash_attention_utils import _lazy_imports\n"
        "print(t.is_flash_attn_2_available(), [f.__module__ for f in _lazy_imports('flash_attention_2')[:2]])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert done.stdout.splitlines()[-1] == "True ['flash_attn', 'flash_attn']"


@pytest.mark.slow
def test_the_meter_is_held_against_a_stopwatch(tmp_path):
    env = listed_packages(tmp_path / "packages")
    run("meter_truth.py", "--tiny", "--steps", 2, "--rounds", 1, "--out", tmp_path, env=env)
    (path,) = tmp_path.glob("meter_truth_*.json")
    loops = json.loads(path.read_text())["loops"]
    assert loops.keys() == {"long steps", "short steps", "a host that dawdles"}
    # what lies between their readings is small against steps that train; a step left out would halve it
    assert all(0.6 < loop["told_of_true"]["median"] < 1.2 for loop in loops.values())


@pytest.mark.long
@pytest.mark.slow
def test_the_counting_benchmark_runs_and_measures_both_sides(tmp_path):
    run("counting_cost.py", "--out", tmp_path)
    (path,) = tmp_path.glob("counting_cost_*.json")
    us = json.loads(path.read_text())["us"]
    assert all(entry["median"] > 0 for entry in us.values())
    assert us["workload_and_count"]["repeats"] > us["tiny_step_under_flop_counter"]["repeats"] > 0


@pytest.mark.slow
@pytest.mark.long
def test_the_answering_benchmark_runs_and_measures_each_command(tmp_path):
    run("answering.py", "--runs", 1, "--out", tmp_path)
    (path,) = tmp_path.glob("answering_*.json")
    commands = json.loads(path.read_text())["commands"]
    assert len(commands) == 4
    assert all(entry["wall_s"]["median"] > 0 and entry["memory_bytes"] > 10_000_000 for entry in commands)


@pytest.mark.long
@pytest.mark.slow
def test_the_metering_benchmark_times_every_meter(tmp_path):
    run("metering.py", "--rounds", 2, "--steps", 2, "--out", tmp_path)
    (path,) = tmp_path.glob("metering_*.json")
    record = json.loads(path.read_text())
    assert record["idle"]["added_us"].keys() == record["real"]["added_us"].keys()
    # what intercepts every operator costs more where there are operators: the difference is not noise
    counter = "torch FlopCounterMode"
    assert record["real"]["added_us"][counter]["median"] > record["idle"]["added_us"][counter]["median"]


@pytest.mark.long
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
@pytest.mark.long
def test_the_plain_loop_is_metered_eager_and_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "1e15")
    run("plain_loop.py", "--tiny", "--rows", 2, "--tokens", 64, "--steps", 4, "--out", tmp_path)
    (path,) = tmp_path.glob("plain_loop_*.json")
    runs = json.loads(path.read_text())["runs"]
    assert runs["eager"]["headway"]["num_steps"] == 4
    assert runs["eager"]["headway"]["flops"] == runs["compiled"]["headway"]["flops"]


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.slow
def test_the_experts_benchmark_times_implementations_that_agree(tmp_path):
    run("experts.py", "--rounds", 1, "--scale", 16, "--out", tmp_path)
    (path,) = tmp_path.glob("experts_*.json")
    for layer in json.loads(path.read_text())["layers"]:
        assert layer["ms"].keys() == layer["grad_norm"].keys() == {"eager", "grouped_mm", "headway_experts"}
        assert layer["grad_norm"]["headway_experts"] == pytest.approx(layer["grad_norm"]["eager"], rel=1e-4)
