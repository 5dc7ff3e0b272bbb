"""Time that processes of this machine's processor take to exchange weights and gradients, as training exchanges them.

Each size is timed between real processes: a small model goes forward and backward, whole and as the engine shards it,
at two depths. What sharding adds for a block is the time of its exchanges, with all that the host does for them: FSDP2
computes nothing meanwhile on a CPU. Copies and all-to-alls are timed likewise, and alone.
"""

import json
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from transformers import Qwen3Config

from headway.devices.ceilings import cached_ceiling
from headway.devices.measure import Measurement
from headway.devices.probe import cpu_name
from headway.models.init_weights import init_weights
from headway.models.load import load_model
from headway.models.parallel.mesh import build_mesh
from headway.models.parallel.shard import shard_model
from headway.plan.collectives import Kind, Links
from headway.plan.mesh import MeshShape
from headway.safe_path import current_folder_kept_out

WIDTHS = (32, 128, 512)
"""Hidden sizes of the models: their blocks weigh from some 50 kB to 13 MB in float32."""

_DEPTHS = (2, 6)  # blocks; what four more take is four times what one takes
_SLOTS = 16  # of a pack, which computes little
_WARM, _REPEATS = 2, 15
_KINDS: tuple[Kind, ...] = get_args(Kind)


def timed_exchanges(processes: int, *, refresh: bool = False, warn: Callable[[str], None] = warnings.warn) -> Links:
    """Time the exchanges of so many processes on this machine's processor, or take the times from the cache.

    Args:
        processes: that train together, of as many threads as this one; at least 2.
        refresh: measure even if the cache has them.
        warn: told what is wrong with the cache.
    """

    def measure() -> list[Measurement]:
        with tempfile.TemporaryDirectory(prefix="headway-exchanges-") as folder, current_folder_kept_out():
            arguments = (processes, torch.get_num_threads(), folder, WIDTHS)
            spawn(_exchange, args=arguments, nprocs=processes)  # type: ignore[no-untyped-call]  # torch leaves it so
            found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
        return [Measurement((number, size), size, (seconds,)) for number, size, seconds in found]

    found = cached_ceiling(torch.device("cpu"), f"exchanges-{processes}", measure, refresh=refresh, warn=warn)
    timed: dict[Kind, list[tuple[int, float]]] = {}
    for one in found.measurements:
        number, size = one.shape
        timed.setdefault(_KINDS[number], []).append((size, one.durations_s[0]))
    return Links.measured(timed, processes, cpu_name(), f"{found.measured_at:%Y-%m-%d}")


def _exchange(rank: int, processes: int, threads: int, folder: str, widths: Sequence[int]) -> None:
    """Time every kind and size in one of the processes; the first writes down what it found."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    found: list[tuple[int, int, float]] = []
    for width in widths:
        size, seconds = _of_width(width, processes)
        seconds["all-to-all"] = _median_s(_all_to_all(size, processes))
        found += [(_KINDS.index(kind), size, max(1e-9, took)) for kind, took in seconds.items()]
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _of_width(width: int, processes: int) -> tuple[int, dict[Kind, float]]:
    """Bytes of a block's weights, and the time of each exchange of theirs [s]."""
    size = 0

    def of_block(shape: MeshShape | None) -> tuple[float, float]:
        """Forward alone, and forward with backward, of one block [s]."""
        nonlocal size
        times = []
        for depth in _DEPTHS:
            model = _model(width, depth)
            size = sum(one.numel() * one.itemsize for one in model.get_decoder().layers[0].parameters())
            if shape is not None:
                shard_model(model, build_mesh(shape, "cpu"), compute_dtype=torch.float32)
            init_weights(model, torch.device("cpu"))
            times.append(_passes_s(model))
        return tuple((deep - shallow) / (_DEPTHS[1] - _DEPTHS[0]) for shallow, deep in zip(*times, strict=True))

    alone, sharded, copied = map(of_block, (None, MeshShape(shard=processes), MeshShape(replicate=processes)))
    gather = sharded[0] - alone[0]
    return size, {
        "all-gather": gather,
        "reduce-scatter": sharded[1] - alone[1] - 2 * gather,  # gathered for forward and again for backward
        "all-reduce": copied[1] - alone[1],
    }


def _model(width: int, depth: int) -> Any:
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
    )
    return load_model(config, dtype=torch.float32, device="meta", random_init=True).train()


def _passes_s(model: nn.Module) -> tuple[float, float]:
    """Median time of a forward, and of a forward with its backward [s]."""
    inputs = {
        "input_ids": torch.zeros(1, _SLOTS, dtype=torch.int64),
        "position_ids": torch.arange(_SLOTS)[None],
        "pack_cu_seqlens": torch.tensor([0, _SLOTS], dtype=torch.int32),
        "pack_max_seqlen": _SLOTS,
        "use_cache": False,
    }

    def forward() -> None:
        with torch.no_grad():
            model(**inputs)

    def both() -> None:
        model(**inputs).logits.sum().backward()
        model.zero_grad(set_to_none=True)

    return _median_s(forward), _median_s(both)


def _all_to_all(size: int, processes: int) -> Callable[[], object]:
    given = torch.ones(-(-size // 4 // processes) * processes)
    taken = torch.empty_like(given)
    return lambda: dist.all_to_all_single(taken, given)


def _median_s(run: Callable[[], object]) -> float:
    """Median over repetitions that all processes begin together [s]."""
    times = []
    for _ in range(_WARM + _REPEATS):
        dist.barrier()
        begin_s = perf_counter()
        run()
        times.append(perf_counter() - begin_s)
    return statistics.median(times[_WARM:])
