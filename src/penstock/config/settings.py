"""Merge the settings of a node and record where each comes from.

From lowest to highest precedence: defaults, the network that the machine has joined, the node file, the environment, flags.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config import api_key, kinds
from penstock.config.engine import EngineConfig
from penstock.config.home import JoinedNetwork, home
from penstock.config.kinds import PATHS
from penstock.config.network import CERTIFICATE_FILES, NO_NETWORK, NetworkConfig
from penstock.config.node import HostedModelConfig, LimitsConfig, LogConfig, NodeConfig, ServerConfig, WorkspaceConfig
from penstock.config.old_names import replacement
from penstock.config.state import default_workspace
from penstock.config.table import BY_KEY, MODELS, OTHER_VARIABLES, OWNERS, SETTINGS, Setting, in_table
from penstock.errors import ConfigError

CONFIG_VARIABLE = "PENSTOCK_CONFIG"
EXAMPLE_HINT = "`penstock config --example` shows all settings."

# Setting one of these configures a network by hand, which is not mixed with a joined one.
NETWORK_FILES = (*CERTIFICATE_FILES, "revocations_file", "trusted_file", "peers_file")
MANUAL_NETWORK_KEYS = {f"network.{name}" for name in (*NETWORK_FILES, "open")}
NETWORK_KEYS = MANUAL_NETWORK_KEYS | {"network.listen", "network.connect", "network.multicast"}


class Sourced(NamedTuple):
    """A value and its source: "default", "network home", "file node.toml", "environment PENSTOCK_PORT", "flag --port"."""

    value: Any
    source: str


class Given(NamedTuple):
    """The value of a setting that is not its default; `model_index` counts the hosted models of a file."""

    setting: Setting
    value: Any
    source: str
    model_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The merged settings. `sources` has every one by its key; those of hosted models are `hosted_models[0].id` and so on."""

    node: NodeConfig
    sources: Mapping[str, Sourced]
    file: Path | None


def load_settings(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any], *, serving: bool = True) -> Settings:
    """Merge and check all settings.

    flags: values by setting key, as typed text or as TOML values; None for a flag that was not given.
    serving: False for a command that opens no server: the API key in the environment is then the one to send.
    """
    file = path if path is not None else Path(named) if (named := environ.get(CONFIG_VARIABLE)) else None
    written, models = _from_file(file) if file is not None else ([], 1)
    overrides = [*_from_environment(environ), *_from_flags(flags)]
    if models > 1:
        _refuse_for_several_models(overrides, models, file)
    sources = {
        key_of(setting, model_index): Sourced(setting.default, "default")
        for setting in SETTINGS
        for model_index in range(models if setting.table == MODELS else 1)
    }
    given = [*written, *overrides]
    joined = _from_joined_network(given, environ)
    sources |= {key_of(found.setting, found.model_index): Sourced(found.value, found.source) for found in [*joined, *given]}
    _refuse_another_name(sources["node_id"], joined)
    sources["workspace.path"] = _workspace(sources, models, environ)
    sources["server.api"] = _api(sources, models)
    node = _node(sources, models)
    _refuse_unknown_network(node.network, sources["network.name"], environ)
    if serving and node.opens_port:
        _refuse_two_keys(sources["server.api_key_file"], environ)
        api_key.read_api_key(node.server, environ)  # raises if other machines could use the server without a key
    return Settings(node=node, sources=sources, file=file)


def key_of(setting: Setting, model_index: int) -> str:
    return f"{MODELS}[{model_index}].{setting.name}" if setting.table == MODELS else setting.key


def _node(sources: Mapping[str, Sourced], models: int) -> NodeConfig:
    def values(owner: type, model_index: int = 0) -> dict[str, Any]:
        return {s.attribute: sources[key_of(s, model_index)].value for s in SETTINGS if s.owner is owner}

    return NodeConfig(
        models=tuple(HostedModelConfig(**values(HostedModelConfig, model_index)) for model_index in range(models)),
        server=ServerConfig(**values(ServerConfig)),
        network=NetworkConfig(**values(NetworkConfig)),
        limits=LimitsConfig(**values(LimitsConfig)),
        workspace=WorkspaceConfig(**values(WorkspaceConfig), by_default=sources["workspace.path"].source == "default"),
        engine=EngineConfig(**values(EngineConfig)),
        log=LogConfig(**values(LogConfig)),
        adopts=models == 1 and sources[f"{MODELS}[0].id"].source == "default",
        **values(NodeConfig),
    )


def _workspace(sources: Mapping[str, Sourced], models: int, environ: Mapping[str, str]) -> Sourced:
    """Give a node that answers requests the default workspace, unless workspace.path is set."""
    path, source = sources["workspace.path"]
    if source == "default" and any(sources[f"{MODELS}[{model_index}].load_ends"].value for model_index in range(models)):
        return Sourced(default_workspace(environ), source)
    return Sourced(path, source)


