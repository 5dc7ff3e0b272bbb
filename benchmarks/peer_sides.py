"""Sides of benchmarks/peers.py, each in a process of its own: transformers' Trainer, TRL, torchtitan's model, Headway.

All get the same weights (drawn with one seed), the same packs (token ids and segments), AdamW, clipping and dtype, and
are timed by one meter over one ledger. A side's first step gives its loss, by which they are compared.
"""

import importlib.machinery
import itertools
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from transformers import DataCollatorWithFlattening, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import engine_case
from engine_case import Case, Conditions, OneAhead, OutOfTimeError, Progress, Tell, dtype_name
from engine_setups import PEERS, without_data
from headway.count import CostModel, Workload
from headway.devices import peak_for
from headway.meter import Meter
from headway.models import load_model, rope_index
from headway.tracing import trace

LEARNING_RATE, CLIP, SEED = 1e-5, 1.0, 0
IGNORED = -100


@dataclass(frozen=True)
class Way:
    """How a side packs and recomputes.

    Attributes:
        packs: of a step; each has that part of the step's tokens.
        recompute: as the side names it; None for nothing again.
    """

    packs: int
    recompute: str | None


SIDES: dict[str, tuple[Way, ...]] = {
    "trainer": (Way(1, "checkpointing"), Way(4, "checkpointing"), Way(4, None)),
    "trl": (Way(1, "checkpointing"), Way(4, "checkpointing"), Way(4, None)),
    "torchtitan": (Way(1, "op"), Way(4, "op"), Way(4, None)),
    "headway": (Way(1, "full,-attention"), Way(4, "full,-attention"), Way(4, "fullest")),
}
"""Ways of each side, its default first: the recipe's for Headway, per-operator checkpoints for torchtitan."""


def measure(side: str, way: Way, steps: int, conditions: Conditions, deadline_s: float, tell: Tell) -> None:
    """Train a side for some steps after its warm-up; arguments and errors as for `engine_case.measure`."""
    is_cuda, is_small = torch.cuda.is_available(), conditions.is_small
    if side == "headway":
        kernels = "liger" if is_cuda and find_spec("liger_kernel") else "torch"
        layers = PEERS.layers(is_small=is_small)
        case = Case(side, PEERS.name, kernels, is_cuda, layers, steps)
        engine_case.measure_engine(case, conditions, deadline_s, tell)
        return
    device = torch.device("cuda" if is_cuda else "cpu")
    setup, config = (
        PEERS.with_packs_of(conditions.tokens_per_pack),
        PEERS.config(layers=None, is_small=conditions.is_small),
    )
    shapes = without_data(config)
    drawn = itertools.islice(setup.packs(config, rope_index(shapes), is_small=is_small),
                             conditions.num_packs * way.packs)  # fmt: skip
    packs = [[sample.input_ids_S for sample in samples] for samples, _ in drawn]
    torch.manual_seed(SEED)
    attention = "flash_attention_2" if is_cuda else "sdpa"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    model = load_model(config, dtype=dtype, device=device, attention=attention, random_init=True).train()
    run = Run(Case(side, PEERS.name, steps=steps), way, packs, conditions.most_warmup, device, deadline_s, tell)
    tell(
        {
            "layers": config.num_hidden_layers,
            "dtype": str(dtype).rpartition(".")[2],
            "tokens_per_pack": sum(map(len, packs[0])),
        }
    )
    {"trainer": train_trainer, "trl": train_trl, "torchtitan": train_titan}[side](model, trace(shapes), run)


