"""Figures in words: the same in a report's sentences, in its tables and on its page."""

from __future__ import annotations


def time_text(seconds: float) -> str:
    """Return seconds in the unit that fits.

    >>> time_text(8.54e-6), time_text(0.0123)
    ('8.5 us', '12.300 ms')
    """
    return f"{seconds * 1e6:.1f} us" if abs(seconds) < 1e-3 else f"{seconds * 1e3:.3f} ms"


def bytes_text(size: float) -> str:
    """Return a size in bytes in the unit that fits.

    >>> bytes_text(200), bytes_text(55296)
    ('200 B', '54.0 KiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
