"""Pairs per second of DPO: `headway train` with a section of preferences, beside TRL's DPOTrainer.

All are measured in one interleaved run, on the same pairs of text and of text with images.

    .venv/bin/python benchmarks/preferences.py           # 10 to 12 minutes on 2 cores; run on a quiet machine
    .venv/bin/python benchmarks/preferences.py --mix text --rounds 1 --steps 4

Writes benchmarks/results/preferences_<hardware>_<yyyymm>.json and the .md table rendered from it.
"""

import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from contenders import Shape, build_model
from headway.count import CostModel
from headway.data.collate import Collator
from headway.tracing import trace
from headway_run import WORKERS, first_samples, packs_of, place_of_encoding, train, write_weights
from mixes import Mix, encoded
from preference_sides import BETA, FirstSteps, first_steps, pictured_pairs, reference_of, run_dpo, text_pairs
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, spread, write

TRL = {"trl": "TRL DPO, padded, stored reference", "trl_reference": "TRL DPO, padded, reference in each step"}
HEADWAY: dict[str, tuple[str, dict[str, Any]]] = {
    "headway_train": ("headway train, stored reference, shared prompts", {}),
    "headway_train_copies": ("headway train, stored reference, a prompt an answer", {"shared_prompts": False}),
}
"""Rows of `headway train`: a title, and settings of its section `preference` beside the loss and beta."""
TITLES = TRL | {name: title for name, (title, _) in HEADWAY.items()}
PEER = "trl"
MIXES: dict[str, Callable[..., Mix]] = {"text": text_pairs, "images": pictured_pairs}
LOG_P_CLOSE = 1e-4  # of log-probabilities, of their size
LOSS_CLOSE = 4e-3  # of losses; that of the second step follows from an update in float32, whose noise Adam scales up


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mix", choices=[*MIXES, "all"], default="all", help="pairs to compare on")
    parser.add_argument("--only", nargs="+", choices=TITLES, default=[*TITLES], help=f"contenders; {PEER} always runs")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of every contender")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of an epoch on average, warm-up included")
    parser.add_argument("--warmup", type=int, default=1, help="first steps of a round that are not timed")
    parser.add_argument("--batch", type=int, default=6, help="pairs per optimizer step")
    parser.add_argument("--threads", type=int, help="CPU threads of both sides; PyTorch's own choice if not given")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--render", type=Path, help="only render this JSON record again")
    options = parser.parse_args()
    if options.render:
        print(render(json.loads(options.render.read_text(encoding="utf-8"))))
        return
    if not 1 <= options.warmup < options.steps:
        parser.error(f"need 1 <= warm-up {options.warmup} < steps {options.steps}")
    if options.threads:
        torch.set_num_threads(options.threads)
    os.environ["TQDM_DISABLE"] = "1"  # TRL's bars would stand between our lines
    device = torch.device(options.device)
    record: dict[str, Any] = {"what": "preferences", "environment": environment(device) | {"trl": version("trl")}}
    record |= {"rounds": options.rounds, "workers": WORKERS, "mixes": []}
    for name in MIXES if options.mix == "all" else [options.mix]:
        with tempfile.TemporaryDirectory() as folder:
            mix = MIXES[name](options.batch * options.steps, folder=Path(folder))
            record["mixes"].append(measure(mix, options, device))
        write(result_paths(options.out, record), record, render(record))
    print(render(record))


