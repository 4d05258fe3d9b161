"""`penstock work`: put a job into a workspace, whether or not a server runs."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.jobs.workspaces import no_server_hint, note
from penstock.cli.options import wrong_usage
from penstock.cli.prompt import prompt_text
from penstock.cli.ui.durations import METAVAR, parse_duration_option
from penstock.cli.ui.output import print_json
from penstock.errors import RequestError
from penstock.workspace.store.files import MAX_RECORD_BYTES
from penstock.workspace.store.job_id import is_job_id
from penstock.workspace.store.request import DEFAULT_PRIORITY, MAX_PRIORITY, MIN_PRIORITY, WorkRequest
from penstock.workspace.store.root import wrap_os_errors

# Only what is given goes into the job: whoever runs it knows what the model's makers recommend.
MaxTokens = Annotated[int | None, typer.Option(help="Stop after so many tokens.", show_default=False)]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 always takes the likeliest word, 1 is lively; otherwise as the model's makers recommend."),
]
TopP = Annotated[float | None, typer.Option(help="Choose among the likeliest words that make up this share.")]
TopK = Annotated[int | None, typer.Option(help="Choose among the k likeliest words.")]


def work(
    workspace: Annotated[Path, typer.Argument(metavar="WORKSPACE", help="The folder for the jobs; it is made if there is none.")],
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to ask; - reads it from stdin, as does a pipe without a PROMPT.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="The model to ask; otherwise the first of whoever runs the job."),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message that goes before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")] = False,
    max_tokens: MaxTokens = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text; may be given several times.")
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Annotated[int | None, typer.Option(help="Makes an answer with a temperature repeatable.")] = None,
    schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON schema that the answer must follow.", show_default=False)
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Lark grammar that the answer must follow.", show_default=False)
    ] = None,
    regex: Annotated[str | None, typer.Option(metavar="PATTERN", help="A pattern that the whole answer must match.")] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="A word to find the job by (penstock flow --tag); may be given several times."),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOBS",
            help="Jobs to wait for, such as ID or left=ID,right=ID: {{ID}} or {{left}} in the PROMPT becomes the result. "
            "May be given several times.",
        ),
    ] = None,
    priority: Annotated[
        int, typer.Option(help=f"From {MIN_PRIORITY} to {MAX_PRIORITY}; a higher one goes first.")
    ] = DEFAULT_PRIORITY,
    deadline: Annotated[
        float | None,
        typer.Option(
            parser=parse_duration_option, metavar=METAVAR, help="When you would like it, such as 10m: it orders the queue."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="A name of your own for the request: sent again with it, it is still one job."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of the id alone.")] = False,
) -> None:
    """Put a job into a queue on disk, and print its id.

    The job waits in the folder WORKSPACE, also over a restart or a power cut, until `penstock drain` or a server works on it.
    `penstock flow` shows what became of it.

    \b
    job=$(penstock work nightly "Name three rivers.")
    cat report.txt | penstock work nightly - --system "Summarise." --tag reports
    penstock work nightly "A person, as JSON." --schema person.json --key person-1
    penstock work nightly --after draft=$job "Shorten this: {{draft}}"
    """
    sampling_options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    sampling: dict[str, Any] = {name: value for name, value in sampling_options.items() if value is not None}
    if stop:
        sampling["stop"] = stop
    with wrong_usage():
        request = WorkRequest(
            model=model,
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
    text = prompt_text(prompt, f'penstock work {shlex.quote(str(workspace))} "What is the capital of France?"')

    from penstock.workspace.flow import Flow
    from penstock.workspace.store.layout import Workspace
    from penstock.workspace.store.parents import check_placeholders
    from penstock.workspace.work import Work

    with wrong_usage("PROMPT"):
        check_placeholders(text, request.after)
    with wrap_os_errors(workspace):
        place = Workspace(workspace, create=not request.after)  # where there is none, there is nothing to come after
        job, new = Work(place).submit_request(request, text)
        served, status = place.is_served(), Flow(place).status(job)
    if as_json:
        print_json({"id": job, "workspace": workspace.absolute(), "new": new, "status": status})
    else:
        print(job, flush=True)
    if not new:
        again = f" `penstock flow {shlex.quote(str(workspace))} --retry {job}` runs it again." if status == "failed" else ""
        print(f"The key was used before: its job is {status}.{again}", file=sys.stderr)
    elif not served:
        note(f"The job waits. {no_server_hint(workspace)}")


def _parents(options: list[str]) -> dict[str, str]:
    """The jobs that --after names: `ID,left=ID`. A job without a name is called by its id."""
    found: dict[str, str] = {}
    for part in (part.strip() for one in options for part in one.split(",")):
        if any(is_job_id(word.rpartition("=")[2]) for word in part.split()[:-1]):
            raise typer.BadParameter(f"{part[:80]!r} are several jobs. Write commas between them.", param_hint="--after")
        name, named, job_id = (word.strip() for word in part.rpartition("="))
        if named and not name:
            raise typer.BadParameter(f"{part[:80]!r} has no name. Write NAME=ID, or the ID alone.", param_hint="--after")
        if found.setdefault(name or job_id, job_id) != job_id:
            raise typer.BadParameter(f"{name} is the name of two jobs.", param_hint="--after")
    return found


def _schema(file: Path) -> Any:
    """Looked at here as whoever runs the job will: a schema that cannot be enforced should not wait a night to be refused."""
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
    if str(file) == "-":
        raise typer.BadParameter("It is a file: stdin is for the prompt.", param_hint=option)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_RECORD_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read: {error.strerror or error}.", param_hint=option) from None
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}).", param_hint=option) from None
    if len(data) > MAX_RECORD_BYTES:
        raise typer.BadParameter(f"{file} has more than {MAX_RECORD_BYTES} bytes.", param_hint=option)
    if not text.strip():
        raise typer.BadParameter(f"{file} is empty.", param_hint=option)
    return text
