"""Find, fetch and convert models. Every source ends as a local folder in Hugging Face layout.

Such a folder holds `config.json`, `tokenizer.json`, `tokenizer_config.json` and the weights as safetensors. Importing this
package is quick: numpy, gguf, tokenizers and huggingface_hub are imported when they are used.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.domain.sampling import SamplingParams
from penstock.domain.topology import LayerRange
from penstock.errors import InvalidSampling, UnknownModel
from penstock.model.files.cache import ORIGIN, cache_dir, is_complete, size_on_disk
from penstock.model.sources import hub, known_models
from penstock.model.sources.folder import check_folder
from penstock.model.sources.known_models import DEFAULT_MODEL
from penstock.model.sources.local_gguf import known_model_folder, prepare_gguf, prepare_known_model, source_of
from penstock.progress import Progress, silent

__all__ = [
    "DEFAULT_MODEL",
    "InstalledModel",
    "KnownModel",
    "cache_dir",
    "installed",
    "known",
    "local",
    "recommended_sampling",
    "resolve",
]

# the sampling settings of generation_config.json
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class KnownModel:
    """A known model; `folder` is None and `size` 0 until it has been fetched."""

    name: str
    source: str
    licence: str
    folder: Path | None
    size: int


@dataclass(frozen=True)
class InstalledModel:
    """A model on this machine, ready to run; `size` is in bytes, `licence` is empty where unknown."""

    name: str
    source: str
    licence: str
    folder: Path
    size: int


def resolve(model: str, *, layers: LayerRange | None = None, ends: bool = True, progress: Progress = silent) -> Path:
    """Return the folder of a model; fetch and convert it first if needed.

    model: the name of a known model, a folder, a `.gguf` file, or `org/name[@revision]` on the Hugging Face hub.
    layers, ends: fetch only the shards of a hub model with these layers (None for all) and, with `ends`, with the rest.
    """
    if known_model := known_models.find(model):
        return prepare_known_model(known_model, progress=progress)
    path = Path(os.path.expanduser(model)).absolute()  # unlike pathlib, os.path raises for no string
    if model and os.path.isdir(path):
        return check_folder(path)
    if os.path.isfile(path):
        if path.suffix.lower() == ".gguf":
            return prepare_gguf(path, progress=progress)
        raise UnknownModel(f"{path} is a file, but not a .gguf file.", hint="Give the folder that holds it, or a .gguf file.")
    if path.suffix.lower() != ".gguf" and hub.is_hub_id(model):
        return hub.fetch(model, layers=layers, ends=ends, progress=progress)
    raise _unknown(model)


def local(model: str, *, progress: Progress = silent) -> Path | None:
    """Return what `resolve` would, or None if the model would have to be fetched. A `.gguf` file may be converted."""
    if known_model := known_models.find(model):
        folder = known_model_folder(known_model)
        return folder if is_complete(folder) else None
    path = os.path.abspath(os.path.expanduser(model))
    if model and os.path.exists(path):
        return resolve(model, progress=progress)
    return _complete_snapshot(model)


def recommended_sampling(model: str, folder: Path) -> dict[str, float]:
    """Return sampling defaults of a model: for a known one those given there, else those of its `generation_config.json`, else
    none. Invalid ones are ignored: they must not break every request."""
    if known_model := known_models.find(model):
        return dict(known_model.sampling)
    try:
        found = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("do_sample") is False:
        return {}
    recommended = {name: found[name] for name in _SAMPLING if isinstance(found.get(name), int | float)}
    try:
        SamplingParams(**recommended)
    except InvalidSampling:
        return {}
    return recommended


def known() -> list[KnownModel]:
    """List the known models, and which of them are on this machine."""
    models = []
    for model in known_models.KNOWN_MODELS:
        folder = known_model_folder(model)
        here = is_complete(folder)
        models.append(
            KnownModel(model.name, source_of(model), model.licence, folder if here else None, size_on_disk(folder) if here else 0)
        )
    return models


def installed() -> list[InstalledModel]:
    """List everything that `resolve` finds offline: converted models and snapshots of the hub.

    Known models that an older version has converted are no longer used, and are left out.
    """
    current = {source_of(model): known_model_folder(model) for model in known_models.KNOWN_MODELS}
    models = []
    for folder in sorted((cache_dir() / "models").glob("[!.]*")):
        if is_complete(folder):
            origin = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
            if current.get(origin["source"], folder) != folder:
                continue
            models.append(InstalledModel(origin["name"], origin["source"], origin["licence"], folder, size_on_disk(folder)))
    for name, folder in hub.snapshots():
        models.append(InstalledModel(name, f"hub:{name}", "", folder, size_on_disk(folder)))
    return models


def _complete_snapshot(model: str) -> Path | None:
    """Find a snapshot of `org/name[@revision]` with all shards in the hub's cache."""
    name, _, revision = model.partition("@")
    for found, folder in hub.snapshots():
        if found != name or not (folder / "tokenizer.json").is_file():
            continue
        try:
            reference = (folder.parents[1] / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
        except OSError:
            reference = revision
        if folder.name == reference and _has_all_shards(folder):
            return folder
    return None


def _has_all_shards(folder: Path) -> bool:
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        shards = set(index["weight_map"].values())
    except FileNotFoundError:
        shards = {"model.safetensors"}
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
    return all((folder / str(shard)).is_file() for shard in shards)


def _unknown(model: str) -> UnknownModel:
    names = [name for entry in known_models.KNOWN_MODELS for name in (entry.name, *entry.aliases)]
    if re.search(r"[/\\]|\.gguf$", model):
        return UnknownModel(f"There is no file or folder '{model}'.", hint="Write a model of the hub as org/name.")
    nearest = difflib.get_close_matches(model.casefold(), names, n=1)
    suggestion = f"Did you mean '{nearest[0]}'? " if nearest else ""
    return UnknownModel(
        f"There is no model '{model}'. Known by name: {', '.join(entry.name for entry in known_models.KNOWN_MODELS)}.",
        hint=f"{suggestion}You can also give a folder, a .gguf file or org/name of the Hugging Face hub.",
    )
