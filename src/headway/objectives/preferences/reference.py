"""The reference of preferences: log-probabilities of answers under the initial weights, or with adapters off.

Stored ones are computed once, before the first step, for every row that the plan trains on. They lie beside the length
index under a digest of the weights, so that other runs of the same model on the same rows find them; an interrupted
computation goes on where it was, and rows whose pictures, videos or sounds have changed are computed again. The run
folder has a copy, which a resumed run reads.

Tensor letters: N rows of a source, G answers of the row that has the most, A answers of a pack, L slots that this
process computes.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from transformers import PreTrainedModel

from headway.cache import write_whole
from headway.count import CostModel
from headway.data import Batch
from headway.data.blank_media import vision_kinds
from headway.data.feed import IndexedFeed
from headway.data.samples import Origin, SampleError
from headway.data.sources import Source
from headway.data.sources.identity import content_mark, file_state, media_files
from headway.errors import CheckpointError, DataError
from headway.log.working import working
from headway.models.head import ModelWithLoss, model_with_loss
from headway.models.lora import without_adapters
from headway.models.parallel.ranks import Ranks
from headway.report import format_count, format_duration
from headway.version import code_digest, library_versions

Autocast = Callable[[], AbstractContextManager[Any]]
Table = NDArray[np.float64]
"""Log-probability of each answer of each row [nats], NaN where it was not computed, shape (N, G)."""

FOLDER = "reference"
"""Folder of a run's copies, one for each source."""

_SAVE_S = 30.0  # between writes of an unfinished table
_ELEMENTS = 2**24  # weights added up at a time
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Scoring(NamedTuple):
    """Model and surroundings that log-probabilities of a pack's answers are computed with.

    Attributes:
        model_with_loss: the model, with its initial weights.
        device: where it lives.
        autocast: context of its forward.
        group: the processes that compute each pack together; None where each pack is one process's.
    """

    model_with_loss: ModelWithLoss
    device: torch.device
    autocast: Autocast
    group: ProcessGroup | None = None

    @torch.no_grad()
    def log_probabilities(self, batch: Batch) -> torch.Tensor:
        """Log-probability of each answer of a pack that is on the device [nats], shape (A,); none of an empty pack."""
        local = batch.local_slots(self.group)
        with self.autocast():
            losses = self.model_with_loss(batch.model_inputs(), batch.labels_1T[0, local], labelled_K=batch.labelled_K)
        if batch.answers is None:
            return losses.loss_T.new_empty(0, dtype=torch.float64)
        of_L = batch.answers.of_slots(batch.slots)[local]
        return batch.answers.log_probabilities(losses.loss_T, of_L, self.group)


@dataclass(frozen=True)
class StoredReference:
    """Log-probabilities of the answers of all rows.

    Attributes:
        tables: of each source, by its name.
        starts: number of the first row of each file, by the source and the file.
        note: where they are from, in a line.
    """

    tables: Mapping[str, Table]
    starts: Mapping[tuple[str, str], int] = field(repr=False)
    note: str = ""

    def of(self, batch: Batch) -> torch.Tensor:
        """Log-probability of each answer of a pack [nats], shape (A,).

        Raises:
            DataError: those of a row were not computed.
        """
        values: list[float] = []
        for origin, number in zip(batch.origins, batch.num_answers, strict=True):
            row = self.tables[origin.source][_row(origin, self.starts)]
            if number > len(row) or np.isnan(row[:number]).any():
                raise DataError(
                    "the reference has no log-probabilities of the row's answers, because the row could not be used "
                    "before the first step, or has changed since. Start another run.",
                    where=str(origin),
                )
            values += row[:number].tolist()
        return torch.tensor(values, dtype=torch.float64)


