"""Memory of a small model's first two steps on the pretended device, moment by moment, and what the plan says of it.

The engine's own code trains: `build_trained`, `ModelWithLoss`, clipping, the optimizer, as `headway.train.loop` calls
them. Every living storage on the device is counted, in units of the allocator's 512 bytes.
"""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, MixtralConfig, Qwen2_5_VLConfig, Qwen3Config, Qwen3MoeConfig, Qwen3VLConfig

from fake_cuda import steps
from fake_cuda.backward import backward
from fake_cuda.device import pretend_cuda
from fake_cuda.watch import Watch
from headway.config import TrainConfig
from headway.count import CostModel
from headway.count.activations import SavedByPrecision
from headway.data.collate import Batch, Collator
from headway.models.experts import RouterLoad
from headway.models.load import rope_index
from headway.models.parallel.mesh import clipping_factor, gradient_norm
from headway.models.parallel.ranks import Ranks
from headway.models.parallel.shard import reduce_gradients
from headway.models.vision import vision_geometry
from headway.objectives.preferences.objective import AdaptersOff
from headway.objectives.preferences.reference import Scoring
from headway.optim import make_optimizer
from headway.optim.ema import WeightAverage
from headway.optim.optimizer import Optimizer, set_learning_rate, take_step
from headway.predict.memory import MemoryPlan
from headway.predict.predictor import Predictor
from headway.predict.recipe import frozen_forward
from headway.predict.saved import saved_of_partly_trained
from headway.tracing import trace
from headway.tracing.activations import saved_of_config
from headway.tracing.build import model_on_shapes
from headway.tracing.unwrap import local

MOMENTS = ("built", "first forward", "first backward", "first update", "forward", "backward", "update")
"""When memory is looked at; the last three are of the second step, in which moments are there from the start."""

_TEXT: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16_000, "max_position_embeddings": 8192,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 6, "hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "out_hidden_size": 512,
    "patch_size": 14,
}  # fmt: skip
LITTLE_TEXT: dict[str, Any] = {
    **_TEXT, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 8000,
}  # fmt: skip
_LITTLE_VISION: dict[str, Any] = {
    **_VISION, "hidden_size": 192, "intermediate_size": 512, "num_heads": 3, "out_hidden_size": 256
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "hidden_size": 640, "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 32_000,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_TOKENS: dict[str, Any] = {
    "image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6
}  # fmt: skip
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]}


OTHERS: dict[str, Any] = {
    "llama": LlamaConfig(**_LLAMA | {"num_hidden_layers": 8}, intermediate_size=1792, num_attention_heads=10),
    "mixtral": MixtralConfig(**_LLAMA, intermediate_size=768, num_local_experts=4, num_attention_heads=10),
}


def small_config(kind: str) -> Any:
    """Configuration of a small model whose weights, activations and logits all take room.

    Args:
        kind: text, tied (head and embedding share a weight), experts, image or video; after "little ", one that a CPU
            computes for real in seconds. llama and mixtral have sizes of their own: no rule of the plan was read off
            them. Or a kind in `OTHERS`.
    """
    if kind in OTHERS:
        return deepcopy(OTHERS[kind])  # which switching attention changes
    text, vision, kind = (_TEXT, _VISION, kind) if kind == _kind(kind) else (LITTLE_TEXT, _LITTLE_VISION, _kind(kind))
    if kind in ("text", "tied"):
        return Qwen3Config(**text, tie_word_embeddings=kind == "tied")
    if kind == "experts":
        sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": text["hidden_size"]}
        return Qwen3MoeConfig(**text, **sizes, tie_word_embeddings=False)
    if kind == "image":
        text = {name: value for name, value in text.items() if name != "head_dim"} | {"rope_parameters": _MROPE}
        vision = {**vision, "window_size": 112, "fullatt_block_indexes": [2, 5]}
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_TOKENS, tie_word_embeddings=False)
    vision = {**vision, "deepstack_visual_indexes": [1, 3], "num_position_embeddings": 576}
    text = {**text, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **_TOKENS, tie_word_embeddings=False)


