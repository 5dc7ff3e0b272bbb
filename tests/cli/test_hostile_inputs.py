"""No input ends a command in a traceback: whatever a file holds, a command gives a result or one paragraph."""

import json
import os
import random
import shutil

import pytest
import yaml

from helpers.cases import damaged, mutated
from helpers.traces import sidecar, two_kernels_a_step

# Every command that reads something of a stranger's: FILE is a file of theirs, FOLDER has files of those names.
COMMANDS = {
    "explain": "explain FILE", "explain a run": "explain FOLDER", "report": "report FOLDER -o OUT",
    "report of records": "report FILE --md", "audit": "audit FILE --model qwen3-8b", "audit a run": "audit FOLDER",
    "goodput": "goodput FOLDER", "goodput of a ledger": "goodput FILE", "check": "check FOLDER",
    "flops": "flops FILE --segments 8", "flops of a folder": "flops FOLDER --segments 8",
    "compare": "compare FOLDER --segments 8 --device H100 --step-time 1", "verify": "verify FOLDER",
    "plan": "plan FILE --device H100", "tune": "tune FILE --device H100", "train": "train FILE --dry-run",
    "look": "look FILE --model FOLDER", "look at a configuration": "look FILE", "index": "index FILE --model FOLDER",
    "pack": "pack FILE --packing-length 64", "init": "init --model FOLDER --data FILE -o OUT",
    "new-model": "new-model OUT --data FILE", "export": "export FOLDER OUT", "chat": "chat FOLDER",
    "generate": "generate FOLDER --prompt x", "generate a file": "generate FOLDER --input FILE",
    "evaluate": "evaluate FOLDER FILE", "draw": "draw FOLDER x -o OUT",
    "import-model": "import-model FOLDER OUT",
}  # fmt: skip
NAMES = (
    "metrics.jsonl", "goodput.jsonl", "run.json", "summary.json", "config.yaml", "config.json", "tokenizer.json",
    "tokenizer_config.json", "model.safetensors", "resumes.jsonl", "llm_config.json", "vit_config.json",
    "adapter_config.json",
)  # fmt: skip
WITHOUT_INPUT = {"ceiling", "config", "demo", "devices", "mfu", "models", "run"}  # run runs its script, as Python would


# What may stand under any name that a command takes.
FILES = {
    "empty": b"", "zeros": b"\0" * 5000, "noise": bytes(range(256)) * 20, "deep": b'{"a":' * 50_000, "null": b"null",
    "digits": b'{"step": ' + b"9" * 5000 + b"}\n", "infinite": b'{"step": 1e999, "wall_s": Infinity, "kind": "step"}\n',
    "cut": b'{"traceEvents": [{"ph": "X", "cat": "kernel"', "gzip": b"\x1f\x8b\x08\x00" + b"x" * 100,
    "utf-16": '{"step": 1}'.encode("utf-16"), "yaml": b"model: !!python/object:os.system [x]\n",
    "layers": b'{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1000000000}',
    "widths": b'{"model_type": "qwen3", "hidden_size": -64, "vocab_size": 100000000000000000000}',
    "anchors": b"a: &a [*a]\n", "list": b"[1, 2]", "text": "a line of text \u202e\n".encode(),
}  # fmt: skip


def write_files(folder):
    """Write each of FILES, a folder, a pipe and a link to itself; gives them by name."""
    paths = {name: folder / name for name in FILES}
    for name, path in paths.items():
        path.write_bytes(FILES[name])
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("link")
    return paths | {name: folder / name for name in ("folder", "pipe", "link", "missing")}


def _walk(run, tmp_path, kinds):
    paths = write_files(tmp_path)
    for kind in kinds:
        folder = tmp_path / f"of {kind}"
        folder.mkdir()
        for name in NAMES:
            if paths[kind].is_file():
                shutil.copy(paths[kind], folder / name)
        for number, command in enumerate(COMMANDS.values()):
            words = {"FILE": paths[kind], "FOLDER": folder, "OUT": tmp_path / f"out {kind} {number}"}
            if kind == "pipe" and "FILE" in command.split():
                continue  # a pipe that a user names is waited for; those of a folder are not: below
            run([words.get(word, word) for word in command.split()])


def test_every_command_that_reads_something_is_tried():
    from typer.main import get_command

    from headway.cli.app import app

    assert {line.split()[0] for line in COMMANDS.values()} == {*get_command(app).list_commands(None)} - WITHOUT_INPUT


