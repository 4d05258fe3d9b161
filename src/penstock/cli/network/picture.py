"""The text of `penstock network status`: the network, its nodes, and for each model which node holds which layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from penstock.cli.network.layer_bars import Held, layer_bars
from penstock.cli.ui.columns import INDENT, TIED, Ink, breadth, harmless, labels, shortened, table, without_domain, wrapped
from penstock.units import format_bytes, format_seconds

Json = dict[str, Any]

MIN_WIDTH = 40  # columns; nothing can be drawn in fewer
SLOW_BYTES_PER_SECOND = 10e6  # show slower links: a large model's hidden states take milliseconds per token there
MAX_LINKS = 8
MIN_SHOWN_REFUSALS = 10  # a restart of a node causes a few
NODES = ["node", "state", "serves", "round trip", "version"]
SEGMENTS = ["node", "layers", "computes on", "a pass", "load", "KV used", "leased", "total"]
STANDALONE = """\
This node is not in a network.

To let machines share the layers of a model, create a network on one of them,
and invite the others:

  penstock network create home        here, then: penstock serve
  penstock network invite laptop      prints a token

and on the laptop: penstock network join TOKEN, then: penstock serve"""
TO_RUN = ["To complete it, run this on a machine with room for it:"]
TO_INVITE = [
    "To complete it, start a member that is off, or invite a machine with room:",
    "run this on the machine that created the network, and on the new one, with the",
    "token that it prints: penstock network join TOKEN, then: penstock serve",
]
PLAIN = str.maketrans({"█": "#", "▉": "#", "░": "%", "·": ".", "→": ">", "…": "~", "–": "-", "✓": "+", "✗": "!", "×": "x"})


def render(status: Json, width: int, *, colour: bool = False) -> str:
    """Format the answer of `GET /network` in `width` columns; commands to paste may be longer."""
    status, ink, width = harmless(status), Ink(colour), max(width, MIN_WIDTH)
    here = next((node["node"] for node in status["nodes"] if node["self"]), "")
    named = _names(status, width)
    parts = [_network(status, named, width, ink)]
    is_open = status["network"] is None or status["network"]["open"]
    parts += [_pipe(pipe, here, named, width, ink, is_open=is_open) for pipe in status["pipes"]]
    if not status["pipes"]:
        parts.append(["No node holds layers of any model."])
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _names(status: Json, width: int) -> dict[str, str]:
    """Return the names to show: long ones without the domain that all share, and shortened."""
    held = [segment["node"] for pipe in status["pipes"] for segment in pipe["segments"]]
    hops = [hop["node"] for pipe in status["pipes"] if pipe["route"] for hop in pipe["route"]["hops"]]
    names = list(dict.fromkeys([*(node["node"] for node in status["nodes"]), *held, *hops]))
    room = width // 4
    if all(breadth(name) <= room for name in names):
        return {name: name for name in names}
    bare = without_domain(names)
    short = labels(bare.values(), room)
    return {name: short[bare[name]] for name in names}


def _heading(text: str, marks: dict[str, str], width: int, ink: Ink) -> list[str]:
    """Wrap a heading. `marks` maps pieces of the text to their styles."""
    lines = wrapped(text, width, first="")
    for piece, style in marks.items():
        place = next((place for place, line in enumerate(lines) if piece in line), 0)
        lines[place] = lines[place].replace(piece, ink(style, piece), 1)
    return lines


# ---- the network ----


def _network(status: Json, named: dict[str, str], width: int, ink: Ink) -> list[str]:
    network, nodes = status["network"], status["nodes"]
    if network is None:
        return STANDALONE.splitlines()
    trust = "open: any machine may join" if network["open"] else "closed: members have certificates"
    lines = _heading(
        f"Network {network['name']} · {_counted(len(nodes), 'node')} · {trust}", {network["name"]: "bold"}, width, ink
    )
    ways = [("listens on", network["listen"]), ("connects to", network["connect"])]
    text = "; ".join(f"{what} {', '.join(endpoints)}" for what, endpoints in ways if endpoints)
    if text:
        lines += wrapped(f"{network['node_id']} {text}", width)
    if network.get("warning"):
        lines += [ink("yellow", line) for line in wrapped(f"warning: {network['warning']}", width)]
    for sender, count in sorted((status.get("refused_from") or {}).items()):  # an older server does not say
        if count >= MIN_SHOWN_REFUSALS:
            text = f"warning: {count:,} messages in the name of {sender} were refused; the log says why"
            lines += [ink("yellow", line) for line in wrapped(text, width)]
    rows = [_node(node, named) for node in nodes]
    return [*lines, "", *table(NODES, rows, width, ink, numbers=[3], elastic=[0, 2]), *_links(nodes, named, width, ink)]


def _node(node: Json, named: dict[str, str]) -> list[str]:
    return [
        named[node["node"]],
        _state(node),
        ", ".join(node["serves"]) or "layers only",
        "this node" if node["self"] else _time(node["round_trip"]),
        node["version"],
    ]


def _links(nodes: list[Json], named: dict[str, str], width: int, ink: Ink) -> list[str]:
    """The measured speeds of links, slow ones first."""
    found = sorted(
        (link["bytes_per_second"], named[link["node"]], named[node["node"]])
        for node in nodes
        for link in node.get("links") or ()  # an older server does not say
        if link["bytes_per_second"] > 0 and link["node"] in named
    )
    lines: list[str] = []
    for speed, sender, receiver in found[:MAX_LINKS]:
        slow = speed < SLOW_BYTES_PER_SECOND
        text = f"{'slow link' if slow else 'link'} {sender} → {receiver}: {format_bytes(round(speed))}/s"
        lines += [ink("yellow", line) if slow else line for line in wrapped(text, width)]
    more = len(found) - MAX_LINKS
    return ["", *lines, *([f"… and {more} more (--json has all)"] if more > 0 else [])] if lines else []


def _state(node: Json) -> str:
    states = ("draining", "loading", "starting")
    return next((state for state in states if node.get(state)), "ready")


# ---- one model ----


def _pipe(pipe: Json, here: str, named: dict[str, str], width: int, ink: Ink, *, is_open: bool) -> list[str]:
    model = shortened(pipe["model"], width // 2)
    segments = sorted(pipe["segments"], key=lambda segment: (segment["layers"], segment["node"]))
    missing = [(start, end) for start, end in pipe["missing"]]
    nodes = _counted(len({segment["node"] for segment in segments}), "node")
    state, style = ("✓ complete", "green") if pipe["complete"] else ("✗ incomplete", "red")
    heading = f"{model} · {_counted(pipe['num_layers'], 'layer')} on {nodes} · {state.replace(' ', TIED)}"
    lines = [*_heading(heading, {state: style, model: "bold"}, width, ink), ""]
    lines += layer_bars(pipe["num_layers"], [_held(segment, named) for segment in segments], missing, width, ink)
    if segments:
        rows = [_segment(segment, named) for segment in segments]
        lines += ["", *table(SEGMENTS, rows, width, ink, numbers=[3, 4, 5, 6, 7], elastic=[0])]
    lines.append("")
    facts = [_memory(pipe), _pipes(pipe, named), _route(pipe, here, named), _wire(pipe), _placement(pipe, here, named)]
    for name, text in chain.from_iterable(facts):
        lines += _fact(name, text, width, ink)
    for warning in pipe.get("warnings", ()):
        lines += ["", *(ink("yellow", line) for line in wrapped(f"warning: {_tied(warning)}", width))]
    if not pipe["complete"]:
        lines += ["", *(ink("red", line) for line in wrapped(_tied(pipe["explain"]), width))]
    if pipe["run"]:
        how = TO_RUN if is_open else TO_INVITE
        lines += [*(INDENT + line for line in how), "", *_command(pipe["run"], width)]
    return lines


def _held(segment: Json, named: dict[str, str]) -> Held:
    start, end = segment["layers"]
    return Held(named[segment["node"]], start, end, segment["draining"])


def _segment(segment: Json, named: dict[str, str]) -> list[str]:
    start, end = segment["layers"]
    return [
        named[segment["node"]],
        f"{start}:{end}",
        f"{segment['device']} {segment['dtype']}",
        _time(segment["seconds"] or None),
        "draining" if segment["draining"] else f"{100 * segment['load']:.0f} %",
        *(_tokens(segment[name]) for name in ("kv_used", "kv_leased", "kv_tokens")),
    ]


def _memory(pipe: Json) -> Iterator[tuple[str, str]]:
    if tokens := pipe.get("kv_tokens"):  # an older server does not say
        yield "memory", f"room for {tokens:,} tokens of text, all requests together"


def _wire(pipe: Json) -> Iterator[tuple[str, str]]:
    wire = pipe.get("wire")  # an older server does not say
    route = pipe["route"]
    if wire and route and len({hop["node"] for hop in route["hops"]}) > 1:
        yield "wire", f"{wire['format']}, {wire['token_bytes']:,} bytes a token on each hop"


def _pipes(pipe: Json, named: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Describe each pipe of the model by its id: which segments belong to it, and what it lacks."""
    for part in pipe.get("pipes") or ():
        held = sorted(
            (segment["layers"], named[segment["node"]]) for segment in pipe["segments"] if segment["pipe"] == part["id"]
        )
        lacks = ", ".join(f"{start}:{end}" for start, end in part["missing"])
        state = "complete" if part["complete"] else f"lacks {lacks}"
        yield f"pipe {part['id']}", f"{state}: " + ", ".join(f"{node} {start}:{end}" for (start, end), node in held)


