"""Numbers that the tools' own functions gave at dated commits, recorded by `python -m tools.their_rules CHECKOUTS`."""

import json
from pathlib import Path

import pytest

from headway.conventions import conventions, get_convention
from headway.count.models import shipped_models
from headway.plugins import hooks_of_all
from tools.their_rules import render
from tools.their_rules.__main__ import agree, compare, with_others
from tools.their_rules.cases import ANSWERS, EXTRA, PICTURES, TEXT, Case, cases
from tools.their_rules.checkouts import CheckoutError, Checkouts, Source
from tools.their_rules.peaks import same_peak
from tools.their_rules.rules import RULES, UNCOMPARED
from tools.their_rules.table import beside_useful

(RECORD,) = Path("benchmarks/results").glob("their_rules_*.json")
FOUND = json.loads(RECORD.read_text(encoding="utf-8"))
COMPARED = {rule["convention"]: rule for rule in FOUND["rules"]}


def check(convention, models):
    """Hold our bills against the recorded numbers of these models, and return how many of them are numbers."""
    numbers = 0
    for model, steps in COMPARED[convention]["flops"].items():
        if model not in models:
            continue
        for step, theirs in steps.items():
            case = Case(model, step)
            bill = get_convention(convention).bill(case.numbers, case.step)
            assert agree(theirs, bill.flops), (model, step, theirs, bill.flops, bill.reason)
            assert (bill.reason == "") == (theirs is not None)
            numbers += theirs is not None
    return numbers


@pytest.mark.parametrize("convention", COMPARED)
def test_shipped_models_are_billed_as_the_tools_own_function_does(convention):
    assert check(convention, set(shipped_models())) >= 24


@pytest.mark.slow
@pytest.mark.parametrize("convention", COMPARED)
def test_models_that_are_traced_are_billed_as_the_tools_own_function_does(convention):
    pytest.importorskip("transformers")
    check(convention, set(EXTRA))


def test_every_rule_of_another_tool_is_compared_or_says_why_it_is_not():
    assert {rule.convention for rule in RULES} == set(COMPARED)
    brought = [rule for more in hooks_of_all("conventions") for rule in more]  # compared in their plug-ins' tests
    assert {rule.name for rule in conventions() if rule not in brought} == set(COMPARED) | set(UNCOMPARED)
    for rule in RULES:  # the record is of the commits that the script asks for
        assert COMPARED[rule.convention]["project"] == rule.source.project
        if not rule.source.commit.endswith("^"):
            assert COMPARED[rule.convention]["commit"].startswith(rule.source.commit[:7])


def test_the_record_spans_kinds_of_models_and_of_steps():
    numbers = {
        (rule, model, step)
        for rule, found in COMPARED.items() for model, steps in found["flops"].items()
        for step, flops in steps.items() if flops is not None
    }  # fmt: skip
    assert len(numbers) > 2000
    assert {step for _, _, step in numbers} == {*TEXT, *ANSWERS, *PICTURES}
    # trainers of reinforcement learning: ten batches each
    trainers = {"verl", "nemo-rl", "slime", "miles", "prime-rl"}
    assert {rule for rule, model, step in numbers if (model, step) == ("qwen3-8b", "a long answer")} == trainers
    assert len(cases(answers=True)) - len(cases()) == len(ANSWERS) * len({case.model for case in cases()})
    assert len({*TEXT, *ANSWERS}) == 10
    kinds = {"windows": "gemma-3-4b", "latent attention": "deepseek-v3", "experts": "mixtral-8x7b", "no gate": "gpt2",
             "prediction layers": "glm-4.5-air", "vision": "qwen3-vl-8b", "delta rule": "qwen3-next-80b"}  # fmt: skip
    assert {kind for kind, model in kinds.items() if not any(found == model for _, found, _ in numbers)} == set()
    assert not any(found["differences"] for found in COMPARED.values())


