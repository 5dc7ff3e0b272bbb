"""Run pytest, and what failed once more, each test alone: what then passes is flaky, what fails twice has failed.

python -m tools.again --minutes=50 -q --numprocesses=4 tests/meter
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

MOST_FLAKY = 20
"""Failed tests that are run again; more of them are no accident of time."""
CLOSING_S = 60.0
"""Time that an interrupted pytest has for its closing lines [s]."""


def main(arguments: Sequence[str]) -> int:
    """Run pytest with these arguments, then each test that failed in a process of its own.

    Prints `flaky: NAME` for each test that then passes, `failed twice: NAME` for the others. `--minutes=N` interrupts
    pytest after so long, so that it prints what it knows; the other arguments are pytest's.

    Returns:
        0 where every test passed once; pytest's own status where it did not run to its end, a file of tests could not
        be read or more than `MOST_FLAKY` tests failed; else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.again", allow_abbrev=False, add_help=False)
    parser.add_argument("--minutes", type=float, default=math.inf)
    options, rest = parser.parse_known_args(arguments)
    end_s = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:  # pytest's own list of what failed, with nothing of earlier runs
        status = _run_pytest([*rest, "-o", f"cache_dir={folder}"], end_s)
        list_of_failed = Path(folder, "v", "cache", "lastfailed")
        names = [*json.loads(list_of_failed.read_text(encoding="utf-8"))] if list_of_failed.exists() else []
    if status != 1 or not names or len(names) > MOST_FLAKY or not all("::" in name for name in names):
        return status
    again = {name: _run_pytest(["-q", name], end_s) for name in names}
    print(*(f"{'failed twice' if code else 'flaky'}: {name}" for name, code in again.items()), sep="\n", flush=True)
    return int(any(again.values()))


def _run_pytest(arguments: Sequence[str], end_s: float) -> int:
    """Run pytest to its end, or to a moment of the monotonic clock [s]: then as Ctrl-C ends it; its status."""
    run = f"HEADWAY_TEST_RUN={uuid.uuid4()}"
    environment = os.environ | dict([run.split("=")])
    with subprocess.Popen([sys.executable, "-m", "pytest", *arguments], env=environment) as process:
        try:
            process.wait(None if math.isinf(end_s) else max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            print("The time for the tests has passed: pytest is interrupted.", flush=True)
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(CLOSING_S)
            process.kill()
    kill_orphans(run)
    return process.returncode


def kill_orphans(variable: str) -> None:
    """Kill processes with a variable in their environment, NAME=VALUE, that have no parent left below this process."""
    here = psutil.Process()
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            is_of_tests = variable.encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
            if is_of_tests and here not in (process, *process.parents()):
                process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
