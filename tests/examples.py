"""Properties that are expensive to check: with few examples in every run, and with many in the slow tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings


def examples(*, few: int, many: int, **strategies: Any) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Check a property with `few` examples, and with `many` in a test that is marked slow.

    Like Hypothesis' `given`, with the strategies by name:

        @examples(few=20, many=200, number=st.integers())
        def test_doubling_gives_an_even_number(number: int) -> None: ...
    """

    def decorate(holds: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize(
            "examples", [pytest.param(few, id="few examples"), pytest.param(many, id="many examples", marks=pytest.mark.slow)]
        )
        def test(examples: int) -> None:
            how = settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
            how(given(**strategies)(holds))()

        test.__name__, test.__doc__, test.__module__ = holds.__name__, holds.__doc__, holds.__module__
        return test

    return decorate
