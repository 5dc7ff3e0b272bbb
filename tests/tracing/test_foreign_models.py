"""Any module counts as it runs: models of other libraries, and modules of every build, beside an independent counter.

The counter sees a real eager step (`helpers.eager_counter`). Two differences are derived, not waved through: pairs that
a mask forbids, which eager attention computes, and outer products in which nothing requires a gradient. A model that
cannot be counted is refused with the reason that the table names.
"""

import importlib.util

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers import foreign_models

if importlib.util.find_spec("torchvision") is not None:
    foreign_models.torchvision()  # before transformers imports it, whose import fails beside kernels of another torch

from headway.compat.mfu_tracker import profile_flops
from headway.count import Workload
from headway.devices import Peak
from headway.errors import TraceError, UsageError
from headway.meter import Meter
from headway.tracing import trace
from headway.tracing.verify import verify
from helpers.eager_counter import counted_eagerly
from helpers.foreign_models import FOREIGN
from helpers.own_modules import OWN
from helpers.plain_models import counted

# one of each kind of output, attention and layer, all of them fast
SAMPLE = (
    "transformers.BertForPreTraining",
    "transformers.DebertaV2Model",
    "transformers.NystromformerModel",
    "transformers.GPT2LMHeadModel",
    "transformers.ViTMAEForPreTraining",
    "transformers.SiglipVisionModel",
    "transformers.T5ForConditionalGeneration",
    "transformers.VJEPA2Model",
    "transformers.DacModel",
    "transformers.Wav2Vec2Model",
    "transformers.OwlViTForObjectDetection",
    "transformers.SamModel",
    "transformers.CsmForConditionalGeneration",
    "transformers.TimeSeriesTransformerModel",
    "transformers.VitsModel",
    "diffusers.HunyuanVideoTransformer3DModel",
    "diffusers.ControlNetModel",
    "diffusers.Lumina2Transformer2DModel",
    "diffusers.DiTTransformer2DModel",
    "diffusers.AutoencoderKL",
)


def holds(example):
    """Compare a model's ledger with its real step, or see it refused for the reason that the table names."""
    torch.manual_seed(0)
    model, arguments = example.build().train(), example.arguments()
    if example.refused:
        with pytest.raises(TraceError, match=example.refused):
            trace(model, inputs=arguments)
        return
    forward, backward = counted_eagerly(model, arguments)
    cost = trace(model, inputs=arguments)
    assert counted(cost) == (forward - example.forbidden, backward - 2 * example.forbidden)
    assert {row.driver for row in cost.rows} <= {"segments", "packs"}  # of one example nothing more is known


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.long) for name in FOREIGN]
)
def test_models_of_other_libraries_count_as_they_run(name):
    library = name.partition(".")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    holds(FOREIGN[name])


@pytest.mark.parametrize("name", OWN)
def test_modules_of_every_build_count_as_they_run(name):
    holds(OWN[name])


@st.composite
def masks(draw):
    """Draw axes of the queries before tokens and size, and a mask of any shape that broadcasts to their scores."""
    rows = draw(st.lists(st.integers(1, 3), min_size=0, max_size=3))
    queries, keys = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    full = [*rows, queries, keys]
    axes = draw(st.integers(2, len(full)))  # PyTorch wants queries and keys of a mask
    shape = [draw(st.sampled_from([1, size])) for size in full[len(full) - axes :]]
    shape[-1] = keys  # a mask of one key is none that PyTorch's kernels take
    bits = draw(st.lists(st.booleans(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    mask = np.array(bits).reshape(shape)
    mask[..., 0] = True  # a query without keys has no probabilities
    return rows, queries, mask


@given(masks(), st.sampled_from(["bool", "float", "learnt"]))
def test_masked_attention_costs_the_pairs_that_numpy_counts(drawn, kind):
    rows, queries, mask = drawn
    keys, size, values = mask.shape[-1], 3, 5
    pairs = int(np.broadcast_to(mask, (*rows, queries, keys)).sum())  # of all rows and heads together
    laid = torch.from_numpy(mask)
    if kind != "bool":
        laid = torch.zeros(mask.shape).masked_fill(~laid, -torch.inf)

    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(2, size, bias=False), nn.Linear(2, size), nn.Linear(2, values)
            self.bias = nn.Parameter(torch.zeros(mask.shape))

        def forward(self, x, y):
            bias = self.bias + laid if kind == "learnt" else laid
            return F.scaled_dot_product_attention(self.q(x), self.k(y), self.v(y), attn_mask=bias)

    cost = trace(Attending(), inputs=(torch.randn(*rows, queries, 2), torch.randn(*rows, keys, 2)))
    attention = [row for row in cost.rows if row.op == "attention"]
    # Q K^T and P V forward; backward dV and dP by the size of values, dQ and dK by that of keys
    assert sum(row.forward for row in attention) == 2 * pairs * (size + values)
    assert sum(g.flops for row in attention for g in row.gradients) == 2 * pairs * 2 * (size + values)
    assert {g.phase for row in attention for g in row.gradients} == {"dgrad"}


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
def test_meter_and_profile_start_backward_where_trace_does(results, backward):
    model, ids = WithValues(), torch.randint(0, 20, (2, 7))
    per_token = TRUNK + HEAD + VALUE + backward
    meter = Meter(model, results=results, peak=Peak("test device", 1e15, "fp32", "made up for a test"))
    assert meter.cost_model.count(Workload([7, 7])).total == 14 * per_token
    assert int(profile_flops(model, (ids,), results=results)) == 14 * per_token


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
        (lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 2])), "fails in", AttributeError),
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


def test_weights_in_integers_are_refused_with_the_way_out():
    class Packed(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)

    model = nn.Sequential(nn.Linear(4, 4), Packed())
    with pytest.raises(TraceError, match=r"module 1 \(Packed\) stores 1.weight quantised .*cost_model="):
        trace(model, inputs=(torch.randn(2, 4),))


def test_layers_that_share_a_mask_each_count_their_own_queries():
    mask = torch.arange(5) < 3

    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, y):
            q, k = self.q(x), self.k(y)
            return [F.scaled_dot_product_attention(part, k, k, attn_mask=mask) for part in (q, q[:, :2])]

    cost = trace(Sharing(), inputs=(torch.randn(3, 7, 4), torch.randn(3, 5, 4)))
    # three heads, and 7 or 2 queries that see 3 keys each
    assert sum(row.forward for row in cost.rows if row.op == "attention") == 3 * (7 + 2) * 3 * 2 * (4 + 4)


def test_a_mask_of_more_axes_than_its_scores_is_refused():
    model = OWN["attention-learnt-bias"].build()
    model.function = lambda _, h: F.scaled_dot_product_attention(h, h, h, attn_mask=torch.ones(2, 1, 10, 10) > 0)
    with pytest.raises(
        TraceError, match=r"lays a mask of shape \(2, 1, 10, 10\) over scores of shape \(1, 6, 10, 10\)"
    ):
        trace(model, inputs=(torch.randn(6, 10, 8),))


def test_parts_of_an_example_are_named_without_a_guess_at_what_they_see():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(2), nn.TransformerEncoderLayer(36, 2, 8), nn.Linear(36, 2))
    cost = trace(model, inputs=(torch.randn(2, 3, 8, 8),))
    components = [row.component for row in cost.rows]
    assert components == [
        "other.convolution", "other.projections", "other.attention", "other.projections", "other.mlp", "other.mlp",
        "other.mlp",
    ]  # fmt: skip
    assert repr(cost) == f"CostModel('Sequential': 7 rows, {sum(p.numel() for p in model.parameters()):,} parameters)"
