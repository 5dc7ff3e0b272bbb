"""Backward starts from the results that are named, wherever a model is traced."""

import pytest
import torch
from torch import nn

from headway.count import Workload
from headway.devices import Peak
from headway.errors import TraceError, UsageError
from headway.meter import Meter
from headway.tracing import trace
from headway.tracing.verify import verify


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 5)

    def forward(self, x):
        h = self.trunk(x).relu()
        return {"a": self.a(h), "b": self.b(h)}


@pytest.mark.parametrize(
    ("results", "trained"),
    [
        (None, {"trunk", "a", "b"}),
        ("a", {"trunk", "a"}),
        (["a", "b"], {"trunk", "a", "b"}),
        (lambda out: out["b"].mean(), {"trunk", "b"}),
    ],
)
def test_backward_starts_from_the_results_that_are_named_and_verify_agrees(results, trained):
    model, inputs = TwoHeads(), (torch.randn(4, 8),)
    cost = trace(model, inputs=inputs, results=results)
    assert {row.module for row in cost.rows if row.gradients} == trained
    lines, unseen = verify(model, Workload([1]), inputs=inputs, results=results)
    assert (unseen, {line.explanation for line in lines}) == (set(), {""})


class WithValues(nn.Module):
    """A language model with a value head: 2 x 8 x 16, 2 x 16 x 20 and 2 x 16 FLOPs a token."""

    def __init__(self):
        super().__init__()
        self.embed, self.trunk = nn.Embedding(20, 8), nn.Linear(8, 16)
        self.head, self.value = nn.Linear(16, 20), nn.Linear(16, 1)

    def forward(self, input_ids):
        h = self.trunk(self.embed(input_ids))
        return {"logits": self.head(h), "values": self.value(h)}


# forward; dgrad and wgrad of the heads that are trained, and both of the trunk, whose input is trained too
TRUNK, HEAD, VALUE = 2 * 8 * 16, 2 * 16 * 20, 2 * 16


@pytest.mark.parametrize(
    ("results", "backward"),
    [(None, 2 * (TRUNK + HEAD + VALUE)), ("logits", 2 * (TRUNK + HEAD)), ("values", 2 * (TRUNK + VALUE))],
)
def test_a_meter_starts_backward_where_trace_does(results, backward):
    model = WithValues()
    per_token = TRUNK + HEAD + VALUE + backward
    meter = Meter(model, results=results, peak=Peak("test device", 1e15, "fp32", "made up for a test"))
    assert meter.cost_model.count(Workload([7, 7])).total == 14 * per_token


def test_results_beside_a_cost_model_are_an_error():
    cost = trace(WithValues())
    with pytest.raises(UsageError, match="nothing is traced"):
        Meter(WithValues(), cost_model=cost, results="logits")


def test_a_result_that_is_not_there_is_an_error_that_names_those_that_are():
    with pytest.raises(TraceError, match=r"without floats named logits. It holds a, b"):
        trace(TwoHeads(), inputs=(torch.randn(4, 8),), results="logits")


def test_verify_finds_a_ledger_that_starts_from_one_of_two_results(monkeypatch):
    monkeypatch.setattr("headway.tracing.results.floats_in", lambda output: [output["a"]] if output else [])
    lines, _ = verify(TwoHeads(), Workload([1]), inputs=(torch.randn(4, 8),))
    assert [line.module for line in lines if line.explanation is None] == ["b"]
