"""The configs of a node check themselves when made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config.api_key import api_key_source, read_api_key
from penstock.config.network import NetworkConfig
from penstock.config.node import (
    DEFAULT_MODEL,
    HostedModelConfig,
    LimitsConfig,
    LogConfig,
    NodeConfig,
    ServerConfig,
    host_name,
)
from penstock.domain.topology import LayerRange
from penstock.errors import ConfigError

KEY = "a-long-enough-key"


def test_a_node_needs_no_configuration() -> None:
    node = NodeConfig()
    assert [model.id for model in node.models] == [DEFAULT_MODEL]
    assert (node.server.host, node.server.port) == ("127.0.0.1", 8000)
    assert node.node_id == host_name()


@pytest.mark.parametrize(
    "kind, field, value, message",
    [
        (NodeConfig, "node_id", "", "node_id = "),
        (NodeConfig, "node_id", "my node", 'node_id = "my node" cannot be used. Use up to 64 letters'),
        (NodeConfig, "node_id", "x" * 65, "up to 64"),
        (NodeConfig, "models", (), "hosts no model"),
        (HostedModelConfig, "id", " ", "is empty"),
        (HostedModelConfig, "device", "toaster", "auto, cpu, cuda, cuda:1, cuda:0,cuda:1 or mps"),
        (HostedModelConfig, "dtype", "int3", "auto, bfloat16, float32"),
        (HostedModelConfig, "layers", "0-10", "is not a layer range"),
        (HostedModelConfig, "layers", "0:10,5:5", "is empty or negative"),
        (HostedModelConfig, "layers", "20:30,0:21", "0:21 and 20:30 overlap: name each layer once."),
        (HostedModelConfig, "max_memory", 0, "max_memory = 0 cannot be used."),
        (HostedModelConfig, "kv_memory", 1.5, "kv_memory = 1.5 cannot be used."),
        (ServerConfig, "host", "", "host = "),
        (ServerConfig, "host", "127.0.0.1:80", "an address alone"),
        (ServerConfig, "host", "[::1]", "an address alone"),
        (ServerConfig, "host", "http://localhost", "an address alone"),
        (ServerConfig, "port", 65536, "from 1 to 65535"),
        (ServerConfig, "port", -1, "from 1 to 65535"),
        (ServerConfig, "port", True, "from 1 to 65535"),
        (ServerConfig, "cors_origins", ("https://a.example/",), "without a path"),
        (ServerConfig, "cors_origins", ("a.example",), "without a path"),
        (ServerConfig, "tls_cert", Path("cert.pem"), "tls_cert is set, but tls_key is not."),
        (ServerConfig, "tls_key", Path("key.pem"), "tls_key is set, but tls_cert is not."),
        (ServerConfig, "max_body", 0, "max_body"),
        (ServerConfig, "max_upload", 0, "max_upload"),
        (ServerConfig, "keep_alive", 0, "above 0"),
        (ServerConfig, "ready_within", float("inf"), "above 0"),
        (LimitsConfig, "max_jobs", 0, "from 1 up"),
        (LimitsConfig, "max_tokens", 0, "from 1 up"),
        (LimitsConfig, "drain_timeout", -1, "from 0 up"),
        (LimitsConfig, "max_connections", 0, "from 1 up"),
        (LimitsConfig, "max_waiting_per_address", 0, "from 1 up"),
        (LimitsConfig, "header_timeout", 0, "above 0"),
        (LimitsConfig, "idle_timeout", 0, "above 0"),
        (LogConfig, "format", "xml", "text, json"),
        (LogConfig, "level", "loud", "debug, info, warning, error"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(kind: type, field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        kind(**{field: value})
    assert message in str(refused.value)
    assert refused.value.hint


def test_layers_are_segments() -> None:
    assert HostedModelConfig(layers="0:10, 10:30").segments == (LayerRange(0, 10), LayerRange(10, 30))
    assert HostedModelConfig().segments is None


def test_the_host_name_is_always_a_node_id(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, expected in {"büro pc": "b-ro-pc", "": "penstock", "-": "penstock", "pi.local": "pi.local"}.items():
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        assert NodeConfig().node_id == expected


# ---- models and aliases ----


def test_a_model_cannot_be_hosted_twice() -> None:
    with pytest.raises(ConfigError, match="'a' is hosted twice"):
        NodeConfig(models=(HostedModelConfig(id="a"), HostedModelConfig(id="b"), HostedModelConfig(id="a")))


def test_an_alias_points_to_a_hosted_model_and_is_none() -> None:
    models = (HostedModelConfig(id="a"), HostedModelConfig(id="b"))
    assert NodeConfig(models=models, aliases={"gpt-4o": "b"}).aliases == {"gpt-4o": "b"}
    with pytest.raises(ConfigError, match=r"'gpt-4o' points to 'c', which this node does not host. It can point to: a, b\."):
        NodeConfig(models=models, aliases={"gpt-4o": "c"})
    with pytest.raises(ConfigError, match="'a' is also the id of a hosted model"):
        NodeConfig(models=models, aliases={"a": "b"})


def test_private_layers_are_for_a_node_that_answers_and_holds_them() -> None:
    assert HostedModelConfig(private_layers="2,1").private == (2, 1)
    assert HostedModelConfig(private_layers="2,1", layers="0:3").private == (2, 1)
    with pytest.raises(ConfigError, match="lack the first 2 layers"):
        HostedModelConfig(private_layers="2,1", layers="1:30")
    with pytest.raises(ConfigError, match="load_ends is false"):
        HostedModelConfig(private_layers="2,1", load_ends=False)
    for wrong in ("2", "a,b", "-1,2", "1,2,3"):
        with pytest.raises(ConfigError):
            HostedModelConfig(private_layers=wrong)


def test_a_node_may_hold_the_ends_alone_but_not_nothing() -> None:
    assert HostedModelConfig(layers="ends").segments == ()
    with pytest.raises(ConfigError, match="Nothing of 'smollm2-135m' would be loaded"):
        HostedModelConfig(layers="ends", load_ends=False)


# ---- layers that others hold ----

ALONE = NetworkConfig()
AMONG_OTHERS = NetworkConfig(connect=("tcp/127.0.0.1:7447",), open=True)


@pytest.mark.parametrize(
    "model, expected",
    [
        (HostedModelConfig(load_ends=False), "load_ends = false of 'smollm2-135m' needs a network"),
        (HostedModelConfig(layers="10:30"), "layers = \"10:30\" of 'smollm2-135m' leave some out"),
        (HostedModelConfig(layers="0:2,28:30"), "Segment 28:30 does not continue at layer 2."),
    ],
)
def test_a_part_of_a_model_needs_a_network(model: HostedModelConfig, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        NodeConfig(models=(HostedModelConfig(id="other"), model), network=ALONE)
    assert expected in refused.value.message
    assert "join a network with network.listen or network.connect" in refused.value.hint
    assert NodeConfig(models=(model,), network=AMONG_OTHERS).models == (model,)


def test_layers_that_begin_at_0_without_gaps_may_be_all() -> None:
    assert NodeConfig(models=(HostedModelConfig(layers="0:10,10:30"),), network=ALONE).models[0].segments


# ---- the API key ----


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "localhost", "LocalHost"])
def test_this_machine_alone_needs_no_key(host: str) -> None:
    assert read_api_key(ServerConfig(host=host), {}) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "fe80::1", "kitchen", "localhost.example.org", "127.1", "0"])
def test_beyond_this_machine_a_key_is_needed_or_the_word_that_none_is(host: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_api_key(ServerConfig(host=host), {})
    assert f"would listen on {host}, which other machines can reach, without an API key" in refused.value.message
    assert all(way in refused.value.hint for way in ("PENSTOCK_API_KEY", "server.api_key_file", "127.0.0.1", "--allow-insecure"))
    assert read_api_key(ServerConfig(host=host, allow_insecure=True), {}) is None
    assert read_api_key(ServerConfig(host=host), {"PENSTOCK_API_KEY": KEY}) == KEY


def test_a_key_comes_from_the_environment_before_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key.txt"
    file.write_text(f"{KEY}\n", encoding="utf-8")
    config = ServerConfig(api_key_file=file)
    assert (read_api_key(config, {}), api_key_source(config, {})) == (KEY, f"file {file}")
    environ = {"PENSTOCK_API_KEY": "another-long-key"}
    assert (read_api_key(config, environ), api_key_source(config, environ)) == (
        "another-long-key",
        "environment PENSTOCK_API_KEY",
    )
    assert api_key_source(ServerConfig(), {}) == ""


@pytest.mark.parametrize(
    "key, expected",
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"hunter2", "fewer than 8 characters"),
        (b"two words here", "spaces or characters"),
        ("schlüssel-schlüssel".encode(), "spaces or characters"),
        (b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8", "not text"),
    ],
)
def test_a_key_that_cannot_protect_is_refused_and_never_shown(key: bytes, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "key.txt"
    file.write_bytes(key)
    with pytest.raises(ConfigError, match=expected) as refused:
        read_api_key(ServerConfig(api_key_file=file), {})
    assert str(file) in refused.value.message
    if expected != "not text":
        text = key.decode()
        with pytest.raises(ConfigError, match=expected) as again:
            read_api_key(ServerConfig(), {"PENSTOCK_API_KEY": text})
        assert not text.strip() or text not in str(refused.value) + str(again.value)


def test_a_key_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory\."):
        read_api_key(ServerConfig(api_key_file=tmp_path / "none.txt"), {})
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory\."):
        read_api_key(ServerConfig(api_key_file=tmp_path), {})