def measure(mix: Mix, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Run an epoch of every contender in turn, round after round, so that a drift of the machine meets all of them."""
    shape = Shape(options.batch, options.steps, options.warmup)
    cost_model = trace(build_model(mix, "sdpa", torch.device("cpu")))
    write_weights(mix)
    contenders = [name for name in TITLES if name in {*options.only, PEER}]
    # All train on the same tokens with the same loss and the same update, or nothing is measured.
    first = {PEER: first_steps(mix, shape.batch)}
    first |= {name: first_of_headway(mix, shape.batch, name) for name in contenders if name in HEADWAY}
    for found in first.values():
        near = [abs(a - b) <= LOSS_CLOSE for a, b in zip(found.losses, first[PEER].losses, strict=True)]
        log_ps = zip(found.log_ps, first[PEER].log_ps, strict=True)
        if not all([*near, *(math.isclose(a, b, rel_tol=LOG_P_CLOSE) for a, b in log_ps)]):
            raise SystemExit(f"{mix.name}: the sides do not compute the same: first steps are {first}")
    stored = reference_of(mix)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for number in range(options.rounds):
        for name in contenders:
            load = os.getloadavg()[0]
            if name in HEADWAY:
                found = run_headway(mix, shape, device, name)
            else:
                found = run_trl(mix, shape, device, cost_model, stored if name == PEER else None)
            rounds[name].append({**found, "load": round(load, 2)})
            rates = f"{found['pairs'] / found['wall_s']:.2f} pairs/s, {found['tokens'] / found['wall_s']:,.0f} tokens/s"
            print(f"{mix.name}, round {number + 1}, {TITLES[name]}: {rates}, load {load:.1f}", flush=True)
    return {
        "name": mix.name,
        "description": mix.description,
        "num_pairs": len(mix.samples),
        "pairs_per_step": shape.batch,
        "warmup": shape.warmup,
        "first_steps": {name: found._asdict() for name, found in first.items()},
        "contenders": {
            name: {"padding_share": 1 - found[0]["tokens"] / found[0]["slots"], "rounds": found}
            for name, found in rounds.items()
        },
    }


def laid_out(mix: Mix, name: str) -> Mix:
    """The pairs of a mix as a row of `headway train` lays them out: prompts shared, or one before each answer."""
    if HEADWAY[name][1].get("shared_prompts", True) is False:
        return mix
    assert mix.files is not None  # the mix was made with a folder
    _, samples, _ = encoded(mix.files.model, mix.files.samples, shares_prompts=True)
    return Mix(mix.name, mix.description, mix.config, samples, mix.files)


def section_of(name: str) -> dict[str, Any]:
    """The section `preference` of a row of `headway train`."""
    return {"preference": {"loss": "sigmoid", "beta": BETA, **HEADWAY[name][1]}}


def first_of_headway(mix: Mix, batch: int, name: str) -> FirstSteps:
    """Two epochs of `headway train` on the first pairs alone, a step each."""
    data = first_samples(laid_out(mix, name), batch)
    _, records = train(mix, data, {"epochs": 2}, torch.device("cpu"), sections=section_of(name))
    if [record["preference"]["pairs"] for record in records] != [batch, batch]:
        raise SystemExit(f"{mix.name}: two epochs of {batch} pairs are steps of {records}")
    first, second = (record["loss"] for record in records)
    means = records[0]["preference"]
    return FirstSteps((first, second), (means["log_p_chosen"], means["log_p_rejected"]))


def run_headway(mix: Mix, shape: Shape, device: torch.device, name: str) -> dict[str, Any]:
    """An epoch of `headway train`; tokens and FLOPs are its own records'."""
    data = packs_of(laid_out(mix, name), shape)
    clock, records = train(mix, data, {"epochs": 1}, device, sections=section_of(name))
    num_pairs = sum(record["preference"]["pairs"] for record in records)
    if num_pairs != len(mix.samples):
        raise SystemExit(f"{mix.name}: an epoch of {len(mix.samples)} pairs has trained {num_pairs}")
    timed = records[shape.warmup :]
    flops = [record["flops"]["total"] for record in records]
    wall_s, cpu_s = clock.spent_s(shape.warmup)
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "steps": len(records),
        **{key: sum(record[key] for record in timed) for key in ("tokens", "slots")},
        "flops": sum(flops[shape.warmup :]),
        "pairs": num_pairs * sum(flops[shape.warmup :]) / sum(flops),
    }


def run_trl(
    mix: Mix, shape: Shape, device: torch.device, cost_model: CostModel, stored: list[dict[str, float]] | None
) -> dict[str, Any]:
    """An epoch of TRL's DPOTrainer; FLOPs are those of its pairs without padding, and without a reference."""
    timing, _ = run_dpo(mix, shape, device, stored)
    flops = cost_model.count(timing.work).total
    epoch = cost_model.count(Collator()(mix.samples).work(skips_unlabelled=True)).total
    return {
        "wall_s": timing.wall_s,
        "cpu_s": timing.cpu_s,
        "steps": shape.steps,
        "tokens": timing.work.tokens,
        "slots": timing.slots,
        "flops": flops,
        "pairs": len(mix.samples) * flops / epoch,
    }