def _api(sources: Mapping[str, Sourced], models: int) -> Sourced:
    """Open the port of a node without ends that has settings for it. Raise if they contradict server.api."""
    api = sources["server.api"]
    others = [(setting, *sources[setting.key]) for setting in in_table("server") if setting.key != "server.api"]
    if api.source == "default":
        ends = any(sources[f"{MODELS}[{model_index}].load_ends"].value for model_index in range(models))
        return Sourced(True, "default") if not ends and any(source != "default" for _, _, source in others) else api
    for setting, value, source in others:
        in_file = source.startswith("file ")  # where a flag overrides it, and every setting may be written with its default
        ignored = not in_file or (api.source == source and value != setting.default)
        if api.value is False and source != "default" and ignored:
            name, off = source.partition(" ")[2], api.source.partition(" ")[2].replace("--api", "--no-api")
            raise ConfigError(
                f"{setting.key} is set ({name}), but server.api is false ({off}): there would be no port.",
                hint="Leave one of them out.",
            )
    return api


# ---- the network that this machine has joined ----


def _from_joined_network(given: Iterable[Given], environ: Mapping[str, str]) -> list[Given]:
    """Read the settings of the joined network; none where another network, or no network, is configured.

    A value equal to the default does not count as configured, since a node file may hold every setting.
    """
    values_by_key = {found.setting.key: found.value for found in given}
    chosen = {key for key in NETWORK_KEYS & values_by_key.keys() if values_by_key[key] != BY_KEY[key].default}
    here = home(environ)
    if here is None or chosen & MANUAL_NETWORK_KEYS:
        return []
    name = values_by_key.get("network.name")
    if name is None and not chosen:
        name = here.current()
    if name is None or name not in here.names():
        return []
    network = here.network(name)
    values = _values(network)
    if values_by_key.get("network.mode") == "client" and network.connect:
        del values["network.listen"]  # a client does not listen
    return [Given(BY_KEY[key], value, f"network {name}") for key, value in values.items()]


def _values(network: JoinedNetwork) -> dict[str, Any]:
    names = ("name", "listen", "connect", *NETWORK_FILES)
    return {f"network.{name}": getattr(network, name) for name in names} | {"node_id": network.node}


# ---- the node file ----


def _from_file(file: Path) -> tuple[list[Given], int]:
    """Read the settings of a node file, and how many models it hosts."""
    found = read_toml(file, "node file", hint=f"Create one with: penstock config --example > {file}")
    models = found.pop(MODELS, [{}])
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise ConfigError(f"{file}: {MODELS} is not a list of models.", hint=f"Write [[{MODELS}]], with two brackets.")
    if not models:
        raise ConfigError(f"{file}: the node hosts no model.", hint=f"Add a [[{MODELS}]], or leave {MODELS} out.")
    given = [*_in_table(file, "", found)]
    for model_index, model in enumerate(models):
        given += _in_table(file, MODELS, model, model_index)
    return given, len(models)


def _in_table(file: Path, table: str, found: Mapping[str, Any], model_index: int = 0) -> Iterator[Given]:
    known = {setting.name: setting for setting in in_table(table)}
    for name, value in found.items():
        key = f"{table}.{name}" if table else name
        if name in known:
            setting = known[name]
            read = setting.read(value, f"{file}: {key_of(setting, model_index)}")
            if setting.kind in PATHS and read is not None:
                read = file.parent / read  # so that a node file works from every folder
            yield Given(setting, read, f"file {file}", model_index)
        elif not table and name in OWNERS:
            if not isinstance(value, dict):
                raise ConfigError(f"{file}: {name} is a table of settings, not a value.", hint=f"Write [{name}] on a line alone.")
            yield from _in_table(file, name, value)
        else:
            raise _unknown_key(file, key, value)


