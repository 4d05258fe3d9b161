"""The one table of settings. The node file, the environment, the flags, `penstock config` and the documents follow it.

A flag is the last part of its key (`server.port` is `--port`) unless the row says otherwise, and its variable is the flag in
capitals (`PENSTOCK_PORT`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import kinds
from penstock.config.engine import POLICY_NAMES, EngineConfig
from penstock.config.kinds import PAIRS, PATH, SECONDS, SIZE, SWITCH, TEXT, WHOLE, WORDS, ValueKind
from penstock.config.network import MODES, NetworkConfig
from penstock.config.node import (
    DEFAULT_MODEL,
    DTYPES,
    LOG_FORMATS,
    LOG_LEVELS,
    HostedModelConfig,
    LimitsConfig,
    LogConfig,
    NodeConfig,
    ServerConfig,
    WorkspaceConfig,
)
from penstock.errors import ConfigError

MODELS = "hosted_models"  # the one table of the file that may be there several times

# Which values go into which dataclass; `(class, name)` in a row says otherwise.
OWNERS: dict[str, type] = {
    "": NodeConfig,
    MODELS: HostedModelConfig,
    "server": ServerConfig,
    "network": NetworkConfig,
    "limits": LimitsConfig,
    "workspace": WorkspaceConfig,
    "scheduler": EngineConfig,
    "log": LogConfig,
}

# Variables that are no settings of a node.
OTHER_VARIABLES = {
    "PENSTOCK_CONFIG": "The node file, where `--config` is not given.",
    "PENSTOCK_API_KEY": "The key that clients must send, and that `penstock` sends as a client.",
    "PENSTOCK_URL": "The server that `penstock` talks to as a client.",
    "PENSTOCK_CACHE": "The folder where models are kept.",
    "PENSTOCK_HOME": "The folder with the networks and the API keys of this machine; otherwise ~/.config/penstock.",
    "PENSTOCK_DEBUG": "With 1, an error shows where in the code it arose.",
    "PENSTOCK_PROMPT": "The prompt of `make run`.",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """`sample` is a value for the example file where the default is to have none. `alone` is False for a value that cannot be
    judged without others; `beside` are others that only let it be judged.
    """

    key: str
    kind: ValueKind
    about: str
    named: str = ""
    field: tuple[type, str] | None = None
    sample: Any = None
    alone: bool = True
    beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def table(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def flag(self) -> str:
        return self.named or f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return f"PENSTOCK_{self.flag.removeprefix('--').replace('-', '_').upper()}"

    @property
    def metavar(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_").upper() if self.kind is TEXT else self.kind.metavar

    @property
    def owner(self) -> type:
        return self.field[0] if self.field else OWNERS[self.table]

    @property
    def attribute(self) -> str:
        return self.field[1] if self.field else self.name

    @property
    def default(self) -> Any:
        field = next(field for field in dataclasses.fields(self.owner) if field.name == self.attribute)
        return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()

    @property
    def optional(self) -> bool:
        """Whether it may be empty, which a flag or a variable says with "none"."""
        return self.default in (None, (), {})

    def show(self, value: Any) -> str:
        return "none" if self.optional and not value else self.kind.show(value)

    def read(self, value: Any, where: str = "") -> Any:
        """Check a value that TOML has read; `where` is what errors call it, the setting's name when empty."""
        if self.kind is PATH and self.optional and value == "none":
            return self.default
        return self._checked(self.kind.read, value, where)

    def parse(self, text: str, where: str = "") -> Any:
        """Check the text of a flag or a variable."""
        if self.optional and text.strip().lower() == "none":
            return self.default
        return self._checked(self.kind.parse, text, where)

    def _checked(self, convert: Callable[[Any], Any], given: Any, where: str) -> Any:
        try:
            value = convert(given)
        except ValueError:
            hint = f"Give {self.kind.expects}."
            raise ConfigError(f"{where or self.name} = {kinds.shown(given)} cannot be used.", hint=hint) from None
        if self.alone:
            try:
                self.owner(**self.beside, **{self.attribute: value})  # checks itself, and here it can only mean this value
            except ConfigError as error:
                raise ConfigError(self._located(error.message, where), hint=error.hint) from None
        return value

    def _located(self, message: str, where: str) -> str:
        """Say which setting is meant by a message that may begin with the name that it has in the code."""
        name, _, rest = message.partition(" = ")
        if name == self.attribute:
            return f"{where or self.name} = {rest}"
        return f"{where}: {message}" if where else message