def stored_reference(
    feed: IndexedFeed, scoring: Scoring, ranks: Ranks, cost_model: CostModel, folders: Mapping[str, Path], key: str
) -> StoredReference:
    """Compute the log-probabilities of all rows' answers under the present weights, or read them.

    Args:
        feed: its plan says which rows.
        scoring: what they are computed with.
        ranks: the processes; each takes its share of the packs.
        cost_model: of the model, for the note.
        folders: of each source, where its table lies.
        key: of the model, by `reference_key`.

    Raises:
        DataError: a row cannot be used, or its table cannot be written.
    """
    paths = {name: folder / f"reference-{key}.npy" for name, folder in folders.items()}
    tables = ranks.by_first(lambda: {source.name: _current(source, paths[source.name]) for source in feed.sources})
    starts = _starts(feed.sources)
    missing = [np.asarray(np.isnan(tables[source.name]).all(axis=1)) for source in feed.sources]
    rows = flops = 0
    began_s = saved_s = time.monotonic()
    model = scoring.model_with_loss.model
    was_training = model.training
    model.train(False)
    with working("computing the log-probabilities of the reference"):
        for batch in feed.once(missing):
            # All ranks run the same towers, and all hear of each other's rows.
            kinds = frozenset[str]().union(*ranks.gather_all(vision_kinds(batch)))
            ready = feed.with_blanks(batch, kinds).dealt(scoring.group).to(scoring.device)
            values = iter(scoring.log_probabilities(ready).tolist())
            scored = [
                (origin.source, _row(origin, starts), [next(values) for _ in range(number)])
                for origin, number in zip(batch.origins, batch.num_answers, strict=True)
            ]
            workload = batch.work(skips_unlabelled=scoring.model_with_loss.skips_unlabelled)
            flops += sum(ranks.gather(cost_model.count(workload, forward_only=True).total))
            for part in ranks.gather(scored):
                for name, row, numbers in part:
                    tables[name] = _fitting(tables[name], len(tables[name]), len(numbers))
                    tables[name][row, : len(numbers)] = numbers
                    rows += 1
            if ranks.by_first(lambda: time.monotonic() - saved_s > _SAVE_S):  # noqa: B023 - called at once
                ranks.by_first(lambda: _write(paths, tables))
                saved_s = time.monotonic()
    model.train(was_training)
    if not rows:
        return StoredReference(tables, starts, "the reference's log-probabilities were computed before")
    ranks.by_first(lambda: _write(paths, tables))
    spent = format_duration(time.monotonic() - began_s)
    note = f"the reference's log-probabilities of {format_count(rows)} rows took {spent} and {flops:.4g} FLOPs"
    return StoredReference(tables, starts, note)


def saved_reference(folder: Path, sources: tuple[Source, ...]) -> StoredReference:
    """Read the copy that a run folder has.

    Raises:
        CheckpointError: there is none, or one of other rows.
    """
    tables = {}
    for source in sources:
        path = _copy(folder, source.name)
        table = _read(path)
        if len(table) != len(source):
            raise CheckpointError(
                f"{path} holds the reference's log-probabilities of {len(table):,} rows, but {source.name} has "
                f"{len(source):,} rows. Put the first file back, or start another run."
            )
        tables[source.name] = table
    return StoredReference(tables, _starts(sources))


def save_reference(folder: Path, reference: StoredReference) -> None:
    """Write the copy of a run folder.

    Raises:
        DataError: it cannot be written.
    """
    _write({name: _copy(folder, name) for name in reference.tables}, reference.tables)


def reference_key(model: nn.Module, settings: Mapping[str, Any]) -> str:
    """Digest of all that log-probabilities depend on beside rows: weights, code, and settings of the computation.

    It is the same however the weights are sharded, and wherever the model's folder lies. Rows and their encoding are in
    the key of the folder that the table lies in, the media that rows name in the table's own marks.

    Args:
        model: with weights; adapters, whose outputs are zero at the start, should be out of it.
        settings: configuration of the model, precision, device and limits of a row, as JSON takes them.
    """
    code = [library_versions(), code_digest("data", "models", "objectives")]
    digest = hashlib.blake2b(json.dumps([settings, code], sort_keys=True, default=str).encode(), digest_size=12)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_weighted_sum(tensor.detach())}\n".encode())
    return digest.hexdigest()


def _weighted_sum(tensor: torch.Tensor) -> int:
    """Sum of a tensor's elements, as whole numbers of their bits, each times a number of its place, modulo 2**64.

    Elements that change places change it. A slice of a sharded tensor adds its part with the places that its elements
    have in the whole, so that nothing but the sum is exchanged. The number of a place is a product of one of each axis.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.ndim:
        local = local.reshape(1)
    bits = local.contiguous().view(_WHOLE[local.element_size()])
    factors = [_place_factors(tensor, axis).to(local.device) for axis in range(local.ndim)]
    rows_RN = bits.reshape(-1, bits.shape[-1]) if bits.numel() else bits.reshape(0, 1)
    # The last axis first, some rows at a time, as whole numbers take up to eight times the memory of weights.
    step = max(1, _ELEMENTS // rows_RN.shape[1])
    parts = [(rows_RN[at : at + step] * factors[-1]).sum(1) for at in range(0, len(rows_RN), step)]
    total = torch.cat(parts).reshape(bits.shape[:-1]) if parts else rows_RN.new_zeros((), dtype=torch.int64)
    for factors_N in reversed(factors[: total.ndim]):
        total = (total * factors_N).sum(-1)
    total_1 = total.sum().reshape(1)
    if isinstance(tensor, DTensor):  # shards add up, copies do not
        placements = [place if place.is_replicate() else Partial() for place in tensor.placements]
        total_1 = DTensor.from_local(total_1, tensor.device_mesh, placements).full_tensor()
    return int(total_1)


def _place_factors(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Odd numbers of the places along an axis that this process has, scattered over 64 bits, shape (N,)."""
    places = torch.arange(tensor.shape[axis] if tensor.ndim else 1)
    if isinstance(
        tensor, DTensor
    ):  # cut as the tensor itself is along this axis, into slices that need not be adjacent
        cuts = [place if getattr(place, "dim", None) == axis else Replicate() for place in tensor.placements]
        places = places.reshape([-1 if other == axis else 1 for other in range(tensor.ndim)])
        places = distribute_tensor(places, tensor.device_mesh, cuts, src_data_rank=None).to_local().flatten().cpu()
    mixed_N = (places + 1) * (0x9E3779B97F4A7C15 - 2**64) + axis * 0x2545F4914F6CDD1D
    for shift, factor in ((31, 0x7FB5D329728EA185), (27, 0x81DADEF4BC2DD44D - 2**64)):
        mixed_N = (mixed_N ^ (mixed_N >> shift)) * factor
    return mixed_N | 1


