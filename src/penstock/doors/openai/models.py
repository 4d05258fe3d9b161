"""GET /v1/models for OpenAI's clients."""

from __future__ import annotations

from penstock.doors.generation.served_model import ServedModel
from penstock.doors.openai import wire


def describe(name: str, served: ServedModel) -> wire.ModelOut:
    return wire.ModelOut(id=name, created=served.created, root=served.hosted.name, max_model_len=served.hosted.context)
