"""Units measured by an existing Dask cluster, whose workers see the same files as this process."""

from collections.abc import Iterator, Sequence
from typing import Any

import distributed

from headway.data.index.units import IndexJob, measure_unit
from headway.errors import DataError, UsageError

CONNECT_S = 30
"""How long the scheduler may take to answer [s]."""


class GiveJob(distributed.WorkerPlugin):
    """Gives the job to every worker once, those that join or restart later included, instead of to every task.

    Args:
        job: what is measured.
    """

    def __init__(self, job: IndexJob) -> None:
        self.name, self.job = f"headway index {job.folder}", job


def measure_on_cluster(job: IndexJob, units: Sequence[range], address: str) -> Iterator[range]:
    """Measure units with the workers of a Dask cluster.

    Args:
        job: what is measured; its folder is on a file system that all workers share.
        units: ranges of rows.
        address: of the scheduler, such as tcp://host:8786.

    Yields:
        Each unit once its part is written, in any order.

    Raises:
        UsageError: no scheduler answers.
        DataError: a unit has killed several workers, or workers do not see the source's files.
    """
    plugin = GiveJob(job)
    with _client(address) as client:
        client.register_plugin(plugin)
        tasks = [(plugin.name, unit.start, unit.stop) for unit in units]
        running: dict[Any, range] = dict(zip(client.map(_measure, tasks, pure=False), units, strict=True))
        finished: Any = distributed.as_completed  # it has no types
        try:
            for future in finished(list(running)):
                unit = running[future]
                try:
                    future.result()
                except distributed.KilledWorker as error:
                    raise DataError(
                        f"Rows {unit.start} to {unit.stop - 1} of {job.source.name} have ended several of the "
                        f"cluster's workers: {error} One of the rows needs more memory than they have, or crashes a "
                        "decoder. Look into the workers' logs, then leave those rows out; finished rows are kept."
                    ) from error
                yield unit
        finally:
            client.cancel(list(running))
            client.unregister_worker_plugin(plugin.name)


def _client(address: str) -> Any:
    connect: Any = distributed.Client
    try:
        return connect(address, timeout=CONNECT_S)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"No Dask scheduler answers at {address!r}: {error}. Give the address that `dask scheduler` prints, such "
            "as tcp://host:8786."
        ) from error


def _measure(task: tuple[str, int, int]) -> None:
    name, start, stop = task
    plugin = distributed.get_worker().plugins[name]
    assert isinstance(plugin, GiveJob)
    measure_unit(plugin.job, range(start, stop))
