"""`penstock top`: nodes, pipes, jobs and rates of a server and its network, redrawn in place."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from penstock.cli.client.server_url import UrlOption, default_url, named_url
from penstock.cli.options import JsonOption
from penstock.cli.ui.output import can_write, shows_colour

HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
ENTER_SCREEN = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # another screen, no cursor, and long lines are cut
LEAVE_SCREEN = "\x1b[?7h\x1b[?25h\x1b[?1049l"
RECONNECT_S = 1.0

OnceOption = Annotated[bool, typer.Option("--once", help="Print it once, without colours or redrawing, and exit.")]


def top(url: UrlOption = None, once: OnceOption = False, as_json: JsonOption = False) -> None:
    """Watch a server and its network: nodes, pipes, jobs, rates.

    The server is --url or PENSTOCK_URL, by default http://127.0.0.1:8000. The API key is taken from PENSTOCK_API_KEY: the owner's
    sees all jobs, another one its own. Redrawn every second until Ctrl-C; where the terminal cannot do that, and with --once or
    --json, it is printed once. Only numbers and states are shown, never the text of a request.
    """
    from penstock.cli.client.api import Client

    client = Client(named_url(url) or default_url())
    can_redraw = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if as_json or once or not can_redraw:
        _print_once(client, as_json=as_json)
    else:
        _watch(client)


def _states(client: Any) -> Iterator[dict[str, Any]]:
    """Yield the whole state after each event."""
    from penstock.cli.client.api import ServerRefused
    from penstock.cli.network.live_page import merged

    state: dict[str, Any] | None = None
    try:
        for event in client.watch("/events"):
            if isinstance(event, str):
                continue  # a comment
            kind = event.get("type")
            if kind == "snapshot":
                state = event["state"]
            elif kind == "delta" and state is not None:
                state = merged(state, event["changes"])
            if state is not None:
                yield state
    except ServerRefused as error:
        if error.status != 404:
            raise
        hint = "It needs a Penstock server that has GET /events."
        raise ServerRefused(f"The server at {client.url} has no events to watch.", hint=hint) from None


def _print_once(client: Any, *, as_json: bool) -> None:
    from penstock.cli.network.live_page import History, page
    from penstock.cli.ui.output import print_json

    history = History()
    states = _states(client)
    state: dict[str, Any] = {}
    for _, state in zip(range(2), states, strict=False):  # rates need two readings
        history.add(state)
    states.close()  # type: ignore[attr-defined]
    if as_json:
        print_json(state)
    else:
        print(_readable("\n".join(page(state, history, shutil.get_terminal_size().columns, colour=False))))


def _watch(client: Any) -> None:
    """Redraw until Ctrl-C. A server that is gone is asked again and again once it has answered."""
    from penstock.cli.client.api import ServerUnreachable
    from penstock.cli.network.live_page import History, page

    history = History()
    colour = shows_colour(sys.stdout)
    first = next(states := _states(client))  # before the screen is taken, so that an error is seen
    history.add(first)
    sys.stdout.write(ENTER_SCREEN)
    try:
        _draw(page(first, history, *_size(), colour=colour))
        while True:
            try:
                for state in states:
                    history.add(state)
                    _draw(page(state, history, *_size(), colour=colour))
            except ServerUnreachable as error:
                _draw([str(error), "Trying again…"])
            time.sleep(RECONNECT_S)
            states = _states(client)
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(LEAVE_SCREEN)
        sys.stdout.flush()


def _readable(text: str) -> str:
    """Replace letters that this terminal would show as question marks."""
    from penstock.cli.network.live_page import SPARKS
    from penstock.cli.network.picture import PLAIN

    return text if can_write("█→…", sys.stdout) else text.translate(str.maketrans(SPARKS, "_.,-=+*#")).translate(PLAIN)


def _size() -> tuple[int, int]:
    columns, lines = shutil.get_terminal_size()
    return columns, lines


def _draw(lines: list[str]) -> None:
    """Replace what is on the screen line by line, which does not flicker."""
    height = shutil.get_terminal_size().lines
    text = f"{CLEAR_LINE}\n".join(lines[: height - 1])
    sys.stdout.write(HOME + _readable(text) + CLEAR_LINE + CLEAR_BELOW)
    sys.stdout.flush()
