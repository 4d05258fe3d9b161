"""Real servers for tests: `penstock serve` in a process of its own, and the same API in a thread of this process."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from tests import warm

if TYPE_CHECKING:
    from penstock.doors.access.keys import Keys
    from penstock.engine.hosted_model import HostedModel
    from penstock.pipes.loading.model_manager import LoadedModel

KV_MEMORY = 400_000_000  # bytes; enough for the default model's whole context. Pages are allocated only when written.
SMALL_KV_MEMORY = 5_000_000  # the same for the small model
_in_use: set[int] = set()  # loaded models on which a server runs


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without the user's own Penstock settings."""
    places = ("PENSTOCK_CACHE", "PENSTOCK_HOME")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_") or name in places}
    return kept | more


@dataclass
class Api:
    """A server from its clients' point of view. `url` is without `/v1`."""

    url: str
    key: str = field(default="", kw_only=True)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def get(self, path: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=10) as answer:
            body: dict[str, Any] = json.load(answer)
            return body

    def jobs(self) -> list[dict[str, Any]]:
        return [job for model in self.get("/status")["models"] for job in model["jobs"]]

    def log(self) -> str:
        """The log, with all lines about requests answered before this call."""
        raise NotImplementedError

    def logged(self, field: str) -> list[int]:
        """This logged number of every chat so far, in the order in which they ended."""
        return [int(found) for found in re.findall(rf"path=/v1/chat/completions .*\b{field}=(\d+)", self.log())]


@dataclass
class Server(Api):
    """A server in its own process."""

    process: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path

    def log(self) -> str:
        if self.process.poll() is None:
            self.get("/health")  # a line is logged just after its answer; this request is handled after that
        return self.stderr.read_text(encoding="utf-8")

    def leave(self, sig: int = signal.SIGTERM) -> int:
        """Ask the server to stop; return its exit code."""
        self.process.send_signal(sig)
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        """Kill the server without notice, as the kernel does when memory runs out."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(ConnectionError):  # what a warm start has forked dies a moment later
            while True:
                socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
                time.sleep(0.001)


@dataclass
class ServerThread(Api):
    """A server in a thread of this process; `hosted` is the model that it serves."""

    hosted: HostedModel
    lines: io.StringIO

    def log(self) -> str:
        self.get("/health")
        return self.lines.getvalue()


@contextmanager
def running_server(*args: str, config: str = "", ready: bool = True, **env: str) -> Iterator[Server]:
    """Run a server with further flags, a node file or variables; it must stop cleanly unless the test killed it. With `ready`
    False, do not wait until it can answer."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        if config:
            Path(folder, "node.toml").write_text(config, encoding="utf-8")
            args = (*args, "--config", str(Path(folder, "node.toml")))
        # a warm start does not obey Python's own variables
        start = [sys.executable, "-m", "penstock.cli"] if "PYTHONPATH" in env else warm.penstock()
        command = [*start, "serve", "--port", "0", *args]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                command, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, env=clean_environment(**env)
            )
        try:
            server = Server(_base_url(process, out, err), process, out, err, key=env.get("PENSTOCK_API_KEY", ""))
            if ready:
                assert server.get("/ready") == {"status": "ready"}
            yield server
            if process.returncode is None:
                assert server.leave() == 0, server.log()
            assert "Traceback" not in server.log(), server.log()
        finally:
            process.kill()
            process.wait()


@contextmanager
def server_thread(
    loaded: LoadedModel, *args: str, config: str = "", keys: Keys | None = None, key: str = ""
) -> Iterator[ServerThread]:
    """Serve the API over a model that this process has loaded, with the flags, node file and log of `penstock serve`. It starts
    quickly. Two servers on one model would write into the same KV memory, so that is refused."""
    from penstock.cli.node.logs import KeyValue
    from penstock.doors.access.keys import Keys
    from penstock.doors.access.usage_log import UsageLog
    from penstock.doors.api_config import ApiConfig
    from penstock.doors.app.job_operations import ALL_JOBS
    from penstock.doors.app.listener import Listener, bind_port, start_listening
    from penstock.doors.app.server import OAIHttpServer
    from penstock.doors.connections.tls import ServerCertificate
    from penstock.doors.generation.catalog import ModelCatalog
    from penstock.doors.generation.served_model import ServedModel
    from penstock.doors.jobs.backlog import Backlog
    from penstock.engine.hosted_model import host_standalone
    from penstock.workspace.store.workspace import Workspace
    from tests.tokenizer_files import share_fork_server

    node = _node_config(args, config)
    keys = keys or Keys(None, key or None)
    assert id(loaded) not in _in_use, "another server runs on this model"
    _in_use.add(id(loaded))
    kept = _with_kv(loaded, node.models[0].kv_memory)
    hosted = host_standalone(kept, node.engine, node=node.node_id, max_jobs=node.limits.max_jobs)
    served = ServedModel(hosted)
    share_fork_server(served.grammars)
    catalog = ModelCatalog({hosted.name: served}, node.aliases)
    api = ApiConfig(catalog, node.server, node.limits, keys, UsageLog(keys.path))
    backlog = None
    if node.workspace.path is not None:
        workspace = Workspace(node.workspace.path, create=True)
        backlog = Backlog(workspace, node.workspace, api, ALL_JOBS)
    door = OAIHttpServer(api, node_id=node.node_id, backlog=backlog)
    ready = threading.Event()
    limits = replace(node.limits, drain_timeout=5.0)
    certificate = ServerCertificate(node.server.tls_cert, node.server.tls_key) if node.server.tls_cert else None
    tls = None if certificate is None else certificate.context
    listener = Listener(door, limits, tls=tls, on_ready=ready.set, on_leaving=lambda: None, abort=hosted.stop)
    taken = bind_port(node.server.host, node.server.port)
    scheme = "http" if certificate is None else "https"
    start_listening(taken)
    thread = threading.Thread(target=listener.run, kwargs={"sockets": [taken]}, daemon=True)
    with _log(node.log.level, KeyValue()) as lines:
        hosted.start()
        api.usage.start()
        if backlog is not None:
            backlog.start()
        thread.start()
        try:
            assert ready.wait(60), lines.getvalue()
            yield ServerThread(f"{scheme}://127.0.0.1:{taken.getsockname()[1]}", hosted, lines, key=key)
            listener.handle_exit(signal.SIGTERM, None)
            thread.join(60)
            assert not thread.is_alive()
            assert "Traceback" not in lines.getvalue(), lines.getvalue()
        finally:
            listener.should_exit = listener.force_exit = True
            if backlog is not None:
                backlog.stop()
            api.usage.stop()
            hosted.stop()
            thread.join(60)
            taken.close()
            _in_use.remove(id(loaded))


