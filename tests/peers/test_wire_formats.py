"""Answers over two nodes in every format of hidden states: the tokens, and the bytes that travel."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Literal

import pytest

from penstock.domain.hidden_format import HiddenFormat, row_bytes
from penstock.domain.span import NetworkJob
from penstock.engine.hosted_model import HostedModel
from penstock.network.codec import decode
from penstock.network.in_process import Hub
from tests.network.listening import Node, answer
from tests.network.nets import wait_for

Setting = Literal["auto", "fp32", "bf16", "int8"]
PROMPT = "Water flows through a penstock from the reservoir down to the turbine."


def exchange(model: Path, *, apart: bool, wire: Setting = "auto") -> tuple[list[int], list[NetworkJob]]:
    """Ask a node for 24 tokens, with all layers there, or all but the first on another one.

    Returns the ids, and the NetworkJobs that left the two.
    """
    hub = Hub()
    with ExitStack() as stack:
        nodes = [Node(hub, "origin", [(0, 1 if apart else 6)], ends=True, wire=wire, model=str(model), dtype="float32")]
        stack.enter_context(closing(nodes[0]))
        if apart:
            nodes.append(Node(hub, "other", [(1, 6)], model=str(model), dtype="float32"))
            stack.enter_context(closing(nodes[1]))
        hosted = nodes[0].hosted
        assert isinstance(hosted, HostedModel)
        wait_for(lambda: hosted.engine.origin.route is not None, "a route")
        ids = answer(nodes[0], PROMPT).ids
        sent = [decode(data) for node in nodes for data in node.router.sent]
        return ids, [message for message in sent if isinstance(message, NetworkJob)]


@pytest.mark.parametrize("wire,kind", [("auto", "float32"), ("fp32", "float32"), ("bf16", "bfloat16"), ("int8", "int8")])
def test_hidden_states_travel_both_ways_in_the_format_of_the_origin(
    tiny_chat_model: Path, wire: Setting, kind: HiddenFormat
) -> None:
    ids, jobs = exchange(tiny_chat_model, apart=True, wire=wire)
    hidden = [job.hidden for job in jobs if job.hidden is not None]
    assert len(hidden) >= 2 * 24, "each token went there and came back"
    assert {packed.dtype for packed in hidden} == {kind}
    assert all(len(packed.data) == packed.rows * row_bytes(kind, 64) for packed in hidden)
    if kind == "float32":
        assert ids == exchange(tiny_chat_model, apart=False)[0], "the same tokens as on one node"
