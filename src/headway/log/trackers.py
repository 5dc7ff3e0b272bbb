"""Sinks for trackers: Weights & Biases, MLflow and Prometheus, and the parts that TensorBoard shares with them.

Numbers go under `headway/` and their names in the record, nested ones joined by "/": `headway/mfu`,
`headway/flops/total`; those of a record of another kind than "step" under its kind too: `headway/evaluation/loss`. What
says how a number was made (the convention, the peak's source) is text, and is noted once for the run and again when it
changes. A truth value is 1 or 0, and what is missing is left out.
"""

import os
import re
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from headway.errors import ConfigError, UsageError
from headway.log.sink import Sink, flatten
from headway.version import install_command

PREFIX = "headway"
_MAX_PENDING = 1000  # records that may wait for MLflow


# Entries of a step's record that are no curves: constants, numbers for each rank, lines of code.
_FOR_FILES = {"schema_version", "rank_flops", "rank_flops_per_busy_s", "places", "optimizer", "machine_state"}


def tracked(record: Mapping[str, Any]) -> tuple[dict[str, int | float], dict[str, str]]:
    """Sort a record into numbers and texts under the names that trackers show; the step is not among them.

    >>> tracked({"step": 3, "mfu": 0.4, "flops": {"total": 7}, "convention": "useful/1"})
    ({'headway/mfu': 0.4, 'headway/flops/total': 7}, {'headway/convention': 'useful/1'})
    """
    kind = record.get("kind", "step")
    prefix = PREFIX if kind == "step" else f"{PREFIX}/{kind}"
    numbers: dict[str, int | float] = {}
    texts: dict[str, str] = {}
    for name, value in flatten({key: value for key, value in record.items() if key not in _FOR_FILES}).items():
        if isinstance(value, str):
            if name != "kind":
                texts[f"{prefix}/{name}"] = value
        elif value is not None and name != "step":
            numbers[f"{prefix}/{name}"] = int(value) if isinstance(value, bool) else value
    return numbers, texts


class Tracker(Sink):
    """A sink that wants numbers and the texts that are new."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand a record's numbers and new texts to the tracker."""
        numbers, texts = tracked(record)
        new = {name: text for name, text in texts.items() if self._texts.get(name) != text}
        self._log(record["step"], numbers, new)
        self._texts |= new

    @abstractmethod
    def _log(self, step: int, numbers: dict[str, int | float], texts: dict[str, str]) -> None:
        """Hand numbers and texts to the tracker."""


@contextmanager
def opening(what: str) -> Iterator[None]:
    """Turn an error while a tracker is opened into an error with a remedy."""
    try:
        yield
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"writing to {what} needs {error.name}, which is not installed. Install the extra: "
            f"{install_command('trackers')}."
        ) from error
    except Exception as error:
        raise ConfigError(f"{what} cannot be opened: {type(error).__name__}: {error}") from error


class WandbSink(Tracker):
    """Numbers in a Weights & Biases run: the one that is active, or a new one, which `close` then finishes.

    The record's step is the horizontal axis (`headway/step`); W&B's own step is left alone, so that a loop which logs
    to the same run keeps its own count. WANDB_MODE=offline and the other variables of W&B hold. Nobody is asked to log
    in: without a key an online run is an error.

    Args:
        project: project of a new run; W&B's own default if None.
        entity: its team or user; the default one if None.

    Raises:
        ConfigError: wandb is not installed or too old, there is no key, or the run cannot be started.
    """

    def __init__(self, project: str | None = None, entity: str | None = None) -> None:
        super().__init__()
        with opening("W&B"):
            import wandb

            self._is_own = wandb.run is None
            if wandb.run is None:
                settings = wandb.setup().settings
                if settings.mode == "online" and not wandb.login(prompt=False, verify=False):
                    raise ConfigError(
                        "W&B has no login key. Set WANDB_API_KEY, or run `wandb login` once. Or set "
                        "WANDB_MODE=offline to keep the run on this machine, and run `wandb sync` later."
                    )
                self._run = wandb.init(project=project, entity=entity)
            else:
                self._run = wandb.run
            self._run.define_metric(f"{PREFIX}/step")
            self._run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")

    @classmethod
    def parse(cls, place: str) -> "WandbSink":
        """Open from "PROJECT" or "ENTITY/PROJECT"."""
        entity, _, project = place.rpartition("/")
        return cls(project or None, entity or None)

    def _log(self, step: int, numbers: dict[str, int | float], texts: dict[str, str]) -> None:
        self._run.log({f"{PREFIX}/step": step, **numbers})
        if texts:
            self._run.config.update(texts, allow_val_change=True)

    def close(self) -> None:
        """Finish the run if it was started here."""
        if self._is_own:
            self._run.finish()
            self._is_own = False


