"""Threads of one process encode with one model: a feed's own thread beside an evaluation, or two feeds."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch

from headway.data import Chat, Message, Origin, TextPart
from headway.data.pool import Job, Pool


@pytest.mark.slow
def test_threads_that_encode_at_once_learn_the_same_tokens(text_encoder):
    """Hundreds of turns make a rendering long enough for threads to meet in it."""
    turns = [(("user", "assistant")[n % 2], f"Turn {n}. " * (1 + n % 5)) for n in range(300)]
    messages = tuple(Message(role, (TextPart(text),)) for role, text in turns)
    chats = [Chat(messages[: 2 * n], Origin("made", "made.jsonl", n, f"line {n}")) for n in range(100, 116)]
    alone = [text_encoder.encode(chat).labels_S for chat in chats]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda chat: text_encoder.encode(chat).labels_S, chats))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


class Dropped:
    """Something whose owner was forgotten, as a feed may be that nobody closed."""


def test_a_feed_that_nobody_closed_may_be_collected_by_its_own_thread():
    """Garbage is collected in whichever thread happens to allocate."""
    owner, refs = Dropped(), {}

    def work(number):
        if number == 1:
            refs.pop("owner")  # the last one
        return number

    pool = Pool(work, workers=0, prefetch_bytes=100)
    ended = weakref.finalize(owner, pool.close, wait=False)
    refs["owner"] = owner
    del owner
    assert list(islice(pool.run(Job(number, 1) for number in range(2)), 2)) == [0, 1]
    assert not ended.alive
