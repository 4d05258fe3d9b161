"""What stages on other nodes report while a prompt is on its way: how far they are, how often, and what is not believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from penstock.config.engine import EngineConfig
from penstock.domain.job import Sequence
from penstock.domain.messages import Message, StageProgress
from penstock.domain.route import RouteId
from penstock.domain.sampling import SamplingParams
from penstock.domain.span import Position
from penstock.domain.topology import PrivateLayers
from penstock.domain.updates import FinishReason, JobDone, JobUpdate, OutputFinished, PrefillProgress
from penstock.engine.routing.host.route_host import PROGRESS_INTERVAL_S
from penstock.engine.routing.origin.stage_progress import PromptProgress, prompt_progress
from penstock.network.codec import encode
from penstock.simulate.node import Machine
from tests.engine.world import GREEDY, Asked, Faults, World

PROMPT = [1 + i % 40 for i in range(64)]
CHUNK = 8
CONFIG = EngineConfig(block_size=4, chunk=CHUNK, policy="fcfs", window=2)
FEW = replace(GREEDY, max_tokens=3)


def over(*stages: tuple[str, int, int], seconds: float = 0.15, window: int = 2, faults: Faults | None = None) -> World:
    """An origin with the ends only, and a node for each range of layers, whose passes take this long."""
    places = [Machine(name, ((start, end),), blocks=48, seconds=seconds) for name, start, end in stages]
    world = World(Machine("a", (), ends=True), *places, config=replace(CONFIG, window=window), faults=faults)
    world.open_routes("a")
    world.run(1.0)
    return world


def two(**more: Any) -> World:
    return over(("b", 0, 2), ("c", 2, 4), **more)


def sequence(asked: Asked) -> Sequence:
    (seq,) = asked.job.sequences
    return seq


def output(asked: Asked) -> list[int]:
    return [update.done for update in asked.updates if isinstance(update, PrefillProgress)]


def sampled(world: World, asked: Asked, look: Callable[[Sequence], tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What it looked like from step to step until the prompt had passed all stages, each value once."""
    seen: list[tuple[int, ...]] = []
    world.run_until(lambda: bool(asked.job.sequences))
    while not sequence(asked).is_step_processing_complete:
        world.step()
        found = look(sequence(asked))
        if not seen or found != seen[-1]:
            seen.append(found)
    return seen


