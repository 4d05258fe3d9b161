"""The node that tests of what it tells share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.fake_node import FakeNode, fake_node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNode]:
    with fake_node(tmp_path_factory.mktemp("node") / "workspace") as made:
        yield made
