"""Naming: which of the models that are here is meant by a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.model.sources import catalogue

LATEST = ":latest"  # how Ollama's clients, at any door, say that they want no other version of a model


def meant(asked: str | None, models: Iterable[str], aliases: Mapping[str, str]) -> str | None:
    """The model that a job gets; who asks for none gets the first. None if it is not here."""
    if asked is None:
        return next(iter(models), None)
    asked = asked if asked in aliases else asked.removesuffix(LATEST)
    wanted = _own_name(aliases.get(asked, asked))
    return next((name for name in models if _own_name(name) == wanted), None)


def _own_name(model: str) -> str:
    """The catalogue knows some models by several names."""
    known = catalogue.find(model)
    return model if known is None else known.name
