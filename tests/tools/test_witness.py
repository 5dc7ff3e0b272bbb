"""The second witness on small models: it sees what it says it sees, and a wrong ledger does not pass."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from headway.tracing import trace
from helpers.cases import some
from helpers.models import tiny_config
from tools.sweep import witness
from tools.sweep.sizes import read_sizes
from tools.sweep.uses import Uses
from tools.sweep.witness import Mixture, check_ledger

SMALL = ["gpt2", "qwen3_tied", "gpt_oss_sinks", "deepseek_v3", "qwen3_vl_moe", "qwen3_next", "jamba"]


@pytest.fixture(scope="module")
def mixture():
    config = tiny_config("qwen3_moe")
    return config, trace(config)


def changed(cost, rows):
    return replace(cost, rows=tuple(rows))


@pytest.mark.parametrize("family", some(SMALL, {"gpt2", "qwen3_vl_moe", "jamba"}.__contains__))
def test_an_honest_ledger_has_no_unexplained_exception(family):
    config = tiny_config(family)
    cost = trace(config)
    seen = check_ledger(config, cost)
    assert seen.unexplained == []
    with_weights = {name for name, p in cost_shapes(config).items() if len(p) > 1}
    assert sum(seen.parameters.values()) == len(with_weights)
    assert seen.modules > 5


def cost_shapes(config):
    from headway.tracing.build import twin_of_config

    return {name: tuple(p.shape) for name, p in twin_of_config(config).named_parameters()}


def test_experts_and_picks_are_those_of_the_configuration(mixture):
    config, cost = mixture
    seen = check_ledger(config, cost)
    assert seen.mixtures == [
        Mixture(f"model.layers.{layer}.mlp.experts", "tokens", config.num_experts, config.num_experts_per_tok)
        for layer in range(config.num_hidden_layers)
    ]
    assert seen.parameters == {"row": 2 * (4 + 1 + 2) + 1, "looked up": 1}


def test_a_row_billed_twice_is_seen(mixture):
    config, cost = mixture
    rows = [replace(row, forward=2 * row.forward) if row.module.endswith("1.mlp.gate") else row for row in cost.rows]
    (found,) = check_ledger(config, changed(cost, rows)).unexplained
    assert found.where == "model.layers.*.mlp.gate.weight"
    assert "billed" in found.what


def test_experts_billed_for_every_token_break_the_law(mixture):
    # Llama 4's defect: each expert runs on every token, and useful work would be the picks'
    config, cost = mixture
    rows = [replace(row, forward=2 * row.forward) if row.op == "experts" else row for row in cost.rows]
    found = check_ledger(config, changed(cost, rows)).unexplained
    assert any("active elements" in e.what for e in found)


def test_active_elements_that_no_router_picks_are_seen(mixture):
    config, cost = mixture
    rows = [replace(row, forward=2 * row.forward) if row.op == "experts" else row for row in cost.rows]
    parameters = tuple(
        replace(p, active=2 * p.active) if p.component == "language.experts" else p for p in cost.parameters
    )
    found = check_ledger(config, replace(changed(cost, rows), parameters=parameters)).unexplained
    assert any(e.what == "4 of 4 experts billed" for e in found)


def test_a_weight_without_a_row_is_seen(mixture):
    config, cost = mixture
    rows = [row for row in cost.rows if not row.module.endswith("self_attn.q_proj")]
    (found,) = check_ledger(config, changed(cost, rows)).unexplained
    assert (found.where, found.what) == ("model.layers.*.self_attn.q_proj.weight", "is multiplied, and no row is its")


def test_a_parameter_that_nothing_reads_is_seen(mixture, monkeypatch):
    config, cost = mixture
    twin = witness.build.twin_of_config

    def with_more(config):
        model = twin(config)
        model.model.forgotten = nn.Parameter(torch.empty(3, 5, device="meta"))
        return model

    monkeypatch.setattr(witness.build, "twin_of_config", with_more)
    more = cost.parameters[0]
    # `named_parameters` puts a module's own before those below it, and bits number them in that order
    rows = [replace(row, gradients=tuple(replace(g, needs=g.needs << 1) for g in row.gradients)) for row in cost.rows]
    cost = replace(changed(cost, rows), parameters=(replace(more, name="model.forgotten"), *cost.parameters))
    (found,) = check_ledger(config, cost).unexplained
    assert found.where == "model.forgotten"


def test_products_of_weights_are_followed_through_views_casts_and_slices():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.joint = nn.Parameter(torch.randn(24, 8))
            self.scale = nn.Parameter(torch.randn(1, 8))
            self.queries = nn.Parameter(torch.randn(3, 8))
            self.table = nn.Embedding(11, 8)
            self.conv = nn.Conv1d(8, 4, kernel_size=3, stride=2)

        def forward(self, ids):
            x = self.table(ids) * self.scale
            q, k, _ = self.joint.to(torch.float64).float().chunk(3)
            x = x @ q.T + torch.einsum("sc,dc->sd", x, k)
            asked = nn.functional.linear(self.queries, self.conv.weight[:, :, 0])
            return self.conv(x.T[None]), asked

    model = Odd()
    with Uses(model) as uses:
        model(torch.arange(9))
    assert uses.executed == {
        frozenset({"joint"}): 2 * (2 * 9 * 8 * 8),
        frozenset({"conv.weight"}): 2 * 4 * 4 * 8 * 3 + 2 * 3 * 4 * 8,
    }
    assert uses.roles == {
        "table.weight": {"table"},
        "scale": {"elementwise"},
        "joint": {"weight"},
        "queries": {"input"},
        "conv.weight": {"weight"},
        "conv.bias": {"elementwise"},
    }


def test_projections_of_multi_head_attention_are_counted_by_their_own_lengths():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x, y = torch.randn(1, 5, 8), torch.randn(1, 7, 8)
    with Uses(attention) as uses:
        attention(x, y, y)
    assert uses.executed[frozenset({"in_proj_weight"})] == 2 * 8 * 8 * (5 + 7 + 7)
    assert uses.executed[frozenset({"out_proj.weight"})] == 2 * 8 * 8 * 5


def test_sizes_agree_with_the_ledger_or_are_refused_and_others_are_seen(mixture):
    config, cost = mixture
    seen = check_ledger(config, cost)
    given = config.to_dict()
    for alone in (False, True):
        assert read_sizes(given, "small", cost, seen.mixtures, alone=alone).status == "agrees"
    other = {**given, "num_experts_per_tok": 4}
    assert read_sizes(other, "small", cost, seen.mixtures, alone=False).status == "refuses"  # the ledger settles it
    alone = read_sizes(other, "small", cost, seen.mixtures, alone=True)
    assert alone.status == "disagrees"
    assert "experts and picks {(4, 4)} for {(4, 2)}" in alone.detail
    fewer = read_sizes({**given, "num_hidden_layers": 1}, "small", cost, seen.mixtures, alone=True)
    assert "layers with attention 1 for 2" in fewer.detail
    assert read_sizes({"model_type": "odd"}, "odd", cost, [], alone=False).status == "refuses"
