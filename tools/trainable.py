"""Write docs/models.md: which families Headway trains, by the laws of tests/helpers/folders.py, run here.

    python -m tools.trainable docs/models.md        # some minutes; families whose packages are missing are refused

Small models of every family's own classes are trained on packs and on samples alone; what the page says was computed.
"""

import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import transformers

from headway.errors import HeadwayError
from headway.models.compiling import CompileWatch, compile_blocks
from headway.models.lora import adapter_modules, add_adapters, initialise_adapters
from headway.models.parallel.sequence import local_slots, share_packs
from headway.models.video import VideoProcessor
from headway.tracing import trace
from helpers.families import FAMILIES
from helpers.folders import CLOSE, COUNTED_OTHERWISE, TOLERANCES, VLM_FOLDERS, FamilyPair

PAGE = Path(__file__).parent / "trainable.md"  # the page's words; the table stands in place of {families}
NAMES = json.loads((Path(__file__).parent / "trainable.json").read_text(encoding="utf-8"))
_CLOSE = 1e-5


def main(target: Path) -> None:
    """Run the laws and write the page.

    Raises:
        SystemExit: a family breaks a law.
    """
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    missing = sorted(set(FAMILIES) - set(VLM_FOLDERS))
    if missing:
        raise SystemExit(f"These families need packages that are not installed here: {', '.join(missing)}.")
    shared = _all_shared()
    rows = [_row(family, shared[family]) for family in NAMES["families"]]
    words = PAGE.read_text(encoding="utf-8").replace("{families}", _table(rows))
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    target.write_text(words.replace("{versions}", versions), encoding="utf-8")


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
        return {
            "family": NAMES["families"][family],
            "reads": _reads(pair),
            "packed = alone": f"{error:.0e}",
            "FLOPs": "as computed" if not reason else "see notes",
            "compile": _outcome(_compiled, pair),
            "sequence parallel": shared,
            "LoRA": _outcome(_adapted, pair),
            "notes": "; ".join(notes),
        }


def _reads(pair: FamilyPair) -> str:
    media, processor = pair.encoder.media, pair.encoder.processor
    kinds = ["images"] * (media.images is not None or media.processed is not None)
    kinds += ["video"] * isinstance(getattr(processor, "video_processor", None), VideoProcessor)
    return ", ".join(kinds + ["sound"] * (media.sounds is not None))


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
    main(Path(sys.argv[1]))
