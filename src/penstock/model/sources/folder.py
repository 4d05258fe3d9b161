"""Check a user's own model folder, which is never written to."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import UnknownModel


def check_folder(folder: Path) -> Path:
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors files")
    if not missing:
        return folder
    gguf_files = sorted(path.name for path in folder.glob("*.gguf"))
    hint = f"It holds a GGUF file; give that instead: {folder / gguf_files[0]}." if gguf_files else ""
    raise UnknownModel(
        f"The folder {folder} is not a model: it has no {' and no '.join(missing)}.",
        hint=hint or "A model folder in Hugging Face layout holds config.json, tokenizer.json and the weights as *.safetensors.",
    )
