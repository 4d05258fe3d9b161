"""Layers and segments as people write them."""

from __future__ import annotations

import pytest

from penstock.domain.topology import covering
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    "end, hint",
    [
        (50, "Let the last one end at 30."),
        (20, "Let the last one end at 30, or join a network whose nodes hold the rest."),
    ],
)
def test_segments_end_where_the_model_does(end: int, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        covering([(0, 10), (10, end)], 30)
    assert refused.value.message == f"The segments end at layer {end}, but the model has 30 layers."
    assert refused.value.hint == hint
