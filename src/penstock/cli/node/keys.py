"""`penstock keys`: create, list, limit and revoke the API keys of this machine's server, and show what they have used."""

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
from penstock.config.kinds import SIZE, WHOLE
from penstock.config.table import BY_KEY
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.config.key_usage import KeyUsage
    from penstock.config.keys import KeyFolder, KeyLimits, KeyRecord

SETTING, KEY_DISK, KEY_BATCHES = BY_KEY["server.keys"], BY_KEY["limits.key_disk"], BY_KEY["limits.key_batches"]

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
    disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help=f"What it may store, such as 5GB; by default {KEY_DISK.key}.")
    ] = None,
    batches: Annotated[
        int | None, typer.Option(metavar="N", help=f"Batches it may have open at once; by default {KEY_BATCHES.key}.")
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
    size = None if disk is None else _value("--disk", disk)
    with wrong_usage():
        limits = KeyLimits(
            jobs=jobs, tokens_per_minute=tokens_per_minute, priority=priority, models=models, disk=size, batches=batches
        )
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
        wants = "a server with this folder refuses all requests" if _named(keys) else "this machine's server requires none"
        print(f"There are no keys. `penstock keys add NAME{_flag(keys)}` creates one; without any, {wants}.")
    if found.broken:
        raise found.broken[0]


@app.command()
def edit(
    name: NameArgument,
    jobs: Annotated[str | None, typer.Option(metavar="N", help="Answers it may have open at once.")] = None,
    tokens_per_minute: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens of prompts and answers it may use in any 60 seconds.")
    ] = None,
    priority: Annotated[str | None, typer.Option(metavar="N", help="The highest priority it may request: -10 to 10.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="A model it may use; may be given several times.")
    ] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help=f"What it may store, such as 5GB; none for {KEY_DISK.key}.")
    ] = None,
    batches: Annotated[
        str | None, typer.Option(metavar="N", help=f"Batches it may have open at once; none for {KEY_BATCHES.key}.")
    ] = None,
    keys: FolderOption = None,
) -> None:
    """Change the limits of a key.

    The key stays the same. "none" removes a limit; what is not given stays. A running server notices within a second.
    """
    given = {"jobs": jobs, "tokens_per_minute": tokens_per_minute, "priority": priority, "disk": disk, "batches": batches}
    changes: dict[str, Any] = {
        field: _value(f"--{field.replace('_', '-')}", text) for field, text in given.items() if text is not None
    }
    if model:
        changes["models"] = None if model == ["none"] else tuple(dict.fromkeys(model))
    if not changes:
        raise typer.BadParameter("Nothing would change. Give at least one limit, such as --jobs 2.")
    folder = _folder(keys)
    with wrong_usage():
        _check(changes)
    limits = folder.edit(name, **changes)
    print(f"The key '{name}': {', '.join(describe_limits(limits)) or 'no limits'}. A running server notices within a second.")


@app.command()
def usage(as_json: JsonOption = False, keys: FolderOption = None) -> None:
    """Show what each key has used.

    Requests, tokens of prompts (in) and answers (out) today (UTC) and in all, disk space and open batches. A running server
    writes this every five seconds, and a later one continues it.
    """
    from penstock.config.key_usage import OPERATOR, KeyUsage, read_usage

    folder = _folder(keys)
    found = folder.contents()
    used = read_usage(folder.path)
    rows: list[tuple[str | None, str, KeyUsage]] = []
    for record in found.records:
        owner = next((owner for owner in used if owner and record.sha256.startswith(owner)), None)
        rows.append((record.name, "revoked" if record.revoked else "valid", used.pop(owner) if owner else KeyUsage()))
    if OPERATOR in used:
        rows.append((None, "owner", used.pop(OPERATOR)))
    rows += [(None, "removed", one) for one in used.values()]
    if as_json:
        print_json({"keys": [_usage_entry(*row) for row in rows]})
    elif rows:
        headings = ["name", "requests today", "in", "out", "requests in all", "in", "out", "disk", "open batches"]
        print_table(headings, (_usage_row(*row) for row in rows), numbers=range(1, len(headings)))
    else:
        print(f"There are no keys, and nothing was used. `penstock keys add NAME{_flag(keys)}` creates a key.")
    if found.broken:
        raise found.broken[0]


@app.command()
def revoke(name: NameArgument, keys: FolderOption = None) -> None:
    """Revoke a key.

    A running server ends the key's open answers within a second. `penstock keys remove` forgets the key, so that its name can
    be used again.
    """
    folder = _folder(keys)
    if not folder.revoke(name):
        print(f"The key '{name}' was already revoked. Nothing has changed.")
        return
    print(f"The key '{name}' is revoked. A running server notices within a second.")
    if all(record.revoked for record in folder.contents().records):
        print(
            f"It was the last valid one: a server accepts only the owner's key ({KEY_VARIABLE}) now, and without one it refuses "
            f"all requests. For another key: penstock keys add NAME{_flag(keys)}",
            file=sys.stderr,
        )


@app.command()
def remove(name: NameArgument, keys: FolderOption = None) -> None:
    """Forget a revoked key.

    Its name can be used again. Its batches, files and stored responses stay, and belong to no key.
    """
    folder = _folder(keys)
    folder.remove(name)
    print(f"The key '{name}' is removed.")
    if not _named(keys) and not folder.contents().records:
        print(
            "There are no more keys: from its next start on, a server on this machine requires none but the owner's, if any.",
            file=sys.stderr,
        )


def _named(flag_value: str | None) -> str | None:
    """The folder that the flag or else the environment names."""
    return flag_value or os.environ.get(SETTING.variable)


def _folder(flag_value: str | None) -> KeyFolder:
    from penstock.config.keys import KeyFolder

    text = _named(flag_value)
    with wrong_usage(SETTING.flag):
        path = SETTING.parse(text) if text else None
    return KeyFolder(path or this_home().keys)


def _value(option: str, text: str) -> int | None:
    """Parse the value of a limit; None for "none"."""
    if text.strip().lower() == "none":
        return None
    kind = SIZE if option == "--disk" else WHOLE
    try:
        parsed: int = kind.parse(text)
    except ValueError:
        raise typer.BadParameter(f"'{text}' cannot be used. Give {kind.expects}, or none.", param_hint=option) from None
    return parsed


def _check(changes: dict[str, Any]) -> None:
    """Raise ConfigError for an invalid limit, before the key is looked up."""
    from penstock.config.keys import KeyLimits

    KeyLimits(**changes)


def _usage_entry(name: str | None, state: str, used: KeyUsage) -> dict[str, Any]:
    return {
        "name": name,
        "state": state,
        "today": used.today,
        "total": used.total,
        "disk_bytes": used.held.disk,
        "open_batches": used.held.batches,
    }


def _usage_row(name: str | None, state: str, used: KeyUsage) -> list[str]:
    label = f"({state})" if name is None else f"{name} (revoked)" if state == "revoked" else name
    counts = [
        f"{count:,}" for one in (used.today, used.total) for count in (one.requests, one.prompt_tokens, one.completion_tokens)
    ]
    return [label, *counts, format_bytes(used.held.disk), str(used.held.batches)]


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
    if limits.disk is not None:
        phrases.append(f"{format_bytes(limits.disk)} of disk space")
    if limits.batches is not None:
        phrases.append(f"{limits.batches} open batch{'es' if limits.batches > 1 else ''}")
    return phrases
