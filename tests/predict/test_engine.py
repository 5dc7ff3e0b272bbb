"""Engines that write answers: steps by hand, bytes and FLOPs as the floor, and what more tokens cost."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.count import CostModel, Generation, load_cost_model
from headway.count.rows import Parameter, Row
from headway.devices import named_device
from headway.errors import PlanError
from headway.meter.memory_traffic import ForwardTraffic
from headway.predict.collectives import Links
from headway.predict.engine import EngineTimes
from headway.predict.speeds import ATTENTION, BANDWIDTH, FLASH_2, HEAD_SIZE, PRODUCTS, Cases, Speeds

H100 = named_device("H100")
SPEEDS = Speeds.of_device(H100, "bf16")
PEAK, BYTES_PER_S = H100.peak_flops_per_s["bf16"], H100.memory_bytes_per_s
SLOW = Speeds("slow", 100.0, Cases.exact(10.0), "")  # FLOP/s and bytes/s that one can reckon with
SMALL = load_cost_model("qwen3-0.6b")
SMALL_TIMES = EngineTimes(SMALL, SPEEDS, 2)
lengths = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def tiny(cached=4, driver="pairs:causal"):
    """A model of one linear module of 4 x 2 in a block, and attention that reads `cached` elements of a key."""
    linear = Row("l", "linear", "language.mlp", "tokens", 16, block="b", features=(4, 2))
    attention = Row("a", "attention", "language.attention", driver, 3, block="b", cached=cached)
    return CostModel("tiny", (linear, attention), (Parameter("l.weight", 8, 8, "language.mlp"),))


def write(times, answers, **options):
    options = {"prefills": len(answers), "max_rows": 100, **options}
    return times.write(options.pop("prompt", 5), np.array(answers), **options)


def test_two_answers_by_hand():
    run = write(EngineTimes(tiny(), SLOW, 2), [3, 2])
    # steps: both rows, then the longer answer alone; queries behind 5 tokens see 6, 6, then 7 keys
    assert (run.steps, run.rows, run.most_rows) == (2, 1.5, 2)
    products = [max(16 * rows / 65, 2 * (4 * rows + 8 + 2 * rows) / 10) for rows in (2, 1)]
    slow = FLASH_2.slowdowns(19 / 3, HEAD_SIZE)[0]  # of 3 FLOPs a pair; queries of answers see 19 / 3 keys on average
    attention = [max(3 * keys * slow / 45, 8 * (keys + rows) / 10) for keys, rows in ((12, 2), (7, 1))]
    assert run.decode.expected == pytest.approx(sum(products) + sum(attention))
    # 10 tokens of prompts in one forward; each prompt has 15 pairs, and its cache is written and read
    attending = max(3 * 30 * FLASH_2.slowdowns(3, HEAD_SIZE)[0] / 45, 8 * 2 * 10 / 10)
    assert run.prefill.expected == pytest.approx(max(160 / 65, 2 * (40 + 8 + 20) / 10) + attending)
    # weights in two steps and a prefill; cache of 19 + 10 keys read, of 10 + 3 tokens written
    assert run.num_bytes == 3 * 16 + 8 * (19 + 10) + 8 * (10 + 3)
    assert run.cache_bytes == 8 * (7 + 6)


def test_a_batch_waits_for_its_longest_answer_and_an_engine_does_not():
    times = EngineTimes(tiny(), SLOW, 2)
    answers = [9, 2, 9, 2]
    static, continuous = (write(times, answers, max_rows=2, static=is_static) for is_static in (True, False))
    assert (static.steps, static.rows) == (16, 2.0)  # twice the eight steps of nine tokens, two rows each
    # places: one writes 8 steps, then 1; the other 1, then 8
    assert (continuous.steps, continuous.rows) == (9, 2.0)
    assert continuous.decode.expected < static.decode.expected


def test_room_for_the_cache_limits_how_many_answers_are_written_at_a_time():
    times = EngineTimes(tiny(), SLOW, 2)
    free = write(times, [4] * 6)
    assert (free.most_rows, free.waited_for_cache) == (6, False)
    room = 2 * times.cache_of(8) + 1  # a prompt of 5 tokens and three more
    tight = write(times, [4] * 6, room=room)
    assert (tight.most_rows, tight.steps, tight.waited_for_cache) == (2, 9, True)
    assert tight.cache_bytes <= room
    assert write(times, [4] * 6, room=room, static=True).steps == 9
    with pytest.raises(PlanError, match="room"):
        write(times, [4], room=times.cache_of(8) - 1)


@given(lengths)
@settings(max_examples=30, deadline=None)
def test_bytes_are_those_of_the_same_answers_in_a_record(answers):
    run = write(SMALL_TIMES, answers, prompt=7)
    cached = 2 * sum(row.cached for row in SMALL.rows)
    products = sum(2 * math.prod(row.features) for row in SMALL.rows if row.features)
    traffic = ForwardTraffic(products, 0, cached, (("pairs:causal", cached),))
    generation = Generation([7] * len(answers), answers)
    assert run.num_bytes == pytest.approx(traffic.of_generation(generation), rel=1e-12)


@given(lengths, st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_no_answer_is_written_faster_than_bytes_and_flops_allow(answers, prompt, max_rows):
    for static in (False, True):
        run = write(SMALL_TIMES, answers, prompt=prompt, max_rows=max_rows, static=static)
        generation = Generation([prompt] * len(answers), answers)
        flops = SMALL.count(generation.workload, forward_only=True).total
        for seconds, band, product in zip(run.seconds, BANDWIDTH, PRODUCTS, strict=True):
            assert seconds >= (1 - 1e-9) * run.num_bytes / (band * BYTES_PER_S)
            assert seconds >= flops / (product * PEAK)
        assert [*run.seconds] == sorted(run.seconds)
    assert max(ATTENTION) < max(PRODUCTS)  # or the FLOPs above would have to be divided by the larger


@given(lengths, st.data())
@settings(max_examples=40, deadline=None)
def test_longer_answers_never_take_less(answers, data):
    times = SMALL_TIMES
    longer = [answer + data.draw(st.integers(0, 20)) for answer in answers]
    before, after = write(times, answers), write(times, longer)
    assert all(b >= a - 1e-12 for a, b in zip(before.seconds, after.seconds, strict=True))
    more = write(times, [*answers, 5])
    assert all(b >= a - 1e-12 for a, b in zip(before.seconds, more.seconds, strict=True))


def test_answers_that_share_a_prompt_save_its_prefills_and_nothing_else():
    answers = [20, 30, 25, 40]
    own, shared = write(SMALL_TIMES, answers), write(SMALL_TIMES, answers, prefills=1, shared_by=4)
    assert shared.decode == own.decode
    assert shared.prefill == write(SMALL_TIMES, [1], prefills=1).prefill
    assert shared.cache_bytes < own.cache_bytes


def test_a_window_reads_and_keeps_no_more_keys_than_it_sees():
    times = {driver: EngineTimes(tiny(driver=driver), SLOW, 2) for driver in ("pairs:causal", "pairs:sliding:4")}
    assert times["pairs:causal"].cache_of(100) == 8 * 100
    assert times["pairs:sliding:4"].cache_of(100) == 8 * 4
    runs = {driver: write(engine, [11]) for driver, engine in times.items()}
    assert runs["pairs:causal"].num_bytes - runs["pairs:sliding:4"].num_bytes == 8 * (sum(range(6, 16)) - 10 * 4)


def test_steps_read_the_experts_that_some_row_chose():
    experts = Row("e", "experts", "language.experts", "tokens", 2 * 8 * 5)
    model = replace(tiny(), rows=(*tiny().rows, experts))
    model = replace(model, parameters=(*model.parameters, Parameter("e.weight", 80, 40, "language.experts")))
    with_them, without = (write(EngineTimes(m, SLOW, 2), [2, 2, 2]).num_bytes for m in (model, tiny()))
    # one step of three rows, each of which reads half of them, and a prefill of 15 tokens
    assert with_them - without == pytest.approx(2 * 80 * ((1 - 0.5**3) + (1 - 0.5**15)))


def test_latent_attention_keeps_its_latent():
    # DeepSeek-V3: 61 layers keep 512 + 64 elements in bfloat16, arXiv:2412.19437, section 4.2
    engine = EngineTimes(load_cost_model("deepseek-v3"), SPEEDS, 2)
    assert engine.cache_of(1000) == 61 * 576 * 2 * 1000
    # on every device that shares the engine's products; heads of keys are divided
    assert EngineTimes(load_cost_model("deepseek-v3"), SPEEDS, 2, tensor=8).cache_of(10) == engine.cache_of(10)
    assert EngineTimes(SMALL, SPEEDS, 2, tensor=2).cache_of(10) == SMALL_TIMES.cache_of(10) / 2


def test_devices_share_products_and_add_them_up():
    model, links = load_cost_model("llama-3.1-8b"), Links.of_device(H100)
    alone = write(EngineTimes(model, SPEEDS, 2), [50] * 8)
    free, joined = (write(EngineTimes(model, SPEEDS, 2, tensor=4, links=known), [50] * 8) for known in (None, links))
    assert free.decode.expected == pytest.approx(alone.decode.expected / 4, rel=1e-6)
    # two sums in each of 32 blocks and 49 steps, of at least NCCL's latencies
    assert joined.decode.expected > free.decode.expected + 64 * 49 * 8.4e-6
    assert joined.decode.expected < alone.decode.expected


def test_an_engine_without_answers_takes_no_time():
    for static in (False, True):
        run = write(SMALL_TIMES, np.array([], dtype=np.int64), room=1e9, static=static)
        assert (run.seconds.expected, run.steps, run.num_bytes) == (0, 0, 0)


def test_models_that_cannot_be_planned_are_refused():
    with pytest.raises(PlanError, match="does not say what keys and values"):
        EngineTimes(tiny(cached=0), SLOW, 2)
    with pytest.raises(PlanError, match="decode steps"):
        write(EngineTimes(tiny(), SLOW, 2), [60_000_000])
