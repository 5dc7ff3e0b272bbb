"""Low-rank adapters by peft, put into a model in place.

The model keeps its class, its forward and its names, but for the modules that take an adapter: `q_proj.weight` becomes
`q_proj.base_layer.weight`, beside `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`.
"""

import json
import math
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headway.count import CostModel
from headway.count.adapters import NEW_ROWS, is_adapter, targets_of
from headway.errors import CheckpointError, ConfigError, UsageError, errors_in, foreign
from headway.models.foreign import check_adapters, matching_names
from headway.models.new_rows import add_new_rows, initialise_new_rows, new_rows, resize, without_new_rows
from headway.models.parallel.mesh import fill
from headway.models.scores import SCORE, SCORE_WEIGHT, is_scorer
from headway.version import install_command
from headway.words import RUN_KEYS, Argument

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"  # peft's name for an adapter that is alone
_ALL = "all-linear"  # peft's word for all linear modules, where names or a regular expression may stand
_SCORING = "SEQ_CLS"  # peft's name of what a reward model does
_BASE = ".base_layer."
_PEFT_ROWS = ".token_adapter.trainable_tokens_delta"  # peft's name for rows of tokens, which are values and no changes


def adapter_modules(cost_model: CostModel, targets: Sequence[str] | None) -> list[str]:
    """Find the linear modules that take adapters, by the rule of `headway flops --lora`.

    Args:
        cost_model: traced from the model without adapters, with what is frozen on purpose; modules with a frozen weight
            take no adapter.
        targets: last parts of module names, or globs over names; None for all linear modules but the head.

    Raises:
        ConfigError: a target matches no linear module, or only frozen ones.
    """
    learning = {entry.name: entry.trainable for entry in cost_model.parameters}
    matches: set[str] = set()
    for target in [None] if targets is None else targets:
        with errors_in(RUN_KEYS):
            try:
                modules = targets_of(cost_model.rows, None if target is None else [target], cost_model.name)
            except UsageError as error:
                raise error.as_kind(ConfigError) from error
        hits = {name for name in modules if learning.get(f"{name}.weight")}
        if not hits:
            words = (
                f"model.lora.targets: of the {len(modules)} modules that {target or 'all linear modules'} names, none"
            )
            # A tied weight has an entry under the first of its names alone.
            if tied := sorted(name for name in modules if f"{name}.weight" not in learning):
                raise ConfigError(
                    f"{words} can take an adapter: {tied[0]} shares its weight with another module (such as a head "
                    "with the embedding), and an adapter would change only one of the two. Name other modules."
                )
            raise ConfigError(
                f"{words} can take an adapter, because model.freeze holds them all. Name other modules, or take some "
                "out of model.freeze."
            )
        matches |= hits
    return sorted(matches)


def add_adapters(
    model: PreTrainedModel,
    modules: Sequence[str],
    *,
    rank: int,
    alpha: float,
    dropout: float,
    base: str,
    new_ids: Sequence[int] = (),
) -> None:
    """Put adapters into a model, in place and on the meta device; everything else stops learning.

    Args:
        model: with weights, or on the meta device.
        modules: full names of linear modules.
        rank: inner dimension.
        alpha: an adapter's output is scaled by alpha / rank.
        dropout: share of an adapter's inputs that are zeroed in training.
        base: path or Hub name of the model, which a folder of adapters refers to.
        new_ids: tokens whose rows of the embedding and the head learn too, one after the other.

    Raises:
        ConfigError: peft is not installed.

    Source: Hu et al. 2021 (arXiv:2106.09685), equation 3.
    """
    peft = _peft()
    _inject(
        model,
        peft.LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=list(modules),
            base_model_name_or_path=base,
            task_type=_SCORING if is_scorer(model.config) else "CAUSAL_LM",
            fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in modules),
            trainable_token_indices={name: list(new_ids) for name in _holders(model)} if new_ids else None,
        ),
    )


