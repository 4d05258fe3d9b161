"""`penstock config`, driven as people drive it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock.config.settings import load_settings
from penstock.config.table import SETTINGS
from tests.cli.test_cli import cli

KEY = "a-key-nobody-may-see"


def shown(*args: str, **env: str) -> dict[str, dict[str, object]]:
    done = cli("config", "--json", *args, **env)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)["settings"]


def test_every_flag_is_explained() -> None:
    for flag in ("--help", "-h"):
        done = cli("config", flag)
        assert done.returncode == 0
        assert done.stdout.startswith("Usage: penstock config")
    words = done.stdout.split()
    assert [s.key for s in SETTINGS if s.flag not in words] == []


def test_settings_are_shown_with_where_they_come_from(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[server]\nport = 1\nhost = "localhost"\n[scheduler]\nprefix_cache = true\n', encoding="utf-8")
    env = {"PENSTOCK_PORT": "2", "PENSTOCK_MAX_BODY": "1MiB"}
    done = cli("config", "-c", str(file), "--port", "3", "--no-prefix-cache", **env)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert lines[0] == ["setting", "value", "from"]
    assert ["server.port", "3", "flag --port"] in lines
    assert ["server.host", "localhost", f"file {file}"] in lines
    assert ["server.max_body", "1MiB", "environment PENSTOCK_MAX_BODY"] in lines
    assert ["scheduler.prefix_cache", "false", "flag --prefix-cache"] in lines
    assert ["hosted_models[0].layers", "none", "default"] in lines


def test_json_has_values_as_programs_want_them() -> None:
    found = shown("--cors-origins", "https://a.example,*", "--aliases", "gpt-4o=smollm2-135m", "--kv-memory", "2GiB")
    assert found["server.cors_origins"] == {"value": ["https://a.example", "*"], "source": "flag --cors-origins"}
    assert found["aliases"]["value"] == {"gpt-4o": "smollm2-135m"}
    assert found["hosted_models[0].kv_memory"]["value"] == 2 << 30
    assert found["server.api_key"] == {"set": False, "source": "default"}


def test_the_node_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("[server]\nport = 7\n", encoding="utf-8")
    done = cli("config", "--json", PENSTOCK_CONFIG=str(file))
    assert json.loads(done.stdout)["file"] == str(file)
    assert json.loads(done.stdout)["settings"]["server.port"]["value"] == 7


def test_a_key_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "key.txt"
    file.write_text(KEY, encoding="utf-8")
    by_file = cli("config", "--host", "0.0.0.0", "--api-key-file", str(file))
    by_variable = cli("config", "--host", "0.0.0.0", PENSTOCK_API_KEY=KEY)
    in_json = cli("config", "--json", PENSTOCK_API_KEY=KEY)
    assert re.split(r" {3,}", by_file.stdout.splitlines()[-1]) == ["server.api_key", "set (not shown)", f"file {file}"]
    assert by_variable.stdout.splitlines()[-1].endswith("environment PENSTOCK_API_KEY")
    assert json.loads(in_json.stdout)["settings"]["server.api_key"] == {"set": True, "source": "environment PENSTOCK_API_KEY"}
    for done in (by_file, by_variable, in_json):
        assert done.returncode == 0
        assert KEY not in done.stdout + done.stderr


def test_the_example_is_a_node_file(tmp_path: Path) -> None:
    done = cli("config", "--example", PENSTOCK_CONFIG=str(tmp_path / "not-yet.toml"))
    assert (done.returncode, done.stderr) == (0, "")
    file = tmp_path / "node.toml"
    file.write_text(done.stdout, encoding="utf-8")
    assert load_settings(file, {}, {}).node == load_settings(None, {}, {}).node


@pytest.mark.parametrize(
    "args, message",
    [
        (["--port", "eighty"], '--port: port = "eighty" cannot be used. Give a whole number.'),
        (["--port", "99999"], "--port: port = 99999 cannot be used."),
        (["--prefill-chunk-size", "0"], "--prefill-chunk-size: prefill_chunk_size = 0 cannot be used."),
        (["--policy", "fifo"], "Give one of: fcfs, edf, lrs."),
        (["--layers", "0-10"], "--layers: '0-10' is not a layer range."),
        (["--kv-memory", "lots"], '"1.5GB", "800MB" or "2GiB"'),
        (["--max-pipes", "0"], "--max-pipes: max_pipes = 0 cannot be used."),
        (["--private-layers", "2"], "--private-layers: '2' is not a pair of private layer counts."),
        (
            ["--listen", "127.0.0.1:7447"],
            '--listen: listen = "127.0.0.1:7447" cannot be used. Write an endpoint as tcp/127.0.0.1:7447.',
        ),
        (["--connect", "tls/kitchen"], '--connect: connect = "tls/kitchen" cannot be used.'),
        (["--network-mode", "star"], "Give one of: peer, router, client."),
        (["--prot", "80"], "Possible options: --host, --port"),
        (["--api-key", KEY], "No such option"),
    ],
)
def test_wrong_usage_is_named_and_leaves_with_64(args: list[str], message: str) -> None:
    done = cli("config", *args)
    assert (done.returncode, done.stdout) == (64, "")
    assert message in done.stderr


@pytest.mark.parametrize(
    "text, env, message",
    [
        ("[scheduler]\npolcy = 'edf'", {}, ["there is no setting 'scheduler.polcy'.", "Did you mean 'scheduler.policy'?"]),
        ("[server]\nport 80", {}, ["is not valid TOML", "at line 2"]),
        ("", {"PENSTOCK_POTR": "1"}, ["PENSTOCK_POTR", "Did you mean PENSTOCK_PORT?"]),
        ("[server]\nhost = '0.0.0.0'", {}, ["without an API key", "PENSTOCK_API_KEY"]),
        ("[workspace]\njobs = 0", {}, ["workspace.jobs = 0", "from 1 up"]),
        ("[network]\nlisten = ['tcp/0.0.0.0:7447']", {}, ["The network is closed", "network.open = true (--open-network)"]),
        ("[[hosted_models]]\nload_ends = false", {}, ["load_ends = false", "join a network"]),
    ],
)
def test_wrong_settings_are_two_lines_and_leave_with_1(
    text: str, env: dict[str, str], message: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text, encoding="utf-8")
    done = cli("config", "--config", str(file), **env)
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert all(part in done.stderr for part in message)
