"""torchtitan: exact MFU, HFU and tokens/s in the metrics of its own MetricsProcessor, beside its own mfu(%)."""

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torchtitan.components.metrics import build_metrics_processor
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModelArgs
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_module, device_type
from torchtitan.train import Trainer

from headway.count import CostModel, Workload
from headway.devices import Peak
from headway.errors import TraceError, WorkloadError
from headway.integrations.loops import Observer, caller_of, observing
from headway.meter import Meter, Window
from headway.meter.environment import peak_of
from headway.meter.goodput_report import Bucket
from headway.tracing import trace

_ROOM = 1 << 15  # positions that the traced twin has, so that segments may be longer than any window [tokens]
_IN_PERCENT = {"mfu": "mfu(%)", "hfu": "hfu(%)", "padding_share": "padding(%)"}
_AS_IT_IS = ("tokens_per_s", "tokens_per_s_per_device")


def with_headway(
    spec: TrainSpec,
    *,
    cost_model: CostModel | None = None,
    peak: Peak | None = None,
    workload_of: Callable[[dict[str, Any], torch.Tensor], Workload] | None = None,
    on_window: Callable[[Window], None] | None = None,
    **meter_options: Any,
) -> TrainSpec:
    """Let a torchtitan TrainSpec measure itself.

    What torchtitan logs, writes to TensorBoard and sends to W&B gains `headway/mfu(%)` and the others. The batches of
    the training dataloader are counted on the CPU, before anything moves or splits them; validation and checkpoints
    are left out of the steps' time. Ranks that share a batch (tensor, context, pipeline parallel) bill it once. What
    cannot be counted is warned of once, and training goes on without numbers.

    Args:
        spec: such as `get_train_spec("llama3")`.
        cost_model: of the model; its own code is traced when None.
        peak: what one device can do; looked up when None.
        workload_of: reads a batch (inputs by name, labels) of a dataloader of another kind. When None, rows are
            segments, cut after each end-of-sequence token where the model's attention is "block_causal".
        on_window: called with each window that is logged, and at the end with the run, on every rank.
        meter_options: what else `Meter` takes, such as `goodput` or `log_to`.

    Returns:
        The spec with its builders wrapped.

    >>> register_train_spec("llama3_measured", with_headway(get_train_spec("llama3")))   # doctest: +SKIP
    """
    hook = _Hook(spec, cost_model, peak, workload_of, on_window, meter_options)
    return replace(
        spec,
        build_dataloader_fn=hook.build_dataloader,
        build_metrics_processor_fn=hook.build_metrics_processor,
        build_optimizers_fn=hook.build_optimizers,
        build_validator_fn=hook.build_validator if spec.build_validator_fn is not None else None,
    )


class _CountedDataLoader:
    """A dataloader whose batches are counted as the trainer draws them; its state is that of the one inside."""

    def __init__(self, loader: Any, hook: "_Hook") -> None:
        self._loader = loader
        self._hook = hook

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        self._hook.begin()
        for inputs, labels in self._hook.timed(self._loader):
            self._hook.count(inputs, labels)
            yield inputs, labels

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loader.load_state_dict(state_dict)


