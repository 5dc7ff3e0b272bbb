import numpy as np
import pytest

from headway.data.index import build_index, index_folder
from headway.data.policy import BadSamples
from headway.errors import DataError, UsageError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    """The address of a cluster of two worker processes on this machine."""
    from distributed import LocalCluster

    with pytest.MonkeyPatch.context() as patch:  # on its own disk, as on another machine
        patch.setenv("HEADWAY_CACHE", str(tmp_path_factory.mktemp("worker")))
        cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with cluster:
        yield cluster.scheduler_address


def test_a_cluster_measures_what_one_process_measures(chats, encoder, tmp_path, scheduler):
    source = chats(1500, broken=[700])
    told = []

    index = build_index(
        source,
        encoder,
        tmp_path / "cluster",
        cluster=scheduler,
        policy=BadSamples("skip"),
        progress=lambda *seen: told.append(seen),
    )

    alone = build_index(source, encoder, tmp_path / "alone", workers=0, policy=BadSamples("skip"))
    assert np.array_equal(index.tokens, alone.tokens)
    assert [str(error) for error in index.bad.values()] == [str(error) for error in alone.bad.values()]
    assert list(index.bad) == [700]
    assert told[-1] == (1500, 1500, 1)


def test_a_cluster_goes_on_from_finished_parts(chats, encoder, tmp_path, scheduler):
    source = chats(1000)

    class StoppedError(Exception):
        pass

    def stop(measured, rows, bad):
        if measured >= 512:
            raise StoppedError

    with pytest.raises(StoppedError):
        build_index(source, encoder, tmp_path, workers=0, progress=stop)
    told = []
    build_index(source, encoder, tmp_path, cluster=scheduler, progress=lambda measured, *_: told.append(measured))

    assert told[:3] == [0, 256, 512]
    assert told[-1] == 1000


def test_workers_that_do_not_see_the_files_are_an_error(chats, encoder, tmp_path, scheduler):
    source = chats(300)
    assert len(source) == 300
    file = tmp_path / "data" / "chats.jsonl"
    file.rename(tmp_path / "elsewhere.jsonl")

    with pytest.raises(DataError, match=r"chats\.jsonl: the file cannot be read further: No such file"):
        build_index(source, encoder, tmp_path / "indices", cluster=scheduler)

    assert not list(index_folder(source, encoder, tmp_path / "indices").glob("**/*.parquet"))


def test_no_scheduler_is_named(chats, encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("headway.data.index.cluster.CONNECT_S", 1)

    with pytest.raises(UsageError, match=r"No Dask scheduler answers at 'tcp://127\.0\.0\.1:9'"):
        build_index(chats(10), encoder, tmp_path, cluster="tcp://127.0.0.1:9")
