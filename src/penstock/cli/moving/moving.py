"""`penstock import`: take over a configuration of Language Pipes or a workspace of nrvna-ai."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.exits import FAILED
from penstock.cli.jobs.workspaces import WorkspaceArgument
from penstock.cli.options import JsonOption
from penstock.cli.ui.output import print_json
from penstock.errors import ConfigError
from penstock.workspace.store.root import wrap_os_errors

app = typer.Typer(help="Take over a Language Pipes configuration or an nrvna-ai workspace.", no_args_is_help=True)

LANGUAGE_PIPES_FOLDER = "~/.config/language_pipes"  # LP_APP_DIR names another


@app.command("language-pipes")
def language_pipes(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="The TOML file, or the name of a saved configuration.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the node file here; it must not exist yet.")
    ] = None,
) -> None:
    """Convert a configuration of Language Pipes (0.x, 1.x or 2.x) to a node file.

    The node file goes to stdout, or to the file that --output names. What has no equivalent stands in it as comments, and goes to
    stderr. Keys, tokens and passwords are not copied.

    \b
    penstock import language-pipes config.toml --output node.toml
    penstock serve --config node.toml --dry-run
    """
    from penstock.cli.moving.lp_config import convert
    from penstock.config.settings import read_toml

    file = _saved_config(config)
    found = read_toml(file, "configuration", hint="Name the TOML file that `language-pipes --config` took.")
    converted = convert(found, file)
    if output is None:
        print(converted.text, end="")
    else:
        _write_new(output, converted.text)
    for note in converted.notes:
        print(f"note: {note}", file=sys.stderr)
    if output is not None:
        print(f"Next: penstock serve --config {shlex.quote(str(output))} --dry-run", file=sys.stderr)


@app.command("nrvna")
def nrvna(workspace: WorkspaceArgument, as_json: JsonOption = False) -> None:
    """Check a workspace of nrvna-ai: Penstock works on it in place.

    Shows how many jobs are in each state, which will run again because nrvnad left them, and what Penstock cannot run or read.
    Changes nothing. The exit code is 1 if something needs your attention first: nrvnad still runs, or a job would not be run as
    it was meant.

    \b
    penstock import nrvna ./workspace
    penstock drain ./workspace --model models/model.gguf
    """
    from penstock.cli.moving.nrvna_workspace import describe, survey

    with wrap_os_errors(workspace):
        found = survey(workspace)
    if as_json:
        print_json(found.record())
    else:
        print("\n".join(describe(found)))
    if not found.ready:
        raise typer.Exit(FAILED)


def _saved_config(config: str) -> Path:
    """Find the file as Language Pipes does: a name without .toml is a saved configuration."""
    file = Path(config)
    if file.exists() or ".toml" in config:
        return file
    saved = Path(os.environ.get("LP_APP_DIR") or LANGUAGE_PIPES_FOLDER).expanduser() / "configs" / f"{config}.toml"
    return saved if saved.exists() else file


def _write_new(file: Path, text: str) -> None:
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already.", hint="Name another file with --output, or remove this one.") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}.") from None
