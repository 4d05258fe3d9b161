"""Which pipe a segment belongs to: ids that nodes choose and adopt, whatever they know of each other when they start."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest

from penstock.domain.meta_model import MetaModel
from penstock.pipes.pipe_ids import PIPE_ID, PipeIds, pipe_of, split
from tests.pipes.network_of import pipe, segment

DEPTH = 30


class Node:
    """A node that publishes its segments with their pipes, and knows what it has read of the others."""

    def __init__(self, name: str, *layers: str, max_pipes: int = 1) -> None:
        self.name = name
        self.max_pipes = max_pipes
        self.own = [segment(name, one, pipe="") for one in layers]
        self.ids = PipeIds(name, 1)
        self.record: tuple[MetaModel, ...] = ()

    def publish(self, *known: Node) -> list[str]:
        others = [meta for node in known if node is not self for meta in node.record]
        self.record = tuple(self.ids.assign(self.own, pipe(*others), self.max_pipes))
        return [meta.pipe for meta in self.record]

    @property
    def pipe(self) -> str:
        (name,) = {meta.pipe for meta in self.record}
        return name


class Seen(Node):
    """What a node published before."""

    def __init__(self, node: Node) -> None:
        self.name = node.name
        self.record = node.record


def settle(*nodes: Node, at_once: bool = False) -> dict[str, bool]:
    """Let all publish until nothing changes; return whether each pipe is complete. If `at_once`, all read the same records."""
    for _ in range(20):
        before = [node.record for node in nodes]
        seen = [Seen(node) for node in nodes]
        for node in nodes:
            node.publish(*([other for other in seen if other.name != node.name] if at_once else nodes))
        if before == [node.record for node in nodes]:
            found = split(pipe(*(meta for node in nodes for meta in node.record)))
            return {name: not part.missing() for name, part in found.items()}
    raise AssertionError("the ids keep changing")


def test_the_first_node_opens_a_pipe_with_a_short_id() -> None:
    node = Node("a", "0:10")
    node.publish()
    assert PIPE_ID.fullmatch(node.pipe)
    assert node.publish() == [node.pipe], "it keeps it"


def test_all_segments_of_a_node_that_complete_each_other_are_in_one_pipe() -> None:
    node = Node("a", "0:2", "28:30")
    assert len(set(node.publish())) == 1


def test_a_node_that_fills_the_gap_of_a_pipe_adopts_its_id() -> None:
    a, b = Node("a", "0:10"), Node("b", "10:30")
    a.publish()
    b.publish(a)
    assert b.pipe == a.pipe
    assert settle(a, b) == {a.pipe: True}


def test_nodes_that_start_at_once_end_up_in_one_pipe() -> None:
    a, b, c = Node("a", "0:10"), Node("b", "10:20"), Node("c", "20:30")
    for node in (a, b, c):
        node.publish()  # none knows of another
    assert len({a.pipe, b.pipe, c.pipe}) == 3
    lowest = min(a.pipe, b.pipe, c.pipe)
    assert settle(a, b, c) == {lowest: True}


def test_a_copy_is_a_replica_of_the_pipe_where_no_other_may_be_opened() -> None:
    a, b, c = Node("a", "0:10"), Node("b", "10:30"), Node("c", "0:10")
    settle(a, b)
    c.publish(a, b)
    assert c.pipe == a.pipe


def test_max_pipes_lets_a_node_open_another_and_others_fill_that() -> None:
    a, b = Node("a", "0:30"), Node("b", "0:10", max_pipes=2)
    c = Node("c", "10:30", max_pipes=2)
    settle(a)
    b.publish(a)
    assert b.pipe != a.pipe
    c.publish(a, b)
    assert c.pipe == b.pipe
    assert settle(a, b, c) == dict.fromkeys((a.pipe, b.pipe), True)
    assert Node("d", "0:30", max_pipes=2).publish(a, b, c)[0] in (a.pipe, b.pipe), "there are two already"


def test_a_replica_of_several_pipes_belongs_to_the_one_that_has_fewer_copies() -> None:
    a, b = Node("a", "0:30"), Node("b", "0:30", max_pipes=2)
    settle(a, b)
    first, second = Node("c", "0:10"), Node("d", "0:10")
    settle(a, b, first)
    settle(a, b, first, second)
    assert {first.pipe, second.pipe} == {a.pipe, b.pipe}


def test_layers_that_were_loaded_twice_become_a_replica_when_the_pipe_is_complete() -> None:
    a, b, c = Node("a", "0:10"), Node("b", "0:10"), Node("c", "10:30")
    a.publish()
    b.publish()
    found = settle(a, b, c)
    assert list(found.values()) == [True]
    assert a.pipe == b.pipe == c.pipe


def test_a_pipe_keeps_its_id_when_a_node_leaves_and_comes_back() -> None:
    a, b = Node("a", "0:10"), Node("b", "10:30")
    settle(a, b)
    name = a.pipe
    assert settle(a) == {name: False}
    again = Node("b", "10:30")
    again.ids = PipeIds("b", 2)
    assert settle(a, again) == {name: True}


def test_segments_of_nodes_that_name_no_pipe_are_one_pipe_that_others_adopt() -> None:
    old = [segment("old", "0:10", pipe="smollm2-135m/s1"), segment("older", "10:20", pipe="")]
    assert pipe_of(old[0]) == pipe_of(old[1])
    assert PIPE_ID.fullmatch(pipe_of(old[0]))
    assert pipe_of(segment("odd", "0:10", pipe="\x1b[31m no id")) == pipe_of(old[0])
    node = Node("a", "20:30")
    (named,) = node.ids.assign(node.own, pipe(*old), 1)
    assert named.pipe == pipe_of(old[0])
    assert not split(pipe(*old, named))[named.pipe].missing()


def test_a_node_that_is_leaving_is_replaced_in_its_pipe() -> None:
    a, b, c = Node("a", "0:10"), Node("b", "10:30"), Node("c", "10:30")
    settle(a, b)
    b.record = tuple(replace(meta, draining=True) for meta in b.record)
    c.publish(a, b)
    assert c.pipe == a.pipe


def test_a_replica_completes_the_next_pipe() -> None:
    a, b, c = Node("a", "0:15"), Node("b", "15:30"), Node("c", "0:15")
    settle(a, b, c)
    assert c.pipe == a.pipe
    d = Node("d", "15:30", max_pipes=2)
    assert list(settle(a, b, c, d).values()) == [True, True]
    assert {a.pipe, b.pipe} != {c.pipe, d.pipe}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_ids_settle_whatever_nodes_hold_and_in_whichever_order_they_read(seed: int, at_once: bool) -> None:
    dice = random.Random(seed)
    nodes = []
    for number in range(dice.randint(1, 7)):
        start = dice.choice([0, 0, 5, 10, 15, 20])
        end = dice.choice([end for end in (5, 10, 15, 20, 30, 30) if end > start])
        nodes.append(Node(f"n{number}", f"{start}:{end}", max_pipes=dice.randint(1, 3)))
    for _ in range(2 * len(nodes)):
        node = dice.choice(nodes)
        node.publish(*dice.sample(nodes, dice.randint(0, len(nodes))))
    found = settle(*nodes, at_once=at_once)
    incomplete = [name for name, complete in found.items() if not complete]
    held = {layer for node in nodes for meta in node.own for layer in meta.layers.layers()}
    if len(held) == DEPTH and all(node.max_pipes == 1 for node in nodes):
        assert incomplete == []
    if len(held) < DEPTH:
        assert not any(found.values())


def test_the_log_says_what_becomes_of_a_segment(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.network")
    a, b, c = Node("a", "0:10"), Node("b", "10:20"), Node("c", "20:30")
    a.publish()
    b.publish()
    c.publish(a)
    low, high = sorted([a, b], key=lambda node: node.pipe)
    high_id = high.pipe
    settle(a, b, c)
    assert f"smollm2-135m: this node opens pipe {low.pipe} with layers" in caplog.text
    assert f"this node joins pipe {c.pipe} with layers 20:30" in caplog.text or high is a
    assert f"this node moves from pipe {high_id} to pipe {low.pipe} with layers" in caplog.text
