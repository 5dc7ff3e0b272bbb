"""Each way in which PyTorch multiplies: read as the product that it is, or refused."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.count import Workload
from headway.errors import TraceError
from headway.tracing import trace
from headway.tracing.operation import OPAQUE, READERS
from helpers.counter import counted, dispatched

aten = torch.ops.aten


class Calls(nn.Module):
    """Calls a function with its inputs and with parameters of the shapes given."""

    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, *inputs):
        return self.function(*inputs, *self.weights)


def in_place(x, w):
    return x.new_zeros(4, 3).addmm_(x, w)


# (function, input shapes, weight shapes): what PyTorch's formulas see op by op
SEEN = {
    "einsum": (lambda x, w: torch.einsum("bti,hio->bhto", x, w), [(2, 7, 5)], [(3, 5, 4)]),
    "einsum of activations": (
        lambda x, w: torch.einsum(
            "bhqd,bhkd->bhqk", (x @ w).unflatten(-1, (2, 3)).transpose(1, 2), x[:, None] @ w[:, :3]
        ),
        [(2, 7, 5)],
        [(5, 6)],
    ),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([1], [0])), [(6, 5)], [(5, 3)]),
    "vector through a linear layer": (F.linear, [(5,)], [(3, 5)]),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b, x, w), [(2, 4, 5)], [(2, 5, 3), (2, 4, 3)]),
    "unfolded convolution": (lambda x, w: w @ F.unfold(x, 3), [(2, 3, 9, 9)], [(8, 27)]),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_product_counts_what_pytorch_counts(name):
    function, inputs, weights = SEEN[name]
    model, xs = Calls(function, *weights), tuple(torch.randn(shape) for shape in inputs)
    assert counted(trace(model, inputs=xs)) == dispatched(model, *xs)


# what PyTorch has no formula for: (function, input shapes, weight shapes, multiply-adds forward and backward)
DERIVED = {
    # the gradient of a matrix that meets a vector is their outer product, m k multiplications
    "mv": (lambda x, w: torch.mv(w, x), [(5,)], [(3, 5)], 15, 15),
    "mv of two weights": (lambda x, w, v: torch.mv(w, v) * x, [(3,)], [(3, 5), (5,)], 15, 2 * 15),
    "addmv": (lambda x, w, b: torch.addmv(b, w, x), [(5,)], [(3, 5), (3,)], 15, 15),
    "dot": (lambda x, w: torch.dot(w, x), [(5,)], [(5,)], 5, 5),
    "vdot": (lambda x, w: torch.vdot(w, x), [(5,)], [(5,)], 5, 5),
    "addr": (lambda x, w, b: torch.addr(b, w, x), [(5,)], [(3,), (3, 5)], 15, 15),
    "addbmm": (lambda x, w, b: torch.addbmm(b, x, w), [(2, 4, 5)], [(2, 5, 3), (4, 3)], 2 * 60, 2 * 60),
    "in place": (in_place, [(4, 5)], [(5, 3)], 60, 60),
    # 8 rows, sums over 7 x 5 x 6
    "bilinear": (F.bilinear, [(2, 4, 5), (2, 4, 6)], [(7, 5, 6)], 8 * 210, 8 * 210),
    # distances come from x y^T; autograd's node for the fast form computes both gradients, the direct one the needed
    "distances": (torch.cdist, [(2, 40, 5)], [(2, 30, 5)], 2 * 40 * 30 * 5, 2 * 2 * 40 * 30 * 5),
    "few distances": (torch.cdist, [(2, 9, 5)], [(2, 8, 5)], 2 * 9 * 8 * 5, 2 * 9 * 8 * 5),
    "distances in another norm": (lambda x, w: torch.cdist(x, w, p=1.0), [(2, 9, 5)], [(2, 8, 5)], 0, 0),
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_product_without_a_formula_counts_its_multiply_adds(name):
    function, inputs, weights, forward, backward = DERIVED[name]
    cost = trace(Calls(function, *weights), inputs=tuple(torch.randn(shape) for shape in inputs))
    assert counted(cost) == (2 * forward, 2 * backward)


def eight_bits(x, w):
    scale = torch.ones(())
    left, right = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).t()
    return torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16)


def integers(x, w):
    return torch._int_mm((x * 127).to(torch.int8), (w * 127).to(torch.int8).t()) * x.mean()


@pytest.mark.parametrize("function", [eight_bits, integers])
def test_quantised_products_cost_what_plain_ones_do(function):
    class Frozen(Calls):
        def forward(self, x):
            with torch.no_grad():
                quantised = super().forward(x)
            return quantised + x.sum() + self.weights[1].sum()

    cost = trace(Frozen(lambda x, w, _b: function(x, w), (16, 64), (1,)), inputs=(torch.randn(32, 64),))
    assert counted(cost) == (2 * 32 * 64 * 16, 0)


@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_weight_of_8_bits_is_multiplied_as_such(is_parameter):
    class Stored(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16, bias=False)
            weight = torch.zeros(16, 16).to(torch.float8_e4m3fn)
            if is_parameter:
                self.weight = nn.Parameter(weight, requires_grad=False)
            else:
                self.register_buffer("weight", weight)

        def forward(self, x):
            y, scale = self.linear(x), torch.ones(())
            left = y.detach().to(self.weight.dtype)
            return torch._scaled_mm(left, self.weight.t(), scale, scale, out_dtype=torch.bfloat16).float() + y

    # both products forward; the layer has no input to send a gradient to, and the stored product has none
    assert counted(trace(Stored(), inputs=(torch.randn(16, 16),))) == (2 * 2 * 16**3, 2 * 16**3)


def test_inference_mode_hides_nothing():
    class Taught(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(6, 6, 3, groups=2, padding=1))
            self.student = nn.Linear(8, 8)

        def forward(self, x):
            with torch.inference_mode():
                target = torch.einsum("btd,bsd->bts", *[self.teacher(x)] * 2)
                target = F.scaled_dot_product_attention(*[target[:, None]] * 3)
            return self.student(x) - target.sum()

    cost = trace(Taught(), inputs=(torch.randn(2, 6, 8),))
    forward = {row.module: row.forward for row in cost.rows if row.module}
    assert forward == {"teacher.0": 2 * 12 * 64, "teacher.1": 2 * 16 * 6 * 3 * 3, "student": 2 * 12 * 64}
    # 2 x 6 x 6 scores of 8, then attention of 2 x 6 x 6 pairs of 6 + 6
    assert [row.forward for row in cost.rows if not row.module] == [2 * 72 * 8, 2 * 72 * 12]
    assert [row.module for row in cost.rows if row.gradients] == ["student"]


# names of PyTorch's operations that speak of products but dispatch others, are elementwise, or prepare operands
NO_PRODUCTS = re.compile(
    r".*gamma.*|.*upsample.*|.*_backward(_\w+)?|.*(_prepack|_pack_\w+|flatten_weight|_search)|.*to_mkldnn.*|_?convert_.*|"
    r"_fused_sdp_choice|_compute_linear_combination|_?cum(max|min)(_helper)?|hamming_window|.*_pool.*|.*reorder.*|.*dummy"
)


def test_no_operation_of_pytorch_that_speaks_of_products_slips_through():
    speaks = re.compile(
        r"mm(?!on)|conv|attention|rnn|lstm|gru|cdist|linear|(?<![a-z])(mv|dot|ger|addr|vdot)(?![a-z])|euclid"
    )
    unknown = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten" or not speaks.search(name) or NO_PRODUCTS.fullmatch(name):
            continue
        packet = getattr(aten, name, None)
        if packet is None or packet in READERS or name in OPAQUE:
            continue
        overload = getattr(packet, packet.overloads()[0])
        if not overload._can_decompose():
            unknown.append(name)
    assert sorted(set(unknown)) == []


def test_an_opaque_product_is_refused_by_name():
    with pytest.raises(TraceError, match=r"runs aten\.conv_tbc\.default, a kernel that Headway cannot read"):
        trace(Calls(torch.conv_tbc, (3, 5, 4), (4,)), inputs=(torch.randn(9, 2, 5),))


def test_a_codebook_costs_its_distances_per_token():
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes, self.out = nn.Parameter(torch.zeros(40, 8)), nn.Linear(8, 3)

        def forward(self, x):
            with torch.no_grad():
                index = torch.cdist(x, self.codes).argmin(-1)
            return self.out(self.codes[index] + x)

    rows = trace(Codebook(), inputs=lambda w: torch.zeros(w.tokens, 8)).rows
    assert [(row.module, row.driver, row.forward) for row in rows] == [
        ("", "tokens", 2 * 40 * 8),
        ("out", "tokens", 2 * 8 * 3),
    ]
    assert not rows[0].gradients
    assert trace(Codebook(), inputs=lambda w: torch.zeros(w.tokens, 8)).count(Workload([10])).forward == 2 * 10 * 344
