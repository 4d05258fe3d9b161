"""Some of the random networks of `random_worlds`, with everything that may go wrong in them."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from tests.engine.routing.random_worlds import run
from tests.examples import examples


@pytest.mark.timeout(1200)
@examples(few=2, many=20, seed=st.integers(0, 1 << 30))
def test_every_job_in_a_random_network_ends_once_with_the_right_tokens(seed: int) -> None:
    run(seed)
