"""Training set-ups: the ledger against PyTorch's own counter on real steps with the real losses.

Forward is compared module by module, backward operation by operation. helpers/counter.py derives the one
difference: eager attention runs the whole square of scores where the ledger has the pairs of the mask.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3ForSequenceClassification

from headway.count import CostModel, FlopCount, Workload, drivers
from headway.errors import TraceError
from headway.tracing import trace
from helpers.counter import (
    LENGTH,
    build,
    check,
    check_recompute,
    count_backward,
    count_forward,
    eager_attention,
    expect,
    inputs,
    workload,
)
from helpers.models import enable_checkpointing, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks

FAMILY, ROWS = "qwen3", 2  # a chosen and a rejected answer
STEP = workload(FAMILY, ROWS)


def beyond_the_mask(model: nn.Module, cost: CostModel, *, backward: bool) -> int:
    """Count what eager attention runs beyond the pairs that the mask allows."""
    extra = 0
    for row in cost.rows:
        if row.op == "attention":
            hidden = sum(eager_attention(model, row.module, ROWS)[1]) - drivers.parse_driver(row.driver)(STEP)
            needed = sum(g.flops for g in row.gradients if g.runs(cost.trained))
            extra += hidden * (row.forward + (needed if backward else 0))
    return extra


def log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Sum the log-probabilities of each row's tokens, [rows]."""
    return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).sum((1, 2))


def dpo_loss(policy, reference, ids):
    """Source: Direct Preference Optimization, Rafailov et al. 2023, equation 7."""
    ratios = log_probs(policy, ids) - log_probs(reference, ids)
    return -F.logsigmoid(0.1 * (ratios[0] - ratios[1]))


def distillation_loss(student, teacher, _ids):
    return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


@pytest.mark.parametrize("loss", [dpo_loss, distillation_loss])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_step_with_a_second_model_that_only_runs_forward(loss, adapted):
    trained, frozen = build(FAMILY), build(FAMILY)
    if adapted:
        trained = get_peft_model(trained, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).get_base_model()
    batch = inputs(trained, FAMILY, ROWS)
    logits, seen = count_forward(trained, batch)
    with torch.no_grad():
        reference, seen_reference = count_forward(frozen, batch)
    seen_backward = count_backward(loss(logits, reference, batch["input_ids"]))

    cost, other = trace(trained), trace(frozen)
    forward, backward, _ = expect(trained, cost, FAMILY, ROWS)
    assert (seen, seen_backward) == (forward, backward)
    assert seen_reference == expect(frozen, other, FAMILY, ROWS)[0]

    count = cost.count(STEP) + other.count(STEP, forward_only=True)
    dispatched = seen.total() + seen_reference.total() + sum(seen_backward.elements())
    extra = beyond_the_mask(trained, cost, backward=True) + beyond_the_mask(frozen, other, backward=False)
    assert dispatched == count.total + extra


def test_a_lora_run():
    check(get_peft_model(build(FAMILY), LoraConfig(r=4, target_modules="all-linear")).get_base_model(), FAMILY)


def test_a_frozen_vision_tower():
    model = build("qwen3_vl")
    model.model.visual.requires_grad_(False)
    check(model, "qwen3_vl")


@pytest.mark.parametrize(
    ("family", "how"),
    [
        *((name, "frozen") for name in ("qwen3", "gemma3_sliding", "mixtral", "gpt2")),
        (FAMILY, "trained"),
        (FAMILY, "adapted"),
    ],
)
def test_a_language_model_behind_something_that_is_trained(family, how):
    """LLaVA's first stage: `inputs_embeds` require a gradient, whatever of the model itself does."""
    model = build(family).requires_grad_(how == "trained")
    if how == "adapted":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).get_base_model()
    batch = inputs(model, family)
    batch["inputs_embeds"] = torch.randn(1, LENGTH, model.config.hidden_size, requires_grad=True)
    del batch["input_ids"]
    cost = trace(model)
    forward, backward, experts = expect(model, cost.with_input_gradients(), family)
    logits, seen = count_forward(model, batch)
    seen_backward = count_backward(logits.sum())
    assert seen == forward
    assert not backward - seen_backward
    assert sum((seen_backward - backward).elements()) == experts
    more = expect(model, cost, family)[1]
    assert (backward == more) == (how == "trained")  # whose embeddings lie below everything too


