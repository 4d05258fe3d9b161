"""Jobs of a workspace on the real model: a server beside its API, and pools that are stopped in the middle of an answer."""

from __future__ import annotations

import copy
import json
import os
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import jsonschema
import pytest

from penstock.config.engine import EngineConfig
from penstock.config.node import DEFAULT_MODEL
from penstock.doors.api_config import ApiConfig
from penstock.doors.generation.catalog import ModelCatalog
from penstock.doors.generation.served_model import ServedModel
from penstock.doors.grammar import pool as grammar_pool
from penstock.doors.jobs.engine_runner import EngineRunner
from penstock.doors.openai.job_operations import OPENAI_JOBS
from penstock.engine.hosted_model import host_standalone
from penstock.errors import KeyLimit, NotReady
from penstock.pipes.loading.model_manager import LoadedModel
from penstock.workspace.flow import Flow, JobResult, Status
from penstock.workspace.store.disk import Disk
from penstock.workspace.store.files import FOLDER, TOKENS, Place
from penstock.workspace.store.request import WorkRequest
from penstock.workspace.store.tokens import SavedTokens, Transcript, read_tokens
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from penstock.workspace.worker.pool import Pool
from tests.server import Api, server_thread
from tests.workspace.crashing import quick_folder
from tests.workspace.queues import until

LIMIT = 600  # tokens that a job may ask for
PATIENCE = 120.0
PASS_S = 0.02
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 5, "maxItems": 5},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}

pytestmark = pytest.mark.timeout(300)


# ---- a server that works on a workspace beside its API ----


