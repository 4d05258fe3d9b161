"""What the records of all nodes say about a model: pure functions for placing layers and finding weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from penstock.domain.meta_model import NodeRecord, Offer
from penstock.domain.topology import LayerRange
from penstock.model.sources import known_models
from penstock.pipes.meta_pipe import WeightsOf, differs
from penstock.pipes.pipe_ids import pipe_of
from penstock.pipes.router_pipes import RouterPipes
from penstock.placement.plan import Member


def members_of(
    records: Iterable[NodeRecord], key: tuple[str, str, int], block_size: int, weights: WeightsOf | None = None
) -> list[Member]:
    """Return what each node holds and could load of a model.

    key: the model's name, shape and number of layers.

    Nodes that are leaving are left out, and so are segments that cannot be on a path with this node's layers.
    """
    members = []
    for record in records:
        held = {
            segment.layers: pipe_of(segment)
            for segment in record.segments
            if (segment.model, segment.shape, segment.num_layers, segment.block_size) == (*key, block_size)
            and not differs(segment, weights)
        }
        offer = next((offer for offer in record.offers if (offer.model, offer.shape, offer.num_layers) == key), None)
        if not record.draining and (held or offer):
            members.append(_member(record.node, held, offer))
    return members


def _member(node: str, pipes: Mapping[LayerRange, str], offer: Offer | None) -> Member:
    member = Member(node=node, held=tuple(pipes), pipes=pipes)
    if offer is None:
        return member
    return replace(member, claims=offer.claims, pinned=offer.pinned, room=offer.room, max_pipes=offer.max_pipes)


def offered_weights(records: Iterable[NodeRecord], model: str, exclude: str) -> dict[str, list[str]]:
    """Return the nodes other than `exclude` that send weights of a model, by the hash of their manifest."""
    found: dict[str, list[str]] = {}
    for record in sorted(records, key=lambda record: record.node):
        for offer in record.offers:
            if record.node != exclude and offer.model == model and offer.weights and offer.gives:
                found.setdefault(offer.weights, []).append(record.node)
    return found


def choose_network_model(records: Iterable[NodeRecord], exclude: str, may_run: Callable[[str], bool]) -> str:
    """Choose a model for a node that was given none: one with missing layers, else the first. Empty if there is none.

    The name comes from another node. If it is a path on this machine it is skipped, or its files would be read and served.
    may_run: whether this node would run the model of that name.
    """
    peers = [record for record in records if record.node != exclude]
    pipes = RouterPipes(lambda: peers).pipes()
    lacking = [pipe.model for pipe in pipes if not pipe.is_complete()]
    names = [*lacking, *(pipe.model for pipe in pipes), *sorted(offer.model for record in peers for offer in record.offers)]
    found = (name for name in names if known_models.find(name) or not os.path.lexists(os.path.expanduser(name)))
    return next(filter(may_run, dict.fromkeys(found)), "")
