"""ServedModel: a hosted model with its grammars, tools and recommended sampling."""

from __future__ import annotations

import asyncio
import time

from penstock import __version__
from penstock.domain.sampling import SamplingParams
from penstock.doors.grammar.grammars import Grammars
from penstock.doors.tools import ToolCalling
from penstock.engine.hosted_model import HostedModel
from penstock.errors import InvalidSampling
from penstock.model.sources import recommended_sampling


class ServedModel:
    def __init__(self, hosted: HostedModel) -> None:
        self.hosted = hosted
        self.created = int(time.time())
        self.fingerprint = f"penstock-{__version__}"
        self.grammars = Grammars(hosted.folder / "tokenizer.json", vocab=hosted.spec.vocab, eos_ids=hosted.eos_ids)
        self.tools = ToolCalling(hosted.tokenizer.chat_template)
        self.sampling = usable_sampling(recommended_sampling(hosted.name, hosted.folder))

    def hidden_tokens(self, sampling: SamplingParams) -> frozenset[int]:
        """Tokens that end an answer and do not belong to it."""
        return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.hosted.eos_ids)

    async def ready_for_logprobs(self) -> None:
        """Load the texts of tokens in a thread, so that reading the file does not delay other streams."""
        await asyncio.to_thread(self.grammars.token_bytes, [])


def usable_sampling(recommended: dict[str, float]) -> dict[str, float]:
    """The recommended sampling, or none if it is invalid: it must not break every request."""
    try:
        SamplingParams(**recommended)  # type: ignore[arg-type]
    except InvalidSampling:
        return {}
    return recommended
