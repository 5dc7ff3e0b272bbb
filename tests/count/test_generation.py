"""Answers written token by token: as many FLOPs as a forward of all tokens but the last, by every kind of mask."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from headway import Generation, Workload, load_cost_model, trace
from headway.count.drivers import parse_driver
from headway.errors import WorkloadError
from helpers.models import tiny_model

# causal; sliding and causal; compressed latents; windows with sinks; experts
MODELS = ["qwen3-0.6b", "gemma-3-4b", "deepseek-v2-lite", "gpt-oss-20b", "qwen3-30b-a3b"]
lengths = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=4)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15, deadline=None)
@given(lengths)
def test_an_answer_costs_a_forward_of_all_its_tokens_but_the_last_with_its_logits_alone(name, pairs):
    model = load_cost_model(name)
    prompts, answers = zip(*pairs, strict=True)
    generation = Generation(prompts, answers)
    at_once = Workload([p + a - 1 for p, a in pairs], logits=sum(answers))
    assert model.count(generation.workload, forward_only=True).total == model.count(at_once, forward_only=True).total


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(MODELS), st.integers(1, 90), st.integers(1, 40))
def test_decoding_is_one_token_after_another(name, prompt, answer):
    model = load_cost_model(name)
    steps = sum(model.count(Workload([1], past=[prompt + i]), forward_only=True).total for i in range(answer - 1))
    assert model.count(Generation([prompt], [answer]).decode, forward_only=True).total == steps


@given(st.integers(1, 500), st.lists(st.integers(0, 60), min_size=1, max_size=5))
def test_a_shared_prompt_is_computed_once(prompt, answers):
    model = load_cost_model("qwen3-0.6b")
    apart = Generation([prompt], answers, group=len(answers))
    shared = Generation([prompt], answers, group=len(answers), prefix="computed once")
    saved = model.count(apart.workload, forward_only=True).total - model.count(shared.workload, forward_only=True).total
    one_prefill = model.count(Workload([prompt], logits=1), forward_only=True).total
    assert saved == (len(answers) - 1) * one_prefill
    assert (apart.prompt_tokens, apart.generated_tokens) == (prompt, sum(answers))


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.lists(st.integers(0, 20), min_size=2, max_size=2)), min_size=1, max_size=4
    )
)
@pytest.mark.parametrize("driver", ["pairs:causal", "pairs:sliding:16"])
@pytest.mark.parametrize("prefix", ["own", "computed once", "read once"])
def test_reads_of_the_cache_are_the_keys_that_each_step_sees(driver, prefix, groups):
    """By hand: a step of an answer sees its prompt and itself; answers that read together read a prompt key once."""
    window = 16 if driver.endswith("16") else 10_000
    expected = 0
    for prompt, answers in groups:
        of_prompt: dict[int, int] = {}  # by step, keys of the prompt
        for answer in answers:
            for step in range(answer - 1):  # the token at prompt + step is read, and sees itself
                keys = range(max(0, prompt + step + 1 - window), prompt + step + 1)
                seen = sum(key < prompt for key in keys)
                expected += len(keys) - seen
                if prefix == "read once":
                    of_prompt[step] = seen
                else:
                    expected += seen
        expected += sum(of_prompt.values())
    generation = Generation([p for p, _ in groups], [a for _, pair in groups for a in pair], group=2, prefix=prefix)
    assert sum(sign * parse_driver(driver)(workload) for sign, workload in generation.reads) == expected


def test_rows_of_a_batch_go_on_until_the_longest_has_ended():
    generation = Generation([5, 9, 4], [3, 8, 2], batch_size=2)
    assert (generation.num_prefills, generation.num_decode_steps) == (2, 7 + 1)
    assert generation.workload.slots == 2 * (9 + 7) + 1 * (4 + 1)
    assert generation.workload.tokens == 5 + 9 + 4 + 2 + 7 + 1
    engine = Generation([5, 9, 4], [3, 8, 2])
    assert (engine.num_prefills, engine.num_decode_steps, engine.workload.slots) == (1, 7, 28)
    told = Generation([5, 9, 4], [3, 8, 2], decode_steps=12, slots=64)  # drafts of which some were rejected
    assert (told.num_decode_steps, told.workload.slots, told.workload.tokens) == (12, 64, 28)


def test_padding_of_prompts_is_no_idle_row_of_decode():
    """As transformers' `generate` is read: slots of the whole call are known, and rows of unlike prompts are padded."""
    told = Generation([5, 9], [8, 8], batch_size=2, slots=2 * (9 + 7))
    assert told.decode_slots == told.decode.tokens == 2 * 7
    assert told.workload.slots - told.workload.tokens == 9 - 5


