"""The engine on one device: text, image, video and question recipes at full width, and mfu-tracker's GPT-2 table.

    .venv/bin/python benchmarks/engine_gpu.py                                  # half an hour on one H200
    .venv/bin/python benchmarks/engine_gpu.py --only text --steps 4 --packs 2 --warmup 2 --profiles out      # 100 s
    .venv/bin/python benchmarks/engine_gpu.py --scale small                    # the same code, small, on a CPU as well

Each case is measured in a process of its own, so that an error, or memory that one case leaves behind, stays with it;
an error becomes the case's row. Record and table are written after every few steps. A call that finds a record in
--out goes on with it: what is done stays, what failed or found no time is measured again, and is why a call ends with
1. --budget-s shares the time out among the cases that are left; each chooses its number of steps by its first ones.

The whole model runs, in shorter packs with as many tokens a step if the memory plan asks for it; where even short packs
do not fit, as many language layers as do. The record says both. Widths, vocabulary, vision towers and settings are the
recipes'. benchmarks/README.md says what a machine without network
needs. Writes engine_gpu_<hardware>_<yyyymm>.json and the .md table rendered from it to --out.
"""

import argparse
import json
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import engine_case
from engine_case import Case, Conditions
from engine_setups import SETUPS, SMALL
from engine_table import render
from record import RESULTS, result_paths, write

GRACE_S = 20.0  # that a case may take past its deadline before its process is ended
LEAST_S = 5.0  # time below which no case is begun
ATTEMPTS = 3  # of a case, each with fewer layers, when the device's memory does not hold it
GROUPS = ("smoke", *SETUPS, "train", "gpt2")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_DISABLE_TORCH_CHECK": "1", "TOKENIZERS_PARALLELISM": "false"}
ENVIRONMENT |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # packs differ in size, so buffers do too


def main() -> None:
    """Measure, write the record, print the table."""
    options = parse()
    if options.render:
        print(render(json.loads(options.render.read_text(encoding="utf-8"))))
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM; what is measured is written"))
    end_s = time.monotonic() + options.budget_s
    machine = in_process(engine_case.describe_machine, (), end_s, lambda _: None)
    if machine["status"] != "done":
        sys.exit(f"the device cannot be used: {machine['error']}")
    on_cuda = machine["device_type"] == "cuda"
    if not on_cuda and options.scale == "full":
        sys.exit("there is no CUDA device here; --scale small runs the same code on a CPU")
    record = {"what": "engine_gpu", "scale": options.scale, **machine, "cases": {}}
    del record["status"], record["wall_s"]
    paths = result_paths(options.out, record)
    if paths[0].exists():
        before = json.loads(paths[0].read_text(encoding="utf-8"))
        if before["scale"] == options.scale:
            record["cases"] = before["cases"]
    cases = [case for case in cases_of(options, on_cuda=on_cuda) if not is_done(record, case.name) or options.again]
    for place, case in enumerate(cases):
        left_s = end_s - time.monotonic()
        share_s = left_s * case.weight / sum(other.weight for other in cases[place:])
        if left_s < LEAST_S:
            print(f"{case.name}: no time left", flush=True)
            continue
        row = measure(case, options, time.monotonic() + share_s, lambda row: save(paths, record, row))
        print(json.dumps({**row, "memory": None}), flush=True)
    save(paths, record)
    print(render(record))
    if not all(is_done(record, case.name) for case in cases):
        sys.exit("not all cases ran to their end; call again with the same --out to measure the others")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="some of the cases; all if not given")
    parser.add_argument(
        "--recipes", nargs="+", choices=SETUPS, default=SETUPS, help="of the smoke cases, those of these"
    )
    parser.add_argument("--steps", type=int, default=30, help="most counted steps of a case")
    parser.add_argument("--warmup", type=int, default=8, help="most steps before them")
    parser.add_argument("--packs", type=int, default=3, help="packs that are drawn once and taken in turn")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds for all cases together")
    parser.add_argument("--scale", choices=["full", "small"], default="full", help="small: sizes for a smoke test")
    parser.add_argument("--kernels", choices=["torch", "liger"], help="liger on CUDA where it is there, if not given")
    parser.add_argument("--eager", action="store_true", help="never compile")
    parser.add_argument("--variants", action="store_true", help="with either kernels, compiled and not")
    parser.add_argument("--recompute", help="as speed.recompute, or fullest: memory:SIZE with the most that fits")
    parser.add_argument("--attention", help="as speed.attention; the recipe's own if not given")
    parser.add_argument("--tokens-per-pack", type=int, help="as data.tokens_per_pack; the recipe's own if not given")
    parser.add_argument("--accumulation", type=int, default=1, help="packs of a step, as optim.accumulation")
    parser.add_argument("--separate-updates", action="store_true", help="AdamW in separate passes, never in one")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="a.b=c", help="of the recipe")
    parser.add_argument("--profiles", type=Path, help="folder of a profile of a step of each engine case")
    parser.add_argument("--again", action="store_true", help="measure what is done already once more")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--render", type=Path, help="only render this JSON record again")
    options = parser.parse_args()
    if min(options.steps, options.warmup, options.packs, options.accumulation) < 1:
        parser.error("--steps, --warmup, --packs and --accumulation are at least 1")
    if options.tokens_per_pack is not None and options.tokens_per_pack < (SMALL if options.scale == "small" else 1):
        parser.error(f"--tokens-per-pack {options.tokens_per_pack} leaves no token of a pack")
    return options