# How an endpoint is spelt can be told without knowing whom the network trusts.
_TRUST = {"open": True} | dict.fromkeys(("ca_file", "certificate_file", "key_file"), Path())

SETTINGS = (
    Setting(f"{MODELS}.id", TEXT, "A name from `penstock models list`, a folder, a .gguf file or a hub id.", "--model"),
    Setting(f"{MODELS}.device", TEXT, "Where to compute: auto, cpu, cuda, cuda:1 or mps; auto takes a GPU when there is one."),
    Setting(f"{MODELS}.dtype", kinds.one_of(*DTYPES), "Number format of the computation; auto takes the fastest here."),
    Setting(
        f"{MODELS}.layers",
        TEXT,
        'Layers that this node holds, such as "0:10" or "0:2,28:30", or "ends" for none; otherwise what the network needs.',
        sample="0:10,10:30",
    ),
    Setting(
        f"{MODELS}.private_layers",
        TEXT,
        'How many of the first and the last layers this node keeps for its own text, such as "2,2"; otherwise none.',
        sample="2,2",
    ),
    Setting(f"{MODELS}.max_memory", SIZE, "The most memory that the model may take, such as 4GB or 800MB.", sample=4 * 10**9),
    Setting(
        f"{MODELS}.kv_memory", SIZE, "Memory for texts being worked on (KV); otherwise a share of what is free.", sample=10**9
    ),
    Setting(
        f"{MODELS}.load_ends",
        SWITCH,
        "Load the embedding and the head too; without them the node only works for others.",
        "--ends",
    ),
    Setting("server.host", TEXT, "The address to listen on; 0.0.0.0 is all of this machine's."),
    Setting("server.port", WHOLE, "The port to listen on; 0 takes a free one."),
    Setting("server.api_key_file", PATH, "A file that holds the key which clients must send.", sample="api-key.txt"),
    Setting("server.keys", PATH, "A folder of keys, each with its limits; otherwise that of `penstock keys`.", sample="keys"),
    Setting("server.allow_insecure", SWITCH, "Let other machines in without a key."),
    Setting("server.cors_origins", WORDS, "Web sites whose pages may use it; * is all.", sample=("https://chat.example.org",)),
    Setting("server.max_body", SIZE, "The largest request to accept."),
    Setting("server.max_upload", SIZE, "The largest file for a batch to accept."),
    Setting("server.keep_alive", SECONDS, "A stream sends a comment when it was silent for so long."),
    Setting("server.ready_within", SECONDS, "So long a token proves that the node is ready; then /ready generates one."),
    Setting(
        "network.name",
        TEXT,
        "The network to take part in; otherwise the one that was made or joined last. none is to be alone.",
        "--network",
        sample="home",
    ),
    Setting("network.listen", WORDS, "Endpoints where other nodes reach this one.", sample=("tls/0.0.0.0:7447",), beside=_TRUST),
    Setting("network.connect", WORDS, "Endpoints of nodes to reach; one is enough.", sample=("tls/cellar:7447",), beside=_TRUST),
    Setting(
        "network.mode", kinds.one_of(*MODES), "A peer speaks with all, a router also relays, a client uses one.", "--network-mode"
    ),
    Setting("network.multicast", SWITCH, "Find nodes of this local network by multicast.", beside=_TRUST),
    Setting("network.lease_ms", WHOLE, "Milliseconds of silence after which a node counts as lost."),
    Setting("network.open", SWITCH, "Let in everybody who can reach this machine: no certificates needed.", "--open-network"),
    Setting("network.ca_file", PATH, "The certificate of the network's authority.", sample="network/ca.pem"),
    Setting("network.certificate_file", PATH, "The certificate of this node.", sample="network/node.pem"),
    Setting("network.key_file", PATH, "The private key of this node.", sample="network/node-key.pem"),
    Setting("network.revocations_file", PATH, "The certificates that were taken back.", sample="network/revoked.bin"),
    Setting("network.peers_file", PATH, "Where this node remembers how to reach the others.", sample="network/peers.json"),
    Setting(
        "network.share_weights",
        SWITCH,
        "Give weights to other nodes of the network, and take from them what is missing here.",
    ),
    Setting("network.weights_rate", SIZE, "The most weights that this node gives to others in a second."),
    Setting("network.recovery_timeout", SECONDS, "So long answers wait for other nodes when one was lost."),
    Setting("aliases", PAIRS, "Further names for hosted models.", sample={"gpt-4o": DEFAULT_MODEL}, alone=False),
    Setting("limits.max_jobs", WHOLE, "Answers (requests times n) open at once; one more is told to come back later (429)."),
    Setting("limits.max_tokens", WHOLE, "The most tokens that a request may ask for; otherwise any number.", sample=4096),
    Setting("limits.drain_timeout", SECONDS, "Time for running answers when the server is told to stop."),
    Setting(
        "workspace.path",
        PATH,
        "A folder of jobs to work on beside the API's requests; otherwise one in ~/.local/state/penstock. none is to have none.",
        "--workspace",
        sample="jobs",
    ),
    Setting("workspace.jobs", WHOLE, "Jobs of the workspace that run at once.", "--workspace-jobs"),
    Setting("workspace.deaths", WHOLE, "A job during which the server died so often, alone, is given up.", "--workspace-deaths"),
    Setting("workspace.keep_responses", SECONDS, "How long a response is kept that a conversation may go on from."),
    Setting("scheduler.policy", kinds.one_of(*POLICY_NAMES), "Who is first: by arrival (fcfs), deadline (edf) or slack (lrs)."),
    Setting("prefill_chunk_size", WHOLE, "Prompt tokens in a step beside running answers.", field=(EngineConfig, "chunk")),
    Setting(
        "scheduler.idle_chunk", WHOLE, "Prompt tokens in a step while no answer runs; otherwise 4 times as many.", sample=2048
    ),
    Setting("scheduler.step_target", SECONDS, "Let a step carry as many prompt tokens as it can in this time.", sample=0.05),
    Setting("scheduler.max_sequences", WHOLE, "Answers that are computed at once; others wait."),
    Setting("scheduler.block_size", WHOLE, "Tokens in a block of KV memory."),
    Setting("scheduler.prefix_cache", SWITCH, "Keep the work on a prompt's beginning for later prompts that share it."),
    Setting("scheduler.window", WHOLE, "Steps in flight at once; otherwise what is found to be best.", sample=2),
    Setting("node_id", TEXT, "The name of this node; otherwise the host's.", sample="kitchen"),
    Setting("max_pipes", WHOLE, "So many pipes of a model may there be before this node only copies what others hold."),
    Setting("model_validation", SWITCH, "Work only with nodes whose weights are the same."),
    Setting("print_times", SWITCH, "Log how long each request took.", field=(EngineConfig, "print_times")),
    Setting("log.format", kinds.one_of(*LOG_FORMATS), "Lines for people, or one JSON object per line.", "--log-format"),
    Setting("log.level", kinds.one_of(*LOG_LEVELS), "The least important messages to log.", "--log-level"),
)
BY_KEY = {setting.key: setting for setting in SETTINGS}


def in_table(table: str) -> Iterator[Setting]:
    return (setting for setting in SETTINGS if setting.table == table)
