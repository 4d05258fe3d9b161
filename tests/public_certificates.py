"""The certificates of public servers, read once for all HTTP clients of a process."""

from __future__ import annotations

import functools
import os
import ssl
from typing import Any

import httpx
import httpx._transports.default as transports


def read_certificates_once() -> None:
    """Cache them: each client reads them when created, in 40 ms of CPU, though nearly all tests use HTTP without TLS."""

    @functools.cache
    def make(_files: tuple[str | None, ...], **settings: Any) -> ssl.SSLContext:
        return httpx.create_ssl_context(**settings)

    def context(**settings: Any) -> ssl.SSLContext:
        return make((os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")), **settings)

    transports.create_ssl_context = context
