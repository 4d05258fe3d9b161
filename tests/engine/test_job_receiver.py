"""JobReceiver: NetworkJobs with a wrong checksum, and messages from several threads."""

from __future__ import annotations

import contextlib
import threading

import pytest

from penstock.domain.fsm import ComputeStep
from penstock.domain.messages import Bounce, BounceReason, Message
from penstock.domain.span import NetworkJob, PackedHidden, Span
from penstock.domain.updates import JobDone
from penstock.network.codec import encode
from penstock.simulate.letter import Letter
from penstock.simulate.node import Machine
from tests.engine.world import Faults, World

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.mark.parametrize("hop", ["b", "c"])
def test_a_damaged_job_is_not_run_and_its_origin_computes_the_tokens_again(hop: str) -> None:
    damaged: list[NetworkJob] = []

    def third(sender: str, destination: str, message: Message) -> bool:
        hit = isinstance(message, NetworkJob) and bool(message.spans) and destination == hop and message.step is ComputeStep.LAYER
        if hit and isinstance(message, NetworkJob):
            damaged.append(message)
        return hit and len(damaged) == 3

    places = [Machine("a", (), ends=True), Machine("b", ((0, 2),)), Machine("c", ((2, 4),))]
    world = World(*places, faults=Faults(corrupt=1.0, hits=third, part=(0.97, 0.99)))
    world.open_routes("a")
    world.watching = True
    asked = world.ask("a", PROMPT)
    world.run_until(lambda: asked.final is not None)
    bounced = [(sender, to, message.reason) for sender, to, message in world.seen if isinstance(message, Bounce)]
    assert bounced == [(hop, "a", BounceReason.DAMAGED)]
    assert world[hop].engine.stats.refused["damaged_message"] == 1
    assert asked.job.sequences[0].attempt == 1, "restarted from the last token that had passed all stages"
    assert isinstance(asked.final, JobDone)
    world.finish()  # compares the tokens with those of an undisturbed run


class SharedCounts(dict[str, int]):
    """Lets two threads read a count before either writes, unless they take turns."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(2)

    def get(self, key: str, default: int = 0) -> int:  # type: ignore[override]
        found = super().get(key, default)
        with contextlib.suppress(threading.BrokenBarrierError):
            self._both.wait(0.2)
        return found


def test_bad_messages_of_two_streams_are_both_counted() -> None:
    node = World(Machine("a", ((0, 4),), ends=True), Machine("b", ()))["a"]
    node.engine.stats.refused = SharedCounts()
    threads = [threading.Thread(target=node.receiver.on_message, args=("b", Letter.of(b"nonsense"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(node.engine.stats.refused) == {"malformed_message": 2}


@pytest.mark.parametrize("step", [ComputeStep.LAYER, ComputeStep.HEAD])
def test_a_member_that_is_not_on_a_route_fills_no_memory_while_a_node_computes(step: ComputeStep) -> None:
    world = World(Machine("a", (), ends=True), Machine("b", ((0, 4),)), Machine("x", ()))
    world.open_routes("a")
    route = world["a"].origin.route
    assert route is not None
    hidden = PackedHidden("float32", 1000, 1, bytes(4000))
    job = NetworkJob(route.id, 0, [Span(0, 0, 0, 0, 0, 1000, 1000)], step=step, hidden=hidden)
    for node in ("a", "b"):
        world[node].receive("x", Letter.of(encode(job)))
        assert world[node].engine._inbox.pending_bytes < 4000, "only its header waits to be refused"