def _node_config(args: tuple[str, ...], config: str) -> Any:
    """Load the node's settings, by default without a workspace: the default one would be shared with other servers."""
    from penstock.config.settings import load_settings
    from penstock.config.table import SETTINGS

    keys = {setting.flag: setting.key for setting in SETTINGS}
    given: Mapping[str, str] = dict(zip(args[::2], args[1::2], strict=True))
    flags = {"--port": "0", "--workspace": "none", **given}
    with TemporaryDirectory() as folder:
        file = Path(folder, "node.toml")
        file.write_text(config, encoding="utf-8")
        by_key = {keys[flag]: value for flag, value in flags.items()}
        return load_settings(file, {"PENSTOCK_HOME": os.devnull}, by_key).node


def _with_kv(loaded: LoadedModel, kv_memory: int | None) -> LoadedModel:
    """The same weights with KV memory limited to this."""
    if kv_memory is None:
        return loaded
    (segment,) = loaded.segments
    size = segment.block_size * loaded.spec.kv_width * loaded.spec.num_layers * loaded.dtype.itemsize
    smaller = copy.copy(segment)
    smaller.kv_blocks = kv_memory // size
    assert 2 <= smaller.kv_blocks <= segment.kv_blocks
    return replace(loaded, segments=(smaller,))


@contextmanager
def _log(level: str, formatter: logging.Formatter) -> Iterator[io.StringIO]:
    """What `penstock serve` would write to stderr."""
    lines, root, own = io.StringIO(), logging.getLogger(), logging.getLogger("penstock")
    handler, before = logging.StreamHandler(lines), own.level
    handler.setFormatter(formatter)
    root.addHandler(handler)
    own.setLevel(level.upper())
    try:
        yield lines
    finally:
        root.removeHandler(handler)
        own.setLevel(before)


def load_small_model(folder: Path) -> LoadedModel:
    """Load the small model again, for a second server."""
    from penstock.config.engine import EngineConfig
    from penstock.config.node import DEFAULT_MODEL
    from penstock.pipes.loading.model_manager import ModelManager

    loaded = ModelManager(EngineConfig()).load(str(folder), dtype="float32", kv_memory=SMALL_KV_MEMORY)
    return replace(loaded, name=DEFAULT_MODEL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until_ready(server: Server, patience: float = 60.0) -> None:
    """Wait until every model that the server offers generates a token."""
    until = time.monotonic() + patience
    while True:
        try:
            server.get("/ready")
            return
        except urllib.error.HTTPError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _base_url(process: subprocess.Popen[bytes], out: Path, err: Path) -> str:
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        found = re.search(r"(?:Base URL +|--url )(https?://[^/\s]+)", out.read_text(encoding="utf-8"))
        if found:
            return found.group(1)
        time.sleep(0.05)
    raise AssertionError(f"The server did not start (exit code {process.poll()}):\n{err.read_text(encoding='utf-8')}")


@pytest.fixture(scope="session")
def loaded_model(default_model_folder: Path) -> LoadedModel:
    """The default model, loaded once for all servers and engines of this process that come one after the other."""
    from penstock.config.engine import EngineConfig
    from penstock.config.node import DEFAULT_MODEL
    from penstock.pipes.loading.model_manager import ModelManager

    return ModelManager(EngineConfig()).load(DEFAULT_MODEL, kv_memory=KV_MEMORY)


@pytest.fixture(scope="session")
def small_model_folder(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.small_model import write_small_model

    return write_small_model(tmp_path_factory.mktemp("model") / "small", default_model_folder)


@pytest.fixture(scope="session")
def small_model(small_model_folder: Path) -> LoadedModel:
    """A small random model with the name and tokenizer of the default one, for servers whose text does not matter."""
    return load_small_model(small_model_folder)


@pytest.fixture(scope="module")
def penstock_server(loaded_model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """One server with the default model for all tests of a module."""
    flags = ("--node-id", "desk", "--workspace", str(tmp_path_factory.mktemp("server") / "workspace"))
    with server_thread(loaded_model, *flags) as server:
        yield server