def with_reference(batch: Batch, values_A: torch.Tensor) -> Batch:
    """The same pack, with the reference's values of its answers."""
    assert batch.answers is not None
    return replace(batch, answers=replace(batch.answers, reference_A=values_A))


def _row(origin: Origin, starts: Mapping[tuple[str, str], int]) -> int:
    return starts[origin.source, origin.file] + origin.row


def _starts(sources: tuple[Source, ...]) -> dict[tuple[str, str], int]:
    return {
        (source.name, shard.name): start
        for source in sources
        for shard, start in zip(source.shards, source.starts, strict=False)
    }


def _copy(folder: Path, source: str) -> Path:
    return folder / FOLDER / f"{hashlib.blake2b(source.encode(), digest_size=6).hexdigest()}.npy"


def _current(source: Source, path: Path) -> Table:
    """The table of a source without rows whose pictures, videos or sounds have changed since it was written."""
    table, marks_path = _fitting(_read(path), len(source)), path.with_name(f"{path.stem}-media.npy")
    before = _read(marks_path, np.uint64)
    before = before if before.shape == (len(source), 2) else np.zeros((len(source), 2), np.uint64)
    with working(f"looking for changed media of {source.name}"):
        marks = np.array([_media_marks(source, row, before[row]) for row in range(len(source))], np.uint64)
    changed = marks[:, 1] != before[:, 1]
    table[changed] = np.nan
    if (marks != before).any():  # the table first: whatever interrupts this, no changed row is taken for another
        _write({source.name: path}, {source.name: table})
        _write({source.name: marks_path}, {source.name: marks})
    return table


def _media_marks(source: Source, row: int, before: NDArray[np.uint64]) -> tuple[int, int]:
    """Digests of the state and of the content of the files that a row names; content is read if the state is another.

    Both are 0 of a row without such files. An address on the web is known by itself alone.
    """
    try:
        files = list(dict.fromkeys(media_files(source[row])))
        states = [(file, *file_state(file)) for file in files]
        state = _number(states)
        if not files or state == before[0]:
            return (state, int(before[1])) if files else (0, 0)
        return state, _number([(file, content_mark(Path(file))) if "://" not in file else file for file in files])
    except (SampleError, OSError):  # told where the row is used
        return 0, 0


def _number(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def _read(path: Path, dtype: type = np.float64) -> NDArray[Any]:
    try:
        table = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        return np.zeros((0, 0), dtype)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"The log-probabilities in {path} cannot be read: {error}. Delete the file.") from error
    return np.asarray(table, dtype=dtype)


def _write(paths: Mapping[str, Path], tables: Mapping[str, NDArray[Any]]) -> None:
    for name, path in paths.items():
        try:
            write_whole(path, lambda file, table=tables[name]: np.save(file, table))  # type: ignore[misc]  # at once
        except OSError as error:
            raise DataError(f"The reference's log-probabilities cannot be written to {path}: {error}.") from error


def _fitting(table: Table, rows: int, answers: int = 0) -> Table:
    """The table with so many rows, and room for so many answers; an empty one where it has other rows."""
    table = table if len(table) == rows else np.zeros((rows, 0))
    more = max(answers, 1) - table.shape[1]
    return table if more <= 0 else np.pad(table, ((0, 0), (0, more)), constant_values=np.nan)


def plain_losses(losses: ModelWithLoss, model: PreTrainedModel, chunk: int | None) -> ModelWithLoss:
    """Compute losses of the model without adapters: as ever, unless its head has one."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers leaves it so
    with without_adapters(model):
        if model.get_output_embeddings() is head:  # type: ignore[no-untyped-call]  # likewise
            return losses
        return model_with_loss(model, chunk=chunk)
