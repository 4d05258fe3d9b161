"""Opening a Zenoh session: turns a NetworkConfig into Zenoh settings, and Zenoh's errors into ConfigErrors."""

from __future__ import annotations

import json
import logging
import re
import ssl
import threading
from collections.abc import Collection
from typing import Any

from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError

MAX_ZENOH_MESSAGE_BYTES = 1 << 21  # more than a greeting with all that belongs to it; messages of nodes travel in smaller parts
RECEIVE_BUFFER_BYTES = 1 << 20
SEND_QUEUE_BATCHES = 16  # of 64 KiB, Zenoh's maximum; with its default of 2 a message of 1.2 MB takes 1.5 times as long
CONNECT_RETRY = {"period_init_ms": 200, "period_max_ms": 4000, "period_increase_factor": 1.5}  # after a link was lost
HANDSHAKE_TIMEOUT_MS = 60_000  # for TLS. Zenoh admits nothing for 100 ms after each that fails, so the LinkGuard spreads them out
ACCEPT_TIMEOUT_MS = 4000  # for its own handshake, which follows
MAX_ACCEPTING = 500  # pending at a time; Zenoh closes further ones at once, even from members
CLIENT_TIMEOUT_MS = 1000  # per attempt; Zenoh does not retry in the background for clients
ACL_MESSAGES = [  # all kinds that Zenoh's access control knows
    "put",
    "delete",
    "declare_subscriber",
    "query",
    "reply",
    "declare_queryable",
    "liveliness_token",
    "declare_liveliness_subscriber",
    "liveliness_query",
]
LOOPBACK = re.compile(r"[a-z]+/(127\.|\[::1\]|localhost)")
SOURCE_LINE = re.compile(r"\s*at /\S+?\.rs:\d+\.?")  # where in Zenoh's source an error arose

logger = logging.getLogger("penstock.network")


def open_session(config: NetworkConfig, closing: threading.Event, denied: Collection[str] = ()) -> Any:
    """Open a Zenoh session that ignores nodes whose certificates have a common name in `denied`.

    A client waits here until it reaches a node; returns None if `closing` is set meanwhile.
    """
    import zenoh

    check_certificates(config)
    settings = json.dumps(session_settings(config, denied))
    warned = False
    while True:
        try:
            return zenoh.open(zenoh.Config.from_json5(settings))
        except zenoh.ZError as error:
            reason = SOURCE_LINE.sub("", str(error)).strip()
            if not reason.startswith("Unable to connect"):
                raise to_config_error(config, reason) from error
        if not warned:
            logger.warning("no answer from %s; still trying", ", ".join(config.connect))
            warned = True
        if closing.wait(CLIENT_TIMEOUT_MS / 1000):
            return None


def session_settings(config: NetworkConfig, denied: Collection[str] = ()) -> dict[str, Any]:
    client = config.mode == "client"
    link: dict[str, Any] = {
        "tx": {
            "lease": config.lease_ms,
            # A peer that reads nothing counts as dead after a lease; Zenoh counts in microseconds here. With a longer time it
            # would be noticed later: while a message waits, Zenoh cannot close the link when the lease is over, and other links
            # stall. The time is for the whole of one of Zenoh's messages, so large ones are sent in parts (see messenger.py).
            "queue": {
                "congestion_control": {"block": {"wait_before_close": config.lease_ms * 1000}},
                "size": {"real_time": SEND_QUEUE_BATCHES, "data_high": SEND_QUEUE_BATCHES},
            },
        },
        "rx": {"buffer_size": RECEIVE_BUFFER_BYTES, "max_message_size": MAX_ZENOH_MESSAGE_BYTES},  # held per peer
    }
    if not config.open:
        link["protocols"] = ["tls", "quic"]  # also for addresses that other nodes gossip
    if config.ca_file is not None:
        link["tls"] = {
            "root_ca_certificate": str(config.ca_file),
            "enable_mtls": True,
            "listen_certificate": str(config.certificate_file),
            "listen_private_key": str(config.key_file),
            "connect_certificate": str(config.certificate_file),
            "connect_private_key": str(config.key_file),
            # The authority is the network's own, so its signature is enough. Nodes find each other at addresses that are not
            # known when certificates are issued.
            "verify_name_on_connect": False,
            "close_link_on_expiration": True,
        }
    return {
        "mode": config.mode,
        "listen": {"endpoints": [_with_timeout(endpoint) for endpoint in listen_endpoints(config)], "exit_on_failure": True},
        "connect": {
            "endpoints": list(config.connect),
            "timeout_ms": CLIENT_TIMEOUT_MS if client else -1,
            "exit_on_failure": False,
            "retry": CONNECT_RETRY,
        },
        "scouting": {"multicast": {"enabled": config.multicast}, "gossip": {"enabled": True}},
        "transport": {
            "shared_memory": {"enabled": False},
            "unicast": {"accept_timeout": ACCEPT_TIMEOUT_MS, "accept_pending": MAX_ACCEPTING},
            "link": link,
        },
        "access_control": access_control(denied),
    }