def _route(pipe: Json, here: str, named: dict[str, str]) -> Iterator[tuple[str, str]]:
    route = pipe["route"]
    if route is None:
        who = named.get(here, "this node")
        yield "route", f"none from here: {who} has not loaded the ends of {pipe['model']}, so it serves no requests itself"
        return
    hops = [f"{named[hop['node']]} {hop['layers'][0]}:{hop['layers'][1]}" for hop in route["hops"]]
    if hops:
        home = [named[here]] if here and route["hops"][-1]["node"] != here else []
        marks = [*([] if route["state"] == "open" else [route["state"]]), *(f"pipe {name}" for name in route.get("pipes") or ())]
        state = f" ({', '.join(marks)})" if marks else ""
        yield "route", " → ".join([*hops, *home]) + state
    else:
        yield "route", route["state"]
    if route["why"]:
        yield "why", route["why"]
    broken = route["last_reason"] if not hops else ""
    if broken:
        yield "lost", f"the last route: {broken}"
    if route["window"]:
        trip = f"; a round trip takes {_time(route['round_trip'])}" if route["round_trip"] else ""
        yield "in flight", f"{route['in_flight']} of at most {_counted(route['window'], 'step')}{trip}"
    reading = route.get("reading") or {"prompts": 0}  # an older server does not say
    if reading["prompts"]:
        stages = ", ".join(f"{name} {hop['processed']:,}" for name, hop in zip(hops, route["hops"], strict=True))
        yield "reading", f"{_counted(reading['prompts'], 'prompt')}, {reading['tokens']:,} tokens; processed by {stages}"
    if route["recoveries"]:
        times = {1: "once", 2: "twice"}.get(route["recoveries"], f"{route['recoveries']} times")
        pause = f"; the last pause took {_time(route['last_pause'])}" if route["last_pause"] else ""
        longest = route.get("longest_wait", 0.0)
        pause += f", {_time(longest)} for the last answer" if longest > 1.2 * route["last_pause"] else ""
        reason = f": {route['last_reason']}" if route["last_reason"] and not broken else ""
        yield "recovered", f"{times}{pause}{reason}"


