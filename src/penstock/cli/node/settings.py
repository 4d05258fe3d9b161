"""Give commands flags for the settings of a node: all of them, or a selection."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.options import wrong_usage
from penstock.config.kinds import SWITCH
from penstock.config.settings import load_settings
from penstock.config.table import BY_KEY, MODELS, SETTINGS, Setting

SHORT_FLAGS = {"--model": "-m"}
COMMON_FLAGS = {"--model", "--port", "--host", "--device", "--dtype", "--max-memory", "--network", "--workspace"}  # listed first
GROUPS = {
    MODELS: "Model and layers",
    "server": "Server",
    "network": "Network",
    "limits": "Limits",
    "workspace": "Workspace",
    "scheduler": "Scheduling",
    "log": "Log",
}
OTHER_GROUP = "Node"

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The node file (TOML); by default PENSTOCK_CONFIG. `penstock config --example` prints one.",
    ),
]


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Turn `command(settings, ...)` into a command with `--config`, a flag for every setting, and its own other options.

    It is called with the merged and checked settings. An invalid flag is reported by its name, as wrong usage.
    """
    return _with_flags(command, SETTINGS, serving=True)


def takes_some_settings(*keys: str, **about: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Do the same for a command that opens no server, with flags for these settings only.

    The others can be set in the node file and the environment.

    about: what the help says of a flag that means something else here, by the flag's name as in `network="..."`.
    """
    settings = [BY_KEY[key] for key in keys]
    settings = [replace(setting, about=about.get(setting.flag.removeprefix("--"), setting.about)) for setting in settings]
    return lambda command: _with_flags(command, settings, serving=False)


def _with_flags(command: Callable[..., None], settings: Sequence[Setting], *, serving: bool) -> Callable[..., None]:
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
    config = inspect.Parameter("config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigOption)

    def with_settings(*, config_file: Path | None, **values: Any) -> None:
        flags = {setting.key: values.pop(_parameter_name(setting)) for setting in settings}
        for setting in settings:
            text = flags[setting.key]
            with wrong_usage(setting.flag):
                if isinstance(text, str):
                    setting.parse(text)
                elif text is not None:
                    setting.read(text)
        command(load_settings(config_file, os.environ, flags, serving=serving), **values)

    parameters = [config, *map(_parameter, settings), *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)]
    with_settings.__name__, with_settings.__doc__ = command.__name__, command.__doc__
    with_settings.__annotations__ = {}  # typer reads the signature, and these would contradict it
    with_settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_settings


def _parameter(setting: Setting) -> inspect.Parameter:
    if setting.kind is SWITCH:
        both = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
        annotation: Any = Annotated[bool | None, typer.Option(both, help=_help(setting), rich_help_panel=_group(setting))]
    else:
        names = [setting.flag, *filter(None, [SHORT_FLAGS.get(setting.flag)])]
        option = typer.Option(*names, metavar=setting.metavar, help=_help(setting), rich_help_panel=_group(setting))
        annotation = Annotated[str | None, option]
    return inspect.Parameter(_parameter_name(setting), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parameter_name(setting: Setting) -> str:
    return "setting_" + setting.key.replace(".", "_")  # distinct from other tables' settings and the command's own options


def _group(setting: Setting) -> str | None:
    """The group of a flag in the help; None for those that are listed first."""
    return None if setting.flag in COMMON_FLAGS else GROUPS.get(setting.table, OTHER_GROUP)


def _help(setting: Setting) -> str:
    return setting.about if setting.sample is not None else f"{setting.about} [default: {setting.show(setting.default)}]"
