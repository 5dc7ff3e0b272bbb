"""Units measured by an existing Dask cluster, whose workers see the same files as this process."""

from collections.abc import Iterator, Sequence
from typing import Any

from distributed import Client, KilledWorker, WorkerPlugin, as_completed, get_worker

from headway.data.index.units import Job, measure_unit
from headway.errors import DataError, UsageError

CONNECT_S = 30
"""How long the scheduler may take to answer [s]."""


class _GiveJob(WorkerPlugin):  # type: ignore[misc]  # distributed has no types
    """Gives the job to every worker, those that join or restart later included, instead of to every task."""

    def __init__(self, job: Job) -> None:
        self.name, self.job = str(job.folder), job


def measure_on_cluster(job: Job, units: Sequence[range], address: str) -> Iterator[range]:
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
    plugin = _GiveJob(job)
    with _client(address) as client:
        client.register_plugin(plugin)
        try:
            running = client.map(_measure, [(plugin.name, unit.start, unit.stop) for unit in units], pure=False)
            wanted = {future.key: unit for future, unit in zip(running, units, strict=True)}
            for future in as_completed(running):
                unit = wanted[future.key]
                try:
                    future.result()
                except KilledWorker as error:
                    raise DataError(
                        f"Rows {unit.start} to {unit.stop - 1} of {job.source.name} have ended several of the "
                        f"cluster's workers ({error}). One of the rows needs more memory than they have, or crashes a "
                        "decoder. Leave those rows out; finished rows are kept."
                    ) from error
                yield unit
        finally:
            client.cancel(running)
            client.unregister_worker_plugin(plugin.name)


def _client(address: str) -> Any:
    try:
        return Client(address, timeout=CONNECT_S)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"No Dask scheduler answers at {address!r}: {error}. Give the address that `dask scheduler` prints, such "
            "as tcp://host:8786."
        ) from error


def _measure(task: tuple[str, int, int]) -> None:
    name, start, stop = task
    measure_unit(get_worker().plugins[name].job, range(start, stop))