@pytest.mark.parametrize("found", FOUND["peaks"], ids=lambda found: found["tool"])
def test_the_peak_of_a_device_is_that_of_the_tools_own_function(found):
    assert len(found["flops_per_s"]) > 100
    assert [name for name, peak in found["flops_per_s"].items() if not same_peak(found["tool"], name, peak)] == []
    numbers = [peak for peak in found["flops_per_s"].values() if isinstance(peak, int)]
    assert len(set(numbers)) >= 4  # not one answer for all


FLOPS_COUNTER = """
import nothing_that_is_installed
RATE = 6
class FlopsCounter:
    def __init__(self, config):
        self.config = config
    def estimate_flops(self, lengths, seconds):
        return RATE * sum(lengths) * self.config.hidden_size / 1e12, 0
"""


def test_a_function_is_cut_out_of_a_checkout_and_what_differs_is_shown(tmp_path):
    # a release that is unpacked beside the clones; a counter that bills 6 x width per token and nothing else
    path = tmp_path / "lmms-engine@0.1.4" / "lmms_engine" / "models" / "utils.py"
    path.parent.mkdir(parents=True)
    path.write_text(FLOPS_COUNTER)
    (rule,) = (rule for rule in RULES if rule.convention == "lmms-engine")
    row = compare(rule, Checkouts(tmp_path), [Case("qwen3-8b", "row")])
    assert (row["commit"], row["flops"]) == ("0.1.4", {"qwen3-8b": {"row": 6 * 4096 * 4096}})
    assert [difference["theirs"] for difference in row["differences"]] == [6 * 4096 * 4096]
    table = render({"date": "2026-11-25", "headway": "0", "transformers": "5", "rules": [row], "peaks": []})
    assert "| `lmms-engine` | EvolvingLMMs-Lab/lmms-engine | 0.1.4 | release | 1 | 0 | 0 | 1 |" in table
    assert "| `lmms-engine` | qwen3-8b | row | 100,663,296 |" in table


def test_what_trainers_of_reinforcement_learning_bill_is_shown_beside_useful_flops():
    lines = [line.split(" | ") for line in beside_useful(FOUND) if line.startswith("| `")]
    shown = {(name.strip("|` "), model): (ratio, parts) for name, model, ratio, parts in lines}
    assert {name for name, _ in shown} == {"verl", "nemo-rl", "slime", "miles", "prime-rl"}
    # half the square lacks the diagonal's half and bills nothing else of Qwen3-8B: ten batches within a thousandth
    assert shown["nemo-rl", "qwen3-8b"] == ("1.000 to 1.000", "none |")
    assert "embedding" in shown["verl", "qwen3-8b"][1]
    assert "experts" in shown["nemo-rl", "qwen3-30b-a3b"][1]
    assert RECORD.with_suffix(".md").read_text(encoding="utf-8") == render(FOUND)


def test_rules_that_are_not_run_again_keep_their_record():
    again = {"rules": [{"convention": "miles", "flops": 2}], "peaks": [], "date": "later"}
    before = {
        "rules": [{"convention": "prime-rl", "flops": 1}, {"convention": "miles", "flops": 1}],
        "peaks": [{"tool": "verl"}], "date": "before",
    }  # fmt: skip
    assert with_others(again, before) == {
        "rules": [{"convention": "miles", "flops": 2}, {"convention": "prime-rl", "flops": 1}],
        "peaks": [{"tool": "verl"}], "date": "later",
    }  # fmt: skip


def test_a_clone_that_is_not_there_is_named(tmp_path):
    source = Source("verl-project/verl", "1dda039b9", "verl/utils/flops_counter.py")
    with pytest.raises(CheckoutError, match=r"flops_counter.py of verl-project/verl at 1dda039b9 cannot be read"):
        Checkouts(tmp_path).text(source)


@pytest.mark.parametrize(
    ("theirs", "ours", "same"),
    [(None, None, True), (None, 5, False), (5.0, None, False), (2.0**60, 2**60 + 100, True), (1e12, 1e12 + 1, False)],
)
def test_numbers_agree_as_closely_as_a_double_holds_them(theirs, ours, same):
    assert agree(theirs, ours) is same
