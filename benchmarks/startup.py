"""How long commands take to start: `--help`, `flops`, a second `index`, a path that is wrong, a Hub id without network.

    .venv/bin/python benchmarks/startup.py          # half a minute; run on a quiet machine

Each command is a process of its own, from its start to its end, once to warm the disk's cache and then several times.
CPU time is the process's own, so that neighbours on the machine count less. Prints the table; writes nothing.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import headway.quiet  # noqa: F401 - before any library that complains as it is imported
from record import markdown_table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="processes of each command")
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        data, model = prepare(Path(folder))
        os.environ["HEADWAY_CACHE"] = f"{folder}/cache"
        commands = {
            "headway --help": ["--help"],
            "headway flops llama-3.1-8b --segments 8192": ["flops", "llama-3.1-8b", "--segments", "8192"],
            "headway index, first": ["index", data, "--model", model, "--refresh"],
            "headway index, again": ["index", data, "--model", model],
            "headway index, no such folder": ["index", data, "--model", "./nothing"],
            "headway index, a Hub id without network": ["index", data, "--model", "nobody/no-such-model"],
            "headway train, no such data": ["train", f"{folder}/wrong.yaml"],
        }
        rows = [[name, *measured(command, repeats)] for name, command in commands.items()]
    print(markdown_table(["command", "wall time", "CPU time", "exit code"], rows))


def prepare(folder: Path) -> tuple[str, str]:
    """Write three hundred chats, a tokenizer that learned from them, and a recipe whose data are not there."""
    from headway.synthetic.processor import write_processor

    rows = [{"question": "Which digits do you see?", "answer": f"It is {n}."} for n in range(300)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    model = write_processor(folder / "model", ["Which digits do you see?"], patch_size=8)
    recipe = {"model": {"path": str(model)}, "run": {"folder": f"{folder}/run"}, "optim": {"steps": 1, "lr": 1e-3}}
    recipe["data"] = {"train": [{"path": "nothing.jsonl"}], "tokens_per_pack": 64}
    (folder / "wrong.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    return str(folder / "chats.jsonl"), str(model)


def measured(command: list[str], repeats: int) -> list[str]:
    """Median wall and CPU time of a command, and its exit code."""
    walls, cpus, code = [], [], 0
    for _ in range(1 + (0 if "--refresh" in command else repeats)):  # a first index takes long, and once will do
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "headway", *command], capture_output=True, check=False)
        walls.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        code = done.returncode
    return [f"{statistics.median(walls[1:] or walls):.2f} s", f"{statistics.median(cpus[1:] or cpus):.2f} s", str(code)]


if __name__ == "__main__":
    main()
