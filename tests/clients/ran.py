"""What was run with which client: kept by the tests that run them, and shown as the table of docs/clients.md.

A test says what it runs with `@pytest.mark.client`. With `UPDATE_CLIENTS=1` those that pass are kept in ran.json, with
version and day, and tests/clients/test_clients_page.py writes the table:

    UPDATE_CLIENTS=1 .venv/bin/python -m pytest tests/soak/test_coding_agents.py tests/clients/test_clients_page.py
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

UPDATE = "UPDATE_CLIENTS"
RAN = Path(__file__).with_name("ran.json")
REQUESTS = Path(__file__).with_name("requests")
HEADER = """\
| client | version | API | what was run, and works | what does not, or is ignored | last run | test |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class ClientRun:
    """A test that passed with a client.

    ran, cannot: what worked, and what this client cannot do with this server, as its test says it.
    """

    client: str
    version: str
    apis: str
    ran: str
    cannot: str
    test: str
    day: str


def client_run(item: pytest.Item, name: str, *, apis: str, ran: str, cannot: str = "") -> ClientRun:
    """What the mark of a test says. The version follows the name of a client (`ai@6.0.326`), or is the one installed here."""
    package, _, version = name.rpartition("@")
    if not package:
        package, version = name, importlib.metadata.version(name)
    test = item.nodeid.partition("[")[0]
    return ClientRun(
        client=package, version=version, apis=apis, ran=ran, cannot=cannot, test=test, day=f"{datetime.now(UTC):%Y-%m-%d}"
    )


def keep_run(item: pytest.Item) -> None:
    """With `UPDATE_CLIENTS=1`, keep that a test with a client has passed, instead of what is known of the same test."""
    mark = item.get_closest_marker("client")
    if mark is None or not os.environ.get(UPDATE):
        return
    new = client_run(item, *mark.args, **mark.kwargs)
    runs = [run for run in read_runs() if (run.client, run.test) != (new.client, new.test)]
    runs.append(new)
    runs.sort(key=lambda run: (run.client, run.test))
    RAN.write_text(json.dumps([asdict(run) for run in runs], indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_runs() -> list[ClientRun]:
    return [ClientRun(**run) for run in json.loads(RAN.read_text(encoding="utf-8"))]


def ignored_fields() -> dict[str, list[str]]:
    """What the server said it ignored of the recorded requests, by package and version as in `ai@6.0.326`."""
    found = {}
    for path in sorted(REQUESTS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        names = {name for request in record["requests"] for name in (request["ignored"] or "").split(", ") if name}
        found[record["client"]] = sorted(names)
    return found


def table(runs: Iterable[ClientRun]) -> str:
    """The table of docs/clients.md: a row for each client."""
    ignored = ignored_fields()
    by_client = itertools.groupby(runs, key=lambda run: (run.client, run.version))
    return HEADER + "".join(_row(name, version, list(some), ignored) for (name, version), some in by_client)


def _row(name: str, version: str, runs: list[ClientRun], ignored: dict[str, list[str]]) -> str:
    missing = [run.cannot for run in runs if run.cannot]
    if hints := ignored.get(f"{name}@{version}"):
        missing.append(f"ignored: {', '.join(f'`{hint}`' for hint in hints)}")
    cells = (
        f"`{name}`",
        version,
        ", ".join(dict.fromkeys(api for run in runs for api in run.apis.split(", "))),
        "; ".join(dict.fromkeys(run.ran for run in runs)),
        "; ".join(missing) or "–",
        max(run.day for run in runs),
        ", ".join(f"`{run.test}`" for run in runs),
    )
    return f"| {' | '.join(cells)} |\n"
