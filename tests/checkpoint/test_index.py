"""A checkpoint's index of tensors: what PyTorch wrote is read whole, and what a stranger put there does not run."""

import os
import pickle
import shutil
import warnings

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.state_dict_saver import save

from headway.checkpoint.index import read_index
from headway.checkpoint.restore import read_tensors, saved_tensors
from headway.errors import CheckpointError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(7)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        save(tensors, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "checkpoint")


class Payload:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_the_index_is_what_pytorch_reads_of_it(whole):
    ours, theirs = read_index(whole), FileSystemReader(whole).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.version == theirs.version


def test_tensors_are_read_by_it(whole):
    found = {name: torch.empty_like(tensor, device="cpu") for name, tensor in saved_tensors(whole).items()}
    read_tensors(whole, found)
    assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (found["b"].dtype, found["c"].item()) == (torch.bfloat16, 7)


@pytest.mark.parametrize("place", ["all", "inside", "key"])
@pytest.mark.parametrize("protocol", [2, 5])
def test_a_payload_in_the_index_is_refused_and_does_not_run(place, protocol, folder, tmp_path):
    mark = tmp_path / "ran"
    index = FileSystemReader(folder).read_metadata()
    index.planner_data = Payload(mark)
    content = {"all": Payload(mark), "inside": index, "key": {Payload(mark): 1}}[place]
    (folder / ".metadata").write_bytes(pickle.dumps(content, protocol))
    for read in (saved_tensors, lambda folder: read_tensors(folder, {"a": torch.empty(2, 3)})):
        with pytest.raises(CheckpointError, match=r"\.metadata is no index of tensors: it names (posix|os)\.mkdir\."):
            read(folder)
    assert not mark.exists()


def test_an_index_cannot_change_the_classes_that_it_names(folder):
    """A pickle may set attributes of what it names: here it would leave a mark on a class of PyTorch."""
    names = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (folder / ".metadata").write_bytes(b"\x80\x02" + names + b"(N}X\x04\x00\x00\x00markK\x01stb.")
    with pytest.raises(CheckpointError, match="is no index of tensors"):
        read_index(folder)
    assert not hasattr(Metadata, "mark")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.storage_data.clear(), None),
        (lambda index: _first(index.storage_data, relative_path="../../etc/passwd"), "points into the file"),
        (lambda index: _first(index.storage_data, relative_path="/etc/passwd"), "points into the file"),
        (lambda index: _first(index.storage_data, offset=-1), "no whole number"),
        (lambda index: _first(index.storage_data, transform_descriptors=["zstd"]), "is stored as"),
        (lambda index: _first(index.state_dict_metadata, properties=TensorProperties("float32")), "a dtype is"),
        (lambda index: _first(index.state_dict_metadata, size=torch.Size([1, 1])), "lies outside a tensor"),
        (lambda index: _first(index.state_dict_metadata, chunks=7), "not iterable"),
        (lambda index: setattr(index, "state_dict_metadata", None), "no attribute 'items'"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(change, message, folder):
    index = FileSystemReader(folder).read_metadata()
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=message or "cannot be read"):
        read_tensors(folder, {name: torch.empty(t.shape, dtype=t.dtype) for name, t in saved_tensors(folder).items()})


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x05N.", b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x0f."])
def test_an_index_that_is_damaged_is_refused(content, folder):
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata is no index of tensors"):
        read_index(folder)


def _first(records, **changes):
    record = next(iter(records.values()))
    for name, value in changes.items():
        object.__setattr__(record, name, value)
