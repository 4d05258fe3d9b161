"""The table of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.batch.batch import batch
from penstock.cli.chat.chat import chat
from penstock.cli.chat.run import run
from penstock.cli.jobs.drain import drain
from penstock.cli.jobs.flow import flow
from penstock.cli.jobs.work import work
from penstock.cli.machine import models
from penstock.cli.machine.audit import audit
from penstock.cli.machine.bench import bench
from penstock.cli.machine.doctor import doctor
from penstock.cli.machine.simulate import simulate
from penstock.cli.moving import moving
from penstock.cli.network import network
from penstock.cli.network.top import top
from penstock.cli.node import keys
from penstock.cli.node.config import config
from penstock.cli.node.ps import ps
from penstock.cli.node.serve import serve
from penstock.cli.ui.help import GroupedCommand
from penstock.cli.version import print_version, version

HELP = ["--help", "-h"]

app = typer.Typer(
    name="penstock",
    help="""Run one language model across the machines you already have.

    Start with:  penstock run "What is the capital of France?"

    If something does not work:  penstock doctor
    """,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help takes half the time and reads as well
    pretty_exceptions_enable=False,  # exits.py prints errors
    context_settings={"help_option_names": HELP},
)


@app.callback()
def penstock(
    show_version: Annotated[
        bool, typer.Option("--version", "-V", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the command; the help text is that of the app."""


app.command()(run)
app.command(cls=GroupedCommand)(serve)
app.command()(work)
app.command()(flow)
app.command(cls=GroupedCommand)(drain)
app.command()(batch)
app.command()(chat)
app.command()(ps)
app.command()(top)
app.add_typer(network.app, name="network", context_settings={"help_option_names": HELP})
app.add_typer(keys.app, name="keys", context_settings={"help_option_names": HELP})
app.add_typer(models.app, name="models", context_settings={"help_option_names": HELP})
app.add_typer(moving.app, name="import", context_settings={"help_option_names": HELP})
app.command()(config)
app.command()(bench)
app.command()(simulate)
app.command()(audit)
app.command()(doctor)
app.command()(version)
