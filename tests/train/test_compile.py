"""Runs with compiled and recomputed blocks: the same numbers as without, and nothing compiled twice."""

import pytest

from headway.train.config import parse_config
from headway.train.loop import train
from headway.train.record import read_metrics

pytestmark = pytest.mark.slow  # inductor's C++ compiler takes its time


def steps_of(raw, folder, **speed):
    raw = {**raw, "speed": speed, "run": {**raw["run"], "folder": str(folder)}}
    summary = train(parse_config(raw))
    return [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "step"], summary


def test_compiled_and_recomputed_runs_take_the_same_steps(raw, tmp_path):
    raw["optim"]["steps"] = 20
    plain, _ = steps_of(raw, tmp_path / "plain")
    recomputed, _ = steps_of(raw, tmp_path / "recomputed", recompute="full")
    compiled, summary = steps_of(raw, tmp_path / "compiled", compile=True, recompiles="error")
    both, _ = steps_of(raw, tmp_path / "both", compile=True, recompiles="error", recompute="full")
    for run in (recomputed, compiled, both):
        for mine, theirs in zip(run, plain, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
            assert mine["flops"]["total"] == theirs["flops"]["total"]
    assert all(step["flops"]["recompute"] == 0 for step in plain + compiled)
    assert all(step["flops"]["recompute"] > 0 and step["hfu"] > step["mfu"] for step in recomputed + both)
    assert [step["step"] for step in compiled if step["compiled"]] == [1]
    assert summary.utilisation.num_steps == 19


def test_no_step_compiles_again_over_200_packs_of_images_of_any_number_and_size(raw, tmp_path):
    raw["optim"]["steps"] = 200
    raw["data"]["tokens_per_pack"] = 96
    steps, _ = steps_of(raw, tmp_path / "run", compile=True, recompiles="error")
    assert [step["step"] for step in steps if step["compiled"]] == [1]
    assert not any(step["recompiles"] for step in steps)
    assert len({step["slots"] for step in steps}) > 20
    assert len({step["flops_by_component"]["vision.attention"] for step in steps}) > 20
