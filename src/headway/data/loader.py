"""Packs in a deterministic order, made ahead of the training loop, resumed to the exact next one."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from headway.data.collate import Batch
from headway.data.encode import Encoder
from headway.data.pack import Budget, PackReport, Strategy
from headway.data.prefetch import Prefetcher
from headway.data.producer import OVERLONG, Overlong, Producer, Stage
from headway.data.samples import Chat
from headway.errors import CheckpointError, ConfigError, DataError


class PackLoader:
    """Iterates over packs.

    Samples are shuffled anew in every epoch by (seed, stage, epoch), encoded, and placed into the packs that are open;
    when a sample fits none and no more may be opened, the fullest pack is handed out. Packs run on across epochs and
    stages, so that no epoch ends in half-empty ones.

    Args:
        samples: the dataset; repeated endlessly unless `epochs` says how often.
        encoder: turns samples into tensors.
        budget: what a pack holds.
        strategy: "best_fit" or "first_fit".
        stages: parts of a curriculum that play before `samples`, in order.
        epochs: how often `samples` play; None for endlessly.
        seed: of the shuffling.
        shuffle: whether to shuffle at all.
        overlong: what to do with a sample that exceeds a pack: "error" stops; "drop" leaves it out; "truncate" cuts its
            text, and leaves it out if that would cut an image, its patches exceed the budget, or nothing supervised
            would be left. Both are counted in `report()`.
        open_packs: packs open at a time; more fill better and hold more memory.
        prefetch: packs made ahead by a background thread; 0 makes each when it is asked for.
        cache_bytes: memory for encoded samples kept for later epochs [bytes].
        pin_memory: whether to hand out packs in page-locked memory.

    Raises:
        ConfigError: an unknown policy or strategy, or a stage that cannot play.
        DataError: while iterating: a sample cannot be read, or exceeds a pack under the policy "error".
    """

    def __init__(
        self,
        samples: Sequence[Chat],
        encoder: Encoder,
        budget: Budget,
        strategy: Strategy = "best_fit",
        *,
        stages: Sequence[Stage | tuple[Sequence[Chat], int]] = (),
        epochs: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        overlong: Overlong = "error",
        open_packs: int = 8,
        prefetch: int = 2,
        cache_bytes: int = 2**30,
        pin_memory: bool = False,
    ) -> None:
        if overlong not in OVERLONG:
            raise ConfigError(f"Unknown policy for over-long samples {overlong!r}. Allowed: {', '.join(OVERLONG)}.")
        played = [Stage(*stage) for stage in stages]
        if samples or not played:
            played.append(Stage(samples, epochs))
        for number, stage in enumerate(played):
            if not stage.samples or (stage.epochs is not None and stage.epochs < 1):
                raise ConfigError(
                    f"Stage {number} of the data has {len(stage.samples)} samples and {stage.epochs} epochs; it needs "
                    "at least 1 of each."
                )
        if open_packs < 1 or prefetch < 0 or cache_bytes < 0:
            raise ConfigError(
                f"The loader got open_packs={open_packs}, prefetch={prefetch}, cache_bytes={cache_bytes}; it needs at "
                "least 1 open pack, and 0 or more of the others."
            )
        self._producer = Producer(played, encoder, budget, strategy, overlong, open_packs, seed, shuffle, cache_bytes)
        self._prefetch, self._pin = prefetch, pin_memory
        self._state = self._producer.initial_state()
        self._thread: Prefetcher | None = None
        self._packs: Iterator[tuple[Batch, dict[str, Any]]] | None = None

    def __iter__(self) -> "PackLoader":
        return self

    def __next__(self) -> Batch:
        if self._packs is None:
            self._packs = self._producer.play(self._state)
            if self._prefetch:
                self._thread = Prefetcher(self._packs, self._prefetch)
                self._packs = self._thread
                weakref.finalize(self, self._thread.stop)
        try:
            batch, self._state = next(self._packs)
        except DataError:
            self.close()  # asked again, the same place gives the same error instead of a quiet end
            raise
        return batch.pin_memory() if self._pin else batch

    def __enter__(self) -> "PackLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the background thread; the next pack, if asked for, is the one after the last handed out."""
        if self._thread is not None:
            self._thread.stop()
        self._thread, self._packs = None, None

    def report(self) -> PackReport:
        """What became of the samples up to the last pack handed out."""
        return PackReport(**self._state["report"])

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands after the last pack handed out, as plain JSON values."""
        return {"settings": self._producer.settings(), **self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place: the next pack is the one that would have followed.

        Raises:
            CheckpointError: the state was saved with other data or settings.
        """
        ours, saved = self._producer.settings(), state.get("settings")
        if saved != ours:
            saved = saved if isinstance(saved, dict) else {}
            differing = [
                f"{name} was {saved.get(name)} and is {ours[name]}" for name in ours if saved.get(name) != ours[name]
            ]
            raise CheckpointError(
                f"The data position was saved with other data or settings: {'; '.join(differing)}. Resume with the "
                "same ones, or start a new run from the checkpoint's weights."
            )
        self.close()
        self._state = {name: value for name, value in state.items() if name != "settings"}
