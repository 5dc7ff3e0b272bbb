"""Sources of several shards, and feeds of several ranks played side by side in one process."""

import copy
import json
from functools import cached_property
from pathlib import Path

from headway.data import Encoder
from headway.data.bad_rows import BadSamples
from headway.data.collate import Collator
from headway.data.feed import IndexedFeed, PackMaker, Share, StreamFeed, Streaming
from headway.data.index import build_index
from headway.packing.budget import Budget
from headway.packing.items import Items
from headway.packing.order import Order, Stage, StageSource
from headway.packing.plan import Plan

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