def _kind(kind: str) -> str:
    return kind.removeprefix("little ")


BATCHES: dict[str, Callable[[Any], Batch]] = {}
"""What packs the models of plug-ins take, by kind; beside it stands the configuration in `OTHERS`."""
PACKS: dict[str, list[tuple[int, list[Any]]]] = {
    "text": [(700, []), (1500, []), (96, []), (1800, [])],
    "image": [(600, [[1, 32, 32], [1, 16, 24]]), (900, [[1, 40, 48]]), (548, [])],
    "video": [(1024, [[8, 16, 16]]), (1024, [[6, 20, 20]])],
    "llama": [(2600, []), (300, []), (1100, [])],
    "little text": [(350, []), (500, []), (174, [])],
    "little image": [(300, [[1, 16, 16]]), (400, [[1, 20, 24], [1, 16, 16]]), (324, [])],
}
"""Samples of a pack, each with its tokens and the grids of its pictures."""


@dataclass(frozen=True)
class Moments:
    """What a run held.

    Attributes:
        peaks: the most bytes that were alive, by moment.
        held: weights, gradients and optimizer state after the first update [bytes].
        at_peak: with `detail`, by moment, the bytes that were alive at its peak, by where they were made.
    """

    peaks: dict[str, int]
    held: dict[str, int]
    at_peak: dict[str, dict[str, int]]

    @property
    def peak(self) -> int:
        """The most of all moments."""
        return max(self.peaks.values())


def settings(*overrides: str) -> TrainConfig:
    """A run's settings without what is compiled."""
    base = (
        "model.random_init=true",
        "speed.recompute=none",
        "data.tokens_per_pack=4096",
        "optim.steps=2",
        "plan.mix=null",
    )
    return steps.recipe("qwen2.5-7b-text-81920", *base, *overrides)


@cache
def traced(kind: str) -> tuple[CostModel, SavedByPrecision]:
    """Ledger and saved activations of a small model."""
    config = small_config(kind)
    return trace(model_on_shapes(config, torch.float32)), SavedByPrecision(lambda p: saved_of_config(config, p))


def predicted(kind: str, config: TrainConfig, batch: Batch, *, devices: int = 1) -> MemoryPlan:
    """What the plan says of a run whose packs are all like one batch."""
    cost_model, saved = traced(kind)
    if config.model.freeze or config.model.lora:
        saved = SavedByPrecision(lambda p: saved_of_partly_trained(small_config(kind), config.model, p))
    cost_model = cost_model.freeze(config.model.freeze)
    if config.model.lora is not None:
        cost_model = cost_model.lora(config.model.lora.rank, config.model.lora.targets)
    return Predictor(cost_model, saved).memory(config, devices, (batch.slots, batch.workload.patches))


def batch_of(kind: str, model: Any, config: TrainConfig) -> Batch:
    """A pack of a kind, collated as training does."""
    if kind in BATCHES:
        return BATCHES[kind](model)
    collator = Collator(
        geometry=vision_geometry(model),
        pixel_scale=steps._scale(model.config),
        bucket_tokens=config.data.bucket_tokens,
        bucket_patches=config.data.bucket_patches,
    )
    rule, is_video = rope_index(model), _kind(kind) == "video"
    samples = PACKS.get(kind) or PACKS["little text" if kind.startswith("little") else "text"]
    packed = [steps.encoded(model.config, rule, *sample, is_video=is_video) for sample in samples]
    # a plan allows for a label on every token, with which the head holds most
    return collator([replace(sample, labels_S=sample.input_ids_S) for sample in packed])


