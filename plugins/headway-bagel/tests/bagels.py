"""A tiny Bagel, with packs and data for it."""

import json

import numpy as np
import torch
from PIL import Image

from headway.count import splits
from headway.models.load import load_processor
from headway.packing.parts import SamplePart
from headway.synthetic.processor import write_tokenizer
from headway_bagel.layout import lay_out
from headway_bagel.model import BagelConfig, BagelModel

TEXT = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 6,
}
VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "block_out_channels": [4, 8],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 2,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 0.36,
    "shift_factor": 0.12,
}

QUESTION = [SamplePart("image", rows=3, columns=4), SamplePart("text", 9, 5)]
PICTURE = [SamplePart("text", 7), SamplePart("noised", rows=2, columns=3)]
EDIT = [
    SamplePart("clean", rows=2, columns=2),
    SamplePart("image", rows=2, columns=1),
    SamplePart("text", 5),
    SamplePart("noised", rows=2, columns=2),
    SamplePart("text", 6, 4),
]


def bagel_config(vae=None, **text):
    return BagelConfig(
        text_config={**TEXT, **text}, vision_config=TOWER, vae_config=vae, latent_patch_size=2, max_latent_size=4
    )


def tiny_bagel(vae=None, attention="sdpa", seed=0, **text):
    """Make a model with random weights throughout, the layer that starts at zero included."""
    torch.manual_seed(seed)
    model = BagelModel._from_config(bagel_config(vae, **text), attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        model.llm2vae.weight.normal_(0, 0.2)
    return model.train()


def contents(parts, config, seed):
    """Make the inputs of a sample by its own seed: tokens, patches, and a time for each grid of latents."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = sum(part.tokens or part.rows * part.columns + 2 for part in parts)
    read = sum(part.rows * part.columns for part in parts if part.kind == "image")
    grids = [part for part in parts if part.kind in ("clean", "noised")]
    features = config.latent_features, 3 * config.vision_config.patch_size**2
    latents = sum(part.rows * part.columns for part in grids)
    return {
        "input_ids": torch.randint(0, config.text_config.vocab_size, (tokens,), generator=drawn),
        "pixel_values": torch.randn(read, features[1], generator=drawn),
        "latents": torch.randn(latents, features[0], generator=drawn),
        "noise": torch.randn(latents, features[0], generator=drawn),
        "timesteps": torch.rand(len(grids), generator=drawn) * torch.tensor([p.kind == "noised" for p in grids]),
    }


def dense_mask(samples, config):
    """The mask of a pack, cell by cell."""
    masks = []
    for parts in samples:
        _, workload = lay_out([parts], config)
        runs = workload.splits if workload.splits.size else splits.all_causal(workload.segments)
        masks.append(torch.from_numpy(splits.mask_of_runs(runs)))
    return torch.block_diag(*masks).bool()[None, None]


def pack(samples, config, seeds=None):
    """Arguments of a pack of samples, each drawn by its own seed."""
    given, workload = lay_out(samples, config)
    held = [contents(parts, config, seed) for parts, seed in zip(samples, seeds or range(len(samples)), strict=True)]
    given |= {name: torch.cat([one[name] for one in held]) for name in held[0]}
    given["input_ids"] = given["input_ids"][None]
    if not len(given["pixel_values"]):
        given["pixel_values"] = None
    return given | {"attention_mask": dense_mask(samples, config)}, workload


WORDS = ["Draw a red square.", "Make it blue.", "What is this?", "a square", "a circle"]


def write_model(folder, vae=None):
    """A model folder without weights."""
    tokenizer = load_processor(write_tokenizer(folder, WORDS))
    bagel_config(vae, vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


def image(content):
    return {"type": "image", "image": content}


def chat(user, assistant):
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]}


def write_data(folder, samples=24):
    """Pictures to draw, edits and questions, in turn; the paths of a file of all, and of one of pictures alone."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rows = []
    for number in range(samples):
        names = [f"{number}-{which}.png" for which in range(2)]
        for name in names:
            sides = rng.integers(4, 9, 2)
            Image.fromarray(rng.integers(0, 255, (*sides, 3), dtype=np.uint8)).save(folder / name)
        words = WORDS[number % 5]
        rows.append(
            [
                chat(words, [image(names[0])]),
                chat([image(names[0]), {"type": "text", "text": WORDS[1]}], [image(names[1])]),
                chat([image(names[0]), {"type": "text", "text": WORDS[2]}], words),
            ][number % 3]
        )
    for name, chosen in (("all.jsonl", rows), ("pictures.jsonl", rows[::3])):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in chosen))
    return folder / "all.jsonl", folder / "pictures.jsonl"
