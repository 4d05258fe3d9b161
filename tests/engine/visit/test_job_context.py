"""JobContext: what a visit finds on its node."""

from __future__ import annotations

import logging

import pytest

from penstock.engine.sequences.engine_sequences import EngineSequenceManager
from penstock.simulate.node import Machine
from tests.engine.world import World


@pytest.mark.parametrize("node, ends", [("a", True), ("b", False)])
def test_the_context_bundles_what_a_visit_needs(node: str, ends: bool) -> None:
    world = World(Machine("a", ((0, 2),), ends=True), Machine("b", ((2, 4),)))
    world.open_routes("a")
    engine = world.nodes[node].engine
    context = engine._processor._context
    assert context.config is engine.config
    assert isinstance(context.logger, logging.Logger)
    assert context.pipe is engine.pipe
    assert (context.end_model is not None) == ends
    if ends:
        assert isinstance(context.sequences, EngineSequenceManager)  # the jobs of this node
        assert context.own_origin.route is not None
