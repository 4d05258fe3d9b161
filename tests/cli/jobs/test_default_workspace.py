"""`penstock work`, `flow` and `drain` without a WORKSPACE use that of `penstock serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.jobs.workspaces import default_folder
from penstock.errors import ConfigError
from tests.jobs import cli


def waiting(state: Path) -> list[str]:
    folder = state / "penstock" / "workspace" / "input" / "ready"
    return [(job / "prompt.txt").read_text(encoding="utf-8") for job in sorted(folder.iterdir())]


def test_a_job_is_submitted_listed_and_fetched_without_naming_a_folder(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    ids = [
        cli("work", "Name three rivers.", **env).stdout.decode().strip(),
        cli("work", "-", stdin=b"From a pipe.", **env).stdout.decode().strip(),
        cli("work", stdin=b"From a pipe too.", **env).stdout.decode().strip(),
    ]
    assert waiting(tmp_path) == ["Name three rivers.", "From a pipe.", "From a pipe too."]
    assert b"3 queued." in cli("flow", **env).stdout
    done = cli("flow", ids[0], **env)
    assert (done.returncode, done.stderr[:10]) == (2, b"not ready:")
    assert cli("flow", "-", stdin=ids[1].encode(), **env).returncode == 2
    assert cli("flow", "--cancel", ids[2], **env).stdout == b"Cancelled.\n"


def test_an_argument_that_is_a_folder_or_comes_with_a_pipe_is_the_workspace(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert cli("work", tmp_path / "jobs", stdin=b"From a pipe.", **env).returncode == 0
    assert not (tmp_path / "state").exists()
    lone = cli("work", tmp_path / "jobs", **env)
    assert lone.returncode == 64
    assert b"It is empty." in lone.stderr


def test_the_default_queue_is_drained_and_its_newest_result_printed(tmp_path: Path, tiny_chat_model: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    cli("work", "Name three rivers.", "--max-tokens", "3", **env)
    drained = cli("drain", "--model", tiny_chat_model, **env)
    assert (drained.returncode, drained.stdout) == (0, b"1 done, 0 failed.\n")
    assert cli("flow", "--last", **env).stdout.strip()


def test_an_empty_default_queue_is_drained_at_once(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    job = cli("work", "Hi there.", **env).stdout.decode().strip()
    cli("flow", "--cancel", job, **env)
    done = cli("drain", **env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"No jobs are waiting in ")
    assert cli("drain", PENSTOCK_WORKSPACE="none", **env).returncode == 64


def test_a_setting_for_the_server_holds_for_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_WORKSPACE", str(tmp_path / "named"))
    assert default_folder() == tmp_path / "named"
    monkeypatch.setenv("PENSTOCK_WORKSPACE", "none")
    with pytest.raises(ConfigError, match="PENSTOCK_WORKSPACE is none"):
        default_folder()


def test_drain_has_no_flags_of_a_server(tmp_path: Path) -> None:
    output = cli("drain", "--help").stdout.decode()
    for flag in ("--port", "--host", "--tls-cert", "--cors-origins", "--max-connections", "--workspace "):
        assert flag not in output
    for flag in ("--model", "--device", "--workspace-jobs", "--json"):
        assert flag in output
    assert "Network to take part in; none unless this names one." in " ".join(output.split())  # the server's default is another
    assert cli("drain", tmp_path, "--port", "8000").returncode == 64
