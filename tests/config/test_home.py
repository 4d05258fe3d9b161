"""The networks of this machine: where they lie, who may read them, and when their settings become a node's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config.example import example
from penstock.config.home import Home, JoinedNetwork, home
from penstock.config.settings import Settings, load_settings
from penstock.errors import ConfigError


def put_network(root: Path, name: str, **changes: Any) -> JoinedNetwork:
    """A network's folder, as far as settings look into it."""
    folder = root / "networks" / name
    folder.mkdir(parents=True)
    for private in (root / "networks", folder):
        private.chmod(0o700)
    plain = {"listen": ("tls/0.0.0.0:7448",), "connect": ("tls/192.0.2.7:7447",), "addresses": (), "created": "2026-11-15"}
    network = JoinedNetwork(**{"folder": folder, "name": name, "node": "laptop"} | plain | changes)
    (folder / "network.json").write_bytes(network.contents())
    network.key_file.touch(mode=0o600)
    return network


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put_network(tmp_path, "home")
    put_network(tmp_path, "lab", node="left")
    (tmp_path / "networks" / "current").write_text("home\n", encoding="utf-8")
    return tmp_path


def loaded(root: Path, file: str = "", environ: dict[str, str] | None = None, **flags: Any) -> Settings:
    path = None
    if file:
        path = root / "node.toml"
        path.write_text(file, encoding="utf-8")
    given = {f"network.{name}" if name != "node_id" else name: value for name, value in flags.items()}
    return load_settings(path, {"PENSTOCK_HOME": str(root)} | (environ or {}), given)


def from_networks(settings: Settings) -> dict[str, Any]:
    return {key: value for key, (value, source) in settings.sources.items() if source.startswith("network ")}


# ---- where they lie ----


@pytest.mark.parametrize(
    "environ, folder",
    [
        ({"PENSTOCK_HOME": "/p", "XDG_CONFIG_HOME": "/x", "HOME": "/h"}, "/p/networks"),
        ({"PENSTOCK_HOME": "", "XDG_CONFIG_HOME": "/x", "HOME": "/h"}, "/x/penstock/networks"),
        ({"HOME": "/h"}, "/h/.config/penstock/networks"),
    ],
)
def test_the_home_is_the_nearest_that_the_environment_names(environ: dict[str, str], folder: str) -> None:
    found = home(environ)
    assert found is not None
    assert found.networks == Path(folder)


def test_a_process_without_a_home_is_in_no_network() -> None:
    assert home({}) is None
    assert not load_settings(None, {}, {}).node.network.enabled


def test_networks_are_found_by_name_and_nothing_else_is_one(root: Path) -> None:
    (root / "networks" / ".home.0123").mkdir()
    assert Home(root).names() == ["home", "lab"]
    assert Home(root).current() == "home"
    assert Home(root).network("lab").node == "left"
    with pytest.raises(ConfigError, match=r"in no network 'attic'.*Its networks are: home, lab"):
        Home(root).network("attic")
    assert Home(root / "nowhere").names() == []
    assert Home(root / "nowhere").current() is None


def test_a_current_network_that_is_gone_is_told(root: Path) -> None:
    (root / "networks" / "current").write_text("attic", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"names the unknown network 'attic'.*penstock network use NAME"):
        loaded(root)


@pytest.mark.parametrize("name, mode, command", [("", 0o750, "chmod 700"), ("node.key", 0o604, "chmod 600")])
def test_what_others_can_read_is_refused_with_what_to_do(root: Path, name: str, mode: int, command: str) -> None:
    path = root / "networks" / "home" / name
    path.chmod(mode)
    with pytest.raises(ConfigError, match="can be used by other users") as refused:
        loaded(root)
    assert f"{command} {path}" in refused.value.hint


@pytest.mark.parametrize(
    "changes", [{"name": "lab"}, {"node": 7}, {"listen": [1]}, {"listen": None}, {"more": 1}, {"created": None}]
)
def test_a_description_that_does_not_hold_what_it_should_is_refused(root: Path, changes: dict[str, Any]) -> None:
    file = root / "networks" / "home" / "network.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"network.json is not a valid network file.*penstock network leave home"):
        loaded(root)


def test_a_description_that_is_missing_or_no_json_is_refused(root: Path) -> None:
    file = root / "networks" / "home" / "network.json"
    file.write_bytes(b"\xff{")
    with pytest.raises(ConfigError, match="is not a valid network file"):
        loaded(root)
    file.unlink()
    with pytest.raises(ConfigError, match=r"network.json cannot be read: No such file"):
        loaded(root)


