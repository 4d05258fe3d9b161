"""The published description of the API: every operation is in it, and it says what the code does."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from penstock.domain.sampling import SamplingParams
from penstock.doors.anthropic.routes import anthropic_routes
from penstock.doors.api_config import ApiConfig
from penstock.doors.app.node_endpoints import NodeEndpoints
from penstock.doors.app.openapi import document, with_document
from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.generation.catalog import ModelCatalog
from penstock.doors.http.describing import FIELD_DESCRIPTIONS
from penstock.doors.http.route import Route
from penstock.doors.ollama.routes import ollama_routes
from penstock.doors.openai.batches.routes import batch_routes
from penstock.doors.openai.requests import ChatCompletionRequest
from penstock.doors.openai.responses.routes import responses_routes
from penstock.doors.openai.routes import openai_routes
from penstock.errors import InvalidSampling
from tests.lazy_module import LazyModule

if TYPE_CHECKING:
    import schemathesis
else:
    schemathesis = LazyModule("schemathesis")


def all_routes() -> list[Route]:
    """Those of a server; nobody answers."""
    dispatcher = RequestDispatcher(ApiConfig(ModelCatalog({})))
    dialects = [openai_routes(dispatcher), responses_routes(dispatcher, None), batch_routes(None, 1)]
    dialects += [
        anthropic_routes(dispatcher, None),
        ollama_routes(dispatcher),
        NodeEndpoints(dispatcher, "node", dict, None, {}, dict).routes(),
    ]
    return with_document([route for routes in dialects for route in routes])


@pytest.fixture(scope="module")
def routes() -> list[Route]:
    return all_routes()


@pytest.fixture(scope="module")
def described(routes: list[Route]) -> dict[str, Any]:
    """As clients get it."""
    found: dict[str, Any] = json.loads(json.dumps(document(routes)))
    return found


def operation(described: dict[str, Any], route: Route) -> dict[str, Any]:
    found: dict[str, Any] = described["paths"][route.path.replace(":path", "")][route.method.lower()]
    return found


def fields(described: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = described["components"]["schemas"][kind]["properties"]
    return found


def test_every_route_is_described(routes: list[Route], described: dict[str, Any]) -> None:
    assert sum(len(methods) for methods in described["paths"].values()) == len(routes)
    for route in routes:
        found = operation(described, route)
        assert found["summary"] == route.description
        assert ("requestBody" in found) == (route.request is not None)
        assert ("200" in found["responses"]) != route.refused
        if route.response is not None:
            assert found["responses"]["200"]["content"]["application/json"]["schema"]
        if route.stream is not None:
            assert route.stream in found["responses"]["200"]["content"]


def test_every_operation_has_a_name_of_its_own(routes: list[Route], described: dict[str, Any]) -> None:
    names = [operation(described, route)["operationId"] for route in routes]
    assert len(set(names)) == len(names)


def test_what_is_read_is_described_and_what_is_answered_too(routes: list[Route]) -> None:
    """A POST without a body, or an answer of no type, is one that somebody has forgotten to describe."""
    for route in routes:
        if route.method == "POST" and "{" not in route.path and not route.refused:
            assert route.request is not None, route.path
        if route.path.startswith(("/v1/", "/api/")) and not route.refused and not route.path.endswith(("/content", "/results")):
            assert route.response is not None, route.path


def test_schemathesis_takes_it_for_valid_openapi(described: dict[str, Any]) -> None:
    schema = schemathesis.openapi.from_dict(described)
    schema.validate()
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == sum(len(methods) for methods in described["paths"].values())


def test_every_reference_leads_somewhere(described: dict[str, Any]) -> None:
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(described)))
    assert named <= described["components"]["schemas"].keys()


def test_fields_that_nobody_knows_are_refused(described: dict[str, Any]) -> None:
    found = described["components"]["schemas"]["openai.requests.ChatCompletionRequest"]
    assert found["additionalProperties"] is False
    assert not ChatCompletionRequest.REFUSED.keys() & found["properties"].keys()


def test_harmless_fields_take_anything_and_others_one_value_only(described: dict[str, Any]) -> None:
    found = fields(described, "openai.requests.ChatCompletionRequest")
    assert "type" not in found["metadata"]
    assert found["store"]["enum"] == [False, None]


def test_errors_have_the_shape_of_the_dialect(described: dict[str, Any]) -> None:
    def error(path: str) -> str:
        schema: str = described["paths"][path]["post"]["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
        return schema.rpartition(".")[2]

    found = [error(path) for path in ("/v1/chat/completions", "/v1/messages", "/api/chat")]
    assert found == ["OpenAIBody", "AnthropicBody", "OllamaBody"]


def test_only_who_watches_the_process_and_the_files_of_the_console_need_no_key(described: dict[str, Any]) -> None:
    free = {path for path, methods in described["paths"].items() for found in methods.values() if found.get("security") == []}
    assert free == {"/health", "/ready", "/console/{file}"}, "the console itself asks for the key"


def bounds() -> list[tuple[str, float]]:
    """Of each field that is checked when a request is understood: the first values that are too small or too large."""
    steps = {"minimum": -1, "maximum": 1, "exclusiveMinimum": 0}
    found = [
        (name, output[key] + step) for name, output in FIELD_DESCRIPTIONS.items() for key, step in steps.items() if key in output
    ]
    return [(name, value) for name, value in found if name in SamplingParams.__dataclass_fields__]


@pytest.mark.parametrize("name,value", bounds())
def test_the_bounds_of_a_field_are_those_that_are_checked(name: str, value: float) -> None:
    with pytest.raises(InvalidSampling):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("path", ["/v1/batches/{batch}", "/v1/messages/batches/{batch}"])
def test_a_batch_that_still_runs_may_refuse_to_be_deleted(described: dict[str, Any], path: str) -> None:
    assert "400" in described["paths"][path]["delete"]["responses"]