def test_pictures_of_a_prompt_are_seen_once_for_each_time_that_it_is_read():
    media = {"images": [(1, 8, 8), (1, 4, 4)]}
    apart = Generation([40, 30], [3, 4, 5, 6], group=2, media=media)
    assert apart.prefill.images.tolist() == [[1, 8, 8]] * 2 + [[1, 4, 4]] * 2
    assert apart.decode.num_images == 0
    once = Generation([40, 30], [3, 4, 5, 6], group=2, prefix="computed once", media=media)
    assert once.workload.num_images == 2


def test_an_encoder_is_read_once_and_each_token_attends_to_what_it_made():
    generation = Generation([1, 1], [4, 1], media={"sources": [20, 30]})
    assert parse_driver("sources")(generation.workload) == 50
    assert parse_driver("pairs:cross")(generation.workload) == 4 * 20 + 1 * 30


def test_transformers_own_generation_multiplies_what_is_billed():
    """Eager attention computes each decode step's scores over the cache exactly, and a prompt's in full."""
    model = tiny_model("qwen3")
    model.config._attn_implementation = "eager"
    model.eval()
    ids = torch.randint(7, 20, (3, 11))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6, do_sample=True, pad_token_id=0
        )
    config = model.config
    masked = 3 * (11 * 10 // 2) * config.num_hidden_layers * 4 * config.num_attention_heads * config.head_dim
    billed = trace(model).count(Generation([11] * 3, [6] * 3, batch_size=3).workload, forward_only=True)
    assert counter.get_total_flops() == billed.total + masked


def test_the_head_runs_on_the_tokens_whose_logits_are_wanted():
    model = load_cost_model("qwen3-0.6b")
    head = {row.name: row.total for row in model.count(Workload([100], logits=7)).rows}["language.head"]
    assert head == 7 * {row.name: row.total for row in model.count(Workload([1])).rows}["language.head"]
    mixed = Workload([100], logits=7) + Workload([10])
    assert mixed.logits == 17
    assert model.count(mixed).total == model.count(Workload([100], logits=7)).total + model.count(Workload([10])).total


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([3], [4, 5]), {}, "2 answers to 1 prompts in groups of 1"),
        (([0], [4]), {}, r"prompts\[0\] is 0: a prompt holds at least 1 token"),
        (([3], [-1]), {}, r"answers\[0\] is -1"),
        (([3], [4]), {"group": 0}, "group=0"),
        (([3], [4]), {"prefix": "shared"}, "prefix='shared'.*own, computed once, read once"),
        (([3], [4]), {"slots": 5}, "5 slots cannot hold the 6 tokens"),
    ],
)
def test_what_cannot_be_is_refused(arguments, options, message):
    with pytest.raises(WorkloadError, match=message):
        Generation(*arguments, **options)


def test_more_logits_than_tokens_are_refused():
    with pytest.raises(WorkloadError, match="logits=4 is not allowed, because the head runs on 0 to 3 tokens"):
        Workload([3], logits=4)


def test_nothing_is_generated_by_nothing():
    generation = Generation(np.zeros(0, dtype=int), np.zeros(0, dtype=int))
    assert generation.workload == Workload(logits=0)
    assert (generation.num_prefills, generation.num_decode_steps) == (0, 0)


def test_a_generation_tells_how_it_ran():
    """By hand: two prompts of two answers each in batches of 3 and 1 rows; steps of 6 and of 1."""
    own = Generation([5, 9], [3, 7, 0, 2], group=2, batch_size=3)
    assert own.quantities() == {
        "answers": 3,
        "prefills": 2,
        "prompt_tokens": 14,
        "prefill_tokens": 28,
        "generated_tokens": 12,
        "sequence_tokens": 28 + 12,
        "decode_steps": 6 + 1,
        "decode_tokens": 2 + 6 + 1,
        "decode_slots": 3 * 6 + 1 * 1,
    }
    shared = Generation([5, 9], [3, 7, 0, 2], group=2, batch_size=3, prefix="computed once")
    assert shared.quantities() == {**own.quantities(), "prefill_tokens": 14}


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 4), st.integers(1, 9),
    st.sampled_from(["own", "computed once", "read once"]), st.data(),
)  # fmt: skip
def test_slots_hold_all_tokens_and_a_shared_prompt_once(prompts, group, batch_size, prefix, data):
    answers = data.draw(st.lists(st.integers(0, 30), min_size=group * len(prompts), max_size=group * len(prompts)))
    generation = Generation(prompts, answers, group=group, batch_size=batch_size, prefix=prefix)
    workload = generation.workload
    assert workload.slots >= workload.tokens
    assert generation.decode_slots >= generation.decode.tokens
    alike = Generation([8] * len(prompts), [4] * len(answers), group=group, batch_size=len(answers), prefix=prefix)
    assert alike.workload.slots == alike.workload.tokens  # nothing is padded, and no row is idle
