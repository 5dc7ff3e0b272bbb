"""An example of a model's arguments: what it is traced in, what is refused, and how its parts are named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.errors import TraceError
from headway.tracing import trace


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_model_is_traced_in_its_own_dtype(dtype):
    seen = set()

    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=dtype)

        def forward(self, x):
            seen.add(self.linear(x).dtype)
            return self.linear(x)

    trace(Watching(), inputs=(torch.randn(2, 4),))
    assert seen == {dtype}


class Failing(nn.Module):
    def __init__(self, fail):
        super().__init__()
        self.linear, self.fail = nn.Linear(4, 4), fail

    def forward(self, x):
        return self.fail(self.linear(x))


def _raise(_x):
    raise KeyError("nothing here")


@pytest.mark.parametrize(
    ("fail", "where", "cause"),
    [
        (_raise, "raises", KeyError),
        (lambda x: x.view(3, 3), "fails in view", RuntimeError),
    ],
)
def test_whatever_a_model_raises_names_its_module_and_operation(fail, where, cause):
    model = nn.Sequential(nn.Linear(4, 4), Failing(fail))
    with pytest.raises(TraceError, match=rf"module 1 \(Failing\) {where}") as error:
        trace(model, inputs=(torch.randn(2, 4),))
    assert isinstance(error.value.__cause__, cause)
    with pytest.raises(TraceError, match=r"module \(the model\) \(Failing\)"):
        trace(model[1], inputs=(torch.randn(2, 4),))


def test_nested_arguments_are_refused_with_the_way_out():
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    with pytest.raises(TraceError, match="cumulative boundaries"):
        trace(nn.Linear(4, 4), inputs=(nested,))


def test_nested_activations_are_refused_with_the_way_out():
    def nested(x):
        jagged = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 2]))
        return F.scaled_dot_product_attention(*[jagged.unflatten(-1, [2, 2]).transpose(1, 2)] * 3).values()

    with pytest.raises(TraceError, match=r"module 1 makes a nested tensor.*varlen_attn"):
        trace(nn.Sequential(nn.Linear(4, 4), Failing(nested)), inputs=(torch.randn(2, 4),))


class _Packed(nn.Module):
    """A layer with two weights to a byte that does not say its sizes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)


def test_weights_in_integers_whose_layer_is_not_said_are_refused_with_the_way_out():
    with pytest.raises(TraceError, match=r"module 1 \(_Packed\) stores 1.weight quantised .*cost_model="):
        trace(nn.Sequential(nn.Linear(4, 4), _Packed()), inputs=(torch.randn(2, 4),))


def test_parts_of_an_example_are_named_without_a_guess_at_what_they_see():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(2), nn.TransformerEncoderLayer(36, 2, 8), nn.Linear(36, 2))
    cost = trace(model, inputs=(torch.randn(2, 3, 8, 8),))
    components = [row.component for row in cost.rows]
    assert components == [
        "other.convolution", "other.projections", "other.attention", "other.projections", "other.mlp", "other.mlp",
        "other.mlp",
    ]  # fmt: skip
    assert repr(cost) == f"CostModel('Sequential': 7 rows, {sum(p.numel() for p in model.parameters()):,} parameters)"
