"""The published API: operations and fields, metrics, errors, and what a node tells about itself."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.cli.exits import exit_codes
from penstock.doors.anthropic.errors import anthropic_body
from penstock.doors.http.errors import headers_of, status_of
from penstock.doors.openai.errors import openai_body
from penstock.errors import PenstockError
from tests.contract.fake_node import FakeNode
from tests.contract.snapshot import check_json, check_lines, shape_of

REFS = "#/components/schemas/"
PROSE = ("description", "summary", "title")
NOISE = ("paths", "content", "application/json", "schema", "properties", "items", "anyOf", "responses", "parameters")


# ---- OpenAPI ----


def without_prose(value: Any) -> Any:
    """Texts for people; a field that happens to be called `title` has a schema, not a text."""
    if isinstance(value, dict):
        return {key: without_prose(inner) for key, inner in value.items() if key not in PROSE or not isinstance(inner, str)}
    return [without_prose(item) for item in value] if isinstance(value, list) else value


def schema_places(document: dict[str, Any]) -> dict[str, str]:
    """For each schema, the place where it is used first: a name that does not change when a class is renamed or moved."""
    schemas, places = document["components"]["schemas"], {}

    def visit(value: Any, way: tuple[str, ...]) -> None:
        if isinstance(value, dict):
            name = str(value.get("$ref", "")).removeprefix(REFS)
            if name in schemas and name not in places:
                place = " ".join(word for word in way if word not in NOISE)
                taken = sum(other == place or other.startswith(f"{place} #") for other in places.values())
                places[name] = f"{place} #{taken + 1}" if taken else place
                visit(schemas[name], (places[name],))
            for key in sorted(value):
                visit(value[key], (*way, key))
        elif isinstance(value, list):
            for item in value:
                visit(item, way)

    visit(document["paths"], ())
    return places | {name: name for name in schemas if name not in places}


def with_names(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: with_names(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_names(item, names) for item in value]
    if isinstance(value, str) and value.startswith(REFS):
        return REFS + names[value.removeprefix(REFS)]
    return value


def test_operations_and_fields_of_the_api_stay(node: FakeNode) -> None:
    """Schemas are named by where they are used. The test below keeps the names that are published."""
    document = node.get("/openapi.json")
    places = schema_places(document)
    assert len({*places.values()}) == len(places)
    document = with_names(without_prose(document), places)
    components = document["components"]
    components["schemas"] = {places[name]: schema for name, schema in components["schemas"].items()}
    del document["info"]  # the version of Penstock
    check_json("openapi.json", document)


def test_names_of_the_apis_schemas_stay(node: FakeNode) -> None:
    """Client generators make classes of them. They follow the names of modules and classes in the code."""
    document = node.get("/openapi.json")
    check_lines("openapi_schema_names.txt", (f"{place} | {name}" for name, place in schema_places(document).items()))


# ---- what a node tells ----


@pytest.mark.parametrize("path", ["/status", "/network", "/health"])
def test_fields_of_what_a_node_tells_stay(node: FakeNode, path: str) -> None:
    check_json(f"http{path.replace('/', '_')}.json", shape_of(node.get(path)))


def test_metrics_stay(node: FakeNode) -> None:
    """Those about the process itself, which are prometheus_client's and not the same everywhere, only have to be there."""
    lines, own = set(), ("process_", "python_")
    node.get("/health")  # at least one answer to count
    families = [*text_string_to_metric_families(node.client.get("/metrics").text)]
    for family in families:
        if family.name.startswith(own):
            continue
        for sample in family.samples:
            values = [sample.labels[name] for name in ("state", "outcome") if name in sample.labels]
            lines.add(" | ".join([sample.name, family.type, f"labels {', '.join(sorted(sample.labels))}", *values]))
        assert family.samples, f"{family.name} has no sample: its labels cannot be seen"
    check_lines("metrics.txt", lines)
    assert any(family.name.startswith("python_") for family in families)
    assert any(family.name.startswith("process_") for family in families) or not Path("/proc/self/stat").exists()


# ---- errors ----


def error_classes() -> list[type[PenstockError]]:
    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if not module.name.endswith("__main__") and ".triton." not in module.name:  # without a GPU there is no Triton
            importlib.import_module(module.name)
    found: list[type[PenstockError]] = [PenstockError]
    for error in found:
        found += error.__subclasses__()
    return [error for error in found if error.__module__.startswith("penstock.")]


def made(error: type[PenstockError]) -> PenstockError:
    """An instance, whatever its class wants to know."""
    found = error.__new__(error)
    PenstockError.__init__(found, "What happened.")
    vars(found).update(field="", retry_after=1)
    return found


def exit_code(error: BaseException) -> object:
    with pytest.raises(SystemExit) as left, exit_codes():
        raise error
    return left.value.code


def test_codes_of_errors_stay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_DEBUG", raising=False)
    lines = {
        f"(Ctrl-C) | exit {exit_code(KeyboardInterrupt())}",
        f"(anything unexpected) | exit {exit_code(ValueError('Oops.'))}",
    }
    for error in map(made, error_classes()):
        output = openai_body(error)["error"]
        names = f"OpenAI {output['type']} {output['code']} | Anthropic {anthropic_body(error)['error']['type']}"
        headers = ", ".join(sorted(headers_of(error))) or "none"
        lines.add(f"{error.code} | HTTP {status_of(error)} | {names} | headers {headers} | exit {exit_code(error)}")
    check_lines("errors.txt", lines)


def test_unknown_paths_and_methods_are_refused_as_before(node: FakeNode) -> None:
    found = {}
    for method, path in (("GET", "/v1/nowhere"), ("DELETE", "/v1/models"), ("PUT", "/v1/messages"), ("GET", "/api/nowhere")):
        answer = node.client.request(method, path)
        error = answer.json()["error"]
        names = {key: error[key] for key in ("type", "code") if key in error} if isinstance(error, dict) else "text"
        found[f"{method} {path}"] = {"status": answer.status_code, "error": names}
    check_json("unknown_paths.json", found)
