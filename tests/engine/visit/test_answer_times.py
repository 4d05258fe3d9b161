"""What an origin tells about the time of an answer: its parts, its last update, and the lines of the log."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from penstock.config.engine import EngineConfig
from penstock.domain.part_times import PartTime
from penstock.domain.route import Hop
from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import LayerRange
from penstock.domain.updates import JobDone
from penstock.engine.visit.answer_times import trip_parts
from penstock.simulate.node import Machine
from tests.engine.world import Asked, World

CONFIG = EngineConfig(block_size=4, chunk=8, policy="fcfs", print_times=True, window=1)
PLACES = (Machine("a", ((0, 1),), ends=True, seconds=0.01), Machine("b", ((1, 4),), seconds=0.25))
PROMPT = list(range(1, 21))  # three chunks


@pytest.fixture
def world() -> World:
    world = World(*PLACES, config=CONFIG, latency=0.002)
    world.open_routes("a")
    return world


def parts_of(asked: Asked) -> dict[tuple[str, str], PartTime]:
    assert isinstance(asked.final, JobDone)
    return {(part.part, part.layers): part for part in asked.final.timings.parts}


def test_an_answer_knows_its_time_on_each_node_and_between_them_prompt_and_answer_apart(world: World) -> None:
    asked = world.ask("a", PROMPT)  # 8 tokens, the first of which comes with the end of the prompt
    world.finish()
    parts = parts_of(asked)
    assert list(parts) == [("embedding", ""), ("layers", "0:1"), ("layers", "1:4"), ("hops", ""), ("head", "")]
    assert {(part.prefill_passes, part.decode_passes) for key, part in parts.items() if key[0] != "head"} == {(3, 7)}
    assert (parts["head", ""].prefill_passes, parts["head", ""].decode_passes) == (1, 7)
    assert parts["layers", "1:4"].nodes == ("b",)
    assert parts["layers", "1:4"].decode == pytest.approx(7 * 0.25)
    assert parts["layers", "0:1"].prefill == pytest.approx(3 * 0.01)
    hops = parts["hops", ""]
    assert hops.nodes == ("a", "b", "a")
    assert 7 * 2 * 0.002 <= hops.decode <= 7 * 2 * 0.002 * 3 + 7 * 0.02  # and a tick before each is noticed


def test_a_model_on_one_node_has_no_hops() -> None:
    world = World(Machine("a", ((0, 2), (2, 4)), ends=True), config=CONFIG)
    asked = world.ask("a", PROMPT)
    world.finish()
    assert [(part.part, part.layers) for part in parts_of(asked).values()] == [
        ("embedding", ""),
        ("layers", "0:2"),
        ("layers", "2:4"),
        ("head", ""),
    ]


def test_two_outputs_of_a_job_in_one_pass_count_once(world: World) -> None:
    asked = world.ask("a", PROMPT, SamplingParams(temperature=0.7, n=2, max_tokens=8, ignore_eos=True))
    world.finish()
    assert parts_of(asked)["layers", "1:4"].decode_passes <= 8


def test_no_node_can_claim_more_time_than_the_trip_took() -> None:
    hops = [Hop(LayerRange(0, 2), "b"), Hop(LayerRange(2, 4), "c")]
    times = [(part.name, part.nodes, seconds) for part, seconds in trip_parts(hops, "a", [1e9, 0.25], 1.0, 0.0)]
    assert times[0] == ("embedding", ("a",), 0.0)
    assert times[1:] == [("layers", ("b",), 1.0), ("layers", ("c",), 0.25), ("hops", ("a", "b", "c", "a"), 0.0)]


def test_print_times_logs_a_table_for_each_answer(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.engine"):
        asked = world.ask("a", PROMPT)
        world.finish()
    (logged,) = [record.getMessage() for record in caplog.records if "tokens/s" in record.getMessage()]
    summary, headings, *rows = logged.splitlines()
    assert summary.startswith(f"job {asked.job.job_id}: 20 prompt tokens (0 cached), 8 generated;")
    assert headings.split() == ["part", "where", "layers", "prompt", "s", "passes", "answer", "s", "passes", "ms", "each"]
    assert [row.split()[0] for row in rows] == ["embedding", "layers", "layers", "hops", "head"]
    assert rows[2].split() == ["layers", "b", "1:4", "0.750", "3", "1.750", "7", "250.00"]
    assert rows[3].split()[1:6] == ["a", "→", "b", "→", "a"]


def test_parts_can_be_timed_without_printing_them(caplog: pytest.LogCaptureFixture) -> None:
    world = World(*PLACES, config=replace(CONFIG, print_times=False, time_parts=True))
    with caplog.at_level(logging.INFO, "penstock.engine"):
        asked = world.ask("a", PROMPT)
        world.finish()
    assert "tokens/s" not in caplog.text
    assert len(parts_of(asked)) == 5


def test_parts_that_nobody_asked_for_cost_nothing() -> None:
    world = World(*PLACES, config=replace(CONFIG, print_times=False))
    asked = world.ask("a", PROMPT)
    world.finish()
    assert parts_of(asked) == {}


def test_the_log_tells_when_a_job_is_taken_and_when_its_prompt_is_read(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "penstock.engine"):
        asked = world.ask("a", PROMPT, priority=2)
        world.finish()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    name = asked.job.job_id
    assert lines[0] == ("DEBUG", f"job {name} taken: 20 prompt tokens, at most 8 to generate, priority 2")
    (read,) = [line for line in lines if "prompt read" in line[1]]
    assert read[0] == "INFO"
    assert read[1].startswith(f"job {name}: prompt read: 20 tokens in 0.")
    assert lines.index(read) < len(lines) - 1


def test_a_job_that_waits_has_no_last_update_and_one_that_moves_has_the_newest(world: World) -> None:
    asked = world.ask("a", PROMPT)
    assert asked.job.last_update is None
    seen = set()
    while asked.final is None:
        world.step()
        seen.add(asked.job.last_update)
    assert len(seen) > 10, "with every pass"
    assert asked.job.last_update == pytest.approx(world.now, abs=0.1)


def test_a_job_that_was_begun_and_does_not_move_for_half_a_minute_is_stale(world: World) -> None:
    asked = world.ask("a", PROMPT)
    assert not asked.job.is_stale(world.now + 1000), "it waits for its first turn"
    world.run(0.1)
    assert asked.job.last_update is not None
    assert not asked.job.is_stale(asked.job.last_update + 29.9)
    assert asked.job.is_stale(asked.job.last_update + 30.1)
