"""Sizes and times as text: three digits, in the unit that fits."""

from __future__ import annotations

import pytest

from penstock.units import format_bytes, format_seconds


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (98_440_000, "98.4 MB"),
        (515_300_000, "515 MB"),
        (999_600_000, "1 GB"),
        (1_234_000_000, "1.23 GB"),
        (2_000 * 10**12, "2,000 TB"),
    ],
)
def test_a_size_has_a_decimal_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    "seconds, text", [(0.0, "0.00 ms"), (0.00035, "0.35 ms"), (0.0123, "12.3 ms"), (0.8, "800 ms"), (1.2, "1.20 s"), (35, "35 s")]
)
def test_a_time_is_in_milliseconds_below_a_second(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
