"""The table of all settings. The node file, environment, flags, `penstock config` and documentation are generated from it.

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
from penstock.config.engine import KV_DTYPES, POLICY_NAMES, EngineConfig
from penstock.config.kinds import FOLDER, PAIRS, PATH, PATHS, SECONDS, SHARE, SIZE, SWITCH, TEXT, WHOLE, WORDS, ValueKind
from penstock.config.network import MODES, WIRE_FORMATS, NetworkConfig
from penstock.config.node import (
    DEFAULT_MODEL,
    DTYPES,
    LOG_FORMATS,
    LOG_LEVELS,
    QUANTS,
    HostedModelConfig,
    LimitsConfig,
    LogConfig,
    NodeConfig,
    ServerConfig,
    WorkspaceConfig,
)
from penstock.errors import ConfigError

MODELS = "hosted_models"  # the only table that a file may have several times

# The dataclass of each table; the `field` of a row may name another.
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

# Variables that are not settings of a node.
OTHER_VARIABLES = {
    "PENSTOCK_CONFIG": "The node file, where `--config` is not given.",
    "PENSTOCK_API_KEY": "The key that clients must send, and that `penstock` sends as a client.",
    "PENSTOCK_URL": "The server that `penstock` talks to as a client.",
    "PENSTOCK_CACHE": "The folder where models are kept.",
    "PENSTOCK_KERNELS": "What computes: native (on a CPU), triton (on a CUDA GPU) or torch. Unset, the fastest that can.",
    "PENSTOCK_HOME": "The folder with the networks and the API keys of this machine; otherwise ~/.config/penstock.",
    "PENSTOCK_DEBUG": "With 1, an error shows where in the code it arose.",
    "PENSTOCK_PROMPT": "The prompt of `make run`.",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    flag_name: the flag, where it is not made from the key.
    field: the (dataclass, attribute) it sets, where these do not follow from the key.
    sample: a value for the example file, where the default is no value.
    self_contained: False if the value cannot be checked without other settings.
    check_with: values of other settings to use when checking this one.
    """

    key: str
    kind: ValueKind
    about: str
    flag_name: str = ""
    field: tuple[type, str] | None = None
    sample: Any = None
    self_contained: bool = True
    check_with: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def table(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def flag(self) -> str:
        return self.flag_name or f"--{self.name.replace('_', '-')}"

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
        """Whether it may be empty, written "none" in a flag or a variable."""
        return self.default in (None, (), {})

    def show(self, value: Any) -> str:
        return "none" if self.optional and value in (None, (), {}) else self.kind.show(value)

    def read(self, value: Any, where: str = "") -> Any:
        """Check a value that TOML has read. `where` names it in errors; the setting's name if empty."""
        if self.kind in PATHS and self.optional and value == "none":
            return self.default
        return self._checked(self.kind.read, value, where)

    def parse(self, text: str, where: str = "") -> Any:
        """Check the text of a flag or a variable."""
        if self.optional and text.strip().lower() == "none":
            return self.default
        return self._checked(self.kind.parse, text, where)

    def _checked(self, convert: Callable[[Any], Any], raw: Any, where: str) -> Any:
        try:
            value = convert(raw)
        except ValueError:
            hint = f"Give {self.kind.expects}."
            raise ConfigError(f"{where or self.name} = {kinds.format_value(raw)} cannot be used.", hint=hint) from None
        if self.self_contained:
            try:
                self.owner(**self.check_with, **{self.attribute: value})  # its checks can only fail for this value
            except ConfigError as error:
                raise ConfigError(self._located(error.message, where), hint=error.hint) from None
        return value

    def _located(self, message: str, where: str) -> str:
        """Name the setting in a message that may start with the name of the dataclass field."""
        name, _, rest = message.partition(" = ")
        if name == self.attribute:
            return f"{where or self.name} = {rest}"
        return f"{where}: {message}" if where else message


# Lets an endpoint be checked without knowing the network's certificates.
_TRUST = {"open": True} | dict.fromkeys(("ca_file", "certificate_file", "key_file"), Path())

SETTINGS = (
    Setting(f"{MODELS}.id", TEXT, "A name from `penstock models list`, a folder, a .gguf file or a hub id.", "--model"),
    Setting(
        f"{MODELS}.device",
        TEXT,
        "Device: auto, cpu, cuda, cuda:1, cuda:0,cuda:1 or mps; auto takes a GPU when there is one, and cuda all cards.",
    ),
    Setting(
        f"{MODELS}.dtype",
        kinds.one_of(*DTYPES),
        "Number format that PyTorch computes in. auto takes the fastest here: on a CPU the native kernels, where they can.",
    ),
    Setting(
        f"{MODELS}.quant",
        kinds.one_of(*QUANTS),
        "What 16- and 32-bit weights are rounded to when they are loaded; fp8 needs a CUDA GPU. GGUF files run as they are.",
    ),
    Setting(
        f"{MODELS}.layers",
        TEXT,
        'Layers to hold, such as "0:10" or "0:2,28:30", or "ends" for none; by default what the network needs.',
        sample="0:10,10:30",
    ),
    Setting(
        f"{MODELS}.private_layers",
        TEXT,
        'First and last layers that only this node computes for its own text, such as "1,1"; none by default.',
        sample="1,1",
    ),
    Setting(f"{MODELS}.max_memory", SIZE, "Memory limit for weights and KV, such as 4GB or 800MB.", sample=4 * 10**9),
    Setting(
        f"{MODELS}.kv_memory",
        SIZE,
        "Memory for the KV cache; by default half of what is free, on a GPU what gpu_memory leaves.",
        sample=10**9,
    ),
    Setting(
        f"{MODELS}.load_ends",
        SWITCH,
        "Load the embedding and the head too; without them the node only computes layers for others.",
        "--ends",
    ),
    Setting(
        "server.api",
        SWITCH,
        "Serve HTTP; by default unless the node only holds layers and no setting of the server is set.",
        sample=True,
    ),
    Setting("server.host", TEXT, "Address to listen on; 0.0.0.0 means every address of this machine."),
    Setting("server.port", WHOLE, "Port to listen on; 0 takes a free one."),
    Setting("server.api_key_file", PATH, "File with the API key that clients must send.", sample="api-key.txt"),
    Setting("server.keys", FOLDER, "Folder of API keys with their limits; by default that of `penstock keys`.", sample="keys"),
    Setting("server.allow_insecure", SWITCH, "Accept requests from other machines without a key."),
    Setting(
        "server.tls_cert",
        PATH,
        "Certificate (PEM) for HTTPS, with those of its issuers; read again when it changes.",
        sample="cert.pem",
        check_with={"tls_key": Path()},
    ),
    Setting(
        "server.tls_key",
        PATH,
        "Private key (PEM) of that certificate, not encrypted.",
        sample="key.pem",
        check_with={"tls_cert": Path()},
    ),
    Setting(
        "server.cors_origins", WORDS, "Web sites whose pages may use the API; * means all.", sample=("https://chat.example.org",)
    ),
    Setting("server.max_body", SIZE, "Largest request to accept."),
    Setting("server.max_upload", SIZE, "Largest batch file to accept."),
    Setting("server.keep_alive", SECONDS, "Send a comment on a stream that was silent for this long."),
    Setting(
        "server.ready_within",
        SECONDS,
        "How long a generated token counts as proof of readiness; after that /ready generates one.",
    ),
    Setting(
        "network.name",
        TEXT,
        'Network to take part in; by default the one created or joined last. "none" stays alone.',
        "--network",
        sample="home",
    ),
    Setting(
        "network.listen", WORDS, "Endpoints where other nodes reach this one.", sample=("tls/0.0.0.0:7447",), check_with=_TRUST
    ),
    Setting("network.connect", WORDS, "Endpoints of other nodes; one is enough.", sample=("tls/cellar:7447",), check_with=_TRUST),
    Setting(
        "network.mode",
        kinds.one_of(*MODES),
        "A peer talks to every node, a router also relays, a client goes through one node.",
        "--network-mode",
    ),
    Setting("network.router", TEXT, "What carries the network: zenoh, or another installed router by its name."),
    Setting("network.multicast", SWITCH, "Find nodes on the local network by multicast.", check_with=_TRUST),
    Setting("network.lease_ms", WHOLE, "Milliseconds of silence after which a node counts as lost."),
    Setting("network.open", SWITCH, "Let in everyone who can reach this machine, without certificates.", "--open-network"),
    Setting("network.ca_file", PATH, "Certificate of the network's authority.", sample="network/ca.pem"),
    Setting("network.certificate_file", PATH, "Certificate of this node.", sample="network/node.pem"),
    Setting("network.key_file", PATH, "Private key of this node.", sample="network/node-key.pem"),
    Setting("network.revocations_file", PATH, "List of revoked certificates.", sample="network/revoked.bin"),
    Setting(
        "network.trusted_file", PATH, "List of models whose weights the authority vouches for.", sample="network/trusted.bin"
    ),
    Setting("network.peers_file", PATH, "File where this node remembers how to reach the others.", sample="network/peers.json"),
    Setting(
        "network.share_weights",
        SWITCH,
        "Send weights to other nodes, and fetch from them what is missing here.",
    ),
    Setting(
        "network.accept_weights",
        WORDS,
        "Weights to take from other nodes although nobody vouches for them: hashes (`penstock models hash`), or any.",
        sample=("3f2a" * 16,),
    ),
    Setting("network.weights_rate", SIZE, "Bytes of weights per second that this node sends to others."),
    Setting(
        "network.wire",
        kinds.one_of(*WIRE_FORMATS),
        "Format of hidden states on their way: fp32, bf16 (half the bytes), int8 (a quarter), or auto: what suits the model.",
    ),
    Setting("network.recovery_timeout", SECONDS, "How long running answers wait for other nodes after one was lost."),
    Setting("aliases", PAIRS, "Further names for hosted models.", sample={"gpt-4o": DEFAULT_MODEL}, self_contained=False),
    Setting("limits.max_jobs", WHOLE, "Answers (requests times n) open at once; further requests get 429."),
    Setting("limits.max_tokens", WHOLE, "Most tokens that a request may ask for; no limit by default.", sample=4096),
    Setting(
        "limits.share_prefixes",
        SWITCH,
        "Let all keys share the prefix cache; faster, but a key can then find out whether another has sent a text.",
    ),
    Setting("limits.key_disk", SIZE, "What each key may store, where its own limits do not say; the owner's key has no limit."),
    Setting("limits.key_batches", WHOLE, "Batches that each key may have open, where its own limits do not say."),
    Setting("limits.drain_timeout", SECONDS, "How long running answers may take to finish when the server stops."),
    Setting("limits.max_connections", WHOLE, "Connections open at once; for one more, one that waits for a request is closed."),
    Setting(
        "limits.max_waiting_per_address", WHOLE, "Connections of one address that wait for a request; busy ones do not count."
    ),
    Setting("limits.header_timeout", SECONDS, "How long a TLS handshake and the headers of a request may take."),
    Setting("limits.idle_timeout", SECONDS, "How long a connection may wait for its next request."),
    Setting(
        "workspace.path",
        FOLDER,
        'Folder of jobs to work on beside API requests; by default in ~/.local/state/penstock. "none" keeps nothing.',
        "--workspace",
        sample="jobs",
    ),
    Setting("workspace.jobs", WHOLE, "Jobs of the workspace that run at once.", "--workspace-jobs"),
    Setting(
        "workspace.deaths",
        WHOLE,
        "Fail a job after the server died this many times while running it alone.",
        "--workspace-deaths",
    ),
    Setting("workspace.keep_responses", SECONDS, "How long stored responses are kept; by default 30 days."),
    Setting(
        "scheduler.policy",
        kinds.one_of(*POLICY_NAMES),
        "Which request goes first: by arrival (fcfs), deadline (edf) or slack (lrs).",
    ),
    Setting(
        "prefill_chunk_size",
        WHOLE,
        "Prompt tokens per step while answers are running; by default 512, on a GPU 256.",
        field=(EngineConfig, "chunk"),
        sample=512,
    ),
    Setting(
        "scheduler.idle_chunk",
        WHOLE,
        "Prompt tokens per step while no answer is running; by default 4 times as many, on a GPU at least 4096.",
        sample=2048,
    ),
    Setting(
        "scheduler.crowd_chunk",
        WHOLE,
        "Prompt tokens per step while at least a quarter as many requests wait for a first token as are answered; in proportion "
        "fewer while fewer wait. By default prefill_chunk_size, on a GPU idle_chunk.",
        sample=2048,
    ),
    Setting("scheduler.step_target", SECONDS, "Instead: as many prompt tokens per step as fit into this time.", sample=0.05),
    Setting("scheduler.max_sequences", WHOLE, "Answers computed at once; others wait."),
    Setting("scheduler.block_size", WHOLE, "Tokens per block of KV memory."),
    Setting("scheduler.prefix_cache", SWITCH, "Reuse the KV of prompts that begin alike."),
    Setting("scheduler.window", WHOLE, "Steps in flight at once; by default found by measuring.", sample=2),
    Setting(
        "gpu_memory",
        SHARE,
        "Share of a GPU's memory that may be in use: weights, the largest pass, and KV, which gets the rest.",
        field=(EngineConfig, "gpu_memory"),
    ),
    Setting(
        "kv_dtype",
        kinds.one_of(*KV_DTYPES),
        "What a GPU keeps keys and values in; fp8 halves their memory, at some cost in fidelity.",
        field=(EngineConfig, "kv_dtype"),
    ),
    Setting("node_id", TEXT, "Name of this node; by default the host's.", sample="kitchen"),
    Setting("max_pipes", WHOLE, "Open up to this many pipes per model, then replicate."),
    Setting("model_validation", SWITCH, "Work only with nodes that have the same weights."),
    Setting(
        "print_times",
        SWITCH,
        "Log how long each request took, part by part.",
        field=(EngineConfig, "print_times"),
    ),
    Setting("log.format", kinds.one_of(*LOG_FORMATS), "Lines for people, or one JSON object per line.", "--log-format"),
    Setting("log.level", kinds.one_of(*LOG_LEVELS), "Lowest level to log.", "--log-level"),
)
BY_KEY = {setting.key: setting for setting in SETTINGS}


def in_table(table: str) -> Iterator[Setting]:
    return (setting for setting in SETTINGS if setting.table == table)
