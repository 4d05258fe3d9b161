from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.network import NetworkConfig
from penstock.network.zenoh import contacts
from penstock.network.zenoh.contacts import PeerContacts

CONFIG = NetworkConfig(open=True, listen=("tcp/127.0.0.1:7000",), connect=("tcp/127.0.0.1:7001",))


def session(*links: tuple[str, str, str | None]) -> Any:
    found = [SimpleNamespace(src=src, dst=dst, auth_identifier=name) for src, dst, name in links]
    return SimpleNamespace(info=SimpleNamespace(links=lambda: found))


OPENED = ("tcp/127.0.0.1:40000", "tcp/127.0.0.1:7002", "b")
ACCEPTED = ("tcp/127.0.0.1:7000", "tcp/127.0.0.1:40001", "c")


def test_a_peer_is_still_known_when_its_link_has_just_ended() -> None:
    known = PeerContacts(CONFIG)
    known.note(session(OPENED, ACCEPTED))
    known.note(session())
    assert known.add_to(CONFIG, denied=()).connect == ("tcp/127.0.0.1:7001", "tcp/127.0.0.1:7002")


def test_a_peer_that_has_been_gone_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    known = PeerContacts(CONFIG)
    known.note(session(OPENED))
    monkeypatch.setattr(contacts, "LIFETIME_S", 0.0)
    known.note(session())
    assert known.add_to(CONFIG, denied=()) == CONFIG


def test_a_revoked_peer_is_no_contact() -> None:
    known = PeerContacts(CONFIG)
    known.note(session(OPENED))
    assert known.add_to(CONFIG, denied=["b"]) == CONFIG
