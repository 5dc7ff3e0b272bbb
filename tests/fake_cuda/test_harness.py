"""The pretended device itself: it sees what makes a host wait, what lives, and what a GPU would refuse."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fake_cuda.backward import backward
from fake_cuda.device import pretend_cuda
from fake_cuda.watch import Watch

DEVICE = "cuda:0"


@pytest.fixture
def watch():
    with pretend_cuda(), Watch() as watch, watch.at("test"):
        yield watch


def on_device(*values, dtype=None):
    with torch.no_grad():
        return torch.tensor(values, dtype=dtype).to(DEVICE)


ASKING = {  # of floats and of integers on the device
    "item": lambda _, ids: ids[0].item(),
    "bool": lambda _, ids: bool((ids == 1).all()),
    "tolist": lambda _, ids: ids.tolist(),
    "nonzero": lambda _, ids: (ids == 1).nonzero(),
    "mask": lambda x, ids: x[ids == 1],
    "mask that is written": lambda x, ids: x.index_put((ids == 1,), x[0, 0]),
    "masked_select": lambda x, ids: x.masked_select(ids[:, None] == 1),
    "repeats": lambda _, ids: torch.repeat_interleave(ids, ids),
    "unique": lambda _, ids: ids.unique(),
    "to the host": lambda x, _: x.cpu(),
    "from pageable memory": lambda *_: torch.ones(3).to(DEVICE),
    "equal": lambda _, ids: torch.equal(ids, ids + 1),
}


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_what_makes_the_host_wait_is_seen_with_its_place(watch, ask):
    x, ids = torch.empty(4, 8, device=DEVICE), on_device(1, 2, 3, 1)
    watch.waits.clear()
    ask(x, ids)
    assert len(watch.waits) == 1
    assert "test_harness.py" in watch.waits[0].where


def test_what_does_not_wait_is_not_counted(watch):
    x, ids = torch.empty(4, 8, device=DEVICE), on_device(1, 2, 3, 1)
    watch.waits.clear()
    x[ids], x.index_select(0, ids), ids.cumsum(0), x.masked_fill(ids[:, None] == 1, 0.0), x.sort()
    torch.repeat_interleave(ids, ids, output_size=7)
    assert not watch.waits


def test_integers_keep_their_values(watch):
    ids = on_device(1, 2, 3, 1)
    assert (ids == 1).cumsum(0).tolist() == [1, 1, 1, 2]
    assert torch.empty(4, 8, device=DEVICE)[ids == 1].shape == (2, 8)
    ids[1] = 7
    assert ids.tolist() == [1, 7, 3, 1]
    with pytest.raises(RuntimeError, match="integers of the device that follow from what it computed"):
        torch.empty(5, device=DEVICE).argsort().tolist()


def test_a_scatter_by_a_mask_waits_in_its_backward(watch):
    x = torch.empty(4, 8, device="cuda", requires_grad=True)
    rows = torch.empty(2, 8, device="cuda", requires_grad=True)
    out = (x * 2).masked_scatter(on_device(1, 0, 1, 0, dtype=torch.bool)[:, None], rows * 2).sum()
    watch.waits.clear()
    backward(out, watch)
    assert [wait.what for wait in watch.waits] == ["aten::masked_scatter_backward"]
    assert rows.grad.shape == rows.shape


REFUSED = {
    "device": lambda x, _: x + torch.ones(4, 8),
    "dtype": lambda x, y: x @ y.bfloat16(),
    "shape": lambda _, y: y.bfloat16() @ y.bfloat16(),
    "keyword": lambda x, y: torch.mul(x, y.T, scale=2.0),
    "arity": lambda x, y: torch.ops.aten.mm(x, y, 2.0),
}  # fmt: skip


@pytest.mark.parametrize("wrong", REFUSED.values(), ids=REFUSED)
def test_what_a_device_refuses_is_refused(watch, wrong):
    assert watch.moment == "test"
    with pytest.raises((RuntimeError, TypeError)):
        wrong(torch.empty(4, 8, device=DEVICE), torch.empty(8, 4, device=DEVICE))


def test_bytes_are_counted_as_long_as_they_live(watch):
    before = watch.alive
    x = torch.empty(1024, 1024, device=DEVICE)
    y = x.view(-1)  # the same memory
    assert watch.alive - before == 4 << 20
    with watch.at("more"):
        x.double()
    del x
    assert watch.alive - before == 4 << 20
    del y
    assert watch.alive == before
    assert watch.peaks["more"] - before == 12 << 20


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, factor, x, y):
        ctx.factor = factor
        return x * factor, y * factor

    @staticmethod
    def backward(ctx, grad, _):
        return None, grad * ctx.factor, None


def test_nodes_one_by_one_give_the_engines_gradients():
    found = []
    for run in (torch.autograd.backward, backward):
        torch.manual_seed(0)
        weights = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]

        def block(x, weight):
            return x + F.gelu(x @ weight) * weight[0]

        x = torch.randn(5, 8)
        for weight in (*weights, weights[0]):
            x = checkpoint(block, x, weight, use_reentrant=False)
            x = _Doubled.apply(0.5, x, weight)[0].view(5, 8)
        run(x.bfloat16().float().square().sum())
        found.append([weight.grad for weight in weights])
    for ours, engines in zip(*found, strict=True):
        torch.testing.assert_close(ours, engines, rtol=1e-6, atol=1e-6)
