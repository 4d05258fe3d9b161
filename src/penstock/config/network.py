"""NetworkConfig: the settings of the network between nodes, checked on construction."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.config.checks import check_seconds, check_whole, is_address, unusable
from penstock.errors import ConfigError

MODES = ("peer", "router", "client")
WIRE_FORMATS = ("auto", "fp32", "bf16", "int8")
PROTOCOLS = ("tcp", "udp", "tls", "quic")
SECURE_PROTOCOLS = ("tls", "quic")  # both sides show a certificate
CERTIFICATE_FILES = ("ca_file", "certificate_file", "key_file")
MIN_LEASE_MS = 200  # with less, a busy machine would be taken for a dead one
OPEN_HINT = "set network.open = true (--open-network) if everyone who can reach this machine is trusted."

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a network, and of a node
NO_NETWORK = "none"  # this name means: join no network
ANY_WEIGHTS = "any"  # in accept_weights
ZENOH = "zenoh"  # the router whose endpoints and certificates are checked here

_SHA256 = re.compile(r"[0-9a-f]{64}")
_ENDPOINT = re.compile(
    r"(?P<protocol>[a-z]+)/(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?):(?P<port>\d{1,5})"
)
_ALMOST_ENDPOINT = re.compile(r"(?:[A-Za-z]+:?/*/)?(?P<rest>[^/\s]+:\d{1,5})/?")  # forgotten protocol, or tcp://


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """How a node takes part in a network. Nodes with the same `name` that reach each other share their layers.

    name: of the network; `none` joins no network.
    router: the name of the installed router that carries its messages.
    listen, connect: endpoints, written as `protocol/host:port`.
    lease_ms: how long a silent node counts as alive.
    open: let everyone in; otherwise both sides of a connection show a certificate signed by `ca_file`.
    wire: the format in which hidden states leave this node; `auto` for what suits the model.
    recovery_timeout: seconds that answers wait for a new pipe when a node was lost.
    accept_weights: hashes of manifests to accept from other nodes although nobody vouches for them; `any` for all.
    """

    name: str = "penstock"
    listen: tuple[str, ...] = ()
    connect: tuple[str, ...] = ()
    mode: Literal["peer", "router", "client"] = "peer"
    router: str = ZENOH
    multicast: bool = False
    lease_ms: int = 3000
    open: bool = False
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    revocations_file: Path | None = None
    trusted_file: Path | None = None
    peers_file: Path | None = None
    wire: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    recovery_timeout: float = 60.0
    share_weights: bool = True
    weights_rate: int = 100 * 10**6
    accept_weights: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):  # it becomes part of Zenoh's keys
            raise unusable("name", self.name, "Use up to 64 letters, digits, dots, dashes and underscores.")
        if self.mode not in MODES:
            raise unusable("mode", self.mode, f"Use one of: {', '.join(MODES)}.")
        if not NAME.fullmatch(self.router):
            raise unusable("router", self.router, f'Use the name of an installed router, such as "{ZENOH}".')
        if self.wire not in WIRE_FORMATS:
            raise unusable("wire", self.wire, f"Use one of: {', '.join(WIRE_FORMATS)}.")
        check_whole("lease_ms", self.lease_ms, minimum=MIN_LEASE_MS)
        check_seconds("recovery_timeout", self.recovery_timeout, allow_zero=True)
        check_whole("weights_rate", self.weights_rate, minimum=1)
        for weights in self.accept_weights:
            if weights != ANY_WEIGHTS and not _SHA256.fullmatch(weights):
                raise unusable("accept_weights", weights, f"Use hashes of 64 digits from 0 to f, or {ANY_WEIGHTS}.")
        for endpoint in self.listen:
            _check_endpoint("listen", endpoint, lowest_port=0)
        for endpoint in self.connect:
            _check_endpoint("connect", endpoint, lowest_port=1)
        if self.enabled and self.router == ZENOH:  # others decide for themselves what they need
            self._check_mode()
            self._check_trust()

    @property
    def enabled(self) -> bool:
        """Whether the node joins a network at all."""
        return self.name != NO_NETWORK and bool(self.listen or self.looks_for_peers)

    @property
    def looks_for_peers(self) -> bool:
        """Whether it looks for other nodes by itself, instead of waiting for them at `listen`."""
        return bool(self.connect or self.multicast) or self.router != ZENOH

    def _check_mode(self) -> None:
        if self.mode == "client" and self.listen:
            raise ConfigError("A node in client mode cannot listen.", hint='Leave network.listen out, or use mode = "peer".')
        if self.mode == "router" and not self.listen:
            raise ConfigError("A node in router mode must listen for others.", hint='Set network.listen = ["tls/0.0.0.0:7447"].')

    def _check_trust(self) -> None:
        endpoints = [*self.listen, *self.connect]
        unsecured = [endpoint for endpoint in endpoints if endpoint.partition("/")[0] not in SECURE_PROTOCOLS]
        missing = [f"network.{name}" for name in CERTIFICATE_FILES if getattr(self, name) is None]
        are_missing = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
        if self.open:
            names_files = len(missing) < len(CERTIFICATE_FILES) or bool(self.revocations_file or self.trusted_file)
            if missing and (len(unsecured) < len(endpoints) or names_files):
                raise ConfigError(
                    f"The network uses certificates, but {are_missing}.",
                    hint="All three files are needed. To go without certificates, use tcp/ endpoints and set none of them.",
                )
            return
        if unsecured:
            raise ConfigError(
                f"The network is closed, but {unsecured[0]} lets everyone in.",
                hint=f"Write tls/{unsecured[0].partition('/')[2]}, or {OPEN_HINT}",
            )
        if missing:
            raise ConfigError(
                f"The network is closed, but {are_missing}.",
                hint="`penstock network create NAME` creates a network with its certificates, and --network NAME uses one that "
                f"was created or joined. Otherwise set the files, or {OPEN_HINT}",
            )
        if not self.listen and self.mode != "client" and self.multicast:  # Zenoh would choose tcp
            raise ConfigError(
                "A node that others find by multicast must set where it listens.",
                hint='Set network.listen = ["tls/0.0.0.0:7447"].',
            )


def _check_endpoint(name: str, endpoint: str, *, lowest_port: int) -> None:
    found = _ENDPOINT.fullmatch(endpoint)
    if not found:
        almost = _ALMOST_ENDPOINT.fullmatch(endpoint)
        guess = f"tcp/{almost['rest']}" if almost else ""
        example = guess if _ENDPOINT.fullmatch(guess) else "tcp/192.168.1.7:7447"
        raise unusable(name, endpoint, f"Write an endpoint as {example}.")
    if found["protocol"] not in PROTOCOLS:
        raise unusable(name, endpoint, f"An endpoint starts with one of: {', '.join(f'{protocol}/' for protocol in PROTOCOLS)}.")
    if found["host"].startswith("[") and not is_address(found["host"][1:-1]):
        raise unusable(name, endpoint, "Write an IPv6 address in brackets, such as tcp/[::1]:7447.")
    if not lowest_port <= int(found["port"]) <= 65535:
        raise unusable(name, endpoint, f"Give a port from {lowest_port} to 65535.")
