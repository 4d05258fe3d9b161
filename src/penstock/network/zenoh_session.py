"""Opening a Zenoh session: a NetworkConfig in Zenoh's words, and Zenoh's refusals in ours."""

from __future__ import annotations

import json
import logging
import re
import ssl
import threading
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError

MAX_MESSAGE = 256 << 20  # bytes; what a peer can make this node hold for one message
ENVELOPE = 1 << 16  # more than what Zenoh and a seal add to a message
RECEIVE_BUFFER = 1 << 20
SEND_QUEUE = 16  # batches of 64 KiB, Zenoh's most; with its default of 2 a message of 1.2 MB takes half as long again
CONNECT_RETRY = {"period_init_ms": 200, "period_max_ms": 4000, "period_increase_factor": 1.5}  # after a link was lost
CLIENT_PATIENCE = 1000  # milliseconds for one try; Zenoh does not try in the background for clients
MESSAGES = [  # all that access control knows
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
    """A Zenoh session in which certificates with a common name of `denied` count for nothing. A client waits in here until it
    reaches a node, or `closing` is set (None is returned)."""
    import zenoh

    check_certificates(config)
    settings = json.dumps(session_settings(config, denied))
    told = False
    while True:
        try:
            return zenoh.open(zenoh.Config.from_json5(settings))
        except zenoh.ZError as error:
            reason = SOURCE_LINE.sub("", str(error)).strip()
            if not reason.startswith("Unable to connect"):
                raise refusal(config, reason) from error
        if not told:
            logger.warning("no answer from %s; trying on", ", ".join(config.connect))
            told = True
        if closing.wait(CLIENT_PATIENCE / 1000):
            return None


def session_settings(config: NetworkConfig, denied: Collection[str] = ()) -> dict[str, Any]:
    client = config.mode == "client"
    link: dict[str, Any] = {
        "tx": {
            "lease": config.lease_ms,
            # A peer that takes nothing is as good as silent. Zenoh counts in microseconds here.
            "queue": {
                "congestion_control": {"block": {"wait_before_close": config.lease_ms * 1000}},
                "size": {"real_time": SEND_QUEUE},
            },
        },
        "rx": {"buffer_size": RECEIVE_BUFFER, "max_message_size": MAX_MESSAGE + ENVELOPE},
    }
    if not config.open:
        link["protocols"] = ["tls", "quic"]  # whatever addresses others gossip
    if config.ca_file is not None:
        link["tls"] = {
            "root_ca_certificate": str(config.ca_file),
            "enable_mtls": True,
            "listen_certificate": str(config.certificate_file),
            "listen_private_key": str(config.key_file),
            "connect_certificate": str(config.certificate_file),
            "connect_private_key": str(config.key_file),
            # The authority is the network's own, so its signature is what counts. Nodes find each other by addresses that no
            # certificate can know beforehand.
            "verify_name_on_connect": False,
            "close_link_on_expiration": True,
        }
    return {
        "mode": config.mode,
        "listen": {"endpoints": listen_endpoints(config), "exit_on_failure": True},
        "connect": {
            "endpoints": list(config.connect),
            "timeout_ms": CLIENT_PATIENCE if client else -1,
            "exit_on_failure": False,
            "retry": CONNECT_RETRY,
        },
        "scouting": {"multicast": {"enabled": config.multicast}, "gossip": {"enabled": True}},
        "transport": {"shared_memory": {"enabled": False}, "link": link},
        "access_control": access_control(denied),
    }


def access_control(denied: Collection[str]) -> dict[str, Any]:
    """The denied may connect, since their certificates still are good for that, but nothing passes in either direction: no sign
    of life, no question, no message. Everybody else may do everything, because Zenoh lets through what any rule allows: a rule
    for all members would overrule the one against these. What members may not do to each other is the Keyring's business.
    """
    if not denied:
        return {"enabled": False}
    everything = {
        "id": "everything",
        "messages": MESSAGES,
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


def knowing(config: NetworkConfig, session: Any, denied: Collection[str]) -> NetworkConfig:
    """The same network, with the peers that this session has connected to as further contacts: those who are told of others by a
    node that has gone since would not find them again. Links that others opened have ports at their far end where nobody listens;
    they are told apart by ours, which must be known for that."""
    ports = {endpoint.rpartition(":")[2] for endpoint in config.listen}
    if config.mode == "client" or not ports or "0" in ports:
        return config
    found = [
        str(link.dst)
        for link in session.info.links()
        if str(link.src).rpartition(":")[2] not in ports and link.auth_identifier not in denied
    ]
    try:
        return replace(config, connect=tuple(dict.fromkeys([*config.connect, *found])))
    except ConfigError:  # an address that only Zenoh can write, such as one with the name of an interface
        return config


def listen_endpoints(config: NetworkConfig) -> list[str]:
    """A peer that is told only whom to call still listens, at a port that the system picks: peers that know a third one
    connect to each other directly."""
    if config.listen or config.mode != "peer":
        return list(config.listen)
    protocol = config.connect[0].partition("/")[0] if config.connect else "tcp" if config.open else "tls"
    local = config.connect and all(LOOPBACK.match(endpoint) for endpoint in config.connect)
    return [f"{protocol}/{'127.0.0.1' if local else '0.0.0.0'}:0"]


def check_certificates(config: NetworkConfig) -> None:
    """Zenoh would try for ever, in silence, with a certificate that it cannot use."""
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
        # Without a password function a locked key would be asked for on the terminal.
        context.load_cert_chain(config.certificate_file, config.key_file, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"network.certificate_file {config.certificate_file} and network.key_file {config.key_file} cannot be used: {error}.",
            hint="They must be a certificate and its own private key, both in PEM and without a password.",
        ) from error


def refusal(config: NetworkConfig, reason: str) -> ConfigError:
    """Zenoh's reason not to open, with the endpoint that it is about and what to do."""
    named = [endpoint for endpoint in config.listen if endpoint.partition("/")[2] in reason]
    endpoints = ", ".join(named or listen_endpoints(config))
    if "Address already in use" in reason:
        return ConfigError(
            f"The network cannot listen at {endpoints}: the port is taken.",
            hint="Another program has it, or this node is running already (`penstock network status` shows it). Otherwise set "
            "network.listen to another port.",
        )
    if "Cannot assign requested address" in reason or "an't assign requested address" in reason:
        return ConfigError(
            f"The network cannot listen at {endpoints}: this machine does not have that address.",
            hint="Set network.listen to one of its own addresses, or to 0.0.0.0 for all of them.",
        )
    return ConfigError(
        f"The network cannot listen at {endpoints}: {reason.rstrip('.!')}.",
        hint="Check network.listen (an endpoint looks like tls/0.0.0.0:7447), and that certificates are X.509 version 3.",
    )