def add_saved_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Put the adapters that a folder's adapter_config.json describes into a model, on the meta device.

    Raises:
        ConfigError: peft is not installed.
        CheckpointError: adapters that cannot be put into the model, or rows of tokens that are not at the end of a
            vocabulary, one after the other.
    """
    peft = _peft()
    with foreign(
        lambda reason: CheckpointError(
            f"The adapters in {folder} cannot be used: {reason} Look into its {ADAPTER_CONFIG}, or save the adapters "
            "again."
        )
    ):
        check_adapters(folder / ADAPTER_CONFIG)
        config = peft.LoraConfig.from_pretrained(str(folder))
        for setting in ("target_modules", "exclude_modules"):
            pattern = getattr(config, setting)
            if isinstance(pattern, str) and pattern != _ALL:
                names = matching_names(pattern, (name for name, _ in model.named_modules()))
                setattr(config, setting, "|".join(map(re.escape, names)))
        _put_in(model, config, folder)


def _put_in(model: PreTrainedModel, config: Any, folder: Path) -> None:
    if config.trainable_token_indices is not None:
        ids = _saved_ids(model, config.trainable_token_indices, folder)
        resize(model, ids[-1] + 1)
        config.trainable_token_indices = dict.fromkeys(_holders(model), ids)
    _inject(model, config)


def write_adapter_config(model: PreTrainedModel, folder: Path) -> None:
    """Write adapter_config.json, if the model has adapters."""
    if has_adapters(model):
        model.peft_config[_NAME].save_pretrained(str(folder))


def has_adapters(model: nn.Module) -> bool:
    """Tell whether a model has adapters."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Take the adapters out for a while: the model has its plain modules and names, the same tensors."""
    with without_new_rows(model), _without_layers(model):
        yield


