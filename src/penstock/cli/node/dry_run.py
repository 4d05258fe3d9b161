"""The output of `penstock serve --dry-run`: what would be loaded, how much memory it needs, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.config.node import NodeConfig
    from penstock.placement.preview import Preview


def format_preview(preview: Preview) -> str:
    chosen, pinned = preview.decision.layers, preview.pinned
    count = sum(layers.size for layers in (*pinned, *chosen))
    lines = [f"{preview.model} has {preview.num_layers} layers. This node would load:", ""]
    if preview.ends:
        lines.append(_row("ends", f"{format_bytes(preview.ends)} for the embedding and the head"))
    if pinned:
        lines.append(_row("layers", f"{', '.join(map(str, pinned))}, as set"))
    if chosen or not pinned:
        lines.append(_row("layers", ", ".join(map(str, chosen)) or "none"))
    if count:
        lines.append(_row("each", f"{format_bytes(preview.layer)} of weights and {format_bytes(preview.kv)} of KV"))
        lines.append(_row("text", f"room for {preview.kv_tokens:,} tokens, prompts and answers of all requests together"))
    total = preview.ends + count * (preview.layer + preview.kv)
    lines.append(_row("total", f"{format_bytes(total)}; the limit is {format_bytes(preview.budget)}"))
    lines.append(_row("as", preview.computed))
    lines.append(_row("from", preview.source))
    lines.append(_row("why", preview.decision.why if chosen or not pinned else "The settings name these layers."))
    return "\n".join(lines) + "\n"


def format_port(config: NodeConfig) -> str:
    if config.opens_port:
        encrypted = ", with HTTPS" if config.server.tls_cert is not None else ""
        return f"The API would listen on {config.server.host}, port {config.server.port}{encrypted}.\n"
    how = "" if config.server.api is False else "; --port PORT opens one"
    return f"No port would be opened{how}.\n"


def _row(name: str, text: str) -> str:
    return f"  {name:8}{text}"
