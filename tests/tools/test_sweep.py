"""The sweep on a sample of transformers' architectures, and its page."""

from collections import Counter
from dataclasses import replace

import pytest
from transformers import DeepseekV2Config, ProphetNetConfig

from headway.errors import TraceError
from headway.tracing import trace
from headway.tracing.build import with_layers
from tools.sweep import __main__ as sweep_module
from tools.sweep.__main__ import Outcome, _runs, architectures, main, render, sweep
from tools.sweep.sizes import Reading
from tools.sweep.witness import Checked, Mixture

COMPLETE = {
    "llama": "pairs:causal, tokens",
    "mistral": "pairs:sliding:4096, tokens",
    "olmoe": "pairs:causal, tokens",
    "gpt_neo": "pairs:causal, pairs:sliding:256, tokens",
    "mamba2": "tokens",
}


def test_every_registered_task_has_architectures():
    tasks = [task for task, _, _ in architectures()]
    assert tasks.count("causal language model") > 100
    assert tasks.count("image and text to text") > 30
    assert tasks.count("sequence to sequence") > 10


@pytest.mark.slow
def test_complete_ledgers_name_their_drivers_and_refusals_their_reason():
    outcomes = {o.model_type: o for o in sweep([*COMPLETE, "big_bird"])}
    assert {name: (outcomes[name].status, outcomes[name].detail) for name in COMPLETE} == {
        name: ("complete", drivers) for name, drivers in COMPLETE.items()
    }
    assert outcomes["big_bird"].status == "refused"
    assert "swaps its own modules" in outcomes["big_bird"].detail


@pytest.mark.slow
def test_a_model_that_shares_layers_or_keys_is_swept_with_all_its_layers():
    outcomes = sweep(["zamba", "gemma3n_text"])
    assert {o.model_type: (o.status, o.detail) for o in outcomes} == {
        "zamba": ("complete", "pairs:causal, tokens"),
        "gemma3n_text": ("complete", "pairs:causal, pairs:sliding:512, tokens"),
    }


def test_patches_that_the_data_cuts_are_refused_by_name():
    (outcome,) = sweep(["blt"])
    assert outcome.status == "refused"
    assert "cuts its text into patches by the entropy" in outcome.detail


def test_depths_are_cut_by_the_fields_that_a_configuration_has():
    config = with_layers(ProphetNetConfig(), 2)
    assert (config.num_encoder_layers, config.num_decoder_layers) == (2, 2)


@pytest.mark.slow
def test_an_architecture_that_transformers_does_not_run_either_counts_neither_way():
    # deepseek_v2 does not say how many experts a token visits; the other's heads are of an odd size, 2048 // 28
    text, speech = sweep(["deepseek_v2", "qwen3_omni_moe_thinker"])
    assert text.status == speech.status == "not built"
    assert "topk()" in text.detail
    assert "length 74" in speech.detail


def test_an_error_of_the_same_kind_at_another_place_excuses_nothing():
    config = DeepseekV2Config(hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2)
    with pytest.raises(TraceError, match="topk") as failure:
        trace(config)
    assert isinstance(failure.value.__cause__, TypeError)
    assert not _runs(config, failure.value.__cause__)
    assert _runs(config, TypeError("topk(): argument 'k' must be int, not NoneType"))


def test_the_page_counts_what_transformers_could_build():
    page = render(
        [
            Outcome("causal language model", "one", "complete", "tokens"),
            Outcome("causal language model", "two", "refused", "a|b"),
            Outcome("sequence to sequence", "three", "not built", "ValueError: no"),
        ]
    )
    assert "| causal language model | 2 | 2 | 1 | 50 % |" in page
    assert "| all | 3 | 2 | 1 | 50 % |" in page
    assert "| `two` | causal language model | a/b |" in page
    assert "\n* causal language model: `one`\n" in page
    assert page.endswith("\n* sequence to sequence: `three`\n")


@pytest.mark.parametrize("target", ["page.md", "-"])
def test_the_command_writes_its_page(target, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([target, "--only", "gpt_neox"]) == 0
    page = capsys.readouterr().out if target == "-" else (tmp_path / target).read_text()
    assert "\n* causal language model: `gpt_neox`\n" in page
    assert "| architectures | 1 |" in page
    assert "| the configuration and the ledger | 1 | 0 | 0 |" in page


def test_an_architecture_whose_ledger_the_second_witness_doubts_is_refused(monkeypatch):
    def tampered(config):
        cost = trace(config)
        return replace(cost, rows=(*cost.rows[:-1], replace(cost.rows[-1], forward=cost.rows[-1].forward + 2)))

    monkeypatch.setattr(sweep_module, "trace", tampered)
    (outcome,) = sweep(["gpt_neox"])
    assert outcome.status == "refused"
    assert "the second witness disagrees: lm_head.weight billed" in outcome.detail
    assert "| billed " in render([outcome])


def test_the_page_groups_exceptions_by_their_reason():
    def outcome(model_type, flops):
        checked = Checked(7, Counter(row=5), [Mixture("experts", "tokens", 8, 2)])
        checked.note([f"layers.{flops}.conv.weight"], f"billed {flops} FLOPs, called 9", "padding")
        return Outcome(
            "causal language model", model_type, "complete", "tokens", checked, Reading("agrees"), Reading("agrees")
        )

    page = render([outcome("one", 3), outcome("two", 4)])
    assert "| billed N FLOPs, called N | padding | `one`, `two` |" in page
    assert "| modules of experts, in 2 architectures | 2 |" in page
    assert "| of them: row | 10 |" in page


def test_the_page_puts_the_types_that_others_know_beside_ours():
    page = render(
        [
            Outcome("causal language model", "qwen2", "complete", "tokens"),
            Outcome("causal language model", "seed_oss", "refused", "no"),
        ]
    )
    assert "| Headway, by tracing | 1 | 1 |" in page
    # of verl's 22 types both are here, one of them complete; LMMs-Engine has no formula for seed_oss
    assert "| verl | 22 | 1 of 2 registered |" in page
    assert "| LMMs-Engine | 21 | 1 of 1 registered |" in page
