"""The limit on the length of an answer."""

from __future__ import annotations

from penstock.config.node import LimitsConfig
from penstock.errors import RequestError


def answer_limit(wanted: int | None, limits: LimitsConfig, field: str) -> int | None:
    """The requested limit, or else the node's. None: up to the end of the context."""
    if wanted is not None and limits.max_tokens is not None and wanted > limits.max_tokens:
        raise RequestError(
            f"{field} = {wanted} is more than this node allows.", field=field, hint=f"Ask for at most {limits.max_tokens}."
        )
    return limits.max_tokens if wanted is None else wanted
