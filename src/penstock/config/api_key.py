"""The owner's API key: where it comes from, where the keys of others lie, and that a server that others can reach has one.

A key is in PENSTOCK_API_KEY or in a file, never in a flag (everybody on the machine sees those) or in the node file (which
is copied and shown around). It is in no setting and in no message.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.home import home
from penstock.config.node import ServerConfig
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config.keys import KeyFolder

KEY_VARIABLE = "PENSTOCK_API_KEY"
MIN_KEY_CHARS = 8
MAKE_KEY_HINT = 'Make one with: python3 -c "import secrets; print(secrets.token_urlsafe(32))"'


def api_key_source(config: ServerConfig, environ: Mapping[str, str]) -> str:
    """Where the key comes from, empty when there is none. The variable comes before the file."""
    if KEY_VARIABLE in environ:
        return f"environment {KEY_VARIABLE}"
    return "" if config.api_key_file is None else f"file {config.api_key_file}"


def key_folder(config: ServerConfig, environ: Mapping[str, str]) -> KeyFolder | None:
    """Where keys with limits lie, whether or not there are any; None where the machine has no place for them."""
    from penstock.config.keys import KeyFolder  # hashes and locks would cost every `--help` some milliseconds

    if config.keys is not None:
        return KeyFolder(config.keys)
    here = home(environ)
    return None if here is None else KeyFolder(here.keys)


def read_api_key(config: ServerConfig, environ: Mapping[str, str]) -> str | None:
    """The owner's key, None where there is none; refuses to leave a server open that others can reach, and keys that cannot be
    read."""
    folder = key_folder(config, environ)
    records = folder.records() if folder is not None else ()
    if KEY_VARIABLE in environ:
        return _check_key(
            environ[KEY_VARIABLE].strip(), f"The API key in {KEY_VARIABLE}", empty=f"Give it a key, or unset {KEY_VARIABLE}."
        )
    if config.api_key_file is not None:
        text = _read_key_file(config.api_key_file)
        return _check_key(text.strip(), f"The API key in {config.api_key_file}", empty="Write a key into the file.")
    live = any(record.revoked is None for record in records)
    if config.beyond_loopback and not config.allow_insecure and not live:
        raise ConfigError(
            f"The server would listen on {config.host}, where other machines can reach it, without an API key.",
            hint=f"Make a key (penstock keys add NAME), set {KEY_VARIABLE} or server.api_key_file, or listen on 127.0.0.1. "
            "If whoever can reach this machine may use the model, say --allow-insecure.",
        )
    return None


def _read_key_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"The API key file {file} cannot be read: {error.strerror}.",
            hint="server.api_key_file names a file that holds only the key.",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"The API key file {file} is not text.", hint=f"It must hold only the key. {MAKE_KEY_HINT}") from None


def _check_key(key: str, what: str, *, empty: str) -> str:
    if not key:
        raise ConfigError(f"{what} is empty.", hint=f"{empty} {MAKE_KEY_HINT}")
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(f"{what} has fewer than {MIN_KEY_CHARS} characters.", hint=MAKE_KEY_HINT)
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{what} holds spaces or characters that HTTP cannot carry.", hint=MAKE_KEY_HINT)
    return key
