"""The home folder of this machine: the networks it has joined and its API keys.

`networks/<name>/` holds the files of a network, `networks/current` the name of the one that `penstock serve` joins, and
`keys/` the API keys that its server accepts.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.config.network import NAME, NO_NETWORK
from penstock.errors import ConfigError

HOME_VARIABLE = "PENSTOCK_HOME"
CURRENT = "current"
RESERVED = (NO_NETWORK, CURRENT)  # not allowed as names of networks
GROUP_AND_OTHERS = 0o077  # permissions of everyone but the owner
MAX_FILE_BYTES = 1 << 20
TEXT_FIELDS, LIST_FIELDS = ("name", "node", "created"), ("listen", "connect", "addresses")  # in network.json
USE_COMMAND = "penstock network use NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedNetwork:
    """A network that this machine has joined or created.

    node: this machine's name in it.
    addresses: further host names or addresses at which others reach this machine.
    """

    folder: Path
    name: str
    node: str
    listen: tuple[str, ...]
    connect: tuple[str, ...]
    addresses: tuple[str, ...]
    created: str

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def authority_key_file(self) -> Path:
        return self.folder / "ca.key"

    @property
    def certificate_file(self) -> Path:
        return self.folder / "node.pem"

    @property
    def key_file(self) -> Path:
        return self.folder / "node.key"

    @property
    def revocations_file(self) -> Path:
        return self.folder / "revoked.bin"

    @property
    def stamp_file(self) -> Path:
        return self.folder / "revoked.stamp"

    @property
    def invitations_file(self) -> Path:
        return self.folder / "invitations.json"

    @property
    def trusted_file(self) -> Path:
        return self.folder / "trusted.bin"

    @property
    def peers_file(self) -> Path:
        return self.folder / "peers.json"

    @property
    def issued_file(self) -> Path:
        return self.folder / "issued.json"

    @property
    def is_authority(self) -> bool:
        """Whether the network was created on this machine, which then invites the others."""
        return self.authority_key_file.exists()

    def contents(self) -> bytes:
        """The contents of network.json."""
        values = {name: getattr(self, name) for name in (*TEXT_FIELDS, *LIST_FIELDS)}
        return json.dumps(values, indent=2).encode() + b"\n"


class Home:
    def __init__(self, root: Path) -> None:
        self.networks = root / "networks"
        self.keys = root / "keys"
        self.current_file = self.networks / CURRENT

    def names(self) -> list[str]:
        try:
            found = sorted(entry.name for entry in self.networks.iterdir() if NAME.fullmatch(entry.name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise ConfigError(f"{self.networks} cannot be read: {error.strerror}.") from None
        return [name for name in found if name not in RESERVED]

    def current(self) -> str | None:
        """The network that `penstock serve` joins by default; raise if it does not exist."""
        name = self.current_name()
        if name is not None and name not in self.names():
            raise ConfigError(f"{self.current_file} names the unknown network '{name}'.", hint=f"Run: {USE_COMMAND}")
        return name

    def current_name(self) -> str | None:
        """The name in the file, whether or not the network exists."""
        try:
            return self.current_file.read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.current_file} cannot be read: {error}.", hint=f"Run: {USE_COMMAND}") from None

    def folder(self, name: str) -> Path:
        return self.networks / name

    def network(self, name: str) -> JoinedNetwork:
        names = self.names()
        if name not in names:
            known = f"Its networks are: {', '.join(names)}." if names else "It is in none yet."
            raise ConfigError(
                f"This machine is in no network '{name}'.", hint=f"{known} `penstock network join TOKEN` joins one."
            )
        network = _read(self.folder(name), name)
        refuse_readable_by_others(self.networks, network.folder, network.key_file, network.authority_key_file)
        return network


def home(environ: Mapping[str, str]) -> Home | None:
    """Find the home folder; None where no variable names one, and so no network can be joined."""
    if named := environ.get(HOME_VARIABLE):
        return Home(Path(named).absolute())
    if config := environ.get("XDG_CONFIG_HOME"):
        return Home(Path(config).absolute() / "penstock")
    if user := environ.get("HOME"):
        return Home(Path(user).absolute() / ".config" / "penstock")
    return None


def refuse_readable_by_others(*paths: Path) -> None:
    """Raise if other users can access one of the paths: whoever reads a node's key can impersonate the node."""
    for path in paths:
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
        if mode & GROUP_AND_OTHERS:
            raise ConfigError(
                f"{path} can be used by other users of this machine (its mode is {mode:04o}).",
                hint=f"If nobody has copied it, run: chmod {'700' if path.is_dir() else '600'} {path}",
            )


def _read(folder: Path, name: str) -> JoinedNetwork:
    file = folder / "network.json"
    try:
        with file.open("rb") as stream:
            found = json.loads(stream.read(MAX_FILE_BYTES))
        values = {key: _text(found.pop(key)) for key in TEXT_FIELDS}
        lists = {key: tuple(map(_text, found.pop(key))) for key in LIST_FIELDS}
        if found or values["name"] != name:
            raise ValueError
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.", hint=_restore_hint(name)) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(f"{file} is not a valid network file.", hint=_restore_hint(name)) from None
    return JoinedNetwork(folder=folder, **values, **lists)  # type: ignore[arg-type]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _restore_hint(name: str) -> str:
    return f"Restore it, or leave (penstock network leave {name}) and join with a new invitation."


def this_home() -> Home:
    """The home folder of this process's environment; raise if there is none."""
    if (found := home(os.environ)) is None:
        raise ConfigError("There is no folder for networks and keys: HOME is not set.", hint=f"Set {HOME_VARIABLE} to a folder.")
    return found
