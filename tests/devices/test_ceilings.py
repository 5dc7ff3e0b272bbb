import contextlib
import json
import stat
import warnings

import pytest
import torch

from headway.devices import ceilings, copy_ceiling, matmul_ceiling, measure, peak_for
from headway.devices.ceilings import cache_folder, environment, measure_ceiling
from headway.devices.measure import Measurement, TimeBudget, is_settled, sweep_copy, sweep_matmul
from headway.devices.names import cpu_name
from headway.errors import UnknownDeviceError

CPU = torch.device("cpu")
SHORT = TimeBudget(shape_s=0.0, total_s=60.0, min_repeats=4)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Measure small shapes, few times: what is tested is the bookkeeping."""
    monkeypatch.setattr("headway.devices.ceilings._BUDGET", SHORT)
    monkeypatch.setattr("headway.devices.ceilings._SHAPES", {"cpu": ((32, 16, 8), (64, 64, 64))})
    monkeypatch.setattr("headway.devices.ceilings._SIZES", {"cpu": (4096,)})
    monkeypatch.setattr("headway.devices.measure._UNDISTURBED", 0.0)  # whatever else this machine does
    monkeypatch.setattr("headway.devices.measure._AGREEMENT", float("inf"))


def test_rates_are_work_over_time():
    # 3 repetitions of 2 * 2 * 3 * 5 = 60 FLOPs
    found = Measurement((2, 3, 5), 60, (0.5, 0.25, 2.0))
    assert (found.best_per_s, found.median_per_s, found.worst_per_s) == (240.0, 120.0, 30.0)


BUSY, QUIET = 0.3, 0.99  # shares of the threads' time in which they had a core


@pytest.mark.parametrize(
    ("rates", "shares", "settled"),
    [
        ((3, 5, 4), (QUIET, QUIET, QUIET), True),
        ((3, 5, 4), (BUSY, QUIET, QUIET), True),  # the smallest would not have won
        ((3, 5, 4), (QUIET, BUSY, QUIET), False),
        ((3, 5, 4), (QUIET, QUIET, BUSY), False),  # it might have won
        ((3, 4, 5), (QUIET, QUIET, QUIET), True),
        ((5, 0.1, 0.1), (QUIET, BUSY, BUSY), False),  # small products between the time slices of other work
    ],
)
def test_a_sweep_is_settled_when_nothing_took_the_threads_cores(monkeypatch, rates, shares, settled):
    monkeypatch.undo()
    pairs = zip(rates, shares, strict=True)
    assert is_settled([Measurement((1,), 1, (1 / rate, 1.04 / rate, 9), share) for rate, share in pairs]) == settled


def rounds_of(monkeypatch, *rounds):
    """Let each sweep find the next of these lists of (FLOP/s, share of a core), and the last for ever."""
    sweeps = iter([[Measurement((8, 8, 8), 1024, (1024 / rate,) * 2, share)] for rate, share in rounds])
    last = []

    def sweep(*_):
        last[:] = next(sweeps, None) or last
        return list(last)

    monkeypatch.undo()
    monkeypatch.delenv("HEADWAY_PEAK_FLOPS", raising=False)
    monkeypatch.setattr("headway.devices.ceilings.sweep_matmul", sweep)
    monkeypatch.setattr("headway.devices.ceilings._PATIENCE_S", 0.1)
    monkeypatch.setattr("headway.devices.ceilings.single_thread_rate", lambda *_: 60e9)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    ceilings._best_square.cache_clear()


@pytest.mark.own_peak
def test_a_cpu_is_measured_until_its_rates_settle(monkeypatch):
    rounds_of(monkeypatch, (1e9, BUSY), (9e9, BUSY), (170e9, QUIET), (1e9, BUSY))
    peak = peak_for("cpu", torch.float32)
    assert peak.flops_per_s == pytest.approx(170e9)
    assert peak.source == "measured at start: fp32 matmul 8x8x8, 3 threads, best of repeats"
    ceilings._best_square.cache_clear()


@pytest.mark.own_peak
def test_a_cpu_that_other_work_keeps_busy_has_an_estimated_peak_and_says_so(monkeypatch):
    rounds_of(monkeypatch, (0.6e9, BUSY))
    with pytest.warns(
        UserWarning, match=r"uncertain, .* 3 threads reached 6e\+08 FLOP/s in fp32\. Headway takes 3 x the 6e\+10"
    ):
        peak = peak_for("cpu", torch.float32)
    assert peak.flops_per_s == pytest.approx(3 * 60e9)
    assert peak.source == "estimated at start, other work was running: fp32 matmul of 1 thread x 3"
    ceilings._best_square.cache_clear()


def test_a_thread_is_timed_by_its_own_processor_time(monkeypatch):
    clock_s = iter(i / 4 for i in range(100))  # a quarter of a second from one reading to the next
    monkeypatch.setattr(measure.time, "thread_time", lambda: next(clock_s))
    before = torch.get_num_threads()
    rate = measure.single_thread_rate(torch.float32, [(8, 8, 8), (16, 16, 16)], TimeBudget(0.5, 9, 2))
    assert rate == 2 * 16**3 / 0.25
    assert torch.get_num_threads() == before


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_a_ceiling_that_other_work_disturbed_is_measured_again(monkeypatch, two_threads):
    matmul_ceiling("cpu", "fp32")
    assert matmul_ceiling("cpu", "fp32").is_cached
    monkeypatch.setattr("headway.devices.measure._UNDISTURBED", float("inf"))
    disturbed = matmul_ceiling("cpu", "fp32")
    assert not disturbed.is_cached
    assert disturbed.peak().source.endswith(", unsure: other work kept the device busy")
    assert copy_ceiling("cpu").is_settled  # nothing says otherwise
    assert copy_ceiling("cpu").is_cached


def test_a_sweep_measures_every_shape_and_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    found = sweep_matmul(CPU, torch.float32, [(8, 4, 2), (16, 16, 16)], SHORT)
    assert [(m.shape, m.work, len(m.durations_s)) for m in found] == [((8, 4, 2), 128, 4), ((16, 16, 16), 8192, 4)]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_shape_that_would_not_fit_into_the_time_is_left_out():
    found = sweep_matmul(CPU, torch.float32, [(8, 8, 8), (10**6, 10**6, 10**6)], SHORT)
    assert [m.shape for m in found] == [(8, 8, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_what_is_timed_is_the_product_of_random_factors(dtype):
    shape = (32, 64, 48)
    found = measure._matmul(CPU, dtype, shape)()
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(32, 64, generator=generator).to(dtype).float()
    is_narrow = dtype.itemsize == 1
    b = torch.randn(*((48, 64) if is_narrow else (64, 48)), generator=generator).to(dtype).float()
    torch.testing.assert_close(found.float(), a @ (b.t() if is_narrow else b), rtol=2e-2, atol=5e-2)


def test_a_cuda_device_is_timed_by_its_own_events(monkeypatch):
    """Events stand in for a device that takes 2 ms a product; the clock of the host plays no part."""
    clock_ms = iter(range(0, 10_000, 2))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_ms = next(clock_ms)

        def elapsed_time(self, later):
            return later.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    durations_s = measure._time(lambda: None, torch.device("cuda"), 0.0, 4)
    assert durations_s == (0.002,) * 4


def test_the_precision_that_the_program_chose_is_put_back():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        matmul_ceiling("cpu", "fp32")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_copy_reads_and_writes_every_byte():
    assert [m.work for m in sweep_copy(CPU, [1000, 3000], SHORT)] == [2000, 6000]


def test_a_ceiling_is_measured_once_and_then_read(monkeypatch):
    first = matmul_ceiling("cpu", "fp32")
    assert not first.is_cached
    monkeypatch.setattr("headway.devices.ceilings.sweep_matmul", lambda *_: pytest.fail("measured again"))
    again = matmul_ceiling("cpu", "fp32")
    assert again.is_cached
    assert again.measurements == first.measurements
    assert again.device == environment(CPU)["name"]


def test_refresh_measures_again():
    first = matmul_ceiling("cpu", "fp32")
    again = matmul_ceiling("cpu", "fp32", refresh=True)
    assert not again.is_cached
    assert again.measurements != first.measurements
    assert matmul_ceiling("cpu", "fp32").measurements == again.measurements


def test_the_cache_is_kept_per_dtype_torch_and_threads(monkeypatch):
    matmul_ceiling("cpu", "fp32")
    assert not matmul_ceiling("cpu", "bf16").is_cached
    assert not copy_ceiling("cpu").is_cached
    assert copy_ceiling("cpu").is_cached
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert not matmul_ceiling("cpu", "fp32").is_cached
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert environment(CPU)["threads"] == 77


def test_a_ceiling_serves_as_a_peak():
    ceiling = matmul_ceiling("cpu", "bf16")
    peak = ceiling.peak()
    assert peak.kind == "ceiling"
    assert peak.dtype == "bf16"
    assert peak.flops_per_s == max(m.best_per_s for m in ceiling.measurements)
    assert f"measured {ceiling.measured_at:%Y-%m-%d}: bf16 matmul" in peak.source


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "",
        lambda _: "[]",
        lambda text: text.replace('"work"', '"play"'),
        lambda text: json.dumps({**json.loads(text), "measurements": []}),
        lambda text: text.replace('"type": "cpu"', '"type": "cuda"'),
    ],
)
def test_a_damaged_file_is_reported_and_replaced(damage):
    matmul_ceiling("cpu", "fp32")
    (path,) = cache_folder().glob("cpu-fp32-*.json")
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    told = []
    assert not matmul_ceiling("cpu", "fp32", warn=told.append).is_cached
    assert len(told) == 1
    assert f"{path} is damaged" in told[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert matmul_ceiling("cpu", "fp32").is_cached
    assert [file.name for file in cache_folder().iterdir()] == [path.name]  # nothing half written lies about


def test_a_folder_that_cannot_be_written_is_reported(monkeypatch, tmp_path):
    (tmp_path / "headway").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    told = []
    assert not matmul_ceiling("cpu", "fp32", warn=told.append).is_cached
    assert "cannot be kept" in told[0]


def test_the_file_is_the_users_own():
    matmul_ceiling("cpu", "fp32")
    (path,) = cache_folder().glob("*.json")
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600


@pytest.mark.parametrize(("device", "dtype"), [("meta", "fp32"), ("cpu", "fp8"), ("cpu", "tf32")])
def test_what_is_not_measured_is_refused(device, dtype):
    with pytest.raises(UnknownDeviceError, match="It can measure cpu in fp32, bf16, fp16; cuda in bf16"):
        matmul_ceiling(device, dtype)
    with pytest.raises(UnknownDeviceError, match="Headway cannot measure copies on meta"):
        copy_ceiling("meta")


@pytest.mark.gpu
@pytest.mark.own_peak
def test_a_gpu_reaches_a_share_of_its_datasheet(monkeypatch):
    monkeypatch.undo()
    ceiling = matmul_ceiling("cuda", "bf16", refresh=True)
    assert 0.4 < ceiling.best.best_per_s / peak_for("cuda", "bf16").flops_per_s < 1.05
    assert ceiling.best.worst_per_s <= ceiling.best.median_per_s <= ceiling.best.best_per_s


@pytest.mark.own_peak
def test_the_ceiling_says_how_it_was_measured():
    peak = peak_for("cpu", torch.float32)
    assert peak.kind == "ceiling"
    assert peak.name == cpu_name()
    threads = torch.get_num_threads()
    assert f"{threads} thread" in peak.source or f"1 thread x {threads}" in peak.source
    assert "fp32 matmul" in peak.source
    assert 1e9 < peak.flops_per_s < 1e14  # 1 GFLOP/s to 100 TFLOP/s: any CPU there is


@pytest.mark.own_peak
def test_the_ceiling_is_measured_once_and_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    first = measure_ceiling("fp32")
    assert measure_ceiling("fp32") is first
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.own_peak
def test_a_dtype_without_a_cpu_matmul_is_refused():
    with pytest.raises(UnknownDeviceError, match="fp32, bf16, fp16, not in 'fp8'"):
        measure_ceiling("fp8")
