"""The forwards of a real model, hooked: what is counted, what is left out, what is refused."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway import Workload, trace
from headway.errors import UsageError, WorkloadError
from headway.integrations.loops import ForwardCalls, logged
from headway.meter import Meter
from helpers.loops import PEAK, ROWS, collate, tiny

IDS = torch.full((2, 9), 7)


def metered(model, forwards, **options):
    """Meter forwards as one step."""
    meter = Meter(model, peak=PEAK)
    with ForwardCalls(model, meter, **options):
        forwards()
    meter.step()
    return meter.close()


def test_forwards_with_gradients_cost_a_backward_and_others_do_not():
    model = tiny()

    def forwards():
        model(IDS, labels=IDS)  # by position
        with torch.no_grad():
            model(input_ids=IDS[:1])
        model.eval()
        model(input_ids=IDS)
        model.train()

    run = metered(model, forwards)
    cost = trace(model)
    assert run.flops == cost.count(Workload([9, 9])) + cost.count(Workload([9]), forward_only=True)
    assert run.tokens == 18


def test_a_compiled_model_is_counted_as_well():
    model = tiny()
    compiled = torch.compile(model, backend="eager")
    meter = Meter(model, peak=PEAK)
    with ForwardCalls(model, meter):
        compiled(input_ids=IDS)
        meter.step()  # it compiled, and is left out
        compiled(input_ids=IDS)
        meter.step()
    assert meter.close().flops == trace(model).count(Workload([9, 9]))


def test_a_workload_of_ones_own_is_asked_with_the_forwards_arguments():
    model = tiny()
    run = metered(model, lambda: model(IDS), workload=lambda given: Workload([int(given["input_ids"].sum())]))
    assert run.tokens == 7 * 18


@pytest.mark.filterwarnings("ignore:.*generation flags are not valid:UserWarning")
def test_generation_within_a_step_is_refused():
    model = tiny()
    meter = Meter(model, peak=PEAK)
    with ForwardCalls(model, meter), pytest.raises(WorkloadError, match=r"it generates.*eval\(\).*Meter\.count"):
        model.generate(IDS, max_new_tokens=3, do_sample=False)


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_is_dispatched_beside_what_the_model_itself_does():
    model, batch = tiny(), collate(ROWS)
    with Dispatched() as plain:
        model(**batch).loss.backward()
    model.zero_grad()
    meter = Meter(model, peak=PEAK)
    with ForwardCalls(model, meter), Dispatched() as hooked:
        model(**batch).loss.backward()
        meter.step()
    views = {"alias", "detach"}  # a tensor handed to NumPy; the data are not copied
    assert [name for name in hooked.names if name not in views] == [name for name in plain.names if name not in views]


def test_numbers_of_phases_are_picked_by_paths_within_the_record():
    other = tiny()
    ledger = trace(other)
    meter = Meter(tiny(), peak=PEAK, log_every=1, others=[(other, ledger)], memory_bytes_per_s=1e12)
    meter.count(Workload([5]))
    with meter.phase("score", forward_only=True):
        meter.count(Workload([7]), cost_model=ledger)
    window = meter.step()
    # with its module a ledger tells bytes
    assert window.phases["score"].flops.total == ledger.count(Workload([7]), forward_only=True).total
    assert window.phases["score"].bytes_moved > 0
    numbers = logged(window, ("mfu", "phases/score/flops/total", "phases/*/wall_s"), "h")
    assert set(numbers) == {"h/mfu", "h/phases/score/flops/total", "h/phases/score/wall_s", "h/phases/rest/wall_s"}
    assert numbers["h/phases/score/flops/total"] == window.phases["score"].flops.total
    assert logged(window, ("phases/rollout/mfu",)) == {}  # a phase that this window has not
    with pytest.raises(UsageError, match="a window has no phase/score/mfu to log"):
        logged(window, ("phase/score/mfu",))
    with pytest.raises(UsageError, match=r"cost_model=Qwen3ForCausalLM.*counted by itself"):
        meter.count(Workload([7]), cost_model=other)