class Run:
    """One side's run: its packs, its clock and its end.

    Args:
        case: what is measured.
        way: how.
        packs: token ids of each pack's segments.
        warmup: steps before those that are counted.
        device: where it trains.
        deadline_s: reading of `time.monotonic` at which it must have ended [s].
        tell: given what is known so far.
    """

    def __init__(
        self, case: Case, way: Way, packs: list[list[torch.Tensor]], warmup: int, device: torch.device,
        deadline_s: float, tell: Tell,
    ) -> None:  # fmt: skip
        self.way, self.packs, self.warmup, self.device = way, packs, warmup, device
        self.steps = warmup + case.steps
        self._progress, self._queue = Progress(case, deadline_s, tell), OneAhead(device)
        self._began_s, self._done, self._meter = time.perf_counter(), 0, None

    def starts(self, cost_model: CostModel) -> None:
        """Make the meter; the first step is about to begin."""
        peak = peak_for(self.device, dtype_name(self.device))
        self._meter = Meter(cost_model, peak=peak, log_every=1, on_window=self._progress.add)
        self._began_s = time.perf_counter()

    def ended(self, loss: torch.Tensor | float) -> bool:
        """Note the end of a step; True if there is time for another.

        Raises:
            OutOfTimeError: the deadline came before a step was counted.
        """
        meter, progress = self._meter, self._progress
        assert meter is not None
        lengths = [len(ids) for pack in self._packs_of(self._done) for ids in pack]
        if self._done == 0:
            progress.tell({"first_loss": float(loss)})
        self._done += 1
        if self._done <= self.warmup:
            self._queue.wait()
            now_s = time.perf_counter()
            progress.warmed_up(now_s - self._began_s)
            self._began_s = now_s
            if self._done == self.warmup:
                meter.start()
            return progress.left_s > 0
        # the head is billed where something is learnt, on all sides
        targets = sum(lengths) - len(lengths)
        work = Workload(lengths).with_counts(supervised=targets, logits=targets)
        progress.workloads.append(work)
        meter.count(work)
        meter.step()
        progress.losses.append(
            self._queue.step_ended(torch.as_tensor(0.0 if loss is None else loss, device=self.device))
        )
        return progress.left_s > 0 and self._done < self.steps

    def closes(self) -> None:
        """Tell everything."""
        assert self._meter is not None
        self._queue.wait()
        self._meter.close()
        if not self._progress.workloads:
            raise OutOfTimeError(f"after {self._done} warm-up steps there is no time for more")
        if self.device.type == "cuda":
            self._progress.tell({"allocated": torch.cuda.max_memory_allocated(self.device)})
        self._progress.tell_all(is_over=True)

    def _packs_of(self, step: int) -> list[list[torch.Tensor]]:
        first = step * self.way.packs % len(self.packs)
        return self.packs[first : first + self.way.packs]

    def rows(self) -> list[list[torch.Tensor]]:
        """Packs in the order in which all steps take them."""
        return [pack for step in range(self.steps) for pack in self._packs_of(step)]


class Stamp(TrainerCallback):
    """Tells the run that the Trainer has ended a step, and its first loss."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_log(self, _args: Any, _state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Note a step with its loss, which `logging_steps=1` gives."""
        if "loss" in logs and not self._run.ended(logs["loss"]):
            control.should_training_stop = True


def arguments(run: Run, folder: str) -> dict[str, Any]:
    """Arguments that both trainers get."""
    is_cuda = run.device.type == "cuda"
    return {
        "output_dir": folder, "max_steps": run.steps, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": run.way.packs, "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant",
        "max_grad_norm": CLIP, "optim": "adamw_torch_fused", "bf16": False, "use_cpu": not is_cuda,
        "use_liger_kernel": is_cuda and find_spec("liger_kernel") is not None,
        "gradient_checkpointing": run.way.recompute is not None,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if run.way.recompute else None,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "dataloader_num_workers": 0, "train_sampling_strategy": "sequential",
    }  # fmt: skip


