"""One formatter per kind of number. Inside the library values stay plain: FLOP, seconds, bytes, fractions.

A number that is not finite, as the rate of a step that took no time, reads "not known".
"""

import math

_DECIMAL_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_BINARY_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_NOT_KNOWN = "not known"


def format_flops(flops: float) -> str:
    """Format a count of FLOPs with a decimal prefix.

    >>> format_flops(421651971833856)
    '421.7 TFLOP'
    >>> format_flops(12)
    '12 FLOP'
    """
    return _with_prefix(flops, "FLOP")


def format_rate(flops_per_s: float) -> str:
    """Format a rate [FLOP/s] with a decimal prefix.

    >>> format_rate(989.4e12)
    '989.4 TFLOP/s'
    """
    return _with_prefix(flops_per_s, "FLOP/s")


def format_count(count: float) -> str:
    """Format a count in full, with thousands separators; a mean keeps one decimal.

    >>> format_count(12800)
    '12,800'
    """
    if not _is_known(count):
        return _NOT_KNOWN
    return f"{count:,}" if isinstance(count, int) else f"{count:,.1f}"


def format_rounded(count: float) -> str:
    """Format a count, or a rate of counts, without decimals.

    >>> format_rounded(12800.4), format_rounded(float("nan"))
    ('12,800', 'not known')
    """
    return format_count(round(count)) if _is_known(count) else _NOT_KNOWN


def format_compact(count: float) -> str:
    """Format a count in thousands, millions or billions, by three digits.

    >>> format_compact(1_620_345), format_compact(500)
    ('1.62 M', '500')
    """
    power, unit = next(((p, u) for p, u in ((1e9, " B"), (1e6, " M"), (1e3, " k")) if abs(count) >= p), (1.0, ""))
    return f"{count / power:.3g}{unit}"


def format_share(fraction: float) -> str:
    """Format a fraction as percent.

    >>> format_share(0.4712)
    '47.1 %'
    """
    return f"{100 * fraction:.1f} %" if _is_known(fraction) else _NOT_KNOWN


def format_duration(seconds: float) -> str:
    """Format a duration [s] in the unit that suits it.

    >>> [format_duration(s) for s in (0, 0.000047, 0.25, 3.2, 75, 4210)]
    ['0 s', '47 us', '250 ms', '3.20 s', '1 min 15 s', '1 h 10 min']
    """
    if not _is_known(seconds):
        return _NOT_KNOWN
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us" if seconds else "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    rounded_s = round(seconds)
    if rounded_s < 3600:
        return f"{rounded_s // 60} min {rounded_s % 60} s"
    return f"{rounded_s // 3600} h {rounded_s % 3600 // 60} min"


def format_ms(ns: int) -> str:
    """Format nanoseconds as milliseconds without the unit, for a column or a sentence that has it.

    >>> format_ms(1_234_567_890)
    '1,234.57'
    """
    return f"{ns / 1e6:,.2f}"


def format_traffic(num_bytes: float) -> str:
    """Format bytes that a memory moves, with a decimal prefix as its rates have.

    >>> [format_traffic(num_bytes) for num_bytes in (981, 64_000, 2.5e6, 3.14159e9, 1.5612e12)]
    ['981 bytes', '64 kB', '2.5 MB', '3.14 GB', '1,561 GB']
    """
    units = {1e9: "GB", 1e6: "MB", 1e3: "kB", 0: "bytes"}
    unit = next(least for least in units if num_bytes >= least)
    size = num_bytes / (unit or 1)
    return f"{size:,.0f} {units[unit]}" if size >= 100 or not unit else f"{size:.3g} {units[unit]}"


def format_bytes(num_bytes: float) -> str:
    """Format a size in bytes with a binary prefix (GiB is 2**30).

    >>> format_bytes(3 * 2**30)
    '3.0 GiB'
    """
    if not _is_known(num_bytes):
        return _NOT_KNOWN
    value = float(num_bytes)
    for prefix in _BINARY_PREFIXES[:-1]:
        if abs(value) < 1023.95:
            return f"{value:.0f} {prefix}" if prefix == "B" else f"{value:.1f} {prefix}"
        value /= 1024
    return f"{value:.1f} {_BINARY_PREFIXES[-1]}"


def _is_known(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)


def _with_prefix(value: float, unit: str) -> str:
    if not _is_known(value):
        return _NOT_KNOWN
    index, scaled = 0, float(value)
    while abs(scaled) >= 999.95 and index < len(_DECIMAL_PREFIXES) - 1:
        scaled /= 1000
        index += 1
    number = f"{scaled:.0f}" if index == 0 and scaled == int(scaled) else f"{scaled:.1f}"
    return f"{number} {_DECIMAL_PREFIXES[index]}{unit}"
