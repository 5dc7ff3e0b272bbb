"""Numbers made readable: formatters with units, and plain-text tables that survive a pipe."""

from headway.report.format import (
    format_bytes,
    format_compact,
    format_count,
    format_duration,
    format_flops,
    format_ms,
    format_rate,
    format_rounded,
    format_share,
    format_traffic,
)
from headway.report.secrets import presentable, printable
from headway.report.table import Column, render_lines, render_pairs, render_table

__all__ = [
    "Column",
    "format_bytes",
    "format_compact",
    "format_count",
    "format_duration",
    "format_flops",
    "format_ms",
    "format_rate",
    "format_rounded",
    "format_share",
    "format_traffic",
    "presentable",
    "printable",
    "render_lines",
    "render_pairs",
    "render_table",
]
