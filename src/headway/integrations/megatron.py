"""Megatron-style loops, which state the work of each micro-batch: `accumulate(tokens, cu_seqlens=...)`."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from headway.count import Workload
from headway.errors import UsageError
from headway.meter import Meter, Window

_LEFT_OUT: Any = object()


class FlopsAccumulator:
    """Add up what the micro-batches of a step hold, where the loop's forward step has them at hand.

    The call has the names that Megatron-Bridge gives it (commit 067f987df, 22 Aug 2026), its state included, and what
    it adds up goes to a `Meter`: real segment lengths, grids and slots, so that FLOPs are exact, padding is seen, and
    ranks are summed instead of multiplied. Tensors on an accelerator are copied aside and read when a window is logged;
    no call waits for the device.

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
        state: Any = _LEFT_OUT,
        tokens: Any = _LEFT_OUT,
        *,
        vp_stage: int | None = None,
        config_seq_len: int | None = None,
        cu_seqlens: Any = None,
        cu_seqlens_argmin: Any = None,
        cu_seqlens_unpadded: Any = None,
        cu_seqlens_unpadded_argmin: Any = None,
        cross_cu_seqlens: Any = None,
        cross_cu_seqlens_unpadded: Any = None,
        num_vision_patches: Any = None,
        vision_patch_stats: Any = None,
        image_grid_thw: Any = None,
        video_grid_thw: Any = None,
        forward_only: bool = False,
    ) -> None:
        """Add one micro-batch: `accumulate(tokens, ...)`, or with Megatron-Bridge's own arguments as they are.

        Args:
            state: what Megatron-Bridge's function adds up on; it is not read. Leave it out, and the first argument is
                `tokens`.
            tokens: token ids, shape (rows, slots), of which only the shape is read; None on a pipeline stage that has
                none, which bills nothing.
            vp_stage: chunk of an interleaved pipeline. Each gets the same micro-batch, so that only 0 or None bills it.
            config_seq_len: length of a whole row without boundaries [tokens], where `tokens` may hold one rank's share.
            cu_seqlens: boundaries of the segments, padding of each included [tokens], shape (N + 1,) or (1, N + 1). A
                tail of -1 or of repeated boundaries is cut. Without any, each row is one segment.
            cu_seqlens_argmin: number of valid boundaries; None or 0 where all are, but for that tail.
            cu_seqlens_unpadded: boundaries of the real tokens; lengths are taken from here.
            cu_seqlens_unpadded_argmin: number of valid boundaries in `cu_seqlens_unpadded`.
            cross_cu_seqlens: refused, as the next: a `Workload` with sources says what cross attention reads.
            cross_cu_seqlens_unpadded: see `cross_cu_seqlens`.
            num_vision_patches: not read where there are grids, and refused without them unless it is 0: the cost of
                patches depends on the frame that each belongs to.
            vision_patch_stats: as `num_vision_patches`.
            image_grid_thw: image grids t, h, w [patches, before merging], shape (M, 3).
            video_grid_thw: video grids t, h, w [patches, before merging], shape (V, 3).
            forward_only: there is no backward, as of a reference model.

        Raises:
            UsageError: numbers of patches without their grids, boundaries of cross attention, or a `config_seq_len`
                that is no whole multiple of the slots.
            WorkloadError: boundaries that do not start at 0, decrease, or reach past the slots. For tensors on an
                accelerator this is raised where the window is logged.
        """
        # called with tokens alone, or with Megatron-Bridge's arguments
        if tokens is _LEFT_OUT:
            state, tokens = None, state
        if tokens is _LEFT_OUT or hasattr(state, "shape"):
            raise UsageError(
                "accumulate() takes tokens alone, as accumulate(tokens, cu_seqlens=...), or Megatron-Bridge's own "
                "arguments, accumulate(state, tokens, cu_seqlens=...); every other argument by its name."
            )
        if self._evaluates:
            return
        # One stage and one chunk of a pipeline bill a micro-batch, so that no other counts it again.
        if tokens is None or not self.billed or vp_stage:
            self.meter.count(Workload())
            return
        if cross_cu_seqlens is not None or cross_cu_seqlens_unpadded is not None:
            raise UsageError(
                "cross_cu_seqlens says what cross attention reads, which is not counted from boundaries. Count this "
                "micro-batch with accumulator.meter.count(Workload(lengths, sources=source_lengths)) instead."
            )
        if image_grid_thw is None and video_grid_thw is None:
            _check_no_patches("num_vision_patches", [num_vision_patches])
            _check_no_patches("vision_patch_stats", vision_patch_stats or ())
        # the arguments by the names that `workload_of` reads
        batch = {
            "tokens": tokens,
            "context_parallel_size": self._ranks_of_a_row(tokens, config_seq_len, cu_seqlens, cu_seqlens_unpadded),
            "cu_seqlens": cu_seqlens,
            "cu_seqlens_argmin": cu_seqlens_argmin,
            "cu_seqlens_unpadded": cu_seqlens_unpadded,
            "cu_seqlens_unpadded_argmin": cu_seqlens_unpadded_argmin,
            "image_grid_thw": image_grid_thw,
            "video_grid_thw": video_grid_thw,
        }
        self.meter.count({name: value for name, value in batch.items() if value is not None}, forward_only=forward_only)

    def _ranks_of_a_row(self, tokens: Any, config_seq_len: int | None, *boundaries: Any) -> int:
        """Find out over how many ranks a row is split; its configured length says so where there are no boundaries."""
        if config_seq_len is None or any(
            cu_seqlens is not None and math.prod(cu_seqlens.shape) > 1 for cu_seqlens in boundaries
        ):
            return self.context_parallel_size
        slots = int(tokens.shape[1])
        ranks, remainder = divmod(config_seq_len, slots)
        if remainder or ranks < 1 or self.context_parallel_size not in (1, ranks):
            raise UsageError(
                f"config_seq_len={config_seq_len} is the length of a whole row, but the tokens have {slots} slots and "
                f"context_parallel_size is {self.context_parallel_size}. Leave it out where rows have another length "
                "than the configured one; context_parallel_size says how many ranks split them."
            )
        return ranks

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
        """Leave out an evaluation: its time, and the work that its forward steps accumulate."""
        self._evaluates = True
        try:
            with self.meter.away():
                yield
        finally:
            self._evaluates = False


def _check_no_patches(name: str, numbers: Iterable[Any]) -> None:
    """Refuse numbers of patches that come without grids, unless they are 0 and that is known without waiting for it."""
    for number in numbers:
        on_host = str(getattr(number, "device", "cpu")) == "cpu"
        if number is None or (on_host and not int(number)):
            continue
        raise UsageError(
            f"{name} says how many patches there are, but not of which frames, and a frame's patches attend to each "
            "other alone. Hand over the grids that it was computed from, as image_grid_thw= and video_grid_thw=."
        )
