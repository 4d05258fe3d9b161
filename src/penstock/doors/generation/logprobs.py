"""Log-probabilities of tokens, in the format that OpenAI's and Ollama's APIs share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.domain.updates import TokenLogprob
from penstock.doors.http.framing import WireStruct

MAX_TOP_LOGPROBS = 20

TokenBytes = Callable[[Sequence[int]], list[bytes]]


class TopLogprob(WireStruct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(WireStruct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


def chat_logprobs(logprobs: Sequence[TokenLogprob], token_bytes: TokenBytes) -> list[ContentLogprob]:
    out = []
    for one in logprobs:
        own, *alternatives = token_bytes([one.token_id, *(token for token, _ in one.top)])
        top = [
            TopLogprob(token=text_of_token(raw), logprob=value, bytes=list(raw))
            for raw, (_, value) in zip(alternatives, one.top, strict=True)
        ]
        out.append(ContentLogprob(token=text_of_token(own), logprob=one.logprob, bytes=list(own), top_logprobs=top))
    return out


def text_of_token(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
