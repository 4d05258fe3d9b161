"""The answer of `GET /network`, which `penstock network status` shows: a network as one node sees it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from penstock.domain.meta_model import MetaModel, NodeRecord, Offer
from penstock.domain.route import Hop
from penstock.engine.engine import Engine
from penstock.engine.routing.origin.no_origin import NoOrigin
from penstock.engine.routing.origin.origin import Origin
from penstock.engine.routing.origin.stage_progress import prompt_progress
from penstock.network.trust.listening import reachable_endpoints
from penstock.peers.membership import Membership
from penstock.pipes.meta_pipe import MetaPipe, precisions_differ, weights_differ
from penstock.pipes.pipe_ids import pipe_of, split

Json = dict[str, Any]


def report(membership: Membership) -> Json:
    trips = _round_trips(membership)
    return {
        "network": _network(membership),
        "nodes": [_node(record, membership.node, trips) for record in sorted(membership.records, key=lambda record: record.node)],
        "strangers": dict(membership.unreadable_peers),
        "refused": membership.refused(),
        "refused_from": membership.refused_from(),
        "traffic": {node: asdict(traffic) for node, traffic in membership.wire.traffic().items()},
        "pipes": [_pipe(membership, pipe) for pipe in membership.pipes.pipes()],
    }


def _network(membership: Membership) -> Json:
    config = membership.config
    return {
        "name": config.name,
        "open": config.open,
        "listen": list(config.listen),
        "connect": list(config.connect),
        "node_id": membership.node,
        "warning": " ".join(membership.warnings()),
        "revocations_signed": membership.revocations.date,
    }


def _node(record: NodeRecord, here: str, trips: dict[str, float]) -> Json:
    return {
        "node": record.node,
        "self": record.node == here,
        "version": record.version,
        "pid": record.pid,
        "draining": record.draining,
        "serves": list(record.serves),
        "starting": not (record.segments or record.serves),
        "loading": [f"{claim} of {offer.model}" for offer in record.offers for claim in offer.claims],
        "round_trip": trips.get(record.node),
        "links": [asdict(link) for link in record.links],
    }


def _pipe(membership: Membership, pipe: MetaPipe) -> Json:
    engine = membership.engines.get(pipe.model)
    origin = NoOrigin() if engine is None or engine.pipe.shape != pipe.shape else engine.origin
    offers = {record.node: offer for record in membership.records for offer in record.offers if _is_of(offer, pipe)}
    warnings = [*map(str, weights_differ(pipe.segments)), *membership.incompatible_peers.values()]
    if mixed := precisions_differ(pipe.segments):
        warnings.append(mixed)
    return {
        "model": pipe.model,
        "num_layers": pipe.num_layers,
        "complete": pipe.is_complete(),
        "kv_tokens": _text_room(membership, pipe, origin),
        "missing": [list(layers) for layers in pipe.missing()],
        "explain": pipe.explain(),
        "warnings": [*warnings, *_exposed(origin, membership.node)],
        "segments": [_segment(meta) for meta in pipe.segments],
        "pipes": [
            {"id": name, "complete": not part.missing(), "missing": [list(layers) for layers in part.missing()]}
            for name, part in split(pipe).items()
        ],
        "loading": {node: [list(claim) for claim in offer.claims] for node, offer in sorted(offers.items()) if offer.claims},
        "room": {node: offer.room for node, offer in sorted(offers.items()) if offer.room},
        "placement": membership.placements.get(pipe.model, ""),
        "route": describe_route(origin) if isinstance(origin, Origin) else None,
        "wire": _wire(engine),
        "run": _how_to_fill(membership, pipe),
    }


def _text_room(membership: Membership, pipe: MetaPipe, origin: Origin | NoOrigin) -> int:
    """How many tokens of text requests can use together: the KV memory of the smallest segment on the route, or on the path
    that it would take. 0 without a path."""
    engine = membership.engines.get(pipe.model)
    if engine is None or engine.pipe.shape != pipe.shape:
        path = pipe.path(membership.node)
        first = None if path is None else pipe.holding(path.hops[0])
        return 0 if path is None or first is None else path.kv_blocks * first.block_size
    if (route := origin.route) is not None:
        return route.reach * engine.config.block_size
    path = engine.pipe.path(block_size=engine.config.block_size)
    return 0 if path is None else path.kv_blocks * engine.config.block_size


def _wire(engine: Engine | None) -> Json | None:
    """How hidden states of this node's jobs travel; None if it takes none."""
    if engine is None or isinstance(engine.origin, NoOrigin):
        return None
    return {"format": engine.pipe.hidden_format, "token_bytes": engine.pipe.token_bytes}


