"""Training runs of tiny models on text, pictures and films, for the laws of the engine.

python tests/helpers/engine_runs.py BACKEND FILE    trains the configuration of a file, blocks compiled by that backend
"""

import functools
import os
import sys
from pathlib import Path
from unittest.mock import patch

from headway.config import load_config
from headway.models import load_processor
from headway.models.compiling import compile_blocks
from headway.synthetic.processor import write_processor
from headway.train.run import train
from helpers.tiny_models import PATCH, VISION_FAMILIES, tiny_config
from helpers.whole_pipeline import write_sources

IS_LONG = os.environ.get("HEADWAY_TEST_PROFILE") == "long"  # as `make test-long` sets it
PACKS_PER_STEP, STEPS = 4, 20 if IS_LONG else 5
_TOKENS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
_TOKENS |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}


def write_model(folder, family, **changes):
    """A model folder without weights: configuration, tokenizer and, where it sees, processor.

    Args:
        folder: created where needed.
        family: as in `tiny_models`.
        changes: to the configuration's attributes.
    """
    processor = load_processor(write_processor(folder, ["Which picture is it? It is the one."], PATCH))
    tokenizer = processor.tokenizer
    tokens = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _TOKENS.items()}
    config = tiny_config(family, len(tokenizer), tokens)
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    if family not in VISION_FAMILIES:
        for file in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
            (folder / file).unlink(missing_ok=True)
        tokenizer.init_kwargs.pop("processor_class", None)
        tokenizer.save_pretrained(folder)
    return folder


def write_data(folder):
    """The sources that vision models and text models train on, as the configuration's `data.train`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = write_sources(folder)
    shares = {"pictures": 3.0, "films": 1.0, "text": 2.0}
    seen = [{"path": str(paths[name]), "name": name, "weight": share} for name, share in shares.items()]
    return {"vision": [{"mix": seen}], "text": [{"path": str(paths["text"]), "name": "text"}]}


def configuration(model, data, run, *, processes=1, overrides=None):
    """A configuration as plain types: four packs a step, shared out among the processes that have packs of their own.

    Args:
        model: its folder.
        data: `data.train`.
        run: the run's folder.
        processes: how many train together.
        overrides: sections and what is changed in them.
    """
    changes = overrides or {}
    data_ranks = processes // changes.get("parallel", {}).get("sequence", 1)
    packing = {
        "tokens_per_pack": 256,
        "overlong": "split",
        "strategy": "best_fit",
    }  # "balanced" minds the number of ranks
    raw = {
        "model": {"path": str(model), "random_init": True},
        "data": {"train": data, "workers": 0, "prefetch_bytes": 0} | packing,
        "optim": {"steps": STEPS, "lr": 2e-3, "warmup_steps": 2, "accumulation": PACKS_PER_STEP // data_ranks},
        "run": {"folder": str(run), "device": "cpu", "threads": 1},
    }
    for section, values in changes.items():
        raw[section] = raw.get(section, {}) | values
    return raw


def main(backend, path):
    with patch("headway.train.build.compile_blocks", functools.partial(compile_blocks, backend=backend)):
        train(load_config(Path(path)))


if __name__ == "__main__":
    main(*sys.argv[1:])
