"""GET /events: one snapshot, then what changes, each key its own."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.network.live_page import merged
from penstock.config.keys import KeyFolder, KeyLimits
from penstock.doors.access.keys import Keys
from penstock.doors.app.live.events import MAX_WATCHERS, LiveEvents, changes
from penstock.doors.app.live.rates import RateMeter, quantile
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.stats import EngineStats
from tests.server import Api, server_thread

OWNER = "the-key-of-the-owner"
MODEL = "smollm2-135m"
SECRET = "zanzibar"
PATIENCE = 30.0

Json = dict[str, Any]

values = st.recursive(
    st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.text("abc", max_size=2), inner, max_size=3),
    max_leaves=8,
)
states = st.dictionaries(st.text("abc", max_size=2), values, max_size=4)


@given(states, states)
def test_a_delta_makes_the_new_state_out_of_the_old_one(before: Json, after: Json) -> None:
    assert merged(before, changes(before, after)) == after


@given(states)
def test_nothing_is_sent_of_what_has_not_changed(state: Json) -> None:
    assert changes(state, json.loads(json.dumps(state))) == {}


def test_rates_need_two_readings_and_are_those_of_the_time_between() -> None:
    meter, stats = RateMeter(), EngineStats(generated_tokens=1000)
    assert meter.read(stats, 0, 10.0) == (None, {})
    stats.generated_tokens, stats.prompt_tokens, stats.cached_tokens, stats.steps = 1040, 30, 10, 35
    for seconds in (0.02, 0.02, 0.3):
        stats.between_tokens.observe(seconds)
    rates, latencies = meter.read(stats, 4, 12.0)
    assert rates is not None
    assert (rates["generated_tokens"], rates["prompt_tokens"], rates["preemptions"]) == (20.0, 15.0, 2.0)
    assert (rates["batch"], rates["prefix_hits"]) == (2.0, 0.25)
    assert latencies["between_tokens"]["mean"] == pytest.approx(0.34 / 3, abs=1e-5)
    assert 0.01 < latencies["between_tokens"]["p50"] <= 0.025 < latencies["between_tokens"]["p95"] <= 0.5
    assert "first_token" not in latencies


def test_latencies_of_more_than_a_minute_ago_are_forgotten() -> None:
    meter, stats = RateMeter(), EngineStats()
    meter.read(stats, 0, 0.0)
    stats.first_token.observe(1.0)
    assert meter.read(stats, 0, 30.0)[1]["first_token"]["count"] == 1
    assert "first_token" not in meter.read(stats, 0, 91.0)[1]


@given(st.lists(st.integers(0, 5), min_size=15, max_size=15).filter(any))
def test_a_quantile_grows_with_its_share(counts: list[int]) -> None:
    found = [quantile(counts, share) for share in (0.1, 0.5, 0.95, 1.0)]
    assert found == sorted(found)


@contextmanager
def watching(server: Api, key: str = "") -> Iterator[Iterator[tuple[str, Json]]]:
    """The events of a stream, each with its name; deltas are merged into whole states."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.stream("GET", f"{server.url}/events", headers=headers, timeout=PATIENCE) as answer:
        if answer.status_code != 200:
            answer.read()
            answer.raise_for_status()

        def events() -> Iterator[tuple[str, Json]]:
            state: Json = {}
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    assert (event["type"], event["version"]) == (name, 1)
                    state = event["state"] if name == "snapshot" else merged(state, event["changes"])
                    yield name, state

        yield events()


def ask(server: Api, key: str, max_tokens: int = 400) -> threading.Thread:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{SECRET} " * 20}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }

    def run() -> None:
        httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_jobs_come_and_go_and_each_key_sees_its_own(small_model: LoadedModel, tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path / "keys")
    bob, eve = folder.add("bob"), folder.add("eve", KeyLimits(jobs=4))
    with (
        server_thread(small_model, keys=Keys(folder, OWNER), key=OWNER) as server,
        watching(server, OWNER) as all_events,
        watching(server, bob) as of_bob,
        watching(server, eve) as of_eve,
    ):
        name, state = next(all_events)
        assert (name, state["scope"], state["jobs"]) == ("snapshot", "all", {})
        assert state["models"][MODEL]["complete"]
        assert state["models"][MODEL]["missing"] == []
        assert next(of_bob)[1]["scope"] == "own_jobs"
        limited = next(of_eve)[1]
        assert limited["scope"] == "limited"
        assert limited["models"][MODEL].keys() == {"num_layers", "complete"}
        assert not {"nodes", "workspace", "network"} & limited.keys()
        thread = ask(server, bob)
        name, state = next((name, state) for name, state in all_events if state["ended"])
        thread.join()
        assert name == "delta"
        (job,) = state["ended"].values()
        assert (job["key"], job["outcome"], job["generated"], job["source"]) == ("bob", "done", 400, "interactive")
        assert SECRET not in json.dumps(state)
        model = state["models"][MODEL]
        assert model["counters"]["generated_tokens"] >= 400
        assert model["latencies"]["first_token"]["count"] == 1
        assert model["route"]["hops"] == [{"node": state["node"], "layers": [0, model["num_layers"]]}]
        mine = next(state for _, state in of_bob if state["ended"])
        assert len(mine["ended"]) == 1
        assert next(of_eve)[1]["ended"] == {}
        folder.revoke("bob")
        for _ in of_bob:
            pass  # it ends


def test_a_key_has_so_many_watchers_and_nothing_is_gathered_without_any(small_model: LoadedModel) -> None:
    with server_thread(small_model) as server:
        url = f"{server.url}/events"
        with httpx.Client(limits=httpx.Limits(max_connections=100), timeout=PATIENCE) as client:
            open_streams = [client.send(client.build_request("GET", url), stream=True) for _ in range(MAX_WATCHERS)]
            refused = client.get(url)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_limit")
            for stream in open_streams:
                stream.close()
        until = time.monotonic() + PATIENCE
        while httpx.get(url, params={"stream": "false"}).json()["state"]["models"][MODEL].get("rates"):
            assert time.monotonic() < until  # rates need a clock that runs only for watchers
            time.sleep(0.05)


def test_who_watches_sees_on_after_a_state_that_could_not_be_read(
    small_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh, calls, names = LiveEvents._refresh, itertools.count(), list[str]()

    def fails_once(live: LiveEvents) -> None:
        if next(calls) == 1:
            raise RuntimeError("no state now")
        refresh(live)

    monkeypatch.setattr(LiveEvents, "_refresh", fails_once)
    with (
        pytest.raises(AssertionError, match="the state of the node could not be read"),  # a server must log no traceback
        server_thread(small_model) as server,
        watching(server) as events,
    ):
        names += [next(events)[0] for _ in range(2)]
    assert names == ["snapshot", "delta"]


def test_one_snapshot_can_be_read_alone(small_model: LoadedModel) -> None:
    with server_thread(small_model) as server:
        found = server.get("/events?stream=false")
        assert (found["type"], found["version"], found["state"]["scope"]) == ("snapshot", 1, "all")
        wrong = httpx.get(f"{server.url}/events?stream=maybe")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "stream")
