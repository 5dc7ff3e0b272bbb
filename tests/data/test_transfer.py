"""Packs on their way to a pretended device: its streams run behind the host, and freed memory is used again.

The pretended device keeps to CUDA's rules and to nothing else: operations of one stream run in order, those of two
streams in any order that their events allow; memory that was made for a stream may be given out to it again at once
when it is freed, unless it was recorded on another stream that has not come so far yet.
"""

import random
import weakref
from contextlib import contextmanager

import pytest
import torch

from headway.data import transfer as module
from headway.data.collate import Collator
from headway.data.transfer import from_block, to_block, transfer_ahead

CUDA = torch.device("cuda", 0)


class Stream:
    def __init__(self, *_):
        self.queue, self.done = [], 0  # operations not run yet; how many have been

    @property
    def queued(self):
        return self.done + len(self.queue)

    def add(self, operation, wait=None):
        self.queue.append((operation, wait))

    def wait_event(self, event):
        self.add(lambda: None, event)

    def run_one(self):
        """Run the next operation, if there is one and it need not wait."""
        if self.queue and (self.queue[0][1] is None or self.queue[0][1].is_reached):
            self.queue.pop(0)[0]()
            self.done += 1


class Event:
    def record(self, stream):
        self.stream, self.place = stream, stream.queued

    @property
    def is_reached(self):
        return self.stream.done >= self.place


class Cell:
    """A piece of device memory."""

    def __init__(self, stream):
        self.stream, self.value, self.recorded, self.busy_until = stream, None, set(), []


class Moved:
    def __init__(self, cell, free):
        self.cell = cell
        weakref.finalize(self, free, cell)

    def record_stream(self, stream):
        self.cell.recorded.add(stream)


class Machine:
    """A host, a stream that computes, one that copies, and memory for each."""

    def __init__(self, seed, monkeypatch):
        self.random, self.computing, self.current = random.Random(seed), Stream(), None
        self.streams, self.freed, self.results, self.most, self.held = [self.computing], [], [], 0, 0
        self.current = self.computing
        module._copy_stream.cache_clear()
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    def new_stream(self, *_):
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def allocate(self):
        self.held += 1
        self.most = max(self.most, self.held)
        for cell in self.freed:
            if cell.stream is self.current and all(stream.done >= place for stream, place in cell.busy_until):
                self.freed.remove(cell)
                cell.recorded = set()
                return cell
        return Cell(self.current)

    def free(self, cell):
        self.held -= 1
        cell.busy_until = [(stream, stream.queued) for stream in cell.recorded]
        self.freed.append(cell)

    def run(self, at_most):
        for _ in range(self.random.randint(0, at_most)):
            self.random.choice(self.streams).run_one()

    def finish(self):
        while any(stream.queue for stream in self.streams):
            self.run(50)

    def compute(self, moved):
        cell = moved.cell
        self.computing.add(lambda: None)  # kernels that read the pack late
        self.computing.add(lambda: self.results.append(cell.value))


class Pack:
    """Number `value` in host memory."""

    def __init__(self, machine, value):
        self.machine, self.value = machine, value

    def to(self, device):
        assert device == CUDA
        cell = self.machine.allocate()
        self.machine.current.add(lambda: setattr(cell, "value", self.value))
        return Moved(cell, self.machine.free)


def results_of(seed, monkeypatch, steps=3, packs=4):
    """What the kernels read, over a few steps of a few packs each."""
    machine = Machine(seed, monkeypatch)
    for step in range(steps):
        for moved in transfer_ahead([Pack(machine, 10 * step + number) for number in range(packs)], CUDA):
            machine.compute(moved)
            machine.run(4)
        del moved
    machine.finish()
    module._copy_stream.cache_clear()
    return machine


EXPECTED = [10 * step + number for step in range(3) for number in range(4)]


@pytest.mark.parametrize("seed", range(40))
def test_kernels_read_their_own_pack_however_streams_run(seed, monkeypatch):
    machine = results_of(seed, monkeypatch)
    assert machine.results == EXPECTED
    assert len(machine.streams) == 2  # one stream copies for all steps
    assert machine.most <= 3  # the one that computes, the one before it, and one ahead


@pytest.mark.parametrize("without", ["waiting for the copy", "recording the memory"])
def test_the_pretended_device_tells_when_a_rule_is_broken(without, monkeypatch):
    if without == "waiting for the copy":
        monkeypatch.setattr(Stream, "wait_event", lambda *_: None)
    else:
        monkeypatch.setattr(Moved, "record_stream", lambda *_: None)
    assert any(results_of(seed, monkeypatch).results != EXPECTED for seed in range(40))


def test_the_next_pack_is_on_its_way_before_this_one_is_computed(monkeypatch):
    machine = Machine(0, monkeypatch)
    packs = transfer_ahead([Pack(machine, number) for number in range(3)], CUDA)
    for on_its_way in (2, 3, 3):
        next(packs)
        assert machine.streams[1].queued == on_its_way
    module._copy_stream.cache_clear()


def test_on_a_cpu_packs_are_given_one_by_one_as_they_are():
    taken = []

    def given():
        for number in range(3):
            taken.append(number)
            yield Collator()([])

    for number, batch in enumerate(transfer_ahead(given(), torch.device("cpu")), start=1):
        assert len(taken) == number
        assert batch.input_ids_1T.device.type == "cpu"


def test_every_tensor_on_a_device_is_recorded(monkeypatch):
    """Those of the vision tower too; what stayed on the host has no stream."""
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream)))
    batch = Collator()([]).dealt(None).to("meta")
    batch.record_stream("a stream")
    assert len(recorded) == 7  # ids, labels, positions, boundaries, types, sources, labelled slots
    assert {stream for _, stream in recorded} == {"a stream"}
    Collator()([]).dealt(None).record_stream("a stream")
    assert len(recorded) == 7


def test_a_shared_block_holds_tensors_of_every_kind_and_what_is_around_them():
    value = {
        "bytes": torch.arange(7, dtype=torch.uint8),
        "words": [torch.randn(3, 5), torch.zeros(0, 3, dtype=torch.long)],
        "strided": torch.arange(12).view(3, 4).T,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "text": "line 3" * 5000,
    }
    shared = to_block(value)
    back = from_block(shared)
    assert shared.block.is_shared()
    assert back["text"] == value["text"]
    for ours, theirs in zip(
        [back["bytes"], *back["words"], back["strided"], back["scalar"]],
        [value["bytes"], *value["words"], value["strided"], value["scalar"]],
        strict=True,
    ):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
        assert theirs.numel() == 0 or ours.untyped_storage().data_ptr() == shared.block.untyped_storage().data_ptr()
