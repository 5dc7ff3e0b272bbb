"""Pairs of splits against masks drawn cell by cell, and what a workload makes of splits."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.count import Workload
from headway.count.drivers import parse_driver
from headway.count.splits import MODES, branched
from headway.errors import WorkloadError

RUNS = st.lists(st.tuples(st.sampled_from(MODES), st.integers(1, 9)), min_size=1, max_size=5)


def drawn(runs, past=0):
    """The mask of one segment by the definition: rows are queries, the first columns the past."""
    mode = [m for m, n in runs for _ in range(n)]
    number = [i for i, (_, n) in enumerate(runs) for _ in range(n)]
    mask = np.zeros((len(mode), past + len(mode)), dtype=bool)
    mask[:, :past] = True
    for q in range(len(mode)):
        for k in range(len(mode)):
            if number[k] == number[q]:
                mask[q, past + k] = mode[q] in ("full", "noise") or k <= q
            elif number[k] < number[q]:
                mask[q, past + k] = mode[k] in ("causal", "full")
    return mask


def pairs(workload):
    return parse_driver("pairs:splits")(workload)


@given(st.lists(RUNS, min_size=1, max_size=4), st.booleans(), st.data())
def test_pairs_are_those_of_the_mask_drawn_cell_by_cell(segments, cached, data):
    past = [data.draw(st.integers(0, 7)) if cached else 0 for _ in segments]
    expected = sum(int(drawn(runs, before).sum()) for runs, before in zip(segments, past, strict=True))
    assert pairs(Workload(splits=segments, past=past)) == expected


@given(st.lists(RUNS, max_size=3), st.lists(st.integers(1, 20), max_size=3), st.lists(RUNS, max_size=3))
def test_costs_add_up_over_workloads_with_and_without_splits(one, plain, other):
    parts = [Workload(splits=one), Workload(plain), Workload(splits=other)]
    total = Workload.total(parts)
    for driver in ("pairs:splits", "supervised", "tokens"):
        assert parse_driver(driver)(total) == sum(parse_driver(driver)(part) for part in parts)


def test_causal_runs_are_a_causal_segment():
    assert Workload(splits=[[("causal", 3), ("causal", 4)]]) == Workload([7])
    assert pairs(Workload([7])) == 7 * 8 // 2


def test_a_prefix_is_a_full_run_before_a_causal_one():
    assert pairs(Workload(splits=[[("full", 3), ("causal", 2)]])) == 3 * 3 + 4 + 5


def test_block_diffusion_is_noise_then_the_same_block_in_full():
    # BD3-LM (Arriola et al. 2025), section 3: a noised block sees itself and the clean blocks before it; a clean block
    # sees the clean blocks up to its own
    block, blocks = 4, 3
    noisy = sum(block * (block + b * block) for b in range(blocks))
    clean = sum(block * (b + 1) * block for b in range(blocks))
    assert pairs(Workload(splits=[[("noise", block), ("full", block)] * blocks])) == noisy + clean


def test_answers_to_one_prompt_are_branches_that_pay_for_it_once():
    # each answer alone behind the prompt has its own pairs, and the prompt's again
    prompt, answers = 30, [5, 8, 1]
    shared = pairs(Workload(splits=[branched(prompt, answers)]))
    apart = pairs(Workload([prompt + answer for answer in answers]))
    assert apart - shared == (len(answers) - 1) * prompt * (prompt + 1) // 2
    assert Workload(splits=[branched(prompt, answers)]).supervised == prompt + sum(answers)


def test_long_splits_do_not_overflow():
    n = 3 * 10**9
    assert pairs(Workload(splits=[[("full", n), ("causal", 1)]])) == n * n + n + 1


def test_tokens_by_kind():
    step = Workload(
        splits=[[("full", 18), ("full", 11), ("causal", 5), ("noise", 18)]],
        images=[(1, 3, 3)],
        latents=[(1, 4, 4)],
        references=[(1, 4, 4)],
    )
    units = {
        "tokens": 52, "supervised": 5, "noised": 16, "latents": 32, "understood": 20, "latent_grids": 2,
        "latent_pairs:frame": 512, "patches": 9,
    }  # fmt: skip
    assert {driver: parse_driver(driver)(step) for driver in units} == units
    assert parse_driver("supervised")(Workload([52], supervised=7) + step) == 12
    assert pickle.loads(pickle.dumps(step)) == step
    assert "5 causal, 29 full, 18 noise, 1 image of 9 patches, 1 latent image of 16 latent patches" in repr(step)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"splits": [[("prefix", 1)]]}, "mode 'prefix': a mode is one of causal, full, noise, branch"),
        ({"splits": [[("full", 0)]]}, "a run of 0 tokens"),
        ({"splits": [[]]}, "give its length in segments"),
        ({"splits": [[("full", 3)]], "segments": [4]}, "hold 3 tokens, but the segment has 4"),
        ({"splits": [[("full", 3)]], "segments": [3, 4]}, "got 1 for 2 segments"),
        ({"splits": np.array([[1, 3]]), "segments": [2, 2]}, "do not end where the segments end"),
        ({"splits": np.array([[1, 3]])}, "Give segments"),
        ({"splits": np.array([[7, 3]]), "segments": [3]}, "modes 0 to 3"),
        ({"segments": [3], "latents": [(1, 2, 2)]}, "cannot hold 4 latent patches"),
        ({"segments": [3], "supervised": 4}, "supervised must be 0 to the 3 tokens"),
        ({"splits": [[("causal", 3), ("noise", 6)]], "latents": [(1, 2, 2)], "supervised": 6}, "0 to the 5 tokens"),
    ],
)
def test_what_does_not_add_up_is_refused(settings, words):
    with pytest.raises(WorkloadError, match=words):
        Workload(**settings)


def test_a_model_is_counted_under_splits_only_where_that_is_asked_for():
    from headway import load_cost_model

    step = Workload(splits=[[("full", 30), ("causal", 12)]])
    qwen, gemma = load_cost_model("qwen3-0.6b"), load_cost_model("gemma-3-4b")
    with pytest.raises(WorkloadError, match="takes none"):
        qwen.count(step)
    under = {row.name: row.total for row in qwen.with_splits().count(step).rows}
    causal = {row.name: row.total for row in qwen.count(Workload([42])).rows}
    ratio = (30 * 30 + sum(range(31, 43))) / (42 * 43 // 2)
    assert under.pop("language.attention") == causal.pop("language.attention") * ratio
    assert under == causal
    with pytest.raises(WorkloadError, match=r"gemma-3-4b cannot be counted under splits.*pairs:sliding"):
        gemma.with_splits()
    with pytest.raises(WorkloadError, match="takes no latents"):
        qwen.count(Workload([9], latents=[(1, 2, 2)]))
