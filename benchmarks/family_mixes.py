"""Chats about photographs for the families whose images are as their own processors give them.

Models are an eighth as wide and a ninth as deep as real ones, and texts and images an eighth as long, for the reason
that `mixes.images_mix` gives. Photographs have the shapes of cameras and screens, so that a family that cuts images
into tiles makes of one image more tiles than of another.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image

from headway.packing.lengths import MIXES
from mixes import IMAGES_SCALE, MIX_MAX, Mix, MixFiles, encoded, place

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # whose helpers write small model folders

PATCH = 14
TOKEN_PIXELS = (2 * PATCH) ** 2  # of the lengths that the mix draws [pixels]
SHAPES = (1.0, 4 / 3, 3 / 4, 16 / 9, 9 / 16)  # width over height


def gemma3() -> tuple[Any, str]:
    """Gemma 3 4B: every image is one square of 256 tokens, here 36, that see each other both ways."""
    from helpers.families import FAMILIES

    side = 24 * PATCH
    text = {
        "hidden_size": 320, "intermediate_size": 1280, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 3648, "sliding_window": 128,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "max_position_embeddings": MIX_MAX,
    }  # fmt: skip
    vision = {
        "hidden_size": 144, "intermediate_size": 538, "num_hidden_layers": 3, "num_attention_heads": 2,
        "patch_size": PATCH, "image_size": side, "vision_use_head": False,
    }  # fmt: skip
    family = replace(
        FAMILIES["gemma3"],
        image=("gemma3", "Gemma3ImageProcessorPil", {"size": {"height": side, "width": side}}),
        options={"image_seq_length": 36},
        config=lambda: transformers.Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=36, image_token_index=3, boi_token_index=4,
            eoi_token_index=5,
        ),
    )  # fmt: skip
    return family, "36 tokens an image"


def internvl() -> tuple[Any, str]:
    """InternVL 3 8B: an image is cut into 1 to 12 tiles of 256 tokens, here 36, and a small copy of the whole."""
    from helpers.families import FAMILIES

    side = 12 * PATCH
    text = {
        "model_type": "qwen2", "hidden_size": 448, "intermediate_size": 2368, "num_hidden_layers": 3,
        "num_attention_heads": 7, "num_key_value_heads": 1, "vocab_size": 2107, "max_position_embeddings": 2 * MIX_MAX,
    }  # fmt: skip
    vision = {
        "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 2,
        "image_size": [side, side], "patch_size": [PATCH, PATCH],
    }  # fmt: skip
    tiles = {"size": {"height": side, "width": side}, "crop_to_patches": True, "min_patches": 1, "max_patches": 12}
    family = replace(
        FAMILIES["internvl"],
        image=("got_ocr2", "GotOcr2ImageProcessorPil", tiles),
        options={"image_seq_length": 36},
        config=lambda: transformers.InternVLConfig(
            text_config=text, vision_config=vision, image_token_id=3, downsample_ratio=0.5, image_seq_length=36
        ),
    )
    return family, "1 to 12 tiles of 36 tokens an image, and one of the whole where there are several"


FAMILY_MIXES = {"gemma3": gemma3, "internvl": internvl}


def family_mix(name: str, num_samples: int, seed: int = 0, folder: Path | None = None) -> Mix:
    """Chats about photographs for a family, and its small model.

    Args:
        name: one of `FAMILY_MIXES`.
        num_samples: how many [samples].
        seed: of everything random.
        folder: where its files stay; None for none.
    """
    from helpers.folders import write_vlm

    family, taken = FAMILY_MIXES[name]()
    with place(folder) as here:
        path = write_chats(here, num_samples, np.random.default_rng(seed))
        config, samples, facts = encoded(write_vlm(here / "model", family), path)
    description = (
        f"the number of pictures, their area and the text of the images mix, lengths divided by {IMAGES_SCALE}; "
        f"pictures 1:1, 4:3, 3:4, 16:9 and 9:16; {taken}; {num_samples} samples at hand: {facts}"
    )
    files = None if folder is None else MixFiles(folder / "model", path)
    return Mix(name, description, config, samples, files)


def write_chats(folder: Path, num_samples: int, rng: np.random.Generator) -> Path:
    """Write chats about photographs; a letter is a token."""
    tokens, media, number = MIXES["images"].draw(rng, num_samples)
    letters = np.clip((tokens - media) // IMAGES_SCALE, 8, MIX_MAX // 2)
    lines = []
    for row in range(num_samples):
        content: list[dict[str, Any]] = []
        for each in range(int(number[row])):
            area = media[row] / number[row] / IMAGES_SCALE * TOKEN_PIXELS
            shape = rng.choice(SHAPES)
            height, width = round((area / shape) ** 0.5), round((area * shape) ** 0.5)
            file = f"{row}_{each}.png"
            colour = tuple(rng.integers(0, 256, 3).tolist())
            Image.new("RGB", (max(width, PATCH), max(height, PATCH)), colour).save(folder / file)
            content.append({"type": "image", "image": file})
        half = int(letters[row]) // 2
        content.append({"type": "text", "text": _letters(half, rng)})
        answer = _letters(int(letters[row]) - half, rng)
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "chats.jsonl"


def _letters(count: int, rng: np.random.Generator) -> str:
    return bytes(rng.integers(97, 123, count, dtype=np.uint8)).decode()
