import json

import pytest

LLAMA = 6 * (32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256) + 12 * 32 * 4096 * 8193 / 2


def record(result):
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_days_and_cost_of_a_run(headway):
    run = ("--device", "H100", "--chips", 256, "--mfu", 0.4, "--total-tokens", "1e12", "--price", 2.5)
    data = record(headway("mfu", "llama-3.1-8b", "--seq-len", 8192, *run, "--json"))
    assert data["flops_per_token"] == pytest.approx(LLAMA)
    seconds = 1e12 * LLAMA / (0.4 * 256 * 989.4e12)
    assert data["time_s"] == pytest.approx(seconds)
    assert data["cost"] == pytest.approx(seconds / 3600 * 256 * 2.5)
    assert "step_s" in data["unknown"]


def test_mfu_of_a_measured_step(headway):
    data = record(
        headway(
            "mfu",
            "llama-3.1-8b",
            "--segments",
            "8192*64",
            "--device",
            "H100",
            "--chips",
            8,
            "--step-time",
            10,
            "--json",
        )
    )
    assert data["tokens_per_step"] == 64 * 8192
    assert data["mfu"] == pytest.approx(64 * 8192 * LLAMA / 10 / 8 / 989.4e12)
    assert data["optimal_step_s"] == pytest.approx(64 * 8192 * LLAMA / 8 / 989.4e12)


def test_chips_for_a_deadline_are_whole(headway):
    result = headway("mfu", "--flops-per-token", "5e10", "--device", "1e15", "--mfu", 0.4, "--total-tokens", "15e12",
                     "--within", 30)  # fmt: skip
    chips = 15e12 * 5e10 / (0.4e15 * 30 * 86400)
    assert f"{chips:,.1f}, so {int(chips) + 1}" in result.out
    assert "not determined: " in result.out


def test_an_impossible_mfu_is_explained(headway):
    result = headway("mfu", "--flops-per-token", "5e10", "--device", "1e15", "--tokens-per-s-per-chip", 100_000)
    assert result.code == 1
    assert "500.0 %" in result.out
    assert "above 100 %, which no device reaches" in result.err
