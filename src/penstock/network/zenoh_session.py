"""Opening a Zenoh session: a NetworkConfig in Zenoh's words, and Zenoh's refusals in ours."""

from __future__ import annotations

import json
import logging
import re
import ssl
import threading
from typing import Any

from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError

MAX_MESSAGE = 256 << 20  # bytes; what a peer can make this node hold for one message
RECEIVE_BUFFER = 1 << 20
SEND_QUEUE = 16  # batches of 64 KiB, Zenoh's most; with its default of 2 a message of 1.2 MB takes half as long again
CLIENT_PATIENCE = 1000  # milliseconds for one try; Zenoh does not try in the background for clients
LOOPBACK = re.compile(r"[a-z]+/(127\.|\[::1\]|localhost)")
SOURCE_LINE = re.compile(r"\s*at /\S+?\.rs:\d+\.?")  # where in Zenoh's source an error arose

logger = logging.getLogger("penstock.network")


def open_session(config: NetworkConfig, closing: threading.Event) -> Any:
    """A Zenoh session. A client waits in here until it reaches a node, or `closing` is set (None is returned)."""
    import zenoh

    check_certificates(config)
    settings = json.dumps(session_settings(config))
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


def session_settings(config: NetworkConfig) -> dict[str, Any]:
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
        "rx": {"buffer_size": RECEIVE_BUFFER, "max_message_size": MAX_MESSAGE},
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
        }
    return {
        "mode": config.mode,
        "listen": {"endpoints": listen_endpoints(config), "exit_on_failure": True},
        "connect": {
            "endpoints": list(config.connect),
            "timeout_ms": CLIENT_PATIENCE if client else -1,
            "exit_on_failure": False,
        },
        "scouting": {"multicast": {"enabled": config.multicast}, "gossip": {"enabled": True}},
        "transport": {"shared_memory": {"enabled": False}, "link": link},
    }


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
            hint="Another node or program has it. Stop that, or set network.listen to another port.",
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
