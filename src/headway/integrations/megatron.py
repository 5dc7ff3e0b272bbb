"""Megatron-style loops, which say explicitly what each micro-batch held: `accumulate(tokens, cu_seqlens=...)`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headway.count import Workload
from headway.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headway.meter import Meter, Window


class FlopsAccumulator:
    """Add up what the micro-batches of a step hold, where the loop's forward step has them at hand.

    The call has the names that Megatron-Bridge gives it, and what it adds up goes to a `Meter`: real segment lengths,
    grids and slots, so that FLOPs are exact, padding is seen, and ranks are summed instead of multiplied. Tensors on
    an accelerator are copied aside and read when a window is logged; no call waits for the device.

    Every rank makes one and calls it alike, but of the ranks that share one micro-batch (tensor, context and pipeline
    parallel) exactly one bills it.

    Args:
        meter: of the loop, not started yet.
        billed: whether this rank bills its micro-batches. In Megatron: tensor and context rank 0 of the first stage.
        context_parallel_size: ranks that split each row between them. `tokens` then holds one rank's share, while
            boundaries are those of the whole row.

    Raises:
        UsageError: the size is below 1.

    >>> accumulator = FlopsAccumulator(meter)                                           # doctest: +SKIP
    >>> accumulator.accumulate(tokens, cu_seqlens=cu_seqlens)   # in each forward step  # doctest: +SKIP
    >>> accumulator.step()                                      # after optimizer.step  # doctest: +SKIP
    """

    def __init__(self, meter: Meter, *, billed: bool = True, context_parallel_size: int = 1) -> None:
        if context_parallel_size < 1:
            raise UsageError(f"context_parallel_size={context_parallel_size}: it is a number of ranks, 1 or more.")
        self.meter = meter
        self.billed = billed
        self.context_parallel_size = context_parallel_size
        self._evaluates = False

    def accumulate(
        self,
        tokens: Any,
        *,
        cu_seqlens: Any = None,
        cu_seqlens_argmin: Any = None,
        cu_seqlens_unpadded: Any = None,
        cu_seqlens_unpadded_argmin: Any = None,
        image_grid_thw: Any = None,
        video_grid_thw: Any = None,
        forward_only: bool = False,
    ) -> None:
        """Add one micro-batch.

        Args:
            tokens: token ids, shape (rows, slots), of which only the shape is read; None on a pipeline stage that has
                none, which bills nothing.
            cu_seqlens: boundaries of the segments, padding of each included [tokens], shape (N + 1,) or (1, N + 1). A
                tail of -1 or of repeated boundaries is cut. Without any, each row is one segment.
            cu_seqlens_argmin: number of valid boundaries; None or 0 where all are, but for that tail.
            cu_seqlens_unpadded: boundaries of the real tokens; lengths are taken from here.
            cu_seqlens_unpadded_argmin: number of valid boundaries in `cu_seqlens_unpadded`.
            image_grid_thw: image grids t, h, w [patches, before merging], shape (M, 3).
            video_grid_thw: video grids t, h, w [patches, before merging], shape (V, 3).
            forward_only: there is no backward, as of a reference model.

        Raises:
            WorkloadError: boundaries that do not start at 0, decrease, or reach past the slots. For tensors on an
                accelerator this is raised where the window is logged.
        """
        if self._evaluates:
            return
        if tokens is None or not self.billed:
            self.meter.count(Workload())
            return
        batch = {
            "tokens": tokens,
            "context_parallel_size": self.context_parallel_size,
            "cu_seqlens": cu_seqlens,
            "cu_seqlens_argmin": cu_seqlens_argmin,
            "cu_seqlens_unpadded": cu_seqlens_unpadded,
            "cu_seqlens_unpadded_argmin": cu_seqlens_unpadded_argmin,
            "image_grid_thw": image_grid_thw,
            "video_grid_thw": video_grid_thw,
        }
        self.meter.count({name: value for name, value in batch.items() if value is not None}, forward_only=forward_only)

    def step(self, *, skipped: bool = False, **extra: float) -> Window | None:
        """End an optimizer step; the next one starts from nothing.

        Args:
            skipped: the loop left the update out, as a gradient scaler does after an overflow.
            extra: the loop's own numbers for the log, such as `loss=...`.

        Returns:
            The window that this step completes, over all ranks; None for most.

        Raises:
            UsageError: `accumulate` was not called since the last step.
        """
        return self.meter.step(skipped=skipped, **extra)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Leave out an evaluation, its time and what its forward steps accumulate."""
        self._evaluates = True
        try:
            with self.meter.away():
                yield
        finally:
            self._evaluates = False
