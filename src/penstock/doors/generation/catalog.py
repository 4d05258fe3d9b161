"""ModelCatalog: the models of this node, found by any of their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from penstock.model.sources import known_models

LATEST = ":latest"  # the tag that Ollama's clients add to every name

Model = TypeVar("Model")


class ModelCatalog(Generic[Model]):
    """Every door resolves the name of a model here, so that a name means the same everywhere.

    models: by the name that the settings give them; the first is the default of jobs that name none.
    aliases: further names, from the settings. They match in any case, and win over the names that Penstock knows by itself.
    """

    def __init__(self, models: Mapping[str, Model], aliases: Mapping[str, str] | None = None) -> None:
        self.models = models
        self.aliases = aliases or {}
        self._folded_aliases = {alias.casefold(): target for alias, target in self.aliases.items()}

    def resolve(self, name: str | None) -> Model | None:
        """Find the model of a name; without a name, the first. None if it is not served here."""
        return next(iter(self.models.values()), None) if name is None else self.models.get(self.canonical(name))

    def canonical(self, name: str) -> str:
        """Map all names of a model to one: that under which it is served, if it is."""
        plain = name.removesuffix(LATEST)
        for candidate in (name, plain):
            if candidate in self.models:
                return candidate
            target = self.aliases.get(candidate) or self._folded_aliases.get(candidate.casefold())
            if target is not None:
                return target
        known = known_models.find(plain)
        if known is None:
            return plain
        return next((own for own in self.models if known_models.find(own) is known), known.name)

    def names(self) -> list[tuple[str, Model]]:
        """All names to list, the models' own first."""
        listed = [*((name, name) for name in self.models), *self.aliases.items()]
        return [(name, self.models[own]) for name, own in listed if own in self.models]
