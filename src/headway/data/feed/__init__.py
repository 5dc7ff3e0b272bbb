"""Feeding: packs made ahead by worker processes, and the exact place to go on from.

`IndexedFeed` makes the packs of a plan, `StreamFeed` packs what it reads as it comes; both iterate over optimizer
steps. `make` is what a worker does for one pack; `headway.data.pool` runs the workers, `headway.data.transfer` brings
packs from them to the device.
"""

from headway.data.feed.feed import FILES, Feed, FeedReport, Share
from headway.data.feed.index_feed import IndexedFeed
from headway.data.feed.lane import Streaming
from headway.data.feed.make import PackMaker
from headway.data.feed.stream import StreamFeed
from headway.data.transfer import transfer_ahead

__all__ = [
    "FILES",
    "Feed",
    "FeedReport",
    "IndexedFeed",
    "PackMaker",
    "Share",
    "StreamFeed",
    "Streaming",
    "transfer_ahead",
]
