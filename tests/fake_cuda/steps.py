"""A recipe's model, its fullest pack, and its training step on the pretended device.

Everything comes from a recipe as training takes it: `build_trained` with its settings, the packs that its plan makes of
its lengths, `ModelWithLoss`, clipping, the optimizer. Only what needs a Hub, a Triton compiler or other machines is
changed: models are built from shipped configurations without weights, blocks are not compiled, kernels are torch's.
"""

import copy
import inspect
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import AutoConfig, masking_utils

from fake_cuda.backward import backward
from fake_cuda.device import pretend_cuda
from fake_cuda.watch import Wait, Watch
from headway.config import TrainConfig, load_config
from headway.count import CostModel
from headway.count.models import shipped_name
from headway.data import EncodedSample, Origin
from headway.data.collate import Batch, Collator
from headway.data.media.tensors import MediaTensors
from headway.models.experts import RouterLoad
from headway.models.load import load_model, rope_index
from headway.models.parallel.mesh import clipping_factor, gradient_norm
from headway.models.precision import choose_precision
from headway.models.vision import vision_geometry
from headway.optim import make_optimizer
from headway.optim.optimizer import set_learning_rate, take_step
from headway.packing import Budget, Items, Order, Plan
from headway.packing.lengths import MIXES
from headway.synthetic.digits import write_reader
from headway.tracing.build import preset_config
from headway.train.build import Trained, build_trained

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
# What a fake device cannot run, and one process has no use for.
_CHANGES = (
    "speed.compile=false", "speed.kernels=torch", "parallel.shard=auto", "parallel.sequence=1",
    "parallel.reduce_dtype=float32",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What one training step did on the pretended device.

    Attributes:
        waits: of the host for the device, of each pack's forward and backward, and of the update.
        peaks: the most bytes that were alive, by moment: forward, backward, update.
        held: bytes of weights, gradients and moments.
        slots: of the pack [tokens].
        patches: of the pack [patches].
        ops: how often each operation ran on the device.
        narrow: shapes of factors of products whose rows no fast kernel takes.
        at_peak: with `detail`, the bytes that were alive at each moment's peak, by where they were made.
    """

    waits: tuple[Wait, ...]
    peaks: dict[str, int]
    held: dict[str, int]
    slots: int
    patches: int
    ops: Counter[str]
    narrow: set[tuple[int, ...]]
    at_peak: dict[str, dict[str, int]]


def recipe(name: str, *overrides: str) -> TrainConfig:
    """A recipe's settings, for one process."""
    return load_config(ROOT / "recipes" / f"{name}.yaml", (*_CHANGES, *overrides))


def run_step(config: TrainConfig, *, layers: int | None = None, ahead: bool = True, detail: bool = False) -> Found:
    """Build a run's model on the pretended device and train one step of it on the fullest pack of its plan.

    Args:
        config: of the run.
        layers: language layers and vision blocks; all of them if not given.
        ahead: whether models are told what the collator knows of a pack; else they ask the device.
        detail: whether to note what was alive at each peak, which takes long.
    """
    model_config = model_of(config)
    if layers is not None:
        model_config = shallow(model_config, layers)
    with pretend_cuda() as device, _environment(ahead):
        precision = choose_precision(config.run, device)
        trained = _trained(config, model_config, precision, device)
        batch = pack_of(config, trained)
        if not ahead:
            batch = replace(batch, placeholders=None)
        with Watch() as watch:
            watch.sites = {} if detail else None
            _place(trained.model, device)
            return _step(config, trained, precision, batch, device, watch)


def model_of(config: TrainConfig) -> Any:
    """The configuration of a recipe's model, without a Hub."""
    shipped = shipped_name(config.model.path)
    if shipped is not None:
        return preset_config(shipped)
    with TemporaryDirectory() as folder:
        return AutoConfig.from_pretrained(write_reader(Path(folder) / "model"))


@contextmanager
def _environment(ahead: bool) -> Iterator[None]:
    """Undo what a run sets for its process; without answers ahead, let transformers look for itself."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict("os.environ"))
        if not ahead:
            stack.enter_context(patch.dict("os.environ", {"TRANSFORMERS_DISABLE_TORCH_CHECK": "0"}))
            find = masking_utils.find_packed_sequence_indices
            stack.enter_context(patch.object(masking_utils, "find_packed_sequence_indices", inspect.unwrap(find)))
            stack.enter_context(patch("headway.models.load.answer_ahead", lambda _: None))
        yield


def shallow(config: Any, layers: int) -> Any:
    """Cut a configuration to so many language layers and vision blocks; as many of them are special as before."""
    config = copy.deepcopy(config)
    config.get_text_config().num_hidden_layers = layers
    vision = getattr(config, "vision_config", None)
    if vision is not None:
        vision.depth = layers
        for name, value in vars(vision).items():
            if name.endswith("indexes") and isinstance(value, list):
                setattr(vision, name, list(range(min(len(value), layers - 1))))
    return config


def _trained(config: TrainConfig, model_config: Any, precision: Any, device: torch.device) -> Trained:
    def build_model(*_: Any) -> nn.Module:
        return load_model(model_config, dtype=precision.params, device="meta", random_init=True)

    with (
        patch("headway.train.build.build_model", build_model),
        patch("headway.train.build.give_weights", lambda *_: None),  # there are no numbers to give
    ):
        return build_trained(config, None, None, precision, device)


def _place(model: nn.Module, device: torch.device) -> None:
    """Give a model of shapes parameters and buffers on the device."""
    placed: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is None:
                    continue
                if id(tensor) not in placed:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    learns = isinstance(tensor, nn.Parameter)
                    placed[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if learns else made
                kind[name] = placed[id(tensor)]


def _step(
    config: TrainConfig, trained: Trained, precision: Any, batch: Batch, device: torch.device, watch: Watch
) -> Found:
    """One step, as `headway.train.loop` takes it."""
    model = trained.model.train()
    optimizer = make_optimizer(model, config.optim, trained.cost_model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    load = RouterLoad(model, device)
    # The second step of a run: there are moments, and nothing else is made for the first time.
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    if config.optim.accumulation == 1:  # else the pack is not its step's first, and finds the gradients of others
        optimizer.zero_grad(set_to_none=True)
    watch.pinned = {t.untyped_storage()._cdata for t in _tensors(batch)}
    sources = torch.zeros(1, device=device)

    set_learning_rate(optimizer, 1e-5)
    batch = batch.to(device)
    with watch.at("forward"), precision.autocast():
        pack = trained.model_with_loss(
            batch.model_inputs(),
            batch.labels_1T[0],
            per=max(1, batch.num_supervised),
            labelled_K=batch.labelled_K,
        )
    with watch.at("backward"):
        backward(pack.total, watch)
        sources.index_add_(0, batch.source_of_slots(), pack.loss_T)
    held = {
        "weights": sum(p.nbytes for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "optimizer": sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim()),
    }
    del pack
    with watch.at("update"):
        norm = gradient_norm(parameters)
        factor = None if config.optim.clip is None else clipping_factor(norm, config.optim.clip)
        numbers = torch.cat([sources, norm.to(sources)[None], load.take(lambda _: None)])
        take_step(optimizer, numbers, factor=factor, skips=config.optim.on_nonfinite == "skip")
        optimizer.zero_grad(set_to_none=True)
    workload = batch.workload
    patches = sum(math.prod(map(int, grid)) for grid in (*workload.images, *workload.videos))
    return Found(
        tuple(watch.waits), dict(watch.peaks), held, batch.slots, patches, watch.ops, watch.narrow, watch.at_peak
    )


def _tensors(batch: Batch) -> Iterator[torch.Tensor]:
    values = [getattr(batch, name) for name in type(batch).__slots__]
    for value in (*values, *batch.vision.values()):
        if isinstance(value, torch.Tensor):
            yield value


def pack_of(config: TrainConfig, trained: Trained) -> Batch:
    """The fullest pack that a recipe's plan makes of its lengths, collated as training collates it."""
    model, data = trained.model, config.data
    collator = Collator(
        geometry=vision_geometry(model),
        pixel_scale=_scale(model.config),
        bucket_tokens=data.bucket_tokens,
        bucket_patches=data.bucket_patches,
    )
    rule, is_video = rope_index(model), config.plan.mix is not None and MIXES[config.plan.mix].kind == "videos"
    samples = fullest_pack(config, trained.cost_model)
    return collator([encoded(model.config, rule, *sample, is_video=is_video) for sample in samples]).dealt(None)


def _scale(config: Any) -> Any:
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return torch.ones(values), torch.zeros(values)


def fullest_pack(config: TrainConfig, cost_model: CostModel) -> list[tuple[int, list[Any]]]:
    """Length and grids of each sample of the pack with the most patches, or tokens, that a recipe's plan makes."""
    data = config.data
    if config.plan.mix is None:  # the digits: one to four of them, of four patches to a token
        return [(16 + 4 * number, [[1, 4, 4]] * number) for number in (1, 2, 3, 4) * 9]
    budget = Budget(data.tokens_per_pack, data.patches_per_pack, data.samples_per_pack)
    table = MIXES[config.plan.mix].lengths(4000)
    items, _ = Items.build({"planned": table}, budget, data.overlong, cost_model)
    plan = Plan(items, Order.epochs(items.sizes, 1, seed=data.seed), budget, 8, strategy=data.strategy)
    packs = [pack for step, _ in plan.steps() for pack in step.packs]
    pack = max(packs, key=lambda pack: (int(items.patches[pack].sum()), int(items.tokens[pack].sum())))
    rows = items.locate(pack).row
    return [
        (int(items.tokens[item]), table.grids[table.grid_rows == row].tolist() if cost_model.has_vision else [])
        for item, row in zip(pack, rows, strict=True)
    ]


def encoded(config: Any, rule: Any, length: int, grids: list[Any], *, is_video: bool) -> EncodedSample:
    """A sample of so many tokens, its pictures first; what is in them is not looked at."""
    splits_frames = is_video and config.model_type.startswith("qwen3")  # a time stamp stands before each of them
    runs = [(1, *grid[1:]) for grid in grids for _ in range(grid[0])] if splits_frames else grids
    length = max(length, sum(1 + math.prod(grid) // 4 for grid in runs))  # grids are rounded up to whole rows
    ids_S, types_S = torch.ones(length, dtype=torch.long), torch.zeros(length, dtype=torch.long)
    start = 0
    for number, grid in enumerate(runs):
        start += number > 0  # a word stands in between
        end = start + math.prod(grid) // 4
        ids_S[start:end] = config.video_token_id if is_video else config.image_token_id
        types_S[start:end] = 2 if is_video else 1
        start = end
    labels_S = ids_S.clone()
    labels_S[:start] = -100
    origin = Origin("fake", "fake", 0, "made up")
    positions = torch.arange(length)[None]
    if rule is None:
        return EncodedSample(input_ids_S=ids_S, labels_S=labels_S, position_ids_RS=positions, origin=origin)
    media: dict[str, Any] = {}
    if grids:
        grids_M3 = torch.tensor(grids)
        known = {"video_grid_thw" if is_video else "image_grid_thw": grids_M3}
        positions = rule(input_ids=ids_S[None], mm_token_type_ids=types_S[None], **known)[0][:, 0]
        vision = config.vision_config
        frames = vision.temporal_patch_size if is_video else 1  # images are bytes of one frame
        size = vision.in_channels * frames * vision.patch_size**2
        pixels_PD = torch.zeros(int(grids_M3.prod(1).sum()), size, dtype=torch.uint8)
        kind = "videos" if is_video else "images"
        media = {"media": {kind: MediaTensors(grids_M3, pixels_PD)}, "media_end": start}
    else:
        positions = positions.repeat(3, 1)
    return EncodedSample(
        input_ids_S=ids_S, labels_S=labels_S, position_ids_RS=positions, origin=origin, token_types_S=types_S, **media
    )
