"""Caches vocabularies, so that a process reads each of them only once."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.model.sources import DEFAULT_MODEL, known
from penstock.model.text import tokenizer

if TYPE_CHECKING:
    from penstock.doors.grammar.grammars import Grammars
    from penstock.doors.grammar.remote import ForkServerProcess

Found = TypeVar("Found")

_fork_servers: dict[Any, ForkServerProcess] = {}


def once(read: Callable[[Path], Found]) -> Callable[[Path], Found]:
    """Cache a reader's results by the bytes of the file. Errors are not cached."""
    kept: dict[bytes, Found] = {}

    def look(path: Path) -> Found:
        name = content(path)
        if name is None:
            return read(path)
        if name not in kept:
            kept[name] = read(path)
        return kept[name]

    return look


def content(path: Path) -> bytes | None:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return None


@cache
def read_tokenizers_once() -> None:
    """Cache tokenizers, which are immutable: reading the default one, which nearly every small model has, takes 0.1 s."""
    module: Any = tokenizer
    read = module.RustTokenizer.from_file
    rust = once(lambda path: read(str(path)))

    class Files:
        from_file = staticmethod(lambda path: rust(Path(path)))

    module.RustTokenizer = Files
    module.token_bytes = once(module.token_bytes)
    environment: Any = tokenizer._environment()
    environment.from_string = cache(environment.from_string)
    module._environment = lambda: environment


def read_default_tokenizer() -> None:
    """Read it now, and render a first conversation in its template, so that forked processes need not."""
    read_tokenizers_once()
    folder = next(model.folder for model in known() if model.name == DEFAULT_MODEL)
    if folder is not None:
        with contextlib.suppress(Exception):  # tests that need it will report the error
            found = tokenizer.Tokenizer(folder)
            found.encode_chat([{"role": "user", "content": "Hi."}])
            found.exceeds("Hi.", 1)


def share_fork_server(grammars: Grammars) -> None:
    """Let grammars with the same vocabulary share a fork server, if there is one. Starting one, which reads the vocabulary, takes
    half a second of CPU."""
    model, processes = grammars._model, grammars._model.processes
    name = content(processes._file), processes._vocab, tuple(processes._eos_ids), processes._max_memory
    model.processes = model.pool._processes = _fork_servers.setdefault(name, processes)
