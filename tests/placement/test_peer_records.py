"""What is taken from other nodes' records: the weights that they offer, and a model to adopt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.domain.meta_model import NodeRecord, Offer
from penstock.placement.peer_records import choose_network_model, offered_weights


def record(node: str, *offers: tuple[str, str]) -> NodeRecord:
    output = tuple(Offer(model=model, shape="s", num_layers=4, room=0, weights=weights, gives=True) for model, weights in offers)
    return NodeRecord(node=node, epoch=1, version="0", protocol=2, pid=1, offers=output)


def test_all_weights_that_other_nodes_send_are_offered_with_their_nodes() -> None:
    records = [record("b", ("m", "aa")), record("a", ("m", "aa"), ("n", "bb")), record("c", ("m", "00")), record("e", ("m", ""))]
    assert offered_weights(records, "m", exclude="d") == {"aa": ["a", "b"], "00": ["c"]}
    assert offered_weights(records, "m", exclude="c") == {"aa": ["a", "b"]}
    assert offered_weights(records, "another", exclude="d") == {}
    keeps = replace(records[2], offers=tuple(replace(offer, gives=False) for offer in records[2].offers))
    assert offered_weights([keeps], "m", exclude="d") == {}


def always(name: str) -> bool:
    return True


def test_a_model_is_adopted_by_its_name_but_never_a_path_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "secrets").mkdir()
    assert choose_network_model([record("a", ("org/name", ""))], exclude="b", may_run=always) == "org/name"
    assert choose_network_model([record("a", ("smollm2-135m", ""))], exclude="b", may_run=always) == "smollm2-135m"
    assert choose_network_model([record("b", ("org/name", ""))], exclude="b", may_run=always) == ""
    for path in (str(tmp_path), "~/secrets", "/etc", "."):
        assert choose_network_model([record("a", (path, ""))], exclude="b", may_run=always) == ""
    assert choose_network_model([record("a", ("/etc", ""), ("org/name", ""))], exclude="b", may_run=always) == "org/name"


def test_a_model_that_this_node_would_not_run_is_not_adopted() -> None:
    asked: list[str] = []

    def may_run(name: str) -> bool:
        asked.append(name)
        return name == "org/good"

    records = [record("a", ("org/evil", "00")), record("b", ("org/evil", "00")), record("c", ("org/good", "aa"))]
    assert choose_network_model(records, exclude="d", may_run=may_run) == "org/good"
    assert choose_network_model(records[:2], exclude="d", may_run=may_run) == ""
    assert asked == ["org/evil", "org/good", "org/evil"], "each name once"
