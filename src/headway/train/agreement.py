"""Agreement of the ranks, before the first step, on the facts behind their losses: settings, software, model, data.

Each rank of a run reads its own configuration and files, which may differ from machine to machine. A difference would
train in silence: every rank moves its own slices of the weights by its own learning rate. So facts are compared at
set-up. A model folder and data are compared by content, so that each machine may keep a copy at a path of its own.
"""

import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headway.config import TrainConfig
from headway.data.sources import Source
from headway.data.sources.files import find_files
from headway.data.sources.identity import (
    UNASKED_BYTES,
    Identities,
    Verify,
    content_mark,
    content_sha256,
    identify,
    is_small,
    with_hashes,
)
from headway.devices.names import OVERRIDE_VARIABLE
from headway.devices.table import FILE_VARIABLE
from headway.errors import ConfigError
from headway.hub import cached_folder, located
from headway.log.working import working
from headway.models.parallel.ranks import Ranks
from headway.train.run_folder import is_among, settings_by_name
from headway.version import code_digest, library_versions

Facts = Mapping[str, str]
"""Values that must be the same on all ranks, by what they are called."""

_OF_A_MACHINE = ("plan", "run.device", "run.threads", "data.workers", "data.prefetch_bytes", "model.chat_template")
_BY_CONTENT = re.compile(r"model\.path|data(?:\.(?!columns\b)\w+)*\.(?:path|root)")
_VARIABLES = (OVERRIDE_VARIABLE, FILE_VARIABLE)
_SETTINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")  # files of a model folder beside its weights
_WEIGHTS = ".safetensors"
_SPOTS = 4096  # places compared of weights that are too many to be read again
_MOST_NAMED = 4  # differences, values of each, and ranks of each value, that an error names


def agree(ranks: Ranks, facts_of: Callable[[], Facts]) -> None:
    """Compare facts over all ranks; each sends a digest, and the facts themselves only if the digests differ.

    Args:
        ranks: the processes.
        facts_of: finds this one's facts; not called if it is alone.

    Raises:
        ConfigError: they differ; the same on all ranks.
    """
    if ranks.size == 1:
        return
    facts = facts_of()
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode()).digest()
    if len(set(ranks.gather_all(digest))) == 1:
        return
    everyone = ranks.gather_all((socket.gethostname(), dict(facts)))
    hosts = [host for host, _ in everyone]
    clauses = []
    for name in dict.fromkeys(name for _, own in everyone for name in own):
        values = [own.get(name) for _, own in everyone]
        if any(value != values[0] for value in values):
            clauses.append(f"{name} is {_spread(values, hosts)}")
    more = f"; and {len(clauses) - _MOST_NAMED} more" if len(clauses) > _MOST_NAMED else ""
    raise ConfigError(
        f"the ranks of this run would train differently: {'; '.join(clauses[:_MOST_NAMED])}{more}. Nothing was "
        "trained. Start all ranks with the same settings, software, model folder and data. Only paths, run.device, "
        "run.threads, data.workers and data.prefetch_bytes may differ."
    )


def _spread(values: Sequence[object], hosts: Sequence[str]) -> str:
    """Values with the ranks that have them.

    >>> _spread([1, 2, 1], ["a", "b", "a"])
    '1 on ranks 0, 2 (on a) and 2 on rank 1 (on b)'
    """
    texts: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        texts.setdefault("not there" if value is None else str(value), []).append(rank)
    parts = []
    for text, of_ranks in list(texts.items())[:_MOST_NAMED]:
        names = ", ".join(map(str, of_ranks[:_MOST_NAMED])) + " ..." * (len(of_ranks) > _MOST_NAMED)
        of_hosts = sorted({hosts[rank] for rank in of_ranks})
        place = f" (on {of_hosts[0]})" if len(of_hosts) == 1 and len(set(hosts)) > 1 else ""
        parts.append(f"{text} on rank{'s' * (len(of_ranks) > 1)} {names}{place}")
    return " and ".join(parts)


