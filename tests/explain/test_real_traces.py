"""Traces that torch.profiler really writes, of a CPU: the fields are those of the installed torch, not of our hand."""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from headway.explain.attribution import Phase
from headway.explain.breakdown import OUTSIDE, break_down
from headway.explain.products import gemms_of
from headway.explain.trace import read_trace
from headway.explain.waterfall import explain


class Model(torch.nn.Module):
    """Three layers, the second recomputed in backward, each telling its path."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for i in range(3):
            x = checkpoint(self._layer, i, x, use_reentrant=False) if i == 1 else self._layer(i, x)
        return x

    def _layer(self, i, x):
        with record_function(f"module:layers.{i}"):
            return torch.relu(self.layers[i](x))


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for step in (1, 2, 3):
            with record_function(f"ProfilerStep#{step}"):
                with record_function("phase:data_wait"):
                    x = torch.randn(256, 64)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    profiler.export_chrome_trace(str(path))
    return read_trace(path)


def test_the_steps_of_a_cpu_are_all_there_and_add_up(trace):
    found = explain([trace])
    assert [one.step for one in found.steps] == [1, 2, 3]
    for one in found.steps:
        assert sum(line.ns for line in one.lines) == one.duration_ns
        lines = {line.key: line.ns for line in one.lines}
        assert min(lines["matmul"], lines["memory"], lines["optimizer"], lines["idle.data"], lines["idle.launch"]) > 0
        assert lines["communication"] == lines["copies"] == 0


def test_operators_of_a_cpu_belong_to_modules_and_the_checkpointed_one_runs_twice(trace):
    for waterfall in explain([trace]).steps:
        spent = {share.name: Counter(share.by_phase) for share in break_down(waterfall, "module")}
        for i in range(3):
            assert min(spent[f"layers.{i}"][phase] for phase in (Phase.FORWARD, Phase.BACKWARD)) > 0
            assert (spent[f"layers.{i}"][Phase.RECOMPUTED] > 0) == (i == 1)
        assert spent[OUTSIDE][Phase.RECOMPUTED] == 0


def test_products_of_a_cpu_are_all_attributed(trace):
    measured, _ = explain([trace]).steps[0].measured
    modules = {
        module
        for work, module in zip(measured.attribution.work, measured.attribution.module, strict=True)
        if work == "matmul"
    }
    assert modules == {"layers.0", "layers.1", "layers.2"}


def test_products_of_a_cpu_have_the_flops_that_ran_and_no_more(trace):
    for waterfall in explain([trace]).steps:
        rows = gemms_of(waterfall)
        assert sum(row.ns for row in rows) == next(line.ns for line in waterfall.lines if line.key == "matmul")
        flops = sum(row.product.flops * row.calls for row in rows if row.product is not None)
        # forward of 3 layers and 1 again, gradients of 3 weights and of 2 inputs
        assert flops == (3 + 1 + 3 + 2) * 2 * 256 * 64 * 64
