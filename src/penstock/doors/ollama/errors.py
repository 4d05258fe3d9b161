"""Ollama's errors."""

from __future__ import annotations

from typing import TypedDict

from penstock.doors.http.errors import Dialect
from penstock.errors import PenstockError


class OllamaBody(TypedDict):
    error: str


def ollama_body(error: PenstockError) -> OllamaBody:
    return {"error": str(error)}


OLLAMA = Dialect("Ollama", lambda error, scope: ollama_body(error), (OllamaBody,))
