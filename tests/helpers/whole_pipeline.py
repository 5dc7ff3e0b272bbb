"""Datasets of every kind on disk, and the feeds that a training configuration makes of them."""

import gzip
import json
from collections import Counter
from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import webdataset
from PIL import Image

from headway.config import parse_config
from headway.data import Encoder
from headway.data.feed import FeedReport
from headway.data.sources import open_source
from headway.models import load_model, load_processor, rope_index
from headway.models.parallel.ranks import Ranks
from headway.synthetic.processor import SPECIAL_TOKENS, write_processor
from headway.tracing import trace
from headway.train.data import open_feed
from helpers.fed_data import RememberingEncoder
from helpers.media_files import video
from helpers.tiny_models import PATCH, tiny_config

SHAPES = ((16, 16), (32, 48), (16, 64), (40, 24))  # (height, width) of pictures [pixels]
ROWS = {"pictures": 14, "table": 9, "shard": 10, "saved": 16, "films": 5, "text": 9, "ids": 7}


def write_model(folder):
    """A Qwen3-VL of a few thousand parameters, random but the same each time, its encoder and its cost model."""
    texts = ["Which picture is it? It is the one.", "How many words are there?"]
    processor = load_processor(write_processor(folder, texts, PATCH, max_pixels=16 * (2 * PATCH) ** 2))
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    names |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    tokens = {f"{name}_token_id": processor.tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    torch.manual_seed(0)
    config = tiny_config("qwen3_vl", len(processor.tokenizer), tokens)
    model = load_model(config, random_init=True).eval()
    return model, Encoder(processor, rope_index(model)), trace(model)


def write_sources(folder: Path):
    """One dataset of each kind, as the libraries that people use write them; gives each one's path by its name."""
    rng = np.random.default_rng(5)

    def png():
        height, width = SHAPES[rng.integers(len(SHAPES))]
        file = BytesIO()
        Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
        return file.getvalue()

    def turns(name, number, media=()):
        words = {"type": "text", "text": "Which picture is it? " * (1 + number * 5 % 4)}
        answer = f"It is {name} {number}."
        chat = [{"role": "user", "content": [*media, words]}, {"role": "assistant", "content": answer}]
        if number % 3 == 1:
            chat += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": f"Yes, {number}!"}]
        return chat

    for name in ("pictures", "films"):
        (folder / name).mkdir()
    lines = []
    for number in range(ROWS["pictures"]):
        media = [f"{number}_{place}.png" for place in range(number % 4)]
        for file in media:
            (folder / "pictures" / file).write_bytes(png())
        parts = [{"type": "image_url", "image_url": {"url": file}} for file in media]
        lines.append(json.dumps({"messages": turns("pictures", number, parts)}) + "\n")
    (folder / "pictures/a.jsonl").write_text("".join(lines[:5]))
    (folder / "pictures/b.jsonl").write_text("".join(lines[5:]))

    lines = []
    for number in range(ROWS["films"]):
        film = video(num_frames=8 + 4 * number, size=((32, 48), (48, 32))[number % 2])
        (folder / f"films/{number}.mp4").write_bytes(film.data)
        lines.append(json.dumps({"messages": turns("films", number, [{"type": "video", "video": f"{number}.mp4"}])}))
    (folder / "films/films.jsonl").write_text("\n".join(lines))

    rows = [
        {"messages": json.dumps(turns("table", number, [{"type": "image"}])), "images": [png()]}
        for number in range(ROWS["table"])
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "table.parquet", row_group_size=4)

    with webdataset.ShardWriter(str(folder / "shard-%03d.tar"), maxcount=4, verbose=0) as writer:
        for number in range(ROWS["shard"]):
            said = [{"from": "human", "value": "<image>\nWhich?"}, {"from": "gpt", "value": f"It is shard {number}."}]
            writer.write({"__key__": f"{number:04d}", "json": {"conversations": said}, "png": png()})

    saved = datasets.Dataset.from_dict({"messages": [json.dumps(turns("saved", n)) for n in range(ROWS["saved"])]})
    saved.save_to_disk(folder / "saved", num_shards=2)

    paragraphs = [" ".join(f"word {number} {place}" for place in range(3 + 17 * number)) for number in range(9)]
    (folder / "text.txt.gz").write_bytes(gzip.compress("\n\n".join(paragraphs).encode()))
    ids = rng.integers(len(SPECIAL_TOKENS), 256, (ROWS["ids"], 45))
    np.save(folder / "ids.npy", ids.astype(np.int32))
    paths = {name: str(folder / name) for name in ("pictures", "films", "saved")}
    paths |= {"table": str(folder / "table.parquet"), "shard": str(folder / "shard-*.tar")}
    return paths | {"text": str(folder / "text.txt.gz"), "ids": str(folder / "ids.npy")}


def wholes_of(paths, encoder):
    """Every sample encoded by itself, with what it was encoded from, by source, file and row."""
    found = {}
    for name, path in paths.items():
        source = open_source(path, name=name)
        assert len(source) == ROWS[name]
        for row in range(len(source)):
            found[key_of(source[row].origin)] = source[row], encoder.encode(source[row])
    return found


def key_of(origin):
    return origin.source, origin.file, origin.row


class SideBySide(Ranks):
    """One of several ranks that this process plays one after the other, so it waits for nobody."""

    def wait(self):
        """The others come when this one is done."""


class Pipeline:
    """What `headway train` puts together before its first step, for any number of ranks in this process.

    Args:
        folder: where sources and model are written.
        encodes_once: whether each sample is encoded once, however often it is read.
    """

    def __init__(self, folder, *, encodes_once=False):
        (folder / "sources").mkdir()
        self.paths = write_sources(folder / "sources")
        self.model, self.encoder, self.cost_model = write_model(folder / "model")
        if encodes_once:
            self.encoder = RememberingEncoder.of(self.encoder)
        self.wholes = wholes_of(self.paths, self.encoder)

    def play(self, train, ranks=1, accumulation=1, *, stream=None, state=None, **data):
        """The feeds of all ranks.

        Args:
            train: stages, as in the configuration; sources by name alone.
            ranks, accumulation: packs of a step are their product.
            stream: its settings; None for an index.
            state: where to go on from.
            **data: other settings of the data.
        """
        raw = {
            "model": {"path": "model"},
            "data": {"stages": train, "overlong": "split", "workers": 0, "stream": stream, **data},
            "optim": {"steps": 10**6, "lr": 1.0, "accumulation": accumulation},
            "run": {"folder": "run"},
        }
        config = parse_config(raw)
        players = [
            open_feed(config, self.encoder, self.model, self.cost_model, SideBySide(rank, ranks), pin_memory=False)
            for rank in range(ranks)
        ]
        for player in players if state else ():
            player.load_state_dict(state)
        return Players(players)

    def mix(self, **shares):
        """A stage that plays sources together, each with its settings: weight or epochs, and a limit."""
        return {"mix": [{"path": self.paths[name], "name": name, **share} for name, share in shares.items()]}

    def expected(self, names, tokens_per_pack, epochs=1):
        """Every piece of every sample of some sources, as often as it is to be trained on."""
        found = Counter()
        for (name, *place), (_, whole) in self.wholes.items():
            ids = whole.input_ids_S.tolist()
            for start in range(0, len(ids) if name in names else 0, tokens_per_pack):
                found[(name, *place), tuple(ids[start : start + tokens_per_pack])] += epochs
        return found


class Players:
    """The feeds of all ranks, a step at a time."""

    def __init__(self, feeds):
        self.feeds = feeds

    def steps(self, most=10**9):
        """The packs of all ranks, step by step, until the last rank has ended."""
        for _ in range(most):
            step = [batch for feed in self.feeds for batch in next(feed, [])]
            if not step:
                return
            yield step

    def state(self):
        """The one state of all, as it comes out of a checkpoint."""
        return json.loads(json.dumps(self.feeds[0].merged([feed.state_dict() for feed in self.feeds])))

    def report(self):
        return FeedReport.total([feed.report() for feed in self.feeds])

    def close(self):
        for feed in self.feeds:
            feed.close()


def pieces_of(batch):
    """Key and token ids of every segment of a pack."""
    ids, bounds = batch.input_ids_1T[0].tolist(), batch.cu_seqlens_N.tolist()
    return [
        (key_of(origin), tuple(ids[start:stop]))
        for origin, start, stop in zip(batch.origins, bounds, bounds[1:], strict=False)
    ]


def packs_of(step):
    """What the packs of a step hold; packs of padding alone are left out."""
    return sorted(pieces_of(batch) for batch in step if batch.num_segments)
