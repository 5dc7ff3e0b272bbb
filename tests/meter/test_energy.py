"""The GPU is a stand-in with NVML's functions, as far as the meter calls them; the absence of one is real."""

# ruff: noqa: N802 - the stand-in's functions have NVML's names

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from headway.devices import Peak
from headway.errors import UsageError
from headway.log.boundary import ErrorBoundary
from headway.meter.energy import EnergyMeter, StateSampler, WindowEnergy, clocks_of
from headway.meter.tally import WHOLE, Sums, Tally
from headway.version import install_command

GPUS = ["GPU-aaaa1111-0000", "GPU-aaaa2222-0000", "GPU-bbbb3333-0000"]


class NVMLError(Exception):
    pass


class Board(ModuleType):
    """A machine of three boards; `total_mj` are their counters since the driver was loaded."""

    NVMLError = NVMLError

    def __init__(self):
        super().__init__("pynvml")
        self.total_mj = {uuid: 7_000_000 * number for number, uuid in enumerate(GPUS, start=1)}
        self.failure = None

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return len(self.total_mj)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.nvmlDeviceGetHandleByUUID(list(self.total_mj)[index])

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.total_mj:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle):
        return handle

    NVML_CLOCK_SM = 1

    def nvmlDeviceGetClockInfo(self, handle, kind):
        if self.failure:
            raise NVMLError(self.failure)
        return {GPUS[0]: 1755, GPUS[1]: 990}[handle] * kind

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return 1980 * kind if handle in self.total_mj else 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.failure:
            raise NVMLError(self.failure)
        return self.total_mj[handle]


@pytest.fixture
def boards(monkeypatch):
    boards = Board()
    monkeypatch.setitem(sys.modules, "pynvml", boards)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return boards


def metered(boards, index=0):
    """The board that an index means, found by which counter moves the meter."""
    meter = EnergyMeter(index)
    found = []
    for uuid in boards.total_mj:
        before = meter.joules()
        boards.total_mj[uuid] += 1_500
        if meter.joules() != before:
            found.append(uuid)
    return found


def test_the_clock_is_read_beside_its_highest(boards):
    assert clocks_of(torch.device("cuda", 1)) == {"sm_mhz": 990, "most_sm_mhz": 1980}
    assert clocks_of(torch.device("cpu")) is None
    boards.failure = "GPU is lost"
    assert clocks_of(torch.device("cuda")) is None


def test_millijoules_since_the_start_become_joules(boards):
    meter = EnergyMeter()
    assert meter.joules() == 0.0
    boards.total_mj[GPUS[0]] += 300_250  # 300 W for a second, and a quarter of a joule
    assert meter.joules() == 300.25
    assert meter.reason is None


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [
        (None, 1, GPUS[1]),
        ("2,0", 0, GPUS[2]),
        ("2,0", 1, GPUS[0]),
        ("GPU-bbbb3333-0000,GPU-aaaa1111-0000", 1, GPUS[0]),
        ("GPU-aaaa2", 0, GPUS[1]),
    ],
)
def test_the_index_is_that_of_the_visible_devices(boards, monkeypatch, visible, index, expected):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert metered(boards, index) == [expected]


def test_torch_knows_which_board_it_computes_on(boards, monkeypatch):
    # The fastest first: device 0 is the bus's last board.
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="bbbb3333-0000"))
    assert metered(boards, 0) == [GPUS[2]]
    meter = EnergyMeter(1)
    assert (meter.joules(), meter.reason) == (None, "torch sees 1 devices, so there is no device 1")


@pytest.mark.parametrize(
    ("visible", "index", "reason"),
    [
        ("GPU-aaaa", 0, "names GPU-aaaa, which 2 GPUs begin with"),
        ("GPU-cccc", 0, "names GPU-cccc, which 0 GPUs begin with"),
        ("0", 1, "leaves no device 1"),
        ("", 0, "leaves no device 0"),
        ("-1", 0, "leaves no device 0"),
        ("MIG-12ab", 0, "is a MIG slice"),
    ],
)
def test_a_device_that_cannot_be_told_for_sure_has_no_energy(boards, monkeypatch, visible, index, reason):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    meter = EnergyMeter(index)
    assert meter.joules() is None
    assert reason in meter.reason


