"""Loops whose steps have several heads, losses, forwards or models: each is counted to the FLOP.

The FLOPs of the language model are written out from its sizes and the lengths (`forward_flops`); what a head adds is
derived here.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway import Generation, Workload
from headway.devices import Peak
from headway.errors import WorkloadError
from headway.meter import Meter
from helpers.counter import batch_of, forward_flops, gpt2, step_flops
from helpers.models import tiny_model

PEAK = Peak("test", 1e12, "fp32", "made up for a test")
LENGTHS = [9, 5, 7]
WIDTH, VOCABULARY = 32, 160  # of the small GPT-2


class ValueHead(nn.Module):
    """A language model with a value for each token, as critics of RL have; gives back what TRL's wrapper does."""

    def __init__(self, model):
        super().__init__()
        self.pretrained_model, self.v_head = model, nn.Linear(WIDTH, 1)

    def forward(self, input_ids, attention_mask=None, labels=None):
        out = self.pretrained_model(input_ids, attention_mask=attention_mask, labels=labels, output_hidden_states=True)
        return out.logits, out.loss, self.v_head(out.hidden_states[-1]).squeeze(-1)


class Predicts(nn.Module):
    """Heads that predict several tokens ahead: each joins the states so far with those of the next token's embedding.

    A module has a projection of both, a layer of its own (here an MLP) and the shared output embedding.
    """

    def __init__(self, model, depth):
        super().__init__()
        self.model, self.depth = model, depth
        self.join = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, input_ids, attention_mask=None):
        out = self.model(input_ids, attention_mask=attention_mask, output_hidden_states=True)
        states, embedded = out.hidden_states[-1], self.model.get_input_embeddings()(input_ids)
        logits = [out.logits]
        for join, layer in zip(self.join, self.layers, strict=True):
            states = layer(join(torch.cat([states, embedded.roll(-1, dims=1)], dim=-1)))
            logits.append(self.model.get_output_embeddings()(states))
        return logits


