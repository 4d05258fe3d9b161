"""The page of `penstock top`: a LiveState of GET /events as lines of text."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.cli.network.layer_bars import Held, layer_bars
from penstock.cli.ui.columns import INDENT, Ink, harmless, labels, shortened, table, wrapped
from penstock.cli.ui.durations import age
from penstock.units import format_seconds

Json = dict[str, Any]

SPARKS = "▁▂▃▄▅▆▇█"
MAX_POINTS = 120
MIN_WIDTH = 40
MAX_WIDTH = 140
STATE_NAMES = {"waiting_preempt": "waiting again"}
JOBS = ["job", "model", "from", "state", "age", "prompt", "generated", "key"]
ENDED = ["ended", "model", "from", "outcome", "took", "first token", "prompt", "generated", "key"]
NODES = ["node", "state", "serves", "round trip", "version"]
SHOWN_ENDED = 8


def merged(state: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    found = dict(state) if isinstance(state, dict) else {}
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), value)
    return found


class History:
    """The rates of the last two minutes, for sparklines."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, str], deque[float]] = {}

    def add(self, state: Json) -> None:
        for name, model in state["models"].items():
            rates, latencies = model.get("rates", {}), model.get("latencies", {})
            values = {
                "tokens": rates.get("generated_tokens", 0.0),
                "prompt": rates.get("prompt_tokens", 0.0),
                "first": latencies.get("first_token", {}).get("p50", 0.0),
                "between": latencies.get("between_tokens", {}).get("p50", 0.0),
                "queue": model.get("queued", 0),
                "kv": model.get("kv_used", 0) / max(1, model.get("kv_tokens", 0)),
            }
            for what, value in values.items():
                self._points.setdefault((name, what), deque(maxlen=MAX_POINTS)).append(value)

    def sparkline(self, model: str, what: str, width: int, highest: float | None = None) -> str:
        points = list(self._points.get((model, what), ()))[-width:]
        return sparkline(points, highest)


def sparkline(points: Sequence[float], highest: float | None = None) -> str:
    """Draw numbers as bars of eight heights; the highest is full unless a scale is given. Zero is the lowest bar."""
    full = highest or max(points, default=0.0)
    if not full:
        return SPARKS[0] * len(points)
    return "".join(SPARKS[min(len(SPARKS) - 1, math.floor(point / full * (len(SPARKS) - 1) + 0.5))] for point in points)


def page(state: Json, history: History, width: int, height: int | None = None, *, colour: bool) -> list[str]:
    """The whole page. height: lines of the terminal, of which jobs get what is left; None for all of them."""
    state, ink, width = harmless(state), Ink(colour), max(MIN_WIDTH, min(width, MAX_WIDTH))
    lines = [_heading(state, ink)]
    if len(state.get("nodes", ())) > 1:
        lines += ["", *_nodes(state["nodes"], width, ink)]
    for name, model in state["models"].items():
        lines += ["", *_model(name, model, history, width, ink)]
    jobs = [*_jobs(state, width, ink)]
    room = len(jobs) if height is None else max(4, height - len(lines) - 2)
    if len(jobs) > room:
        jobs = [*jobs[: room - 1], f"{INDENT}… and {len(jobs) - room + 1} more"]
    return [*lines, "", *jobs]


def _heading(state: Json, ink: Ink) -> str:
    network = state.get("network")
    parts = [ink("bold", state["node"]), f"Penstock {state['version']}"]
    if network:
        parts.append(f"network {network['name']}, {len(state['nodes'])} node{'s' * (len(state['nodes']) != 1)}")
    if state["draining"]:
        parts.append(ink("yellow", "draining: running jobs finish, new ones are refused"))
    if state["scope"] != "all":
        parts.append(f"as the key {state.get('key', '')}: its own jobs only".replace("  ", " "))
    return " · ".join(parts)


def _nodes(nodes: Json, width: int, ink: Ink) -> list[str]:
    rows = [
        [
            name,
            node["state"],
            ", ".join(node["serves"]) or "layers only",
            "this node" if node["here"] else format_seconds(node["round_trip"]) if "round_trip" in node else "–",
            node["version"],
        ]
        for name, node in sorted(nodes.items())
    ]
    return table(NODES, rows, width, ink, numbers=[3], elastic=[0, 2])


