"""Where models come from. Every source ends as one thing: a local folder in Hugging Face layout.

Such a folder holds `config.json`, `tokenizer.json`, `tokenizer_config.json` and the weights as safetensors; the code above
knows nothing else. Importing this package is quick: numpy, gguf, tokenizers and huggingface_hub load when they are used.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.domain.topology import LayerRange
from penstock.errors import UnknownModel
from penstock.model.sources import catalogue, hub
from penstock.model.sources.cache import ORIGIN, cache_dir, is_complete, size_on_disk
from penstock.model.sources.catalogue import DEFAULT_MODEL
from penstock.model.sources.folder import check_folder
from penstock.model.sources.local_gguf import catalogue_folder, prepare_catalogued, prepare_gguf, source_of
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

# what generation_config.json may say about sampling
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class KnownModel:
    """A model that can be asked for by name; `folder` is None and `size` 0 until it has been fetched."""

    name: str
    source: str
    licence: str
    folder: Path | None
    size: int


@dataclass(frozen=True)
class InstalledModel:
    """A model that lies on this machine, ready to run; `size` is in bytes, `licence` is empty where it is not known."""

    name: str
    source: str
    licence: str
    folder: Path
    size: int


def resolve(model: str, *, layers: LayerRange | None = None, ends: bool = True, progress: Progress = silent) -> Path:
    """The folder of a model, fetched and converted first where need be.

    `model` is a name of the catalogue, a folder, a `.gguf` file, or `org/name[@revision]` on the Hugging Face hub. Of a hub
    model only the shards are fetched that hold `layers` (None: all) and, with `ends`, what lies outside the layers.
    """
    if known_model := catalogue.find(model):
        return prepare_catalogued(known_model, progress=progress)
    path = Path(os.path.expanduser(model)).absolute()  # os.path, here and below, takes every string without an error
    if model and os.path.isdir(path):
        return check_folder(path)
    if os.path.isfile(path):
        if path.suffix.lower() == ".gguf":
            return prepare_gguf(path, progress=progress)
        raise UnknownModel(f"{path} is a file, but not a .gguf file.", hint="Name the folder that holds it, or a .gguf file.")
    if path.suffix.lower() != ".gguf" and hub.is_hub_id(model):
        return hub.fetch(model, layers=layers, ends=ends, progress=progress)
    raise _unknown(model)


def local(model: str, *, progress: Progress = silent) -> Path | None:
    """What `resolve` would return, where all of the model is on this machine: nothing is fetched, at most a `.gguf` file is
    converted. None where somebody must be asked for it."""
    if known_model := catalogue.find(model):
        folder = catalogue_folder(known_model)
        return folder if is_complete(folder) else None
    path = os.path.abspath(os.path.expanduser(model))
    if model and os.path.exists(path):
        return resolve(model, progress=progress)
    return _complete_snapshot(model)


def recommended_sampling(model: str, folder: Path) -> dict[str, float]:
    """How a model is best sampled, for requests that do not say: by the catalogue, or by its makers'
    `generation_config.json`. Nothing where these do not say either."""
    if known_model := catalogue.find(model):
        return dict(known_model.sampling)
    try:
        found = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("do_sample") is False:
        return {}
    return {name: found[name] for name in _SAMPLING if isinstance(found.get(name), int | float)}


def known() -> list[KnownModel]:
    """The catalogue, with what is already here."""
    models = []
    for model in catalogue.CATALOGUE:
        folder = catalogue_folder(model)
        here = is_complete(folder)
        models.append(
            KnownModel(model.name, source_of(model), model.licence, folder if here else None, size_on_disk(folder) if here else 0)
        )
    return models


def installed() -> list[InstalledModel]:
    """Everything that `resolve` would find without the network: converted models, and snapshots of the hub."""
    models = []
    for folder in sorted((cache_dir() / "models").glob("[!.]*")):
        if is_complete(folder):
            origin = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
            models.append(InstalledModel(origin["name"], origin["source"], origin["licence"], folder, size_on_disk(folder)))
    for name, folder in hub.snapshots():
        models.append(InstalledModel(name, f"hub:{name}", "", folder, size_on_disk(folder)))
    return models


def _complete_snapshot(model: str) -> Path | None:
    """A snapshot of `org/name[@revision]` that lacks no shard, as the hub's cache knows the revision."""
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
    names = [name for entry in catalogue.CATALOGUE for name in (entry.name, *entry.aliases)]
    if re.search(r"[/\\]|\.gguf$", model):
        return UnknownModel(f"There is no file or folder '{model}'.", hint="A model of the hub is written as org/name.")
    nearest = difflib.get_close_matches(model.casefold(), names, n=1)
    suggestion = f"Did you mean '{nearest[0]}'? " if nearest else ""
    return UnknownModel(
        f"There is no model '{model}'. Known by name: {', '.join(entry.name for entry in catalogue.CATALOGUE)}.",
        hint=f"{suggestion}A folder, a .gguf file or org/name of the Hugging Face hub can be given too.",
    )
