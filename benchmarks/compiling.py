"""Step time with blocks compiled as Headway does, with torch.compile(model) as it comes, and without compilation.

    .venv/bin/python benchmarks/compiling.py            # about half an hour on 2 cores; run on a quiet machine
    .venv/bin/python benchmarks/compiling.py --mix text --rounds 1 --steps 8

Every contender takes the same steps on the same packs, in a process of its own. Writes
benchmarks/results/compiling_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from contenders import BETAS, CLIP, EPS, IGNORED, LEARNING_RATE, WEIGHT_DECAY, build_model
from headway.data.collate import Batch, Collator
from headway.models.compiling import CompileWatch, compile_blocks
from headway.models.vision import vision_geometry
from mixes import Mix, digits_mix, text_mix
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, spread, write

TITLES = {
    "plain": "not compiled",
    "model": "torch.compile(model)",
    "blocks": "Headway, speed.compile",
}
SAMPLES = {"text": (4, 12), "digits": (24, 72)}  # fewest and most samples of a pack, drawn at random


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mix", choices=["text", "digits", "all"], default="all", help="data to compare on")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every contender")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a round, a pack each")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a round takes no more steps")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--render", type=Path, help="only render this JSON record again")
    options = parser.parse_args()
    if options.render:
        print(render(json.loads(options.render.read_text(encoding="utf-8"))))
        return
    torch.set_num_threads(options.threads)
    mixes = ["text", "digits"] if options.mix == "all" else [options.mix]
    record: dict[str, Any] = {"what": "compiling", "environment": environment(torch.device(options.device))}
    record |= {"rounds": options.rounds, "steps": options.steps, "limit_s": options.limit, "mixes": []}
    for mix in mixes:
        setting = (mix, options.steps, options.limit, options.threads, options.device)
        record["mixes"].append(compare(options.rounds, setting))
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def compare(rounds: int, setting: tuple[str, int, float, int, str]) -> dict[str, Any]:
    """Run every contender in turn, round after round, so that a drift of the machine meets all of them.

    Args:
        rounds: how often.
        setting: what `measure` is told of all contenders, the mix's name first.
    """
    mix = setting[0]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in TITLES}
    for number in range(rounds):
        for name, title in TITLES.items():
            spawned = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, spawned) as pool:
                found = pool.submit(measure, name, *setting).result()
            runs[name].append(found)
            print(f"{mix}, round {number + 1}, {title}: {1e3 * steady(found):.1f} ms a step", flush=True)
    losses = {name: found[0]["losses"] for name, found in runs.items()}
    for name, found in losses.items():
        if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, losses["plain"], strict=False)):
            raise SystemExit(f"{mix}: {TITLES[name]} does not compute the same: {found} instead of {losses['plain']}")
    return {"name": mix, "description": runs["plain"][0].pop("description"), "contenders": runs}


def measure(contender: str, name: str, steps: int, limit_s: float, threads: int, device: str) -> dict[str, Any]:
    """Take the steps of one contender, or as many as the limit leaves time for.

    Returns:
        Per step its wall and processor time [s], the loss, and the compilations in it with those that came after the
        first of their function.
    """
    torch.set_num_threads(threads)
    mix = text_mix(steps * SAMPLES[name][1]) if name == "text" else digits_mix(steps * SAMPLES[name][1])
    model = build_model(mix, "headway_flash", torch.device(device))
    packs = draw_packs(mix, name, steps, Collator(geometry=vision_geometry(model)))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    watch, forward = CompileWatch(), model
    if contender != "plain":
        torch._inductor.config.force_disable_caches = True  # each round compiles from scratch
    if contender == "blocks":
        compile_blocks(model, watch)
    elif contender == "model":
        forward = torch.compile(model)
    found: dict[str, Any] = {"wall_s": [], "cpu_s": [], "losses": [], "compiled": [], "recompiles": []}
    deadline_s = time.perf_counter() + limit_s
    for pack in packs:
        if time.perf_counter() > deadline_s:
            break
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        batch = pack.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits_TV = forward(**batch.model_inputs()).logits[0]
        loss = F.cross_entropy(logits_TV.float(), batch.labels_1T[0], ignore_index=IGNORED, reduction="sum")
        (loss / batch.num_supervised).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found["losses"].append(loss.item() / batch.num_supervised)  # waits for the device
        found["wall_s"].append(time.perf_counter() - began_s)
        found["cpu_s"].append(time.process_time() - cpu_began_s)
        compilations = watch.since()
        found["compiled"].append(compilations.happened)
        found["recompiles"].append(len(compilations.guards))
    slots = [batch.slots for batch in packs]
    size = f"{model.num_parameters() / 1e6:.1f} M parameters; packs of {min(slots)} to {max(slots)} tokens"
    return {**found, "description": f"{mix.description}; {size}"}


def draw_packs(mix: Mix, name: str, steps: int, collator: Collator) -> list[Batch]:
    """Packs of a random number of samples, the same for every contender."""
    rng = np.random.default_rng(0)
    samples, packs = iter(mix.samples), []
    low, high = SAMPLES[name]
    for count in rng.integers(low, high + 1, size=steps):
        packs.append(collator([next(samples) for _ in range(count)]))
    return packs


def steady(found: dict[str, Any]) -> float:
    """Median processor time of the steps in which nothing compiled [s]; NaN if there is none."""
    steps = [cpu_s for cpu_s, compiled in zip(found["cpu_s"], found["compiled"], strict=True) if not compiled]
    return statistics.median(steps) if steps else math.nan


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    parts = ["# Step time: blocks compiled once, the model compiled as it comes, and not at all", ""]
    for mix in record["mixes"]:
        plain = [steady(found) for found in mix["contenders"]["plain"]]
        rows = []
        for name, title in TITLES.items():
            rounds = mix["contenders"][name]
            times = spread([1e3 * steady(found) for found in rounds])
            ratio = spread([base / steady(found) for base, found in zip(plain, rounds, strict=True)])
            rows.append(
                [
                    title,
                    _spread_of(times, ".1f"),
                    _spread_of(ratio, ".2f", "x"),
                    f"{statistics.median(len(found['wall_s']) for found in rounds):.0f}",
                    f"{statistics.median(sum(found['compiled']) for found in rounds):.0f}",
                    f"{statistics.median(sum(found['recompiles']) for found in rounds):.0f}",
                    f"{statistics.median(sum(found['wall_s']) for found in rounds):.0f}",
                ]
            )
        headings = [
            "",
            "step without compiling, ms",
            "speed",
            "steps",
            "steps that compiled",
            "recompilations",
            "all steps, s",
        ]
        parts += [f"## {mix['name']}", "", mix["description"] + ".", "", markdown_table(headings, rows), ""]
    parts += [
        f"{record['rounds']} rounds of {record['steps']} steps, each a pack of another size, in a process of its own "
        f"that compiles from scratch and takes no more steps after {record['limit_s']:.0f} s. A step is forward, "
        "backward, clipping and fused AdamW, in fp32 on a CPU. Its time is the median of the steps in which nothing "
        "compiled, in processor seconds, which other work on the machine disturbs less than wall time; the last column "
        "is the wall time of all steps, compilation included. All three "
        "use Headway's attention, whose boundaries no compiler needs to see. torch.compile(model) counts each "
        "compilation of a function after its first; Headway's blocks are to compile in the first step alone.",
        "",
        describe_environment(record),
        "",
    ]
    return "\n".join(parts)


def _spread_of(values: dict[str, float], digits: str, unit: str = "") -> str:
    """Median and range; a dash where a round had no step without compilation."""
    if math.isnan(values["median"]):
        return "-"
    return f"{values['median']:{digits}}{unit} ({values['min']:{digits}} to {values['max']:{digits}})"


if __name__ == "__main__":
    main()
