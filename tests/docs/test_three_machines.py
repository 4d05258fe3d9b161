"""docs/three_machines.md, word by word: three nodes with homes of their own on this machine, and the default model."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tests.docs.pages import blocks, read
from tests.server import Server, free_port, running_server, until_ready

PAGE = read("docs/three_machines.md")
STEPS = [
    re.fullmatch(r"(\w+)\$ (.*)", line).groups()  # type: ignore[union-attr]
    for block in blocks(PAGE, "console")
    for line in block.splitlines()
]


class Home:
    """The machines of the page. Each has a home; the ports of the page are replaced by free ones."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.servers: dict[str, Server] = {}
        self._folder = folder
        self._stack = stack
        self._path = f"{warm.script(folder / 'bin')}{os.pathsep}{os.environ['PATH']}"
        self._token = ""

    def step(self, machine: str, command: str) -> str:
        home = {"PENSTOCK_HOME": str(self._folder / machine)}
        if command.startswith("penstock serve"):
            flags = command.removeprefix("penstock serve").split()
            self.servers[machine] = self._stack.enter_context(running_server(*flags, ready=False, **home))
            return ""
        if "network create" in command:
            command += f" --node {machine}"
        if "network create" in command or "network join" in command:
            command = f"{command.replace('TOKEN', self._token)} --listen tls/127.0.0.1:{free_port()}"
        url = {"PENSTOCK_URL": self.servers[machine].url} if machine in self.servers else {}
        env = {**os.environ, **home, **url, "PATH": self._path}
        done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, (machine, command, done.stderr)
        if "network invite" in command:
            self._token = done.stdout.strip()
        return done.stdout


@pytest.mark.slow
def test_the_walk_through_three_machines(tmp_path: Path, default_model_folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        home = Home(tmp_path, stack)
        last = max(i for i, (_, command) in enumerate(STEPS) if command == "penstock network status")
        for i, (machine, command) in enumerate(STEPS):
            if "network status" in command:
                if i == last:
                    assert home.servers["laptop"].leave() == 0
                until_ready(home.servers["desk"])
            shown = home.step(machine, command)
            if command.startswith("penstock serve") and machine == "desk":
                assert "Layers 10:30 of smollm2-135m are missing." in home.step(machine, "penstock network status")
            if "France" in command:
                assert "Paris" in shown
            if "network status" in command:
                print(shown)
                assert "attic" in shown
    assert {machine for machine, _ in STEPS} == {"desk", "laptop", "attic"}
