"""What `penstock serve --dry-run` prints: what would be loaded here, what it would take, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.placement.preview import Preview


def format_preview(preview: Preview) -> str:
    chosen, pinned = preview.decision.layers, preview.pinned
    count = sum(layers.size for layers in (*pinned, *chosen))
    lines = [f"{preview.model} has {preview.num_layers} layers. This node would load:", ""]
    if preview.ends:
        lines.append(_row("ends", f"{_size(preview.ends)} for the embedding and the head"))
    if pinned:
        lines.append(_row("layers", f"{', '.join(map(str, pinned))}, as its settings say"))
    if chosen or not pinned:
        lines.append(_row("layers", ", ".join(map(str, chosen)) or "none"))
    if count:
        each = f"{_size(preview.layer)} of weights and {_size(preview.kv)} of KV"
        lines.append(_row("each", each))
    total = preview.ends + count * (preview.layer + preview.kv)
    lines.append(_row("in all", f"{_size(total)} of the {_size(preview.budget)} that it may take"))
    lines.append(_row("from", preview.source))
    lines.append(_row("why", preview.decision.why))
    return "\n".join(lines) + "\n"


def _row(name: str, text: str) -> str:
    return f"  {name:8}{text}"


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count} bytes"
