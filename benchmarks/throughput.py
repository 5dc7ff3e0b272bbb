"""Real tokens and useful FLOPs per second: Headway's packs, transformers.Trainer three ways, and TRL's packs.

All are measured in one interleaved run.

    .venv/bin/python benchmarks/throughput.py            # about half an hour on 2 cores; run on a quiet machine
    .venv/bin/python benchmarks/throughput.py --mix text --rounds 1 --steps 6
    .venv/bin/python benchmarks/throughput.py --mix families --threads 1 --rounds 3 --steps 4 --warmup 1

Writes benchmarks/results/throughput_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import json
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from contenders import Shape, Timing, build_model, compare_first_losses, run_headway, run_trainer, run_trl
from family_mixes import FAMILY_MIXES, family_mix
from headway.count import CostModel
from headway.tracing import trace
from mixes import Mix, digits_mix, images_mix, text_mix
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, spread, write

POOL_STEPS = 64  # samples for this many steps are at hand: group_by_length needs many to group well
FAMILY_POOL_STEPS = 32  # the pixels of processed images take more memory
TITLES = {
    "trainer": "Trainer, padded to the longest",
    "headway": "Headway, packed",
    "headway_compiled": "Headway, packed and compiled",
    "trainer_grouped": "Trainer, group_by_length",
    "trainer_flattened": "Trainer, padding-free",
    "trl": "TRL SFT, packing",
}
PEERS = ("trainer", "trainer_grouped")  # what everyone is compared with
TEXT_ALONE = ("trainer_flattened", "trl")  # neither lays samples with images end to end
NOT_OF_FAMILIES = "headway_compiled"  # it would compile for longer than they train


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mixes = ["text", "images", "digits", *FAMILY_MIXES, "families", "all"]
    parser.add_argument("--mix", choices=mixes, default="all", help="data to compare on; all but the families")
    parser.add_argument("--rounds", type=int, default=4, help="interleaved rounds of every contender")
    parser.add_argument(
        "--steps", type=int, default=10, help="optimizer steps a round, warm-up included; not of the digits"
    )
    parser.add_argument("--digits-steps", type=int, default=42, help="the same of the digits, whose steps are short")
    parser.add_argument("--warmup", type=int, default=2, help="first steps of a round that are not timed")
    parser.add_argument("--batch", type=int, default=16, help="samples per optimizer step of text and images")
    parser.add_argument("--digits-batch", type=int, default=96, help="samples per optimizer step of the digits")
    parser.add_argument("--families-batch", type=int, default=8, help="samples per optimizer step of the families")
    parser.add_argument("--threads", type=int, help="CPU threads of both sides; PyTorch's own choice if not given")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--render", type=Path, help="only render this JSON record again")
    options = parser.parse_args()
    if options.render:
        print(render(json.loads(options.render.read_text(encoding="utf-8"))))
        return
    text = Shape(options.batch, options.steps, options.warmup)
    digits = Shape(options.digits_batch, options.digits_steps, options.warmup)
    families = Shape(options.families_batch, options.steps, options.warmup)
    of_family = options.mix in (*FAMILY_MIXES, "families")
    most = FAMILY_POOL_STEPS if of_family else POOL_STEPS
    for shape in (families,) if of_family else (text, digits):
        if not 1 <= shape.warmup < shape.steps <= most:
            parser.error(f"need 1 <= warm-up {shape.warmup} < steps {shape.steps} <= {most}")
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    record: dict[str, Any] = {"what": "throughput", "environment": environment(device), "rounds": options.rounds}
    record["mixes"] = []
    cases = {
        "text": (partial(text_mix, POOL_STEPS * text.batch), text),
        "images": (partial(images_mix, POOL_STEPS * text.batch), text),
        "digits": (partial(digits_mix, POOL_STEPS * digits.batch), digits),
    }
    cases |= {name: (partial(family_mix, name, FAMILY_POOL_STEPS * families.batch), families) for name in FAMILY_MIXES}
    asked = {"all": ["text", "images", "digits"], "families": list(FAMILY_MIXES)}
    for name in asked.get(options.mix, [options.mix]):
        make, shape = cases[name]
        record["mixes"].append(measure(make(), shape, options.rounds, device))
        write(result_paths(options.out, record), record, render(record))
    print(render(record))


def measure(mix: Mix, shape: Shape, num_rounds: int, device: torch.device) -> dict[str, Any]:
    """Run every contender in turn, round after round, so that a drift of the machine meets all of them."""
    losses = compare_first_losses(mix, shape.batch)
    if not all(math.isclose(loss, losses["trainer"], rel_tol=1e-4) for loss in losses.values()):
        raise SystemExit(f"{mix.name}: the sides do not compute the same: first losses are {losses}")
    cost_model = trace(build_model(mix, "sdpa", torch.device("cpu")))
    left_out = {*(() if mix.is_text else TEXT_ALONE), *([NOT_OF_FAMILIES] if mix.name in FAMILY_MIXES else ())}
    contenders = [name for name in TITLES if name not in left_out]
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for number in range(num_rounds):
        for name in contenders:
            found = rates(run(name, mix, shape, device), cost_model)
            rounds[name].append(found)
            rate = f"{found['tokens_per_s']:,.0f} tokens/s, {found['flops_per_s'] / 1e9:.1f} GFLOP/s"
            print(f"{mix.name}, round {number + 1}, {TITLES[name]}: {rate}", flush=True)
    return {
        "name": mix.name,
        "description": mix.description,
        "samples_per_step": shape.batch,
        "timed_steps": shape.steps - shape.warmup,
        "first_loss": losses,
        "contenders": {
            name: {"padding_share": 1 - found[0]["tokens"] / found[0]["slots"], "rounds": found}
            for name, found in rounds.items()
        },
    }


def rates(timing: Timing, cost_model: CostModel) -> dict[str, Any]:
    """What a contender reached in a round: real tokens, and FLOPs that their samples need at least, per second."""
    flops = cost_model.count(timing.work).total
    return {
        "wall_s": timing.wall_s,
        "cpu_s": timing.cpu_s,
        "tokens": timing.work.tokens,
        "patches": timing.work.patches,
        "slots": timing.slots,
        "flops": flops,
        "tokens_per_s": timing.work.tokens / timing.wall_s,
        "flops_per_s": flops / timing.wall_s,
    }


def run(name: str, mix: Mix, shape: Shape, device: torch.device) -> Timing:
    """Run one contender for one round."""
    if name in ("headway", "headway_compiled"):
        return run_headway(mix, shape, device, compiled=name == "headway_compiled")
    if name == "trl":
        return run_trl(mix, shape, device)
    sampling = "group_by_length" if name == "trainer_grouped" else "sequential"
    return run_trainer(mix, shape, device, sampling=sampling, flattened=name == "trainer_flattened")


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    parts = ["# Real tokens per second: packed against padded", ""]
    on_cpu = "nvidia" not in record["environment"]["device"].lower() and all(
        "cpu_s" in one for mix in record["mixes"] for one in mix["contenders"]["trainer"]["rounds"]
    )
    for mix in record["mixes"]:
        rows = []
        rounds = {name: entry["rounds"] for name, entry in mix["contenders"].items()}
        for name, entry in mix["contenders"].items():
            rate = spread([one["tokens_per_s"] for one in rounds[name]])
            rows.append(
                [
                    TITLES[name],
                    f"{rate['median']:,.0f}",
                    f"{rate['min']:,.0f} to {rate['max']:,.0f}",
                    f"{statistics.median(one['flops_per_s'] for one in rounds[name]) / 1e9:.1f}",
                    *(_times(rounds[name], rounds[other], "wall_s") for other in PEERS),
                    f"{100 * entry['padding_share']:.1f} %",
                    *([_times(rounds[name], rounds[other], "cpu_s") for other in PEERS] if on_cpu else []),
                ]
            )
        headings = ["", "tokens/s, median", "range", "useful GFLOP/s", "against padded", "against grouped", "padding"]
        headings += ["of processor time, against padded", "against grouped"] if on_cpu else []
        losses = mix["first_loss"]
        parts += [
            f"## {mix['name']}",
            "",
            f"{mix['description']}. {mix['samples_per_step']} samples per optimizer step, {mix['timed_steps']} timed "
            f"step{'' if mix['timed_steps'] == 1 else 's'} a round. First loss: "
            + ", ".join(f"{TITLES[name]} {loss:.6f}" for name, loss in losses.items())
            + ".",
            "",
            markdown_table(headings, rows),
            "",
        ]
    others = ""
    if any("trl" in mix["contenders"] for mix in record["mixes"]):
        others = (
            " Padding-free: the Trainer with transformers' DataCollatorWithFlattening. TRL: SFTTrainer with packing "
            "'bfd' into packs as long as a step's samples on average, one a step. Neither lays samples with images end "
            "to end."
        )
    if on_cpu:
        others += " Ratios of processor time leave out the time that other work on the machine took."
    done = sorted({len(entry["rounds"]) for mix in record["mixes"] for entry in mix["contenders"].values()})
    parts += [
        f"{' to '.join(map(str, done))} rounds, contenders interleaved within each; ratios are of useful FLOPs per "
        "second, taken within a round. "
        "Only real tokens count, and useful FLOPs are what `headway.count` finds for the very samples "
        "that were trained, without padding: where a contender trains other samples than the rest (group_by_length, "
        "TRL), they compare like work, and tokens do not. All sides: the same samples encoded beforehand and held in "
        "memory, the same initial weights, the same number of samples per optimizer step (and, but for group_by_length "
        "and TRL, the same ones), fused AdamW with decay groups, clipping at 1.0, the same threads, batches made in "
        "the main thread (the trainers' dataloaders have 0 workers). The Trainer: transformers.Trainer with sdpa "
        f"attention and a collator that pads to the longest sample of the batch.{others} No logging, "
        "saving or evaluation on any side. fp32 on a CPU, bf16 autocast on CUDA.",
        "",
        describe_environment(record),
        "",
    ]
    return "\n".join(parts)


def _times(rounds: list[dict[str, Any]], others: list[dict[str, Any]], clock: str) -> str:
    """Useful FLOPs per second of a clock as a multiple of another contender's, taken within each round."""
    pairs = zip(rounds, others, strict=True)
    ratio = spread([(one["flops"] / one[clock]) / (other["flops"] / other[clock]) for one, other in pairs])
    return f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})"


if __name__ == "__main__":
    main()
