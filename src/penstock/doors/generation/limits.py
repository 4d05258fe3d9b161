"""The limits on the length of an answer, and of a text that is to be tokenized."""

from __future__ import annotations

from penstock.config.node import LimitsConfig
from penstock.engine.hosted_model import HostedModel
from penstock.errors import PromptTooLong, RequestError


def answer_limit(wanted: int | None, limits: LimitsConfig, field: str) -> int | None:
    """The requested limit, or else the node's. None: up to the end of the context."""
    if wanted is not None and limits.max_tokens is not None and wanted > limits.max_tokens:
        raise RequestError(
            f"{field} = {wanted} is more than this node allows.", field=field, hint=f"Ask for at most {limits.max_tokens}."
        )
    return limits.max_tokens if wanted is None else wanted


def check_length(text: str, field: str, hosted: HostedModel) -> None:
    """Refuse a text that cannot fit the context, however it is tokenized."""
    if hosted.tokenizer.exceeds(text, hosted.context):
        raise PromptTooLong(
            f"{field} has {len(text)} characters, which are more than the {hosted.context} tokens that fit.",
            tokens=hosted.context + 1,
            limit=hosted.context,
            field=field,
            hint="Shorten it.",
        )
