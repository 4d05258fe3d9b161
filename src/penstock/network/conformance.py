"""RouterConformance: the tests that every Router passes. Subclass it in a test file of your own and run pytest:

    from penstock.network.conformance import RouterConformance, RouterNetwork

    class MyNetwork(RouterNetwork):
        def router(self, node_id, epoch):
            return MyRouter(..., node_id, epoch)

    class TestMyRouter(RouterConformance):
        network_type = MyNetwork

It needs pytest to run, but imports neither it nor torch.
"""

from __future__ import annotations

import os
import threading
import time
import unittest
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from penstock.errors import ConfigError, PenstockError, Unreachable
from penstock.network.router import MAX_RECORD_BYTES, Router
from penstock.network.stream import Stream

TIMEOUT_S = 40.0  # generous: a busy machine must not fail a test
BAD_NAMES = ("", "a/b", "*", "a*", "$*", "a#b", "a?b", "@a", "-a", ".a", "a b", "ä", "a" * 65, "a\n")


def wait_for(true: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)


def run_all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def error_of(action: Callable[[], Any], kind: type[PenstockError]) -> PenstockError:
    """Return the error of this kind that the call raises; fail if it raises none."""
    try:
        action()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


class Participant:
    """A started router and what it received. Its callbacks raise on a message `b"raise"`, and on the first change."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.received: list[tuple[str, bytes]] = []
        self.receiving_threads: set[int] = set()
        self.changes = 0
        router.start(self._take, self._count)

    def _take(self, sender: str, data: bytes) -> None:
        self.receiving_threads.add(threading.get_ident())
        if data == b"raise":
            raise RuntimeError("a callback that fails")
        self.received.append((sender, data))

    def _count(self) -> None:
        self.changes += 1
        if self.changes == 1:
            raise RuntimeError("a callback that fails")

    def sees(self, *nodes: str) -> bool:
        return set(self.router.records()) == set(nodes)

    def has_from(self, sender: str) -> list[bytes]:
        return [data for node, data in self.received if node == sender]


class RouterNetwork(ABC):
    """One network for one test. A subclass makes its routers; `routers` has those that were made before, oldest first."""

    def __init__(self) -> None:
        self.routers: list[Router] = []

    @abstractmethod
    def router(self, node_id: str, epoch: int) -> Router:
        """Make a router that is not started."""

    def kill(self, router: Router) -> None:
        """Cut off a started router without notice, as a power cut does. If not implemented, tests that need it are skipped."""
        raise unittest.SkipTest("this network cannot kill a router")

    def make(self, node_id: str) -> Router:
        router = self.router(node_id, time.time_ns())
        self.routers.append(router)
        return router

    def join(self, node_id: str, record: bytes | None = None) -> Participant:
        router = self.make(node_id)
        if record is not None:
            router.publish(record)
        return Participant(router)

    def close(self) -> None:
        for router in self.routers:
            router.close()


class RouterConformance:
    """What every router must do. `good_names` may be shorter where certificates leave less room."""

    network_type: ClassVar[type[RouterNetwork]]
    good_names: ClassVar[Sequence[str]] = ("a", "Node-7.lab_2", "a" * 64, "7")

    def setup_method(self) -> None:
        self.network = self.network_type()

    def teardown_method(self) -> None:
        self.network.close()

    # ---- names ----

    def test_a_router_knows_its_node_id(self) -> None:
        assert self.network.make("one").node_id == "one"

    def test_a_plain_name_is_fine(self) -> None:
        members = [self.network.join(name, b"here") for name in self.good_names]
        for member in members:
            member.router.send(member.router.node_id, b"note")
        wait_for(lambda: all(member.received for member in members), "the notes")

    def test_a_name_that_could_not_be_part_of_a_path_is_refused(self) -> None:
        for name in BAD_NAMES:
            error_of(partial(self.network.make, name), ConfigError)

    def test_a_live_name_is_not_given_twice(self) -> None:
        self.network.join("one", b"1")
        two = self.network.join("two", b"2")
        wait_for(lambda: two.sees("one", "two"), "one")
        error_of(lambda: self.network.join("one"), ConfigError)
        assert two.router.records()["one"] == b"1"

    # ---- records ----

    def test_a_record_appears_at_other_nodes_and_at_home(self) -> None:
        one, two = self.network.join("one"), self.network.join("two")
        one.router.publish(b"I am one")
        assert one.router.records() == {"one": b"I am one"}
        wait_for(lambda: two.router.records() == {"one": b"I am one"}, "the record")
        wait_for(lambda: one.changes and two.changes, "the callbacks")

    def test_a_record_is_replaced_by_the_next_one(self) -> None:
        one, two = self.network.join("one", b"0"), self.network.join("two", b"two")
        wait_for(lambda: two.sees("one", "two"), "the first record")
        for number in range(1, 101):
            one.router.publish(b"%d" % number)
        wait_for(lambda: two.router.records()["one"] == b"100", "the last record")
        assert one.router.records()["one"] == b"100"

    def test_the_largest_record_arrives_whole(self) -> None:
        record = os.urandom(MAX_RECORD_BYTES)
        self.network.join("one", record)
        two = self.network.join("two")
        wait_for(lambda: two.router.records().get("one") == record, "the record")

    def test_a_snapshot_of_the_records_does_not_change(self) -> None:
        one = self.network.join("one", b"old")
        before = one.router.records()
        one.router.publish(b"new")
        assert before == {"one": b"old"}

    def test_a_record_vanishes_with_its_node(self) -> None:
        one, two = self.network.join("one", b"1"), self.network.join("two", b"2")
        wait_for(lambda: one.sees("one", "two"), "two")
        changes = one.changes
        two.router.close()
        wait_for(lambda: one.sees("one"), "two to vanish")
        wait_for(lambda: one.changes > changes, "the callback")
        assert two.router.records() == {}

    def test_a_late_node_sees_the_records_of_earlier_ones(self) -> None:
        self.network.join("one", b"1")
        self.network.join("two", b"2")
        late = self.network.join("late", b"3")
        wait_for(lambda: late.router.records() == {"one": b"1", "two": b"2", "late": b"3"}, "all records")

    def test_three_nodes_find_each_other_through_the_one_they_know(self) -> None:
        members = {name: self.network.join(name, name.encode()) for name in ("known", "left", "right")}
        wait_for(lambda: all(member.sees(*members) for member in members.values()), "all nodes")
        members["left"].router.send("right", b"across")
        wait_for(lambda: members["right"].received == [("left", b"across")], "the message")

    # ---- presence ----

    def test_a_node_that_comes_back_with_a_later_epoch_is_used_again(self) -> None:
        one, two = self.network.join("one", b"1"), self.network.join("two", b"first epoch")
        wait_for(lambda: one.sees("one", "two"), "two")
        for _ in range(3):
            one.router.publish(b"1")
            two.router.publish(b"first epoch, later")
        two.router.close()
        again = self.network.join("two", b"second epoch")
        wait_for(lambda: one.router.records().get("two") == b"second epoch", "the second epoch")
        one.router.send("two", b"hello")
        wait_for(lambda: again.received, "the message")

    def test_a_killed_node_vanishes_without_a_goodbye(self) -> None:
        one, two = self.network.join("one", b"1"), self.network.join("two", b"2")
        wait_for(lambda: one.sees("one", "two"), "two")
        self.network.kill(two.router)
        wait_for(lambda: one.sees("one"), "two to vanish")
        error_of(lambda: one.router.send("two", b"hello"), Unreachable)

    # ---- messages ----

    def test_messages_arrive_whole_and_in_order_on_one_thread(self) -> None:
        one, two, three = self.network.join("one", b"1"), self.network.join("two", b"2"), self.network.join("three", b"3")
        wait_for(lambda: one.sees("one", "two", "three") and two.sees("one", "two", "three"), "all nodes")
        sent = [b"%d:" % number + os.urandom(number * 50) for number in range(200)]

        def send_all(member: Participant) -> None:
            for data in sent:
                member.router.send("three", data)

        run_all([threading.Thread(target=send_all, args=(member,)) for member in (one, two)])
        wait_for(lambda: len(three.received) == 400, "all messages")
        assert three.has_from("one") == sent
        assert three.has_from("two") == sent
        assert len(three.receiving_threads) == 1

    def test_each_stream_keeps_its_order_on_one_thread(self) -> None:
        one, two = self.network.join("one", b"1"), self.network.make("two")
        received: dict[str, list[bytes]] = {stream.name: [] for stream in Stream}
        threads: dict[str, set[int]] = {stream.name: set() for stream in Stream}

        def take(sender: str, data: bytes) -> None:
            name, message = data.split(b":", 1)
            received[name.decode()].append(message)
            threads[name.decode()].add(threading.get_ident())

        two.publish(b"2")
        two.start(take, lambda: None)
        wait_for(lambda: one.sees("one", "two"), "two")
        sent = [b"%d:" % number + os.urandom(number * 1000) for number in range(100)]

        def send_all(stream: Stream) -> None:
            for data in sent:
                one.router.send("two", stream.name.encode() + b":" + data, stream)

        run_all([threading.Thread(target=send_all, args=(stream,)) for stream in Stream])
        wait_for(lambda: received == {stream.name: sent for stream in Stream}, "all messages, in order")
        assert [len(found) for found in threads.values()] == [1] * len(Stream)

    def test_a_slow_receiver_of_data_holds_up_no_control_message(self) -> None:
        self._check_independent(Stream.DATA, [Stream.CONTROL])

    def test_a_slow_receiver_of_bulk_holds_up_neither_control_messages_nor_data(self) -> None:
        self._check_independent(Stream.BULK, [Stream.CONTROL, Stream.DATA])

    def _check_independent(self, slow: Stream, others: Sequence[Stream]) -> None:
        """A node that hangs on a message of one stream, while more keep coming, still receives messages of other streams."""
        one, two = self.network.join("one", b"1"), self.network.make("two")
        received: list[bytes] = []
        poured = [b"slow %d" % number + bytes(1 << 20) for number in range(32)]
        hanging, release = threading.Event(), threading.Event()

        def take(sender: str, data: bytes) -> None:
            if data.startswith(b"slow"):
                hanging.set()
                release.wait(TIMEOUT_S)
            received.append(data)

        def pour() -> None:
            for data in poured:
                one.router.send("two", data, slow)

        two.publish(b"2")
        two.start(take, lambda: None)
        wait_for(lambda: one.sees("one", "two"), "two")
        pouring = threading.Thread(target=pour)
        pouring.start()
        try:
            wait_for(hanging.is_set, "the first message")
            quick = [b"%d" % number for number in range(20)]
            for other in others:
                for data in quick:
                    one.router.send("two", data, other)
                wait_for(lambda: received == quick, f"messages of {other.name}, past those of {slow.name}")
                received.clear()
        finally:
            release.set()
            pouring.join()
        wait_for(lambda: received == poured, f"messages of {slow.name}")

    def test_large_messages_arrive_whole(self) -> None:
        one, two = self.network.join("one", b"1"), self.network.join("two", b"2")
        wait_for(lambda: one.sees("one", "two"), "two")
        sent = [os.urandom(4 << 20) for _ in range(5)]
        for data in sent:
            one.router.send("two", data)
        wait_for(lambda: len(two.received) == 5, "the messages")
        assert two.has_from("one") == sent

    def test_a_node_can_send_to_itself(self) -> None:
        one = self.network.join("one")
        one.router.send("one", b"note")
        wait_for(lambda: one.received == [("one", b"note")], "the note")

    def test_a_message_to_an_absent_node_is_an_error_that_names_it(self) -> None:
        one, two = self.network.join("one", b"1"), self.network.join("two", b"2")
        assert "stranger" in str(error_of(lambda: one.router.send("stranger", b"hello"), Unreachable))
        wait_for(lambda: one.sees("one", "two"), "two")
        one.router.send("two", b"hello")
        two.router.close()
        wait_for(lambda: one.sees("one"), "two to vanish")
        assert "two" in str(error_of(lambda: one.router.send("two", b"hello"), Unreachable))

    def test_refused_messages_are_counted_and_honest_nodes_have_none(self) -> None:
        one, two = self.network.join("one", b"1"), self.network.join("two", b"2")
        wait_for(lambda: one.sees("one", "two"), "two")
        one.router.send("two", b"hello")
        wait_for(lambda: two.received, "the message")
        assert sum(two.router.refused().values()) == 0

    # ---- callbacks ----

    def test_a_callback_that_fails_ends_nothing(self) -> None:
        one, two = self.network.join("one", b"1"), self.network.join("two", b"2")
        wait_for(lambda: one.sees("one", "two"), "two")
        one.router.send("two", b"raise")
        one.router.send("two", b"after")
        wait_for(lambda: two.received == [("one", b"after")], "the message after")
        changes = two.changes  # the first of them failed
        one.router.publish(b"new")
        wait_for(lambda: two.changes > changes, "another change")

    def test_a_callback_may_send_and_publish(self) -> None:
        one, two = self.network.join("one", b"1"), self.network.make("two")

        def reply(sender: str, data: bytes) -> None:
            two.publish(data)
            two.send(sender, b"got " + data)

        two.publish(b"2")
        two.start(reply, lambda: None)
        wait_for(lambda: one.sees("one", "two") and set(two.records()) == {"one", "two"}, "both")
        one.router.send("two", b"hello")
        wait_for(lambda: one.received == [("two", b"got hello")], "the reply")
        wait_for(lambda: one.router.records()["two"] == b"hello", "the record")

    def test_a_slow_change_callback_holds_up_no_message(self) -> None:
        one, two = self.network.join("one", b"1"), self.network.make("two")
        received: list[bytes] = []
        release = threading.Event()
        two.publish(b"2")
        two.start(lambda sender, data: received.append(data), lambda: (release.wait(TIMEOUT_S), None)[1])
        try:
            wait_for(lambda: one.sees("one", "two"), "two")
            one.router.send("two", b"hello")
            wait_for(lambda: received, "the message")
        finally:
            release.set()

    # ---- closing ----

    def test_closing_twice_is_fine_and_leaves_no_threads(self) -> None:
        before = set(threading.enumerate())
        one, two = self.network.join("one", b"1"), self.network.join("two", b"2")
        wait_for(lambda: one.sees("one", "two"), "two")
        one.router.send("two", b"hello")
        for member in (one, two):
            member.router.close()
            member.router.close()
        wait_for(lambda: set(threading.enumerate()) <= before, "the threads to end")
        error_of(lambda: one.router.send("two", b"hello"), Unreachable)
        one.router.publish(b"after the end")
        assert one.router.records() == {}

    def test_a_callback_may_close_its_router(self) -> None:
        before = set(threading.enumerate())
        one, two = self.network.join("one", b"1"), self.network.make("two")
        two.publish(b"2")
        two.start(lambda sender, data: two.close(), lambda: None)
        wait_for(lambda: one.sees("one", "two"), "two")
        one.router.send("two", b"please leave")
        wait_for(lambda: one.sees("one"), "two to leave")
        one.router.close()
        wait_for(lambda: set(threading.enumerate()) <= before, "the threads to end")

    def test_a_router_that_was_never_started_can_be_closed(self) -> None:
        router = self.network.make("one")
        router.publish(b"1")
        router.close()
        error_of(lambda: router.send("one", b"note"), Unreachable)