@pytest.mark.slow
def test_no_command_ends_in_a_traceback_at_a_file_of_no_kind(run, tmp_path):
    _walk(run, tmp_path, ["empty", "infinite", "deep"])


@pytest.mark.long
@pytest.mark.parametrize("kind", [*FILES, "folder", "link", "missing"])
def test_no_command_ends_in_a_traceback_at_any_file(run, tmp_path, kind):
    _walk(run, tmp_path, [kind])


def test_a_pipe_in_a_folder_is_waited_for_by_no_command(run, tmp_path):
    for name in NAMES:
        os.mkfifo(tmp_path / name)
    for command in ("explain", "report", "goodput", "check", "audit"):
        assert run([command, tmp_path]) in (1, 2)
    assert run(["flops", tmp_path, "--segments", "8"]) in (1, 2)


def _records():
    flops = {"total": 9000, "forward": 3000, "dgrad": 3000, "wgrad": 3000, "recompute": 100}
    for step in range(1, 9):
        yield {
            "schema_version": 1, "kind": "step", "step": step, "num_steps": 1, "wall_s": 0.5, "step_s": 0.4, "mfu": 0.3,
            "data_wait_s": 0.1, "tokens": 100, "slots": 120, "world_size": 2, "flops": flops, "loss": 3.0,
            "away_s": 0.1,
            "flops_by_component": {"language.mlp": 6000, "language.attention": 3000}, "convention": "useful/1",
            "peak_flops_per_s": 1e5, "peak_source": "made up", "flops_per_s_per_device": 1e4, "rank_flops": [1, 2],
            "straggler_share": 0.1, "heaviest_rank": 1, "slowest_rank": 0, "slowest_rank_speed": 0.8, "grad_norm": 1.0,
            "peak_memory_bytes": 10**9, "samples_digest": "a5b26275a337e899", "mfu_of_ceiling": 0.5,
            "sources": {"a": {"loss": 3.0, "tokens": 100}},
        }  # fmt: skip


LEDGER = [
    {"kind": "start", "schema_version": 1, "wall_s": 1.0},
    {"kind": "spans", "wall_s": 9.0, "ns": {"step": 5 * 10**9, "data wait": 10**9}},
    {"kind": "checkpoint", "step": 4},
    {"kind": "resumed", "step": 4},
]


def _hostile_run(folder, dice):
    folder.mkdir(exist_ok=True)
    texts = {
        "metrics.jsonl": "".join(damaged(mutated(record, dice, 0.03), dice) + "\n" for record in _records()),
        "goodput.jsonl": "".join(damaged(mutated(line, dice, 0.05), dice) + "\n" for line in LEDGER),
        "run.json": damaged(mutated({"device": "CPU", "versions": {"headway": "1"}, "git": None}, dice, 0.1), dice),
        "config.yaml": yaml.safe_dump(mutated({"optim": {"steps": 8}, "model": {"path": "x"}}, dice, 0.1)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")


def _fuzz(run, tmp_path, seed, number):
    dice = random.Random(seed)
    trace = two_kernels_a_step()
    content = {"deviceProperties": [{"name": "NVIDIA H100"}], "traceEvents": trace.events, "headway": sidecar()}
    for _ in range(number):
        if dice.random() < 0.4:
            path = tmp_path / "trace.json"
            path.write_text(damaged(mutated(content, dice, 0.01), dice), encoding="utf-8", errors="surrogatepass")
            run(["explain", path, *dice.choice([[], ["--json"], ["--whole"], ["--by", "kernel"]])])
            continue
        _hostile_run(tmp_path / "run", dice)
        command = dice.choice(["explain", "report", "goodput", "check", "audit"])
        run([command, tmp_path / "run", *(["-o", tmp_path / "page.html"] if command == "report" else [])])


def test_no_mutation_of_a_trace_or_run_folder_ends_in_a_traceback(run, tmp_path):
    _fuzz(run, tmp_path, seed=1, number=60)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 10))
def test_no_mutation_of_many_ends_in_a_traceback(run, tmp_path, seed):
    _fuzz(run, tmp_path, seed, number=250)


def test_the_fuzz_reaches_what_it_damages(tmp_path, run):
    """Undamaged, the same files are read to their end."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in _records()))
    (folder / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LEDGER))
    assert [run([command, folder]) for command in ("explain", "goodput", "audit")] == [0, 0, 0]
    assert run(["report", folder, "-o", tmp_path / "page.html"]) == 0
