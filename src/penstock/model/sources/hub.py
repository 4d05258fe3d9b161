"""Fetch models from the Hugging Face hub: only the files that are needed, into the hub library's own cache.

The library reads HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE itself. Its errors are turned into ours here.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from penstock.domain.topology import LayerRange
from penstock.errors import CorruptWeights, DownloadFailed, UnknownModel, UnsupportedModel
from penstock.progress import Progress

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_LAYER = re.compile(r"(?:language_model\.model|model\.language_model|model)\.layers\.(\d+)\.")
_LANGUAGE_MODEL_SUFFIXES = ("ForCausalLM", "Gemma3ForConditionalGeneration")  # of the classes that Penstock may run
_PLAIN_NAME = re.compile(r"\w[\w.-]*")
_INDEX = "model.safetensors.index.json"
_OPTIONAL = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")


def is_hub_id(model: str) -> bool:
    return _HUB_ID.fullmatch(model) is not None


def fetch(model: str, *, layers: LayerRange | None, ends: bool, progress: Progress) -> Path:
    """Fetch `org/name[@revision]` and return its snapshot folder, with at least the wanted part of the weights."""
    name, _, revision = model.partition("@")
    progress(f"asking the hub for {name}", 0, 0)
    _join_logs()
    reachable = _offline() or _answers(_endpoint())  # the library would try for half a minute
    if not reachable:
        logger.warning("%s does not answer; only what is on this machine already is used.", _endpoint())
    snapshot = _Snapshot(name, revision or None, progress, local_only=not reachable)
    folder = snapshot.require("config.json").parent
    snapshot.revision = folder.name  # a commit, so that all files match even if the branch moves meanwhile
    snapshot.require("tokenizer.json")
    for filename in _OPTIONAL:
        snapshot.get(filename)
    if index := snapshot.get(_INDEX):
        for shard in wanted_shards(_weight_map(index), layers, ends):
            snapshot.require(shard)
    elif snapshot.get("model.safetensors") is None:
        raise UnsupportedModel(f"{name} on the hub has no safetensors weights.", hint="Look for a repository that has them.")
    return folder


def wanted_shards(weight_map: dict[str, str], layers: LayerRange | None, ends: bool) -> list[str]:
    """List the files with a tensor of the wanted layers or, with `ends`, with a tensor outside all layers."""

    def wanted(tensor: str) -> bool:
        found = _LAYER.match(tensor)
        if found is None:
            return ends
        return layers is None or layers.start <= int(found[1]) < layers.end

    return sorted({shard for tensor, shard in weight_map.items() if wanted(tensor)})


def snapshots() -> list[tuple[str, Path]]:
    """List the language models in the hub's cache as (org/name, folder), without importing the library."""
    return [
        (folder.parent.parent.name.removeprefix("models--").replace("--", "/"), folder)
        for folder in sorted(_hub_cache().glob("models--*/snapshots/*"))
        if any(folder.glob("*.safetensors")) and _is_language_model(folder / "config.json")
    ]


