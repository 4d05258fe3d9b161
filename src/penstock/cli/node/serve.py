"""`penstock serve`: run a node that serves its models over HTTP, until Ctrl-C."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.node.dry_run import format_port, format_preview
from penstock.cli.node.logs import set_up_logging
from penstock.cli.node.old_variables import log_old_variables
from penstock.cli.node.settings import takes_settings
from penstock.cli.quick_imports import quick_imports
from penstock.cli.ui.bars import ProgressBars
from penstock.config.api_key import key_folder, read_api_key
from penstock.config.network import NetworkConfig
from penstock.config.settings import Settings

if TYPE_CHECKING:
    from penstock.engine.hosted_model import HostedLayers
    from penstock.node import Node

QUESTION = "What is the capital of France?"


DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be loaded, how much memory it needs and why; load nothing.")
]


@takes_settings
def serve(settings: Settings, dry_run: DryRun = False) -> None:
    """Serve models to every OpenAI client, or hold layers for other nodes.

    A node that only holds layers (--no-ends) opens no port, unless --port or another setting of the server is set.
    Ctrl-C lets running answers finish (limits.drain_timeout) and exits; a second Ctrl-C exits at once.
    """
    config = settings.node
    set_up_logging(config.log.format, config.log.level)
    log_old_variables()
    folder = key_folder(config.server, os.environ)
    owner_key = read_api_key(config.server, os.environ) if config.opens_port else None
    _renew_certificate(config.network)

    with ProgressBars() as bars:
        bars.start()

        with quick_imports():
            from penstock.doors.access.keys import Keys
            from penstock.node import Node

        if dry_run:
            previews = Node(config, progress=bars).preview()
            bars.clear()
            print("\n".join([*map(format_preview, previews), format_port(config)]), end="")
            return
        keys = Keys(folder, owner_key, always=config.server.keys is not None)
        node = Node(config, keys=keys, progress=bars)
        with node:

            def ready() -> None:
                bars.clear()
                print(_welcome(node, has_key=keys.required), flush=True)

            def leaving() -> None:
                count = node.open_jobs
                waits = f"Waiting for {count} answer{'s' if count > 1 else ''} to finish. Press Ctrl-C again to stop now."
                print(waits if count else "Stopping.", file=sys.stderr, flush=True)

            node.serve(on_ready=ready, on_leaving=leaving)


def _renew_certificate(network: NetworkConfig) -> None:
    """Renew the certificate on the machine that created the network; other machines need a new invitation."""
    if network.enabled and network.certificate_file is not None:
        from penstock.network.joining.authority import renew_if_due

        renew_if_due(network.certificate_file.parent)


def _welcome(node: Node, *, has_key: bool) -> str:
    """The text printed when the server is ready. Code starts at the left edge, so that it can be copied."""
    command = "penstock" if shutil.which("penstock") else sys.argv[0]
    network = _network(node, command)
    if not node.models:
        return f"""
Penstock holds {_describe_layers(node)} for other nodes.
{_memory(node)}{network}
Press Ctrl-C to stop.
"""
    contexts = [hosted.spec.context if node.membership else hosted.context for hosted in node.models]
    served = "; ".join(
        f"{hosted.name} on {hosted.device}, {hosted.dtype} with {hosted.backend}, {context} tokens of context"
        for hosted, context in zip(node.models, contexts, strict=True)
    )
    if not node.url:
        return f"""
Penstock works on the jobs of a workspace with {served}.

{_memory(node)}{_workspace(node, command)}{network}
Press Ctrl-C to stop.
"""
    model, url = node.models[0].name, f"{node.url}/v1"
    header = ' \\\n  -H "Authorization: Bearer $PENSTOCK_API_KEY"' if has_key else ""
    imports, key = ("import os\n", 'os.environ["PENSTOCK_API_KEY"]') if has_key else ("", '"none"')
    messages = f'[{{"role": "user", "content": "{QUESTION}"}}]'
    ready = not any(hosted.engine.pipe.explain() for hosted in node.models)
    return f"""
