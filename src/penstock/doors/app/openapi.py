"""The OpenAPI document, made from the server's routes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from penstock import __version__
from penstock.doors.access.gate import is_open
from penstock.doors.http.describing import FieldsSchema
from penstock.doors.http.fields import IGNORED_HEADER, Fields, RequestBody
from penstock.doors.http.framing import encode
from penstock.doors.http.route import Parameter, Route
from penstock.doors.http.threads import run_in_thread
from penstock.doors.openai.errors import PENSTOCK

PATH = "/openapi.json"
DESCRIPTION = (
    "One language model running across the machines you already have, for the clients of OpenAI, Anthropic and Ollama. "
    "Fields that are not described here are refused by name, except by Ollama's paths; null is the same as leaving a field out."
)
SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "If the server has no keys, any is accepted."},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "As Anthropic's clients send it."},
}
STATUS_DESCRIPTIONS = {
    400: "A field cannot be used, or the prompt does not fit",
    401: "The key is missing or not valid",
    403: "The key does not allow this, or a page of another site uses a server without keys",
    404: "Not found",
    408: "The request did not arrive in time",
    413: "The body is too large",
    429: "Too many requests; Retry-After says when to try again",
    500: "A computation failed",
    503: "Layers of the model are missing, or the server is shutting down",
}
COMMON_STATUSES = (403, 500)
BODY_STATUSES = (400, 404, 408, 413, 429, 503)
EVENT_STREAM = "text/event-stream"
IGNORED_DESCRIPTION = "The names of fields that only advise, and were not followed; absent if there are none."
REFS = "#/components/schemas/"


def with_document(routes: Sequence[Route]) -> list[Route]:
    """Add the route of the document itself."""

    @functools.cache
    def written() -> bytes:
        return encode(document(described))

    async def describe(request: Request) -> Response:
        return Response(await run_in_thread(written), media_type="application/json")

    described = [*routes, Route("GET", PATH, describe, "This document", response=dict[str, Any], dialect=PENSTOCK)]
    return described


def document(routes: Sequence[Route]) -> dict[str, Any]:
    schemas = _Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, schemas)
        if links := _links(route, routes):
            operation["responses"]["200"]["links"] = links
        paths.setdefault(_plain(route.path), {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "description": DESCRIPTION},
        "security": [{name: []} for name in SECURITY_SCHEMES],
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": SECURITY_SCHEMES},
    }


class _Schemas:
    """The schemas of requests and responses, named by module: dialects have types of the same name."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.components: dict[str, Any] = {}
        self._requests: dict[type[Fields], dict[str, Any]] = {}
        for name, kinds in _by_module(route.request for route in routes if route.request is not None):
            found, defined = models_json_schema(
                [(kind, "validation") for kind in kinds], ref_template=f"{REFS}{name}{{model}}", schema_generator=FieldsSchema
            )
            self._requests |= {kind: found[kind, "validation"] for kind in kinds}
            self.components |= {f"{name}{one}": schema for one, schema in defined.get("$defs", {}).items()}
        self._responses: dict[Any, dict[str, Any]] = {}
        for name, kinds in _by_module(kind for route in routes for kind in _answers(route)):
            schemas, components = msgspec.json.schema_components(kinds, ref_template=f"{REFS}{name}{{name}}")
            self._responses |= dict(zip(kinds, schemas, strict=True))
            self.components |= {f"{name}{one}": schema for one, schema in components.items()}

    def of_request(self, kind: type[Fields]) -> dict[str, Any]:
        return self._requests[kind]

    def of_response(self, kind: Any) -> dict[str, Any]:
        found = [self._responses[one] for one in _alternatives(kind)]
        return found[0] if len(found) == 1 else {"anyOf": found}


def _by_module(kinds: Iterable[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Group types by the prefix of their names: `openai.wire.`, and none for built-in types."""
    found: dict[str, dict[Any, None]] = {}
    for kind in kinds:
        found.setdefault(getattr(kind, "__module__", ""), {})[kind] = None
    for module, some in found.items():
        name = ".".join(module.split(".")[-2:]) if module.startswith("penstock.doors.") else module
        yield (f"{name}." if name != module else ""), list(some)


def _answers(route: Route) -> Iterator[Any]:
    yield from route.known_dialect.error_types
    yield from _alternatives(route.response)
    yield from route.events
    for parameter in route.parameters:
        yield parameter.kind


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return () if kind is None else kind if isinstance(kind, tuple) else (kind,)


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    named = re.findall(r"{(\w+)", route.path)
    parameters = [_path_parameter(name) for name in named] + [_parameter(one, schemas) for one in route.parameters]
    found: dict[str, Any] = {"summary": route.description, "operationId": _name(route), "tags": [route.known_dialect.name]}
    if parameters:
        found["parameters"] = parameters
    if route.request is not None:
        found["requestBody"] = {"required": True, "content": {route.media_type: {"schema": schemas.of_request(route.request)}}}
    if is_open(route.path):
        found["security"] = []
    found["responses"] = _response_docs(route, schemas)
    return found


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _parameter(parameter: Parameter, schemas: _Schemas) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.location,
        "description": parameter.description,
        "schema": schemas.of_response(parameter.kind),
    }


def _response_docs(route: Route, schemas: _Schemas) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if not route.refused:
        found["200"] = {"description": route.description, "content": _content(route, schemas)}
        if route.request is not None and issubclass(route.request, RequestBody):
            found["200"]["headers"] = {IGNORED_HEADER: {"description": IGNORED_DESCRIPTION, "schema": {"type": "string"}}}
    refused = {"application/json": {"schema": schemas.of_response(route.known_dialect.error_types)}}
    for status in sorted(_failures(route)):
        found[str(status)] = {"description": STATUS_DESCRIPTIONS[status], "content": refused}
    return found


def _content(route: Route, schemas: _Schemas) -> dict[str, Any]:
    if route.response is None:
        return {kind: {"schema": {"type": "string"}} for kind in route.texts}
    content = {"application/json": {"schema": schemas.of_response(route.response)}}
    if route.stream == EVENT_STREAM:
        content[route.stream] = {"schema": _event(schemas.of_response((*route.events, *route.known_dialect.error_types)))}
    elif route.stream:
        content[route.stream] = {"schema": {"type": "string", "description": "Lines of application/json."}}
    return content


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """The schema of a server-sent event. The last one of OpenAI's streams is not JSON."""
    written = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    return {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, written]}},
        "required": ["data"],
    }


def _failures(route: Route) -> set[int]:
    found = {*COMMON_STATUSES, *route.errors}
    found |= set() if is_open(route.path) else {401}
    found |= set(BODY_STATUSES) if route.request is not None else set()
    found |= {400} if route.parameters else set()
    return found | ({404} if "{" in route.path or route.refused else set())


def _links(made: Route, routes: Iterable[Route]) -> dict[str, Any]:
    """Link an operation that creates an object to those that have its id in their path."""
    found = {}
    for route in routes:
        inside = re.fullmatch(re.escape(made.path) + r"/{(\w+)}(/\w+)?", route.path)
        if inside and made.method == "POST" and not made.refused:
            found[_name(route)] = {"operationId": _name(route), "parameters": {inside[1]: "$response.body#/id"}}
    return found


def _name(route: Route) -> str:
    return "_".join([route.method.lower(), *re.findall(r"\w+", _plain(route.path))])


def _plain(path: str) -> str:
    """Remove the router's converters: `/v1/models/{model:path}`."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)
