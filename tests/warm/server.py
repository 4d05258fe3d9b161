"""Imports everything once, and forks a process for each command: `python -m tests.warm.server SOCKET`, until stdin ends."""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
import termios
from dataclasses import dataclass

from tests.commands import build_commands_once
from tests.tokenizer_files import read_default_tokenizer

FILES = 3
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGPIPE)


@dataclass
class Command:
    """What a new process runs, and its three files."""

    folder: str
    terminal: bool
    module: str
    args: list[str]
    environment: dict[str, str]
    files: list[int]


def import_everything() -> None:
    """Import all of Penstock and its dependencies, as if each command had run before, except what only a GPU needs."""
    import penstock

    for found in pkgutil.walk_packages(penstock.__path__, "penstock."):
        if not found.name.endswith("__main__") and ".triton" not in found.name:
            importlib.import_module(found.name)
    build_commands_once()
    read_default_tokenizer()


def read_command(connection: socket.socket) -> Command:
    size = FILES * array.array("i").itemsize
    length, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_LEN(size))
    files = array.array("i")
    for _, kind, data in ancillary:
        assert kind == socket.SCM_RIGHTS
        files.frombytes(data)
    left, body = int.from_bytes(length, "big"), b""
    while left > len(body):
        body += connection.recv(left - len(body))
    folder, terminal, module, count, *rest = body.decode("utf-8", "surrogateescape").split("\0")
    args, variables = rest[: int(count)], rest[int(count) :]
    return Command(folder, bool(terminal), module, args, dict(one.split("=", 1) for one in variables), list(files))


def become(command: Command) -> None:
    """In the new process: install its files and environment, and reset signals as at the start of Python."""
    signal.set_wakeup_fd(-1)
    for one in SIGNALS:
        signal.signal(one, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    encoding, _, errors = command.environment.get("PYTHONIOENCODING", "").partition(":")
    encoding, errors = encoding or sys.stdout.encoding, errors or ("strict" if encoding else sys.stdin.errors)
    for target, file in enumerate(command.files):
        os.dup2(file, target)
        os.close(file)
    if command.terminal:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(command.folder)
    os.environ.clear()
    os.environ.update(command.environment)
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding=encoding, errors=errors, closefd=False)
    buffering = 1 if os.isatty(1) else -1
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering, encoding=encoding, errors=errors, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, encoding=encoding, errors="backslashreplace", closefd=False)
    sys.argv = ["", *command.args]


class Server:
    def __init__(self, path: str) -> None:
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(f"{path}~")
        self._door.listen(64)
        os.rename(f"{path}~", path)  # once visible, it accepts connections
        self._running: dict[int, socket.socket] = {}
        self._bell, ringing = os.pipe()
        os.set_blocking(ringing, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(ringing, warn_on_full_buffer=False)
        for one in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C goes to all processes of the terminal
            signal.signal(one, signal.SIG_IGN)

    def until_forked(self) -> Command | None:
        """Return a command in each new process, and None in this one at the end."""
        while True:
            pids = {connection: pid for pid, connection in self._running.items()}
            ready, _, _ = select.select([0, self._bell, self._door, *pids], [], [])
            for connection in ready:
                if connection in pids:
                    self._signal(pids[connection], connection)
            if self._bell in ready:
                os.read(self._bell, 4096)
                self._reap()
            if 0 in ready:
                for pid in self._running:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                return None
            if self._door in ready and (command := self._fork()):
                return command

    def _fork(self) -> Command | None:
        connection, _ = self._door.accept()
        command = read_command(connection)
        pid = os.fork()
        if pid == 0:
            for other in (connection, self._door, *self._running.values()):
                other.close()
            os.close(self._bell)
            become(command)
            return command
        for file in command.files:
            os.close(file)
        self._running[pid] = connection
        connection.sendall(pid.to_bytes(4, "big", signed=True))
        return None

    def _signal(self, pid: int, connection: socket.socket) -> None:
        try:
            numbers = connection.recv(64)
        except ConnectionError:
            numbers = b""
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)
        if not numbers:  # the client of the process was killed
            del self._running[pid]
            os.waitpid(pid, 0)
            connection.close()

    def _reap(self) -> None:
        for pid, connection in list(self._running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._running[pid]
                with contextlib.suppress(ConnectionError):
                    connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
                connection.close()


def run(command: Command) -> None:
    """Run a command as `python -m` does, with all exit handlers, but skip Python's teardown of modules."""
    code: object = 1

    def leave() -> None:
        if isinstance(code, int) and "coverage" not in sys.modules:
            sys.stdout.flush()
            os._exit(code)

    atexit.register(leave)  # registered first, so called last
    try:
        runpy.run_module(command.module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = 0 if ended.code is None else ended.code
        raise
    except KeyboardInterrupt:
        code = None  # Python exits by that signal
        raise


if __name__ == "__main__":
    import_everything()
    gc.collect()
    gc.freeze()
    server = Server(sys.argv[1])
    command = server.until_forked()
    if command is not None:
        del server
        run(command)
