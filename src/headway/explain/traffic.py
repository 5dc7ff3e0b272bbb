"""The bytes that memory-bound kernels of a step had to move, beside the time that they took."""

from dataclasses import dataclass
from typing import Any

from headway.explain.measure import MeasuredStep, MeasuredTrace


@dataclass(frozen=True, slots=True)
class OperandTraffic:
    """Bytes that the operators of a step's memory-bound kernels read and wrote, each operand once.

    Attributes:
        num_bytes: of the operators whose operands are known [byte].
        known_ns: time of these operators' kernels [ns].
        all_ns: time of all memory-bound kernels [ns].
        bytes_per_s: of the device's memory [B/s]; None where it is not known.
    """

    num_bytes: int
    known_ns: int
    all_ns: int
    bytes_per_s: float | None

    @property
    def at_bandwidth_ns(self) -> int | None:
        """Time that the bytes take at full bandwidth [ns]; None where that is not known."""
        return None if self.bytes_per_s is None else round(self.num_bytes / self.bytes_per_s * 1e9)

    def as_record(self) -> dict[str, Any]:
        """Give the JSON-ready record."""
        return {
            "bytes": self.num_bytes,
            "at_bandwidth_ns": self.at_bandwidth_ns,
            "known_ns": self.known_ns,
            "bytes_per_s": self.bytes_per_s,
        }


def operand_traffic(measured: MeasuredTrace, step: MeasuredStep, bytes_per_s: float | None) -> OperandTraffic | None:
    """Add up the operands of a step's memory-bound kernels; None where the trace has no shapes of them.

    An operator counts once, however many kernels it launched.
    """
    num_bytes = known_ns = all_ns = 0
    bytes_of: dict[int, int | None] = {}
    for owned in (owned for owned in step.owned if owned.line == "memory"):
        all_ns += owned.ns
        operands = measured.operands_of(owned.event)
        if operands is None:
            continue
        operator = measured.operator_of(owned.event)
        if operator not in bytes_of:
            bytes_of[operator] = operands.bytes_moved(measured.trace.names[measured.trace.host.name[operator]])
            num_bytes += bytes_of[operator] or 0
        known_ns += owned.ns if bytes_of[operator] is not None else 0
    return OperandTraffic(num_bytes, known_ns, all_ns, bytes_per_s) if known_ns else None
