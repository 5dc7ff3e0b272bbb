import random

import numpy as np
import pytest
import torch

from headway.errors import CheckpointError
from headway.train.checkpoint import (
    latest_checkpoint,
    open_checkpoint,
    random_state,
    refuse_half_written,
    restore_random_state,
    save_checkpoint,
)


class Saved:
    """Stands in for a model or processor: something with files."""

    def __init__(self, name, text="x" * 1000):
        self.name, self.text = name, text

    def save_pretrained(self, folder):
        (folder / self.name).write_text(self.text)


def save(root, step, keep=3):
    model, processor = Saved("model.safetensors"), Saved("tokenizer.json")
    return save_checkpoint(root, step, model=model, processor=processor, state={"step": step}, keep=keep)


def test_what_is_saved_is_found(tmp_path):
    save(tmp_path, 5)
    found = latest_checkpoint(tmp_path)
    assert found.step == 5
    assert found.state() == {"step": 5}


def test_no_checkpoint_is_no_error(tmp_path):
    assert latest_checkpoint(tmp_path) is None


def test_only_the_newest_stay(tmp_path):
    for step in (5, 10, 15, 1000000):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000015", "step-1000000"]
    assert latest_checkpoint(tmp_path).step == 1000000


def _cut(path):
    path.write_text(path.read_text()[:10])


def _flip(path):
    path.write_text("y" + path.read_text()[1:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "half written or copied in part"),
        (lambda folder: _cut(folder / "manifest.json"), "manifest.json cannot be read"),
        (lambda folder: _cut(folder / "model.safetensors"), "model.safetensors has 10 of 1000 bytes"),
        (lambda folder: _flip(folder / "model.safetensors"), "contents of model.safetensors have changed"),
        (lambda folder: (folder / "training_state.pt").unlink(), "training_state.pt is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_good_one_before_it_named(tmp_path, damage, message):
    save(tmp_path, 5)
    damage(save(tmp_path, 10).folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        latest_checkpoint(tmp_path)
    assert f"newest whole checkpoint before it is {tmp_path / 'step-000005'}" in str(caught.value)


def test_a_lone_damaged_checkpoint_says_that_there_is_nothing_before_it(tmp_path):
    _cut(save(tmp_path, 5).folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="no whole checkpoint before it"):
        latest_checkpoint(tmp_path)


def test_an_unfinished_write_is_no_checkpoint_and_is_cleared_away(tmp_path):
    save(tmp_path, 5)
    unfinished = tmp_path / ".step-000010.writing"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_text("half")
    assert latest_checkpoint(tmp_path).step == 5
    assert not unfinished.exists()


def test_a_failing_write_leaves_the_checkpoints_before_it(tmp_path):
    class Full(Saved):
        def save_pretrained(self, _folder):
            raise OSError(28, "No space left on device")

    save(tmp_path, 5)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_checkpoint(tmp_path, 10, model=Full("m"), processor=Saved("p"), state={}, keep=1)
    assert latest_checkpoint(tmp_path).step == 5


def test_a_half_written_checkpoint_is_no_model_folder(tmp_path):
    folder = save(tmp_path, 5).folder
    refuse_half_written(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="half written"):
        refuse_half_written(folder)


def test_other_folders_are_not_checkpoints(tmp_path):
    refuse_half_written(tmp_path)
    refuse_half_written(tmp_path / "Qwen" / "Qwen3-VL")


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    path = save(tmp_path, 5).folder / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 9'))
    with pytest.raises(CheckpointError, match="has version 9"):
        open_checkpoint(path.parent)


def test_random_generators_go_on_where_they_were(tmp_path):
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 - the state under test

    np.random.seed(3)  # noqa: NPY002 - the state under test
    draw()
    save_checkpoint(tmp_path, 1, model=Saved("m"), processor=Saved("p"), state={"random": random_state()}, keep=1)
    expected = [draw() for _ in range(3)]
    restore_random_state(latest_checkpoint(tmp_path).state()["random"])
    assert [draw() for _ in range(3)] == expected
