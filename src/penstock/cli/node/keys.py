"""`penstock keys`: create, list and revoke the API keys of this machine's server."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import JsonOption, wrong_usage
from penstock.cli.ui.output import print_json, print_table
from penstock.config.api_key import KEY_VARIABLE
from penstock.config.home import this_home
from penstock.config.table import BY_KEY

if TYPE_CHECKING:
    from penstock.config.keys import KeyFolder, KeyLimits, KeyRecord

SETTING = BY_KEY["server.keys"]

app = typer.Typer(help="Give out API keys for this machine's server, each with its limits.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A name from `penstock keys list`.")]
FolderOption = Annotated[
    str | None,
    typer.Option(
        SETTING.flag,
        metavar="FOLDER",
        help=f"The folder of keys, for a server with its own (server.keys); by default {SETTING.variable}, or this machine's.",
    ),
]


@app.command()
def add(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Who or what it is for: letters, digits, dots, dashes, underscores.")
    ],
    jobs: Annotated[int | None, typer.Option(metavar="N", help="Answers it may have open at once.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of prompts and answers it may use in any 60 seconds.")
    ] = None,
    priority: Annotated[int | None, typer.Option(metavar="N", help="The highest priority it may request: -10 to 10.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="A model it may use; may be given several times.")
    ] = None,
    keys: FolderOption = None,
) -> None:
    """Create a key and print it once.

    Only the key goes to stdout. Without options it has no limits. A running server accepts it at once; from the first key on,
    the server requires one.
    """
    from penstock.config.keys import KeyLimits

    folder = _folder(keys)
    models = tuple(dict.fromkeys(model)) if model else None
    with wrong_usage():
        limits = KeyLimits(jobs=jobs, tokens_per_minute=tokens_per_minute, priority=priority, models=models)
    first = not folder.contents().records
    key = folder.add(name, limits)
    notes = [
        f"The key '{name}': {', '.join(describe_limits(limits)) or 'no limits'}.",
        f"It is not stored: copy it now. To revoke it: penstock keys revoke {name}{_flag(keys)}",
    ]
    if first:
        notes.append(
            "From now on the server requires a key. Batches and responses created without one belong to the owner's key: "
            f"start the server with {KEY_VARIABLE} to find them."
        )
    print("\n".join(notes), file=sys.stderr, flush=True)
    print(key)


@app.command("list")
def list_keys(as_json: JsonOption = False, keys: FolderOption = None) -> None:
    """List the keys and their limits. The keys themselves are not stored."""
    folder = _folder(keys)
    found = folder.contents()
    if as_json:
        print_json({"keys": list(map(_entry, found.records))})
    elif found.records:
        print_table(["name", "key", "created", "limits", "revoked"], map(_row, found.records))
    elif not found.broken:
        wants = "a server with this folder refuses all requests" if keys else "this machine's server requires none"
        print(f"There are no keys. `penstock keys add NAME{_flag(keys)}` creates one; without any, {wants}.")
    if found.broken:
        raise found.broken[0]


@app.command()
def revoke(name: NameArgument, keys: FolderOption = None) -> None:
    """Revoke a key.

    A running server ends the key's open answers within a second. The name cannot be used again.
    """
    if _folder(keys).revoke(name):
        print(f"The key '{name}' is revoked. A running server notices within a second.")
    else:
        print(f"The key '{name}' was already revoked. Nothing has changed.")


def _folder(flag_value: str | None) -> KeyFolder:
    from penstock.config.keys import KeyFolder

    text = flag_value or os.environ.get(SETTING.variable)
    with wrong_usage(SETTING.flag):
        path = SETTING.parse(text) if text else None
    return KeyFolder(path or this_home().keys)


def _flag(flag_value: str | None) -> str:
    """The flag that further commands about the same folder need."""
    return f" {SETTING.flag} {shlex.quote(flag_value)}" if flag_value else ""


def _entry(record: KeyRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "tail": record.tail,
        "created": record.created,
        "limits": record.limits,
        "revoked": record.revoked,
    }


def _row(record: KeyRecord) -> list[str]:
    day = record.created.partition("T")[0]
    return [
        record.name,
        f"...{record.tail}",
        day,
        ", ".join(describe_limits(record.limits)) or "none",
        (record.revoked or "").partition("T")[0],
    ]


def describe_limits(limits: KeyLimits) -> list[str]:
    phrases = []
    if limits.jobs is not None:
        phrases.append(f"{limits.jobs} answer{'s' if limits.jobs > 1 else ''} at once")
    if limits.tokens_per_minute is not None:
        phrases.append(f"{limits.tokens_per_minute} tokens a minute")
    if limits.priority is not None:
        phrases.append(f"priority up to {limits.priority}")
    if limits.models is not None:
        phrases.append(f"only {' and '.join(limits.models)}")
    return phrases
