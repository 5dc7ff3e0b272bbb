"""Bytes that one of several processes exchanges for a pack: real tensors on a CPU, other processes that are made up.

The engine's own code takes a forward and a backward among processes of torch's fake process group, as in
`fake_cuda.shared`; every collective that PyTorch dispatches meanwhile is written down with the sizes of its tensors.
Rows for experts stay where they are: as many come back from each process as were sent to it. Slots choose experts in
turn, so that each choice of them is as frequent.
"""

import warnings
from collections import Counter
from contextlib import ExitStack
from functools import partial
from itertools import combinations
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fake_cuda import moments, shared, steps
from headway.config import TrainConfig
from headway.count.activations import SavedByPrecision
from headway.models.parallel import exchange as split_exchange
from headway.models.parallel import experts as dispatch
from headway.models.parallel.experts import run_spread_experts
from headway.models.parallel.shard import reduce_gradients
from headway.models.precision import Precision, use_float8
from headway.predict.communication import Exchanges
from headway.predict.exchanges import exchanges_of
from headway.predict.recipe import sharing_of, state_of
from headway.predict.saved import learning_model
from headway.tracing.activations import saved_of_config
from headway.train.build import build_trained

KINDS = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
}


class Collectives(TorchDispatchMode):
    """Writes down collectives: the bytes of the whole array of each, by kind.

    Attributes:
        num_bytes: by kind.
        calls: how many of each kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def sent(self, rows: torch.Tensor) -> torch.Tensor:
        """Write down what goes into an all-to-all inside an operation of the engine's own, which hides it."""
        self.num_bytes["all-to-all"] += rows.nbytes
        self.calls["all-to-all"] += 1
        return rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            kind = KINDS.get(name.partition("::")[2])
            if kind is not None:
                # an all-gather's output, and a reduce-scatter's input, is the whole array: the larger of the two
                sizes = [leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                self.num_bytes[kind] += max(sizes)
                self.calls[kind] += 1
        return func(*args, **(kwargs or {}))


def run_exchanged(kind: str, config: TrainConfig, processes: int, packs: int = 1) -> tuple[Collectives, Exchanges]:
    """Compute packs of a step as one of several processes; what it exchanged, and what the plan says of a pack."""
    name = "float8" if config.run.dtype == "float8" else "bfloat16-autocast"
    precision = Precision(name, torch.float32, torch.bfloat16, "cpu")
    with ExitStack() as stack:
        stack.enter_context(patch("headway.train.build.use_float8", partial(use_float8, emulate=True)))
        stack.enter_context(steps._environment(ahead=True))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        stack.enter_context(patch("headway.models.losses._add_product", shared._add_product))
        stack.enter_context(patch("headway.train.build.build_model", lambda *_: shared._on_meta(kind)))
        seen, exchange = Collectives(), split_exchange._all_to_all
        stack.enter_context(
            patch.object(split_exchange, "_all_to_all", lambda x, *given: exchange(seen.sent(x), *given))
        )
        stack.enter_context(patch.object(dispatch, "all_to_all", lambda out, rows, *_: _keep(out, seen.sent(rows))))
        stack.enter_context(patch.object(dispatch.dist, "all_to_all_single", _keep))
        mesh = stack.enter_context(shared._mesh(config, processes))
        stack.enter_context(patch("headway.models.parallel.experts.run_spread_experts", _in_turn))
        trained = build_trained(config, mesh, None, precision, shared.CPU)
        group = None if mesh.sequence is None else mesh.sequence.get_group()
        batch = moments.batch_of(kind, trained.model, config).noised(0, 1).dealt(group)
        model = trained.model.train()
        labels_L = batch.labels_1T[0, batch.local_slots(group)]
        stack.enter_context(seen)
        for number in range(packs):
            reduce_gradients(model, now=number + 1 == packs or config.parallel.reduce == "pack")
            with precision.autocast():
                loss = trained.model_with_loss(batch.model_inputs(), labels_L, per=1, labelled_K=batch.labelled_K)
            torch.autograd.backward(loss.total)
    shape = config.parallel.mesh_shape(processes)
    cost_model, _ = moments.traced(kind)
    saved = SavedByPrecision(lambda p: saved_of_config(moments.small_config(kind), p))["bfloat16"]
    state = state_of(config, "bfloat16", config.speed.recompute)
    learning = learning_model(config.model, cost_model)
    return seen, exchanges_of(learning, saved, batch.workload, state, sharing_of(config, shape), shape)


def _keep(out: torch.Tensor, given: torch.Tensor, *_: Any, **__: Any) -> Any:
    out.copy_(given)
    return SimpleNamespace(wait=lambda: None)


def _in_turn(module: Any, hidden_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    slots, per_slot = chosen_TK.shape
    choices = torch.tensor([*combinations(range(module.down_proj.shape[0]), per_slot)])
    return run_spread_experts(module, hidden_TD, choices[torch.arange(slots) % len(choices)], weights_TK)