def train_trainer(model: PreTrainedModel, cost_model: CostModel, run: Run) -> None:
    """Train by transformers' Trainer, packs laid end to end by its own collator."""
    flatten = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=run.device.type == "cuda")
    rows = [{"input_ids": pack[0], "pack": pack} for pack in run.rows()]

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(flatten([{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in batch[0]["pack"]]))

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(remove_unused_columns=False, **arguments(run, folder))
        trainer = Trainer(model, settings, train_dataset=rows, data_collator=collate, callbacks=[Stamp(run)])
        run.starts(cost_model)
        trainer.train()
    run.closes()


def train_trl(model: PreTrainedModel, cost_model: CostModel, run: Run) -> None:
    """Train by TRL's SFTTrainer on packs as its own packing makes them: token ids with lengths of segments."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from mixes import tokenizer

    rows = [
        {"input_ids": torch.cat(pack).tolist(), "labels": torch.cat(pack).tolist(), "seq_lengths": [*map(len, pack)]}
        for pack in run.rows()
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(packing=True, max_length=len(rows[0]["input_ids"]),
                             dataset_kwargs={"skip_prepare_dataset": True}, **arguments(run, folder))  # fmt: skip
        trainer = SFTTrainer(model, settings, train_dataset=Dataset.from_list(rows), callbacks=[Stamp(run)],
                             processing_class=tokenizer(model.config.vocab_size))  # fmt: skip
        run.starts(cost_model)
        trainer.train()
    run.closes()


def titan_of(model: PreTrainedModel, run: Run) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Torchtitan's own Qwen3 with the same weights, its checkpoints and compiled blocks; and its loss, a sum."""
    if find_spec("triton") is None:
        stand_in_for_triton()
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config.job_config import ActivationCheckpoint, Compile
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.attention import VarlenAttentionWrapper
    from torchtitan.models.llama4.infra.parallelize import apply_compile
    from torchtitan.models.qwen3.infra.parallelize import _op_sac_save_list
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
    from torchtitan.models.qwen3.model.model import Qwen3Model
    from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

    config, is_cuda = model.config, run.device.type == "cuda"
    sizes = Qwen3ModelArgs(
        dim=config.hidden_size, n_layers=config.num_hidden_layers, n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads, vocab_size=config.vocab_size, head_dim=config.head_dim,
        hidden_dim=config.intermediate_size, norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"], max_seq_len=max(sum(map(len, pack)) for pack in run.packs),
        attn_type="varlen", attn_mask_type="block_causal", enable_weight_tying=config.tie_word_embeddings,
    )  # fmt: skip
    state = Qwen3StateDictAdapter(sizes, None).from_hf(model.state_dict())
    with torch.device("meta"):
        titan: Any = Qwen3Model(sizes)
    titan.load_state_dict(state, assign=True)
    with torch.device(run.device):
        titan.rope_cache = titan._precompute_rope_cache()  # as its own init_weights does
    if run.way.recompute is not None:
        checkpoint = ActivationCheckpoint(mode="selective", selective_ac_option=run.way.recompute)
        apply_ac(titan, checkpoint, model_compile_enabled=is_cuda, op_sac_save_list=_op_sac_save_list)
    loss_of: Callable[..., torch.Tensor] = cross_entropy_loss
    if is_cuda:
        apply_compile(titan, Compile(enable=True), ep_enabled=False)
        loss_of = torch.compile(cross_entropy_loss)
    else:
        from flash_attn import attend_by_segment

        VarlenAttentionWrapper._compiled_varlen_attn = attend_by_segment  # its own is a kernel of GPUs
    return titan, loss_of


def train_titan(model: PreTrainedModel, cost_model: CostModel, run: Run) -> None:
    """Train torchtitan's own Qwen3 in a plain loop, as its trainer does: sums of losses over a step's targets."""
    titan, loss_of = titan_of(model, run)
    from torchtitan.models.attention import VarlenMetadata

    optimizer = torch.optim.AdamW(titan.parameters(), lr=LEARNING_RATE, fused=True)

    def loss_of_pack(pack: Sequence[torch.Tensor], num_targets: int) -> torch.Tensor:
        ids_T = torch.cat([*pack]).to(run.device)
        labels_T = torch.cat([torch.cat([ids[1:], ids.new_full((1,), IGNORED)]) for ids in pack]).to(run.device)
        lengths = torch.tensor([len(ids) for ids in pack])
        starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(run.device)
        longest = int(lengths.max())
        logits = titan(ids_T[None], VarlenMetadata(starts, starts, longest, longest))
        return loss_of(logits, labels_T[None]) / num_targets

    run.starts(cost_model)
    rows, goes_on = iter(run.rows()), True
    while goes_on:
        packs = list(itertools.islice(rows, run.way.packs))
        num_targets, losses = sum(len(ids) - 1 for pack in packs for ids in pack), []
        for pack in packs:
            loss = loss_of_pack(pack, num_targets)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(titan.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        goes_on = run.ended(torch.stack(losses).sum())
    run.closes()


def stand_in_for_triton() -> None:
    """Let torchtitan import its kernels of experts, which a dense model on a CPU does not run."""

    class Stand(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args, **_: args[0] if args else lambda function: function

    torch.compile(lambda x: x)  # PyTorch has now looked for the real one
    for name in ("triton", "triton.language"):
        sys.modules[name] = Stand(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]
