"""The longest of the random searches: what `make test-slow` tries with some examples, with many times as many."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.routing import test_random_worlds, test_recovery
from tests.engine.visit import test_steady_decode

pytestmark = pytest.mark.timeout(3600)

SEARCHES = [
    (test_recovery.test_when_a_node_dies_its_replica_takes_over_and_no_token_is_lost_or_said_twice, 200),
    (test_recovery.test_answers_survive_any_number_of_restarts, 200),
    (test_random_worlds.test_every_job_in_a_random_network_ends_once_with_the_right_tokens, 400),
    (test_steady_decode.test_all_clients_get_what_the_general_way_gives_them, 3000),
    (test_steady_decode.test_answers_are_right_and_memory_is_accounted_for_whatever_happens, 3000),
]


@pytest.mark.parametrize("holds, examples", SEARCHES, ids=[search.__name__ for search, _ in SEARCHES])
def test_a_property_holds_for_very_many_examples(holds: Callable[[int], None], examples: int) -> None:
    holds(examples)
