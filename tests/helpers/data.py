"""Sources of every kind, media made on the spot, and feeds of several ranks played side by side in one process."""

import copy
import gzip
import json
from collections import Counter
from functools import cached_property
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from headway.config import parse_config
from headway.data import Encoder, Media
from headway.data.bad_rows import BadSamples
from headway.data.collate import Collator
from headway.data.feed import IndexedFeed, PackMaker, Share, StreamFeed, Streaming
from headway.data.index import build_index
from headway.data.sources import open_source
from headway.models import load_model, load_processor, rope_index
from headway.models.parallel.ranks import Ranks
from headway.packing.budget import Budget
from headway.packing.items import Items
from headway.packing.order import Order, Stage, StageSource
from headway.packing.plan import Plan
from headway.synthetic.processor import SPECIAL_TOKENS, write_processor
from headway.tracing import trace
from headway.train.data import open_feed
from helpers.models import PATCH, tiny_config, vision_tokens


def video(
    num_frames=20,
    rate=8,
    size=(48, 64),
    form="mp4",
    codec="libx264",
    rotation=0,
    times=None,
    folder: Path | None = None,
    **options,
) -> Media:
    """A video in whose n-th frame the left half has brightness 5 n and the right half is white.

    Some containers can only be written to a file; give a folder for it.
    """
    import av

    file = BytesIO()
    with av.open(file if folder is None else str(folder / "made"), "w", format=form, options=options) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(num_frames):
            pixels = np.full((*size, 3), 255, np.uint8)
            pixels[:, : size[1] // 2] = 5 * number % 250
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts = times[number]
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return Media(data=file.getvalue() if folder is None else (folder / "made").read_bytes())


def sound(seconds=1.0, rate=8000, form="wav", codec="pcm_s16le", layout="mono", pitch_hz=200.0) -> Media:
    """A tone of half the full loudness; in stereo, the right channel is silent."""
    import av

    file = BytesIO()
    tone = 0.5 * np.sin(2 * np.pi * pitch_hz * np.arange(round(seconds * rate)) / rate)
    channels = np.stack([tone, np.zeros_like(tone)])[: 2 if layout == "stereo" else 1].astype(np.float32)
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(channels, format="fltp", layout=layout)
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return Media(data=file.getvalue())


BUDGET = Budget(120)


def chat(number, picture=None):
    parts = [{"type": "image", "image": picture}] if picture else []
    question = {"role": "user", "content": [*parts, {"type": "text", "text": "Which? " * (1 + number * 7 % 13)}]}
    return {"messages": [question, {"role": "assistant", "content": f"It is {number}."}]}


def write_shards(folder: Path, rows, shards, picture_of=lambda _: None):
    """Chats number 0 .. rows - 1, in files of like size."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        numbers = range(rows * shard // shards, rows * (shard + 1) // shards)
        lines = [json.dumps(chat(number, picture_of(number))) for number in numbers]
        (folder / f"part-{shard:02d}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


ONCE = (Stage((StageSource("many", epochs=1), StageSource("few", epochs=2))),)


class RememberingEncoder(Encoder):
    """Encodes each sample once: feeds of many ranks read the same few again and again."""

    @classmethod
    def of(cls, encoder):
        made = copy.copy(encoder)
        made.__class__, made.found, made.key = cls, {}, encoder.fingerprint()
        return made

    def encode(self, sample):
        return self._once(Encoder.encode, sample)

    def measure(self, sample):
        return self._once(Encoder.measure, sample)

    def fingerprint(self):
        return self.key

    def _once(self, method, sample):
        key = method.__name__, sample.origin
        if key not in self.found:
            self.found[key] = method(self, sample)
        return self.found[key]


class Data:
    """What feeds of any number of ranks are made of."""

    def __init__(self, sources, encoder, stages=ONCE, *, bad=None, budget=BUDGET, overlong="error", **streaming):
        self.sources, self.encoder, self.stages = tuple(sources), encoder, stages
        self.bad, self.budget, self.overlong, self.streaming = bad or BadSamples(), budget, overlong, streaming
        collator = Collator(pixel_scale=encoder.pixel_scale, sources=tuple(source.name for source in sources))
        self.maker = PackMaker(self.sources, encoder, collator, self.bad.skips)

    @cached_property
    def items(self):
        indices = {s.name: build_index(s, self.encoder, workers=0, policy=self.bad) for s in self.sources}
        return Items.build(indices, self.budget, self.overlong)

    def indexed(self, share):
        items, planned = self.items
        order = Order(items.sizes, self.stages, seed=3)
        plan = Plan(items, order, self.budget, share.ranks * share.accumulation, window=16, seed=3)
        return IndexedFeed(plan, self.maker, share, self.bad, planned=planned)

    def stream(self, share):
        settings = {"lanes": 8, "shuffle": 4, "open_packs": 2, "seed": 3, **self.streaming}
        streaming = Streaming(self.maker, self.stages, self.budget, overlong=self.overlong, **settings)
        return StreamFeed(streaming, share, self.bad)

    def ranks(self, kind, ranks, **share):
        share = {"prefetch_bytes": 0, **share}
        return Together([getattr(self, kind)(Share(rank, ranks, **share)) for rank in range(ranks)])


class Together:
    """The feeds of all ranks, a step at a time."""

    def __init__(self, feeds):
        self.feeds = feeds

    def step(self):
        """The batches of every rank; None once all have ended."""
        step = [next(feed, []) for feed in self.feeds]
        return step if any(step) else None

    def steps(self, most=10**9):
        for _ in range(most):
            if (step := self.step()) is None:
                return
            yield step

    def state(self):
        """The one state of all, as a checkpoint holds it."""
        return json.loads(json.dumps(self.feeds[0].merged([feed.state_dict() for feed in self.feeds])))

    def load(self, state):
        for feed in self.feeds:
            feed.load_state_dict(state)
        return self

    def counts(self):
        return type(self.feeds[0].report()).total([feed.report() for feed in self.feeds])

    def close(self):
        for feed in self.feeds:
            feed.close()


def samples_of(step):
    """Source, file and place of every sample in a step, rank by rank."""
    return [(o.source, o.file, o.place) for batches in step for batch in batches for o in batch.origins]


SHAPES = ((16, 16), (32, 48), (16, 64), (40, 24))  # (height, width) of pictures [pixels]
ROWS = {"pictures": 14, "table": 9, "shard": 10, "saved": 16, "films": 5, "text": 9, "ids": 7}


def write_model(folder):
    """A Qwen3-VL of a few thousand parameters, random but the same each time, its encoder and its cost model."""
    texts = ["Which picture is it? It is the one.", "How many words are there?"]
    processor = load_processor(write_processor(folder, texts, PATCH, max_pixels=16 * (2 * PATCH) ** 2))
    torch.manual_seed(0)
    config = tiny_config("qwen3_vl", len(processor.tokenizer), vision_tokens(processor.tokenizer))
    model = load_model(config, random_init=True).eval()
    return model, Encoder(processor, rope_index(model)), trace(model)


def write_sources(folder: Path):
    """One dataset of each kind, as the libraries that people use write them; gives each one's path by its name."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq
    import webdataset

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
    """One of several ranks that this process plays one after the other, so it waits for nobody.

    All of them read the same configuration and files, so what one would send is what it would receive.
    """

    def gather_all(self, value):
        return [value] * self.size

    def by_first(self, act):
        return act()

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


class Players(Together):
    """The feeds of all ranks, whose packs of a step are one list."""

    def step(self):
        """The packs of every rank; None once all have ended."""
        step = super().step()
        return None if step is None else [batch for batches in step for batch in batches]


def pieces_of(batch):
    """Key and token ids of every segment of a pack."""
    ids, bounds = batch.input_ids_1T[0].tolist(), batch.cu_seqlens_N.tolist()
    return [
        (key_of(origin), tuple(ids[start:stop]))
        for origin, start, stop in zip(batch.origins, bounds, bounds[1:], strict=False)
    ]
