"""Checkpoints of one process: what is saved is found, what is damaged is refused, a full disk leaves those before."""

import dataclasses
import json
import random
import threading
import time
from concurrent import futures
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from headway.checkpoint import (
    CheckpointSaver,
    Contents,
    find_checkpoint,
    latest_checkpoint,
    newest_sound,
    open_checkpoint,
    random_state,
    refuse_half_written,
    restore,
    restore_random_state,
    state,
    training_tensors,
)
from headway.checkpoint.folder import clear_unfinished
from headway.checkpoint.saver import writers
from headway.errors import CheckpointError, RankLostError
from headway.models.parallel.ranks import Ranks
from helpers.cases import a_full_disk

ALONE = Ranks(0, 1)


def parts(width=8, seed=0):
    """A model with tied weights and a buffer, and an optimizer that has stepped on two of its three parameters."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"embed": nn.Embedding(4, width), "norm": nn.BatchNorm1d(width), "head": nn.Linear(width, 4)})
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model["head"](model["norm"](model["embed"](torch.arange(4)))).square().sum().backward()
    model["norm"].bias.grad = None
    optimizer.step()
    return model, optimizer


def contents(model, optimizer, position=()):
    def describe(folder):
        (folder / "config.json").write_text("{}")

    return Contents(training_tensors(model, optimizer), random_state(), {"at": list(position)}, {"data": 1}, describe)


def save(root, step, keep=3, *, model=None, asynchronous=False):
    model, optimizer = model or parts()
    with CheckpointSaver(root, ALONE, keep=keep, asynchronous=asynchronous) as saver:
        saver.save(step, contents(model, optimizer, [step]))
        return saver.wait()


def test_what_is_saved_is_found(tmp_path):
    save(tmp_path, 5)
    found = find_checkpoint(tmp_path, ALONE)
    assert found.step == 5
    assert found.position() == {"at": [5]}
    assert (found.model_folder / "config.json").read_text() == "{}"
    assert found.world_size == 1


def test_a_restored_run_goes_on_bit_for_bit(tmp_path):
    model, optimizer = parts()
    save(tmp_path, 1, model=(model, optimizer))
    other, fresh = parts(seed=1)
    restore(latest_checkpoint(tmp_path), other, fresh)
    untouched = other["norm"].bias
    assert untouched not in fresh.state  # it has had no gradient, so its first step is still to come
    for one, its_optimizer in ((model, optimizer), (other, fresh)):
        for _ in range(3):
            its_optimizer.zero_grad()
            one["head"](one["norm"](one["embed"](torch.arange(4)))).square().sum().backward()
            its_optimizer.step()
    for (name, ours), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert fresh.param_groups[0]["lr"] == 0.1


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    """What is saved is what was there at the call, whatever becomes of it before it is on disk."""
    model, optimizer = parts()
    expected = {name: tensor.clone() for name, tensor in training_tensors(model, optimizer).items()}
    with CheckpointSaver(tmp_path, ALONE, keep=1) as saver:
        saver.save(1, contents(model, optimizer))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        for state in optimizer.state.values():
            state["exp_avg"].fill_(7.0)
        assert saver.wait().step == 1
    restore(latest_checkpoint(tmp_path), model, optimizer)
    for name, tensor in training_tensors(model, optimizer).items():
        assert torch.equal(tensor, expected[name]), name


def test_no_checkpoint_is_no_error(tmp_path):
    assert find_checkpoint(tmp_path, ALONE) is None


def test_only_the_newest_stay(tmp_path):
    for step in (5, 10, 15, 1000000):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000015", "step-1000000"]
    assert latest_checkpoint(tmp_path).step == 1000000


def _cut(path):
    path.write_bytes(path.read_bytes()[:10])


def _flip(path):
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "was written or copied only in part"),
        (lambda folder: _cut(folder / "manifest.json"), "manifest.json cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
        (lambda folder: _cut(folder / "__0_0.distcp"), "__0_0.distcp has 10 of"),
        (lambda folder: _flip(folder / "__0_0.distcp"), "contents of __0_0.distcp have changed"),
        (lambda folder: _flip(folder / ".metadata"), "contents of .metadata have changed"),
        (lambda folder: _flip(folder / "position.json"), "contents of position.json have changed"),
        (lambda folder: (folder / "rank-00000.pt").unlink(), "rank-00000.pt is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_good_one_before_it_named(tmp_path, damage, message):
    save(tmp_path, 5)
    damage(save(tmp_path, 10).folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        find_checkpoint(tmp_path, ALONE)
    assert f"newest complete checkpoint before it is {tmp_path / 'step-000005'}" in str(caught.value)


def test_the_newest_sound_checkpoint_is_found_and_the_damaged_ones_are_set_aside(tmp_path):
    sound = save(tmp_path, 5)
    _cut(save(tmp_path, 10).folder / "__0_0.distcp")
    (save(tmp_path, 15).folder / "manifest.json").unlink()
    found, faults = newest_sound(tmp_path, ALONE)
    assert found == sound
    assert ["has no manifest.json" in fault for fault in faults] == [True, False]
    names = {"step-000005", "damaged-step-000010", "damaged-step-000015"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert newest_sound(tmp_path, ALONE) == (sound, ())
    save(tmp_path, 6, keep=1)
    assert latest_checkpoint(tmp_path).step == 6, "a damaged one must not count among those that are kept"
    assert newest_sound(tmp_path / "nothing", ALONE) == (None, ())


def test_where_no_checkpoint_is_sound_none_is_touched(tmp_path):
    for step in (5, 10):
        _cut(save(tmp_path, step).folder / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"step-000010 is damaged: .* no complete checkpoint before it"):
        newest_sound(tmp_path, ALONE)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000005", "step-000010"}


def test_a_lone_damaged_checkpoint_says_that_there_is_nothing_before_it(tmp_path):
    _cut(save(tmp_path, 5).folder / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="no complete checkpoint before it"):
        find_checkpoint(tmp_path, ALONE)


def test_an_unfinished_write_is_no_checkpoint_and_is_cleared_away(tmp_path):
    save(tmp_path, 5)
    unfinished = tmp_path / ".step-000010.writing"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_text("half")
    assert latest_checkpoint(tmp_path).step == 5
    assert find_checkpoint(tmp_path, ALONE).step == 5
    assert unfinished.exists(), "who only reads, as an export does, must not touch what a run is writing"
    clear_unfinished(tmp_path)  # as the owner of the run folder does, of exports too
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("room", [100, 4000, 60000])  # fails in the first bytes, amid a tensor, after the weights
def test_a_disk_that_fills_up_leaves_the_checkpoints_before_it(tmp_path, asynchronous, room):
    save(tmp_path, 5)
    model, optimizer = parts(width=1000)
    with (
        pytest.raises(
            CheckpointError,
            match=r"cannot write the checkpoint of step 10 to .*: File too large\. Earlier checkpoints are untouched",
        ),
        a_full_disk(room),
        CheckpointSaver(tmp_path, ALONE, keep=1, asynchronous=asynchronous) as saver,
    ):
        saver.save(10, contents(model, optimizer))
    assert find_checkpoint(tmp_path, ALONE).step == 5


def test_a_background_failure_is_told_at_the_next_step(tmp_path):
    with CheckpointSaver(tmp_path, ALONE, keep=1) as saver:
        with a_full_disk(10):
            saver.save(10, contents(*parts()))
            futures.wait([saver._in_flight])
        assert saver.has_failed
        assert saver.finished(wait=False) == []
        with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 10"):
            saver.finished(wait=True)


class SlowToGo:
    """Takes a while to be let go of, as gigabytes do."""

    def __call__(self, folder):
        pass

    def __del__(self):
        time.sleep(0.2)


@pytest.mark.parametrize("error", [None, ValueError])
def test_nothing_is_left_of_what_wrote_a_checkpoint_once_it_is_told_to_be_whole(tmp_path, error):
    """An interpreter that ends while another thread lets go of tensors aborts."""
    with suppress(ValueError), CheckpointSaver(tmp_path, ALONE, keep=1) as saver:
        saver.save(10, dataclasses.replace(contents(*parts()), write_model=SlowToGo()))
        if error is not None:
            raise error
        saver.wait()
        assert not writers(tmp_path)
    assert not writers()


def test_a_process_that_has_lost_the_others_waits_for_nothing(tmp_path):
    """What it was writing with them would never be whole."""
    waiting = threading.Event()
    model, optimizer = parts()
    stuck = dataclasses.replace(contents(model, optimizer), write_model=lambda _: waiting.wait(60))
    saver = CheckpointSaver(tmp_path, ALONE, keep=1)
    saver.save(10, stuck)
    saver.__exit__(RankLostError, RankLostError("another rank ended"), None)
    assert not saver._in_flight.done()
    waiting.set()
    assert saver.wait().step == 10


def test_a_root_that_is_no_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint of step 5 .*Not a directory"):
        save(tmp_path / "file" / "checkpoints", 5)


def test_a_checkpoint_is_no_model_folder(tmp_path):
    folder = save(tmp_path, 5).folder
    with pytest.raises(CheckpointError, match=r"no model folder.*headway export"):
        refuse_half_written(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="copied only in part"):
        refuse_half_written(folder)


def test_other_folders_are_not_checkpoints(tmp_path):
    refuse_half_written(tmp_path)
    refuse_half_written(tmp_path / "Qwen" / "Qwen3-VL")


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    path = save(tmp_path, 5).folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 9}))
    with pytest.raises(CheckpointError, match=r"has version 9.*this Headway reads version 2"):
        open_checkpoint(path.parent)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    save(tmp_path, 5)
    with pytest.raises(
        CheckpointError, match=r"another model: embed.weight is \[4, 8\] in the checkpoint and \[4, 12\] in this model"
    ):
        restore(latest_checkpoint(tmp_path), *parts(width=12))


def test_random_generators_go_on_where_they_were(tmp_path):
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 - the state under test

    model = parts()
    np.random.seed(3)  # noqa: NPY002 - the state under test
    draw()
    save(tmp_path, 1, model=model)
    expected = [draw() for _ in range(3)]
    restore_random_state(latest_checkpoint(tmp_path).random_state(rank=3))
    assert [draw() for _ in range(3)] == expected


@pytest.fixture
def pretended_device(monkeypatch):
    """Whatever is saved seems to lie on a device; what is made for it, copied, and waited for."""
    seen = {"blocks": [], "waits": 0, "copies": 0}
    original = torch.Tensor.copy_

    def page_locked(num_bytes):
        seen["blocks"].append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return seen["blocks"][-1]

    def wait_for(_):
        seen["waits"] += 1

    def copy(target, source, non_blocking=False):
        seen["copies"] += non_blocking
        return original(target, source, non_blocking=non_blocking)

    monkeypatch.setattr(state, "_is_on_device", lambda _: True)
    monkeypatch.setattr(state, "_page_locked", page_locked)
    monkeypatch.setattr(state, "_wait_for", wait_for)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    return seen


def test_a_devices_tensors_are_copied_to_one_block_that_every_save_uses_again(pretended_device):
    model, optimizer = parts()
    tensors = training_tensors(model, optimizer)
    tensors |= {"odd": torch.arange(7, dtype=torch.uint8), "none": torch.zeros(0, 3), "turned": torch.randn(3, 5).T}
    copies = state.HostCopies()
    for number in (1, 2):
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        found = copies.take(tensors)
        for tensor in tensors.values():
            tensor.zero_()  # training goes on
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name
            assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert pretended_device["waits"] == number
        assert pretended_device["copies"] == number * len(tensors)
        for place, tensor in enumerate(tensors.values()):
            tensor.fill_(place)
    (block,) = pretended_device["blocks"]
    needed = sum(tensor.nbytes for tensor in tensors.values())
    assert needed <= len(block) < needed + 64 * len(tensors)
    copies.take(tensors | {"more": torch.zeros(1000)})
    assert len(pretended_device["blocks"]) == 2


def test_checkpoints_from_a_device_are_what_they_are_from_a_host(pretended_device, tmp_path):
    model, optimizer = parts()
    with CheckpointSaver(tmp_path, ALONE, keep=3) as saver:
        for step in (1, 2):
            saver.save(step, contents(model, optimizer, [step]))
            expected = {name: tensor.clone() for name, tensor in training_tensors(model, optimizer).items()}
            with torch.no_grad():
                model["embed"].weight.add_(1.0)
        saver.wait()
    assert len(pretended_device["blocks"]) == 1
    other, fresh = parts(seed=1)
    restore(latest_checkpoint(tmp_path), other, fresh)
    for name, tensor in training_tensors(other, fresh).items():
        assert torch.equal(tensor, expected[name]), name


def test_no_memory_for_a_copy_is_one_clear_error(monkeypatch):
    class Cudart:
        @staticmethod
        def cudaHostRegister(_address, _num_bytes, _flags):  # noqa: N802 - CUDA's name
            return 2  # out of memory

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    with pytest.raises(CheckpointError, match=r"0.5 GiB of page-locked host memory.*checkpoint.asynchronous to false"):
        state._page_locked(2**29)
