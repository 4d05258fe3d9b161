"""What every Router does, whatever carries it."""

from __future__ import annotations

import itertools

import pytest

from penstock.errors import Unreachable
from penstock.network.conformance import RouterConformance
from penstock.network.members.roster import MAX_RETRY_S, MAX_SESSIONS, MAX_UNANSWERED, Issue, Roster
from penstock.network.trust.certificates import MAX_NODE_NAME
from tests.network.nets import ClosedNet, InProcessNet, ZenohNet, closing


class TestInProcess(RouterConformance):
    network_type = InProcessNet


class TestZenoh(RouterConformance):
    network_type = ZenohNet


class TestClosedZenoh(RouterConformance):
    network_type = ClosedNet
    good_names = ("a", "Node-7.lab_2", "a" * MAX_NODE_NAME, "7")


def test_a_killed_node_sends_nothing_more() -> None:
    with closing(InProcessNet()) as net:
        net.join("one", b"1")
        two = net.join("two", b"2")
        net.hub.kill("two")
        with pytest.raises(Unreachable):
            two.router.send("one", b"from the grave")


# ---- the roster ----


def test_an_older_record_never_replaces_a_newer_one() -> None:
    roster = Roster()
    roster.appeared("a", 5)
    assert roster.store_record("a", Issue(5, 2), b"newer")
    assert not roster.store_record("a", Issue(5, 1), b"older")
    assert not roster.store_record("a", Issue(5, 2), b"again")
    assert roster.records() == {"a": b"newer"}


def test_of_two_lives_the_later_one_counts() -> None:
    roster = Roster()
    roster.appeared("a", 5)
    roster.store_record("a", Issue(5, 9), b"old life")
    roster.appeared("a", 6)
    assert roster.records() == {"a": b"old life"}, "anybody can show signs of a life"
    roster.store_record("a", Issue(6, 1), b"new life")
    roster.store_record("a", Issue(5, 10), b"old life still talks")
    assert roster.records() == {"a": b"new life"}
    roster.vanished("a", 5)
    assert roster.records() == {"a": b"new life"}
    assert roster.is_live("a")
    roster.vanished("a", 6)
    assert roster.records() == {}
    assert not roster.is_live("a")


def test_a_record_of_a_life_that_is_over_is_not_kept() -> None:
    roster = Roster()
    roster.appeared("a", 5)
    roster.vanished("a", 5)
    assert not roster.store_record("a", Issue(5, 1), b"late")
    roster.appeared("a", 5)
    assert roster.records() == {}


def test_a_life_counts_when_it_has_proved_itself_not_when_there_are_signs_of_it() -> None:
    roster = Roster()
    roster.appeared("a", 5)
    assert not roster.is_live("a")
    assert roster.store_record("a", Issue(5, 0), None)
    assert roster.is_live("a")
    assert roster.records() == {}, "it has none yet"


def test_a_life_is_asked_until_it_answers_and_less_and_less_often() -> None:
    roster, now, asked = Roster(), 0.0, []
    roster.appeared("a", 5)
    while now < 300:
        due, wait = roster.questions_due(now)
        assert wait > 0
        asked += [now] * len(due)
        now += wait
    waits = [round(later - earlier, 3) for earlier, later in itertools.pairwise(asked)]
    assert waits == sorted(waits)
    assert waits[0] <= 0.1
    assert waits[-1] == MAX_RETRY_S
    roster.store_record("a", Issue(5, 1), b"here", now)
    assert roster.questions_due(now)[0] == []


def test_a_silent_life_is_asked_and_no_longer_counts_when_it_stays_silent() -> None:
    """Somebody else may keep up its sign of life."""
    roster, now = Roster(), 0.0
    roster.appeared("a", 5)
    roster.store_record("a", Issue(5, 1), b"here", now)
    for _ in range(MAX_UNANSWERED):
        now += roster.questions_due(now)[1]
        assert roster.questions_due(now)[0] == [("a", 5)]
    assert roster.is_live("a")
    now += roster.questions_due(now)[1]
    roster.questions_due(now)
    assert not roster.is_live("a")
    roster.store_record("a", Issue(5, 1), b"here", now)
    assert roster.records() == {"a": b"here"}


def test_made_up_signs_of_life_are_bounded_and_displace_nobody() -> None:
    roster = Roster()
    roster.appeared("true", 1)
    roster.store_record("true", Issue(1, 1), b"true", 0.0)
    for number in range(2 * MAX_SESSIONS):
        roster.appeared(f"ghost-{number}", 1)
    assert roster.records() == {"true": b"true"}
    assert len(roster.questions_due(1.0)[0]) < MAX_SESSIONS
    roster.appeared("late", 1)
    roster.store_record("late", Issue(1, 1), b"late", 1.0)
    assert set(roster.records()) == {"true", "late"}