@dataclass
class _Hook(Observer):
    """Wraps the builders of a TrainSpec, in the order in which a Trainer calls them, to count and time steps."""

    name = "with_headway"
    takes = "cost_model=headway.load_cost_model(NAME), workload_of=..."
    spec: TrainSpec
    cost_model: CostModel | None
    peak: Peak | None
    workload_of: Callable[[dict[str, Any], torch.Tensor], Workload] | None
    on_window: Callable[[Window], None] | None
    meter_options: dict[str, Any]
    meter: Meter = field(init=False)
    trainer: Trainer = field(init=False)
    _end_token: int | None = None
    _ends_segments: bool = False
    _billed: bool = True
    _knows_recompute: bool = True

    def build_dataloader(self, *args: Any, **kwargs: Any) -> _CountedDataLoader:
        self._end_token = getattr(kwargs.get("tokenizer"), "eos_id", None)
        return _CountedDataLoader(self.spec.build_dataloader_fn(*args, **kwargs), self)

    def build_metrics_processor(
        self,
        job_config: JobConfig,
        parallel_dims: ParallelDims,
        model_args: BaseModelArgs | None = None,
        tag: str | None = None,
    ) -> Any:
        build = self.spec.build_metrics_processor_fn or build_metrics_processor
        processor = build(job_config, parallel_dims, model_args, **({"tag": tag} if tag else {}))
        self.failure = None
        self._join(processor, job_config, parallel_dims, model_args)
        return processor

    @observing
    def _join(
        self, processor: Any, job_config: JobConfig, parallel_dims: ParallelDims, model_args: BaseModelArgs | None
    ) -> None:
        """Make the meter, and let the processor log its numbers."""
        self.trainer = caller_of(Trainer, "with_headway's builders")
        assert model_args is not None  # a Trainer hands its own over
        self._ends_segments = _ends_segments(model_args)
        meshes = [parallel_dims.get_optional_mesh(name) for name in ("tp", "cp", "pp")]
        self._billed = all(mesh is None or mesh.get_local_rank() == 0 for mesh in meshes)
        model = _plain_model(self.spec, model_args)
        cost_model = self.cost_model or _trace(model, model_args)
        recompute = _recompute(job_config, cost_model)
        self._knows_recompute = recompute is not None
        if recompute is None:
            logger.warning("headway: no HFU is logged, for what this activation checkpointing recomputes is not known.")
        device = torch.device(device_type, device_module.current_device())
        self.meter = Meter(
            cost_model,
            peak=self.peak or peak_of(model.to(_dtype(job_config, parallel_dims)), device),
            log_every=sys.maxsize,  # windows end where torchtitan logs
            recompute=recompute or "none",
            on_window=self.on_window,
            **self.meter_options,
        )
        processor.log = partial(self._log, processor.log)
        processor.close = partial(self._close, processor.close)

    def _release(self) -> None:
        if hasattr(self, "meter"):
            self.meter.abandon()

    def timed(self, loader: Any) -> Any:
        """The loader, the waits for it noted."""
        return loader if self.failure is not None else self.meter.batches(loader)

    def _away(self, bucket: Bucket = "evaluation") -> Any:
        return self.meter.away(bucket) if self.failure is None else nullcontext()

    @observing
    def begin(self) -> None:
        """Leave the checkpoints of the training that begins out of its steps' time."""
        checkpointer = self.trainer.checkpointer
        save = checkpointer.save

        @functools.wraps(save)
        def save_away(curr_step: int, last_step: bool = False) -> None:
            is_due = checkpointer._should_save(curr_step, last_step)  # called after each step, it mostly does nothing
            with self._away("checkpoint") if is_due else nullcontext():
                save(curr_step, last_step)

        checkpointer.save = save_away

    def build_optimizers(self, *args: Any, **kwargs: Any) -> Any:
        optimizers = self.spec.build_optimizers_fn(*args, **kwargs)
        optimizers.register_step_post_hook(self._on_step)
        return optimizers

    def build_validator(self, *args: Any, **kwargs: Any) -> Any:
        assert self.spec.build_validator_fn is not None
        validator = self.spec.build_validator_fn(*args, **kwargs)
        validate = validator.validate

        def measured_validate(*args: Any, **kwargs: Any) -> Any:
            with self._away():
                return validate(*args, **kwargs)

        validator.validate = measured_validate
        return validator

    @observing
    def count(self, inputs: dict[str, Any], labels: torch.Tensor) -> None:
        """Count one micro-batch as the dataloader made it."""
        workload = (self.workload_of or self._rows)(inputs, labels)
        if workload.slots != labels.numel():
            raise WorkloadError(
                f"the workload of a batch bills {workload.slots} slots, but its labels are {tuple(labels.shape)}: "
                f"{labels.numel()} slots. Give with_headway a workload_of that reads what this dataloader makes."
            )
        self.meter.count(workload if self._billed else Workload())

    def _rows(self, inputs: dict[str, Any], labels: torch.Tensor) -> Workload:
        """Read the segments of token rows: whole rows, or spans that end in an end-of-sequence token."""
        if set(inputs) != {"input"}:
            raise WorkloadError(
                f"the dataloader makes {', '.join(inputs)}, of which only `input` is read: what else the model "
                "computes is not known. Give with_headway a workload_of for these batches."
            )
        if not self._ends_segments:
            rows, slots = labels.shape
            return Workload([slots] * rows)
        ends = inputs["input"].numpy() == self._end_token
        ends[:, -1] = True  # no segment crosses rows
        return Workload(np.diff(np.flatnonzero(ends), prepend=-1))

    @observing
    def _on_step(self, *_: Any) -> None:
        self.meter.step()

    def _log(
        self,
        log: Callable[..., None],
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log as torchtitan does, the window since the last log added."""
        numbers = self._numbers() or {}
        log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics={**(extra_metrics or {}), **numbers})
        if numbers:
            shown = (f"{name.removeprefix('headway/')}: {value:,.2f}" for name, value in numbers.items())
            logger.info(f"headway at step {step}: {'  '.join(shown)}")

    @observing
    def _numbers(self) -> dict[str, float]:
        window = self.meter.log()
        return self._metrics(window) if window is not None else {}

    def _metrics(self, window: Window) -> dict[str, float]:
        record = window.to_dict()
        names = [name for name in _IN_PERCENT if name != "hfu" or self._knows_recompute]
        shares = {f"headway/{_IN_PERCENT[name]}": 100 * record[name] for name in names if record[name] is not None}
        return shares | {f"headway/{name}": record[name] for name in _AS_IT_IS}

    def _close(self, close: Callable[[], None]) -> None:
        self._sum_up()
        close()

    @observing
    def _sum_up(self) -> None:
        """Sum the run up, unless it ends by an error, after which other ranks may not answer."""
        if sys.exc_info()[0] is None and self.meter.num_steps:
            run = self.meter.close()
            if self.on_window is not None:
                self.on_window(run)


def _ends_segments(model_args: BaseModelArgs) -> bool:
    of_masks = getattr(model_args, "attn_type", "sdpa") in ("flex", "varlen")
    return of_masks and getattr(model_args, "attn_mask_type", "causal") == "block_causal"


def _plain_model(spec: TrainSpec, model_args: BaseModelArgs) -> nn.Module:
    """Build the model on shapes, whole and unwrapped, with room for segments of any length."""
    own = copy.copy(model_args)
    if hasattr(own, "max_seq_len"):
        own.max_seq_len = max(own.max_seq_len, _ROOM)
    with torch.device("meta"):
        model: nn.Module = spec.model_cls(own)
    return model


def _trace(model: Any, model_args: BaseModelArgs) -> CostModel:
    """Trace torchtitan's own model on segments of tokens, with the masks that it makes for them."""
    masked = getattr(model_args, "attn_type", "sdpa") in ("flex", "varlen")

    def arguments(workload: Workload) -> dict[str, Any]:
        tokens = torch.ones(1, workload.tokens, dtype=torch.long)
        if not masked:
            return {"tokens": tokens}
        without_ends = SimpleNamespace(eos_id=0)
        with torch.compiler.set_stance("force_eager"):
            masks = model.get_attention_masks(input_batch=tokens, tokenizer=without_ends, extra_inputs={})
        return {"tokens": tokens, "attention_masks": masks}

    try:
        return trace(model, inputs=arguments)
    except TraceError as error:
        raise TraceError(
            f"{type(model).__name__} of torchtitan is not traced: {error} Give with_headway its cost_model, such as "
            "headway.load_cost_model(NAME) of the same model."
        ) from error


def _recompute(job_config: JobConfig, cost_model: CostModel) -> str | None:
    """Say what activation checkpointing runs again, as `CostModel.count` takes it; None where that is not known.

    Source: torchtitan 0.2.2, distributed/activation_checkpoint.py.
    """
    chosen = job_config.activation_checkpoint
    option = chosen.selective_ac_option
    if chosen.mode == "none" or (chosen.mode == "full" and not chosen.early_stop):
        return {"none": "none", "full": "reentrant"}[chosen.mode]  # torchtitan runs each block to its end
    if chosen.mode == "full":
        return "full"
    if chosen.mode != "selective" or not option.isdigit():
        return None  # an operator-wise policy or the compiler decides what is saved
    every = max(int(option), 1)
    if chosen.early_stop:
        return f"every:{every}"
    blocks = list(dict.fromkeys(row.block for row in cost_model.rows if row.block))
    return ",".join(f"{block}.*" for block in blocks[every - 1 :: every]) or "none"


def _dtype(job_config: JobConfig, parallel_dims: ParallelDims) -> torch.dtype:
    """Find the dtype of the products: mixed precision takes effect under FSDP, DDP or on one device alone."""
    split = parallel_dims.tp_enabled or parallel_dims.pp_enabled
    names = job_config.training
    name = names.dtype if split and not parallel_dims.fsdp_enabled else names.mixed_precision_param
    dtype: torch.dtype = TORCH_DTYPE_MAP[name]
    return dtype
