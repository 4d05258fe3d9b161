"""`penstock models`: list, fetch and describe models."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import DEFAULT_MODEL, JsonOption
from penstock.cli.ui.bars import ProgressBars
from penstock.cli.ui.output import print_json, print_table
from penstock.errors import CorruptWeights, UnknownModel
from penstock.units import format_bytes

app = typer.Typer(help="List the models on this machine, fetch one, describe one.", no_args_is_help=True)

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A name from `penstock models list`, a folder, a .gguf file or a hub id (org/name)."),
]


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What `penstock models show` prints about a model."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    parameters: int
    tensor_types: dict[str, int]  # number of tensors by number format, as they were published
    computed: str  # on a CPU, by default
    chat_template: bool
    size_on_disk: int
    folder: Path


@app.command("list")
def list_models(as_json: JsonOption = False) -> None:
    """List the models on this machine and those known by name."""
    from penstock.model.sources import installed, known

    here = installed()
    names = {model.name for model in here}
    absent = [model for model in known() if model.name not in names]
    if as_json:
        print_json({"models": [_entry(m, True) for m in here] + [_entry(m, False) for m in absent]})
        return
    print_table(
        ["model", "size", "licence", "source"],
        [[m.name, format_bytes(m.size), m.licence or "unknown", m.source] for m in here]
        + [[m.name, "not fetched", m.licence, m.source] for m in absent],
        numbers=[1],
    )
    if absent:
        print(f"Fetch one with: penstock models pull {absent[0].name}")


@app.command()
def pull(model: ModelArgument = DEFAULT_MODEL, as_json: JsonOption = False) -> None:
    """Fetch a model now, so that its first use does not have to wait."""
    from penstock.model.files.cache import size_on_disk
    from penstock.model.sources import resolve

    with ProgressBars() as bars:
        folder = resolve(model, progress=bars)
    if as_json:
        print_json({"model": model, "folder": folder, "size": size_on_disk(folder)})
    else:
        print(f"{model} is ready in {folder} ({format_bytes(size_on_disk(folder))}).")


@app.command()
def show(model: ModelArgument = DEFAULT_MODEL, as_json: JsonOption = False) -> None:
    """Show the architecture, size and folder of a model."""
    summary = summarize(model, _folder_of(model))
    if as_json:
        print_json(summary)
        return
    facts = {
        "model": summary.name,
        "architecture": summary.architecture,
        "layers": str(summary.layers),
        "hidden size": str(summary.hidden),
        "heads": f"{summary.heads} ({summary.kv_heads} for keys and values)",
        "vocabulary": f"{summary.vocabulary:,}",
        "context": f"{summary.context:,} tokens",
        "parameters": f"{summary.parameters / 1e6:,.1f} million",
        "tensors": ", ".join(f"{count} {kind}" for kind, count in summary.tensor_types.items()),
        "on a CPU": summary.computed,
        "chat template": "yes" if summary.chat_template else "no (use --raw)",
        "size on disk": format_bytes(summary.size_on_disk),
        "folder": str(summary.folder),
    }
    for name, value in facts.items():
        print(f"{name:<14} {value}")


@app.command("hash")
def print_hash(model: ModelArgument = DEFAULT_MODEL) -> None:
    """Print the hash of a model: of its tensors, tokenizer, chat template and settings.

    Two machines with the same hash have the same model. `penstock network trust` signs it for a network.
    """
    with ProgressBars() as bars:
        bars.start()

        from penstock.weights.source import local_hash

        found = local_hash(model, bars)
    print(found)


def summarize(name: str, folder: Path) -> ModelSummary:
    from penstock.kernels.library import load
    from penstock.model.architecture.spec import read_spec
    from penstock.model.files.cache import size_on_disk
    from penstock.model.files.gguf_blocks import Blocks

    spec = read_spec(folder)
    published = Blocks(folder).types()
    types: Counter[str] = Counter()
    parameters = 0
    for file in sorted(folder.glob("*.safetensors")):
        for tensor, kind, shape in _tensors(file):
            types[published.get(tensor, kind)] += 1
            parameters += math.prod(shape)
    return ModelSummary(
        name=name,
        architecture=spec.family,
        layers=spec.num_layers,
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        vocabulary=spec.vocab,
        context=spec.context,
        parameters=parameters,
        tensor_types=dict(types.most_common()),
        computed="as published, by native kernels" if load() is not None else "by PyTorch",
        chat_template=_has_chat_template(folder),
        size_on_disk=size_on_disk(folder),
        folder=folder,
    )


def _entry(model: object, here: bool) -> dict[str, object]:
    fields = ("name", "source", "licence", "folder", "size")
    return {**{field: getattr(model, field) for field in fields}, "installed": here}


def _folder_of(model: str) -> Path:
    """Find the folder of a model without fetching it."""
    from penstock.model.sources import installed, resolve
    from penstock.model.sources.known_models import find

    known = find(model)
    name = known.name if known else model
    for entry in installed():
        if entry.name == name:
            return entry.folder
    path = Path(model).expanduser()
    if not path.exists() and (known or "/" in model):
        raise UnknownModel(f"The model '{model}' is not on this machine.", hint=f"Fetch it first: penstock models pull {model}")
    return resolve(model)


def _tensors(file: Path) -> list[tuple[str, str, list[int]]]:
    """Read (name, number format, shape) of every tensor from the header of a safetensors file, without torch."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("the header is longer than the file")
            header = json.loads(stream.read(length))
        return [(name, entry["dtype"], entry["shape"]) for name, entry in header.items() if name != "__metadata__"]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptWeights(f"{file} is damaged: {error}.", hint="Remove the file and fetch the model again.") from None


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_text(encoding="utf-8")).get("chat_template"))
