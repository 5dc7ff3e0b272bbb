"""Real tokens and useful FLOPs per second: `headway train`, transformers.Trainer three ways, and TRL's packs.

All are measured in one interleaved run, with Headway's step alone beside them.

    .venv/bin/python benchmarks/throughput.py            # about half an hour on 2 cores; run on a quiet machine
    .venv/bin/python benchmarks/throughput.py --mix text --rounds 1 --steps 6
    .venv/bin/python benchmarks/throughput.py --mix families --threads 1 --rounds 3 --steps 4 --warmup 1

Writes benchmarks/results/throughput_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from contenders import Shape, build_model, compare_first_losses, run_headway, run_trainer, run_trl
from family_mixes import FAMILY_MIXES, family_mix
from headway.count import CostModel
from headway.tracing import trace
from headway_run import AHEAD, WORKERS, first_loss, place_of_encoding, run_headway_train, write_weights
from mixes import Mix, digits_mix, images_mix, text_mix
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, spread, write

POOL_STEPS = 64  # samples for this many steps are at hand: group_by_length needs many to group well
FAMILY_POOL_STEPS = 32  # the pixels of processed images take more memory
TITLES = {
    "trainer": "Trainer, padded to the longest",
    "headway_train": "headway train",
    "headway_train_uncached": "headway train, samples encoded anew",
    "headway_train_compiled": "headway train, compiled",
    "headway": "Headway's step alone",
    "headway_compiled": "Headway's step alone, compiled",
    "trainer_grouped": "Trainer, group_by_length",
    "trainer_flattened": "Trainer, padding-free",
    "trl": "TRL SFT, packing",
}
PEERS = ("trainer", "trainer_grouped")  # what everyone is compared with
TEXT_ALONE = ("trainer_flattened", "trl")  # neither lays samples with images end to end
TRAIN = ("headway_train", "headway_train_uncached", "headway_train_compiled")  # whole runs, in processes of their own
NOT_OF_FAMILIES = ("headway_compiled", "headway_train_compiled")  # they would compile for longer than they train


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mixes = ["text", "images", "digits", *FAMILY_MIXES, "families", "all"]
    parser.add_argument("--mix", choices=mixes, default="all", help="data to compare on; all but the families")
    parser.add_argument(
        "--only", nargs="+", choices=TITLES, default=[*TITLES], help="contenders; those to compare with always run"
    )
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
    record |= {"workers": WORKERS, "head": "labelled tokens", "mixes": []}
    cases = {
        "text": (partial(text_mix, POOL_STEPS * text.batch), text),
        "images": (partial(images_mix, POOL_STEPS * text.batch), text),
        "digits": (partial(digits_mix, POOL_STEPS * digits.batch), digits),
    }
    cases |= {name: (partial(family_mix, name, FAMILY_POOL_STEPS * families.batch), families) for name in FAMILY_MIXES}
    asked = {"all": ["text", "images", "digits"], "families": list(FAMILY_MIXES)}
    for name in asked.get(options.mix, [options.mix]):
        make, shape = cases[name]
        with tempfile.TemporaryDirectory() as folder:
            record["mixes"].append(measure(make(folder=Path(folder)), shape, options, device))
        write(result_paths(options.out, record), record, render(record))
    print(render(record))


def measure(mix: Mix, shape: Shape, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Run every contender in turn, round after round, so that a drift of the machine meets all of them."""
    cost_model = trace(build_model(mix, "sdpa", torch.device("cpu")))
    losses = compare_first_losses(mix, shape.batch)
    write_weights(mix)
    losses["headway_train"] = first_loss(mix, shape.batch, cost_model)
    if not all(math.isclose(loss, losses["trainer"], rel_tol=1e-4) for loss in losses.values()):
        raise SystemExit(f"{mix.name}: the sides do not compute the same: first losses are {losses}")
    left_out = {
        *(("headway_train_uncached",) if mix.is_text else TEXT_ALONE),
        *(NOT_OF_FAMILIES if mix.name in FAMILY_MIXES else ()),
    }
    contenders = [name for name in TITLES if name in {*options.only, *PEERS} - left_out]
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    if TRAIN[0] in contenders and not mix.is_text:
        run_headway_train(mix, shape, device)  # fills the cache of encoded samples, as a first epoch does
    for number in range(options.rounds):
        for name in contenders:
            load = os.getloadavg()[0]
            found = {**rates(run(name, mix, shape, device, cost_model)), "load": round(load, 2)}
            rounds[name].append(found)
            rate = f"{found['tokens_per_s']:,.0f} tokens/s, {found['flops_per_s'] / 1e9:.1f} GFLOP/s"
            rate += f" ({found['flops'] / found['cpu_s'] / 1e9:.1f} of processor time), load {load:.1f}"
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


def rates(found: dict[str, Any]) -> dict[str, Any]:
    """Add what a contender reached in a round: real tokens, and FLOPs that their samples need at least, per second."""
    wall_s = found["wall_s"]
    return {**found, "tokens_per_s": found["tokens"] / wall_s, "flops_per_s": found["flops"] / wall_s}


