"""`penstock bench --wire`: what each format of hidden states costs for a model, in bytes and in predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.ui.bars import ProgressBars
from penstock.cli.ui.output import print_json, print_table

if TYPE_CHECKING:
    from penstock.pipes.wire_fidelity import WireFidelity

NAMES = {"float32": "fp32", "bfloat16": "bf16", "int8": "int8"}  # as in the settings


def bench_wire(
    model: str,
    *,
    dtype: str,
    quant: str,
    device: str,
    segments: Sequence[tuple[int, int]] | None,
    mbits: Sequence[float],
    as_json: bool,
) -> None:
    with ProgressBars() as bars:
        bars.start()

        from penstock.audit.auditor import public_text
        from penstock.config.engine import EngineConfig
        from penstock.model.architecture.spec import read_spec
        from penstock.model.sources import resolve
        from penstock.pipes.loading.model_manager import ModelManager
        from penstock.pipes.wire_fidelity import measure_formats

        layers = read_spec(resolve(model, progress=bars)).num_layers
        halves = [(0, layers // 2), (layers // 2, layers)] if layers > 1 else [(0, layers)]
        manager = ModelManager(EngineConfig(), bars)
        loaded = manager.load(model, dtype=dtype, quant=quant, device=device, segments=segments or halves)
        assert loaded.ends is not None
        ids = loaded.ends.tokenizer.encode(public_text())
        results = measure_formats(loaded, ids, bars)
    about = {"model": loaded.name, "dtype": loaded.precision, "segments": len(loaded.segments), "tokens": len(ids)}
    if as_json:
        links = {str(mbit): {NAMES[found.format]: _tokens_per_second(found, mbit) for found in results} for mbit in mbits}
        print_json({**about, "results": [_named(found) for found in results], "tokens_per_second_by_mbit": links})
        return
    print(f"{about['model']}, {about['dtype']}: {len(ids):,} tokens of text through {len(loaded.segments)} nodes")
    print_table(
        ["wire", "bytes/token", "logit error", "same token", "perplexity", *(f"{mbit:g} Mbit/s" for mbit in mbits)],
        [_row(found, mbits) for found in results],
        numbers=range(1, 5 + len(mbits)),
    )
    print("The last columns: tokens a second that such a link carries, of prompts and answers together, for each hop.")


def _row(found: WireFidelity, mbits: Sequence[float]) -> list[str]:
    return [
        NAMES[found.format],
        f"{found.token_bytes:,}",
        f"{found.logit_error:.4f}",
        f"{found.agreement:.2%}",
        f"{found.perplexity:.3f}",
        *(f"{_tokens_per_second(found, mbit):,.0f}" for mbit in mbits),
    ]


def _named(found: WireFidelity) -> dict[str, object]:
    return {
        "wire": NAMES[found.format],
        "token_bytes": found.token_bytes,
        "logit_error": found.logit_error,
        "agreement": found.agreement,
        "perplexity": found.perplexity,
    }


def _tokens_per_second(found: WireFidelity, mbit: float) -> float:
    return mbit * 1e6 / 8 / found.token_bytes
