"""Vocabularies, read once for all models of a process that have the same one."""

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
    """What is read of a file, kept by the bytes of the file. An error is not kept."""
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
    """To read that of the default model takes a tenth of a second, and nearly every small model has it. Nobody changes one."""
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
    """Now, and a first conversation in its template, so that what is forked from this process has that behind it."""
    read_tokenizers_once()
    folder = next(model.folder for model in known() if model.name == DEFAULT_MODEL)
    if folder is not None:
        with contextlib.suppress(Exception):  # those who need it will say what is wrong with it
            found = tokenizer.Tokenizer(folder)
            found.encode_chat([{"role": "user", "content": "Hi."}])
            found.exceeds("Hi.", 1)


def share_fork_server(grammars: Grammars) -> None:
    """Let these grammars be compiled by the fork server of others with the same vocabulary, if there is one. Its start, in which
    it reads the vocabulary, takes half a second of CPU."""
    model, processes = grammars._model, grammars._model.processes
    name = content(processes._file), processes._vocab, tuple(processes._eos_ids), processes._max_memory
    model.processes = model.pool._processes = _fork_servers.setdefault(name, processes)
