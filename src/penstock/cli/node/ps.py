"""`penstock ps`: show what is running on a server."""

from __future__ import annotations

from typing import Any

from penstock.cli.client.polling import WatchOption, watch_server
from penstock.cli.client.server_url import UrlOption
from penstock.cli.options import JsonOption
from penstock.cli.ui.columns import table
from penstock.cli.ui.durations import age

STATE_NAMES = {"waiting_preempt": "waiting again"}  # its memory was taken, or its route broke
HEADINGS = ["job", "model", "state", "age", "last update", "prompt read", "generated", "priority"]


def ps(url: UrlOption = None, as_json: JsonOption = False, watch: WatchOption = False) -> None:
    """Show what is running on a server.

    The server is --url or PENSTOCK_URL, by default http://127.0.0.1:8000. The API key is taken from PENSTOCK_API_KEY. Only
    numbers and states are shown, never the text of a request. STALE marks a job that was begun and of which nothing was
    computed for 30 seconds.
    """
    watch_server(url, "/status", {"node_id", "models"}, _page, as_json=as_json, watch=watch)


def _page(status: dict[str, Any]) -> str:
    draining = " · draining: running jobs finish, new ones are refused" if status["draining"] else ""
    lines = [f"{status['node_id']} · Penstock {status['version']}{draining}"]
    for model in status["models"]:
        where = f"{model['id']} on {model['device']}, {model['dtype']}"
        lines.append(f"{where} · layers {', '.join(model['layers'])} · {_memory(model)}")
    workspace = status.get("workspace") or {}
    if any(workspace.values()):
        counts = ("queued", "running", "done", "failed")
        lines.append(" · ".join(["workspace", *(f"{workspace[name]} {name}" for name in counts)]))
    jobs = [_row(job, model["id"]) for model in status["models"] for job in model["jobs"]]
    if jobs:
        lines += ["", *table(HEADINGS, jobs, numbers=[3, 4, 5, 6, 7], indent="")]
    else:
        busy = any(model["kv_used"] for model in status["models"])
        lines.append("No jobs of its own are running; it computes for other nodes." if busy else "Nothing is running.")
    return "\n".join(lines) + "\n"


def _memory(model: dict[str, Any]) -> str:
    used, total = model["kv_used"], model["kv_tokens"]
    if not total:
        return "some layers are missing (penstock network status)"
    return f"KV {100 * used / max(total, 1):.1f} % of {total:,} tokens"


def _state(job: dict[str, Any]) -> str:
    """The state in words. A job that was begun and has not moved for 30 seconds is marked as stale."""
    state: str = STATE_NAMES.get(job["state"], job["state"])
    return f"{state}, STALE" if job.get("stale") else state


def _row(job: dict[str, Any], model: str) -> list[str]:
    return [
        job["id"],
        model,
        _state(job),
        age(job["age"]),
        "-" if job.get("last_update") is None else f"{age(job['last_update'])} ago",
        f"{job['prefilled']}/{job['prompt_tokens']}",
        f"{job['generated']}/{job['max_tokens'] * job['outputs']}",
        str(job["priority"]),
    ]
