"""NodeConfig: the settings of a node, checked on construction: models, server, limits, workspace, log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

from penstock.config.checks import check_device, check_seconds, check_whole, is_address, unusable
from penstock.config.engine import EngineConfig
from penstock.config.kinds import format_value
from penstock.config.network import NAME, NetworkConfig
from penstock.domain.topology import NOTHING_PRIVATE, LayerRange, PrivateLayers, covering
from penstock.errors import ConfigError

# Here because importing the known models would cost every `--help` 50 ms.
DEFAULT_MODEL = "smollm2-135m"

DTYPES = ("auto", "bfloat16", "float32")
QUANTS = ("none", "fp8", "int8", "int4")
MAX_WORKSPACE_JOBS = 256  # each holds a file descriptor, and the API needs some too
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


ENDS = "ends"  # as `layers`: hold the ends of the model and no layers


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModelConfig:
    """A model that this node runs.

    quant: what 16- and 32-bit weights are rounded to when they are loaded; fp8 needs a CUDA GPU.
    max_memory: bytes for weights and KV together; None for as much as fits.
    kv_memory: bytes for KV alone; None for as much as fits.
    load_ends: whether it holds the ends and so answers requests; otherwise it only computes layers for other nodes.
    layers: segments to hold, such as "0:10" or "0:2,28:30", or "ends" for none. None for what the network lacks and fits
        here, or all layers without a network.
    private_layers: how many of the first and last layers only this node may compute for its requests.
    """

    id: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: str = "auto"
    quant: str = "none"
    max_memory: int | None = None
    kv_memory: int | None = None
    load_ends: bool = True
    layers: str | None = None
    private_layers: str | None = None

    def __post_init__(self) -> None:
        if not self.id.strip():
            raise ConfigError("The id of a hosted model is empty.", hint="Give a name from `penstock models list`.")
        check_device(self.device)
        if self.dtype not in DTYPES:
            raise unusable("dtype", self.dtype, f"Use one of: {', '.join(DTYPES)}.")
        if self.quant not in QUANTS:
            raise unusable("quant", self.quant, f"Use one of: {', '.join(QUANTS)}.")
        if self.quant != "none" and self.dtype != "auto":
            raise unusable("quant", self.quant, "It needs dtype = auto: PyTorch, which other dtypes choose, does not quantise.")
        for name in ("max_memory", "kv_memory"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), minimum=1)
        self._check_layers()
        self._check_private()

    @property
    def segments(self) -> tuple[LayerRange, ...] | None:
        """`layers` as ranges. Whether they cover the model is known only once it is loaded."""
        if self.layers is None:
            return None
        return () if self.layers == ENDS else tuple(map(LayerRange.parse, self.layers.split(",")))

    @property
    def private(self) -> PrivateLayers:
        return NOTHING_PRIVATE if self.private_layers is None else PrivateLayers.parse(self.private_layers)

    def ends_only(self) -> HostedModelConfig:
        """The same model for a short-lived client of a network: only its ends, and no layers unless some are private."""
        return replace(self, layers=ENDS) if self.private == NOTHING_PRIVATE else self

    def check_standalone(self) -> None:
        """Raise if these settings need other nodes. How many layers the model has is known only once it is loaded."""
        if not self.load_ends:
            raise ConfigError(
                f"load_ends = false of '{self.id}' needs a network: without one, its layers are useless.",
                hint="Leave it out, or join a network with network.listen or network.connect.",
            )
        if self.segments is None:
            return
        if not self.segments:
            raise ConfigError(
                f"layers = \"{ENDS}\" of '{self.id}' needs a network: without one, no node computes the layers.",
                hint="Leave it out, or join a network with network.listen or network.connect.",
            )
        try:
            covering(self.segments, self.segments[-1].end)
        except ConfigError as error:
            raise ConfigError(
                f"layers = {format_value(self.layers)} of '{self.id}' leave some out, and there is no network: {error.message}",
                hint="Name all layers from 0 to the last, or join a network with network.listen or network.connect.",
            ) from None

    def _check_layers(self) -> None:
        ordered = sorted(self.segments or ())
        for before, after in pairwise(ordered):
            if after.start < before.end:
                raise unusable("layers", self.layers, f"{before} and {after} overlap: name each layer once.")
        if self.segments == () and not self.load_ends:
            raise ConfigError(
                f"Nothing of '{self.id}' would be loaded: layers = \"{ENDS}\", and load_ends is false.",
                hint="Leave one of them out.",
            )

    def _check_private(self) -> None:
        private = self.private
        if private == NOTHING_PRIVATE:
            return
        if not self.load_ends:
            raise ConfigError(
                f"private_layers of '{self.id}' needs a node that answers requests, but load_ends is false.",
                hint="Leave private_layers out on a node that only computes layers for others.",
            )
        held = {layer for layers in self.segments or () for layer in layers.layers()}
        if self.segments is not None and not held.issuperset(range(private.first)):
            raise ConfigError(
                f"layers = {format_value(self.layers)} of '{self.id}' lack the first {private.first} layers, which are private.",
                hint="Add them to layers, or leave layers out.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the API listens and which clients it accepts. `read_api_key` checks that it may listen there without a key.

    api: whether there is an HTTP server at all; None where the node has the ends of a model.
    keys: folder of keys, None for that of the machine. If set, keys are required even while it is empty.
    tls_cert, tls_key: PEM files of the certificate and its private key; both or none.
    max_body, max_upload: bytes of a request, and of an uploaded file.
    keep_alive: seconds after which a silent stream sends a comment.
    ready_within: seconds for which a generated token proves that the node is ready.
    """

    api: bool | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    keys: Path | None = None
    allow_insecure: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cors_origins: tuple[str, ...] = ()
    max_body: int = 8 << 20
    max_upload: int = 200 * 10**6
    keep_alive: float = 10.0
    ready_within: float = 30.0

    def __post_init__(self) -> None:
        if not is_address(self.host) and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", self.host):
            raise unusable("host", self.host, "Give a name or an address alone, such as localhost, 127.0.0.1 or ::1.")
        if type(self.port) is not int or not 0 <= self.port <= 65535:
            raise unusable("port", self.port, "Give a whole number from 1 to 65535, or 0 for any free port.")
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ConfigError(f"{name} is set, but {other} is not.", hint="HTTPS needs a certificate and its private key.")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s,]+", origin):
                raise unusable("cors_origins", origin, "Write origins as https://example.org, without a path, or * for all.")
        check_whole("max_body", self.max_body, minimum=1)
        check_whole("max_upload", self.max_upload, minimum=1)
        check_seconds("keep_alive", self.keep_alive)
        check_seconds("ready_within", self.ready_within)

    @property
    def beyond_loopback(self) -> bool:
        """Whether other machines can reach the server. A host name other than localhost counts as reachable."""
        import ipaddress  # only needed to start a server

        if not is_address(self.host):
            return self.host.lower() != "localhost"
        address = ipaddress.ip_address(self.host)
        inner = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return not (inner or address).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Limits of the server.

    max_jobs: accepted and unfinished jobs at once.
    max_tokens: the largest max_tokens of a request; None for no cap.
    drain_timeout: seconds that running answers get at shutdown.
    max_connections: open connections.
    max_waiting_per_address: open connections of one address that have no complete request.
    header_timeout: seconds for a handshake and the headers of a request.
    idle_timeout: seconds that a connection may wait for its next request.
    share_prefixes: whether a key may use prefixes that another key's prompts have left in the cache.
    key_disk, key_batches: bytes that a key may store, and batches that it may have open, where its own limits say nothing.
    """

    max_jobs: int = 1024
    max_tokens: int | None = None
    drain_timeout: float = 30.0
    max_connections: int = 2048
    max_waiting_per_address: int = 1024
    header_timeout: float = 10.0
    idle_timeout: float = 30.0
    share_prefixes: bool = False
    key_disk: int = 2 * 10**9
    key_batches: int = 32

    def __post_init__(self) -> None:
        check_whole("max_jobs", self.max_jobs, minimum=1)
        check_whole("key_disk", self.key_disk, minimum=1)
        check_whole("key_batches", self.key_batches, minimum=1)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, minimum=1)
        check_whole("max_connections", self.max_connections, minimum=1)
        check_whole("max_waiting_per_address", self.max_waiting_per_address, minimum=1)
        check_seconds("header_timeout", self.header_timeout)
        check_seconds("idle_timeout", self.idle_timeout)
        check_seconds("drain_timeout", self.drain_timeout, allow_zero=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceConfig:
    """A workspace: a folder of jobs to run.

    jobs: how many run at once.
    deaths: fail a job after the server died this many times while running it alone.
    keep_responses: seconds for which responses are stored.
    by_default: the path was not set, so the node starts without a workspace where it cannot be created.
    """

    path: Path | None = None
    jobs: int = 64
    deaths: int = 3
    keep_responses: float = 30 * 24 * 3600.0
    by_default: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        check_whole("jobs", self.jobs, minimum=1)
        if self.jobs > MAX_WORKSPACE_JOBS:
            raise unusable("jobs", self.jobs, f"Give at most {MAX_WORKSPACE_JOBS}: more would only wait in the engine.")
        check_whole("deaths", self.deaths, minimum=1)
        check_seconds("keep_responses", self.keep_responses)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        if self.format not in LOG_FORMATS:
            raise unusable("format", self.format, f"Use one of: {', '.join(LOG_FORMATS)}.")
        if self.level not in LOG_LEVELS:
            raise unusable("level", self.level, f"Use one of: {', '.join(LOG_LEVELS)}.")


def host_name() -> str:
    """This machine's host name, with the characters replaced that a node id may not have."""
    import socket

    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("._-")[:64] or "penstock"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """All settings of one node.

    aliases: further names that clients may use for hosted models.
    adopts: no model was set, so in a network the node takes the one that the others run.
    """

    node_id: str = field(default_factory=host_name)
    models: tuple[HostedModelConfig, ...] = field(default_factory=lambda: (HostedModelConfig(),))
    server: ServerConfig = field(default_factory=ServerConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    workspace: WorkspaceConfig = field(default_factory=WorkspaceConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    log: LogConfig = field(default_factory=LogConfig)
    aliases: Mapping[str, str] = field(default_factory=dict)
    max_pipes: int = 1
    model_validation: bool = True
    adopts: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.node_id):
            raise unusable("node_id", self.node_id, "Use up to 64 letters, digits, dots, dashes and underscores.")
        check_whole("max_pipes", self.max_pipes, minimum=1)
        self._check_models()
        if self.workspace.path is not None and not any(model.load_ends for model in self.models):
            raise ConfigError(
                "A node that holds only layers cannot run the jobs of a workspace.",
                hint="Leave workspace.path (--workspace) out, or load the ends of a model (load_ends).",
            )
        if not self.opens_port and self.workspace.path is None and any(model.load_ends for model in self.models):
            raise ConfigError(
                "No request could reach this node: it has the ends of a model, but neither an API nor a workspace.",
                hint="Leave --no-api out, set workspace.path (--workspace), or use --no-ends to only hold layers for others.",
            )
        if not self.network.enabled:
            for model in self.models:
                model.check_standalone()

    @property
    def opens_port(self) -> bool:
        """Whether it serves HTTP."""
        return any(model.load_ends for model in self.models) if self.server.api is None else self.server.api

    def _check_models(self) -> None:
        hosted = [model.id for model in self.models]
        if not hosted:
            raise ConfigError("The node hosts no model.", hint="Add [[hosted_models]] with an id.")
        for index, name in enumerate(hosted):
            if name in hosted[:index]:
                raise ConfigError(f"The model '{name}' is hosted twice.", hint="Give each [[hosted_models]] an id of its own.")
        for alias, target in self.aliases.items():
            if alias in hosted:
                raise ConfigError(
                    f"The alias '{alias}' is also the id of a hosted model.", hint="Rename the alias, or leave it out."
                )
            if target not in hosted:
                raise ConfigError(
                    f"The alias '{alias}' points to '{target}', which this node does not host.",
                    hint=f"It can point to: {', '.join(hosted)}.",
                )