@contextmanager
def _without_layers(model: nn.Module) -> Iterator[None]:
    layers = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], layer) for name, layer in _layers(model)
    ]
    for parent, leaf, layer in layers:
        setattr(parent, leaf, layer.base_layer)
    try:
        yield
    finally:
        for parent, leaf, layer in layers:
            setattr(parent, leaf, layer)


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int, device: torch.device | str) -> None:
    """Give adapters, if any, their first weights: A at random and B zero, so that the model starts unchanged.

    Rows of new tokens get those of the embedding and the head that they stand for.

    The numbers depend on the seed and the module's name alone, not on how many processes hold them.

    Args:
        model: with adapters on the meta device, or with memory of their own, sharded or not.
        seed: of the run.
        device: where adapters go that are on the meta device.

    Source: peft's default, `nn.init.kaiming_uniform_(A, a=sqrt(5))`.
    """
    for name, layer in _layers(model):
        down, up = layer.lora_A[_NAME], layer.lora_B[_NAME]
        for part in (down, up):
            if part.weight.is_meta:
                part.to_empty(device=device)
        full_tensor = torch.empty(down.weight.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        nn.init.kaiming_uniform_(full_tensor, a=math.sqrt(5), generator=generator)
        fill(down.weight, full_tensor)
        up.weight.zero_()
    initialise_new_rows(model, device)


def base_name(name: str) -> str:
    """The name that a tensor of a model with adapters has, or belongs to, in the model without.

    >>> base_name("layers.0.q_proj.base_layer.weight"), base_name("layers.0.q_proj.lora_A.default.weight")
    ('layers.0.q_proj.weight', 'layers.0.q_proj.weight')
    """
    plain = name.replace(_BASE, ".").replace(f".lora_A.{_NAME}", "").replace(f".lora_B.{_NAME}", "")
    return plain.replace(f".{NEW_ROWS}.", ".")


def with_merged_adapters(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add adapters into the weights that they belong to: W + alpha / rank B A, computed in float32.

    Args:
        model: its structure; it may be on the meta device.
        tensors: some of its tensors by name, of every module all or none.

    Returns:
        The tensors of the model without adapters, under its names.
    """
    merged_tensors = {base_name(name): tensor for name, tensor in tensors.items() if not is_adapter(name)}
    for name, layer in _layers(model):
        if f"{name}{_BASE}weight" not in tensors:
            continue
        down, up = (tensors[f"{name}.lora_{letter}.{_NAME}.weight"].float() for letter in "AB")
        added = up @ down * layer.scaling[_NAME]
        weight = tensors[f"{name}{_BASE}weight"]
        added = added.T if isinstance(layer.base_layer, Conv1D) else added
        merged_tensors[f"{name}.weight"] = (weight.float() + added).to(weight.dtype)
    for name, _, rows in new_rows(model):
        if f"{name}.{NEW_ROWS}.weight" in tensors:
            weight = merged_tensors[f"{name}.weight"].clone()
            weight[rows.first : rows.first + rows.num_embeddings] = tensors[f"{name}.{NEW_ROWS}.weight"]
            merged_tensors[f"{name}.weight"] = weight
    return merged_tensors


def adapters_alone(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapters among a model's tensors, and a reward model's head, under the names of peft's files."""
    return {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.').replace(f'.{NEW_ROWS}.weight', _PEFT_ROWS)}": tensor
        for name, tensor in tensors.items()
        if _goes_with_adapters(name)
    }


def adapts_scorer(folder: Path) -> bool:
    """Tell whether the adapters in a folder, whose adapter_config.json has been read before, are of a reward model."""
    return bool(json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("task_type") == _SCORING)


def _goes_with_adapters(name: str) -> bool:
    """Tell whether a tensor is of an adapter, or learns beside them: the head of a reward model."""
    return is_adapter(name) or name == SCORE_WEIGHT


def read_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Read the weights of a folder's adapters, under peft's names, into a model that has their modules.

    Raises:
        CheckpointError: the file is missing or damaged, or holds other tensors than the model has adapters.
    """
    path = folder / ADAPTER_WEIGHTS
    ours = {name: tensor.detach() for name, tensor in model.named_parameters() if _goes_with_adapters(name)}
    by_name = dict(zip(adapters_alone(ours), ours.values(), strict=True))
    try:
        theirs = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"The adapters in {path} cannot be read: {error}. Export them again.") from error
    differing = sorted(
        name
        for name in by_name.keys() | theirs.keys()
        if name not in by_name or name not in theirs or by_name[name].shape != theirs[name].shape
    )
    if differing:
        raise CheckpointError(
            f"The adapters in {path} do not fit this model and the {ADAPTER_CONFIG} beside them: {len(differing)} "
            f"tensors are missing, too many or of another shape, such as {differing[0]}. Give the model that the "
            f"adapters were trained on with {Argument('base', example='MODEL')}. Headway reads only low-rank "
            "adapters of linear layers."
        )
    for name, tensor in theirs.items():
        by_name[name].copy_(tensor)


def _inject(model: PreTrainedModel, config: Any) -> None:
    rows, config.trainable_token_indices = config.trainable_token_indices, None  # peft's layer makes whole gradients
    config.modules_to_save = None  # peft would train copies; the head of a reward model learns in place
    with warnings.catch_warnings():
        # peft asks transformers for a name that is going away; nobody but peft can change that
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        _peft().inject_adapter_in_model(config, model, _NAME, low_cpu_mem_usage=True)
    model._hf_peft_config_loaded = True  # transformers' own mark of a model with adapters
    for _, layer in _layers(model):
        for part in (layer.lora_A, layer.lora_B):
            part.to(layer.base_layer.weight.dtype)
        # Autocast casts inputs for adapters as for the layer beside them; peft would have cast them to float32 before.
        layer.cast_input_dtype_enabled = False
    if is_scorer(model.config):
        model.get_parameter(SCORE_WEIGHT).requires_grad_(True)
        config.modules_to_save = [SCORE]
    if rows is not None:
        add_new_rows(model, next(iter(rows.values())))
        config.trainable_token_indices = rows  # the rows that the model has noted


def _holders(model: Any) -> list[str]:
    """Names of the embedding and, unless it is tied to that, the head."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parts = [embedding] if head is None or head.weight is embedding.weight else [embedding, head]
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(part)] for part in parts]


def _saved_ids(model: PreTrainedModel, saved: Any, folder: Path) -> list[int]:
    lists = list(saved.values()) if isinstance(saved, dict) else [saved]
    ids = sorted(lists[0]) if lists and all(isinstance(tokens, list) for tokens in lists) else []
    hf_model: Any = model
    if not ids or any(sorted(tokens) != ids for tokens in lists) or ids != list(range(ids[0], ids[0] + len(ids))):
        raise CheckpointError(
            f"The {ADAPTER_CONFIG} in {folder} has rows of tokens {str(saved)[:80]}. Headway reads only consecutive "
            "rows that are the same for embedding and head. Merge the adapters with peft first."
        )
    if ids[0] > len(hf_model.get_input_embeddings().weight):
        raise CheckpointError(
            f"The {ADAPTER_CONFIG} in {folder} has rows of tokens from {ids[0]} on, but the model ends at "
            f"{len(hf_model.get_input_embeddings().weight)}. Give the model that the adapters were trained on with "
            f"{Argument('base', example='MODEL')}."
        )
    return ids


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
            yield name, module


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.lora needs peft, which is not installed. Install it with {install_command('engine')}, or take "
            "model.lora out."
        ) from error
    return peft
