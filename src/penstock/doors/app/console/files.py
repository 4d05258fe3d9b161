"""ConsoleFiles: the page, scripts and styles of the web console. They are the same for everybody, so they need no key."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.access.gate import CONSOLE_PATH
from penstock.doors.http.route import Route
from penstock.errors import NoSuchPath

FOLDER = Path(__file__).parent / "static"
PAGE = "index.html"
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
# Scripts, styles and connections of this server alone; no text becomes markup or a script.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",  # revalidate each time; unchanged files are not sent again
}


class ConsoleFiles:
    def __init__(self, folder: Path = FOLDER) -> None:
        found = (path for path in folder.rglob("*") if path.suffix in KINDS)
        self._paths = {path.relative_to(folder).as_posix(): path for path in found}

    def route(self) -> Route:
        return Route("GET", f"{CONSOLE_PATH}{{file:path}}", self.respond, "A file of the web console", texts=(*KINDS.values(),))

    async def respond(self, request: Request) -> Response:
        return self.send(request, request.path_params["file"])

    def send(self, request: Request, name: str = PAGE) -> Response:
        path = self._paths.get(name)
        if path is None:
            raise NoSuchPath(f"The console has no file {name[:80]}.", hint="The console itself is at /.")
        body = path.read_bytes()
        headers = {**HEADERS, "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=KINDS[path.suffix], headers=headers)
