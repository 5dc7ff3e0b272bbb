"""Several real processes that train together, as torchrun would start them: over gloo, one thread each."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAIN = (sys.executable, "-m", "headway", "train")


def start_processes(
    command: Sequence[object], count: int, *, env: Mapping[str, str] | None = None, stdout=None, stderr=None
) -> list[subprocess.Popen[str]]:
    """Start `count` processes of one group; each finds its place in RANK, LOCAL_RANK and WORLD_SIZE.

    Args:
        command: the program and its arguments, the same for all.
        count: processes of the group; a group of one is a process that torchrun did not start.
        env: environment variables on top of this process's.
        stdout: where each one's output goes, as for `subprocess.Popen`; a sequence has one for each.
        stderr: the same for what they say on stderr.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    shared |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if count > 1:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    started = []
    for rank in range(count):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
        started.append(
            subprocess.Popen(
                [str(part) for part in command],
                env=shared | place | dict(env or {}),
                stdout=stdout[rank] if isinstance(stdout, Sequence) else stdout,
                stderr=stderr[rank] if isinstance(stderr, Sequence) else stderr,
                text=True,
            )
        )
    return started


def run_processes(
    command: Sequence[object],
    count: int,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    check: bool = True,
) -> list[subprocess.CompletedProcess[str]]:
    """Run `count` processes of one group to their end; what each said and how it ended, by rank.

    Args:
        command: the program and its arguments, the same for all.
        count: processes of the group.
        env: environment variables on top of this process's.
        timeout_s: after so long those that still run are killed and the test fails [s].
        check: fail, with what the failing process said, as soon as one ends with another status than 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(count)]
        files = [(out.open("w"), err.open("w")) for out, err in paths]
        running = start_processes(command, count, env=env, stdout=[o for o, _ in files], stderr=[e for _, e in files])
        deadline_s = time.monotonic() + timeout_s
        try:
            while any(process.poll() is None for process in running) and time.monotonic() < deadline_s:
                if check and any(process.returncode for process in running):
                    break  # the others would wait for it
                time.sleep(0.02)
        finally:
            hung = [rank for rank, process in enumerate(running) if process.poll() is None]
            for process in running:
                process.kill()
                process.wait()
            for each in files:
                for file in each:
                    file.close()
        ended = [
            subprocess.CompletedProcess(process.args, process.returncode, out.read_text(), err.read_text())
            for process, (out, err) in zip(running, paths, strict=True)
        ]
    failed = [rank for rank, one in enumerate(ended) if one.returncode and rank not in hung]
    said = "\n".join(f"rank {rank} of {count}: {ended[rank].stdout}{ended[rank].stderr}" for rank in failed or hung)
    if check:
        assert not failed, said
    assert not hung or (check and failed), f"ranks {hung} did not end within {timeout_s} s\n{said}"
    return ended
