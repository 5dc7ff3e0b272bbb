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
SELECTED = "not slow and not long"  # what `make test` runs


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
        "count/integers.py",
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
        "train/objective.py",
        "per=step.share.divisor",
        "per=max(1, sum(batch.supervised))",
        ("tests/train/test_loop.py",),
    ),
    Defect(
        "samples of a pack attend to each other",
        "models/attention/segments.py",
        "attend(q_THD, k_TKD, v_TKD, sinks_H, cu_seqlens_N, causal, window, scale)",
        "attend(q_THD, k_TKD, v_TKD, sinks_H, cu_seqlens_N[[0, -1]], causal, window, scale)",
        ("tests/models/attention/test_segments.py", "tests/models/test_packed_equals_unpacked.py"),
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
        "checkpoint/folder.py",
        "if _sha256(path) != entry.sha256:",
        "if not entry.sha256:",
        ("tests/checkpoint/test_manifest.py", "tests/checkpoint/test_checkpoint.py"),
    ),
    Defect(
        "a rank without samples is the slowest",
        "log/records.py",
        "ratio(n, busy_s) if n else None for n, busy_s",
        "ratio(n, busy_s) for n, busy_s",
        ("tests/meter/test_window.py",),
    ),
    Defect(
        "a step with nothing to learn from updates the weights",
        "optim/optimizer.py",
        "    if not learns:\n",
        "    if not learns and skips:\n",
        (
            "tests/train/test_laws_ranks.py",
            "tests/optim",
        ),
    ),
    Defect(
        "a turn that says not to be learnt is learnt",
        "data/sources/marks.py",
        "        learnt = learnt and says_learnt",
        "        learnt = learnt or says_learnt",
        ("tests/data/sources/test_marks.py",),
    ),
    Defect(
        "answers that KTO is to avoid are learnt",
        "data/sources/marks.py",
        'GRADES = ("label", "kto_tag")',
        'GRADES = ("label",)',
        ("tests/data/sources/test_preferences.py",),
    ),
    Defect(
        "an answer ends without a token that stops generation",
        "data/stops.py",
        "        return _begins(followed, special)\n",
        "        return None\n",
        ("tests/data/test_chat.py",),
    ),
    Defect(
        "all answers of a chat are learnt in its last view",
        "data/chat.py",
        "if views and views[-1].text.startswith(text[: spans[-1][1]]):",
        "if views:",
        ("tests/data/test_chat.py",),
    ),
    Defect(
        "pieces of which nothing is learnt are packed",
        "packing/pieces.py",
        "    row, start, stop = row[learns], start[learns], stop[learns]\n",
        "",
        (
            "tests/packing/test_pieces.py",
            "tests/data/feed/test_overlong.py",
        ),
    ),
    Defect(
        "a marker without its picture is a word",
        "data/sources/references.py",
        "has_columns if members is None else {*KINDS}",
        "{kind for kind in has_columns if self._column(kind, fields)}",
        ("tests/data/sources/test_schemas.py",),
    ),
    Defect(
        "of two layouts that fit the first is taken",
        "data/sources/layouts.py",
        "    if len(layouts) != 1:",
        "    if not layouts:",
        ("tests/data/sources/test_schemas.py",),
    ),
    Defect(
        "a mark whose meaning is not plain is passed over",
        "data/sources/marks.py",
        '        if value in (None, "", [], {}):',
        '        if not sense or value in (None, "", [], {}):',
        ("tests/data/sources/test_marks.py",),
    ),
    Defect(
        "an export does not stop where answers were learnt to end",
        "data/stops.py",
        "ids += sorted(stop_ids - {*ids})",
        "ids += sorted(set() - stop_ids)",
        (
            "tests/checkpoint/test_export_stops.py",
            "tests/checkpoint/test_export.py",
        ),
    ),
    Defect(
        "backward starts from one of several results",
        "tracing/results.py",
        "    if not losses:\n        return tensors\n",
        "    if not losses:\n        return tensors[:1]\n",
        ("tests/tracing/test_results.py",),
    ),
    Defect(
        "folded heads are billed again",
        "tracing/record.py",
        "return int(pairs[..., 0].sum()), rows[-1],",
        "return int(pairs[..., 0].sum()) * math.prod(rows[:-1]), rows[-1],",
        ("tests/tracing/test_own_modules.py",),
    ),
    Defect(
        "a float mask of ones has no data",
        "tracing/arguments.py",
        "if bool(shown.any()) and bool((zero | shown).all()):",
        "if bool(shown.any()) and bool(zero.any()) and bool((zero | shown).all()):",
        ("tests/tracing",),
    ),
    Defect(
        "data of the same sizes and other content go on",
        "data/sources/identity.py",
        "same = old.sha256 == new.sha256",
        "same = len(old.sha256) == len(new.sha256)",
        (
            "tests/data/sources/test_identity.py",
            "tests/train/test_data_identity.py",
        ),
    ),
    Defect(
        "a check does not compare the order of steps",
        "train/check.py",
        "if chain != steps.chain[step]:",
        "if not chain:",
        ("tests/train/test_check.py",),
    ),
    Defect(
        "SIGUSR1 ends a run without a checkpoint",
        "train/watch.py",
        '    int(signal.SIGUSR1): "SIGUSR1",\n',
        "",
        ("tests/train/test_loop.py",),
    ),
    Defect(
        "an export that a kill cut off stays",
        "checkpoint/folder.py",
        'root.glob(".step-*")',
        'root.glob(".step-*") if root.name == "checkpoints" else []',
        ("tests/train/test_salvage.py",),
    ),
    Defect(
        "workers import from the current folder",
        "data/pool.py",
        "    with current_folder_kept_out():\n",
        "    if True:\n",
        (
            "tests/test_safe_path.py",
            "tests/data/test_pool.py",
        ),
    ),
    Defect(
        "an output that is a device is renamed over",
        "files.py",
        "    if not S_ISREG(status.st_mode):\n        _write_into",
        "    if S_ISDIR(status.st_mode):\n        _write_into",
        ("tests/test_files.py",),
    ),
    Defect(
        "a run whose data have ended fails at each restart",
        "train/loop.py",
        "kind = RunCompleteError if run.checkpoint else TrainingError",
        "kind = TrainingError",
        ("tests/train/test_epochs.py",),
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
    return done.returncode == 1 or done.returncode < 0, failed or lines[-1]  # a signal may end pytest as well


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