@dataclass
class Beside:
    """A server and the workspace that it works on."""

    server: Api
    work: Work
    flow: Flow

    def answer(self, prompt: str, **details: Any) -> JobResult:
        return self.flow.wait(self.work.submit(prompt, **details), timeout=PATIENCE)

    def request(self, path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            self.server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def post(self, path: str, **body: Any) -> str:
        choice = self.request(path, **body)["choices"][0]
        text: str = choice["message"]["content"] if "message" in choice else choice["text"]
        return text

    def chat(self, *contents: str, **details: Any) -> str:
        """The last one is the user's, one before it the system's."""
        roles = ("system", "user")[-len(contents) :]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        return self.post("/v1/chat/completions", model=DEFAULT_MODEL, messages=messages, **details)


@pytest.fixture(scope="module")
def beside(small_model: LoadedModel) -> Iterator[Beside]:
    """With a small model, whose words do not matter."""
    flags = ["--max-tokens", str(LIMIT), "--log-level", "debug"]
    with quick_folder() as folder, server_thread(small_model, *flags, "--workspace", str(folder / "workspace")) as server:
        workspace = Workspace(folder / "workspace")
        yield Beside(server, Work(workspace), Flow(workspace))


def test_a_greedy_job_says_what_the_api_says(beside: Beside) -> None:
    prompt = "What is the capital of France?"
    result = beside.answer(prompt, temperature=0, max_tokens=40)
    assert result.text == beside.chat(prompt, temperature=0, max_tokens=40)
    assert result.usage["model"] == DEFAULT_MODEL


def test_a_system_message_and_a_seed_mean_the_same_as_in_the_api(beside: Beside) -> None:
    asked = {"temperature": 0.9, "seed": 7, "max_tokens": 30}
    result = beside.answer("Name a river.", system="You speak like a pirate.", **asked)
    assert result.text == beside.chat("You speak like a pirate.", "Name a river.", **asked)


def test_a_raw_job_continues_its_prompt(beside: Beside) -> None:
    asked = {"temperature": 0, "max_tokens": 20, "stop": ["\n"]}
    result = beside.answer("The sea is", raw=True, **asked)
    assert result.text == beside.post("/v1/completions", model=DEFAULT_MODEL, prompt="The sea is", **asked)


def test_a_job_with_a_schema_gives_json_that_follows_it(beside: Beside) -> None:
    result = beside.answer("Describe a person with five numbers.", schema=PERSON, temperature=0.8, max_tokens=300)
    assert result.usage["finish_reason"] == "stop"
    jsonschema.validate(json.loads(result.data), PERSON)


@pytest.mark.parametrize(
    "endpoint, body",
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}], "temperature": 0, "max_tokens": 9, "n": 2}),
        ("/v1/completions", {"prompt": ["One", "Two"], "temperature": 0, "max_tokens": 9}),
        ("/v1/embeddings", {"input": "A river."}),
        ("/v1/embeddings", {"input": ["A river.", "A road."], "encoding_format": "base64"}),
        ("/v1/responses", {"input": "Hi.", "temperature": 0, "max_output_tokens": 16, "store": False}),
    ],
)
@pytest.mark.parametrize("model", [None, DEFAULT_MODEL])
def test_a_body_as_a_job_has_the_answer_of_the_api_as_its_result(
    beside: Beside, endpoint: str, body: dict[str, Any], model: str | None
) -> None:
    """Whether or not it names a model: a job without one gets the first."""
    named = {} if model is None else {"model": model}
    result = beside.answer(json.dumps(body | named), endpoint=endpoint, model=model)
    assert result.done, result.text
    expected = beside.request(endpoint, **body, model=DEFAULT_MODEL)
    assert comparable(json.loads(result.data)) == comparable(expected)


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Without ids and times, which differ, and how many tokens were known already."""
    output = [item | {"id": ""} for item in answer.get("output", ())]
    usage = {name: value for name, value in answer["usage"].items() if not name.endswith("details")}
    changing = ("id", "created", "created_at", "completed_at", "service_tier")
    return {name: value for name, value in answer.items() if name not in changing} | {"output": output, "usage": usage}


def test_a_body_for_another_model_than_the_jobs_fails_with_the_reason(beside: Beside) -> None:
    result = beside.answer(json.dumps({"model": "elsewhere", "input": "A river."}), endpoint="/v1/embeddings")
    assert (result.status, result.usage["error"]["field"]) == (Status.FAILED, "model")
    assert result.text.startswith("The body is for the model 'elsewhere', the job for another.")


@pytest.mark.parametrize("body", ["{", "[]", "7", "{}", '{"model": null}'])
def test_a_prompt_that_is_no_body_fails_with_the_reason(beside: Beside, body: str) -> None:
    result = beside.answer(body, endpoint="/v1/embeddings")
    assert (result.status, result.usage["error"]["code"]) == (Status.FAILED, "invalid_request")


def test_more_tokens_than_the_node_allows_fail_with_the_reason(beside: Beside) -> None:
    result = beside.answer("Hello", max_tokens=LIMIT + 1)
    assert (result.status, result.usage["error"]["hint"]) == (Status.FAILED, f"Ask for at most {LIMIT}.")


def test_a_prompt_that_is_too_long_fails_with_the_reason(beside: Beside) -> None:
    result = beside.answer("word " * 20_000, max_tokens=10)
    assert result.status is Status.FAILED
    assert "tokens" in result.text
    assert result.usage["error"]["code"] == "prompt_too_long"


def test_a_schema_that_cannot_be_enforced_fails_with_the_reason(beside: Beside) -> None:
    result = beside.answer("Hello", schema={"type": "nonsense"}, max_tokens=10)
    assert result.status is Status.FAILED
    assert "schema" in result.text


def test_requests_of_the_api_are_answered_before_the_jobs_that_run(beside: Beside) -> None:
    jobs = [beside.work.submit(f"Count from {number}.", max_tokens=LIMIT, ignore_eos=True) for number in range(64)]
    until(lambda: beside.flow.counts()[Status.RUNNING] == 64, "all to run")
    for number in range(3):
        assert beside.chat(f"Say {number}.", temperature=0, max_tokens=8)
    assert {beside.flow.status(job) for job in jobs} == {Status.RUNNING}
    for job in jobs:
        beside.work.cancel(job)
    assert {beside.flow.wait(job, timeout=PATIENCE).text for job in jobs} == {"The job was cancelled.\n"}


def test_the_log_tells_nothing_of_what_jobs_ask_and_say(beside: Beside) -> None:
    """What is looked for: a word of the prompt, of the system message, of a schema and a regex that fail, and of the answer."""
    secret = "xylophonist"
    done = [
        beside.answer(f"Who is the {secret}?", system=f"You know the {secret}.", max_tokens=20, temperature=0),
        beside.answer("Say the word.", regex=f"{secret}s?", max_tokens=20),
    ]
    failed = [
        beside.answer("Hello", schema={"type": secret}, max_tokens=10),
        beside.answer("Hello", regex=f"({secret}", max_tokens=10),
        beside.answer(secret, max_tokens=LIMIT + 1),
        beside.answer(f"{secret} " * 20_000, max_tokens=10),
    ]
    assert [result.status for result in (*done, *failed)] == [Status.DONE] * 2 + [Status.FAILED] * 4
    assert done[1].text.startswith(secret)
    log = beside.server.log()
    assert all(result.job_id in log for result in done), "it tells that they ended"
    assert secret not in log
    assert done[0].text[:15] not in log


# ---- stopped in the middle, and resumed ----


@pytest.fixture(scope="module")
def runner(small_model: LoadedModel) -> Iterator[EngineRunner]:
    """With a small model that takes its time, so that its jobs can be stopped on the way."""
    (segment,) = small_model.segments
    slow = copy.copy(segment)

    def process(*args: Any, **more: Any) -> Any:
        time.sleep(PASS_S)
        return segment.process(*args, **more)

    slow.process = process  # type: ignore[method-assign]
    hosted = host_standalone(replace(small_model, segments=(slow,)), EngineConfig())
    hosted.start()
    yield EngineRunner(ApiConfig(ModelCatalog({hosted.name: ServedModel(hosted)})), OPENAI_JOBS.endpoints)
    hosted.stop()


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    with quick_folder() as folder:
        made = Workspace(folder / "workspace", create=True)
        yield made
        made.close()


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 30, "ignore_eos": True},
    "with a seed": {"temperature": 0.9, "seed": 11, "max_tokens": 30, "ignore_eos": True},
    "with a schema": {"temperature": 0, "max_tokens": 200, "schema": PERSON},
    "with a schema and a seed": {"temperature": 0.9, "seed": 5, "max_tokens": 200, "schema": PERSON},
}
PROMPT = "Tell me about the Danube, and list five numbers."


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "kind", [kind if kind == "with a schema and a seed" else pytest.param(kind, marks=pytest.mark.slow) for kind in ASKED]
)
def test_a_job_that_was_stopped_says_what_an_undisturbed_one_says(runner: EngineRunner, workspace: Workspace, kind: str) -> None:
    work, flow = Work(workspace), Flow(workspace)
    whole = work.submit(PROMPT, **ASKED[kind])
    Pool(workspace, runner).drain()
    cut = work.submit(PROMPT, **ASKED[kind])
    said = [stop_after(workspace, runner, cut, tokens) for tokens in (3, 9)]
    assert said[0] < said[1]
    Pool(workspace, runner).drain()
    assert flow.get(cut).data == flow.get(whole).data
    assert flow.get(cut).usage["resumed_tokens"] == said[1]
    assert flow.get(cut).usage["completion_tokens"] == flow.get(whole).usage["completion_tokens"]


@pytest.mark.usefixtures("impatient")
def test_a_drawn_seed_is_kept_for_those_who_go_on(runner: EngineRunner, workspace: Workspace) -> None:
    job = Work(workspace).submit(PROMPT, temperature=1.0, max_tokens=30, ignore_eos=True)
    stop_after(workspace, runner, job, 5)
    first = said_so_far(workspace, job)
    stop_after(workspace, runner, job, 9)
    then = said_so_far(workspace, job)
    assert (then.seed, then.fingerprint) == (first.seed, first.fingerprint)
    assert then.tokens[: len(first.tokens)] == first.tokens


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "kind,tokens",
    [
        pytest.param("greedy", [4_000_000_000], id="no token", marks=pytest.mark.slow),
        pytest.param("greedy", [49_152], id="behind the last"),
        pytest.param("with a schema", [17, 18, 19], id="no JSON", marks=pytest.mark.slow),
    ],
)
def test_tokens_that_cannot_be_continued_are_dropped(
    runner: EngineRunner, workspace: Workspace, kind: str, tokens: Sequence[int]
) -> None:
    """The first two are refused when the job is started, the last ones by its grammar, on the compute thread."""
    work, flow = Work(workspace), Flow(workspace)
    whole, forged = work.submit(PROMPT, **ASKED[kind]), work.submit(PROMPT, **ASKED[kind])
    stop_after(workspace, runner, forged, 5)
    forge(workspace, forged, tokens)
    Pool(workspace, runner).drain()
    assert flow.get(forged).data == flow.get(whole).data
    assert "resumed_tokens" not in flow.get(forged).usage


def stop_after(workspace: Workspace, runner: EngineRunner, job: str, tokens: int) -> int:
    """Let a pool run until the job has said so many, and stop it. Returns how many are on the disk."""
    pool = Pool(workspace, runner)
    pool.start()
    try:
        running = workspace.path / Place.PROCESSING / job / TOKENS
        until(lambda: running.exists() and running.stat().st_size > 36 + 8 * tokens, "some tokens")
    finally:
        pool.stop()
    return len(said_so_far(workspace, job).tokens)


def said_so_far(workspace: Workspace, job: str) -> SavedTokens:
    folder = os.open(workspace.path / Place.READY / job, FOLDER)
    try:
        said = read_tokens(folder)
        assert said is not None
        return said
    finally:
        os.close(folder)


def forge(workspace: Workspace, job: str, tokens: Sequence[int]) -> None:
    """Other tokens, in a file that is whole."""
    said = said_so_far(workspace, job)
    path = workspace.path / Place.READY / job
    (path / TOKENS).unlink()
    folder = os.open(path, FOLDER)
    try:
        transcript = Transcript(Disk(), folder, SavedTokens(said.seed, said.fingerprint))
        transcript.append(tokens, b"forged")
    finally:
        os.close(folder)


# ---- grammars ----


def test_grammars_of_a_batch_count_for_the_key_that_owns_it(runner: EngineRunner) -> None:
    (served,) = runner._catalog.models.values()
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    body = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Hi."}], "response_format": form}
    line = WorkRequest(endpoint="/v1/chat/completions", batch="1700000000_1_1", owner="its owner")
    runner.prepare(line, json.dumps(body), Event())
    runner.prepare(WorkRequest(schema=PERSON), "Hi.", Event())
    assert {"its owner", None} <= served.grammars._model.pool._accounts.keys()


def test_a_job_whose_grammar_cannot_be_compiled_now_waits(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Event()
    stopped.set()
    with pytest.raises(NotReady):
        runner.prepare(WorkRequest(regex="never compiled"), "Hi.", stopped)
    monkeypatch.setattr(grammar_pool, "MAX_LIVE", 0)
    with pytest.raises(KeyLimit, match="in use at once"):
        runner.prepare(WorkRequest(regex="no room"), "Hi.", Event())