# the method has two names: the old one is all that transformers 5.17 has, the new one the only one without a warning
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_a_checkpointed_step():
    plain = build(FAMILY)
    check_recompute(plain, enable_checkpointing(build(FAMILY)), trace(plain), FAMILY, "full")


def test_a_reward_model():
    config = tiny_config(FAMILY)
    config.num_labels = 1
    model = Qwen3ForSequenceClassification._from_config(config, attn_implementation="eager", dtype=torch.float32)
    cost, batch = trace(model), inputs(model, FAMILY, ROWS)
    rewards, seen = count_forward(model, batch)
    # Bradley and Terry 1952: the chosen answer should win
    seen_backward = count_backward(-F.logsigmoid(rewards[0] - rewards[1]).sum())
    forward, backward, _ = expect(model, cost, FAMILY, ROWS)
    assert (seen, seen_backward) == (forward, backward)


class Regularised(nn.Module):
    """A language model with a frozen teacher inside it, and a probe that sends no gradients back."""

    def __init__(self):
        super().__init__()
        self.model, self.teacher, self.probe = build(FAMILY), build(FAMILY).requires_grad_(False), nn.Linear(160, 3)

    def forward(self, input_ids, position_ids=None, use_cache=False):
        logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache).logits
        with torch.no_grad():
            target = self.teacher(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache).logits
        return SimpleNamespace(logits=(logits - target) + self.probe(logits.detach()).sum(-1, keepdim=True))


def test_detached_branches_inside_a_model():
    check(Regularised(), FAMILY)


def test_accumulated_steps_add_up():
    model = build(FAMILY)
    cost, sizes = trace(model), (19, 31, 8)
    counts = [cost.count(Workload([size])) for size in sizes]
    assert sum(counts) == cost.count(sum(Workload([size]) for size in sizes)) == cost.count(Workload(sizes))
    for size, count in zip(sizes, counts, strict=True):
        logits, seen = count_forward(model, {"input_ids": torch.randint(10, 160, (1, size)), "use_cache": False})
        dispatched = seen.total() + sum(count_backward(logits.sum()).elements())
        # in each of two layers, size (size - 1) / 2 hidden pairs of 4 heads of 8 + 8, three times over
        assert dispatched == count.total + 2 * 3 * 2 * 4 * (8 + 8) * size * (size - 1) // 2


class FusedLoss(torch.autograd.Function):
    """Projects to the vocabulary and takes the loss chunk by chunk, with the gradients made in forward, as Liger's."""

    @staticmethod
    def forward(ctx, states, weight, targets):
        grad_states, grad_weight, loss = [], torch.zeros_like(weight), 0.0
        for x, y in zip(states.split(16), targets.split(16), strict=True):
            logits = x @ weight.T
            grad = logits.softmax(-1) - F.one_hot(y, len(weight))
            loss = loss + F.cross_entropy(logits, y, reduction="sum")
            grad_states.append(grad @ weight)
            grad_weight += grad.T @ x
        ctx.save_for_backward(torch.cat(grad_states), grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad):
        grad_states, grad_weight = ctx.saved_tensors
        return grad * grad_states, grad * grad_weight, None


class Fused(nn.Module):
    """A causal language model under the fused loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids=None, use_cache=False):
        states = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)[0]
        return SimpleNamespace(logits=FusedLoss.apply(states[0], self.model.lm_head.weight, input_ids[0]))


def test_a_fused_loss_moves_gradients_into_forward_and_changes_no_total():
    model = build(FAMILY)
    cost, batch = trace(model), inputs(model, FAMILY)
    forward, backward, _ = expect(model, cost, FAMILY)
    loss, seen = count_forward(Fused(model), batch)
    seen_backward = count_backward(loss)
    head = forward["lm_head"]
    assert seen.total() == forward.total() + 2 * head
    assert backward - seen_backward == Counter({head: 2})
    assert not seen_backward - backward


def test_a_fused_loss_is_refused_with_the_way_out():
    with pytest.raises(TraceError, match=r"multiplies matrices inside FusedLoss.*Trace the model without this kernel"):
        trace(Fused(build(FAMILY)))


def test_counts_of_models_with_other_parts_keep_a_row_each():
    policy, reward = trace(build(FAMILY)).count(STEP), trace(tiny_config("gemma3_sliding")).count(STEP)
    both = policy + reward
    assert (both.total, both.forward) == (policy.total + reward.total, policy.forward + reward.forward)
    assert len({(row.name, row.driver) for row in both.rows}) == len(both.rows)
    assert both == sum([policy, reward], start=FlopCount())
