"""`penstock work`: submit a job to a workspace, whether or not a server runs."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.jobs.work_body import EMBEDDINGS, Body, embedding, read_body
from penstock.cli.jobs.workspaces import default_folder, no_server_hint, note
from penstock.cli.node.old_variables import print_old_variables
from penstock.cli.options import wrong_usage
from penstock.cli.prompt import STDIN, is_piped, prompt_text, read_text
from penstock.cli.ui.durations import METAVAR, parse_duration_option
from penstock.cli.ui.output import print_json
from penstock.errors import RequestError
from penstock.workspace.store.files import MAX_RECORD_BYTES
from penstock.workspace.store.job_id import is_job_id
from penstock.workspace.store.request import DEFAULT_PRIORITY, MAX_PRIORITY, MIN_PRIORITY, WorkRequest
from penstock.workspace.store.root import wrap_os_errors

# Only explicit values go into the job: the server fills in what the model recommends.
MaxTokens = Annotated[int | None, typer.Option(help="Stop after this many tokens.", show_default=False)]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 always takes the likeliest token, 1 varies more; the default is the model's recommendation."),
]
TopP = Annotated[float | None, typer.Option(help="Choose among the likeliest tokens with this total probability.")]
TopK = Annotated[int | None, typer.Option(help="Choose among the k likeliest tokens.")]


def work(
    workspace: Annotated[
        Path | None,
        typer.Argument(
            metavar="[WORKSPACE]",
            help="The folder for the jobs; created if missing. A lone argument is the PROMPT, for the workspace of "
            "`penstock serve`, unless it is a folder or a pipe has the prompt.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt; several words are joined by spaces (after --, they may begin with a dash). - reads it from stdin, "
            "as does a pipe without a PROMPT.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="The model to use; otherwise the server's first one."),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message to put before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")] = False,
    embed: Annotated[
        bool, typer.Option("--embed", help="Turn the prompt into a vector; the result is that of the API's /v1/embeddings.")
    ] = False,
    body: Annotated[
        Path | None,
        typer.Option(
            "--request",
            metavar="FILE",
            help="Submit the body of an API request instead of a prompt; - is stdin. The result is the body of the answer.",
            show_default=False,
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="For --request: the path that the body is for; otherwise /v1/chat/completions if it has messages, "
            "/v1/completions if it has a prompt.",
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; may be repeated.")] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Annotated[int | None, typer.Option(help="Makes a random answer repeatable.")] = None,
    schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON schema that the answer must follow.", show_default=False)
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Lark grammar that the answer must follow.", show_default=False)
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="A regular expression that the whole answer must match.")
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="A word to find the job by (penstock flow --tag); may be repeated."),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOBS",
            help="Jobs to wait for, such as ID or left=ID,right=ID: {{ID}} or {{left}} in the PROMPT becomes the result. "
            "May be repeated.",
        ),
    ] = None,
    priority: Annotated[
        int, typer.Option(help=f"From {MIN_PRIORITY} to {MAX_PRIORITY}; a higher one goes first.")
    ] = DEFAULT_PRIORITY,
    deadline: Annotated[
        float | None,
        typer.Option(
            parser=parse_duration_option, metavar=METAVAR, help="When you would like the result, such as 10m; orders the queue."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="An idempotency key: the same request with the same key is submitted once."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of the id alone.")] = False,
) -> None:
    """Submit a job to a queue on disk, and print its id.

    The job waits in the folder WORKSPACE, by default that of `penstock serve`, and survives restarts and power cuts, until
    `penstock drain` or a server runs it. `penstock flow` fetches its result.

    \b
    penstock work "Name three rivers."
    job=$(penstock work nightly "Name three rivers.")
    cat report.txt | penstock work nightly - --system "Summarise." --tag reports
    penstock work nightly "A person, as JSON." --schema person.json --key person-1
    penstock work nightly --after draft=$job "Shorten this: {{draft}}"
    penstock work nightly --embed A text to compare with others
    penstock work nightly --request body.json

    The exit code is 0 if the job is submitted, 1 if it cannot be, 64 for wrong usage.
    """
    print_old_variables()
    if workspace is not None and not prompt and body is None and _is_prompt(workspace):
        workspace, prompt = None, [str(workspace)]
    workspace = workspace or default_folder()
    sampling_options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    sampling: dict[str, Any] = {name: value for name, value in sampling_options.items() if value is not None}
    if stop:
        sampling["stop"] = stop
    api_request = None
    if embed or body is not None or endpoint is not None:
        texts = {"system": system, "schema": schema, "grammar": grammar, "regex": regex, "after": after, "raw": raw or None}
        flags = [f"--{name.replace('_', '-')}" for name, value in {**texts, **sampling}.items() if value is not None]
        api_request = _api_request(workspace, prompt, embed, body, endpoint, model, flags)
    with wrong_usage():
        request = WorkRequest(
            model=model if api_request is None else api_request.model,
            endpoint=None if api_request is None else api_request.endpoint,
            system=system,
            raw=raw,
            sampling=sampling,
            schema=None if schema is None else _schema(schema),
            grammar=None if grammar is None else _text_of(grammar, "--grammar"),
            regex=regex,
            priority=priority,
            deadline=deadline,
            tags=tuple(tag or ()),
            after=_parents(after or []),
            key=key,
            submitted=round(time.time(), 3),
        )
    text = _prompt(workspace, prompt) if api_request is None else api_request.text

    from penstock.workspace.flow import Flow
    from penstock.workspace.store.parents import check_placeholders
    from penstock.workspace.store.workspace import Workspace
    from penstock.workspace.work import Work

    with wrong_usage("PROMPT"):
        check_placeholders(text, request.after)
    with wrap_os_errors(workspace):
        place = Workspace(workspace, create=not request.after)  # a new workspace has no parents
        job, new = Work(place).submit_request(request, text)
        served, status = place.is_served(), Flow(place).status(job)
    if as_json:
        print_json({"id": job, "workspace": workspace.absolute(), "new": new, "status": status})
    else:
        print(job, flush=True)
    if not new:
        again = f" `penstock flow {shlex.quote(str(workspace))} --retry {job}` runs it again." if status == "failed" else ""
        print(f"The key was used before; its job is {status}.{again}", file=sys.stderr)
    elif not served:
        note(f"The job is waiting. {no_server_hint(workspace)}")


def _is_prompt(argument: Path) -> bool:
    """Whether a lone argument is the prompt. With a pipe it is a folder, unless it has spaces: the pipe has the prompt."""
    text = str(argument)
    if text == STDIN:
        return True
    if argument.exists() or (os.sep in text and " " not in text):
        return False
    return not is_piped() or " " in text


def _prompt(workspace: Path, words: list[str] | None, options: str = "") -> str:
    if words and words[0] == STDIN and len(words) > 1:
        message = f"- is stdin, and {words[1][:80]!r} follows it. Write one prompt: leave out one of them, or quote all of it."
        raise typer.BadParameter(message, param_hint="PROMPT")
    example = f'penstock work {shlex.quote(str(workspace))} {options}"What is the capital of France?"'
    return prompt_text(" ".join(words) if words else None, example)


def _api_request(
    workspace: Path,
    words: list[str] | None,
    embed: bool,
    file: Path | None,
    endpoint: str | None,
    model: str | None,
    flags: list[str],
) -> Body:
    """Make the body of a request to the API. flags: options that belong into a body, or are not for one."""
    if file is None and not embed:
        raise typer.BadParameter("It goes with --request FILE.", param_hint="--endpoint")
    if embed and endpoint not in (None, EMBEDDINGS):
        raise typer.BadParameter(f"--embed is for {EMBEDDINGS}. Leave one of them out.", param_hint="--endpoint")
    if flags:
        why = "It does not go with --embed." if file is None else "It does not go with --request: write it in the body."
        raise typer.BadParameter(why, param_hint=flags[0])
    if file is None:
        return embedding(_prompt(workspace, words, "--embed "), model)
    if words:
        raise typer.BadParameter(f"The body of --request has the prompt. Leave out {words[0][:80]!r}.", param_hint="PROMPT")
    return read_body(file, EMBEDDINGS if embed else endpoint, model)


def _parents(options: list[str]) -> dict[str, str]:
    """Parse --after: `ID,left=ID`. A job without a name is called by its id."""
    found: dict[str, str] = {}
    for part in (part.strip() for one in options for part in one.split(",")):
        if any(is_job_id(word.rpartition("=")[2]) for word in part.split()[:-1]):
            raise typer.BadParameter(f"{part[:80]!r} names several jobs. Put commas between them.", param_hint="--after")
        name, named, job_id = (word.strip() for word in part.rpartition("="))
        if named and not name:
            raise typer.BadParameter(f"{part[:80]!r} has no name. Write NAME=ID, or the ID alone.", param_hint="--after")
        if found.setdefault(name or job_id, job_id) != job_id:
            raise typer.BadParameter(f"{name} names two jobs.", param_hint="--after")
    return found


def _schema(file: Path) -> Any:
    """Read a schema and check it as the server will, so that a bad one is refused now and not hours later."""
    from penstock.doors.grammar.schema import guided_schema

    try:
        schema = json.loads(_text_of(file, "--schema"))
        guided_schema(schema, field="schema")
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{file} is not JSON: {error}.", param_hint="--schema") from None
    except RequestError as error:
        raise typer.BadParameter(f"{file}: {error}", param_hint="--schema") from None
    return schema


def _text_of(file: Path, option: str) -> str:
    if str(file) == STDIN:
        raise typer.BadParameter("Name a file: stdin is for the prompt.", param_hint=option)
    return read_text(file, option, MAX_RECORD_BYTES)