Penstock serves {served}.

  Base URL   {url}
  Console    {node.url}, for your browser
{_memory(node)}{_tls(node)}{_keys(node, command)}{_workspace(node, command)}{network}
{"Try it" if ready else "Try it when it is ready"}:

curl {url}/chat/completions{header} \\
  -H "Content-Type: application/json" \\
  -d '{{"model": "{model}", "messages": {messages}}}'

From Python (pip install openai):

{imports}from openai import OpenAI
client = OpenAI(base_url="{url}", api_key={key})
answer = client.chat.completions.create(model="{model}", messages={messages})
print(answer.choices[0].message.content)

Or in another terminal:

{command} chat --url {node.url}

Press Ctrl-C to stop.
"""


def _describe_layers(node: Node) -> str:
    return "; ".join(
        f"{_layers(hosted)} of {hosted.name} (it has {hosted.spec.num_layers}) "
        f"on {hosted.device}, {hosted.dtype} with {hosted.backend}"
        for hosted in node.hosted
    )


def _layers(hosted: HostedLayers) -> str:
    segments = [str(segment.layers) for segment in hosted.engine.pipe.segments]
    return f"layers {', '.join(segments)}" if segments else "no layers"


def _memory(node: Node) -> str:
    """How much text fits the KV memory here, all requests together."""
    rooms = []
    for hosted in node.hosted:
        if segments := hosted.engine.pipe.segments:
            tokens = min(segment.kv_blocks for segment in segments) * hosted.engine.config.block_size
            rooms.append(f"{tokens:,} tokens of text" + (f" of {hosted.name}" if len(node.hosted) > 1 else ""))
    return f"  Memory     room for {', '.join(rooms)}, all requests together\n" if rooms else ""


def _tls(node: Node) -> str:
    if node.certificate is None:
        return ""
    file = shlex.quote(str(node.certificate.file))
    until = f"{node.certificate.expires:%Y-%m-%d}"
    return f"  TLS        until {until}; clients that do not know who issued the certificate: SSL_CERT_FILE={file}\n"


def _keys(node: Node, command: str) -> str:
    """How to create the first key, for a server whose folder of keys is empty."""
    if node.keys.exist or not node.keys.required:
        return ""
    return f"  Keys       none yet; create one: {command} keys add NAME --keys {shlex.quote(str(node.config.server.keys))}\n"


def _workspace(node: Node, command: str) -> str:
    if node.workspace is None or (node.config.workspace.by_default and node.url):
        return ""
    path = shlex.quote(str(node.workspace.path))
    return f'  Workspace  {path}; try: {command} work {path} "{QUESTION}"\n'


def _network(node: Node, command: str) -> str:
    """The node's part in its network: which layers it holds and why, and what is missing."""
    membership = node.membership
    if membership is None:
        return ""
    from penstock.peers.report import exposure

    config = node.config.network
    lines = [f"  Network    {config.name}, as node {node.config.node_id}, with {_describe_layers(node)}"]
    lines += [f"  Why        {why}" for why in dict.fromkeys(membership.placements.values()) if why]
    for hosted in node.models:
        missing = hosted.engine.pipe.explain()
        if missing:
            lines.append(f"  Not ready  {missing} Requests are refused until a node provides them.")
            if not config.open:
                lines.append(f"             Invite one:  {command} network invite NAME")
        path = hosted.engine.pipe.path()
        if path is not None and (exposed := exposure(path.hops, node.config.node_id)):
            lines.append(f"  Note       {exposed}")
    if node.url:
        lines.append(f"  Status     {command} network status --url {node.url}")
    else:
        lines.append(f"  API        none; nodes with one show this one too: {command} network status")
    lines += [f"  Warning    {warning}" for warning in membership.warnings()]
    return "\n".join(lines) + "\n"