def _with_timeout(endpoint: str) -> str:
    """Add the time-out, which Zenoh has only as an option of an endpoint. Other nodes do not see it."""
    return f"{endpoint}#tls_handshake_timeout_ms={HANDSHAKE_TIMEOUT_MS}" if endpoint.startswith("tls/") else endpoint


def access_control(denied: Collection[str]) -> dict[str, Any]:
    """Deny everything to revoked nodes, in both directions: tokens, questions and messages.

    Their certificates are valid for TLS, so they can still connect, until the LinkGuard closes the link. All other nodes are
    allowed everything: Zenoh lets through what any rule allows, so a rule for all members would overrule this one. The Keyring
    protects members from each other.
    """
    if not denied:
        return {"enabled": False}
    everything = {
        "id": "everything",
        "messages": ACL_MESSAGES,
        "flows": ["ingress", "egress"],
        "permission": "deny",
        "key_exprs": ["**"],
    }
    return {
        "enabled": True,
        "default_permission": "allow",
        "rules": [everything],
        "subjects": [{"id": "denied", "cert_common_names": sorted(denied)}],
        "policies": [{"rules": ["everything"], "subjects": ["denied"]}],
    }


def listen_endpoints(config: NetworkConfig) -> list[str]:
    """Return where to listen. A peer without `listen` gets a port from the system, so that other peers can connect to it."""
    if config.listen or config.mode != "peer":
        return list(config.listen)
    protocol = config.connect[0].partition("/")[0] if config.connect else "tcp" if config.open else "tls"
    local = config.connect and all(LOOPBACK.match(endpoint) for endpoint in config.connect)
    return [f"{protocol}/{'127.0.0.1' if local else '0.0.0.0'}:0"]


def check_certificates(config: NetworkConfig) -> None:
    """Raise ConfigError for certificate files that cannot be used: Zenoh would retry for ever without logging anything."""
    if config.ca_file is None or config.certificate_file is None or config.key_file is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cafile=config.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"network.ca_file {config.ca_file} cannot be used: {error}.",
            hint="It must be the certificate of the network's authority.",
        ) from error
    try:
        # Without this function, OpenSSL would ask for the password of a locked key on the terminal.
        context.load_cert_chain(config.certificate_file, config.key_file, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"network.certificate_file {config.certificate_file} and network.key_file {config.key_file} cannot be used: {error}.",
            hint="They must be a certificate and its own private key, both in PEM and without a password.",
        ) from error


def to_config_error(config: NetworkConfig, reason: str) -> ConfigError:
    """Turn Zenoh's reason not to open into an error with the endpoint and what to do."""
    named = [endpoint for endpoint in config.listen if endpoint.partition("/")[2] in reason]
    endpoints = ", ".join(named or listen_endpoints(config))
    if "Address already in use" in reason:
        return ConfigError(
            f"The network cannot listen at {endpoints}: the port is in use.",
            hint="If this node is running already (see `penstock network status`), stop it first. Otherwise another program has "
            "the port: set network.listen to another one.",
        )
    if "Cannot assign requested address" in reason or "an't assign requested address" in reason:
        return ConfigError(
            f"The network cannot listen at {endpoints}: this machine does not have that address.",
            hint="Set network.listen to one of its own addresses, or to 0.0.0.0 for all of them.",
        )
    return ConfigError(
        f"The network cannot listen at {endpoints}: {reason.rstrip('.!')}.",
        hint="Check network.listen (example: tls/0.0.0.0:7447), and that the certificates are X.509 version 3.",
    )
