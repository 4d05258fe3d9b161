"""What is taken from other nodes' records: the weights that most have, and a model to adopt."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.domain.meta_model import NodeRecord, Offer
from penstock.placement.peer_records import agreed_weights, choose_network_model


def record(node: str, *offers: tuple[str, str]) -> NodeRecord:
    told = tuple(Offer(model=model, shape="s", num_layers=4, room=0, weights=weights) for model, weights in offers)
    return NodeRecord(node=node, epoch=1, version="0", protocol=2, pid=1, offers=told)


def test_the_weights_of_a_model_are_those_of_most_nodes_and_each_has_one_vote() -> None:
    honest = [record("a", ("m", "aa")), record("b", ("m", "aa"))]
    liar = record("c", *[("m", "00")] * 9)
    assert agreed_weights([*honest, liar], "m", exclude="d") == "aa"
    assert agreed_weights([*honest, liar], "m", exclude="a") == "00"  # one against one: the first
    assert agreed_weights(honest, "another", exclude="d") == ""
    assert agreed_weights([record("a", ("m", ""))], "m", exclude="d") == ""


def test_a_model_is_adopted_by_its_name_but_never_a_path_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "secrets").mkdir()
    assert choose_network_model([record("a", ("org/name", ""))], exclude="b") == "org/name"
    assert choose_network_model([record("a", ("smollm2-135m", ""))], exclude="b") == "smollm2-135m"
    assert choose_network_model([record("b", ("org/name", ""))], exclude="b") == ""
    for path in (str(tmp_path), "~/secrets", "/etc", "."):
        assert choose_network_model([record("a", (path, ""))], exclude="b") == ""
    assert choose_network_model([record("a", ("/etc", ""), ("org/name", ""))], exclude="b") == "org/name"
