"""What schemathesis is told of this API beyond its description. It loads this by itself, in a process of its own."""

from __future__ import annotations

import atexit
import json
import os
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis

KNOWN: dict[str, str] = json.loads(os.environ["KNOWN"])  # the names of what is there
SENT: Counter[tuple[str, int]] = Counter()

# Of what fits the description, most makes no sense: no prompt, or more tokens than there are. Half of it is made to.
SENSIBLE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "prompt": "The capital of France is",
    "input": "The capital of France is",
    "n": 2,
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), 4),
}
KEPT = frozenset(
    (
        *("model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "user", "metadata"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "echo", "ignore_eos", "service_tier"),
        *("encoding_format", "truncate", "raw", "instructions", "store", "keep_alive"),
    )
)
LAST_EVENTS = {
    "/v1/messages": ("event: message_stop\n", "event: error\n"),
    "/v1/responses": ("event: response.completed\n", "event: response.incomplete\n", "event: error\n"),
}


@schemathesis.hook
def before_call(context: Any, case: schemathesis.Case, kwargs: Any) -> None:
    if case.path_parameters and case.method != "DELETE" and half(case.path_parameters):
        case.path_parameters = {name: KNOWN.get(name, value) for name, value in case.path_parameters.items()}
    if case.operation.path == "/events":
        case.query = {**(case.query or {}), "stream": "false"}  # the stream has no end
    if not isinstance(case.body, dict) or case.meta is None:
        return
    valid = case.meta.generation.mode is schemathesis.GenerationMode.POSITIVE
    if valid and SENSIBLE.keys() & case.body.keys() and half(case.body):
        case.body = {name: SENSIBLE.get(name, value) for name, value in case.body.items() if name in KEPT | SENSIBLE.keys()}
    names = {name: KNOWN[name] for name in ("model", "input_file_id") if isinstance(case.body.get(name), str)}
    if names:
        case.body = {**case.body, **names}


def half(value: object) -> bool:
    return zlib.crc32(repr(value).encode()) % 2 == 1


@schemathesis.hook
def after_call(context: Any, case: schemathesis.Case, response: schemathesis.Response) -> None:
    SENT[case.operation.label, response.status_code] += 1


@atexit.register
def write_down() -> None:
    Path(os.environ["SENT"]).write_text(json.dumps([[*what, count] for what, count in SENT.items()]), encoding="utf-8")


@schemathesis.check
def streams_end_properly(ctx: Any, response: schemathesis.Response, case: schemathesis.Case) -> None:
    kind = response.headers.get("content-type", [""])[0]
    if kind.startswith("application/x-ndjson"):
        last = json.loads(response.content.splitlines()[-1])
        assert last.get("done") is True or "error" in last, f"the last line is {last}"
    elif kind.startswith("text/event-stream"):
        event = response.content.decode().rstrip("\n").rpartition("\n\n")[2]
        ends = LAST_EVENTS.get(case.operation.path, ("data: [DONE]",))
        assert event.startswith(ends), f"the last event is {event}"
