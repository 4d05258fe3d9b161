"""Layer ranges and private layers of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from penstock.errors import ConfigError


class LayerRange(NamedTuple):
    """A half-open range: `LayerRange(0, 10)` is layers 0 to 9."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def layers(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """Read `"0:10"`."""
        start, colon, end = text.partition(":")
        try:
            if not colon:
                raise ValueError
            found = cls(int(start), int(end))
        except ValueError:
            raise ConfigError(f"'{text}' is not a layer range.", hint='Write it as "START:END", such as "0:10".') from None
        if not 0 <= found.start < found.end:
            raise ConfigError(f"The layer range {text} is empty or negative.", hint="END must be larger than START.")
        return found


def contiguous_ranges(layers: Collection[int]) -> tuple[LayerRange, ...]:
    """Return as few ranges as possible that have exactly these layers."""
    starts = sorted(layer for layer in layers if layer - 1 not in layers)
    ends = sorted(layer + 1 for layer in layers if layer + 1 not in layers)
    return tuple(map(LayerRange, starts, ends))


class PrivateLayers(NamedTuple):
    """How many of the first and last layers only the node itself may compute for its own text."""

    first: int = 0
    last: int = 0

    def ranges(self, num_layers: int) -> tuple[LayerRange, ...]:
        if self.first + self.last >= num_layers:
            return (LayerRange(0, num_layers),)
        ends = (LayerRange(0, self.first), LayerRange(num_layers - self.last, num_layers))
        return tuple(layers for layers in ends if layers.size)

    @classmethod
    def parse(cls, text: str) -> PrivateLayers:
        """Read `"2,2"`."""
        first, comma, last = text.partition(",")
        try:
            if not comma:
                raise ValueError
            found = cls(int(first), int(last))
        except ValueError:
            raise ConfigError(
                f"'{text}' is not a pair of private layer counts.", hint='Write it as "FIRST,LAST", such as "1,1".'
            ) from None
        if min(found) < 0:
            raise ConfigError(f"The private layers {text} are negative.", hint='Write it as "FIRST,LAST", such as "2,2".')
        return found


NOTHING_PRIVATE = PrivateLayers()


def covering(segments: Iterable[tuple[int, int]], num_layers: int) -> list[LayerRange]:
    """Check that the segments follow each other from layer 0 to the last, and return them as ranges."""
    ranges = [LayerRange(*segment) for segment in segments]
    expected = 0
    for found in ranges:
        if found.start != expected or found.end <= found.start:
            raise ConfigError(
                f"Segment {found} does not continue at layer {expected}.",
                hint=f"Segments must follow each other from 0 to {num_layers} without gaps, such as (0, 10), (10, {num_layers}).",
            )
        expected = found.end
    if expected != num_layers:
        raise ConfigError(
            f"The segments end at layer {expected}, but the model has {num_layers} layers.",
            hint=f"Let the last one end at {num_layers}"
            + (", or join a network whose nodes hold the rest." if expected < num_layers else "."),
        )
    return ranges
