"""Find the owner's API key and the folder of further keys, and require a key where other machines can reach the server.

The key comes from PENSTOCK_API_KEY or a file, never from a flag (visible to everyone on the machine) or the node file (which
gets copied and shared). It appears in no setting and no message.
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
    """Say where the key comes from, "" when there is none. The variable overrides the file."""
    if KEY_VARIABLE in environ:
        return f"environment {KEY_VARIABLE}"
    return "" if config.api_key_file is None else f"file {config.api_key_file}"


def key_folder(config: ServerConfig, environ: Mapping[str, str]) -> KeyFolder | None:
    """Return the folder of keys, which may be empty or missing; None where the machine has no home folder."""
    from penstock.config.keys import KeyFolder  # at the top it would cost every `--help` some milliseconds

    if config.keys is not None:
        return KeyFolder(config.keys)
    here = home(environ)
    return None if here is None else KeyFolder(here.keys)


def read_api_key(config: ServerConfig, environ: Mapping[str, str]) -> str | None:
    """Return the owner's key, or None. Raise if a key cannot be read, or if other machines could use the server without one."""
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
            f"The server would listen on {config.host}, which other machines can reach, without an API key.",
            hint=f"Create a key (penstock keys add NAME), set {KEY_VARIABLE} or server.api_key_file, or listen on 127.0.0.1. "
            "To let everyone who can reach this machine use the model, pass --allow-insecure.",
        )
    return None


def _read_key_file(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"The API key file {file} cannot be read: {error.strerror}.",
            hint="server.api_key_file must name a file that holds only the key.",
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"The API key file {file} is not text.", hint=f"It must hold only the key. {MAKE_KEY_HINT}") from None


def _check_key(key: str, what: str, *, empty: str) -> str:
    if not key:
        raise ConfigError(f"{what} is empty.", hint=f"{empty} {MAKE_KEY_HINT}")
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(f"{what} has fewer than {MIN_KEY_CHARS} characters.", hint=MAKE_KEY_HINT)
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"{what} contains spaces or characters that an HTTP header cannot have.", hint=MAKE_KEY_HINT)
    return key
