"""The URL of a server, as given on the command line or in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import typer

from penstock.cli.options import wrong_usage
from penstock.config.api_key import KEY_VARIABLE
from penstock.errors import ConfigError

URL_VARIABLE = "PENSTOCK_URL"
PORT_VARIABLE = "PENSTOCK_PORT"
CERTIFICATE_VARIABLE = "PENSTOCK_TLS_CERT"

UrlOption = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help=f"The server, such as http://127.0.0.1:8000; by default {URL_VARIABLE}."),
]


class ServerUrl(NamedTuple):
    """The parts of a server's URL. `path` is what comes before `/v1` and `/status`, without a trailing slash."""

    secure: bool
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> ServerUrl:
        """Parse a URL, with or without a scheme, `/v1` and a trailing slash."""
        from urllib.parse import urlsplit

        advice = "Write it as http://127.0.0.1:8000."
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port
        except ValueError:  # a port that is not a number, or half an IPv6 address
            raise ConfigError(f"'{text}' is not a URL.", hint=advice) from None
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or not sendable(text):
            raise ConfigError(f"'{text}' is not the URL of a server.", hint=advice)
        if parts.username is not None:
            raise ConfigError("A URL cannot have a user name or password.", hint=f"Put an API key into {KEY_VARIABLE}.")
        secure = parts.scheme == "https"
        path = re.sub(r"/+(v1/*)?$", "", parts.path)
        return cls(secure, host, port or (443 if secure else 80), path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.secure else 80
        return f"http{'s' * self.secure}://{host}{'' if self.port == usual else f':{self.port}'}{self.path}"


DEFAULT_PORT = 8000


def default_url(environ: Mapping[str, str] = os.environ) -> ServerUrl:
    """The server of this machine, as `penstock serve` with the same environment opens it."""
    port = environ.get(PORT_VARIABLE, "")
    known = port.isdecimal() and 0 < int(port) <= 65535
    secure = environ.get(CERTIFICATE_VARIABLE, "none").strip().lower() not in ("", "none")
    return ServerUrl(secure=secure, host="127.0.0.1", port=int(port) if known else DEFAULT_PORT, path="")


def named_url(flag: str | None, environ: Mapping[str, str] = os.environ) -> ServerUrl | None:
    """The server that the flag or else the environment names; None if neither does."""
    if flag is not None:
        with wrong_usage("--url"):
            return ServerUrl.parse(flag)
    text = environ.get(URL_VARIABLE, "")
    try:
        return ServerUrl.parse(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"{URL_VARIABLE}: {error.message}", hint=error.hint) from None


def api_key(environ: Mapping[str, str] = os.environ) -> str:
    """The key to send, "" when there is none."""
    key = environ.get(KEY_VARIABLE, "").strip()
    if not sendable(key):
        raise ConfigError(f"{KEY_VARIABLE} contains characters that an HTTP header cannot have.", hint="Is it really the key?")
    return key


def sendable(text: str) -> bool:
    return not text or (text.isascii() and text.isprintable() and " " not in text)
