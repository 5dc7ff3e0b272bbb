"""Float32 products of the CPU: which library multiplies, and that either gives the same."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.devices import cpu_products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture
def onednn(monkeypatch):
    """Take oneDNN whatever this machine's processor is, and count its calls."""
    monkeypatch.setattr(cpu_products, "_ONEDNN_IS_FASTER", True)
    calls, plain = [], cpu_products._onednn_linear

    def counted(*tensors):
        calls.append(tensors)
        return plain(*tensors)

    monkeypatch.setattr(cpu_products, "_onednn_linear", counted)
    return calls


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [
        ("AMD EPYC 9355", "AVX512", True),
        ("AMD EPYC 7763", "AVX2", False),
        ("Intel(R) Xeon(R) Platinum 8481C", "AVX512", False),
    ],
)
def test_onednn_is_for_amd_with_avx512(monkeypatch, name, capability, expected):
    monkeypatch.setattr(cpu_products, "cpu_name", lambda: name)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    assert cpu_products._prefers_onednn() is expected


@pytest.mark.parametrize(("rows", "high", "wide"), [(37, 5, 24), (37, 24, 5), (1, 3, 3)])
def test_products_are_those_of_torch(onednn, rows, high, wide):
    a, b, bias = torch.randn(rows, high), torch.randn(rows, wide), torch.randn(wide)
    weight = torch.randn(wide, high)
    total = torch.ones(high, wide)
    cpu_products.add_product_over_rows(total, a, b)
    torch.testing.assert_close(total, 1 + a.T @ b)
    torch.testing.assert_close(cpu_products.product(a, weight.T), a @ weight.T)
    torch.testing.assert_close(cpu_products.linear(a, weight, bias), F.linear(a, weight, bias))
    assert len(onednn) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_stay_with_torch(onednn, dtype):
    a, b = torch.randn(3, 4).to(dtype), torch.randn(4, 5).to(dtype)
    assert torch.equal(cpu_products.product(a, b), a @ b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cpu_products.product(torch.ones(2, 3), torch.ones(3, 2)).dtype == torch.bfloat16
    assert not onednn


@pytest.mark.usefixtures("onednn")
def test_empty_factors_give_what_torch_gives():
    assert cpu_products.product(torch.ones(0, 4), torch.ones(4, 5)).shape == (0, 5)
    assert torch.equal(cpu_products.product(torch.ones(3, 0), torch.ones(0, 5)), torch.zeros(3, 5))
    assert cpu_products.linear(torch.ones(3, 4), torch.ones(0, 4)).shape == (3, 0)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_learn_as_those_of_torch(onednn, bias, is_compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20, bias=bias), nn.SiLU(), nn.Linear(20, 4, bias=bias), nn.Linear(4, 3))
    x = torch.randn(2, 7, 6, requires_grad=True)

    def gradients(run):
        total = run(x).square().sum()
        return [total, *torch.autograd.grad(total, [x, *model.parameters()])]

    expected, names = gradients(model), [name for name, _ in model.named_parameters()]
    cpu_products.use_fast_products(model, but=model[3])
    assert type(model[3]) is nn.Linear
    assert [name for name, _ in model.named_parameters()] == names
    for got, want in zip(
        gradients(torch.compile(model, backend="aot_eager") if is_compiled else model), expected, strict=True
    ):
        torch.testing.assert_close(got, want)
    assert is_compiled or len(onednn) == 2 * 3


def test_no_other_file_knows_the_library():
    """One file and one seam: who multiplies calls functions that are PyTorch's own where they are not needed."""
    root = Path(cpu_products.__file__).parents[1]
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert path.name == "cpu_products.py" or not re.search(r"_?ONEDNN_|takes_onednn|_OneDnn", text), path
