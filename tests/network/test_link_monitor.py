"""LinkMonitor: what it measures, what it publishes, and what a peer that lies can change."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.messages import Echo
from penstock.domain.meta_model import Link
from penstock.network import link_monitor
from penstock.network.link_monitor import (
    ECHO_INTERVAL_S,
    ECHO_TIMEOUT_S,
    MAX_PUBLISHED,
    MAX_TRANSFER_AGE_S,
    MIN_ANSWER_INTERVAL_S,
    MIN_TRANSFER_BYTES,
    PUBLISH_INTERVAL_S,
    RECENT_ECHOES,
    LinkMonitor,
)
from penstock.network.wire import IDLE_TIMEOUT_S, MAX_OUTBOXES

MB = 1_000_000


class Here:
    """A monitor on a clock that is moved by hand."""

    def __init__(self, *peers: str) -> None:
        self.now = 1000.0
        self.sent: list[tuple[str, Echo]] = []
        self.monitor = LinkMonitor(lambda node, echo: self.sent.append((node, echo)), lambda: self.now)
        self.monitor.set_peers(peers)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def ask(self) -> tuple[str, int]:
        """Wait until the next echo leaves, and return to which node, and its stamp."""
        before = len(self.sent)
        while len(self.sent) == before:
            self.wait(1.0)
            self.monitor.tick()
        (asked,) = self.sent[before:]
        assert not asked[1].answer
        return asked[0], asked[1].stamp

    def measure(self, *round_trips: float) -> None:
        """With one peer: let it answer as many echoes, each after this long."""
        for round_trip in round_trips:
            node, stamp = self.ask()
            self.wait(round_trip)
            self.monitor.on_echo(node, Echo(stamp, answer=True))

    def receive(self, node: str, *megabytes_per_second: float) -> None:
        for speed in megabytes_per_second:
            self.monitor.observe_transfer(node, 4 * MB, 4 / speed)

    def link(self, node: str = "b") -> Link:
        return next((link for link in self.monitor.links() if link.node == node), Link(node))


# ---- round trips ----


def test_the_smallest_of_the_last_round_trips_counts() -> None:
    here = Here("b")
    here.measure(0.030, 0.020, 0.500)
    assert here.link() == Link("b", 0.020)
    here.measure(*[0.040] * RECENT_ECHOES)
    assert here.link() == Link("b", 0.040), "the others are too old"


def test_figures_have_two_digits() -> None:
    here = Here("b")
    here.measure(0.0123456)
    here.receive("b", 23.456)
    assert here.link() == Link("b", 0.012, 23 * MB)


def test_a_node_is_asked_every_few_seconds_and_not_while_it_owes_an_answer() -> None:
    here = Here("b")
    _, first = here.ask()
    asked_at = here.now
    here.monitor.on_echo("b", Echo(first, answer=True))
    _, second = here.ask()
    assert here.now - asked_at == pytest.approx(ECHO_INTERVAL_S, abs=1.0)
    asked_at = here.now
    _, third = here.ask()
    assert here.now - asked_at == pytest.approx(ECHO_TIMEOUT_S, abs=1.0)
    assert len({first, second, third}) == 3
    here.monitor.on_echo("b", Echo(second, answer=True))
    assert here.link() == Link("b"), "the first took no time, and the second came too late"


def test_hundreds_of_nodes_are_all_measured_and_few_outboxes_are_busy() -> None:
    names = [f"n{number}" for number in range(300)]
    here = Here(*names)
    for _ in range(2 * len(names) + 10):
        before = len(here.sent)
        here.wait(1.0)
        here.monitor.tick()
        for node, echo in here.sent[before:]:
            here.wait(0.01)
            here.monitor.on_echo(node, Echo(echo.stamp, answer=True))
    asked = Counter(node for node, _ in here.sent)
    assert asked.keys() == set(names)
    assert max(asked.values()) - min(asked.values()) <= 1
    within_idle_time = len({node for node, _ in here.sent[-int(IDLE_TIMEOUT_S) :]})
    assert 2 * within_idle_time < MAX_OUTBOXES / 2, "as many again for the answers, and the rest is for routes"
    assert len(here.monitor.published()) == MAX_PUBLISHED


def test_nodes_that_start_together_do_not_all_ask_the_same_one_first() -> None:
    first = {Here("b", "c", "d", "e").ask()[0] for _ in range(64)}
    assert len(first) > 1


# ---- what a peer can do ----


def test_an_echo_is_answered_once_and_an_answer_never() -> None:
    here = Here("b")
    here.monitor.on_echo("b", Echo(7))
    here.monitor.on_echo("b", Echo(8, answer=True))
    assert here.sent == [("b", Echo(7, answer=True))]


def test_a_flood_of_echoes_gets_few_answers() -> None:
    here = Here("b", "c")
    for number in range(1000):
        here.wait(0.001)
        here.monitor.on_echo("b", Echo(number))
    assert len(here.sent) <= 1 / MIN_ANSWER_INTERVAL_S + 1
    here.monitor.on_echo("c", Echo(5))
    assert here.sent[-1] == ("c", Echo(5, answer=True)), "others are answered all the same"


def test_a_node_that_is_not_there_gets_no_answer_and_leaves_no_trace() -> None:
    here = Here("b")
    for number in range(100):
        here.monitor.on_echo(f"ghost{number}", Echo(number))
        here.monitor.on_echo(f"ghost{number}", Echo(number, answer=True))
        here.receive(f"ghost{number}", 1.0)
    assert here.sent == []
    assert here.monitor.links() == ()
    assert list(here.monitor._peers) == ["b"]


def test_a_node_that_left_is_forgotten() -> None:
    here = Here("b")
    here.measure(0.02)
    here.monitor.set_peers(["c"])
    assert here.monitor.links() == ()
    here.monitor.set_peers(["b", "c"])
    assert here.link() == Link("b")


stamps = st.sampled_from([0, 1, 2**62 - 1])
lies = st.one_of(
    st.tuples(st.just("echo"), st.builds(Echo, stamps, st.booleans())),
    st.tuples(st.just("repeat"), st.integers(0, 9)),  # answer one of the last echoes, maybe again, maybe another node's
    st.tuples(st.just("wait"), st.sampled_from([0.0, 0.01, 3.0])),
)


@given(script=st.lists(lies, max_size=60))
def test_whatever_a_peer_sends_changes_its_own_link_alone_and_is_not_amplified(script: list[tuple[str, object]]) -> None:
    here = Here("b", "liar")
    from_liar = 0
    for what, value in script:
        if what == "wait":
            here.wait(float(value))  # type: ignore[arg-type]
        elif what == "repeat":
            asked = [echo for _, echo in here.sent if not echo.answer]
            if asked:
                from_liar += 1
                here.monitor.on_echo("liar", Echo(asked[-1 - int(value) % len(asked)].stamp, answer=True))  # type: ignore[call-overload]
        else:
            from_liar += 1
            here.monitor.on_echo("liar", value)  # type: ignore[arg-type]
        here.monitor.tick()
        assert here.link("b") == Link("b"), "it never answered"
        assert all(0 <= link.round_trip <= here.now - 1000.0 for link in here.monitor.links())
    assert sum(echo.answer for _, echo in here.sent) <= from_liar
    assert all(node == "liar" for node, echo in here.sent if echo.answer)
    assert len(here.monitor._peers) == 2


# ---- transfers ----


def test_one_odd_transfer_does_not_change_the_speed() -> None:
    here = Here("b")
    assert here.link().bytes_per_second == 0
    here.receive("b", 2.4, 2.4, 900.0, 2.4, 0.001, 2.4)
    assert here.link().bytes_per_second == 2.4 * MB


@pytest.mark.parametrize("size, seconds", [(MIN_TRANSFER_BYTES - 1, 0.1), (MB, 0.0), (MB, -1.0), (MB, float("nan"))])
def test_a_transfer_that_says_nothing_is_ignored(size: int, seconds: float) -> None:
    here = Here("b")
    here.monitor.observe_transfer("b", size, seconds)
    assert here.monitor.links() == ()


def test_a_speed_beyond_all_measure_is_cut() -> None:
    here = Here("b")
    here.monitor.observe_transfer("b", 1 << 40, 1e-300)
    assert here.link().bytes_per_second == link_monitor.MAX_BYTES_PER_SECOND


def test_newer_transfers_weigh_more_and_old_ones_are_forgotten() -> None:
    here = Here("b")
    here.receive("b", *[100.0] * 5)
    here.wait(180.0)
    here.receive("b", 2.0)
    assert here.link().bytes_per_second == 2 * MB, "five from three minutes ago weigh less than this one"
    here.wait(MAX_TRANSFER_AGE_S + 1)
    assert here.monitor.links() == ()


def test_many_transfers_take_no_more_memory_than_a_few() -> None:
    here = Here("b")
    here.receive("b", *[1.0] * 1000, *[3.0] * link_monitor.RECENT_TRANSFERS)
    assert here.link().bytes_per_second == 3 * MB
    assert len(here.monitor._peers["b"].transfers) == link_monitor.RECENT_TRANSFERS


# ---- what is published ----


def test_links_are_published_again_only_after_a_noticeable_change() -> None:
    here = Here("b")
    assert here.monitor.published() == ()
    here.measure(0.100)
    assert here.monitor.published() == (Link("b", 0.1),), "it has appeared"
    here.measure(*[0.120] * RECENT_ECHOES)
    assert here.link().round_trip == 0.12
    assert here.monitor.published() == (Link("b", 0.1),)
    here.measure(*[0.130] * RECENT_ECHOES)
    assert here.monitor.published() == (Link("b", 0.13),)
    here.receive("b", 10.0)
    here.wait(PUBLISH_INTERVAL_S)
    assert here.monitor.published() == (Link("b", 0.13, 10 * MB),), "its speed is known"
    here.receive("b", 9.0, 9.0, 9.0)
    here.wait(PUBLISH_INTERVAL_S)
    assert here.monitor.published() == (Link("b", 0.13, 10 * MB),)
    here.receive("b", *[7.0] * 20)
    here.wait(PUBLISH_INTERVAL_S)
    assert here.monitor.published() == (Link("b", 0.13, 7 * MB),)
    here.monitor.set_peers([])
    assert here.monitor.published() == (Link("b", 0.13, 7 * MB),), "it was published just now"
    here.wait(PUBLISH_INTERVAL_S)
    assert here.monitor.published() == (), "it has vanished"


def test_a_short_round_trip_is_published_also_where_the_speed_was_known_before() -> None:
    here = Here("b")
    here.receive("b", 10.0)
    assert here.monitor.published() == (Link("b", 0.0, 10 * MB),)
    here.measure(0.0002)
    here.wait(PUBLISH_INTERVAL_S)
    assert here.monitor.published() == (Link("b", 0.0002, 10 * MB),)


def test_noise_on_a_lan_is_not_published() -> None:
    here = Here("b")
    here.measure(0.0002)
    assert here.monitor.published() == (Link("b", 0.0002),)
    here.measure(*[0.0006] * RECENT_ECHOES)
    assert here.monitor.published() == (Link("b", 0.0002),)
    here.measure(*[0.0008] * RECENT_ECHOES)
    assert here.monitor.published() == (Link("b", 0.0008),)


def test_a_record_has_the_links_that_are_in_use_and_the_nearest() -> None:
    far, near, used = "far", [f"n{number}" for number in range(MAX_PUBLISHED)], "used"
    here = Here(far, *near, used)
    for _ in range(len(near) + 2):
        node, stamp = here.ask()
        here.wait({far: 0.5, used: 0.9}.get(node, 0.001))
        here.monitor.on_echo(node, Echo(stamp, answer=True))
    here.receive(used, 1.0)
    published = {link.node for link in here.monitor.published()}
    assert (len(published), far in published, used in published) == (MAX_PUBLISHED, False, True)


def test_links_that_are_about_as_near_do_not_replace_each_other_in_the_record() -> None:
    here = Here(*(f"n{number}" for number in range(MAX_PUBLISHED)))
    for _ in range(MAX_PUBLISHED):
        node, stamp = here.ask()
        here.wait(0.1)
        here.monitor.on_echo(node, Echo(stamp, answer=True))
    before = here.monitor.published()
    assert len(before) == MAX_PUBLISHED
    here.monitor.set_peers([*(link.node for link in before), "rival"])
    while here.link("rival") == Link("rival"):
        node, stamp = here.ask()
        here.wait(0.09 if node == "rival" else 0.1)
        here.monitor.on_echo(node, Echo(stamp, answer=True))
    here.wait(PUBLISH_INTERVAL_S)
    assert here.monitor.published() == before