def render(record: dict[str, Any]) -> str:
    """Render the Markdown page from the record."""
    parts = ["# Pairs per second of DPO: packed against padded", ""]
    on_cpu = "nvidia" not in record["environment"]["device"].lower()
    clocks = ["wall_s", "cpu_s"] if on_cpu else ["wall_s"]
    for mix in record["mixes"]:
        rows = []
        rounds = {name: entry["rounds"] for name, entry in mix["contenders"].items()}
        for name, entry in mix["contenders"].items():
            rate = spread([one["pairs"] / one["wall_s"] for one in rounds[name]])
            tokens = spread([one["tokens"] / one["wall_s"] for one in rounds[name]])
            rows.append(
                [
                    TITLES[name],
                    f"{rate['median']:.2f}",
                    f"{rate['min']:.2f} to {rate['max']:.2f}",
                    f"{tokens['median']:,.0f}",
                    f"{100 * entry['padding_share']:.1f} %",
                    *(_times(rounds[name], rounds[PEER], clock) for clock in clocks),
                ]
            )
        headings = ["", "pairs/s, median", "range", "tokens/s", "padding", "against TRL"]
        headings += ["of processor time"] if on_cpu else []
        first = "; ".join(
            f"{TITLES[name]} {found['losses'][0]:.6f} and {found['losses'][1]:.6f}, "
            f"{found['log_ps'][0]:.3f} and {found['log_ps'][1]:.3f}"
            for name, found in mix["first_steps"].items()
        )
        parts += [
            f"## {mix['name']}",
            "",
            f"{mix['description']}. {mix['num_pairs']} pairs, {mix['pairs_per_step']} per optimizer step, of which the "
            f"first {mix['warmup']} {'is' if mix['warmup'] == 1 else 'are'} not timed. Losses of two steps on the same "
            f"first pairs, and mean log-probabilities of their better and worse answers in the first [nats]: {first}.",
            "",
            markdown_table(headings, rows),
            "",
        ]
    return "\n".join([*parts, *_notes(record, on_cpu=on_cpu), describe_environment(record), ""])


def _notes(record: dict[str, Any], *, on_cpu: bool) -> list[str]:
    """Paragraphs on what the rows are and how they were measured."""
    entries = [(name, entry["rounds"]) for mix in record["mixes"] for name, entry in mix["contenders"].items()]
    names = {name for name, _ in entries}
    loads = [one["load"] for _, rounds in entries for one in rounds]
    method = (
        f"{record['rounds']} round{'' if record['rounds'] == 1 else 's'} of an epoch each, contenders interleaved "
        "within them; ratios are of pairs per second, taken within a round. Every contender trains every pair once. A "
        "pair is one of mean cost: the pairs of the timed steps are the epoch's, by the share of its useful FLOPs that "
        "those steps have. Real tokens are those of both answers with the prompt before each."
    )
    if on_cpu:
        method += " Ratios of processor time leave out the time that other work on the machine took."
    method += f" Load of the machine as rounds began: {min(loads):.1f} to {max(loads):.1f}."
    shared = (
        f"All: DPO (sigmoid, beta {BETA}), the same initial weights, fused AdamW with decay groups, a constant "
        "learning rate, clipping at 1.0, the same threads, no recomputation of layers, no checkpoint and no "
        "evaluation within timed steps; fp32 on a CPU, bf16 autocast on CUDA. Stored references are computed before "
        "the first step and outside the timed part, on both sides."
    )
    rows = [
        f"* {TITLES['trl']}: TRL {record['environment']['trl']}'s DPOTrainer with sdpa attention, rows padded to a "
        "batch's longest by its own collator, with tokens and pixels from memory, encoded beforehand. TRL does not "
        "offer stored references of images (`precompute_ref_log_probs` is an error there); here it is given them. Its "
        "`padding_free` is switched off in this version (it warns and pads), so there is no such row."
    ]
    if "trl_reference" in names:
        rows.append(f"* {TITLES['trl_reference']}: as TRL does unless told otherwise, by a second model.")
    rows += [
        f"* {TITLES[name]}: the command, in a process of its own. It reads pairs and images from files and encodes "
        f"them while it trains, {place_of_encoding(record)}. Index, plan, meter and records are at work. One pack a "
        f"step, of as many tokens as a step of TRL on average{_words(HEADWAY[name][1])}."
        for name in HEADWAY
        if name in names
    ]
    return [method, "", shared, "", *rows, ""]


def _words(settings: dict[str, Any]) -> str:
    return "".join(f"; `{key}: {json.dumps(value)}`" for key, value in settings.items())


def _times(rounds: list[dict[str, Any]], others: list[dict[str, Any]], clock: str) -> str:
    """Pairs per second of a clock as a multiple of another contender's, taken within each round."""
    pairs = zip(rounds, others, strict=True)
    ratio = spread([(one["pairs"] / one[clock]) / (other["pairs"] / other[clock]) for one, other in pairs])
    return f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})"


if __name__ == "__main__":
    main()
