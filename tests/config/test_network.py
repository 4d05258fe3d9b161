"""The settings of a network check themselves when made: endpoints, trust, and who listens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError

FILES = {name: Path(name) for name in ("ca_file", "certificate_file", "key_file")}


def refusal(**settings: Any) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        NetworkConfig(**settings)
    assert refused.value.hint
    return refused.value


def test_by_default_a_node_is_in_no_network() -> None:
    assert not NetworkConfig().enabled
    assert not NetworkConfig(name="home", mode="router", open=True, ca_file=Path("ca.pem")).enabled


@pytest.mark.parametrize("joining", [{"listen": ("tcp/0.0.0.0:7447",)}, {"connect": ("tcp/kitchen:7447",)}, {"multicast": True}])
def test_an_endpoint_or_multicast_joins_a_network(joining: dict[str, Any]) -> None:
    assert NetworkConfig(open=True, **joining).enabled


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"name": ""}, "up to 64"),
        ({"name": "at home"}, 'name = "at home" cannot be used.'),
        ({"name": "a/b"}, 'name = "a/b" cannot be used.'),
        ({"name": "*"}, 'name = "*" cannot be used.'),
        ({"name": "x" * 65}, "up to 64"),
        ({"mode": "star"}, "Use one of: peer, router, client."),
        ({"lease_ms": 199}, "Give a whole number from 200 up."),
        ({"lease_ms": 3.5}, "Give a whole number from 200 up."),
        ({"recovery_timeout": -1}, "from 0 up"),
        ({"recovery_timeout": float("inf")}, "from 0 up"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    assert message in str(refusal(**settings))


@pytest.mark.parametrize(
    "endpoint, expected",
    [
        ("127.0.0.1:7447", "Write an endpoint as tcp/127.0.0.1:7447."),
        ("kitchen:7447", "Write an endpoint as tcp/kitchen:7447."),
        ("[::1]:7447", "Write an endpoint as tcp/[::1]:7447."),
        ("tcp://127.0.0.1:7447", "Write an endpoint as tcp/127.0.0.1:7447."),
        ("http://127.0.0.1:7447/", "Write an endpoint as tcp/127.0.0.1:7447."),
        ("tcp/127.0.0.1", "Write an endpoint as tcp/192.168.1.7:7447."),
        ("tcp/::1:7447", "Write an endpoint as tcp/192.168.1.7:7447."),
        ("tcp/", "Write an endpoint as tcp/192.168.1.7:7447."),
        ("", "Write an endpoint as tcp/192.168.1.7:7447."),
        ("tcp/a:7447#iface=eth0", "Write an endpoint as tcp/192.168.1.7:7447."),
        ("ws/127.0.0.1:7447", "An endpoint starts with one of: tcp/, udp/, tls/, quic/."),
        ("tcp/[1::2::3]:7447", "Write an IPv6 address in brackets, such as tcp/[::1]:7447."),
        ("tcp/127.0.0.1:65536", "to 65535."),
    ],
)
def test_an_endpoint_is_spelt_as_protocol_host_and_port(endpoint: str, expected: str) -> None:
    for name in ("listen", "connect"):
        error = refusal(open=True, **{name: ("tcp/127.0.0.1:1", endpoint)})
        assert error.message.startswith(f"{name} = ")
        assert expected in error.hint


def test_a_free_port_is_for_those_who_listen() -> None:
    assert NetworkConfig(open=True, listen=("tcp/127.0.0.1:0",)).enabled
    assert "Give a port from 1 to 65535." in str(refusal(open=True, connect=("tcp/127.0.0.1:0",)))


# ---- trust ----


@pytest.mark.parametrize("endpoint", ["tcp/127.0.0.1:7447", "udp/127.0.0.1:7447"])
def test_a_closed_network_takes_no_endpoint_that_lets_everybody_in(endpoint: str) -> None:
    for settings in ({"listen": (endpoint,)}, {"connect": ("tls/a:1", endpoint)}):
        error = refusal(**settings, **FILES)
        assert error.message == f"The network is closed, but {endpoint} lets everyone in."
        assert error.hint.startswith("Write tls/127.0.0.1:7447, or set network.open = true (--open-network)")


@pytest.mark.parametrize("missing", [["ca_file"], ["certificate_file", "key_file"], list(FILES)])
def test_a_closed_network_needs_all_three_files(missing: list[str]) -> None:
    files = {name: file for name, file in FILES.items() if name not in missing}
    for joining in ({"listen": ("tls/0.0.0.0:7447",)}, {"connect": ("quic/a:1",)}, {"multicast": True}):
        error = refusal(**joining, **files)
        assert all(f"network.{name}" in error.message for name in missing)
        assert not any(f"network.{name}" in error.message for name in files)
        assert "network.open = true" in error.hint
    assert NetworkConfig(listen=("tls/0.0.0.0:7447",), connect=("quic/a:1",), **FILES).enabled


def test_an_open_network_with_certificates_needs_all_of_them() -> None:
    assert "network.ca_file, network.certificate_file, network.key_file are not set" in str(
        refusal(open=True, listen=("tcp/a:1", "tls/a:2"))
    )
    assert "network.key_file is not set" in str(
        refusal(open=True, listen=("tcp/a:1",), ca_file=Path("a"), certificate_file=Path("b"))
    )
    assert NetworkConfig(open=True, listen=("tcp/a:1", "tls/a:2"), **FILES).enabled


# ---- who listens ----


def test_a_client_does_not_listen_and_a_router_does() -> None:
    assert "A node in client mode cannot listen." in str(refusal(open=True, mode="client", listen=("tcp/a:1",)))
    assert "A node in router mode must listen" in str(refusal(open=True, mode="router", connect=("tcp/a:1",)))
    assert NetworkConfig(open=True, mode="client", connect=("tcp/a:1",)).enabled
    assert NetworkConfig(open=True, mode="router", listen=("tcp/a:1",)).enabled


def test_a_closed_network_with_multicast_must_say_where_it_listens() -> None:
    assert "must set where it listens" in str(refusal(multicast=True, **FILES))
    assert NetworkConfig(multicast=True, listen=("tls/0.0.0.0:7447",), **FILES).enabled
    assert NetworkConfig(multicast=True, mode="client", **FILES).enabled
    assert NetworkConfig(multicast=True, open=True).enabled
