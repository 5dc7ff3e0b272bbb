"""Put defects back into a copy of the repository, one at a time; the tests of `make test` must notice each.

    python tools/planted_defects.py           # all of them: some minutes
    python tools/planted_defects.py causal    # those whose name holds a word

Most are defects that this project had, or that the tools it was asked to better have. Each is a small change of one
file; the tests named beside it are run in a temporary copy, as `make test` selects them, and one has to fail.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SELECTED = "not long and (core or not slow and not dist)"  # what `make test` runs


@dataclass(frozen=True)
class Defect:
    """A change that makes the code wrong.

    Attributes:
        name: what is wrong then.
        file: below src/headway.
        right: text of the file, found there once.
        wrong: what stands in its place.
        tests: where the tests are that must notice.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


DEFECTS = (
    Defect(
        "causal attention is billed the full square",
        "count/masks.py",
        "return int((s * (s + 1) // 2).sum())",
        "return int((s * s).sum())",
        ("tests/count/test_masks.py",),
    ),
    Defect(
        "padding is work",
        "count/workload.py",
        "lengths = mask.sum(axis=1)\n",
        "lengths = np.full(len(mask), mask.shape[1])\n",
        ("tests/count/test_workload.py",),
    ),
    Defect(
        "a pack is one long sequence",
        "count/workload.py",
        "lengths = real[1:] - real[:-1]\n",
        "lengths = real[-1:] - real[:1]\n",
        ("tests/count/test_workload.py",),
    ),
    Defect(
        "experts that no token is routed to are billed",
        "tracing/operation.py",
        "self.units = self.forward_flops // (per_row * self.stacked) * picks",
        "self.units = self.forward_flops // per_row",
        ("tests/tracing/test_experts.py",),
    ),
    Defect(
        "gradients of inputs are nobody's",
        "count/rows.py",
        "return self.needs == ALWAYS or bool(self.needs & trained)",
        "return self.needs != ALWAYS and bool(self.needs & trained)",
        ("tests/count/test_cost_model.py",),
    ),
    Defect(
        "a step ends before the device is done with it",
        "meter/pending.py",
        "time.end.seconds_since(self._last_end)",
        "(time.end.host_s - self._last_end.host_s)",
        ("tests/meter/test_device_lag.py",),
    ),
    Defect(
        "the loss of a step is that of each pack for itself",
        "train/loop.py",
        "per=max(1, whole.num_supervised)",
        "per=max(1, int((labels_L >= 0).sum()))",
        ("tests/train/test_loop.py",),
    ),
    Defect(
        "samples of a pack attend to each other",
        "models/segments.py",
        "attend(q_THD, k_TKD, v_TKD, sinks_H, cu_seqlens_N, causal, window, scale)",
        "attend(q_THD, k_TKD, v_TKD, sinks_H, cu_seqlens_N[[0, -1]], causal, window, scale)",
        ("tests/models/test_segments.py", "tests/models/test_packed_equals_unpacked.py"),
    ),
    Defect(
        "a device is found by a part of its name",
        "devices/names.py",
        "if reported.name in device.names]",
        "if any(reported.name in name for name in device.names)]",
        ("tests/devices",),
    ),
    Defect(
        "a damaged checkpoint is opened",
        "train/checkpoint/folder.py",
        "if _sha256(path) != entry.sha256:",
        "if not entry.sha256:",
        ("tests/train/test_checkpoint_manifest.py", "tests/train/test_checkpoint.py"),
    ),
)


def copy_of(folder: Path) -> None:
    """Copy what the tests need into a folder."""
    for name in ("src", "tests", "tools", "docs", "recipes", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "Makefile", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy2(ROOT / name, folder / name)


def tests_fail(folder: Path, tests: tuple[str, ...]) -> tuple[bool, str]:
    """Run tests in a copy; returns whether one failed, and pytest's last line."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "src"),
        "OMP_NUM_THREADS": "1",
        "HEADWAY_TEST_PROFILE": "quick",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "-m", SELECTED, *tests]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines() or [""]
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    return done.returncode == 1, failed or lines[-1]


def main() -> int:
    """Plant each defect in turn and print which test noticed it; 1 if one went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only defects whose names hold one of these")
    words = parser.parse_args().words
    unnoticed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_of(folder)
        for defect in DEFECTS:
            if words and not any(re.search(word, defect.name) for word in words):
                continue
            file = folder / "src" / "headway" / defect.file
            text = file.read_text(encoding="utf-8")
            if text.count(defect.right) != 1:
                raise SystemExit(f"{defect.name}: {defect.file} holds {text.count(defect.right)} times: {defect.right}")
            file.write_text(text.replace(defect.right, defect.wrong), encoding="utf-8")
            noticed, line = tests_fail(folder, defect.tests)
            file.write_text(text, encoding="utf-8")
            unnoticed += not noticed
            print(f"{'noticed' if noticed else 'NOT NOTICED'}: {defect.name}: {line}", flush=True)
    return bool(unnoticed)


if __name__ == "__main__":
    sys.exit(main())
