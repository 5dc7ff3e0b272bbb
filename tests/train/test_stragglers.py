"""Two ranks that train together: a slow device and a heavy pack are told apart, though their steps take as long."""

import json
from pathlib import Path

import pytest
import yaml

from helpers.processes import run_processes
from helpers.runs import configuration, read_metrics, write_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]
STEPS = 8
PER_TOKEN_S = 4e-4  # in each of two layers, on a pretended clock: a pack of 170 tokens takes 136 ms


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A model and long and short samples, of which each fills a pack by itself."""
    folder = tmp_path_factory.mktemp("text")
    lines = []
    for number in range(64):
        words = "Which picture is it? " * (24 if number % 2 else 13)
        turns = [{"role": "user", "content": words}, {"role": "assistant", "content": "It is the one."}]
        lines.append(json.dumps({"messages": turns}))
    (folder / "text.jsonl").write_text("\n".join(lines))
    return write_model(folder / "model", "qwen3"), [{"path": str(folder / "text.jsonl"), "name": "text"}]


def train(text, folder, parallel, *seconds):
    """Train on two ranks; returns the records after the first two steps, the steps' walls by rank, and the screen."""
    overrides = {
        "data": {"tokens_per_pack": 176},
        "optim": {"steps": STEPS, "accumulation": 1},
        "parallel": parallel,
        "run": {"log_every": 1},
    }
    raw = configuration(*text, folder / "run", processes=2, overrides=overrides)
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    script = Path(__file__).with_name("uneven_ranks.py")
    first, _ = run_processes(["python", script, folder / "config.yaml", folder, *seconds], 2)
    walls = [json.loads((folder / f"walls-{rank}.json").read_text()) for rank in range(2)]
    records = [one for one in read_metrics(folder / "run/metrics.jsonl") if one["kind"] == "step"]
    return records[2:], list(zip(*walls, strict=True))[2:], first.stderr


@pytest.mark.parametrize("parallel", [{"shard": 2}, {"replicate": 2, "shard": 1}], ids=["sharded", "replicated"])
def test_a_slow_rank_and_a_heavy_pack_are_told_apart(text, tmp_path, parallel):
    records, walls, screen = train(text, tmp_path, parallel, PER_TOKEN_S, 3 * PER_TOKEN_S)
    assert all(a == b for a, b in walls)  # each waits for the other
    for record in records:
        assert record["slowest_rank"] == 1
        # a third of the other's, over the median of both; a longer pack has more attention in each token
        assert record["slowest_rank_speed"] == pytest.approx(0.5, abs=0.06)
    assert "rank 1 computes at " in screen

    (tmp_path / "heavy").mkdir()
    records, walls, screen = train(text, tmp_path / "heavy", parallel, PER_TOKEN_S, PER_TOKEN_S)
    uneven = [record for record in records if record["heaviest_rank_load"] > 1.1]
    assert uneven, [record["rank_flops"] for record in records]
    assert all(a == b for a, b in walls)
    for record in uneven:
        flops = record["rank_flops"]
        assert record["heaviest_rank"] == flops.index(max(flops))
        assert record["heaviest_rank_load"] == pytest.approx(2 * max(flops) / sum(flops))
    assert all(record["slowest_rank_speed"] > 0.9 for record in records)
    assert "computes at " not in screen
    assert " times the mean work" in screen
    assert max(record["heaviest_rank_load"] for record in records) < 1.5