# ---- when they become settings ----


def test_the_current_network_gives_all_that_a_node_needs(root: Path) -> None:
    found, folder = loaded(root), root / "networks" / "home"
    assert from_networks(found) == {
        "network.name": "home",
        "network.listen": ("tls/0.0.0.0:7448",),
        "network.connect": ("tls/192.0.2.7:7447",),
        "network.ca_file": folder / "ca.pem",
        "network.certificate_file": folder / "node.pem",
        "network.key_file": folder / "node.key",
        "network.peers_file": folder / "peers.json",
        "network.revocations_file": folder / "revoked.bin",
        "network.trusted_file": folder / "trusted.bin",
        "node_id": "laptop",
    }
    assert found.sources["node_id"] == ("laptop", "network home")
    assert found.node.node_id == "laptop"
    assert found.node.network.enabled


@pytest.mark.parametrize(
    "where", [{"name": "lab"}, {"environ": {"PENSTOCK_NETWORK": "lab"}}, {"file": '[network]\nname = "lab"\n'}]
)
def test_another_network_of_this_machine_can_be_named(root: Path, where: dict[str, Any]) -> None:
    found = loaded(root, **where)
    assert (found.node.network.name, found.node.node_id) == ("lab", "left")


@pytest.mark.parametrize("where", [{"name": "none"}, {"environ": {"PENSTOCK_NETWORK": "none"}}])
def test_none_is_to_be_alone(root: Path, where: dict[str, Any]) -> None:
    found = loaded(root, file='[network]\nlisten = ["tcp/0.0.0.0:1"]\nopen = true\n', **where)
    assert from_networks(found) == {}
    assert not found.node.network.enabled


def test_other_settings_go_over_those_of_the_network(root: Path) -> None:
    found = loaded(root, name="home", listen="tls/0.0.0.0:9", lease_ms="500")
    assert found.sources["network.listen"] == (("tls/0.0.0.0:9",), "flag --listen")
    assert found.sources["network.connect"].source == "network home"


@pytest.mark.parametrize("flags", [{"lease_ms": 500}, {"recovery_timeout": 1.5}, {"mode": "router"}, {"share_weights": False}])
def test_settings_that_say_nothing_about_whom_to_meet_leave_the_current_network(root: Path, flags: dict[str, Any]) -> None:
    assert loaded(root, **flags).node.network.name == "home"


def test_a_client_of_a_joined_network_does_not_listen(root: Path) -> None:
    found = loaded(root, mode="client").node.network
    assert (found.name, found.listen, found.connect) == ("home", (), ("tls/192.0.2.7:7447",))
    put_network(root, "attic", connect=())  # it was made here: there is nobody whose client this could be
    with pytest.raises(ConfigError, match="in client mode cannot listen"):
        loaded(root, name="attic", mode="client")


@pytest.mark.parametrize(
    "flags",
    [
        {"open": True, "listen": "tcp/0.0.0.0:1"},
        {"open": True, "multicast": True},
        {"open": True, "listen": "tcp/0.0.0.0:1", "name": "home"},  # an open one of that name is another
        {"connect": "tls/192.0.2.9:1", "ca_file": "a", "certificate_file": "b", "key_file": "c"},
    ],
)
def test_a_network_that_is_made_by_hand_is_not_mixed_with_the_joined_one(root: Path, flags: dict[str, Any]) -> None:
    assert from_networks(loaded(root, **flags)) == {}


def test_a_place_to_meet_without_a_name_asks_for_the_name(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"The network is closed.*--network NAME"):
        loaded(root, listen="tls/0.0.0.0:9")


def test_a_node_file_that_holds_every_default_decides_nothing(root: Path) -> None:
    by_file, without = loaded(root, file=example()).node, loaded(root).node
    assert (by_file.network, by_file.node_id) == (without.network, without.node_id)


def test_a_name_that_leads_nowhere_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match=r'--network: this machine is in no network "hoem".*Its networks are: home, lab'):
        loaded(root, name="hoem")


def test_a_node_has_the_name_in_its_certificate(root: Path) -> None:
    assert loaded(root, node_id="laptop").node.node_id == "laptop"
    with pytest.raises(ConfigError, match=r'in the network \'home\' this node is "laptop".*penstock network invite phone'):
        loaded(root, node_id="phone")
