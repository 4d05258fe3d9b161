"""The answer of `GET /network`: how much text fits, and what is known of the links."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from penstock.domain.meta_model import Link, MetaModel, NodeRecord
from penstock.domain.topology import LayerRange
from penstock.model.architecture.spec import fingerprint
from penstock.network.codec import PROTOCOL, encode_record
from penstock.network.in_process import Hub, InProcessRouter
from penstock.peers.report import report
from tests.engine.routing.test_live_network import BLOCKS, CONFIG, LAYERS, SPEC, LiveNode, live
from tests.network.nets import wait_for

Publish = Callable[..., None]


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def publish(hub: Hub) -> Iterator[Publish]:
    """Let a node publish a segment of so many KV blocks, and links; it answers nothing."""
    with ExitStack() as stack:

        def publish(
            node: str, layers: str, blocks: int, *, model: str = "fake", links: tuple[Link, ...] = (), seconds: float = 0.001
        ) -> None:
            segment = MetaModel(
                node=node,
                process="1.0",
                model=model,
                pipe="p",
                shape=fingerprint(SPEC),
                num_layers=LAYERS,
                layers=LayerRange.parse(layers),
                weight_hash="",
                dtype="float32",
                device="cpu",
                kv_blocks=blocks,
                kv_free=blocks,
                block_size=CONFIG.block_size,
                seconds=seconds,
            )
            router = InProcessRouter(hub, node)
            stack.callback(router.close)
            router.publish(
                encode_record(
                    NodeRecord(node=node, epoch=1, version="0", protocol=PROTOCOL, pid=1, segments=(segment,), links=links)
                )
            )
            router.start(lambda sender, data: None, lambda: None)

        yield publish


def model(node: LiveNode, name: str = "fake") -> dict[str, Any]:
    return next(pipe for pipe in report(node.membership)["pipes"] if pipe["model"] == name)


def room(node: LiveNode, name: str = "fake") -> int:
    return int(model(node, name)["kv_tokens"])


@pytest.mark.parametrize("ends", [True, False])
def test_the_room_for_text_is_that_of_the_smallest_segment_on_the_path(hub: Hub, publish: Publish, ends: bool) -> None:
    here = LiveNode(hub, "here", 1, (0, 2), ends=ends)
    with live(here):
        assert (model(here)["complete"], room(here)) == (False, 0)
        publish("there", "2:4", 10)
        publish("slow", "2:4", 5, seconds=9.0)
        wait_for(lambda: len(here.membership.records) == 3, "all records")
        assert room(here) == 10 * CONFIG.block_size


def test_the_room_for_text_of_an_open_route_is_that_of_its_nodes(hub: Hub, publish: Publish) -> None:
    here = LiveNode(hub, "here", 1, (0, 4), ends=True)
    with live(here):
        wait_for(lambda: here.engine.origin.route is not None, "a route")
        publish("there", "0:4", 10)
        wait_for(lambda: len(here.membership.records) == 2, "the record")
        assert room(here) == BLOCKS * CONFIG.block_size


def test_the_room_for_text_of_a_model_that_this_node_does_not_host_is_known_too(hub: Hub, publish: Publish) -> None:
    here = LiveNode(hub, "here", 1, (0, 4), ends=True)
    with live(here):
        publish("there", "0:4", 10, model="other")
        wait_for(lambda: len(here.membership.records) == 2, "the record")
        assert room(here, "other") == 10 * CONFIG.block_size


def test_nodes_are_shown_with_their_links_and_with_round_trips_from_echoes(
    hub: Hub, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = LiveNode(hub, "here", 1, (0, 4), ends=True)
    with live(here):
        publish("there", "0:4", 10, links=(Link("here", 0.03, 2.4e6),))
        wait_for(lambda: len(here.membership.records) == 2, "the record")
        monkeypatch.setattr(here.membership.links, "links", lambda: (Link("there", 0.029),))
        there = next(node for node in report(here.membership)["nodes"] if node["node"] == "there")
        assert there["links"] == [{"node": "here", "round_trip": 0.03, "bytes_per_second": 2.4e6}]
        assert there["round_trip"] == 0.029


def test_a_warning_about_the_revocation_list_is_part_of_the_status(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    here = LiveNode(hub, "here", 1, (0, 2))
    with live(here):
        assert report(here.membership)["network"]["warning"] == ""
        monkeypatch.setattr(here.membership.revocations, "warning", lambda: "The revocation list is 9 days old.")
        assert report(here.membership)["network"]["warning"] == "The revocation list is 9 days old."
