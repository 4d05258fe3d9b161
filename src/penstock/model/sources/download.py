"""Download a pinned file over HTTP: resume where it broke off, and check it before it gets its name."""

from __future__ import annotations

import base64
import hashlib
import http.client
import re
import ssl
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit

from penstock.errors import DownloadFailed
from penstock.progress import Progress

_TIMEOUT_S = 30.0
_CHUNK_BYTES = 256 << 10
_MAX_FRUITLESS_ATTEMPTS = 3


class SourceUnreachable(Exception):
    """A file could not be fetched because of a network, TLS or HTTP error; another way may still work."""


@dataclass(frozen=True)
class Pin:
    """The size and hash that a file must have."""

    size: int
    sha256: str


def fetch(url: Callable[[], str], target: Path, pin: Pin, *, progress: Progress) -> None:
    """Download a file to `target`; the bytes stay in `<target>.part` until it is complete and correct.

    url: called only if something is still missing.
    """
    part = part_of(target)
    resumed = _size(part) > 0
    _fetch_missing(url, part, pin, progress)
    found = sha256_of(part)
    if found != pin.sha256 and resumed:
        # The first part may be of another version of the file: try again from the start.
        part.unlink()
        _fetch_missing(url, part, pin, progress)
        found = sha256_of(part)
    if found != pin.sha256:
        part.unlink()
        raise wrong_checksum(target.name, found, pin)
    part.replace(target)


def part_of(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def wrong_checksum(what: str, found: str, pin: Pin) -> DownloadFailed:
    return DownloadFailed(
        f"{what} is not the expected file: its SHA-256 is {found}, not {pin.sha256}.",
        hint="A proxy changed it, or the mirror has another version. Check the network and try again.",
    )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_url(url: str, headers: dict[str, str]) -> Any:
    """Send a GET request. Credentials in the URL become a header that is not sent to other hosts on a redirect."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if parts.scheme not in ("http", "https"):
        raise SourceUnreachable(f"{without_credentials(url)} is not an http URL.")
    request = urllib.request.Request(parts._replace(netloc=host).geturl(), headers={"User-Agent": "penstock", **headers})
    if at:
        request.add_unredirected_header("Authorization", "Basic " + base64.b64encode(unquote(user).encode()).decode())
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except HTTPError as error:
        if error.code == 416:
            return error  # range not satisfiable: the caller handles it
        raise SourceUnreachable(f"{without_credentials(url)} answered {error.code} {error.reason}.") from error
    except (URLError, http.client.HTTPException, OSError) as error:
        raise SourceUnreachable(f"{without_credentials(url)} could not be reached: {getattr(error, 'reason', error)}.") from error


def without_credentials(url: str) -> str:
    """Remove user name and password from a URL, for messages."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _fetch_missing(url: Callable[[], str], part: Path, pin: Pin, progress: Progress) -> None:
    """Download what is missing, and resume after a broken connection as long as attempts make progress."""
    part.parent.mkdir(parents=True, exist_ok=True)
    if _size(part) > pin.size:
        part.unlink()
    address, fruitless = "", 0
    while (before := _size(part)) < pin.size:
        address = address or url()
        try:
            _resume(address, part, pin, progress)
        except (OSError, http.client.HTTPException) as error:
            if not _is_network_error(error):
                raise
        gained = _size(part) > before
        fruitless = 0 if gained else fruitless + 1
        if fruitless == _MAX_FRUITLESS_ATTEMPTS:
            raise SourceUnreachable(f"{without_credentials(address)} breaks off after {_size(part):,} of {pin.size:,} bytes.")
        if not gained:
            time.sleep(0.2 * fruitless)


def _resume(address: str, part: Path, pin: Pin, progress: Progress) -> None:
    received = _size(part)
    with open_url(address, {"Range": f"bytes={received}-"} if received else {}) as answer, part.open("ab") as file:
        if received and not _is_continuation(answer, received, pin.size):
            file.truncate(0)  # the server sends the whole file, or another one: start again
            received = 0
            if answer.status != 200:
                return
        offered = answer.headers.get("Content-Length", "")
        if not received and offered.isdigit() and int(offered) != pin.size:
            raise SourceUnreachable(f"{without_credentials(address)} offers {int(offered):,} bytes instead of {pin.size:,}.")
        what = f"fetching {part.name.removesuffix('.part')}"
        while received < pin.size and (chunk := answer.read(min(_CHUNK_BYTES, pin.size - received))):
            file.write(chunk)
            received += len(chunk)
            progress(what, received, pin.size)


def _is_continuation(answer: Any, received: int, size: int) -> bool:
    matched = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", ""))
    return answer.status == 206 and matched is not None and int(matched[1]) == received and matched[2] in (str(size), "*")


def _is_network_error(error: Exception) -> bool:
    """Whether a retry may help; a full disk is an OSError too."""
    return isinstance(error, (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
