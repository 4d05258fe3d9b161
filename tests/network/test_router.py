"""What every Router does, whatever carries it."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator

import pytest

from penstock.errors import ConfigError, Unreachable
from penstock.network.roster import MAX_RETRY_S, MAX_SESSIONS, MAX_UNANSWERED, Issue, Roster
from tests.network.nets import ClosedNet, InProcessNet, Net, ZenohNet, closing, wait_for


@pytest.fixture(params=[InProcessNet, ZenohNet, ClosedNet], ids=["in_process", "zenoh", "closed"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    with closing(request.param()) as net:
        yield net


@pytest.fixture(params=[InProcessNet, ZenohNet], ids=["in_process", "zenoh"])
def open_net(request: pytest.FixtureRequest) -> Iterator[Net]:
    with closing(request.param()) as net:
        yield net


def test_a_record_appears_at_the_others_and_at_home(net: Net) -> None:
    one, two = net.join("one"), net.join("two")
    one.router.publish(b"I am one")
    assert one.router.records() == {"one": b"I am one"}
    wait_for(lambda: two.router.records() == {"one": b"I am one"}, "the record")
    wait_for(lambda: one.changes and two.changes, "the callbacks")


def test_a_record_is_replaced_by_the_next_one(net: Net) -> None:
    one, two = net.join("one", b"0"), net.join("two", b"two")
    wait_for(lambda: two.sees("one", "two"), "the first record")
    for number in range(1, 101):
        one.router.publish(b"%d" % number)
    wait_for(lambda: two.router.records()["one"] == b"100", "the last record")
    assert one.router.records()["one"] == b"100"


def test_a_snapshot_of_the_records_does_not_change(net: Net) -> None:
    one = net.join("one", b"old")
    before = one.router.records()
    one.router.publish(b"new")
    assert before == {"one": b"old"}


def test_a_record_vanishes_with_its_node(net: Net) -> None:
    one, two = net.join("one", b"1"), net.join("two", b"2")
    wait_for(lambda: one.sees("one", "two"), "two")
    changes = one.changes
    two.router.close()
    wait_for(lambda: one.sees("one"), "two to vanish")
    wait_for(lambda: one.changes > changes, "the callback")
    assert two.router.records() == {}


def test_a_late_joiner_sees_the_records_of_those_who_were_there(net: Net) -> None:
    net.join("one", b"1")
    net.join("two", b"2")
    late = net.join("late", b"3")
    wait_for(lambda: late.router.records() == {"one": b"1", "two": b"2", "late": b"3"}, "all records")


def test_a_node_that_comes_back_is_heard_again(net: Net) -> None:
    one, two = net.join("one", b"1"), net.join("two", b"first life")
    wait_for(lambda: one.sees("one", "two"), "two")
    for _ in range(3):
        one.router.publish(b"1")
        two.router.publish(b"first life, later")
    two.router.close()
    again = net.join("two", b"second life")
    wait_for(lambda: one.router.records().get("two") == b"second life", "the second life")
    one.router.send("two", b"hello")
    wait_for(lambda: again.received, "the message")


def test_messages_arrive_whole_and_in_order_on_one_thread(net: Net) -> None:
    one, two, three = net.join("one", b"1"), net.join("two", b"2"), net.join("three", b"3")
    wait_for(lambda: one.sees("one", "two", "three") and two.sees("one", "two", "three"), "all")
    sent = [b"%d:" % number + os.urandom(number * 50) for number in range(200)]

    def send_all(member) -> None:
        for data in sent:
            member.router.send("three", data)

    senders = [threading.Thread(target=send_all, args=(member,)) for member in (one, two)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    wait_for(lambda: len(three.received) == 400, "all messages")
    assert three.has_from("one") == sent
    assert three.has_from("two") == sent
    assert len(three.receiving_threads) == 1


def test_large_messages_arrive_whole(net: Net) -> None:
    one, two = net.join("one", b"1"), net.join("two", b"2")
    wait_for(lambda: one.sees("one", "two"), "two")
    sent = [os.urandom(4 << 20) for _ in range(5)]
    for data in sent:
        one.router.send("two", data)
    wait_for(lambda: len(two.received) == 5, "the messages")
    assert two.has_from("one") == sent


def test_a_node_can_send_to_itself(net: Net) -> None:
    one = net.join("one")
    one.router.send("one", b"note")
    wait_for(lambda: one.received == [("one", b"note")], "the note")


def test_a_message_to_nobody_is_an_error(net: Net) -> None:
    one, two = net.join("one", b"1"), net.join("two", b"2")
    with pytest.raises(Unreachable, match="stranger"):
        one.router.send("stranger", b"hello")
    wait_for(lambda: one.sees("one", "two"), "two")
    one.router.send("two", b"hello")
    two.router.close()
    wait_for(lambda: one.sees("one"), "two to vanish")
    with pytest.raises(Unreachable, match="two"):
        one.router.send("two", b"hello")


def test_a_callback_that_fails_ends_nothing(net: Net) -> None:
    one, two = net.join("one", b"1"), net.join("two", b"2")
    wait_for(lambda: one.sees("one", "two"), "two")
    one.router.send("two", b"raise")
    one.router.send("two", b"after")
    wait_for(lambda: two.received == [("one", b"after")], "the message after")
    changes = two.changes  # the first of them failed
    one.router.publish(b"new")
    wait_for(lambda: two.changes > changes, "another change")


def test_three_nodes_find_each_other_through_the_one_they_know(net: Net) -> None:
    members = {name: net.join(name, name.encode()) for name in ("known", "left", "right")}
    wait_for(lambda: all(member.sees(*members) for member in members.values()), "everybody")
    members["left"].router.send("right", b"across")
    wait_for(lambda: members["right"].received == [("left", b"across")], "the message")


def test_closing_twice_is_fine_and_leaves_no_threads(net: Net) -> None:
    before = set(threading.enumerate())
    one, two = net.join("one", b"1"), net.join("two", b"2")
    wait_for(lambda: one.sees("one", "two"), "two")
    one.router.send("two", b"hello")
    for member in (one, two):
        member.router.close()
        member.router.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(Unreachable):
        one.router.send("two", b"hello")
    one.router.publish(b"after the end")
    assert one.router.records() == {}


def test_a_callback_may_close_its_router(net: Net) -> None:
    before = set(threading.enumerate())
    one, two = net.join("one", b"1"), net.router("two")
    two.publish(b"2")
    two.start(lambda sender, data: two.close(), lambda: None)
    net.routers.append(two)
    wait_for(lambda: one.sees("one", "two"), "two")
    one.router.send("two", b"please leave")
    wait_for(lambda: one.sees("one"), "two to leave")
    one.router.close()
    wait_for(lambda: set(threading.enumerate()) <= before, "the threads to end")


@pytest.mark.parametrize("name", ["", "a/b", "*", "a*", "$*", "a#b", "a?b", "@a", "-a", ".a", "a b", "ä", "a" * 65, "a\n"])
def test_a_name_that_would_break_a_key_is_refused(open_net: Net, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a node"):
        open_net.router(name)


@pytest.mark.parametrize("name", ["a", "Node-7.lab_2", "a" * 64, "7"])
def test_a_plain_name_is_fine(open_net: Net, name: str) -> None:
    member = open_net.join(name, b"here")
    member.router.send(name, b"note")
    wait_for(lambda: member.received, "the note")


def test_a_killed_node_vanishes_without_a_goodbye() -> None:
    with closing(InProcessNet()) as net:
        one, two = net.join("one", b"1"), net.join("two", b"2")
        net.hub.kill("two")
        assert one.sees("one")
        with pytest.raises(Unreachable):
            one.router.send("two", b"hello")
        with pytest.raises(Unreachable):
            two.router.send("one", b"from the grave")


def test_a_name_is_given_once_in_a_hub() -> None:
    with closing(InProcessNet()) as net:
        net.join("one")
        with pytest.raises(ConfigError, match="already has a live node"):
            net.join("one")


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