def cases_of(options: argparse.Namespace, *, on_cuda: bool) -> list[Case]:
    """The cases that were asked for, in order of worth."""
    has_liger = on_cuda and find_spec("liger_kernel") is not None
    kernels = options.kernels or ("liger" if has_liger else "torch")
    usual = (kernels, not options.eager)
    ways = [usual]
    if options.variants:
        both = ("torch", "liger") if has_liger else (kernels,)
        ways += [(k, c) for k in both for c in ((False,) if options.eager else (True, False)) if (k, c) != usual]
    found = []
    for group in (group for group in GROUPS if group in options.only):
        if group == "smoke":
            found += [Case(f"smoke {name}", name, *usual, layers=2, steps=2) for name in options.recipes]
        elif group == "gpt2":
            loops = [("eager", False), ("sdpa", False)] + ([] if options.eager else [("sdpa", True)])
            found += [
                Case(
                    f"gpt2 {rows} {attention}{' compiled' * c}",
                    "gpt2",
                    "torch",
                    c,
                    None,
                    options.steps,
                    rows,
                    attention,
                )
                for rows in (1, 8)
                for attention, c in loops
            ]
        else:
            setup, is_run = ("text", True) if group == "train" else (group, False)
            for kind, is_compiled in ways:
                name = f"{setup}, {kind}, {'compiled' if is_compiled else 'eager'}"
                name += ", headway train" * is_run
                name += f", attention {options.attention}" * bool(options.attention)
                name += f", recompute {options.recompute}" * bool(options.recompute)
                if options.tokens_per_pack is not None or options.accumulation > 1:
                    length = options.tokens_per_pack or SETUPS[setup].packing_length
                    name += f", packs {options.accumulation} x {length:,}"
                name += ", separate updates" * options.separate_updates
                name += "".join(f", {setting}" for setting in options.settings)
                found.append(Case(name, setup, kind, is_compiled, None, options.steps, weight=5.0, is_run=is_run))
    return found


def is_done(record: dict[str, Any], name: str) -> bool:
    """Whether a case has been measured to its end."""
    return bool(record["cases"].get(name, {}).get("status") == "done")


def measure(
    case: Case, options: argparse.Namespace, deadline_s: float, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure a case; with fewer layers once more where the device's memory does not hold it.

    Args:
        case: what.
        options: of the command line.
        deadline_s: when it must have ended, by `time.monotonic` [s].
        keep: given the row whenever there is more in it.
    """
    conditions = Conditions(
        options.scale == "small",
        options.packs,
        options.recompute,
        options.warmup,
        options.attention,
        options.profiles,
        options.tokens_per_pack,
        options.accumulation,
        options.separate_updates,
        tuple(options.settings),
    )
    too_large: list[int] = []
    while True:
        begun = {
            "case": case.name,
            "setup": case.setup,
            "kernels": case.kernels,
            "compiled": case.is_compiled,
            "rows": case.rows,
            "attention": case.attention,
            "too_large": too_large,
            "status": "running",
        }
        keep(begun)
        row = in_process(engine_case.measure, (case, conditions, deadline_s), deadline_s, keep, begun)
        keep(row)
        layers = row.get("layers") or case.layers or 0
        if row["status"] != "out of memory" or layers <= 1 or len(too_large) == ATTEMPTS - 1:
            return row
        too_large.append(layers)
        # each attempt has the device to itself, so trying the same again would change nothing
        case = replace(case, layers=layers - max(1, layers // 8))


def in_process(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    deadline_s: float,
    keep: Callable[[dict[str, Any]], None],
    begun: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Call a function in a process of its own.

    Args:
        work: the function, which a module has.
        arguments: of the function, but for `tell`.
        deadline_s: when it should have ended, by `time.monotonic`; it is ended a little later [s].
        keep: given the row whenever there is more in it.
        begun: the row so far.

    Returns:
        The row with everything that was told; `status` and `error` say how it ended, if need be in its place.
    """
    row = dict(begun or {})
    spawned = multiprocessing.get_context("spawn")
    ours, theirs = spawned.Pipe(duplex=False)
    process = spawned.Process(target=child, args=(work, arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    said_end = overran = False
    try:
        while ours.poll(max(0.0, min(deadline_s + GRACE_S - time.monotonic(), 1e6))):
            news = ours.recv()
            said_end |= "status" in news
            row |= news
            keep(row)
        overran = True
    except EOFError:
        process.join(GRACE_S)
    finally:
        process.kill()
        process.join()
    if not said_end:
        code = process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        late = ", as it went on past its time" if overran else ""
        row |= {"status": "error", "error": f"its process {how}{late}"}
    return row


def child(work: Callable[..., None], arguments: tuple[Any, ...], connection: Connection) -> None:
    """In a process of its own: call a function, send what it tells and how it ended."""
    began_s = time.monotonic()
    try:
        work(*arguments, connection.send)
        end = {"status": "done"}
    except engine_case.OutOfTimeError as error:
        end = {"status": "no time", "error": str(error)}
    except BrokenPipeError:
        return  # whoever asked is gone
    except Exception as error:  # noqa: BLE001 - whatever it is, it becomes the case's row, and the others go on
        traceback.print_exc()
        no_memory = isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error)
        end = {"status": "out of memory" if no_memory else "error", "error": f"{type(error).__name__}: {error}"[:2000]}
    with suppress(BrokenPipeError):
        connection.send({**end, "wall_s": time.monotonic() - began_s})


def save(paths: tuple[Path, Path], record: dict[str, Any], row: dict[str, Any] | None = None) -> None:
    """Write the record and the table, with what is new of one case."""
    if row is not None:
        record["cases"][row["case"]] = row
    write(paths, record, render(record))


if __name__ == "__main__":
    main()
