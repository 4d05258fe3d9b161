"""`penstock ps`: what is running on a server."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import JsonOption
from penstock.cli.output import print_json, print_table
from penstock.cli.server_url import DEFAULT_URL, UrlOption, named_url

if TYPE_CHECKING:
    from penstock.cli.client import Client

EVERY = 1.0  # seconds
CLEAR = "\x1b[H\x1b[2J"
STATES = {"waiting_preempt": "waits to go on"}  # it lost its memory, or its nodes
HEADINGS = ["job", "model", "state", "age", "prompt read", "generated", "priority"]


def ps(
    url: UrlOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again every second, until Ctrl-C.")] = False,
) -> None:
    """Show what is running on a server.

    The server is the one that --url or PENSTOCK_URL names, else the one at http://127.0.0.1:8000. An API key is taken from
    PENSTOCK_API_KEY. What is shown are numbers and states, never a word of any request.
    """
    from penstock.cli.client import Client

    client = Client(named_url(url) or DEFAULT_URL)
    try:
        _show(_status(client), as_json, again=False)
        while watch:
            time.sleep(EVERY)
            _show(_status(client), as_json, again=True)
    except KeyboardInterrupt:
        if not watch:
            raise


def _status(client: Client) -> dict[str, Any]:
    from penstock.cli.client import Refused

    try:
        status: dict[str, Any] = client.get("/status")
    except Refused as error:
        if error.status != 404:
            raise
        status = {}
    if "node_id" not in status or "models" not in status:
        raise Refused(f"What answers at {client.url} is not a Penstock server.", hint="Only these tell what is running.")
    return status


def _show(status: dict[str, Any], as_json: bool, *, again: bool) -> None:
    if as_json:
        print_json(status)
    else:
        if again:
            print(CLEAR if sys.stdout.isatty() else "\n", end="")
        _print(status)
    sys.stdout.flush()


def _print(status: dict[str, Any]) -> None:
    draining = " · draining: it finishes what runs and takes nothing new" if status["draining"] else ""
    print(f"{status['node_id']} · Penstock {status['version']}{draining}")
    for model in status["models"]:
        print(f"{model['id']} on {model['device']}, {model['dtype']} · layers {', '.join(model['layers'])} · {_memory(model)}")
    jobs = [_row(job, model["id"]) for model in status["models"] for job in model["jobs"]]
    if jobs:
        print()
        print_table(HEADINGS, jobs, numbers=[3, 4, 5, 6])
    else:
        busy = any(model["kv_used"] for model in status["models"])
        print("Nothing of its own is running; it works for other nodes." if busy else "Nothing is running.")


def _memory(model: dict[str, Any]) -> str:
    used, total = model["kv_used"], model["kv_tokens"]
    if not total:
        return "layers of other nodes are missing (penstock network status)"
    return f"KV {100 * used / max(total, 1):.1f} % of {total:,} tokens"


def _row(job: dict[str, Any], model: str) -> list[str]:
    return [
        job["id"],
        model,
        STATES.get(job["state"], job["state"]),
        _age(job["age"]),
        f"{job['prefilled']}/{job['prompt_tokens']}",
        f"{job['generated']}/{job['max_tokens'] * job['outputs']}",
        str(job["priority"]),
    ]


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
