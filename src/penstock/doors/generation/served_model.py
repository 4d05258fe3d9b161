"""ServedModel: a hosted model with its grammars, tools and recommended sampling."""

from __future__ import annotations

import asyncio
import time
from functools import cached_property

from penstock import __version__
from penstock.domain.sampling import SamplingParams
from penstock.doors.grammar.grammars import Grammars
from penstock.doors.tools import ToolCalling
from penstock.engine.hosted_model import HostedModel
from penstock.errors import RequestError
from penstock.model.sources import recommended_sampling

PROBED_PAIRS = 4  # pairs of messages added to a conversation to measure how many tokens they take


class ServedModel:
    def __init__(self, hosted: HostedModel) -> None:
        self.hosted = hosted
        self.created = int(time.time())
        self.fingerprint = f"penstock-{__version__}"
        self.grammars = Grammars(hosted.folder / "tokenizer.json", vocab=hosted.spec.vocab, eos_ids=hosted.eos_ids)
        self.tools = ToolCalling(hosted.tokenizer.chat_template)
        self.sampling = recommended_sampling(hosted.name, hosted.folder)

    @property
    def max_messages(self) -> int | None:
        """The most messages that can fit the context; None if the chat template leaves messages out."""
        return self.hosted.context if self._messages_cost_tokens else None

    @cached_property
    def _messages_cost_tokens(self) -> bool:
        """Whether every message, even an empty one, takes at least one token of the prompt."""
        tokenizer = self.hosted.tokenizer
        for roles in (("user", "assistant"), ("user", "system")):
            pair = [{"role": role, "content": ""} for role in roles]
            try:
                few, many = (len(tokenizer.encode_chat(pair * count)) for count in (1, 1 + PROBED_PAIRS))
            except RequestError:
                if "system" in roles:
                    continue  # the template refuses such conversations itself
                return False
            if many - few < len(pair) * PROBED_PAIRS:
                return False
        return True

    def hidden_tokens(self, sampling: SamplingParams) -> frozenset[int]:
        """Tokens that end an answer and do not belong to it."""
        return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.hosted.eos_ids)

    async def ready_for_logprobs(self) -> None:
        """Load the texts of tokens in a thread, so that reading the file does not delay other streams."""
        await asyncio.to_thread(self.grammars.token_bytes, [])