def _model(name: str, model: Json, history: History, width: int, ink: Ink) -> list[str]:
    complete = model["complete"]
    mark = ink("green", "✓ complete") if complete else ink("red", "✗ incomplete")
    lines = [f"{ink('bold', shortened(name, width // 2))} · {model['num_layers']} layers · {mark}"]
    segments = model.get("segments")
    if segments:
        held = [Held(one["node"], one["layers"][0], one["layers"][1], one["draining"]) for one in segments.values()]
        lines += layer_bars(model["num_layers"], held, [(a, b) for a, b in model["missing"]], width, ink)
    if model.get("fill"):
        lines += ["", *wrapped("To fill the hole, run this on a machine with room:", width), f"{INDENT * 2}{model['fill']}"]
    if model.get("route", {}).get("hops"):
        lines += ["", *wrapped(_route(model), width)]
    if "counters" in model:
        lines += ["", *_rates(name, model, history, width, ink)]
    return lines


def _route(model: Json) -> str:
    route, seconds = model["route"], {key: one.get("seconds") for key, one in model["segments"].items()}
    hops = []
    for hop in route["hops"]:
        start, end = hop["layers"]
        took = seconds.get(f"{hop['node']} {start}:{end}")
        hops.append(f"{hop['node']} {start}:{end}" + (f" ({format_seconds(took)})" if took else ""))
    batch = model.get("rates", {}).get("batch")
    more = [f"{route['in_flight']} of {route['window']} in flight"] if len(hops) > 1 else []
    more += [f"{batch:.1f} tokens a step"] if batch else []
    more += [f"round trip {format_seconds(route['round_trip'])}"] if route["round_trip"] else []
    state = "" if route["state"] == "open" else f" ({route['state']})"
    return " · ".join([" → ".join(hops) + state, *more])


def _rates(name: str, model: Json, history: History, width: int, ink: Ink) -> Iterator[str]:
    rates, latencies = model.get("rates", {}), model.get("latencies", {})
    room = max(8, min(48, width - 48))

    def latency(what: str) -> str:
        found = latencies.get(what)
        return f"{format_seconds(found['p50'])}, p95 {format_seconds(found['p95'])}" if found else "–"

    kv, total = model.get("kv_used", 0), model.get("kv_tokens", 0)
    hits = rates.get("prefix_hits")
    rows = [
        ("tokens/s", "tokens", f"{rates.get('generated_tokens', 0.0):,.1f}", None),
        ("prompt tokens/s", "prompt", f"{rates.get('prompt_tokens', 0.0):,.1f}", None),
        ("first token", "first", latency("first_token"), None),
        ("between tokens", "between", latency("between_tokens"), None),
        ("queue", "queue", f"{model.get('queued', 0)} waiting, {model.get('running', 0)} running", None),
        ("KV memory", "kv", f"{100 * kv / max(total, 1):.0f} % of {total:,} tokens", 1.0),
    ]
    for label, what, text, highest in rows:
        spark = history.sparkline(name, what, room, highest)
        yield f"{INDENT}{ink('dim', f'{label:16}')}{text:28} {ink('green', spark)}".rstrip()
    counters = model["counters"]
    ended = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(counters["ended"].items())) or "none"
    prefix = "" if hits is None else f" · {100 * hits:.0f} % prefix hits"
    yield f"{INDENT}{ink('dim', 'so far'.ljust(16))}{ended} · {counters['preemptions']} preempted{prefix}"


def _jobs(state: Json, width: int, ink: Ink) -> Iterator[str]:
    workspace = state.get("workspace") or {}
    if any(workspace.values()):
        yield " · ".join(["workspace", *(f"{workspace[name]} {name}" for name in ("queued", "running", "done", "failed"))])
    now = time.time()
    ids = labels([*state["jobs"], *state["ended"]], 22)
    rows = [
        [
            ids[job_id],
            job["model"],
            job["source"],
            STATE_NAMES.get(job["state"], job["state"]) + (", STALE" if job["stale"] else ""),
            age(now - job["arrived"]),
            f"{job['prefilled']}/{job['prompt_tokens']}",
            f"{job['generated']}/{job['max_tokens'] * job['outputs']}",
            job.get("key", ""),
        ]
        for job_id, job in sorted(state["jobs"].items(), key=lambda item: item[1]["arrived"])
    ]
    if rows:
        yield from table(JOBS, rows, width, ink, numbers=[4, 5, 6], elastic=[0, 1, 7])
    else:
        yield "Nothing is running."
    ended = sorted(state["ended"].items(), key=lambda item: -item[1]["ended"])[:SHOWN_ENDED]
    if ended:
        yield ""
        done = [
            [
                ids[job_id],
                job["model"],
                job["source"],
                job["outcome"],
                age(job["seconds"]),
                format_seconds(job["first_token"]) if "first_token" in job else "–",
                str(job["prompt_tokens"]),
                str(job["generated"]),
                job.get("key", ""),
            ]
            for job_id, job in ended
        ]
        yield from table(ENDED, done, width, ink, numbers=[4, 5, 6, 7], elastic=[0, 1, 8])
