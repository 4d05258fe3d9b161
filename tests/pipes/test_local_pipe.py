"""A Pipe on its own node: which layers it has, whether they are all, and how a NetworkJob leaves it."""

from __future__ import annotations

import pytest
import torch

from penstock.domain.messages import Message
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob, PackedHidden, Span
from penstock.pipes.hidden_codec import unpack
from penstock.pipes.pipe import Pipe
from tests.engine.fakes import FakeSegment


def pipe(*ranges: tuple[int, int], layers: int = 6) -> Pipe:
    return Pipe("fake", layers, [FakeSegment(start, end, 4, 16) for start, end in ranges])


@pytest.mark.parametrize(
    "ranges,complete",
    [
        ([(0, 6)], True),
        ([(3, 6), (0, 3)], True),
        ([(0, 4), (2, 6)], True),
        ([(0, 3)], False),
        ([(3, 6)], False),
        ([(0, 2), (3, 6)], False),
        ([], False),
    ],
)
def test_a_pipe_is_complete_when_its_segments_cover_all_layers(ranges: list[tuple[int, int]], complete: bool) -> None:
    assert pipe(*ranges).is_complete() is complete
    assert (pipe(*ranges).explain() == "") is complete


def test_a_layer_is_found_in_the_segment_that_holds_it() -> None:
    found = pipe((0, 2), (2, 5))
    assert [str(segment.layers) for layer in range(5) if (segment := found.get_layer(layer))] == ["0:2"] * 2 + ["2:5"] * 3


def test_a_job_is_sent_to_a_node_by_its_name_with_its_hidden_states_as_bytes() -> None:
    sent: list[tuple[str, Message]] = []

    class Wire:
        def send(self, node: str, message: Message) -> None:
            sent.append((node, message))

    hidden = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    job = NetworkJob(RouteId("a", 1, 0), 0, [Span(0, 0, 0, 0, 0, 2, 1)], hidden=hidden)
    Pipe("fake", 6, [], wire=Wire()).send_job("b", job)
    ((node, message),) = sent
    assert node == "b"
    assert message is job
    assert isinstance(job.hidden, PackedHidden)
    assert torch.equal(unpack(job.hidden), hidden)


def test_hidden_states_leave_in_the_format_of_the_pipe_or_in_the_one_they_came_in() -> None:
    class Wire:
        def send(self, node: str, message: Message) -> None:
            assert isinstance(message, NetworkJob)
            kinds.append(message.hidden.dtype)

    kinds: list[str] = []
    over = Pipe("fake", 6, [], wire=Wire(), hidden_format="bfloat16")
    for arrived in (None, "int8"):
        job = NetworkJob(RouteId("a", 1, 0), 0, [Span(0, 0, 0, 0, 0, 2, 1)], hidden=torch.ones(2, 3))
        job.format = arrived  # type: ignore[assignment]
        over.send_job("b", job)
    assert kinds == ["bfloat16", "int8"]
