"""Loading: images per second of Headway's whole pipeline, against bare decoding and resizing on the same cores.

    .venv/bin/python benchmarks/loading.py         # minutes; run on a quiet machine

Everyone reads the same chats, one JPEG photograph each, and nothing trains meanwhile. The limit opens, decodes and
resizes each file with Pillow and throws the result away. Writes benchmarks/results/loading_<hardware>_<yyyymm>.json and
the .md table rendered from it.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from headway.data import Collator, Encoder
from headway.data.bad_rows import BadSamples
from headway.data.feed import IndexedFeed, PackMaker, Share
from headway.data.index import build_index
from headway.data.media.media_reader import ImagePatches
from headway.data.pool import prepare_worker, worker_context
from headway.data.sources import open_source
from headway.models import load_processor
from headway.packing import Budget, Items, Order, Plan
from headway.synthetic.processor import write_processor
from record import RESULTS, describe_environment, environment, markdown_table, result_paths, spread, write

QUESTION = "What does the picture show? Describe it in one sentence."
ANSWER = "A field of colours that no camera has seen, smooth in places and rough in others."
SIDES = (480, 640, 800, 1024)  # [pixels]
PATCH, MERGE, MOST_PIXELS = 14, 2, 1280 * 28 * 28  # as Qwen2.5-VL
TOKENS_PER_PACK = 8192


@dataclass(frozen=True)
class Photographs:
    """The dataset: its folder, its files and the size that the processor brings each to, (width, height)."""

    folder: Path
    files: tuple[Path, ...]
    sizes: tuple[tuple[int, int], ...]


def main() -> None:
    """Measure, write the record, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the record and the table")
    parser.add_argument("--images", type=int, default=1200, help="images of the dataset")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each of all contenders in turn")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="worker processes of everyone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        os.environ["HEADWAY_CACHE"] = str(Path(name) / "cache")
        model = write_processor(
            Path(name) / "model", [QUESTION, ANSWER], PATCH, MERGE, max_pixels=MOST_PIXELS, min_pixels=4 * 28 * 28
        )
        data = write_photographs(Path(name) / "data", options.images, model)
        workers = options.workers
        contenders: dict[str, Callable[[], float]] = {
            "limit: Pillow decodes and resizes": partial(decode_and_resize, data, workers),
            "Headway: indexed feed": partial(feed, data, model, workers),
            "Hugging Face processor in a DataLoader": partial(loader, ByProcessor(data, model), workers),
            "plain Dataset and DataLoader": partial(loader, Plain(data), workers),
        }
        seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
        for _ in range(options.rounds):
            for contender, run in contenders.items():
                seconds[contender].append(run())
                print(f"{contender}: {options.images / seconds[contender][-1]:.0f} images/s", flush=True)
    record: dict[str, Any] = {
        "what": "loading",
        "environment": environment(torch.device("cpu")),
        "images": options.images,
        "workers": workers,
        "rounds": options.rounds,
        "images_per_s": {name: spread([options.images / s for s in times]) for name, times in seconds.items()},
    }
    limit = record["images_per_s"]["limit: Pillow decodes and resizes"]["median"]
    record["share_of_limit"] = {name: rate["median"] / limit for name, rate in record["images_per_s"].items()}
    table = render(record)
    write(result_paths(options.out, record), record, table)
    print(table)


