"""`penstock ps`: what is running on a server."""

from __future__ import annotations

from typing import Any

from penstock.cli.client.polling import WatchOption, watch_server
from penstock.cli.client.server_url import UrlOption
from penstock.cli.options import JsonOption
from penstock.cli.ui.durations import age
from penstock.cli.ui.output import table_lines

STATE_NAMES = {"waiting_preempt": "waits to go on"}  # it lost its memory, or its nodes
HEADINGS = ["job", "model", "state", "age", "prompt read", "generated", "priority"]


def ps(
    url: UrlOption = None,
    as_json: JsonOption = False,
    watch: WatchOption = False,
) -> None:
    """Show what is running on a server.

    The server is the one that --url or PENSTOCK_URL names, else the one at http://127.0.0.1:8000. An API key is taken from
    PENSTOCK_API_KEY. What is shown are numbers and states, never a word of any request.
    """
    watch_server(url, "/status", {"node_id", "models"}, _page, as_json=as_json, watch=watch)


def _page(status: dict[str, Any]) -> str:
    draining = " · draining: it finishes what runs and takes nothing new" if status["draining"] else ""
    lines = [f"{status['node_id']} · Penstock {status['version']}{draining}"]
    for model in status["models"]:
        where = f"{model['id']} on {model['device']}, {model['dtype']}"
        lines.append(f"{where} · layers {', '.join(model['layers'])} · {_memory(model)}")
    workspace = status.get("workspace") or {}
    if any(workspace.values()):
        lines.append(
            f"workspace · {workspace['queued']} wait · {workspace['running']} run · {workspace['done']} done · {workspace['failed']} failed"
        )
    jobs = [_row(job, model["id"]) for model in status["models"] for job in model["jobs"]]
    if jobs:
        lines += ["", *table_lines(HEADINGS, jobs, numbers=[3, 4, 5, 6])]
    else:
        busy = any(model["kv_used"] for model in status["models"])
        lines.append("Nothing of its own is running; it works for other nodes." if busy else "Nothing is running.")
    return "\n".join(lines) + "\n"


def _memory(model: dict[str, Any]) -> str:
    used, total = model["kv_used"], model["kv_tokens"]
    if not total:
        return "layers of other nodes are missing (penstock network status)"
    return f"KV {100 * used / max(total, 1):.1f} % of {total:,} tokens"


def _row(job: dict[str, Any], model: str) -> list[str]:
    return [
        job["id"],
        model,
        STATE_NAMES.get(job["state"], job["state"]),
        age(job["age"]),
        f"{job['prefilled']}/{job['prompt_tokens']}",
        f"{job['generated']}/{job['max_tokens'] * job['outputs']}",
        str(job["priority"]),
    ]
