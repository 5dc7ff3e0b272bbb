"""Write docs/models.md: which models Headway trains, by laws and trials that are run here.

    python -m tools.trainable docs/models.md                    # half an hour of one core
    python -m tools.trainable docs/models.md --only types       # the list of all types, some minutes
    python -m tools.trainable docs/models.md --only families    # the table of families with processors

Small models of every family's own classes are trained on packs and on samples alone (the laws of
tests/helpers/folders.py; families whose packages are missing are refused). Every type that transformers registers as a
causal or an image-text model is tried as `headway train` tries it before its first step (`headway.models.trial`), from
the default configuration of its class, with the settings of trainable.json where transformers' own defaults do not make
a model. Each is tried in a process of its own, with limits of time and memory. What is not run again stays as it is.
"""

import argparse
import json
import multiprocessing
import os
import re
import resource
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import transformers

from headway.data.media.media_reader import OPENERS
from headway.errors import HeadwayError
from headway.models.compiling import CompileWatch, compile_blocks
from headway.models.head import ChunkedLoss
from headway.models.load import load_model
from headway.models.lora import adapter_modules, add_adapters, initialise_adapters
from headway.models.parallel.sequence import local_slots, share_packs
from headway.models.trial import verdict_on
from headway.models.video import VideoProcessor
from headway.tracing import trace
from helpers.families import FAMILIES
from helpers.folders import CLOSE, COUNTED_OTHERWISE, TOLERANCES, VLM_FOLDERS, FamilyPair
from tools.sweep.__main__ import architectures
from tools.sweep.defaults import fit_defaults

PAGE = Path(__file__).parent / "trainable.md"  # the page's words; what was run stands in place of {families}, {types}
NAMES = json.loads((Path(__file__).parent / "trainable.json").read_text(encoding="utf-8"))
_CLOSE = 1e-5
_LIMIT_S, _LIMIT_BYTES = 300, 12 << 30  # limits of one type
_PACKAGE = re.compile(r"requires the (\w+) library")
_HEADS = {
    "packed": "A pack is its segments",
    "apart": "Each segment runs by itself: slower, and on one process",
    "refused": "Refused",
    "package": "Needs another package",
    "untried": "Not known, as no small copy of the default configuration runs",
}


def main(target: Path, only: str | None = None) -> None:
    """Run laws and trials, and write the page.

    Args:
        target: the page.
        only: "families" or "types"; both are run when None.

    Raises:
        SystemExit: a family breaks a law.
    """
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    words = PAGE.read_text(encoding="utf-8")
    for name, run in (("families", _families), ("types", _types)):
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        text = run() if only in (None, name) else _between(target.read_text(encoding="utf-8"), start, end)
        words = words.replace(f"{{{name}}}", start + text + end)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    target.write_text(words.replace("{versions}", versions), encoding="utf-8")


def _between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]


def listed(page: str) -> dict[str, str]:
    """Read which heading of the page's list each model type stands under, by its keys here."""
    found, part = {}, _between(page, "<!-- types -->\n", "\n<!-- end of types -->")
    for key, head in _HEADS.items():
        section = _between(f"{part}\n### ", f"### {head}\n", "\n### ")
        rows = re.findall(r"^\| `.*|^`.*", section, re.MULTILINE)
        found |= {kind: key for row in rows for kind in re.findall(r"`([\w.-]+)`", row.split(" | ")[0])}
    return found


def registered() -> list[str]:
    """Model types that transformers registers as causal or image-text models."""
    kinds = [kind for task, kind, _ in architectures() if not task.startswith("sequence")]
    return sorted(set(kinds))


def outcome_of(kind: str) -> tuple[str, str]:
    """Try a type: a key of the page's list, and what is to be said of the type there."""
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_attempt, args=(kind, send))
    process.start()
    outcome = receive.recv() if receive.poll(_LIMIT_S) else ("untried", f"its trial took more than {_LIMIT_S} s")
    process.kill()
    process.join()
    return outcome


def _attempt(kind: str, send: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES))
    try:
        send.send(_tried(kind))
    except Exception as error:  # noqa: BLE001  # any failure of foreign code is a result here
        send.send(("untried", f"{type(error).__name__}: {' '.join(str(error).split())}"))


def _tried(kind: str) -> tuple[str, str]:
    settings = NAMES["settings"].get(kind, {})
    config = transformers.CONFIG_MAPPING[kind](**settings)
    fit_defaults(config)
    verdict = verdict_on(config)
    if verdict.mode == "untried" and (package := _PACKAGE.search(verdict.reason)):
        return "package", package[1]
    details = [verdict.reason] * bool(verdict.reason)
    if verdict.media_error is not None:
        details.append("tried with text alone")
    if verdict.mode in ("packed", "apart"):
        model = load_model(config, random_init=True, device="meta")
        try:
            ChunkedLoss(model, chunk=1)
        except HeadwayError:
            details.append("with `speed.loss_chunk: null`")
    return verdict.mode, "; ".join(details)


def _types() -> str:
    """Try every type; the page's list."""
    outcomes = {}
    for kind in registered():
        outcomes[kind] = outcome_of(kind)
        print(kind, *outcomes[kind], flush=True)
    return listing(outcomes)