def _exposed(origin: Origin | NoOrigin, here: str) -> list[str]:
    route = origin.route
    warning = "" if route is None else exposure(route.hops, here)
    return [warning] if warning else []


def exposure(hops: Sequence[Hop], here: str) -> str:
    """Return a warning about text that other nodes on this route can read easily; empty if there is none."""
    first, last = hops[0].node, hops[-1].node
    if first == here == last:
        return ""
    if here not in (first, last):
        what = f"{first} receives prompts as plain embeddings, and {last} returns answers from the last layer"
    elif first != here:
        what = f"{first} receives prompts as plain embeddings"
    else:
        what = f"{last} returns answers from the last layer"
    return f"{what}: anyone with the weights can read them. To keep the first and last layer here, use --private-layers 1,1."


def _is_of(offer: Offer, pipe: MetaPipe) -> bool:
    return (offer.model, offer.shape) == (pipe.model, pipe.shape)


def _segment(meta: MetaModel) -> Json:
    size = meta.block_size
    return {
        "node": meta.node,
        "layers": list(meta.layers),
        "pipe": pipe_of(meta),
        "device": meta.device,
        "dtype": meta.dtype,
        "kv_tokens": meta.kv_blocks * size,
        "kv_leased": (meta.kv_blocks - meta.kv_free) * size,
        "kv_used": meta.kv_held * size,
        "seconds": meta.seconds,
        "load": meta.load,
        "draining": meta.draining,
    }


def describe_route(origin: Origin) -> dict[str, Any]:
    """Describe the route. The compute thread is running: each value is right, but they may be from different moments."""
    route, opening, stats = origin.route, origin.opener.opening, origin.stats
    current = route or opening
    hops = current.hops if current else ()
    reading = prompt_progress(origin.sequences, len(hops))
    return {
        "state": "open" if route else "opening" if opening else "none",
        "hops": [
            {"node": hop.node, "layers": list(hop.layers), "processed": processed}
            for hop, processed in zip(hops, reading.processed, strict=True)
        ],
        "reading": {"prompts": reading.prompts, "tokens": reading.tokens},
        "pipes": list(current.pipes) if current else [],
        "why": current.why if current else origin.opener.trouble,
        "in_flight": len(origin.in_flight),
        "window": origin.pacing.window.size,
        "round_trip": origin.pacing.window.round_trip,
        "between_nodes": origin.pacing.window.usual_hops,
        "kv_tokens": origin.sequences.pool.capacity * origin.sequences.pool.block_size,
        "lost": stats.lost_jobs,
        "recoveries": stats.recoveries,
        "last_pause": stats.last_pause,
        "longest_wait": stats.longest_wait,
        "last_reason": stats.last_break,
    }


def _round_trips(membership: Membership) -> dict[str, float]:
    """By node, from the pings of routes, or else from echoes."""
    echoes = {link.node: link.round_trip for link in membership.links.links() if link.round_trip}
    pings = {node: trip for engine in membership.engines.values() for node, trip in list(engine.origin.round_trips.items())}
    return echoes | pings


def _being_filled(membership: Membership, pipe: MetaPipe) -> bool:
    """Whether nodes are loading all missing layers."""
    offers = [offer for record in membership.records for offer in record.offers if _is_of(offer, pipe)]
    loading = {layer for offer in offers for claim in offer.claims for layer in claim.layers()}
    missing = {layer for hole in pipe.missing() for layer in hole.layers()}
    return bool(missing) and missing <= loading


def _how_to_fill(membership: Membership, pipe: MetaPipe) -> str:
    """Return a command for another machine that would add the missing layers.

    It is quoted for a shell: it may be pasted, and the model's name may come from a peer.
    """
    config = membership.config
    if pipe.bridge() is None or _being_filled(membership, pipe):
        return ""
    if not config.open:
        return shlex.join(["penstock", "network", "invite", "NAME"])
    words = ["penstock", "serve", "--model", pipe.model, "--open-network"]
    words += [] if config.name == "penstock" else ["--network", config.name]
    endpoints = [reachable_endpoints([endpoint])[0] for endpoint in config.listen] or list(config.connect)
    words += ["--connect", ",".join(endpoints)] if endpoints else ["--multicast"]
    return shlex.join(words)
