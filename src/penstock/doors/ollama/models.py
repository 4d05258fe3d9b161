"""GET /api/tags, /api/ps and /api/version, POST /api/show: the models of this node, for Ollama's clients."""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.generation.catalog import LATEST
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.http.fields import read
from penstock.doors.http.replies import json_reply
from penstock.doors.ollama import wire
from penstock.doors.ollama.answers import rfc3339
from penstock.doors.ollama.requests import ShowRequest
from penstock.errors import NoSuchPath, RequestError
from penstock.model.architecture.shapes import total_params
from penstock.model.architecture.spec import fingerprint
from penstock.model.files.gguf_blocks import SIZES

OLLAMA_VERSION = "0.13.0"  # of the API spoken here: clients refuse servers that are too old
NEVER = "9999-12-31T23:59:59Z"
# bytes per number, and Ollama's name, where it is not the precision's own
PRECISIONS = {
    "float32": (4, "F32"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "fp8": (1, "F8_E4M3"),
    "int8": (1.0625, "Q8_0"),
    "int4": (0.5625, "Q4_0"),
} | {name.lower(): (size / numbers, name) for name, (size, numbers) in SIZES.items()}
PARAMETERS = {"repetition_penalty": "repeat_penalty"}  # Ollama's names, where they differ


class ModelEndpoints:
    def __init__(self, dispatcher: RequestDispatcher) -> None:
        self._dispatcher = dispatcher

    async def tags(self, request: Request) -> Response:
        return json_reply(wire.Tags(models=[_listed(name, served) for name, served in self._dispatcher.offered(request)]))

    async def processes(self, request: Request) -> Response:
        return json_reply(wire.Processes(models=[_loaded(name, served) for name, served in self._dispatcher.offered(request)]))

    async def show(self, request: Request) -> Response:
        params = await read(ShowRequest, request)
        name = params.model or params.name
        if name is None:
            raise RequestError("model is missing.", field="model")
        return json_reply(_describe(self._dispatcher.find(name, request)))

    async def version(self, request: Request) -> Response:
        return json_reply(wire.Version(version=OLLAMA_VERSION))

    async def manage(self, request: Request) -> Response:
        raise NoSuchPath(
            "Models cannot be pulled, created, copied or deleted over the API.",
            hint="Start the server with another model: `penstock serve --model NAME`.",
        )


def tagged(name: str) -> str:
    """Add a tag: in Ollama every name has one."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def _listed(name: str, served: ServedModel) -> wire.Listed:
    return wire.Listed(
        name=tagged(name),
        model=tagged(name),
        modified_at=rfc3339(served.created),
        size=_size(served),
        digest=_digest(served),
        details=_details(served),
    )


def _loaded(name: str, served: ServedModel) -> wire.Loaded:
    return wire.Loaded(
        name=tagged(name),
        model=tagged(name),
        size=_size(served),
        digest=_digest(served),
        details=_details(served),
        expires_at=NEVER,
        size_vram=0 if served.hosted.device == "cpu" else _size(served),
        context_length=served.hosted.context,
    )


def _describe(served: ServedModel) -> wire.Shown:
    hosted, spec = served.hosted, served.hosted.spec
    family = spec.family
    parameters = {"num_ctx": hosted.context, **{PARAMETERS.get(name, name): value for name, value in served.sampling.items()}}
    facts: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": hosted.name,
        "general.parameter_count": total_params(spec),
        f"{family}.context_length": hosted.context,
        f"{family}.embedding_length": spec.hidden,
        f"{family}.block_count": spec.num_layers,
        f"{family}.attention.head_count": spec.heads,
        f"{family}.attention.head_count_kv": spec.kv_heads,
        f"{family}.vocab_size": spec.vocab,
    }
    return wire.Shown(
        modelfile=f"FROM {tagged(hosted.name)}\n",
        parameters="\n".join(f"{name} {value}" for name, value in parameters.items()),
        template=hosted.tokenizer.chat_template or "",
        details=_details(served),
        model_info=facts,
        # Not "embedding", although every model can: clients take that for a model that cannot chat.
        capabilities=["completion", "tools"],
        modified_at=rfc3339(served.created),
    )


def _details(served: ServedModel) -> wire.Details:
    spec = served.hosted.spec
    _, precision = PRECISIONS[served.hosted.dtype]
    return wire.Details(
        parent_model="",
        format="safetensors",
        family=spec.family,
        families=[spec.family],
        parameter_size=_rounded(total_params(spec)),
        quantization_level=precision,
    )


def _size(served: ServedModel) -> int:
    """Bytes of the whole model, wherever its layers are."""
    size, _ = PRECISIONS[served.hosted.dtype]
    return int(total_params(served.hosted.spec) * size)


def _digest(served: ServedModel) -> str:
    """An id by which clients tell models apart."""
    return hashlib.sha256(f"{served.hosted.name} {fingerprint(served.hosted.spec)}".encode()).hexdigest()


def _rounded(count: int) -> str:
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return f"{count / 1000:.1f}K"
