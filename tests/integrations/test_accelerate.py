"""The meter in loops with a real accelerator: accumulation, mixed precision, evaluation, trackers."""

import pytest
import torch
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from headway import Workload, trace
from headway.devices import Peak
from headway.integrations import AccelerateMeter
from helpers.cases import some
from helpers.models import tiny_model

PEAK = Peak("test", 1e12, "fp32", "made up for a test")
LENGTHS = [12, 12, 12, 12, 7, 7, 7, 7]  # four micro-batches of two rows


def tiny():
    return tiny_model("qwen3", dtype=torch.float32)


def prepared(accelerator, lengths=LENGTHS):
    """Prepare a model, an optimizer and a loader of two rows per batch."""
    model = tiny()
    rows = [{"input_ids": torch.full((length,), 7)} for length in lengths]
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)


def run(accelerator, meter, model, optimizer, loader):
    for batch in meter.batches(loader):
        with accelerator.accumulate(model):
            loss = model(**batch, labels=batch["input_ids"]).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        meter.step(loss=loss.item())


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    ("accumulation", "steps"), some([(1, 4), (2, 2), (3, 2), (4, 1)], {(1, 4), (3, 2)}.__contains__)
)
def test_a_step_is_what_accelerate_accumulates(accumulation, steps, precision):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation, mixed_precision=precision)
    model, optimizer, loader = prepared(accelerator)
    windows = []
    meter = AccelerateMeter(accelerator, model, peak=PEAK, log_every=1, on_window=windows.append)
    run(accelerator, meter, model, optimizer, loader)
    whole = meter.close()
    cost = trace(tiny())
    assert whole.num_steps == len(windows) == steps
    assert whole.flops == cost.count(Workload(LENGTHS))
    assert windows[0].flops == cost.count(Workload(LENGTHS[: 2 * accumulation]))
    assert windows[-1].extra["loss"] > 0


@pytest.mark.parametrize(("precision", "dtype"), [("no", "fp32"), ("bf16", "bf16")])
def test_a_step_is_judged_by_the_peak_of_the_dtype_of_its_products(precision, dtype, monkeypatch):
    monkeypatch.setenv("HEADWAY_PEAK_FLOPS", "1e12")
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    assert AccelerateMeter(accelerator, prepared(accelerator)[0]).peak.dtype == dtype


def test_a_forward_after_the_end_or_in_evaluation_is_not_counted():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    meter = AccelerateMeter(accelerator, model, peak=PEAK)
    run(accelerator, meter, model, optimizer, loader)
    with meter.away():
        model.eval()
        model(input_ids=torch.full((1, 30), 7))
        model.train()
    assert meter.close().tokens == sum(LENGTHS)
    model(input_ids=torch.full((1, 30), 7))
    assert meter.close().tokens == sum(LENGTHS)


def test_trackers_are_given_every_window_at_the_step_of_the_whole_run(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    model, optimizer, loader = prepared(accelerator)
    windows = []
    meter = AccelerateMeter(
        accelerator, model, peak=PEAK, log_every=2, completed_steps=100, on_window=windows.append,
        names=("mfu", "tokens", "flops", "step"),
    )  # fmt: skip
    run(accelerator, meter, model, optimizer, loader)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    read = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert read["headway/tokens"] == [(102, 48.0), (104, 28.0)]
    mfu = [torch.tensor(window.mfu, dtype=torch.float32).item() for window in windows]
    assert read["headway/mfu"] == list(zip([102, 104], mfu, strict=True))
    assert {"headway/step", "headway/flops/total"} <= set(read)


def test_a_forward_that_cannot_be_counted_ends_the_numbers_and_not_the_loop():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    given = []

    def workload(arguments):
        given.append(arguments)
        if len(given) == 3:
            raise ZeroDivisionError("a workload of one's own may fail of anything")
        return Workload([4])

    meter = AccelerateMeter(accelerator, model, peak=PEAK, log_every=1, workload=workload)
    before = [parameter.clone() for parameter in model.parameters()]
    middle = []

    def two_epochs():
        run(accelerator, meter, model, optimizer, loader)
        middle.extend(parameter.clone() for parameter in model.parameters())
        with meter.away():
            pass
        run(accelerator, meter, model, optimizer, loader)  # of which nothing is counted
        return meter.close()

    with pytest.warns(RuntimeWarning, match="AccelerateMeter measures this .* no further: ZeroDivisionError") as told:
        whole = two_epochs()
    assert len([one for one in told if "no further" in str(one.message)]) == 1
    assert isinstance(meter.failure, ZeroDivisionError)
    assert len(given) == 3
    assert (whole.num_steps, whole.tokens) == (2, 8)
    weights = zip(before, middle, model.parameters(), strict=True)
    assert any(not torch.equal(a, b) and not torch.equal(b, c) for a, b, c in weights)


def test_a_model_that_was_left_in_evaluation_mode_is_named_once_and_trained():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    meter = AccelerateMeter(accelerator, model.eval(), peak=PEAK)
    with pytest.warns(
        RuntimeWarning, match=r"in evaluation mode, as from_pretrained leaves it.* Call model\.train\(\)"
    ):
        run(accelerator, meter, model, optimizer, loader)
