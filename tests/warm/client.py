"""A proxy for a forked process: passes on its own files, then signals, and exits as that process does.

It imports little, because its own start is the whole cost of a command.
"""

import array
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def start(path, module, args, environment, files, terminal=False):
    """Start a process and return the connection to it; closing that kills the process."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    header = [os.getcwd(), "1" if terminal else "", module, str(len(args)), *args]
    header += [f"{name}={value}" for name, value in environment.items()]
    body = "\0".join(header).encode("utf-8", "surrogateescape")
    fds = array.array("i", files)
    connection.sendmsg([len(body).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    connection.sendall(body)
    return connection


def number(connection):
    """Read a number: first the process id, then its exit code; a negative one is a signal, as in `subprocess`."""
    found = b""
    while len(found) < 4:
        chunk = connection.recv(4 - len(found))
        if not chunk:
            raise SystemExit("The process that forks is gone.")
        found += chunk
    return int.from_bytes(found, "big", signed=True)


def main():
    path, module, *args = sys.argv[1:]
    early, connection = [], None

    def forward(number, _frame):
        early.append(number) if connection is None else connection.sendall(bytes([number]))

    for one in FORWARDED:
        if signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, forward)
    started = start(path, module, args, os.environ, (0, 1, 2))
    null = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):  # or a pipe would stay open after the process has closed it
        os.dup2(null, file)
    connection = started
    connection.sendall(bytes(early))
    number(connection)
    code = number(connection)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