def settings_facts(config: TrainConfig, *, resume: bool | None, device: str) -> Facts:
    """Settings of a rank, the software that it runs, and what else of its surroundings decides what it computes.

    Args:
        config: as this rank read it.
        resume: whether it goes on with a run.
        device: type of the device that it computes on.
    """
    settings = {
        name: repr(value)
        for name, value in settings_by_name(config).items()
        if not is_among(name, _OF_A_MACHINE) and not _BY_CONTENT.fullmatch(name)
    }
    software = {f"the version of {name}": version for name, version in library_versions().items()}
    return {
        **settings,
        "the run's beginning": {None: "resumed if there is a run", True: "resumed", False: "new"}[resume],
        "the kind of device": device,
        **software,
        "the digest of Headway's own code": code_digest(),
        "the digest of the objective's file": "" if config.objective is None else config.objective.digest,
        **{name: os.environ.get(name, "not set") for name in _VARIABLES},
    }


def model_facts(config: TrainConfig, *, reads_weights: bool) -> Facts:
    """Content of the files that a rank's model and processor are made from.

    Weights of more than 1 GiB together are compared by their sizes and some thousand spots, unless `data.verify` asks
    for hashes.

    Args:
        config: of the run.
        reads_weights: whether weights come from the folder, rather than from a checkpoint or at random.
    """
    template = config.model.chat_template
    facts = {"model.chat_template": "not set" if template is None else _content(Path(template))}
    folder = Path(located(config.model.path))
    if not folder.exists():  # a name on the Hub
        folder = cached_folder(config.model.path) or folder
    if not folder.exists():
        return facts
    # Files beside the weights by their content.
    files, _ = find_files(str(folder if folder.is_dir() else folder.parent))
    facts |= {f"{file.name} of the model folder": _content(Path(file.url)) for file in files if _is_setting(file.name)}
    # Weights: all of their content, or spots of it.
    weights = [file for file in files if reads_weights and file.name.endswith(_WEIGHTS)]
    is_hashed = config.data.verify == "hash" or sum(file.size or 0 for file in weights) <= UNASKED_BYTES
    with working("comparing the weights of the ranks"):
        for file in weights:
            path = Path(file.url)
            content = _content(path) if is_hashed else content_mark(path, 0, max(16, _SPOTS // len(weights)))
            facts[f"{file.name} of the model folder"] = f"{content}, {file.size:,} bytes"
    return facts


def agreed_files(sources: Sequence[Source], verify: Verify, ranks: Ranks) -> Identities:
    """Look up the identity of data files, hashed where that is asked for or cheap; all ranks must have the same.

    Times are not compared, because copies on other machines have others.

    Raises:
        ConfigError: the ranks have other files.
        DataError: a file cannot be read.
    """
    files = identify(sources)
    if verify == "hash" or (verify == "size-and-time" and all(ranks.gather_all(is_small(sources)))):
        with working("hashing the data"):
            files = ranks.after_first(lambda: with_hashes(files, sources))
    agree(ranks, lambda: files_facts(files))
    return files


def files_facts(files: Identities) -> Facts:
    """Facts of data files that hold wherever their copies lie: names, sizes, digests and tags, in their order."""
    facts = {}
    for source, of_source in files.items():
        for number, file in enumerate(of_source):
            marks = [file.name, "" if file.num_bytes is None else f"{file.num_bytes:,} bytes"]
            marks += [_shortened(file.sha256) if file.sha256 else ""]
            marks += ["" if file.changed.isdecimal() else file.changed]
            marks += [f"lengths of rows {file.lengths}" if file.lengths else ""]
            facts[f"file {number} of the source {source}"] = ", ".join(filter(None, marks))
    return facts


def _is_setting(name: str) -> bool:
    return name.endswith(_SETTINGS)


def _content(path: Path) -> str:
    try:
        return _shortened(content_sha256(path))
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def _shortened(sha256: str) -> str:
    return f"SHA-256 {sha256[:16]}..."
