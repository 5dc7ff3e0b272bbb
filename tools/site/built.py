"""What a built site must not do: ask another host for anything."""

import re
from pathlib import Path

# What a browser fetches by itself: sources of elements, style sheets and icons, and what style sheets name.
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object|input)\b[^>]*?\b(?:src|srcset|data)\s*=\s*["']?\s*((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?![^>]*\brel\s*=\s*["']?canonical)[^>]*?\bhref\s*=\s*["']?\s*((?:https?:)?//[^"'\s>]+)"""
    r"""|url\(\s*["']?((?:https?:)?//[^"')]+)|@import\s+["']((?:https?:)?//[^"']+)""",
    flags=re.IGNORECASE,
)


def requests_elsewhere(folder: Path) -> list[str]:
    """Find what pages and style sheets of a folder would fetch from another host.

    Returns:
        One line for each: the file and the address.
    """
    return [
        f"{path.relative_to(folder)} fetches {''.join(address)}"
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".html", ".css", ".svg") and "_downloads" not in path.parts
        for address in _FETCHED.findall(path.read_text(encoding="utf-8"))
    ]