def run_moments(kind: str, config: TrainConfig, *, detail: bool = False) -> tuple[Moments, MemoryPlan]:
    """Train two steps on the pretended device; what was held, and what the plan says."""
    from headway.models.precision import choose_precision

    with (
        pretend_cuda() as device,
        steps._environment(ahead=True),
        patch("headway.train.build.initialise_adapters", lambda *_: None),  # there are no numbers to draw
        patch("headway.optim.parts.code_table", lambda **_: torch.empty(256, device=device)),
        patch("headway.models.quantised._pairs", lambda device: torch.empty(256, 2, device=device)),
        patch.object(Optimizer, "_noise_of", lambda *_, **__: None),  # nor a generator of the device
        patch("headway.optim.optimizer.why_not", lambda *_: None),  # the kernel runs, which makes nothing
        patch("headway.optim.adamw.update_", lambda *_: None),
    ):
        precision = choose_precision(config.run, device)
        trained = steps._trained(config, small_config(kind), precision, device)
        batch = batch_of(kind, trained.model, config)
        plan = predicted(kind, config, batch)
        with Watch() as watch:
            watch.sites = {} if detail else None
            with watch.at("built"):
                steps._place(trained.model, device)
            return train(config, trained, precision, batch, device, watch), plan


def train(
    config: TrainConfig,
    trained: Any,
    precision: Any,
    batch: Batch,
    device: torch.device,
    watch: Any,
    group: Any = None,
) -> Moments:
    """Take two steps, as `headway.train.loop` does.

    Args:
        config: of the run.
        trained: its model, in place.
        precision: of its forward.
        batch: every pack of every step.
        device: where it computes.
        watch: counts bytes; entered.
        group: the processes that share each pack.
    """
    with watch.at("built"):
        model = trained.model.train()
        optimizer = make_optimizer(model, config.optim, trained.cost_model, Ranks(0, 1))
        average = None if config.optim.ema is None else WeightAverage(model, config.optim.ema)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # preferences weigh losses once they are known; where adapters are off, their reference is computed for each pack
    weigh = None if config.objective_section is None else torch.ones_like
    second = frozen_forward(config, trained.cost_model)
    scoring = Scoring(trained.model_with_loss, device, precision.autocast, group)
    off = (
        AdaptersOff(scoring, trained.plain_cost_model, trained.model_with_loss) if second and second.each_step else None
    )
    load = RouterLoad(model, device)
    batch = batch.dealt(group)
    watch.pinned = {t.untyped_storage()._cdata for t in steps._tensors(batch)}
    held: Counter[str] = Counter()
    local_part = batch.local_slots(group)
    for step, first in enumerate(("first ", ""), start=1):
        set_learning_rate(optimizer, 1e-5)
        sources = torch.zeros(1, device=device)
        for number in range(config.optim.accumulation):
            reduce_gradients(model, now=number + 1 == config.optim.accumulation or config.parallel.reduce == "pack")
            with watch.at(f"{first}forward"), precision.autocast():
                moved = batch.to(device)
                if off is not None:
                    off.of(moved)
                pack = trained.model_with_loss(
                    moved.model_inputs(), moved.labels_1T[0, local_part], weigh=weigh, labelled_K=moved.labelled_K
                )
            with watch.at(f"{first}backward"):
                if device.type == "cuda":
                    backward(pack.total, watch)
                else:
                    torch.autograd.backward(pack.total)
                sources.index_add_(0, moved.source_of_slots()[local_part], pack.loss_T)
        with watch.at(f"{first}update"):
            norm = gradient_norm(parameters)
            factor = None if config.optim.clip is None else clipping_factor(norm, config.optim.clip)
            numbers = torch.cat([sources, norm.to(sources)[None], load.take(lambda _: None)])
            take_step(optimizer, numbers, factor=factor, skips=config.optim.on_nonfinite == "skip")
            if average is not None:
                average.update(step)
            held = held_by(model, optimizer)
            optimizer.zero_grad(set_to_none=True)
    return Moments({moment: watch.peaks[moment] for moment in MOMENTS}, dict(held), watch.at_peak)


def held_by(model: Any, optimizer: Any) -> Counter[str]:
    """Bytes of weights, gradients and moments."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return Counter(
        weights=sum(local(p).nbytes for p in model.parameters()),
        gradients=sum(local(p.grad).nbytes for p in model.parameters() if p.grad is not None),
        optimizer=sum(local(value).nbytes for value in states if isinstance(value, torch.Tensor) and value.dim()),
    )