def read_toml(file: Path, what: str, *, hint: str) -> dict[str, Any]:
    """Read a file, called `what` in errors; the hint is for one that does not exist."""
    import tomllib

    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
        return tomllib.loads(text + "\n")  # without it, an error in the last line is reported "at end of document"
    except FileNotFoundError:
        raise ConfigError(f"The {what} {file} does not exist.", hint=hint) from None
    except OSError as error:
        raise ConfigError(f"The {what} {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"The {what} {file} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    except tomllib.TOMLDecodeError as error:
        reason = str(error)
        raise ConfigError(f"{file} is not valid TOML: {reason[:1].lower()}{reason[1:]}.", hint=EXAMPLE_HINT) from None


def _unknown_key(file: Path, key: str, value: Any) -> ConfigError:
    if instead := replacement(key.rpartition(".")[2], value):
        convert = f"`penstock import language-pipes {file}` converts a whole file."
        return ConfigError(f"{file}: {key} is a setting of Language Pipes.", hint=f"{instead} {convert}")
    near = _nearest_key(key)
    hint = f"Did you mean '{near}'? {EXAMPLE_HINT}" if near else EXAMPLE_HINT
    if near and "." in key and "." not in near:
        hint += " Settings without a table go before the first [table]."
    return ConfigError(f"{file}: there is no setting '{key}'.", hint=hint)


def _nearest_key(key: str) -> str:
    """Find a setting of the same name in another table, else one that is spelt similarly."""
    name = key.rpartition(".")[2]
    namesakes = [setting.key for setting in SETTINGS if setting.name == name]
    tables = [table for table in OWNERS if table]
    return _nearest(key, namesakes) or next(iter(namesakes), "") or _nearest(key, [*BY_KEY, *tables]) or _nearest_name(name)


def _nearest_name(name: str) -> str:
    names = {setting.name: setting.key for setting in SETTINGS}
    return names.get(_nearest(name, names), "")


def _nearest(word: str, words: Iterable[str]) -> str:
    from difflib import get_close_matches

    known = list(words)
    swapped = [other for other in known if sorted(other) == sorted(word)]  # to difflib PROT is nearer to PROMPT than to PORT
    return next(iter(swapped or get_close_matches(word, known, n=1)), "")


# ---- the environment ----


def _from_environment(environ: Mapping[str, str]) -> Iterator[Given]:
    by_variable = {setting.variable: setting for setting in SETTINGS}
    for variable, text in sorted(environ.items()):
        if not variable.startswith("PENSTOCK_") or variable in OTHER_VARIABLES or _from_kubernetes(variable, text):
            continue
        if variable not in by_variable:
            raise _unknown_variable(variable, [*by_variable, *OTHER_VARIABLES])
        if text:  # an empty variable counts as not set
            setting = by_variable[variable]
            yield Given(setting, setting.parse(text, variable), f"environment {variable}")


def _from_kubernetes(variable: str, text: str) -> bool:
    """Whether Kubernetes set the variable: it gives every container the addresses of a service named `penstock`."""
    if variable == "PENSTOCK_PORT":
        return "://" in text
    return re.fullmatch(r"PENSTOCK_(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)", variable) is not None


def _unknown_variable(variable: str, known: list[str]) -> ConfigError:
    by_whole_key = {f"PENSTOCK_{setting.key.replace('.', '_').upper()}": setting.variable for setting in SETTINGS}
    by_rest = {name.removeprefix("PENSTOCK_"): name for name in known}  # with the prefix all would look similar
    near = by_whole_key.get(variable) or by_rest.get(_nearest(variable.removeprefix("PENSTOCK_"), by_rest))
    return ConfigError(
        f"The environment variable {variable} is not a setting of Penstock.",
        hint=(f"Did you mean {near}? " if near else "") + "Otherwise unset it: it would be ignored.",
    )


# ---- the flags ----


def _from_flags(flags: Mapping[str, Any]) -> Iterator[Given]:
    for key, value in flags.items():
        if value is not None:
            setting = BY_KEY[key]
            read = setting.parse(value, setting.flag) if isinstance(value, str) else setting.read(value, setting.flag)
            yield Given(setting, read, f"flag {setting.flag}")


# ---- settings that contradict each other ----


def _refuse_another_name(node_id: Sourced, joined: Iterable[Given]) -> None:
    """Raise if node_id differs from the name in the node's certificate."""
    for given in joined:
        if given.setting.key == "node_id" and given.value != node_id.value:
            network = given.source.partition(" ")[2]
            raise ConfigError(
                f"node_id = {kinds.format_value(node_id.value)} ({node_id.source}), but in the network '{network}' this node is "
                f"{kinds.format_value(given.value)}.",
                hint=f"Leave node_id out, or join with an invitation for that name: penstock network invite {node_id.value}",
            )


def _refuse_for_several_models(overrides: Iterable[Given], models: int, file: Path | None) -> None:
    for given in overrides:
        if given.setting.table == MODELS:
            name = given.source.partition(" ")[2]
            raise ConfigError(
                f"{name} is for a node with one model, but {file} hosts {models}.",
                hint=f"Set {given.setting.name} in the [[{MODELS}]] that you mean, and leave {name} out.",
            )


def _refuse_unknown_network(network: NetworkConfig, name: Sourced, environ: Mapping[str, str]) -> None:
    """Raise if only a network's name is set: the node would silently stay alone."""
    if network.enabled or name.value in (NO_NETWORK, BY_KEY["network.name"].default):
        return
    here = home(environ)
    known = ", ".join(here.names()) if here else ""
    raise ConfigError(
        f"{name.source.partition(' ')[2]}: this machine is in no network {kinds.format_value(name.value)}.",
        hint=(f"Its networks are: {known}. " if known else "")
        + "Join it with `penstock network join TOKEN`, or set network.listen or network.connect.",
    )


def _refuse_two_keys(file: Sourced, environ: Mapping[str, str]) -> None:
    """Raise if the environment and a flag both give a key. A key in the environment overrides one in the node file."""
    if api_key.KEY_VARIABLE in environ and file.value is not None and not file.source.startswith("file "):
        name = file.source.partition(" ")[2]
        raise ConfigError(f"{api_key.KEY_VARIABLE} and {name} both give an API key.", hint="Leave one of them out.")
