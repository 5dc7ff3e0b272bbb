"""Ledgers of the models that tests train, each traced once: a trace takes longer than a run of a few steps.

That traces are right is held where tracing is tested; a run only has to use what it is given. Within a process, and
between it and those that it starts, models of one class, configuration, parameters and modules share a ledger.
"""

import functools
import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from headway.count import CostModel
from headway.optim import groups
from headway.tracing import trace
from headway.train import build
from helpers.tiny_models import tiny_config

FOLDER = "HEADWAY_TEST_LEDGERS"  # the environment variable that names the folder of the ledgers


def ledger_of(model: Any) -> CostModel:
    """What `trace` says of a model of transformers, read from the folder if it was traced before."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in ("_name_or_path", "dtype")}
    parameters = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    modules = [(name, type(module).__name__) for name, module in model.named_modules()]
    facts = repr((type(model).__name__, config, parameters, modules))
    path = Path(os.environ[FOLDER]) / hashlib.sha256(facts.encode()).hexdigest()
    if not path.exists():
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_bytes(pickle.dumps(trace(model)))
        unfinished.replace(path)
    found: CostModel = pickle.loads(path.read_bytes())
    return found


def install() -> None:
    """Have the runs of this process, and of those that it starts, take their ledgers from the folder."""
    build.trace = groups.trace = ledger_of  # type: ignore[attr-defined]


@pytest.fixture(autouse=True, scope="session")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trace each model once, however many runs train it: import this into a conftest.py."""
    os.environ[FOLDER] = str(tmp_path_factory.mktemp("ledgers"))
    install()


@functools.cache
def tiny_ledger(family: str) -> CostModel:
    """The ledger of a family's tiny model."""
    return trace(tiny_config(family))