def listing(outcomes: dict[str, tuple[str, str]]) -> str:
    """Write outcomes of types as the page's list."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for kind, (key, detail) in outcomes.items():
        found[key][_short(detail)].append(kind)
    lines = [f"{len(outcomes)} types: {', '.join(_count(key, found[key].values()) for key in _HEADS)}.", ""]
    for key, head in _HEADS.items():
        by_detail = found[key]
        if key == "untried":  # whatever another's code raised there says nothing of the model
            by_detail = {"": sorted(kind for kinds in by_detail.values() for kind in kinds)}
        lines += [f"### {head}", ""]
        if plain := by_detail.pop("", []):
            lines += [_names(plain), ""]
        if by_detail:
            lines += [f"| types | {'package' if key == 'package' else 'note'} |", "| --- | --- |"]
            lines += [f"| {_names(kinds)} | {detail} |" for detail, kinds in sorted(by_detail.items())]
            lines.append("")
    return "\n".join(lines).rstrip()


def _count(key: str, kinds: Iterable[list[str]]) -> str:
    words = {"packed": "packed", "apart": "segment by segment", "refused": "refused", "package": "need another package"}
    return f"{sum(map(len, kinds))} {words.get(key, 'not known')}"


def _names(kinds: list[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def _short(detail: str) -> str:
    """Text on a type, without errors of others' code and numbers of its small copy, and no longer than a cell."""
    detail = re.sub(r" \(\w+Error: .*\)", "", detail)
    text = re.sub(r"\b\d[\d.]*\b", "N", detail).replace("|", "/").replace("\n", " ")
    return text if len(text) <= 160 else text[:157] + "..."


def _families() -> str:
    """Run the laws on families with processors; a table."""
    missing = sorted(set(FAMILIES) - set(VLM_FOLDERS))
    if missing:
        raise SystemExit(f"These families need packages that are not installed here: {', '.join(missing)}.")
    shared = _all_shared()
    return _table([_row(family, shared[family]) for family in NAMES["families"]])


def _row(family: str, shared: str) -> dict[str, str]:
    print(family, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pair = FamilyPair(family, Path(folder))
        error, leak = pair.packing_error(), pair.leak()
        counted, computed = pair.attended_flops()
        sign, _, reason = COUNTED_OTHERWISE.get(family, (0, "", ""))
        kept = error < TOLERANCES.get(family, CLOSE) and leak < _CLOSE and pair.wrong_lengths() == []
        kept = kept and pair.unexplained_flops() == [] and (counted > computed) - (counted < computed) == sign
        if not kept:
            raise SystemExit(f"{family} breaks a law: error {error}, leak {leak}, counted {counted} of {computed}.")
        needs = getattr(FAMILIES.get(family), "needs", ())
        notes = [f"needs {', '.join(needs)}"] * bool(needs) + [reason] * bool(reason)
        notes += ["blocks are not compiled"] * (_outcome(_compiled, pair) == "no")
        notes += ["no adapters on all linear modules"] * (_outcome(_adapted, pair) == "no")
        return {
            "family": NAMES["families"][family],
            "reads": _reads(pair),
            "packed = alone": f"{error:.0e}",
            "sequence parallel": shared,
            "notes": "; ".join(notes),
        }


def _reads(pair: FamilyPair) -> str:
    media, processor = pair.encoder.media, pair.encoder.processor
    kinds = ["images"] * (media.images is not None or media.processed is not None)
    kinds += ["video"] * isinstance(getattr(processor, "video_processor", None), VideoProcessor)
    return ", ".join(kinds + ["sound"] * (OPENERS["audio"](processor) is not None))


def _outcome(tried: Any, pair: FamilyPair) -> str:
    """Yes if the losses stay the same, else why not."""
    before, _ = pair.packed()
    try:
        after = tried(pair)
    except (HeadwayError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        print("  ", tried.__name__, type(error).__name__, str(error)[:300], flush=True)
        return "no"
    close = all(abs(a - b) / b < _CLOSE for a, b in zip(after, before, strict=True))
    return "yes" if close else "no"


def _compiled(pair: FamilyPair) -> list[float]:
    compile_blocks(pair.model, CompileWatch(), backend="eager")
    losses, _ = pair.packed()
    for module in pair.model.modules():
        vars(module).pop("forward", None)
    return losses


def _adapted(pair: FamilyPair) -> list[float]:
    modules = adapter_modules(trace(pair.model), None)
    add_adapters(pair.model, modules, rank=2, alpha=4.0, dropout=0.0, base="")
    initialise_adapters(pair.model, 0, "cpu")
    losses, gradients = pair.packed()
    if not any(".lora_B." in name and gradient.any() for name, gradient in gradients.items()):
        raise ValueError("no adapter learns")
    return losses


def _all_shared() -> dict[str, str]:
    """For every family, whether two processes that share a pack get the losses of one that has it alone."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        processes.spawn(_share_all, (port, folder), nprocs=2)
        return dict(json.loads((Path(folder) / "found.json").read_text(encoding="utf-8")))


def _share_all(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    pairs = {}
    for family in NAMES["families"]:  # before the processes meet: of those, transformers has only the first write files
        mine = Path(folder) / f"{family}-{rank}"
        mine.mkdir()
        pairs[family] = FamilyPair(family, mine)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for family, pair in pairs.items():
        labels_T = pair.batch.labels_1T[0]
        with torch.no_grad():
            whole = pair.model(**pair.batch.model_inputs()).logits[0]
            try:
                share_packs(pair.model, group)
                part = pair.model(**pair.batch.model_inputs()).logits[0]
                local = local_slots(len(labels_T), group)
                found[family] = "yes" if torch.allclose(part, whole[local], rtol=1e-3, atol=1e-4) else "no"
            except (HeadwayError, RuntimeError, ValueError, TypeError, AttributeError) as error:
                print("  ", family, type(error).__name__, str(error)[:200], flush=True)
                found[family] = "no"
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _table(rows: list[dict[str, str]]) -> str:
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([row[head] for head in heads] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write docs/models.md: which models Headway trains.")
    parser.add_argument("page", type=Path, help="Markdown file to write")
    parser.add_argument(
        "--only", choices=("families", "types"), help="run this part; the other stays as the page has it"
    )
    options = parser.parse_args()
    main(options.page, options.only)