def test_the_origin_knows_what_a_remote_first_stage_has_done_while_the_rest_of_the_prompt_is_on_its_way() -> None:
    world = two()
    asked = world.ask("a", PROMPT, FEW)
    seen = sampled(world, asked, lambda seq: (seq.step_processed, asked.job.prefilled))
    chunks = [CHUNK * (i + 1) for i in range(len(PROMPT) // CHUNK)]
    assert output(asked) == chunks, "smoothly, a chunk at a time"
    assert (0, CHUNK) in seen, "before anything came back"
    assert any(read - step == 2 * CHUNK for step, read in seen), "two chunks had passed it, and none had passed all"
    world.all_answered([asked])
    assert world["a"].engine.stats.lost_jobs == 0


def test_every_stage_of_a_route_is_known_by_itself() -> None:
    world = over(("b", 0, 1), ("c", 1, 3), ("d", 3, 4))
    asked = world.ask("a", PROMPT, FEW)
    seen = sampled(world, asked, lambda seq: tuple(seq.stages_processed))
    assert {len(cursors) for cursors in seen} == {3}
    assert all(list(cursors) == sorted(cursors, reverse=True) for cursors in seen)
    assert any(first > second > third for first, second, third in seen), "each was elsewhere in the prompt"
    assert seen[-1] == (len(PROMPT),) * 3


def test_a_stage_between_private_layers_is_known_too() -> None:
    places = [Machine("a", ((0, 1), (3, 4)), ends=True, private=PrivateLayers(1, 1)), Machine("b", ((1, 3),), seconds=0.15)]
    world = World(*places, config=CONFIG)
    world.open_routes("a")
    asked = world.ask("a", PROMPT, FEW)
    seen = sampled(world, asked, lambda seq: tuple(seq.stages_processed))
    assert len({second for _, second, _ in seen}) == len(PROMPT) // CHUNK + 1, "chunk by chunk"
    assert any(first > second >= third for first, second, third in seen), "the first layers are quick here"


def test_what_is_shown_of_the_stages_is_the_sum_over_the_prompts_being_read() -> None:
    world = two()
    asked = [world.ask("a", prompt, FEW) for prompt in (PROMPT[:12], PROMPT[1:])]  # the second chunk has 4 tokens of each
    world.run_until(lambda: all(one.job.prefilled for one in asked))
    sequences = world["a"].origin.sequences
    assert prompt_progress(sequences, 2) == PromptProgress(2, 12 + 63, (16, 0))
    world.all_answered(asked)
    assert prompt_progress(sequences, 2) == PromptProgress(0, 0, (0, 0))


# ---- how many there are ----


def test_a_stage_reports_at_most_every_tenth_of_a_second_and_never_about_single_tokens() -> None:
    world = two(seconds=0.01)
    sent: list[tuple[float, str, StageProgress]] = []
    for name in "bc":
        watch(world, name, sent)
    asked = world.ask("a", PROMPT, replace(GREEDY, max_tokens=20))
    world.all_answered([asked])
    times = [at for at, _, _ in sent]
    assert {name for _, name, _ in sent} == {"b"}, "what has passed the last layer comes home by itself"
    assert all(b - a >= PROGRESS_INTERVAL_S for a, b in pairwise(times))
    assert 1 <= len(sent) <= len(PROMPT) // CHUNK, "and 20 tokens add none"
    assert max(position.end for _, _, report in sent for position in report.positions) == len(PROMPT)


def watch(world: World, name: str, sent: list[tuple[float, str, StageProgress]]) -> None:
    node = world[name]
    send = node.send

    def watched(destination: str, message: Message) -> None:
        if isinstance(message, StageProgress):
            assert destination == message.route.origin
            sent.append((node.clock(), name, message))
        send(destination, message)

    node.send = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("faults", [{"drop": 1.0}, {"duplicate": 1.0, "reorder": 1.0, "hold": (0.1, 2.0)}], ids=["lost", "late"])
def test_reports_that_are_lost_or_late_cost_nothing(faults: dict[str, Any]) -> None:
    hits = Faults(hits=lambda sender, destination, message: isinstance(message, StageProgress), **faults)
    world = two(faults=hits)
    asked = world.ask("a", PROMPT, FEW)
    world.all_answered([asked])
    assert output(asked)[-1] == len(PROMPT), "what comes home says it as well"
    assert output(asked) == sorted(set(output(asked)))
    assert world["a"].engine.stats.lost_jobs == 0
    assert not world["a"].engine.stats.refused
    world.finish()


# ---- what is not believed ----


def report(world: World, sender: str, layer: int = 2, route: RouteId | None = None, **position: int) -> int:
    """Have `sender` say this to the origin. Returns how many messages the origin refused for it."""
    origin = world["a"]
    assert origin.origin.route is not None
    facts = {"seq_id": 0, "incarnation": 0, "attempt": 0, "end": 2 * CHUNK} | position
    message = StageProgress(route or origin.origin.route.id, layer, (Position(**facts),))
    before = origin.engine.stats.refused.get("malformed", 0)
    world.deliver(sender, "a", encode(message))
    origin.engine.take_commands(wait=False)
    return origin.engine.stats.refused.get("malformed", 0) - before


@pytest.fixture
def reading() -> tuple[World, Asked]:
    """A prompt of which three chunks are in flight, and none has passed a stage. A node `x` is not on the route."""
    world = two(seconds=1.0, window=3)
    world.start(Machine("x"))
    world.run(0.2)
    asked = world.ask("a", PROMPT, FEW)
    world.run_until(lambda: bool(asked.job.sequences) and sequence(asked).scheduled == 3 * CHUNK)
    return world, asked


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param({"sender": "x"}, id="from a stranger"),
        pytest.param({"sender": "c"}, id="from the node of another stage"),
        pytest.param({"sender": "b", "layer": 4}, id="about a layer of another node"),
        pytest.param({"sender": "b", "end": 3 * CHUNK + 1}, id="about more than it was sent"),
        pytest.param({"sender": "b", "attempt": 1}, id="about an attempt to come"),
        pytest.param({"sender": "b", "incarnation": 1}, id="about an incarnation to come"),
        pytest.param({"sender": "b", "route": RouteId("b", 1, 0)}, id="about another origin's route"),
    ],
)
def test_a_report_that_cannot_be_true_is_refused_and_counted(reading: tuple[World, Asked], lie: dict[str, Any]) -> None:
    world, asked = reading
    assert report(world, **lie) == 1
    assert sequence(asked).stages_processed == [0, 0]
    assert not output(asked)
    world.all_answered([asked])


