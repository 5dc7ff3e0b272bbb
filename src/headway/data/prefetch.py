"""An iterator that runs ahead in a background thread."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

_POLL_S = 0.1  # how long a waiting thread takes to notice that it should stop


class Prefetcher:
    """Runs an iterator ahead in a thread. Its errors surface where the items are asked for."""

    def __init__(self, items: Iterator[Any], ahead: int) -> None:
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=ahead)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), name="headway-data", daemon=True)
        self._thread.start()

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> Any:
        kind, item = self._queue.get()
        if kind == "item":
            return item
        self._queue.put((kind, item))  # asked again, it ends again
        raise item

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, items: Iterator[Any]) -> None:
        try:
            for item in items:
                if not self._offer(("item", item)):
                    return
            self._offer(("end", StopIteration()))
        except Exception as error:  # noqa: BLE001  # nothing is swallowed: the consumer raises it
            self._offer(("end", error))

    def _offer(self, entry: tuple[str, Any]) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(entry, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False
