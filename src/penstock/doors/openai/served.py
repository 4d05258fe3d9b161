"""Served: a hosted model with what OpenAI's dialect needs beside it."""

from __future__ import annotations

import time

from penstock import __version__
from penstock.domain.sampling import SamplingParams
from penstock.doors.grammar import Grammars
from penstock.doors.tools import ToolCalling
from penstock.engine.hosted_model import HostedModel
from penstock.errors import InvalidSampling
from penstock.model.sources import recommended_sampling


class Served:
    def __init__(self, hosted: HostedModel) -> None:
        self.hosted, self.created = hosted, int(time.time())
        self.fingerprint = f"penstock-{__version__}"
        self.grammars = Grammars(hosted.folder / "tokenizer.json", vocab=hosted.spec.vocab, eos_ids=hosted.eos_ids)
        self.tools = ToolCalling(hosted.tokenizer.chat_template)
        self.sampling = usable_sampling(recommended_sampling(hosted.name, hosted.folder))


def usable_sampling(recommended: dict[str, float]) -> dict[str, float]:
    """What a model's file recommends is not always possible; that must not break every request."""
    try:
        SamplingParams(**recommended)  # type: ignore[arg-type]
    except InvalidSampling:
        return {}
    return recommended
