"""BAGEL's checkpoint folder as a model folder that `headway train` opens.

BAGEL-7B-MoT keeps its text and vision configurations in two files, the weights of both copies of the blocks in
`ema.safetensors`, and FLUX's autoencoder, under that project's names, in `ae.safetensors`. Weights are linked, not
copied, where the file system can; only the autoencoder's are written anew, under diffusers' names.

Source: app.py and modeling/autoencoder.py of ByteDance-Seed/Bagel (commit 056b5fd), which build the model from this.
"""

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from headway.errors import CheckpointError, ConfigError, foreign
from headway.files import is_taken, new_folder
from headway.models.foreign import check_config
from headway.models.load import load_processor
from headway.version import install_command
from headway_bagel.configuration import BagelConfig
from headway_bagel.encoding import AROUND
from headway_bagel.model import BagelModel

_WEIGHTS, _AUTOENCODER = "ema.safetensors", "ae.safetensors"
_CONFIGS = ("llm_config.json", "vit_config.json")
_SCALE, _SHIFT = 0.3611, 0.1159  # scale and shift of FLUX's latents: modeling/autoencoder.py, load_ae


def read_checkpoint(folder: Path, target: Path) -> str:
    """Write a model folder as `import_bagel` does; returns a line that says what it holds."""
    config = import_bagel(folder, target)
    text = config.text_config
    return (
        f"wrote {target}: {text.num_hidden_layers} layers of {text.hidden_size} in both copies, a tower of "
        f"{config.vision_config.num_hidden_layers} layers, an autoencoder of {config.latent_features} numbers a patch"
    )


def import_bagel(folder: Path, target: Path) -> BagelConfig:
    """Write a model folder from a checkpoint in BAGEL's layout.

    Args:
        folder: with `llm_config.json`, `vit_config.json`, `ema.safetensors`, `ae.safetensors` and a tokenizer.
        target: the folder to write; made where it is missing, and nothing else may be in it.

    Returns:
        The model's configuration.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights are not those of such a model.
        ConfigError: the target is not empty, or diffusers is not installed.
    """
    files = [*_CONFIGS, _WEIGHTS, _AUTOENCODER]
    if lacking := [name for name in files if not (folder / name).is_file()]:
        raise CheckpointError(
            f"The folder {folder} lacks {', '.join(lacking)}, so it is no checkpoint in BAGEL's layout, which has "
            f"{', '.join(files)} and a tokenizer. Fetch it whole."
        )
    if is_taken(target) and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"The folder {target} is not empty, and is to be written. Give another one.")
    # weights are linked as they are, so that their names and shapes must be those of the model here
    text, vision = (_read_json(folder / name) for name in _CONFIGS)
    shapes, autoencoder = _shapes(folder / _WEIGHTS), _read_tensors(folder / _AUTOENCODER)
    with foreign(lambda reason: CheckpointError(f"{' or '.join(_CONFIGS)} in {folder} is damaged: {reason} Fetch it.")):
        for name in _CONFIGS:
            check_config(folder / name)
        config = _configuration(text, vision, shapes, autoencoder)
        # the model without memory, for the names and shapes that it expects
        with torch.device("meta"):
            model = BagelModel(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ours = {name: shape for name, shape in expected.items() if not name.startswith("vae_model.")}
    _compare(shapes, ours, folder / _WEIGHTS)
    renamed = _renamed(autoencoder, config)
    of_vae = {name: shape for name, shape in expected.items() if name not in ours}
    _compare({name: tuple(tensor.shape) for name, tensor in renamed.items()}, of_vae, folder / _AUTOENCODER)

    # the tokenizer gets the marks around an image that it lacks
    tokenizer: Any = load_processor(folder)
    vocabulary = tokenizer.get_vocab()
    tokenizer.add_tokens([token for pair in AROUND.values() for token in pair if token not in vocabulary])
    with new_folder(target, last="config.json") as unfinished:
        config.architectures = ["BagelModel"]
        config.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        # both files as shards of one model, which an index names
        parts = {"model-1.safetensors": [*ours], "model-2.safetensors": [*renamed]}
        _link(folder / _WEIGHTS, unfinished / "model-1.safetensors")
        save_file(renamed, unfinished / "model-2.safetensors", metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}
        (unfinished / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return config


def _configuration(
    text: dict[str, Any],
    vision: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    autoencoder: dict[str, torch.Tensor],
) -> BagelConfig:
    """Join the two configurations; values that neither has are read off the shapes of the weights."""
    # the autoencoder's stages and blocks, of which no file speaks
    widths = list[int]()
    while (name := f"encoder.down.{len(widths)}.block.0.conv1.weight") in autoencoder:
        widths.append(len(autoencoder[name]))
    blocks = {re.match(r"encoder\.down\.0\.block\.(\d+)", name) for name in autoencoder} - {None}
    try:
        # sides of squares: places of patches to read, places of latent patches, and a latent patch itself
        channels = autoencoder["decoder.conv_in.weight"].shape[1]
        # the tower's depth is that of its weights
        tower = [re.search(r"^vit_model\..*\.layers\.(\d+)\.", name) for name in shapes]
        vision["num_hidden_layers"] = 1 + max(int(match[1]) for match in tower if match)
        vision["image_size"] = math.isqrt(shapes["vit_pos_embed.pos_embed"][0]) * vision["patch_size"]
        side = math.isqrt(shapes["latent_pos_embed.pos_embed"][0])
        patch = math.isqrt(shapes["vae2llm.weight"][1] // channels)
    except (KeyError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"The weights lack {error}, so they are not those of a model that reads and draws images."
        ) from error
    # without the keys that are of BAGEL's own classes
    tower_config = {
        name: value for name, value in vision.items() if name not in ("rope", "architectures", "model_type")
    }
    return BagelConfig(
        text_config={**text, "model_type": "qwen2", "qk_norm": True, "tie_word_embeddings": False},
        vision_config=tower_config,
        vae_config={
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ["DownEncoderBlock2D"] * len(widths),
            "up_block_types": ["UpDecoderBlock2D"] * len(widths),
            "block_out_channels": widths,
            "layers_per_block": len({match[1] for match in blocks if match}),
            "latent_channels": channels,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
            "scaling_factor": _SCALE,
            "shift_factor": _SHIFT,
        },
        latent_patch_size=patch,
        max_latent_size=side,
    )


def _renamed(tensors: dict[str, torch.Tensor], config: BagelConfig) -> dict[str, torch.Tensor]:
    """Give an autoencoder's weights the names of diffusers, by diffusers' own rule."""
    try:
        from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Reading an autoencoder needs diffusers, which is not installed: {install_command('engine')}."
        ) from error
    try:
        converted = convert_ldm_vae_checkpoint(dict(tensors), config.vae_config)
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{_AUTOENCODER} holds no autoencoder of FLUX's kind: {error}.") from error
    return {f"vae_model.{name}": tensor.contiguous() for name, tensor in converted.items()}


def _compare(shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], file: Path) -> None:
    odd = [f"{name} {shapes.get(name, '(missing)')}" for name, shape in expected.items() if shapes.get(name) != shape]
    odd += [f"{name} (not known)" for name in shapes.keys() - expected.keys()]
    if odd:
        raise CheckpointError(
            f"{len(odd)} weights in {file} are not those of the model that the configurations describe, such as "
            f"{min(odd)}. Fetch the whole folder again."
        )


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - no dict
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. It may be cut short; fetch it again.") from error


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. It may be cut short; fetch it again.") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Fetch it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no object. Fetch it again.")
    return content


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file.resolve(), target)
    except OSError:  # another file system
        shutil.copyfile(file, target)
