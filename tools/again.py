"""Run pytest, and what failed once more, each test alone: what then passes is flaky, what fails twice has failed.

python -m tools.again -q --numprocesses=4 tests/meter
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MOST_FLAKY = 20
"""Failed tests that are run again; more of them are no accident of time."""


def main(arguments: Sequence[str]) -> int:
    """Run pytest with these arguments, then each test that failed in a process of its own.

    Prints `flaky: NAME` for each test that then passes, `failed twice: NAME` for the others.

    Returns:
        0 where every test passed once; pytest's own status where it did not run to its end, a file of tests could not
        be read or more than `MOST_FLAKY` tests failed; else 1.
    """
    pytest = [sys.executable, "-m", "pytest"]
    with tempfile.TemporaryDirectory() as folder:  # pytest's own list of what failed, with nothing of earlier runs
        status = subprocess.run([*pytest, *arguments, "-o", f"cache_dir={folder}"], check=False).returncode
        list_of_failed = Path(folder, "v", "cache", "lastfailed")
        names = [*json.loads(list_of_failed.read_text(encoding="utf-8"))] if list_of_failed.exists() else []
    if status != 1 or not names or len(names) > MOST_FLAKY or not all("::" in name for name in names):
        return status
    again = {name: subprocess.run([*pytest, "-q", name], check=False).returncode for name in names}
    print(*(f"{'failed twice' if code else 'flaky'}: {name}" for name, code in again.items()), sep="\n", flush=True)
    return int(any(again.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
