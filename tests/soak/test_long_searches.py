"""The longest of the random searches: what `make test-slow` tries with some examples, with many times as many."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine import test_late_masks, test_resume
from tests.engine.routing import test_pending_bytes, test_random_worlds, test_recovery
from tests.engine.sequences import test_properties
from tests.engine.visit import test_failed_passes, test_steady_decode

pytestmark = pytest.mark.timeout(3600)

SEARCHES = [
    (test_recovery.test_when_a_node_dies_its_replica_takes_over_and_no_token_is_lost_or_said_twice, 200),
    (test_recovery.test_answers_survive_any_number_of_restarts, 200),
    (test_random_worlds.test_every_job_in_a_random_network_ends_once_with_the_right_tokens, 400),
    (test_steady_decode.test_all_clients_get_what_the_general_way_gives_them, 3000),
    (test_steady_decode.test_answers_are_right_and_memory_is_accounted_for_whatever_happens, 3000),
    (test_properties.test_every_job_gets_its_own_tokens_and_one_end_whatever_happens_around_it, 1000),
    (test_late_masks.test_answers_with_late_masks_are_the_same_in_any_network, 600),
    (test_failed_passes.test_whatever_passes_fail_all_jobs_that_can_be_computed_get_their_tokens, 600),
    (test_resume.test_resumed_is_the_same_as_uninterrupted, 1000),
    (test_pending_bytes.test_what_is_counted_is_what_is_in_memory_and_nothing_is_left_in_the_end, 5000),
]


@pytest.mark.parametrize("holds, examples", SEARCHES, ids=[search.__name__ for search, _ in SEARCHES])
def test_a_property_holds_for_very_many_examples(holds: Callable[[int], None], examples: int) -> None:
    holds(examples)