class MlflowSink(Tracker):
    """Metrics and tags in an MLflow run: the one that is active, or a new one, which `close` then ends.

    The active run is used only if no store is named; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID
    hold where nothing else is said. A thread does the writing, as a server that does not answer is asked again for
    minutes; what fails there is raised by the next `write`, or by `close`, which waits for the thread.

    Args:
        uri: tracking store, such as sqlite:///runs.db or http://server:5000.
        experiment: experiment of a new run, made if it is not there.

    Raises:
        ConfigError: mlflow is not installed, or the store or run cannot be opened.
    """

    def __init__(self, uri: str | None = None, experiment: str | None = None) -> None:
        super().__init__()
        with opening("MLflow"):
            import mlflow
            from mlflow.tracking import MlflowClient

            active = mlflow.active_run() if uri is None and experiment is None else None
            self._client = MlflowClient(uri)
            run_id = os.environ.get("MLFLOW_RUN_ID")
            self._is_own = active is None
            if active is not None:
                run_id = active.info.run_id
            elif run_id is not None:
                self._client.update_run(run_id, status="RUNNING")
            else:
                name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PREFIX
                known_experiment = self._client.get_experiment_by_name(name)
                experiment_id = (
                    known_experiment.experiment_id if known_experiment else self._client.create_experiment(name)
                )
                run_id = self._client.create_run(experiment_id).info.run_id
            self.run_id: str = run_id
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headway-mlflow")
        self._pending: deque[Future[None]] = deque()
        self._has_failed = False

    @classmethod
    def parse(cls, place: str) -> "MlflowSink":
        """Open from "URI#EXPERIMENT"; both parts may be missing."""
        uri, _, experiment = place.partition("#")
        return cls(uri or None, experiment or None)

    def _log(self, step: int, numbers: dict[str, int | float], texts: dict[str, str]) -> None:
        from mlflow.entities import Metric, RunTag

        now_ms = time.time_ns() // 1_000_000
        metrics = [Metric(name, number, now_ms, step) for name, number in numbers.items()]
        tags = [RunTag(name, text) for name, text in texts.items()]
        self._raise_failure()
        if len(self._pending) >= _MAX_PENDING:
            self._has_failed = True
            raise TimeoutError(f"{_MAX_PENDING} records wait to be written, because the store does not keep up")
        self._pending.append(self._worker.submit(self._client.log_batch, self.run_id, metrics, tags=tags))

    def _raise_failure(self) -> None:
        while self._pending and self._pending[0].done():
            error = self._pending.popleft().exception()
            if error is not None:
                self._has_failed = True
                raise error

    def close(self) -> None:
        """Write waiting records, and end the run if it was started here; after a failure, let go of it as it is."""
        self._worker.shutdown(wait=not self._has_failed, cancel_futures=self._has_failed)
        if self._has_failed:
            return
        self._raise_failure()
        if self._is_own:
            self._client.set_terminated(self.run_id)
            self._is_own = False


class PrometheusSink(Sink):
    """The last record of each kind as gauges at http://HOST:PORT/metrics, for Prometheus to fetch.

    A gauge's name is the tracker's name with "_" for what Prometheus does not allow: `headway_flops_total`. Texts are
    labels of `headway_info`. All carry the label `rank`.

    Args:
        port: to listen on; 0 takes a free one, which `port` then tells.
        host: address to listen on; this machine alone hears it by default. "0.0.0.0" is every address of the machine:
            who reaches one reads the records, without a password.
        rank: rank of this process among those that train.

    Raises:
        ConfigError: prometheus_client is not installed, or the port is taken.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", *, rank: int = 0) -> None:
        self._rank = str(rank)
        self._last: dict[str, tuple[dict[str, int | float], dict[str, str]]] = {}  # numbers and texts by kind
        with opening("Prometheus"):
            from prometheus_client import CollectorRegistry, start_http_server

            registry = CollectorRegistry()
            registry.register(self)
            try:
                self._server, self._thread = start_http_server(port, host, registry)
            except (OSError, OverflowError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                raise ConfigError(
                    f"the Prometheus port {host}:{port} cannot be opened: {reason}. Give another port for each "
                    "process of a machine, or 0 for any free port."
                ) from error
        self.port: int = self._server.server_port

    @classmethod
    def parse(cls, place: str, *, rank: int = 0) -> "PrometheusSink":
        """Open from "PORT" or "HOST:PORT"."""
        host, _, port = place.rpartition(":")
        if not port.isdecimal():
            raise ConfigError(f"prometheus:{place} names no port. Give prometheus:9400 or prometheus:0.0.0.0:9400.")
        return cls(int(port), host or "127.0.0.1", rank=rank)

    def write(self, record: Mapping[str, Any]) -> None:
        """Let this record be the one that is fetched from now on.

        Raises:
            UsageError: as in `Sink.write`, or two of the names are the same to Prometheus.
        """
        numbers, texts = tracked(record)
        kind = str(record.get("kind", "step"))
        numbers[f"{PREFIX}/step" if kind == "step" else f"{PREFIX}/{kind}/step"] = record["step"]
        names: dict[str, str] = {}
        for name in numbers:
            other = names.setdefault(_gauge_name(name), name)
            if other != name:
                raise UsageError(
                    f"{other} and {name} would both be named {_gauge_name(name)} in Prometheus. Rename one of the two."
                )
        self._last = {**self._last, kind: (numbers, texts)}

    def collect(self) -> Iterator[Any]:
        """Make the gauges of the last records; Prometheus' client calls this when it is asked."""
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        labels: dict[str, str] = {}
        for numbers, texts in self._last.values():
            for name, number in numbers.items():
                gauge = GaugeMetricFamily(_gauge_name(name), f"{name} of the last record", labels=["rank"])
                gauge.add_metric([self._rank], float(number))
                yield gauge
            labels |= {_gauge_name(name).removeprefix(f"{PREFIX}_"): text for name, text in texts.items()}
        if labels:
            info = InfoMetricFamily(PREFIX, "how the numbers were made", labels=["rank"])
            info.add_metric([self._rank], labels)
            yield info

    def close(self) -> None:
        """Stop listening."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def _gauge_name(name: str) -> str:
    """Source: Prometheus' data model, metric names match [a-zA-Z_:][a-zA-Z0-9_:]*, colons being for rules."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
