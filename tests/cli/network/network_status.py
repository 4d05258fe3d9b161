"""Answers of `GET /network` as servers give them, in few words."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

RUN = "penstock serve --model smollm2-135m --open-network --connect tcp/127.0.0.1:7447"


def node(name: str, **more: Any) -> Json:
    """A node that is not the one that was asked, unless said so."""
    facts = {"self": False, "version": "0.1.0", "pid": 7, "draining": False, "serves": [], "round_trip": 0.0004}
    return {"node": name} | facts | more


def segment(name: str, layers: str, **more: Any) -> Json:
    facts = {"device": "cpu", "dtype": "bfloat16", "kv_tokens": 100_000, "kv_leased": 100_000, "kv_used": 1200}
    facts |= {"seconds": 0.0021, "load": 0.3, "draining": False}
    return {"node": name, "layers": [int(edge) for edge in layers.split(":")]} | facts | more


def route(*hops: tuple[str, str], **more: Any) -> Json:
    facts = {"state": "open", "why": "It is the only one.", "in_flight": 2, "window": 2, "round_trip": 0.03}
    facts |= {"recoveries": 0, "last_pause": 0.0, "last_reason": ""}
    output = [{"node": name, "layers": [int(edge) for edge in layers.split(":")]} for name, layers in hops]
    return facts | {"hops": output} | more


def pipe(*segments: Json, missing: tuple[str, ...] = (), **more: Any) -> Json:
    facts = {"model": "smollm2-135m", "num_layers": 30, "complete": not missing, "route": None}
    facts |= {"missing": [[int(edge) for edge in hole.split(":")] for hole in missing], "segments": list(segments)}
    facts["explain"] = f"Layers {' and '.join(missing)} of smollm2-135m are missing." if missing else ""
    facts["run"] = RUN if missing else ""
    return facts | more


def status(*pipes: Json, nodes: list[Json], **more: Any) -> Json:
    network = {"name": "home", "open": True, "listen": ["tcp/127.0.0.1:7447"], "connect": [], "node_id": nodes[0]["node"]}
    nodes = [nodes[0] | {"self": True, "round_trip": None, "serves": ["smollm2-135m"]}, *nodes[1:]]
    return {"network": network, "nodes": nodes, "pipes": list(pipes)} | more
