"""A Pipe: segments that together cover a model's layers."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.model.segment import Segment


class Pipe:
    def __init__(self, model: str, num_layers: int, segments: Sequence[Segment]) -> None:
        self.model, self.num_layers = model, num_layers
        self.segments = sorted(segments, key=lambda segment: segment.layers)

    def get_layer(self, start_layer: int) -> Segment | None:
        """The segment that starts at this layer."""
        return next((segment for segment in self.segments if segment.layers.start == start_layer), None)

    def is_complete(self) -> bool:
        layer = 0
        while layer < self.num_layers:
            segment = self.get_layer(layer)
            if segment is None:
                return False
            layer = segment.layers.end
        return True

    @property
    def kv_blocks(self) -> int:
        """What a sequence can hold is what the smallest segment can."""
        return min(segment.kv_blocks for segment in self.segments)
