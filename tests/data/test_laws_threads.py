"""Threads of one process encode with one model: a feed's own thread beside an evaluation, or two feeds."""

from concurrent.futures import ThreadPoolExecutor

import torch

from headway.data import Chat, Message, Origin, TextPart


def test_threads_that_encode_at_once_learn_the_same_tokens(text_encoder):
    """Hundreds of turns make a rendering long enough for threads to meet in it."""
    turns = [(("user", "assistant")[n % 2], f"Turn {n}. " * (1 + n % 5)) for n in range(300)]
    messages = tuple(Message(role, (TextPart(text),)) for role, text in turns)
    chats = [Chat(messages[: 2 * n], Origin("made", "made.jsonl", n, f"line {n}")) for n in range(100, 150)]
    alone = [text_encoder.encode(chat).labels_S for chat in chats]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda chat: text_encoder.encode(chat).labels_S, chats))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
