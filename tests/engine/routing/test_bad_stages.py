"""Nodes on a route that mean no good: what they send home, offer or claim is checked, and no answer hangs or is wrong for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from penstock.config.engine import EngineConfig
from penstock.domain.messages import Bounce, BounceReason, Lease, Message, RouteOffer
from penstock.domain.span import NetworkJob, PackedHidden, Refusal, Span, Verdict
from penstock.domain.updates import JobFailed
from penstock.engine.routing.origin import route_opener as route
from penstock.simulate.node import Machine
from tests.engine.world import GREEDY, World

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
HUGE = 2**47


def with_a_liar(
    lie: Callable[[Message], list[Message]], *, replica: bool = False, window: int | None = None, **more: Any
) -> World:
    """`x` holds the last layers, and what it sends goes through `lie`."""
    places = [Machine("a", ((0, 1),), ends=True), Machine("b", ((1, 3),)), Machine("x", ((3, 4),))]
    if replica:
        places.append(Machine("z", ((3, 4),)))
    world = World(*places, config=EngineConfig(block_size=4, chunk=4, policy="fcfs", window=window), **more)
    if not replica:
        world.open_routes("a")
    liar = world["x"]
    tell = liar.send

    def telling(node: str, message: Message) -> None:
        for output in lie(message):
            tell(node, output)

    liar.send = telling  # type: ignore[method-assign]
    return world


def altered(message: NetworkJob, spans: list[Span], width: int = 1) -> NetworkJob:
    rows = sum(span.rows for span in spans)
    hidden = PackedHidden("float32", rows, width, b"\0" * (4 * rows * width)) if rows else None
    return NetworkJob(message.route, message.number, spans, step=message.step, current_layer=4, hidden=hidden)


HOMECOMINGS: dict[str, Callable[[NetworkJob], NetworkJob]] = {
    "the same Span twice": lambda m: altered(m, [*m.spans, *m.spans]),
    "another sequence": lambda m: altered(m, [span._replace(seq_id=HUGE) for span in m.spans]),
    "more tokens": lambda m: altered(m, [span._replace(n=span.n + 1) for span in m.spans]),
    "rows that nobody asked for": lambda m: altered(m, [span._replace(n=span.n + 1, rows=span.rows + 1) for span in m.spans]),
    "a newer attempt": lambda m: altered(m, [span._replace(attempt=span.attempt + 1) for span in m.spans]),
    "no Spans": lambda m: altered(m, []),
    "another width": lambda m: altered(m, list(m.spans), width=3),
    "another number": lambda m: replace(m, number=m.number + 1),
    "a refusal of all": lambda m: replace(altered(m, []), refusals=_refusals(m, Verdict.NO_ROOM, 0)),
    "an absurd gap": lambda m: replace(altered(m, []), refusals=_refusals(m, Verdict.GAP, HUGE)),
    "a malformed gap": lambda m: replace(altered(m, []), refusals=_refusals(m, Verdict.MALFORMED, HUGE)),
}


def _refusals(message: NetworkJob, verdict: Verdict, kv_len: int) -> list[Refusal]:
    return [Refusal(span.seq_id, span.incarnation, span.attempt, verdict, kv_len, "somebody") for span in message.spans]


@pytest.mark.parametrize("how", HOMECOMINGS)
def test_what_comes_home_altered_now_and_then_spoils_nothing(how: str) -> None:
    dice = Random(how)

    def lie(message: Message) -> list[Message]:
        if isinstance(message, NetworkJob) and message.spans and dice.random() < 0.15:
            return [HOMECOMINGS[how](message)]
        return [message]

    world = with_a_liar(lie, seed=1)
    for i in range(2):
        world.ask("a", PROMPT[i:])
    world.finish()


@pytest.mark.parametrize("how", HOMECOMINGS)
def test_a_job_whose_answers_always_come_home_altered_ends_with_an_error(how: str) -> None:
    world = with_a_liar(
        lambda message: [HOMECOMINGS[how](message)] if isinstance(message, NetworkJob) and message.spans else [message],
        recovery_timeout=10.0,
    )
    asked = world.ask("a", PROMPT, may_fail=True)
    world.run_until(lambda: asked.final is not None, 120.0, "the job")
    assert isinstance(asked.final, JobFailed)
    assert not asked.said()


@pytest.mark.parametrize("how", ["no Spans", "more tokens", "an absurd gap"])
def test_a_node_that_alters_what_it_sends_home_is_left_for_its_replica(how: str) -> None:
    world = with_a_liar(
        lambda message: [HOMECOMINGS[how](message)] if isinstance(message, NetworkJob) and message.spans else [message],
        replica=True,
    )
    world.open_routes("a")
    asked = [world.ask("a", PROMPT[i:]) for i in range(2)]
    world.all_answered(asked)


@pytest.mark.parametrize("reason", BounceReason)
def test_a_storm_of_bounces_ends_or_goes_elsewhere(reason: BounceReason) -> None:
    def lie(message: Message) -> list[Message]:
        return [Bounce(message.route, message.number, reason)] * 3 if isinstance(message, NetworkJob) else [message]

    alone = with_a_liar(lie, recovery_timeout=10.0)
    asked = alone.ask("a", PROMPT, may_fail=True)
    alone.run_until(lambda: asked.final is not None, 120.0, "the job")
    assert isinstance(asked.final, JobFailed)
    replicated = with_a_liar(lie, replica=True)
    replicated.open_routes("a")
    replicated.all_answered([replicated.ask("a", PROMPT)])


@pytest.mark.parametrize("number", [0, 1, 2, HUGE])
@pytest.mark.parametrize("stamp", [0, 1, 2**61])
def test_silly_numbers_in_offers_and_pongs_are_not_believed(number: int, stamp: int) -> None:
    def lie(message: Message) -> list[Message]:
        if isinstance(message, RouteOffer):
            return [replace(message, blocks=max(2, number), credits=number)]
        if isinstance(message, Lease):
            return [Lease(message.route, stamp, number, number), Lease(message.route, 0, number, HUGE)]
        return [message]

    world = with_a_liar(lie, window=2)
    world.restart("b")  # so that a route is opened by these offers
    world.run(0.2)
    world.open_routes("a")
    asked = world.ask("a", PROMPT[:3], replace(GREEDY, max_tokens=3), may_fail=number < 2)
    world.run_until(lambda: asked.final is not None, 240.0, "the job")
    assert world["a"].origin.sequences.pool.capacity <= 24
    world.check_outcome(asked)


def test_a_record_with_absurd_memory_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert route.MAX_LEASE_BLOCKS <= 1 << 20, "as many can be counted without harm"
    monkeypatch.setattr(route, "MAX_LEASE_BLOCKS", 1000)
    world = World(Machine("a", (), ends=True), Machine("x", ((0, 4),)))
    record = world["x"].record

    def boasting() -> Any:
        real = record()
        return replace(
            real, segments=tuple(replace(s, kv_blocks=HUGE, kv_free=HUGE, seconds=1e9, load=1e9) for s in real.segments)
        )

    liar = world["x"]
    liar.record = boasting  # type: ignore[method-assign]
    tell = liar.send
    liar.send = lambda node, m: tell(node, replace(m, blocks=HUGE) if isinstance(m, RouteOffer | Lease) else m)  # type: ignore[method-assign]
    world.spread_news(liar)
    world.run(0.2)
    world["a"].origin.lose_route("a test")
    world.open_routes("a")
    assert world["a"].origin.sequences.pool.capacity == 1000
    asked = world.ask("a", PROMPT, replace(GREEDY, max_tokens=4))
    world.run_until(lambda: asked.final is not None)
    world.check_outcome(asked)


def test_a_stage_that_says_it_computed_for_years_is_given_no_more_patience() -> None:
    state = {"silent": False}

    def lie(message: Message) -> list[Message]:
        if isinstance(message, NetworkJob):
            return [] if state["silent"] else [replace(message, services=[1e9] * len(message.services))]
        return [message]

    world = with_a_liar(lie, recovery_timeout=10.0)
    asked = world.ask("a", PROMPT, replace(GREEDY, max_tokens=80), may_fail=True)
    world.run_until(lambda: len(asked.said()) > 10)
    state["silent"] = True
    world.run_until(lambda: asked.final is not None, 120.0, "the job")
