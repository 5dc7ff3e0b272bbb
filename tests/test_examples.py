"""The scripts in examples/ run as they are, on a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script, *options):
    environment = os.environ | {"PYTHONWARNINGS": "default", "HEADWAY_PEAK_FLOPS": "1e12", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLES / script), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout


@pytest.mark.long
@pytest.mark.slow
def test_the_benchmark_prints_a_row_per_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the copy bandwidth is measured
    printed = run("benchmark_mfu.py", "--seq-len", "8", "--steps", "2", "--warmup", "1")
    rows = re.findall(r"^batch +(\d+), (\S.*?)  +([\d.]+)% +([\d.]+)% .* ([\d.]+)$", printed, flags=re.MULTILINE)
    assert [row[:2] for row in rows] == [
        ("1", "eager"), ("4", "eager"), ("8", "eager"), ("8", "sdpa"), ("8", "sdpa, checkpointed"),
    ]  # fmt: skip
    # 6 layers of width 512 and a head of 50,257, all trained: 6 FLOPs per weight and token, 12 per feature and pair
    step = 8 * 8 * 6 * (6 * 12 * 512**2 + 50257 * 512) + 8 * 6 * 12 * 512 * 36
    assert float(rows[3][4]) == round(step / 1e12, 3)
    assert float(rows[4][3]) > float(rows[4][2])  # HFU above MFU


@pytest.mark.slow
def test_the_trainers_log_has_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    printed = run(
        "hf_trainer_mfu.py", "--steps", "2", "--logging-steps", "1", "--batch-size", "2", "--gradient-checkpointing",
        "--metric-prefix", "speed",
    )  # fmt: skip
    mfu, hfu = (list(map(float, re.findall(rf"'speed/{name}': '?([\d.e-]+)", printed))) for name in ("mfu", "hfu"))
    assert len(mfu) == 2
    assert all(high > low > 0 for low, high in zip(mfu, hfu, strict=True))
