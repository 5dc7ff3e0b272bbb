"""Products that ran beyond those that were counted, in profiles of real loops; and products far below the peak."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import headway
from headway.devices import Peak
from headway.explain.findings.evidence import RunEvidence, RunStep, StepEvidence
from headway.explain.findings.loops import parameter_loop
from headway.explain.findings.products import (
    recorded_uncounted,
    recorded_updates,
    slow_products,
    uncounted_products,
    update_each_pass,
)
from headway.explain.phases import PhaseLine
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain
from headway.log.records import read_records
from headway.models.recompute import recompute_blocks
from headway.tracing import trace
from helpers.traces import PUBLISHED, US, WrittenTrace, paced_steps

PEAK = Peak("test CPU", 100e9, "fp32", "made up for a test")
BATCH = {"input_ids": torch.arange(128).reshape(2, 64), "labels": torch.arange(128).reshape(2, 64)}


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, loss_type="ForCausalLM")).train()


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).train()


def plain(model, _reference):
    model(**BATCH).loss.backward()


def evaluates(model, reference):
    plain(model, reference)
    model.eval()
    with torch.no_grad():
        model(**BATCH)
    model.train()


def forward_for_metrics(model, reference):
    plain(model, reference)
    with torch.no_grad():
        model(**BATCH).logits.argmax(-1)


def loss_that_nobody_differentiates(model, reference):
    plain(model, reference)
    model(**BATCH).loss.detach()


def samples(model, reference):
    ids = BATCH["input_ids"][:, :32]
    with torch.no_grad():
        for _ in range(4):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    plain(model, reference)


def looks_up_a_reference(model, reference):
    output = model(**BATCH)
    with torch.no_grad():
        logits = reference(**BATCH).logits
    (output.loss + (output.logits - logits).square().mean()).backward()


def two_backwards(model, _reference):
    output = model(**BATCH)
    output.loss.backward(retain_graph=True)
    output.logits.logsumexp(-1).square().mean().backward()


def trains_on_more(model, reference):
    plain(model, reference)
    plain(model, reference)


CAUSES = {
    plain: None,
    evaluates: "without a backward in the loop",
    forward_for_metrics: "without a backward in the loop",
    loss_that_nobody_differentiates: "without a backward in the loop",
    samples: "without a backward in the loop",
    looks_up_a_reference: "a model that is not counted",
    two_backwards: "through one graph more than once",
    trains_on_more: "a pass with its backward was not counted",
}


# Records know the passes of the metered model alone, and passes with a backward by what the loop counts.
EXTRA = {
    evaluates: {"forward": 1},
    forward_for_metrics: {"forward": 1},
    samples: {"forward": 4},
    two_backwards: {"backward": 1},
}


def profiled(folder, model, step, *, updates=1):
    """Evidence of two profiled steps of a loop that counts one batch in each of its updates."""
    reference, optimizer = copy.deepcopy(model).eval(), torch.optim.AdamW(model.parameters(), fused=True)
    log_to = [f"jsonl:{folder / 'metrics.jsonl'}"]
    meter = headway.Meter(model, cost_model=trace(model), peak=PEAK, log_every=1, log_to=log_to)
    with headway.profile(meter, folder, steps=range(2, 4), report=lambda _: None) as window:
        for _ in range(4):
            for number in range(abs(updates)):
                meter.count(BATCH)
                step(model, reference)
                if updates > 0 or number == abs(updates) - 1:
                    optimizer.step()
                    optimizer.zero_grad()
            meter.step()
    meter.close()
    return StepEvidence(explain([read_trace(window.path)]).steps)


@pytest.mark.parametrize("model", [gpt2, llama])
@pytest.mark.parametrize("step", CAUSES, ids=lambda step: step.__name__)
def test_products_beyond_the_counted_ones_are_told_by_what_ran_them(tmp_path, model, step):
    """How long they take is left to the machine; what ran and what was counted is the same on each."""
    about = "a second backward goes through a forward"  # the meter sees it as well
    with pytest.warns(RuntimeWarning, match=about) if step is two_backwards else nullcontext():
        evidence = profiled(tmp_path, model(), step)
    seen = uncounted_products(evidence)
    assert (seen is None) == (CAUSES[step] is None)
    assert seen is None or CAUSES[step] in seen.cause
    assert parameter_loop(evidence) is None  # another model is no loop over parameters
    assert update_each_pass(evidence) is None
    assert extra_passes(tmp_path) == EXTRA.get(step, {})


def extra_passes(folder):
    """Numbers of the first record, whose step is sampled on a machine of any speed."""
    record = next(read_records(folder / "metrics.jsonl"))
    return {name: number for name, number in record["extra_passes"].items() if not name.endswith("_s")}


@pytest.mark.parametrize(
    ("number", "seconds"), [({"forward": 2}, 0.04), ({"backward": 1}, 0.03), ({"update": 7}, 0.02)]
)
def test_extra_passes_of_records_are_a_finding_of_their_rule(number, seconds):
    ((kind, times),) = number.items()
    extra = {kind: (times, round(seconds * 1e9))}
    steps = [RunStep(step, 100_000_000, phases_ns={"forward": 1}, extra=extra) for step in range(1, 9)]
    run = RunEvidence(steps)
    finding = (recorded_updates if kind == "update" else recorded_uncounted)(run)
    assert finding.ns == pytest.approx(seconds * 8e9)
    # In steps of a loop that names its phases such passes have rules of their own.
    named = RunEvidence([replace(step, loop_phases=(PhaseLine("rollout", 1, 1e-8, 1),)) for step in steps])
    assert recorded_updates(named) is None
    assert recorded_uncounted(named) is None


@pytest.mark.parametrize(("updates", "is_told"), [(3, True), (-3, False), (1, False)])
def test_an_update_after_each_pass_of_a_step_is_told(tmp_path, updates, is_told):
    seen = update_each_pass(profiled(tmp_path, llama(), plain, updates=updates))
    assert (seen is not None) == is_told
    assert seen is None or seen.message.startswith("one optimizer updated the same weights 3 times in a step")
    assert extra_passes(tmp_path) == ({"update": 2} if is_told else {})


def test_recomputation_and_frozen_layers_are_counted(tmp_path):
    model = llama()
    recompute_blocks(model, "full")
    assert uncounted_products(profiled(tmp_path / "again", model, plain)) is None
    model = llama()
    model.model.layers[0].requires_grad_(False)
    assert uncounted_products(profiled(tmp_path / "frozen", model, plain)) is None


@pytest.mark.own_peak
# Attention of 1 x 32 heads x 32,768 tokens x 128 on an MI300X: TraceLens' unit tests have it at 20, 18, 6 and 3 %.
@pytest.mark.parametrize(("us", "share"), [(65_846, 20), (73_000, 18), (224_000, 6), (448_000, 3), (20_000, 67)])
@pytest.mark.parametrize("operator", ["aten::_flash_attention_forward", "aten::_scaled_dot_product_flash_attention"])
def test_products_far_below_the_peak_have_a_word(tmp_path, us, share, operator):
    written = WrittenTrace()
    tokens_first = operator == "aten::_flash_attention_forward"
    sizes = [[1, 32768, 32, 128] if tokens_first else [1, 32, 32768, 128]] * 3
    for i in range(4):
        at = 1000 * US + i * us * US
        written.launched(
            "attn_fwd.kd", 500 * US + 20 * i * US, at, us * US, i + 1, operator=operator,
            operands=(sizes, "c10::BFloat16"),
        )  # fmt: skip
    device = [{"id": 0, "name": "AMD Instinct MI300X"}]
    found = explain([read_trace(written.write(tmp_path / "t.json", deviceProperties=device))]).findings
    assert [finding.id for finding in found] == ([] if share > 25 else ["slow-products"])
    assert not found or f"at {share}." in found[0].seen or f"at {share - 1}." in found[0].seen
    assert not found or "1x32x32,768x128" in found[0].seen
    # Nobody knows how far from the peak of an unknown device they are; the way to know is told.
    (unknown,) = explain([read_trace(written.write(tmp_path / "u.json"))]).findings
    assert unknown.id == "slow-products"
    assert "device" in unknown.next
    assert unknown.cause == "not known: the trace does not name its device."


# Operators of TraceLens' unit tests whose FLOPs nobody counts: convolutions, and products without recorded sizes.
@pytest.mark.parametrize("operands", [([[1, 3, 2048, 2048], [64, 3, 7, 7]], "float"), None])
@pytest.mark.parametrize(("product_us", "is_told"), [(90, True), (60, False)])
def test_products_without_flops_have_a_word_if_they_are_nearly_all(tmp_path, operands, product_us, is_told):
    def step(trace, at, number):
        start, name = at + 1000 * US, "aten::mm" if operands is None else "aten::convolution"
        trace.launched("igemm_fwd", at, start, product_us * US, number + 1, operator=name, operands=operands)
        start += product_us * US
        trace.launched("adds", at + US, start, (100 - product_us) * US, number + 2, operator="aten::add")

    trace = paced_steps(step).write(tmp_path / "t.json", deviceProperties=[{"id": 0, "name": "A device"}])
    found = {finding.id: finding for finding in explain([read_trace(trace)]).findings}
    assert ("slow-products" in found) == is_told
    if is_told:
        assert "90.0 % of the time, most of it in aten::" in found["slow-products"].seen
        assert "device" not in found["slow-products"].next.partition("measure")[0]  # it would tell nothing


@pytest.mark.own_peak
@pytest.mark.parametrize("path", PUBLISHED)
def test_a_published_step_of_products_alone_has_a_word(path):
    for device in (None, "100e15"):  # a rate that nothing reaches
        evidence = StepEvidence(explain([read_trace(path)], device=device).steps)
        seen = slow_products(evidence)
        is_all = not evidence.is_cpu and evidence.matmul_ns > 0.8 * evidence.duration_ns
        assert seen is not None or not is_all or (device is None and evidence.steps[0].rates.best_flops_per_s)
        assert seen is None or 0 < seen.ns <= evidence.duration_ns
        assert uncounted_products(evidence) is None  # nobody counted their steps