def write_photographs(folder: Path, count: int, model: Path) -> Photographs:
    """Write chats of one JPEG each: smooth colours with some noise, so that files have the size of photographs."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    files, sizes, lines = [], [], []
    patches = ImagePatches(load_processor(model).image_processor)
    for number in range(count):
        height, width = (int(side) for side in rng.choice(SIDES, 2))
        coarse = Image.fromarray(rng.integers(0, 255, (12, 12, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        rough = rng.normal(0, 6, (height, width, 1)).astype(np.int16)
        file = folder / f"{number:05d}.jpg"
        Image.fromarray(np.clip(smooth + rough, 0, 255).astype(np.uint8)).save(file, quality=88)
        _, rows, columns = patches.grid(height, width)
        files.append(file)
        sizes.append((columns * PATCH, rows * PATCH))
        question = [{"type": "image", "image": file.name}, {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": ANSWER}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return Photographs(folder, tuple(files), tuple(sizes))


def resized(file: Path, size: tuple[int, int]) -> Image.Image:
    """What every contender has to do with a file."""
    with Image.open(file) as image:
        return image.convert("RGB").resize(size, Image.Resampling.BICUBIC)


def _decode(chunk: Sequence[tuple[Path, tuple[int, int]]]) -> int:
    return sum(resized(*one).width > 0 for one in chunk)


def decode_and_resize(data: Photographs, workers: int) -> float:
    """Time bare decoding and resizing, in processes that are up already [s]."""
    work = list(zip(data.files, data.sizes, strict=True))
    chunks = [work[start : start + 8] for start in range(0, len(work), 8)]
    with ProcessPoolExecutor(workers, mp_context=worker_context(), initializer=prepare_worker) as pool:
        list(pool.map(_decode, chunks[:workers]))
        start_s = time.perf_counter()
        assert sum(pool.map(_decode, chunks)) == len(work)
        return time.perf_counter() - start_s


def feed(data: Photographs, model: Path, workers: int) -> float:
    """Time Headway's whole pipeline over one epoch, from files to collated packs, in processes that are up [s]."""
    encoder = Encoder(load_processor(model))
    source = open_source(data.folder / "chats.jsonl")
    items, planned = Items.build({source.name: build_index(source, encoder, workers=0)}, Budget(TOKENS_PER_PACK))
    plan = Plan(items, Order.epochs(items.sizes, 2), Budget(TOKENS_PER_PACK), packs_per_step=1)
    maker = PackMaker((source,), encoder, Collator(pixel_scale=encoder.pixel_scale), skips=False)
    with IndexedFeed(plan, maker, Share(workers=workers), BadSamples(), planned=planned) as packs:
        for _ in range(2 * workers):
            next(packs)
        start_s, images = time.perf_counter(), 0
        while images < len(data.files):
            images += sum(batch.num_images for batch in next(packs))
        return (time.perf_counter() - start_s) * len(data.files) / images


class ByProcessor(Dataset[Any]):
    """Chats through the model's own processor, one at a time, as a trainer's collator would ask for them."""

    def __init__(self, data: Photographs, model: Path) -> None:
        self.data, self.processor = data, load_processor(model)

    def __len__(self) -> int:
        return len(self.data.files)

    def __getitem__(self, number: int) -> Any:
        parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": ANSWER}]
        processor: Any = self.processor
        with Image.open(self.data.files[number]) as image:
            text = processor.apply_chat_template(messages, tokenize=False)
            return dict(processor(text=[text], images=[image.convert("RGB")], return_tensors="pt"))


class Plain(Dataset[Any]):
    """Images decoded, resized and normalised to floats, and nothing else."""

    def __init__(self, data: Photographs) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data.files)

    def __getitem__(self, number: int) -> torch.Tensor:
        pixels_HWC = np.asarray(resized(self.data.files[number], self.data.sizes[number]))
        return torch.from_numpy(pixels_HWC.transpose(2, 0, 1) / np.float32(127.5) - np.float32(1))


def _alone(samples: list[Any]) -> Any:
    return samples[0]


def loader(dataset: Dataset[Any], workers: int) -> float:
    """Time a DataLoader over a dataset, in processes that are up already [s]."""
    context = worker_context()
    batches = DataLoader(
        dataset, num_workers=workers, collate_fn=_alone, multiprocessing_context=context, persistent_workers=True
    )
    iterator = iter(batches)
    warm = 2 * workers * 2
    for _ in range(warm):
        next(iterator)
    start_s = time.perf_counter()
    rest = sum(1 for _ in iterator)
    return (time.perf_counter() - start_s) * (rest + warm) / rest


def render(record: dict[str, Any]) -> str:
    """The table."""
    rows = [
        [
            name,
            f"{rate['median']:.0f}",
            f"{rate['min']:.0f} to {rate['max']:.0f}",
            f"{record['share_of_limit'][name]:.0%}",
        ]
        for name, rate in record["images_per_s"].items()
    ]
    return (
        f"# Loading {record['images']} photographs with {record['workers']} worker processes\n\n"
        + markdown_table(["", "images/s", "range", "of the limit"], rows)
        + f"\n\nMedian of {record['rounds']} rounds, each of all in turn. {describe_environment(record)}\n"
    )


if __name__ == "__main__":
    main()