def metered(model, steps, *, watch=True, others=()):
    """Run steps, each a function without arguments that ends with its backward; returns their FLOPs."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    windows = []
    meter = Meter(model, peak=PEAK, watch=watch, others=others, log_every=1, on_window=windows.append)
    with meter:
        for step in steps:
            step(meter)
            optimizer.step()
            optimizer.zero_grad()
            meter.step()
    return [window.flops for window in windows]


def text(lengths=LENGTHS):
    batch = batch_of(lengths)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}, batch["labels"]


@pytest.mark.parametrize("watch", [True, False])
def test_a_value_head_adds_a_product_for_each_token(watch):
    model, (batch, labels) = ValueHead(gpt2()), text()

    def step(meter):
        if not watch:
            meter.count(batch)
        logits, _, values = model(**batch)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + values.square().mean()
        loss.backward()

    head = 3 * 2 * WIDTH * sum(LENGTHS)
    assert [flops.total for flops in metered(model, [step] * 2, watch=watch)] == [step_flops(LENGTHS) + head] * 2


def test_a_frozen_critic_with_a_trained_value_head_has_no_backward_below_it():
    model, (batch, _) = ValueHead(gpt2()), text()
    model.pretrained_model.requires_grad_(False)

    def step(_meter):
        model(**batch)[2].square().mean().backward()

    (flops,) = metered(model, [step])
    # the head's forward, and the gradient of its weight alone
    assert flops.total == forward_flops(LENGTHS) + 2 * 2 * WIDTH * sum(LENGTHS)


@pytest.mark.parametrize("depth", [1, 3])
def test_multi_token_prediction_heads_are_billed_with_the_shared_embedding(depth):
    model, (batch, labels) = Predicts(gpt2(), depth), text()

    def step(_meter):
        losses = [F.cross_entropy(logits.flatten(0, 1), labels.flatten()) for logits in model(**batch)]
        sum(losses).backward()

    (flops,) = metered(model, [step])
    weights = 2 * WIDTH * WIDTH + WIDTH * WIDTH + WIDTH * VOCABULARY
    assert flops.total == step_flops(LENGTHS) + depth * 3 * 2 * weights * sum(LENGTHS)


def test_losses_of_one_forward_cost_one_backward_and_each_forward_with_gradients_its_own():
    model, (first, labels), (second, others) = gpt2(), text(), text([4, 6])

    def loss(batch, labels):
        return F.cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten())

    def summed(_meter):  # two losses of one forward, one backward
        logits = model(**first).logits
        (F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-4 * logits.square().mean()).backward()

    def apart(_meter):  # two forwards, each with a backward of its own
        loss(first, labels).backward()
        loss(second, others).backward()

    def together(_meter):  # two forwards of the same policy, one backward through both
        (loss(first, labels) + loss(second, others)).backward()

    def old_policy(_meter):  # log-probabilities of before the update, then the update
        with torch.no_grad():
            model(**first)
        loss(first, labels).backward()

    def twice(_meter):  # two backwards through one graph, of which one backward of the sum would do the work
        logits = model(**first).logits
        logits.square().mean().backward(retain_graph=True)
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

    with pytest.warns(RuntimeWarning, match="second backward goes through a forward of GPT2LMHeadModel"):
        flops = metered(model, [summed, apart, together, old_policy, twice])
    once, both = step_flops(LENGTHS), step_flops([*LENGTHS, 4, 6])
    assert [f.total for f in flops] == [once, both, both, once + forward_flops(LENGTHS), once]


@pytest.mark.parametrize("grad_enabled", [False, True])
def test_a_teacher_is_billed_forward_alone(grad_enabled):
    student, teacher, (batch, _) = gpt2(), gpt2(seed=1).eval().requires_grad_(False), text()

    def step(_meter):
        with torch.set_grad_enabled(grad_enabled):  # a frozen teacher has no backward, whether or not it is told so
            target = teacher(**batch).logits
        F.kl_div(student(**batch).logits.log_softmax(-1), target.softmax(-1), reduction="batchmean").backward()

    (flops,) = metered(student, [step], others=[teacher])
    assert flops.total == step_flops(LENGTHS) + forward_flops(LENGTHS)
    of_teacher = [row for row in flops.rows if row.name.startswith("GPT2LMHeadModel.")]
    assert sum(row.forward for row in of_teacher) == forward_flops(LENGTHS)


def test_an_evaluation_counts_neither_the_student_nor_the_teacher():
    student, teacher, (batch, labels) = gpt2(), gpt2(seed=1).eval().requires_grad_(False), text()

    def step(meter):
        with meter.away(), torch.no_grad():
            student(**batch), teacher(**batch)
        student.eval()
        student(**batch), teacher(**batch)
        student.train()
        F.cross_entropy(student(**batch).logits.flatten(0, 1), labels.flatten()).backward()

    (flops,) = metered(student, [step], others=[teacher])
    assert flops.total == step_flops(LENGTHS)


def test_a_batch_that_is_read_late_ends_the_numbers_and_not_the_loop(monkeypatch):
    """Of a batch on an accelerator copies are read once they have come: after its step."""
    model, (batch, labels) = gpt2(), text()

    def refuse(_batch, _cost_model):
        raise WorkloadError("the mask names no segments")

    monkeypatch.setattr("headway.meter.watch.read_or_copy", lambda batch, _: batch)
    monkeypatch.setattr("headway.meter.pending.workload_of", refuse)
    windows = []
    meter = Meter(model, peak=PEAK, watch=True, log_every=1, on_window=windows.append)

    def train():
        for _ in range(3):
            F.cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten()).backward()
            meter.step()

    with pytest.warns(RuntimeWarning, match="goes on without MFU: the mask names no segments") as caught:
        train()
    meter.close()
    assert len(caught) == 1
    assert len(windows) == 3
    assert not any(window.mfu >= 0 for window in windows)


def test_a_watched_loop_counts_what_it_generates_as_a_whole():
    """Forwards with a cache are left out, in training mode and in evaluation mode, and the phase's own count stands."""
    policy, reference = tiny_model("qwen3"), tiny_model("qwen3").eval()
    meter = Meter(policy, watch=True, others=[reference], peak=PEAK, log_every=1)
    prompts = torch.randint(7, 20, (2, 5))
    for is_training in (True, False):
        policy.train(is_training)
        with meter.phase("rollout", forward_only=True), torch.no_grad():
            ids = policy.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, min_new_tokens=4, do_sample=True,
                pad_token_id=0,
            )  # fmt: skip
            meter.count(Generation([5, 5], [4, 4], batch_size=2))
        with meter.phase("reference", forward_only=True), torch.no_grad():
            reference(ids)
        policy.train()
        with meter.phase("update"):
            policy(ids).logits.sum().backward()
        window = meter.step()
        cost = meter.cost_model
        scored = cost.count(Workload([9, 9]), forward_only=True).total
        totals = {name: phase.flops.total for name, phase in window.phases.items()}
        generated = cost.count(Generation([5, 5], [4, 4]).workload, forward_only=True).total
        assert totals == {
            "rollout": generated,
            "reference": scored,
            "update": cost.count(Workload([9, 9])).total,
            "rest": 0,
        }


def test_generation_that_nobody_counts_is_one_warning_and_no_end_of_the_numbers():
    policy = tiny_model("qwen3").train()
    meter = Meter(policy, watch=True, peak=PEAK, log_every=2)
    prompts = torch.randint(7, 20, (2, 5))
    for step in range(2):
        with (
            torch.no_grad(),
            nullcontext() if step else pytest.warns(RuntimeWarning, match="as a whole, with meter.phase"),
        ):
            ids = policy.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=2, pad_token_id=0)
        policy(ids).logits.sum().backward()
        window = meter.step()
    assert window.flops == meter.cost_model.count(Workload([*ids.shape[1:]] * 4))
