"""`penstock top`: the page, and the command at a terminal and in a script."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from penstock.cli.network.live_page import History, merged, page, sparkline
from penstock.pipes.loading.model_manager import LoadedModel
from tests import warm
from tests.server import clean_environment, server_thread
from tests.terminal import CTRL_C, Person

Json = dict[str, Any]

SEGMENT = {"device": "cpu", "dtype": "float32", "kv_tokens": 100, "kv_leased": 0, "kv_used": 0, "draining": False}
STATE: Json = {
    "scope": "all",
    "node": "attic",
    "version": "1.0",
    "draining": False,
    "network": {"name": "home", "open": True},
    "nodes": {
        "attic": {"here": True, "version": "1.0", "state": "ready", "serves": ["m"], "links": {}},
        "cellar": {"here": False, "version": "1.0", "state": "loading", "serves": [], "links": {}, "round_trip": 0.0042},
    },
    "models": {
        "m": {
            "num_layers": 30,
            "complete": False,
            "missing": [[20, 30]],
            "loading": {},
            "fill": "penstock serve --model m --open-network --multicast",
            "segments": {
                "attic 0:10": {"node": "attic", "layers": [0, 10], "seconds": 0.012, **SEGMENT},
                "cellar 10:20": {"node": "cellar", "layers": [10, 20], **SEGMENT},
            },
            "route": {
                "state": "opening",
                "hops": [{"node": "attic", "layers": [0, 10]}, {"node": "cellar", "layers": [10, 20]}],
                "in_flight": 1,
                "window": 2,
                "round_trip": 0.05,
                "between_nodes": 0.01,
                "reading": 0,
                "recoveries": 0,
                "last_pause": 0.0,
                "lost": 0,
            },
            "kv_tokens": 100,
            "kv_used": 25,
            "queued": 3,
            "running": 1,
            "counters": {"ended": {"done": 7}, "preemptions": 2},
            "rates": {"generated_tokens": 12.5, "prompt_tokens": 0.0, "batch": 1.5, "prefix_hits": 0.25},
            "latencies": {"first_token": {"count": 1, "mean": 0.1, "p50": 0.1, "p95": 0.2}},
        }
    },
    "jobs": {
        f"1794974400_{number}_7": {
            "model": "m",
            "source": "batch",
            "state": "waiting_preempt",
            "arrived": 0.0,
            "stale": False,
            "outputs": 1,
            "priority": 0,
            "prompt_tokens": 9,
            "prefilled": 4,
            "generated": 2,
            "max_tokens": 5,
            "preemptions": 1,
        }
        for number in range(30)
    },
    "ended": {},
    "workspace": {"queued": 4, "running": 1, "done": 2, "failed": 0},
}


def lines(state: Json, width: int = 100, height: int | None = None) -> list[str]:
    history = History()
    history.add(state)
    return page(state, history, width, height, colour=False)


def test_the_page_has_nodes_layers_holes_rates_and_jobs() -> None:
    text = "\n".join(lines(STATE))
    for words in (
        "attic · Penstock 1.0 · network home, 2 nodes",
        "4.20 ms",
        "✗ incomplete",
        "missing",
        "penstock serve --model m --open-network --multicast",
        "attic 0:10 (12.0 ms) → cellar 10:20 (opening) · 1 of 2 in flight · 1.5 tokens a step",
        "12.5",
        "3 waiting, 1 running",
        "25 % of 100 tokens",
        "7 done · 2 preempted · 25 % prefix hits",
        "workspace · 4 queued",
        "preempted",
    ):
        assert words in text


@pytest.mark.parametrize("width,height", [(80, 24), (120, 50)])
def test_the_page_fits_the_terminal(width: int, height: int) -> None:
    found = lines(STATE, width, height)
    assert "… and" in found[-1]
    shown = [line for line in found if "penstock serve" not in line]  # commands to paste are not cut
    assert max(map(len, shown)) <= width


def test_names_of_other_machines_cannot_move_the_cursor() -> None:
    evil = merged(STATE, {"nodes": {"\x1b[2Jx": STATE["nodes"]["cellar"]}, "node": "a\x1b[31m"})
    assert "\x1b" not in "\n".join(lines(evil))


def test_a_limited_key_sees_a_page_without_nodes_and_rates() -> None:
    model = {"num_layers": 30, "complete": True}
    state = {**{name: STATE[name] for name in ("node", "version", "draining", "ended")}, "jobs": {}, "models": {"m": model}}
    text = "\n".join(lines({**state, "scope": "limited", "key": "bob"}))
    assert "as the key bob" in text
    assert "Nothing is running." in text


def test_sparklines_are_drawn_to_scale() -> None:
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([0.5], 1.0) == "▅"


def test_it_is_printed_once_for_scripts_and_redrawn_for_people(small_model: LoadedModel) -> None:
    with server_thread(small_model) as server:
        command = warm.penstock("top", "--url", server.url)
        environment = clean_environment()
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\x1b" not in done.stdout
        assert "tokens/s" in done.stdout
        assert "Nothing is running." in done.stdout
        once = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment, timeout=60, check=False)
        assert json.loads(once.stdout)["models"]["smollm2-135m"]["rates"]["generated_tokens"] == 0.0
        person = Person("top", "--url", server.url)
        person.waits_for("tokens/s.*\x1b\\[H.*tokens/s")
        person.presses(CTRL_C)
        person.waits_for("\x1b\\[\\?1049l")