def run(name: str, mix: Mix, shape: Shape, device: torch.device, cost_model: CostModel) -> dict[str, Any]:
    """Run one contender for one round."""
    compiled = name.endswith("_compiled")
    if name in TRAIN:
        return run_headway_train(mix, shape, device, compiled=compiled, cached=not name.endswith("_uncached"))
    if name.startswith("headway"):
        timing = run_headway(mix, shape, device, compiled=compiled)
    elif name == "trl":
        timing = run_trl(mix, shape, device)
    else:
        sampling = "group_by_length" if name == "trainer_grouped" else "sequential"
        timing = run_trainer(mix, shape, device, sampling=sampling, flattened=name == "trainer_flattened")
    return {
        "wall_s": timing.wall_s,
        "cpu_s": timing.cpu_s,
        "tokens": timing.work.tokens,
        "patches": timing.work.patches,
        "slots": timing.slots,
        "flops": cost_model.count(timing.work).total,
    }


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
                    TITLES[name] + (" (dense mask)" if name in TEXT_ALONE else ""),
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
    parts += [*_notes(record, on_cpu=on_cpu), describe_environment(record), ""]
    return "\n".join(parts)


def _notes(record: dict[str, Any], *, on_cpu: bool) -> list[str]:
    """Paragraphs on what the rows are and how they were measured."""
    entries = [(name, entry["rounds"]) for mix in record["mixes"] for name, entry in mix["contenders"].items()]
    names = {name for name, _ in entries}
    # How it was measured, and what all rows share.
    done = sorted({len(rounds) for _, rounds in entries})
    loads = [one["load"] for _, rounds in entries for one in rounds if "load" in one]
    has_train = TRAIN[0] in names
    method = (
        f"{' to '.join(map(str, done))} {'round' if done == [1] else 'rounds'}, contenders interleaved within each; "
        "ratios are of useful FLOPs per second, taken within a round. Only real tokens count, and useful FLOPs are "
        "what `headway.count` finds for the very samples that were trained, without padding"
        f"{' and with a head on labelled tokens alone' if 'head' in record else ''}: where a contender trains "
        "other samples than the rest "
        f"(group_by_length, TRL{', headway train' if has_train else ''}), they compare like work, and tokens do not."
    )
    if on_cpu:
        method += " Ratios of processor time leave out the time that other work on the machine took."
    if loads:
        method += f" Load of the machine as rounds began: {min(loads):.1f} to {max(loads):.1f}."
    shared = (
        "All sides: the same initial weights, fused AdamW with decay groups, a constant learning rate, clipping at "
        "1.0, the same threads, no checkpoint and no evaluation within timed steps; fp32 on a "
        f"CPU, bf16 autocast on CUDA. {'All but headway train get' if has_train else 'They get'} the same samples, "
        "encoded beforehand and held in memory, but for TRL as many per optimizer step, and but for TRL and "
        "group_by_length the same ones, and log nothing."
    )
    # The rows.
    rows = [
        "* Trainer: transformers.Trainer with sdpa attention and a collator that pads to a batch's longest sample.",
        "* Headway's step alone: a loop over packs of exactly those samples, with Headway's model, collator and loss "
        "and PyTorch's optimizer; without its index, plan, feed, meter and records.",
    ]
    if has_train:
        shares = [one["recorded_s"] / one["wall_s"] for name, rounds in entries if name in TRAIN for one in rounds]
        rows.append(
            "* headway train: the command, in a process of its own. It reads the samples from files (token ids; chats "
            f"with images), and encodes them while it trains, {place_of_encoding(record)}, at most {AHEAD} packs "
            "ahead. Index, plan, meter and records are at work; the automatic profile is on, as it is by default, and "
            "leaves out runs as short as these. One pack a step, of as many tokens as a step of the others on average. "
            "The clock hangs on PyTorch's hook behind an optimizer's step, in all other rows behind a step as well; by "
            f"the runs' own records the timed steps took {min(shares):.3f} to {max(shares):.3f} of that time. FLOPs "
            "are those records'. Its first loss is of a run whose data are the first step's samples alone, and the "
            "FLOPs that this run records are what the other rows are billed for them."
        )
    if "headway_train_uncached" in names:
        rows.append(
            "* Samples with images are read from the cache of encoded samples, which an earlier run filled; one row "
            "encodes them anew (data.cache_encoded: off)."
        )
    if "trl" in names:
        rows.append(
            "* Padding-free: the Trainer with transformers' DataCollatorWithFlattening. TRL: SFTTrainer with packing "
            "'bfd' into packs as long as a step's samples on average, one a step. Neither lays samples with images end "
            "to end. Both run sdpa over a dense mask here, which computes every pair of a pack: nobody trains so, and "
            "with FlashAttention on CUDA these are the peers to beat."
        )
    return [method, "", shared, "", *rows, ""]


def _times(rounds: list[dict[str, Any]], others: list[dict[str, Any]], clock: str) -> str:
    """Useful FLOPs per second of a clock as a multiple of another contender's, taken within each round."""
    pairs = zip(rounds, others, strict=True)
    ratio = spread([(one["flops"] / one[clock]) / (other["flops"] / other[clock]) for one, other in pairs])
    return f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})"


if __name__ == "__main__":
    main()