def test_a_true_report_counts_once_and_never_goes_back(reading: tuple[World, Asked]) -> None:
    world, asked = reading
    for end, known in [(2 * CHUNK, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK), (CHUNK, 2 * CHUNK), (3 * CHUNK, 3 * CHUNK)]:
        assert report(world, "b", end=end) == 0
        assert sequence(asked).stages_processed == [known, 0]
    assert output(asked) == [2 * CHUNK, 3 * CHUNK]
    world.all_answered([asked])


def test_what_a_later_stage_has_done_all_before_it_have(reading: tuple[World, Asked]) -> None:
    world, asked = reading
    assert report(world, "c", layer=4, end=CHUNK) == 0
    assert sequence(asked).stages_processed == [CHUNK, CHUNK]
    assert sequence(asked).step_processed == 0, "only what came home counts for the answer"


def test_reports_about_what_is_over_are_normal_and_change_nothing(reading: tuple[World, Asked]) -> None:
    world, asked = reading
    old = world["a"].origin.route
    assert old is not None
    world["a"].origin.sequences.rewind_seq(sequence(asked))
    assert report(world, "b") == 0, "of the attempt before"
    assert report(world, "b", seq_id=99) == 0, "of a sequence that has ended"
    assert report(world, "b", route=old.id._replace(number=old.id.number + 7)) == 0, "of a route that was given up"
    assert sequence(asked).stages_processed == [0, 0]
    world["a"].origin.lose_route("a test")
    world.deliver("b", "a", encode(StageProgress(old.id, 2, (Position(0, 0, 0, CHUNK),))))
    world.all_answered([asked])
    assert not world["a"].engine.stats.refused


def test_a_client_that_is_gone_is_noticed_while_its_prompt_is_elsewhere(reading: tuple[World, Asked]) -> None:
    world, asked = reading

    def gone(update: JobUpdate) -> None:
        raise ConnectionError

    asked.job.sink = gone
    asked.may_fail = True
    assert report(world, "b") == 0
    assert not asked.job.open
    assert sequence(asked).finish is FinishReason.CANCELLED
    assert not any(isinstance(update, JobDone | OutputFinished) for update in asked.updates)


def test_a_chunk_leaves_its_stage_before_the_next_one_is_computed() -> None:
    """Eight chunks, two stages, a second a pass: with both at work some nine seconds, one after the other sixteen."""
    config = EngineConfig(block_size=4, chunk=8, idle_chunk=8, window=8)
    places = (Machine("a", ends=True), Machine("b", ((0, 2),), seconds=1.0), Machine("c", ((2, 4),), seconds=1.0))
    world = World(*places, config=config)
    world.open_routes("a")
    asked = world.ask("a", list(range(1, 65)), SamplingParams(max_tokens=1, ignore_eos=True))
    began = world.now
    world.run_until(lambda: asked.final is not None)
    assert world.now - began < 12