def test_an_index_means_nothing_while_the_order_of_devices_is_not_known(boards, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    meter = EnergyMeter(0)
    assert meter.joules() is None
    assert "which of 3 GPUs is device 0 is not known" in meter.reason
    boards.total_mj = {GPUS[0]: 5}  # with one board there is nothing to mix up
    assert EnergyMeter(0).joules() == 0.0


def test_a_board_without_a_counter_has_no_energy(boards):
    boards.failure = "Not Supported"
    meter = EnergyMeter()
    assert meter.joules() is None
    assert meter.reason == "NVML has no energy counter for device 0: Not Supported"


def test_a_gpu_that_falls_off_the_bus_ends_the_count_and_not_the_training(boards):
    meter = EnergyMeter()
    boards.failure = "GPU is lost"
    assert meter.joules() is None
    boards.failure = None
    assert meter.joules() is None
    assert meter.reason == "NVML stopped answering: GPU is lost"


def test_a_counter_that_was_set_back_is_no_negative_energy(boards):
    meter = EnergyMeter()
    boards.total_mj[GPUS[0]] = 10
    assert meter.joules() is None
    assert "driver was reloaded" in meter.reason


def test_a_negative_index_is_a_mistake():
    with pytest.raises(UsageError, match="device_index=-1 is not a device"):
        EnergyMeter(-1)


def test_without_the_package_there_is_no_energy_and_the_reason_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = EnergyMeter()
    assert meter.joules() is None
    assert install_command("trackers") in meter.reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_machine_without_nvml_has_no_energy():
    meter = EnergyMeter()
    assert meter.joules() is None
    assert meter.reason.startswith("NVML has no energy counter for device 0: ")


@pytest.mark.gpu
def test_a_gpu_at_work_draws_energy():
    meter = EnergyMeter(0)
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(300):
        x = torch.nn.functional.normalize(x @ x)
    torch.cuda.synchronize()
    assert meter.joules() > 1.0  # 300 products of 137 GFLOP take any GPU more than 10 ms at more than 100 W


@pytest.fixture
def busy(boards):
    """Boards that tell their state; the second one is hot, and its clock is held."""
    boards.NVML_TEMPERATURE_GPU = 0
    boards.nvmlDeviceGetPowerUsage = lambda handle: {GPUS[0]: 690_000, GPUS[1]: 420_000}[handle]
    boards.nvmlDeviceGetTemperature = lambda handle, kind: {GPUS[0]: 61, GPUS[1]: 88}[handle] + kind
    boards.nvmlDeviceGetUtilizationRates = lambda _: SimpleNamespace(gpu=97, memory=40)
    boards.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: {GPUS[0]: 0, GPUS[1]: 0x44}[handle]
    return boards


def sampled(index, clock, times):
    """Sums of a rank's windows, with as many looks for a sample as times are given."""
    sampler = StateSampler(
        WindowEnergy(torch.device("cuda", index), ErrorBoundary()), ErrorBoundary(), lambda: clock[0]
    )
    sums = Sums()
    for clock[0] in times:
        sampler.add_to(sums)
    return sums


def test_a_sample_of_the_device_is_taken_every_ten_seconds(busy):
    sums = sampled(0, [0.0], [1.0, 9.9, 10.0, 11.0, 19.0, 20.5])
    assert sums[WHOLE, "num_states"] == 2
    assert (sums[WHOLE, "state sm_mhz"], sums[WHOLE, "state power_mw"]) == (2 * 1755, 2 * 690_000)


def test_the_record_has_the_rank_whose_clock_is_held_most_and_the_reasons(busy):
    ranks = [sampled(index, [0.0], [30.0]) for index in (0, 1)]
    for sums in ranks:
        sums.update({(WHOLE, "num_steps"): 1, (WHOLE, "wall_ns"): 10**9})
    window = Tally(Peak("x", 1e12, "bf16", "s")).window(ranks, 0, 1, {})
    state = window.to_dict()["machine_state"]
    assert state["rank"] == 1
    assert (state["sm_mhz"], state["most_sm_mhz"], state["temperature_c"]) == (990, 1980, 88)
    assert state["limits"] == ["heat", "power"]
    assert 0 <= state["processor_percent"] <= 100
    assert len(json.dumps(state)) < 250  # of the 1,000 bytes of a step's line
    assert window.machine_state == state


def test_what_nvml_does_not_tell_is_left_out(busy):
    del busy.nvmlDeviceGetPowerUsage
    busy.failure = "Not Supported"  # by the counter of energy and the present clock
    state = EnergyMeter(0).state()
    assert state == {"most_sm_mhz": 1980, "temperature_c": 61, "utilisation_percent": 97}
