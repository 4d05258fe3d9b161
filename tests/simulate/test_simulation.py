"""Simulations of small networks, whose figures follow from their scenario."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from penstock.simulate.plot import _floor, _runs, plot
from penstock.simulate.report import SimulationReport, report
from penstock.simulate.scenario_file import parse_scenario
from penstock.simulate.simulation import Simulation

MODEL = "[model]\nlayers = 10\nhidden = 1000\nlayer_bytes = 1000\nkv_bytes = 100\n[network]\nwire = 'fp32'\n"
WHOLE = '[[nodes]]\nname = "a"\nlayers = "0:10"\nends = true\npass_ms = 2\ntoken_us = 10\nhead_ms = 3\n'
HALVES = (
    '[[nodes]]\nname = "a"\nlayers = "0:5"\nends = true\npass_ms = 2\n'
    '[[nodes]]\nname = "b"\ncount = 2\nlayers = "5:10"\npass_ms = 2\n[[links]]\nrtt_ms = 10\nmbit = 80\n'
)


def run(nodes: str, load: str, events: str = "", seconds: float = 6, seed: int = 1) -> Simulation:
    simulation = Simulation(
        parse_scenario(f"seconds = {seconds}\nseed = {seed}\n{MODEL}{nodes}[[load]]\norigin = 'a'\n{load}{events}")
    )
    simulation.run()
    return simulation


def figures(*args: Any, **more: Any) -> SimulationReport:
    return report(run(*args, **more))


def ended_once(found: SimulationReport) -> bool:
    return found.jobs.started == found.jobs.done + found.jobs.failed > 0


ONE_STREAM = "streams = 1\nprompt = 10\nanswer = 50\n"
STREAMS = "streams = 4\nprompt = 10\nanswer = 50\n"


def test_a_token_takes_as_long_as_the_layers_and_the_head() -> None:
    found = figures(WHOLE, "at = [0]\nprompt = 100\nanswer = 20\n")
    assert found.between_tokens_s.p50 == pytest.approx(10 * 0.00201 + 0.003, abs=1e-4)
    assert found.first_token_s.p50 == pytest.approx(10 * (0.002 + 100 * 10e-6) + 0.003, abs=1e-3)
    assert (found.jobs.started, found.jobs.done) == (1, 1)


def test_a_request_that_comes_during_a_pass_waits_for_its_end() -> None:
    jobs = run(WHOLE, "at = [0, 0.03]\nprompt = 500\nanswer = 2\n").jobs
    reading = 10 * (0.002 + 500 * 10e-6) + 0.003
    assert jobs[1].started == pytest.approx(0.03)
    assert jobs[1].tokens[0] - jobs[1].started == pytest.approx(2 * reading - 0.03, abs=1e-3)


def test_the_next_request_of_a_closed_loop_comes_after_the_last_token() -> None:
    first, second, *_ = run(WHOLE, ONE_STREAM).jobs
    assert second.started == pytest.approx(first.tokens[-1])


def test_a_token_takes_a_round_trip_and_its_transfer_over_a_network() -> None:
    found = figures(HALVES, ONE_STREAM)
    transfer = 2 * 4000 / 10e6  # there and back, at 80 Mbit/s
    assert found.between_tokens_s.p50 == pytest.approx(10 * 0.002 + 0.01 + transfer, rel=0.05)
    assert found.tokens_per_second == pytest.approx(1 / (10 * 0.002 + 0.01 + transfer), rel=0.15)
    busy = {node.node: node.busy for node in found.nodes}
    assert busy["a"] == pytest.approx(0.01 / 0.0308, rel=0.15)
    assert sorted(busy.values())[0] == 0, "a replica stands by"


def test_a_slow_link_is_what_limits_a_prompt() -> None:
    found = figures(HALVES.replace("mbit = 80", "mbit = 8"), "at = [0]\nprompt = 500\nanswer = 2\n")
    assert found.first_token_s.p50 is not None
    assert 500 * 4000 / 1e6 < found.first_token_s.p50 < 1.25 * 500 * 4000 / 1e6 + 0.2
    busiest = found.links[0]
    assert (busiest.sender, busiest.bytes > 500 * 4000) == ("a", True)


def test_half_the_bytes_take_half_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, load = HALVES.replace("mbit = 80", "mbit = 8"), "at = [0]\nprompt = 500\nanswer = 2\n"
    whole = figures(nodes, load).links[0]
    monkeypatch.setattr("tests.simulate.test_simulation.MODEL", MODEL.replace("fp32", "bf16"))
    half = figures(nodes, load).links[0]
    assert half.bytes == pytest.approx(whole.bytes / 2, rel=0.02)
    assert half.busy == pytest.approx(whole.busy / 2, rel=0.02)


def test_the_same_seed_gives_the_same_figures_and_another_one_others() -> None:
    load = "per_second = 2\nprompt = [5, 50]\nanswer = [5, 20]\n"
    first, again, other = (figures(HALVES, load, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_load_with_times_comes_then() -> None:
    simulation = run(WHOLE, "at = [0, 1.5, 4]\nprompt = 5\nanswer = 2\n")
    assert [job.started for job in simulation.jobs] == pytest.approx([0, 1.5, 4])


def test_a_closed_loop_has_so_many_jobs_at_a_time() -> None:
    found = figures(WHOLE, STREAMS)
    assert set(found.timeline.running[:-1]) == {4}
    assert found.jobs.started > 4


def test_time_passes_where_nothing_takes_any() -> None:
    found = figures(
        '[[nodes]]\nname = "a"\nlayers = "0:10"\nends = true\n', "streams = 1\nprompt = 10\nanswer = 5\n", seconds=0.5
    )
    assert 0 < found.jobs.done == found.jobs.started <= 51


def test_a_node_that_dies_makes_answers_pause_and_nothing_else() -> None:
    found = figures(HALVES, STREAMS, "[[events]]\nat = 2\nkill = 'b-1'\n")
    assert ended_once(found)
    assert found.jobs.failed == 0
    assert (found.broken_routes, found.recoveries) == (1, 1)
    assert found.preemptions == 4
    assert found.between_tokens_s.max is not None
    assert found.between_tokens_s.max > 0.1
    assert found.timeline.nodes[-1] == 2


def test_jobs_of_an_origin_that_dies_fail_once() -> None:
    found = figures(HALVES, STREAMS, "[[events]]\nat = 2\nkill = 'a'\n")
    assert ended_once(found)
    assert found.jobs.failed == 4
    assert found.errors == {"Its node is gone.": 4}


def test_without_a_replica_jobs_wait_until_the_node_is_back() -> None:
    nodes = HALVES.replace("count = 2\n", "")
    found = figures(nodes, STREAMS, "[[events]]\nat = 2\nkill = 'b'\n[[events]]\nat = 4\njoin = 'b'\n")
    assert ended_once(found)
    assert found.jobs.failed == 0
    assert found.between_tokens_s.max is not None
    assert found.between_tokens_s.max > 2.0


def test_a_frozen_node_is_noticed_and_goes_on_when_it_thaws() -> None:
    events = "[[events]]\nat = 1\nfreeze = 'b-1'\n[[events]]\nat = 8\nthaw = 'b-1'\n"
    found = figures(HALVES, STREAMS, events, seconds=9)
    assert ended_once(found)
    assert found.jobs.failed == 0
    assert found.broken_routes == 1
    passes = {node.node: node.passes for node in found.nodes}
    assert passes["b-2"] > 0


def test_a_node_that_leaves_is_gone_without_a_failed_job() -> None:
    found = figures(HALVES, STREAMS, "[[events]]\nat = 2\nleave = 'b-1'\n")
    assert ended_once(found)
    assert found.jobs.failed == 0
    assert found.timeline.nodes[-1] == 2


def test_a_node_that_joins_late_is_used_from_then_on() -> None:
    nodes = HALVES.replace("count = 2\n", "")
    found = figures(nodes, "at = [0, 4]\nprompt = 5\nanswer = 5\n", "[[events]]\nat = 3\njoin = 'b'\n")
    assert (found.jobs.done, found.jobs.failed) == (1, 1), "the first one has no route"
    assert found.timeline.nodes[0] == 1


def test_a_link_that_is_cut_breaks_the_route_and_heals() -> None:
    events = "[[events]]\nat = 1\ncut = ['a', 'b-1']\n[[events]]\nat = 8\nheal = ['a', 'b-1']\n"
    found = figures(HALVES, STREAMS, events, seconds=9)
    assert ended_once(found)
    assert found.jobs.failed == 0
    assert found.broken_routes >= 1


def test_lost_messages_cost_time_but_no_job() -> None:
    nodes = HALVES.replace("mbit = 80", "mbit = 80\nloss = 0.03")
    found = figures(nodes, STREAMS, seconds=8)
    assert ended_once(found)
    assert found.jobs.failed == 0
    assert found.lost_network_jobs > 0


def test_a_group_stands_for_one_of_its_members_in_an_event() -> None:
    simulation = run(HALVES, STREAMS, "[[events]]\nat = 1\nkill = 'b'\n[[events]]\nat = 2\njoin = 'b'\n")
    (_, killed), (_, joined) = simulation.events
    assert killed.removeprefix("kill ") == joined.removeprefix("join ")


@pytest.mark.slow
def test_memory_that_runs_out_preempts() -> None:
    """The least KV that a node has is for 8,208 tokens; four answers grow to 14,000."""
    nodes = WHOLE.replace("pass_ms = 2", "pass_ms = 0.1\nmemory = '10MB'")
    found = figures(nodes, "streams = 4\nprompt = 1500\nanswer = 2000\n", seconds=3)
    assert found.preemptions > 0
    assert ended_once(found)
    assert found.jobs.failed == 0


def test_the_plot_is_an_svg_that_names_what_happened() -> None:
    root = ET.fromstring(plot(figures(HALVES, STREAMS, "[[events]]\nat = 2\nkill = 'b-1'\n")))
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert "kill b-1" in texts
    assert any("tokens/s" in text for text in texts)
    lines = {(e.get("stroke"), e.get("stroke-opacity")) for e in root.iter() if e.tag.endswith("polyline")}
    assert len(lines) == 5, "tokens, jobs, nodes, and two for the first token"


def test_the_timeline_says_how_long_jobs_of_each_part_waited_for_their_first_token() -> None:
    found = figures(WHOLE, "at = [0, 3]\nprompt = 5\nanswer = 2\n")
    waits = {number: wait.p50 for number, wait in enumerate(found.timeline.first_token_s) if wait.p50 is not None}
    assert list(waits) == [0, 60]
    assert found.first_token_s.max == pytest.approx(max(waits.values()))


def test_a_plot_draws_no_line_where_nothing_was_measured() -> None:
    assert _runs([None, 1.0, 2.0, None, None, 3.0]) == [[(1, 1.0), (2, 2.0)], [(5, 3.0)]]
    assert _runs([None, None]) == []


def test_a_plot_shows_one_node_less_of_a_thousand() -> None:
    assert _floor([1000, 999, 1000]) == 998
    assert _floor([3, 2, 3]) == _floor([3, 3]) == 0


def test_the_visits_that_a_cpu_second_simulates_are_counted() -> None:
    found = figures(HALVES, STREAMS)
    assert found.cpu_seconds > 0
    assert found.node_visits_per_cpu_second == pytest.approx(found.node_visits / found.cpu_seconds, rel=0.01)
