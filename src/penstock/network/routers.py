"""Finds the router that `network.router` names, among the entry points of installed packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from inspect import signature

from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError, PenstockError
from penstock.network.router import Router
from penstock.network.stream import Stream

GROUP = "penstock.routers"
OWN = {  # as in pyproject.toml; repeated for a source tree that is not installed
    "zenoh": "penstock.network.zenoh.router:ZenohRouter",
    "in-process": "penstock.network.in_process:join_process_network",
}

MakeRouter = Callable[[NetworkConfig, str, int], Router]  # settings, node id, epoch


def make_router(config: NetworkConfig, node_id: str, epoch: int) -> Router:
    """Make the router that the settings name. It is not started yet."""
    found = installed_routers()
    if config.router not in found:
        raise ConfigError(
            f"network.router = '{config.router}': no installed package has a router of this name.",
            hint=f"Installed are: {', '.join(found)}. Use one of them, or install the package that has it.",
        )
    point = _only(config.router, found[config.router])
    make = _load(point)
    try:
        router = make(config, node_id, epoch)
    except (PenstockError, OSError):
        raise
    except Exception as error:
        raise _unusable(point, error) from error
    missing = [name for name in _methods() if not hasattr(router, name)]
    if missing or not _takes_stream(router):
        lacks = f"it has no {', '.join(missing)}" if missing else "its send takes no stream"
        raise ConfigError(
            f"The router '{config.router}' ({point.value}) cannot be used: {lacks}.",
            hint="docs/router.md says what a router must do. Ask those who maintain it for a newer version.",
        )
    return router


def installed_routers() -> dict[str, list[EntryPoint]]:
    """The entry points of each name, sorted by name."""
    points = [*(EntryPoint(name, value, GROUP) for name, value in OWN.items()), *entry_points(group=GROUP)]
    return {name: [point for point in points if point.name == name] for name in sorted({point.name for point in points})}


def _only(name: str, points: list[EntryPoint]) -> EntryPoint:
    values = sorted({point.value for point in points})
    if len(values) > 1:
        raise ConfigError(
            f"network.router = '{name}' is ambiguous: {' and '.join(values)} both have this name.",
            hint="Uninstall the one that you do not want.",
        )
    return points[0]


def _load(point: EntryPoint) -> MakeRouter:
    try:
        make: MakeRouter = point.load()
    except Exception as error:  # third-party code: it can raise anything
        raise _unusable(point, error) from error
    return make


def _unusable(point: EntryPoint, error: Exception) -> ConfigError:
    return ConfigError(
        f"The router '{point.name}' ({point.value}) cannot be loaded: {type(error).__name__}: {error}.",
        hint="Install its package again, or use network.router = 'zenoh'.",
    )


def _takes_stream(router: Router) -> bool:
    """Whether `send` can be called with a stream. Routers made before there were streams cannot."""
    try:
        signature(router.send).bind("node", b"", Stream.DATA)
    except TypeError:
        return False
    except ValueError:  # a function that is not written in Python
        return True
    return True


def _methods() -> list[str]:
    return [name for name in vars(Router) if not name.startswith("_")]