def _hub_cache() -> Path:
    if own := os.environ.get("HF_HUB_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(os.environ.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


def _is_language_model(config: Path) -> bool:
    try:
        architectures = json.loads(config.read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return False
    return any(str(architecture).endswith(_LANGUAGE_MODEL_SUFFIXES) for architecture in architectures)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError):
        found = None
    # The names become paths: refuse everything but plain file names, so that none leads out of the snapshot.
    if not isinstance(found, dict) or not all(_PLAIN_NAME.fullmatch(str(name)) for name in found.values()):
        raise CorruptWeights(f"{index} is not an index of safetensors files.", hint="Delete the file and try again.")
    return found


class _Snapshot:
    """One revision of a repository, whose files are fetched by name."""

    def __init__(self, name: str, revision: str | None, progress: Progress, *, local_only: bool) -> None:
        self.name = name
        self.revision = revision
        self._progress = progress
        self._local_only = local_only

    def require(self, filename: str) -> Path:
        found = self.get(filename)
        if found is None:
            raise UnsupportedModel(f"{self.name} on the hub has no {filename}.", hint="Penstock needs it to run the model.")
        return found

    def get(self, filename: str) -> Path | None:
        """Fetch a file, or take it from the cache; None if the repository does not have it."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

        known, cached = self._cached(filename)
        if known:
            return cached
        with _wrap_hub_errors(self.name):
            try:
                path = hf_hub_download(
                    self.name,
                    filename,
                    revision=self.revision,
                    tqdm_class=_bar(filename, self._progress),
                    local_files_only=self._local_only,
                )
            except RemoteEntryNotFoundError:
                return None
            except LocalEntryNotFoundError:
                if (_offline() or self._local_only) and self._at_commit() and filename in (*_OPTIONAL, _INDEX):
                    return None  # fetched by another tool that did not need this file
                raise
        return Path(path)

    def _cached(self, filename: str) -> tuple[bool, Path | None]:
        """Return whether the cache knows if the file exists, and its path. A commit never changes, so this is final."""
        from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache

        found = try_to_load_from_cache(self.name, filename, revision=self.revision) if self._at_commit() else None
        return found is not None, None if found is None or found is _CACHED_NO_EXIST else Path(found)

    def _at_commit(self) -> bool:
        return re.fullmatch(r"[0-9a-f]{40}", self.revision or "") is not None


def _join_logs() -> None:
    """Send the library's warnings where ours go: its own handler keeps the stderr of its import and writes into progress bars."""
    from huggingface_hub.utils.logging import get_logger

    library = get_logger()
    library.handlers.clear()
    library.propagate = True


def _offline() -> bool:
    from huggingface_hub.constants import is_offline_mode

    return is_offline_mode()


@contextmanager
def _wrap_hub_errors(name: str) -> Iterator[None]:
    from huggingface_hub import errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP library, whichever that is

    try:
        yield
    except errors.GatedRepoError as error:
        raise DownloadFailed(
            f"{name} on the hub is only available to users who accepted its terms.",
            hint=f"Accept them at https://huggingface.co/{name} and set HF_TOKEN to a token of that account.",
        ) from error
    except errors.RepositoryNotFoundError as error:  # the hub answers 401 both for private and for missing repositories
        raise UnknownModel(
            f"There is no model {name} on the hub, or it is private.",
            hint="Check the name; for a private repository set HF_TOKEN to a token that can read it.",
        ) from error
    except errors.RevisionNotFoundError as error:
        hint = "Write it as org/name@branch, @tag or @commit."
        raise UnknownModel(f"{name} on the hub has no such revision.", hint=hint) from error
    except errors.HFValidationError as error:
        raise UnknownModel(f"'{name}' cannot be the name of a model on the hub.") from error
    except errors.LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if _offline() else f"{_endpoint()} could not be reached"
        raise DownloadFailed(
            f"{name} is not (completely) on this machine, and {reason}.",
            hint="Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give the folder of a copy of the model.",
        ) from error
    except (HTTPError, OSError) as error:
        first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise DownloadFailed(f"{name} could not be fetched from {_endpoint()}: {first_line}", hint="Try again later.") from error


def _answers(endpoint: str) -> bool:
    """Whether the hub, or the proxy before it, accepts a connection."""
    url = urlsplit(endpoint)
    proxy = None if proxy_bypass(url.hostname or "") else getproxies().get(url.scheme)
    if proxy:
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname, port), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError):
        return False
    return True


def _endpoint() -> str:
    from huggingface_hub.constants import ENDPOINT

    return str(ENDPOINT)


def _bar(filename: str, progress: Progress) -> Any:
    """Make a replacement for the library's progress bar that reports to `progress` instead."""

    class Bar:
        def __init__(self, *_: Any, total: float | None = None, initial: float = 0, **__: Any) -> None:
            self.total = total
            self.n = initial
            self.update(0)

        def update(self, count: float | None = 1) -> None:
            self.n += count or 0
            progress(f"fetching {filename}", int(self.n), int(self.total or 0))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
            self.close()

        def close(self) -> None: ...

        def set_description(self, *_: Any, **__: Any) -> None: ...

        def refresh(self, *_: Any, **__: Any) -> None: ...

    return Bar
