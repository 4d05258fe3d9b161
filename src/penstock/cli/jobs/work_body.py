"""The jobs of `penstock work` that are requests to the API: `--embed` and `--request`. Their prompt is the body."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import typer

from penstock.cli.prompt import MAX_PROMPT_BYTES, STDIN, read_stdin, read_text
from penstock.errors import RequestError

OPTION = "--request"
EMBEDDINGS = "/v1/embeddings"
ENDPOINT_OF_FIELD = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
SET_BY_OPTIONS = {
    "stream": "Its result is one body: leave it out.",
    "priority": "Use --priority.",
    "service_tier": "Use --priority.",
    "deadline": "Use --deadline.",
}


class Body(NamedTuple):
    """model: the one that the body names."""

    endpoint: str
    model: str | None
    text: str


def embedding(text: str, model: str | None) -> Body:
    named = {} if model is None else {"model": model}
    return Body(EMBEDDINGS, model, json.dumps({**named, "input": text}, ensure_ascii=False))


def read_body(file: Path, endpoint: str | None, model: str | None) -> Body:
    """Read a body and check it as the server will, so that a bad one is refused now and not hours later."""
    from penstock.doors.http.fields import parse
    from penstock.doors.openai.job_requests import JOB_REQUESTS

    text = read_stdin(OPTION) if str(file) == STDIN else read_text(file, OPTION, MAX_PROMPT_BYTES)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(f"{_name(file)} is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise _bad(f"{_name(file)} is not a JSON object.")
    path = endpoint or _endpoint_of(body, file)
    if path not in JOB_REQUESTS:
        raise typer.BadParameter(f"{path[:80]!r} cannot be a job. These can: {', '.join(JOB_REQUESTS)}.", param_hint="--endpoint")
    for name, what in SET_BY_OPTIONS.items():
        if body.get(name) is not None and body[name] is not False:
            raise _bad(f"{_name(file)}: a job takes no {name}. {what}")
    try:
        parse(JOB_REQUESTS[path], text if body.get("model") is not None else json.dumps({**body, "model": model or "any"}))
    except RequestError as error:
        raise _bad(f"{_name(file)}: {error}") from None
    if model is not None and body.get("model") not in (None, model):
        raise typer.BadParameter(f"{_name(file)} names the model {body['model']!r}. Leave one of them out.", param_hint="--model")
    return Body(path, body.get("model") or model, text)


def _endpoint_of(body: Mapping[str, Any], file: Path) -> str:
    for field, path in ENDPOINT_OF_FIELD.items():
        if field in body:
            return path
    if "body" in body and "url" in body:
        raise _bad(f"{_name(file)} is a line of a batch. Use `penstock batch`, or give its body alone.")
    if "input" in body:
        raise _bad(f"{_name(file)} may be for embeddings or a response. Add --embed, or --endpoint /v1/responses.")
    raise _bad(f"{_name(file)} has no messages, prompt or input. Write the body of an API request, or name its --endpoint.")


def _name(file: Path) -> str:
    return "stdin" if str(file) == STDIN else str(file)


def _bad(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=OPTION)
