"""A model over several real processes: its answers are those of one process, also when a process dies in the middle.

The first test has the default model. The others have a tiny one, of as many layers: there the processes are the point.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipes_live.answers import Oracle, Stream, mixed, question, start_streams, wait_for_all, wait_for_tokens
from tests.pipes_live.nodes import Cluster, Json, Spec, cluster, until
from tests.server import running_server
from tests.small_model import write_small_model

pytestmark = pytest.mark.slow

TOKENS = 80  # the same everywhere: what one test has asked the lone process, another need not ask again
FEW = 16  # of the default model
LONG = 16  # sentences: some 200 tokens, which are three or four chunks
GENEROUS = 30.0  # seconds; pauses are aimed to be below two


@pytest.fixture(scope="module")
def tiny_model(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_small_model(tmp_path_factory.mktemp("model"), default_model_folder, layers=30, width=64))


@pytest.fixture(scope="module")
def tiny_oracle(tiny_model: str) -> Iterator[Oracle]:
    with running_server("--model", tiny_model, "--dtype", "float32", "--kv-memory", "100MB", OMP_NUM_THREADS="1") as lone:
        yield Oracle(lone.url, tiny_model)


@pytest.fixture(scope="module")
def halves_of_the_module(tiny_model: str) -> Iterator[Cluster]:
    layers = {"a": Spec(layers="0:15", ends=True), "b": Spec(layers="15:30"), "c": Spec(layers="15:30")}
    with cluster(layers, up=(), model=tiny_model) as made:
        yield made


@pytest.fixture(scope="module")
def kept_ends_of_the_module(tiny_model: str) -> Iterator[Cluster]:
    layers = {"a": Spec(layers="0:2,28:30", ends=True), "b": Spec(layers="2:28")}
    with cluster(layers, up=(), model=tiny_model, recovery_timeout=3.0) as made:
        yield made


@pytest.fixture
def halves(halves_of_the_module: Cluster) -> Iterator[Cluster]:
    """The origin has the first half; two others have the second. A test says which of them are up."""
    yield from _with_its_log(halves_of_the_module)


@pytest.fixture
def kept_ends(kept_ends_of_the_module: Cluster) -> Iterator[Cluster]:
    """The origin keeps the layers where a text could be read most easily. It waits three seconds for what is missing."""
    yield from _with_its_log(kept_ends_of_the_module)


def _with_its_log(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    print(shared.report())  # shown where the test failed
    shared.check_logs()


def test_two_nodes_answer_sixteen_at_once_as_one_process_does(oracle: Oracle) -> None:
    with cluster({"a": Spec(layers="0:15", ends=True), "b": Spec(layers="15:30")}) as nodes:
        streams = start_streams(nodes["a"].url, mixed(16, sentences=LONG), FEW)
        wait_for_all(streams)
        oracle.check(streams)
        assert [hop["node"] for hop in nodes["a"].route()["hops"]] == ["a", "b"]
        assert nodes["b"].metric("penstock_stage_seconds_total") > 0  # half of it was computed there


def test_an_origin_that_keeps_the_first_and_the_last_layers_answers_as_one_process_does(
    kept_ends: Cluster, tiny_oracle: Oracle
) -> None:
    kept_ends.only("a", "b")
    streams = start_streams(kept_ends["a"].url, mixed(8), TOKENS, kept_ends.common.model)
    wait_for_all(streams)
    tiny_oracle.check(streams)
    hops = [(hop["node"], tuple(hop["layers"])) for hop in kept_ends["a"].route()["hops"]]
    assert hops == [("a", (0, 2)), ("b", (2, 28)), ("a", (28, 30))]


def test_a_killed_stage_costs_a_pause_and_no_token(halves: Cluster, tiny_oracle: Oracle) -> None:
    halves.only("a", "b", "c")
    origin = halves["a"]
    streams = start_streams(origin.url, mixed(8, sentences=LONG), TOKENS, halves.common.model)
    wait_for_tokens(streams, 6)
    before = origin.route()  # while idle, it may have moved to a better one
    assert not any(stream.done for stream in streams)
    moment = time.monotonic()
    halves[before["hops"][-1]["node"]].kill()
    wait_for_all(streams)
    tiny_oracle.check(streams)
    after = origin.route()
    print(_told("kill -9", streams, moment, after))
    assert after["recoveries"] == before["recoveries"] + 1
    assert after["hops"][-1] != before["hops"][-1]
    assert 0 < after["last_pause"] < GENEROUS


def test_a_stage_that_is_told_to_leave_leaves_in_good_order_and_no_answer_ends(halves: Cluster, tiny_oracle: Oracle) -> None:
    halves.only("a", "b", "c")
    origin = halves["a"]
    streams = start_streams(origin.url, mixed(8, sentences=LONG), TOKENS, halves.common.model)
    wait_for_tokens(streams, 6)
    before = origin.route()
    leaving = halves[before["hops"][-1]["node"]]
    assert not any(stream.done for stream in streams)
    moment = time.monotonic()
    leaving.interrupt()
    assert leaving.exit_code() == 0
    wait_for_all(streams)
    tiny_oracle.check(streams)
    after = origin.route()
    print(_told("Ctrl-C", streams, moment, after))
    assert "is leaving" in after["last_reason"]
    assert after["hops"][-1] != before["hops"][-1]


def test_an_incomplete_pipe_says_at_once_what_is_missing_and_works_when_a_node_brings_it(
    halves: Cluster, tiny_oracle: Oracle
) -> None:
    halves.only("a", "b")
    halves["b"].kill()
    until(lambda: not halves["a"].pipe()["complete"], "the loss of b to be seen")
    started = time.monotonic()
    refused = Stream(halves["a"].url, question(0), TOKENS, halves.common.model).start()
    wait_for_all([refused])
    assert (refused.status, refused.tokens) == (503, [])
    assert f"Layers 15:30 of {halves.common.model} are missing." in refused.error
    assert time.monotonic() - started < GENEROUS  # not after recovery_timeout
    halves.move("b")
    halves.start("b")
    halves.wait_until_open("a")
    streams = start_streams(halves["a"].url, mixed(2), TOKENS, halves.common.model)
    wait_for_all(streams)
    tiny_oracle.check(streams)


def test_running_answers_end_with_what_is_missing_when_no_node_brings_it_in_time(kept_ends: Cluster, tiny_oracle: Oracle) -> None:
    kept_ends.only("a", "b")
    streams = start_streams(kept_ends["a"].url, mixed(4, sentences=LONG), TOKENS, kept_ends.common.model)
    wait_for_tokens(streams, 4)
    assert not any(stream.done for stream in streams)
    kept_ends["b"].kill()
    wait_for_all(streams)
    for stream in streams:
        assert f"Layers 2:28 of {kept_ends.common.model} are missing." in stream.error
        assert (stream.status, stream.finished) == (0, [])  # the stream had begun: an event says it, not a status
        tiny_oracle.check_tokens(stream)
    until(lambda: kept_ends["a"].metric("penstock_kv_blocks_held") == 0, "their memory to be free")
    kept_ends.only("a", "b")
    again = start_streams(kept_ends["a"].url, mixed(2), TOKENS, kept_ends.common.model)
    wait_for_all(again)
    tiny_oracle.check(again)
    assert kept_ends["a"].route()["recoveries"] == 0  # nobody was left who had stood still


def _told(what: str, streams: list[Stream], moment: float, route: Json) -> str:
    seen = sorted(stream.pause_at(moment) for stream in streams)
    return f"{what}: {route['last_reason']}; pause {route['last_pause']:.2f} s, seen by clients {seen[0]:.2f} to {seen[-1]:.2f} s"
