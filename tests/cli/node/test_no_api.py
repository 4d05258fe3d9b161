"""Nodes without an HTTP port: those that only hold layers, and `penstock serve --no-api`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.config.node import HostedModelConfig, NodeConfig, ServerConfig, WorkspaceConfig
from penstock.config.settings import Settings, load_settings
from penstock.errors import ConfigError
from tests.certificates import write_certificate
from tests.cli.test_cli import cli
from tests.pipes_live.nodes import until
from tests.server import clean_environment, free_port, running_server, until_ready
from tests.warm.process import Process

LAYERS = {"hosted_models.load_ends": False, "network.open": True, "network.connect": ["tcp/127.0.0.1:9"]}


def settings(file: Path | None = None, environ: dict[str, str] | None = None, **flags: Any) -> Settings:
    return load_settings(file, environ or {}, LAYERS | {key.replace("__", "."): value for key, value in flags.items()})


def test_a_node_that_only_holds_layers_opens_no_port() -> None:
    assert not settings().node.opens_port
    assert settings(hosted_models__load_ends=True).node.opens_port
    assert load_settings(None, {}, {}).node.opens_port


def test_any_setting_of_the_server_opens_the_port_of_such_a_node(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[server]\nport = 8000\n", encoding="utf-8")
    assert settings(file).node.opens_port
    assert settings(environ={"PENSTOCK_HOST": "127.0.0.1"}).node.opens_port
    assert settings(server__port=8000).node.opens_port
    assert settings(server__api=True).node.opens_port
    assert not settings(file, server__api=False).node.opens_port, "a flag comes before the file"


@pytest.mark.parametrize("other", [{"server__port": 9}, {"environ": {"PENSTOCK_PORT": "9"}}])
def test_a_port_beside_no_api_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"server\.port is set .* but server\.api is false \(--no-api\)"):
        settings(server__api=False, **other)


def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[server]\napi = false\nport = 9\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"server\.port is set"):
        settings(file)


def test_a_node_with_ends_needs_an_api_or_a_workspace() -> None:
    with pytest.raises(ConfigError, match="No request could reach this node"):
        NodeConfig(server=ServerConfig(api=False))
    assert not NodeConfig(server=ServerConfig(api=False), workspace=WorkspaceConfig(path=Path("jobs"))).opens_port


def test_without_a_port_no_key_is_asked_for() -> None:
    assert not settings(environ={"PENSTOCK_API_KEY": "short"}).node.opens_port
    with pytest.raises(ConfigError, match="fewer than 8 characters"):
        settings(environ={"PENSTOCK_API_KEY": "short"}, server__port=0)


def test_a_model_config_alone_says_the_same() -> None:
    layers = HostedModelConfig(load_ends=False)
    network = settings().node.network
    assert not NodeConfig(models=(layers,), network=network).opens_port
    assert NodeConfig(models=(layers, HostedModelConfig(id="other")), network=network).opens_port


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--no-ends", "--layers", "0:1"], "No port would be opened; --port PORT opens one."),
        (["--no-ends", "--layers", "0:1", "--port", "1234"], "The API would listen on 127.0.0.1, port 1234."),
        (["--tls-cert", "cert.pem", "--port", "1234"], "The API would listen on 127.0.0.1, port 1234, with HTTPS."),
    ],
)
def test_a_dry_run_says_which_port_would_be_opened(flags: list[str], said: str, tiny_chat_model: Path, tmp_path: Path) -> None:
    if "--tls-cert" in flags:
        flags = [*write_certificate(tmp_path).flags, *flags[2:]]
    done = cli("serve", "--dry-run", "--model", str(tiny_chat_model), "--router", "in-process", *flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == said


# ---- real nodes ----


class Node:
    def __init__(self, process: Process, folder: Path) -> None:
        self.process = process
        self.folder = folder

    def said(self) -> str:
        return (self.folder / "stdout").read_text(encoding="utf-8")

    def log(self) -> str:
        return (self.folder / "stderr").read_text(encoding="utf-8")

    def listens(self) -> bool:
        """Whether the process has a TCP socket that listens, by the kernel's own table."""
        links = []
        for path in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed meanwhile
                links.append(os.readlink(path))
        own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
        lines = [line.split() for line in Path(f"/proc/{self.process.pid}/net/tcp").read_text().splitlines()[1:]]
        return any(line[3] == "0A" and line[9] in own for line in lines)


@contextmanager
def started(folder: Path, *args: str) -> Iterator[Node]:
    folder.mkdir()
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        process = Process("penstock.cli", ["serve", *args], clean_environment(), stdout=stdout, stderr=stderr)
    node = Node(process, folder)
    try:
        yield node
    finally:
        process.kill()
        process.wait()


def is_up(node: Node) -> bool:
    assert node.process.poll() is None, node.log()
    return "Press Ctrl-C to stop" in node.said()


def test_a_node_without_a_port_lends_its_layers_and_leaves_in_good_order(tiny_chat_model: Path, tmp_path: Path) -> None:
    endpoint = f"tcp/127.0.0.1:{free_port()}"
    common = ("--model", str(tiny_chat_model), "--dtype", "float32", "--kv-memory", "50MB", "--open-network")
    ends = ("--layers", "ends", "--listen", endpoint, "--node-id", "home", "--workspace", "none")
    with running_server(*common, *ends, ready=False) as home:
        lends = ("--connect", endpoint, "--network-mode", "client", "--node-id", "cellar", "--no-ends")
        with started(tmp_path / "cellar", *common, *lends) as cellar:
            until(lambda: is_up(cellar), "the node without a port")
            until_ready(home)
            assert "API        none" in cellar.said()
            assert "http://" not in cellar.said()
            assert not cellar.listens()
            assert [hop["node"] for hop in home.get("/network")["pipes"][0]["route"]["hops"]] == ["cellar"]
            cellar.process.send_signal(signal.SIGTERM)
            assert cellar.process.wait(timeout=60) == 0
            assert "Stopping." in cellar.log()
            assert "Traceback" not in cellar.log()
            until(lambda: len(home.get("/network")["nodes"]) == 1, "the node to leave")


def test_a_node_with_ends_and_no_api_works_on_its_workspace(tiny_chat_model: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "jobs"
    done = cli("work", str(workspace), "Hello", "--max-tokens", "2")
    assert done.returncode == 0, done.stderr
    flags = (
        "--no-api",
        "--network",
        "none",
        "--model",
        str(tiny_chat_model),
        "--kv-memory",
        "50MB",
        "--workspace",
        str(workspace),
    )
    with started(tmp_path / "node", *flags) as node:
        until(lambda: is_up(node), "the node")
        assert f"Workspace  {workspace}" in node.said()
        assert not node.listens()
        until(lambda: (workspace / "output" / done.stdout.strip()).exists(), "the job", node.log)
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(timeout=60) == 0
