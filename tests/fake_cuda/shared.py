"""Memory of one of several processes, moment by moment: real tensors on a CPU, and other processes that are made up.

torch's fake process group answers every collective at once and moves no data, so FSDP2, its buffers and the exchanges
of a shared pack run as they do among many, and what a process holds is what it would hold; the numbers are garbage.
The precision is that of training on CUDA. The head's one product that has no kernel on a CPU keeps its memory.
"""

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from fake_cuda import moments, steps
from fake_cuda.watch import ROUND
from headway.config import TrainConfig
from headway.models.init_weights import to_memory
from headway.models.load import load_model
from headway.models.parallel.mesh import Mesh, build_mesh
from headway.models.precision import Precision
from headway.predict.memory import MemoryPlan
from headway.train.build import build_trained, give_weights

CPU = torch.device("cpu")
_FREED: Any = torch.UntypedStorage.resize_  # FSDP2 empties the storage of what it gathered, and fills it again


class Bytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, as long as their storages live and are not emptied.

    Attributes:
        alive: now.
        peaks: the most at a time, by moment.
        sites: bytes at the peak of each moment by shape and dtype, if wanted.
    """

    def __init__(self, *, detail: bool = False) -> None:
        super().__init__()
        self.alive = 0
        self.peaks: Counter[str] = Counter()
        self.moment = ""
        self.node = ""
        self.pinned: set[int] = set()
        self.at_peak: dict[str, dict[str, int]] = {}
        self._detail = detail
        self._what: dict[int, str] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it runs operations on its own part, which come here then
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and not isinstance(leaf, DTensor):
                self.hold(leaf)
        return out

    @contextmanager
    def at(self, moment: str) -> Iterator[None]:
        """Keep peaks under a name."""
        before, self.moment = self.moment, moment
        self.peaks[moment] = max(self.peaks[moment], self.alive)
        yield
        self.moment = before

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._what[key] = f"{tuple(tensor.shape)} {tensor.dtype}"
            weakref.finalize(storage, self._freed, key)
        self._resize(key, storage.nbytes())

    def resized(self, storage: Any, size: int) -> Any:
        """Stand in for `UntypedStorage.resize_`."""
        done = _FREED(storage, size)
        if storage._cdata in self._sizes:
            self._resize(storage._cdata, size)
        return done

    def _resize(self, key: int, size: int) -> None:
        rounded = -(-size // ROUND) * ROUND
        self.alive += rounded - self._sizes[key]
        self._sizes[key] = rounded
        if self.alive > self.peaks[self.moment]:
            self.peaks[self.moment] = self.alive
            if self._detail and self.alive > 1.001 * self.at_peak.get(self.moment, {"": 0})[""]:
                sums: Counter[str] = Counter()
                for one, held in self._sizes.items():
                    sums[self._what[one]] += held
                self.at_peak[self.moment] = {**sums, "": self.alive}

    def _freed(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)
        self._what.pop(key)


class Witness(MemTracker):
    """torch's own count of bytes, over as many forwards as there are."""

    def _pre_fw_hook(self, module: Any, inputs: Any) -> None:
        if isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None:
            self.reset_mod_stats()  # of the forward before, which it would take for one in backward
        super()._pre_fw_hook(module, inputs)

    @property
    def peak(self) -> int:
        """The most bytes on a CPU since training began."""
        return int(self.get_tracker_snapshot("peak")[CPU]["Total"])


def run_shared(
    kind: str, config: TrainConfig, processes: int, *, detail: bool = False, witness: Witness | None = None
) -> tuple[moments.Moments, MemoryPlan]:
    """Train two steps as the first of several processes, or as a lone one on a CPU; what was held, and the plan's.

    Args:
        kind: of model.
        config: of the run.
        processes: made up, but for the first.
        detail: as `Moments.at_peak` says.
        witness: torch's own count of bytes, which looks on while the model trains; it sees FSDP2 free weights in place
            of what counts here, whose own numbers are too high then.
    """
    precision = Precision("bfloat16-autocast", torch.float32, torch.bfloat16, "cpu")
    if processes == 1:
        precision = Precision("float32", torch.float32, torch.float32, "cpu")
    watch = Bytes(detail=detail)
    with ExitStack() as stack:
        stack.enter_context(steps._environment(ahead=True))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of views, which nobody writes to
        stack.enter_context(patch("headway.models.losses._add_product", _add_product))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", lambda *given: watch.resized(*given)))  # noqa: PLW0108 - bound as a method
        stack.enter_context(patch("headway.train.build.build_model", lambda *_: _on_meta(kind)))
        give = "headway.train.build.give_weights"
        stack.enter_context(patch(give, lambda *given: None if processes == 1 else give_weights(*given)))
        mesh = None if processes == 1 else stack.enter_context(_mesh(config, processes))
        stack.enter_context(watch)
        with watch.at("built"):
            trained = build_trained(config, mesh, None, precision, CPU)
            if mesh is None:
                to_memory(trained.model, CPU)
            for tensor in (*trained.model.parameters(), *trained.model.buffers()):
                watch.hold(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        gc.collect()  # building leaves a cycle behind that holds what was there before sharding
        watch.peaks["built"] = watch.alive  # rather than the peak: while weights are drawn there is one whole one
        group = None if mesh is None or mesh.sequence is None else mesh.sequence.get_group()
        batch = moments.batch_of(kind, trained.model, config)
        if witness is not None:
            witness.track_external(trained.model)
            stack.enter_context(witness)
        found = moments.train(config, trained, precision, batch, CPU, watch, group)
    return found, moments.predicted(kind, config, batch, devices=processes)


def _on_meta(kind: str) -> Any:
    return load_model(moments.small_config(kind), dtype=torch.float32, device="meta", random_init=True)


@contextmanager
def _mesh(config: TrainConfig, processes: int) -> Iterator[Mesh]:
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        with patch.object(dist, "all_to_all_single", _comes_back):
            yield build_mesh(config.parallel.mesh_shape(processes), "cpu")
    finally:
        dist.destroy_process_group()


def _comes_back(received: torch.Tensor, sent: torch.Tensor, *_: Any, **options: Any) -> Any:
    """The others send what they are sent, so that as many rows arrive as leave; torch's fake group sends nothing."""
    received.copy_(sent)
    return Mock() if options.get("async_op") else None  # there is nothing to wait for


def _add_product(total_VH: torch.Tensor, slopes_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
    """CUDA adds products of half precision up in float32, in place."""
    total_VH.mul_(0.5)
