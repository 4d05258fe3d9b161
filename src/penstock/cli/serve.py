"""`penstock serve`: a node with its models behind OpenAI's API, until Ctrl-C."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from penstock.cli.bars import ProgressBars
from penstock.cli.logs import set_up_logging
from penstock.cli.settings import takes_settings
from penstock.config.api_key import read_api_key
from penstock.config.settings import Settings

if TYPE_CHECKING:
    from penstock.node import Node

QUESTION = "What is the capital of France?"


@takes_settings
def serve(settings: Settings) -> None:
    """Serve models to every OpenAI client.

    Ctrl-C lets running answers finish (limits.drain_timeout) and leaves; a second one leaves at once.
    """
    config = settings.node
    set_up_logging(config.log.format, config.log.level)
    key = read_api_key(config.server, os.environ)

    from penstock.node import Node

    with ProgressBars() as bars:
        node = Node(config, api_key=key, progress=bars)
        with node:

            def ready() -> None:
                bars.clear()
                print(_welcome(node, has_key=key is not None), flush=True)

            def leaving() -> None:
                count = node.open_jobs
                waiting = f" after {count} running answer{'s' if count > 1 else ''} (Ctrl-C again: now)" if count else ""
                print(f"Leaving{waiting}.", file=sys.stderr, flush=True)

            node.serve(on_ready=ready, on_leaving=leaving)


def _welcome(node: Node, *, has_key: bool) -> str:
    model, url = node.models[0].name, f"{node.url}/v1"
    header = ' \\\n    -H "Authorization: Bearer $PENSTOCK_API_KEY"' if has_key else ""
    key = 'os.environ["PENSTOCK_API_KEY"]' if has_key else '"none"'
    imports = "import os\n    " if has_key else ""
    others = [f"{hosted.name} on {hosted.device}, {hosted.dtype}, {hosted.context} tokens of context" for hosted in node.models]
    return f"""
Penstock serves {"; ".join(others)}.

  Base URL   {url}

  Try it:

    curl {url}/chat/completions{header} \\
    -H "Content-Type: application/json" \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}'

  From Python (pip install openai):

    {imports}from openai import OpenAI
    client = OpenAI(base_url="{url}", api_key={key})
    answer = client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "{QUESTION}"}}])
    print(answer.choices[0].message.content)

  Or in another terminal: penstock chat --url {node.url}

Ctrl-C to leave.
"""
