"""Sizes and times as text for people."""

from __future__ import annotations

_BYTE_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def format_bytes(count: int) -> str:
    """Format a size in decimal units: `98.4 MB`, `1.2 GB`, `512 bytes`."""
    for unit, factor in _BYTE_UNITS:
        if count >= 0.9995 * factor:
            value = count / factor
            return f"{value:.3g} {unit}" if value < 99.95 else f"{value:,.0f} {unit}"
    return f"{count} bytes"


def format_seconds(seconds: float) -> str:
    """Format a short time: `0.35 ms`, `12.3 ms`, `1.20 s`, `35 s`."""
    if seconds >= 0.9995:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.0f} s"
    digits = 2 if seconds < 0.00995 else 1 if seconds < 0.0995 else 0
    return f"{1000 * seconds:.{digits}f} ms"
