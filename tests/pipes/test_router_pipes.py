"""How the records of all nodes become pipes."""

from __future__ import annotations

from penstock.pipes.router_pipes import RouterPipes
from tests.pipes.network_of import MODEL, SHAPE, record, segment


def test_there_is_one_pipe_per_model_and_shape_in_order() -> None:
    records = [
        record("b", segment("b", "10:30"), segment("b", "0:5", model="z", num_layers=5)),
        record("a", segment("a", "0:10"), segment("a", "0:30", shape="s0")),
    ]
    pipes = RouterPipes(lambda: records).pipes()
    assert [(pipe.model, pipe.shape, pipe.num_layers) for pipe in pipes] == [(MODEL, "s0", 30), (MODEL, "s1", 30), ("z", "s1", 5)]
    assert [found.node for found in pipes[1].segments] == ["a", "b"]
    assert all(pipe.is_complete() for pipe in pipes)


def test_records_are_read_anew_each_time() -> None:
    records = [record("a", segment("a", "0:10"))]
    pipes = RouterPipes(lambda: records)
    assert not pipes.find(MODEL, SHAPE, 30).is_complete()
    records.append(record("b", segment("b", "10:30")))
    assert pipes.find(MODEL, SHAPE, 30).is_complete()


def test_a_model_that_nobody_holds_is_a_pipe_without_segments() -> None:
    found = RouterPipes(list).find("other", "s", 12)
    assert (found.model, found.shape, found.num_layers, found.segments) == ("other", "s", 12, ())
    assert RouterPipes(list).pipes() == []


def test_all_segments_of_a_draining_node_drain() -> None:
    pipes = RouterPipes(lambda: [record("a", segment("a", "0:30"), draining=True)])
    assert not pipes.find(MODEL, SHAPE, 30).is_complete()
    assert pipes.pipes()[0].segments[0].draining


def test_a_node_speaks_for_itself_alone() -> None:
    assert RouterPipes(lambda: [record("evil", segment("a", "0:30"))]).pipes() == []


def test_a_node_that_says_another_number_of_layers_does_not_join() -> None:
    honest = [record(name, segment(name, "0:30")) for name in "ab"]
    liar = record("evil", segment("evil", "0:2", num_layers=2), segment("evil", "0:1", num_layers=2))
    nothing = record("nothing", segment("nothing", "0:0", num_layers=0))
    pipes = RouterPipes(lambda: [liar, nothing, *honest])
    assert [(pipe.num_layers, len(pipe.segments)) for pipe in pipes.pipes()] == [(30, 2)]
    assert len(pipes.find(MODEL, SHAPE, 2).segments) == 2
