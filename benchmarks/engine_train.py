"""`headway train` itself as a case of benchmarks/engine_gpu.py, with its feed and records, on a set-up's texts."""

import json
import string
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Tokenizer

from engine_memory import cost_model_of, predicted_memory
from engine_setups import setup_named, without_data
from headway.count import Workload
from headway.devices import peak_for
from headway.models import rope_index
from headway.models.precision import choose_device, choose_precision
from headway.predict.tune import measure
from headway.predict.tune.measure import WARM_UP
from headway.tracing import trace

LETTERS = string.ascii_lowercase
LONGEST_S = 600.0  # that a run may take


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the text set-up's family to which each letter is a token."""
    end = "<|endoftext|>"
    vocabulary = {token: number for number, token in enumerate([end, *LETTERS])}
    Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=end, eos_token=end, pad_token=end).save_pretrained(folder)


def measure_run(
    setup_name: str,
    settings: dict[str, Any],
    steps: int,
    deadline_s: float,
    tell: Callable[[dict[str, Any]], None],
    *,
    is_small: bool,
) -> None:
    """Train on documents of a set-up's lengths for some steps, by the command, in a process of its own.

    Args:
        setup_name: of the engine's; one of text.
        settings: of its recipe.
        steps: that are counted.
        deadline_s: reading of `time.monotonic` at which it must have ended [s].
        tell: given what is known at the end.
        is_small: whether sizes are for a smoke test.

    Raises:
        torch.OutOfMemoryError: the device's memory does not hold the run.
        RuntimeError: it was not measured for another reason.
    """
    setup = setup_named(setup_name).with_packs_of(settings["data.tokens_per_pack"])
    layers = setup.layers(is_small=is_small)
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), setup.config(layers=layers, is_small=is_small)
        # documents whose letters are tokens; packs of the benchmark are full, so as many hold enough for these steps
        shapes = without_data(setup.config(layers=1, is_small=is_small))
        num_packs = (steps + WARM_UP + 2) * settings["optim.accumulation"]
        rng = np.random.default_rng(0)
        drawn = islice(setup.packs(shapes.config, rope_index(shapes), is_small=is_small), num_packs)
        with (folder / "documents.jsonl").open("w", encoding="utf-8") as file:
            for samples, _ in drawn:
                for sample in samples:
                    letters = rng.integers(len(LETTERS), size=sample.tokens - 1)  # the end of a document is a token
                    file.write(json.dumps({"text": "".join(LETTERS[letter] for letter in letters)}) + "\n")
        data = {"data.train": json.dumps([str(folder / "documents.jsonl")]), "data.overlong": "drop"}
        data |= {"parallel.reduce_dtype": "float32"}  # one process sums nothing
        length = settings["data.tokens_per_pack"] // (64 if is_small else 1)
        config = setup.recipe_for(folder, model, settings | data | {"data.tokens_per_pack": length})
        write_tokenizer(folder / "model")
        trial = measure(config, 1, steps=steps, limit_s=max(1.0, min(LONGEST_S, deadline_s - time.monotonic())))
        if trial.flops_per_s is None or trial.step_s is None or trial.tokens_per_s is None:
            error = torch.OutOfMemoryError if trial.outcome == "out of memory" else RuntimeError
            raise error(f"headway train: {trial.outcome}: {trial.reason}")
        cost_model = trace(without_data(model)) if is_small else cost_model_of(setup, layers)
        plan = predicted_memory(
            setup, config, cost_model, layers, [Workload([length], slots=length)], is_small=is_small
        )
    device = choose_device(config.run)
    peak = peak_for(device, choose_precision(config.run, device).peak_dtype).flops_per_s
    mfu = trial.flops_per_s / peak
    tell(
        {
            "layers": layers, "of_layers": layers, "dtype": choose_precision(config.run, device).name,
            "recompute": config.speed.recompute, "tokens_per_pack": length,
            "accumulation": config.optim.accumulation, "notes": [], "recompilations": [], "warmup_s": [],
            "steps": steps, "step_s": trial.step_s, "step_s_range": [trial.step_s, trial.step_s],
            "tokens_per_s": trial.tokens_per_s, "flops_per_step": trial.flops_per_s * trial.step_s,
            "peak_flops_per_s": peak, "mfu": mfu, "hfu": None, "others": {},
            "memory": {"predicted": plan.to_dict(), "packs": 0, "allocated": trial.peak_bytes, "reserved": None,
                       "device": None},
        }
    )  # fmt: skip