def _placement(pipe: Json, here: str, named: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Describe what nodes are loading, how much room they have, and why this one holds its layers."""
    loading = pipe.get("loading") or {}
    if loading:
        ranges = [f"{named.get(node, node)} {start}:{end}" for node, claims in loading.items() for start, end in claims]
        yield "loading", ", ".join(ranges)
    room = pipe.get("room") or {}
    if room:
        yield "room", ", ".join(f"{named.get(node, node)} for {_counted(count, 'layer')}" for node, count in room.items())
    if pipe.get("placement"):
        yield "placed", f"{named.get(here, 'this node')}: {pipe['placement']}"


def _fact(name: str, text: str, width: int, ink: Ink) -> list[str]:
    first = f"{INDENT}{name:9}{INDENT}"
    head, *rest = wrapped(_tied(text), width, first=first, then=" " * len(first)) or [first]
    return [ink("dim", head[: len(first)]) + head[len(first) :], *rest]


def _tied(text: str) -> str:
    """Keep a node, its layers and the arrow after them on one line."""
    return re.sub(r" (?=\d+:\d+\b|→)", TIED, text)


def _command(command: str, width: int) -> list[str]:
    """Indent a command on one line, or on several that can still be pasted."""
    whole = 2 * INDENT + command
    if len(whole) <= width or not set(command).isdisjoint("'\"\\"):
        return [whole]
    lines = wrapped(command.replace(" ", TIED).replace(f"{TIED}--", " --"), width - 2, first=2 * INDENT, then=4 * INDENT)
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


# ---- numbers ----


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)


def _tokens(count: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{math.floor(10 * count / size) / 10:g}{unit}" if count < 100 * size else f"{count // size:.0f}{unit}"
    return f"{count}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
