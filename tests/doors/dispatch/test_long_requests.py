"""Large requests hold up nobody: they are looked at aside, in time that grows with them, and take one place."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from starlette.requests import Request

from penstock.config.engine import EngineConfig
from penstock.config.keys import KeyLimits
from penstock.domain.job import Job
from penstock.domain.request import JobRequest
from penstock.domain.updates import JobDone, JobUpdate, Timings, Usage
from penstock.doors.access.keys import OWNER, Caller
from penstock.doors.access.meter import Meter, Ticket
from penstock.doors.anthropic.conversation import conversation
from penstock.doors.anthropic.requests import CountTokensRequest
from penstock.doors.api_config import ApiConfig
from penstock.doors.dispatch.answering import AnswerResponse
from penstock.doors.dispatch.dispatcher import RequestDispatcher
from penstock.doors.dispatch.mailbox import Mailbox
from penstock.doors.dispatch.running import MAX_CONCURRENT_JOBS, RunningRequest
from penstock.doors.generation.catalog import ModelCatalog
from penstock.doors.generation.exchange import Context, Exchange
from penstock.doors.http.fields import LARGE_BODY_BYTES, Fields
from penstock.doors.http.framing import EVENTS, LINES, Framing
from penstock.doors.ollama.messages import plain_messages
from penstock.doors.ollama.requests import OllamaMessage
from penstock.doors.openai.responses.create import offered_tools
from penstock.doors.openai.responses.requests import ResponseRequest
from penstock.doors.tools.formats import DESCRIBED
from penstock.doors.tools.history import in_plain_text
from penstock.engine.engine import Engine
from penstock.engine.job_factory import JobFactory
from penstock.errors import KeyLimit, KeyRevoked, QueueFull
from penstock.pipes.pipe import Pipe
from tests.engine.fakes import VOCAB, FakeEnds, FakeSegment, FakeStream

PATIENCE = 20.0
MANY = 100_000  # with copies of all that came before, that many would take minutes


class Hosted:
    """As much of a HostedModel as the door looks at, over fake stages."""

    name = "fake"

    def __init__(self, max_jobs: int | None = None) -> None:
        pipe = Pipe("fake", 4, [FakeSegment(0, 4, 32, 16)])
        self.engine = Engine(EngineConfig(), pipe, FakeEnds(), lambda skip_special: FakeStream())
        self.jobs = JobFactory(self.engine, None, context=100, vocab=VOCAB, max_jobs=max_jobs)  # type: ignore[arg-type]


class ServedModel:
    max_messages = None

    def __init__(self, hosted: Hosted) -> None:
        self.hosted = hosted


class Said(Fields):
    model: str
    text: str


class Nothing:
    """An answer that says where it was put together."""

    def __init__(self, framing: Framing, note: Callable[[str], None] = lambda step: None) -> None:
        self.framing, self._note = framing, note

    def begin(self) -> Iterable[Any]:
        return ()

    def take(self, number: int, update: JobUpdate) -> Iterable[Any]:
        return ()

    def end(self, usage: Usage) -> Iterable[Any]:
        return ()

    def failed(self, error: Exception) -> Iterable[Any]:
        return ()

    def whole(self, usage: Usage) -> dict[str, str]:
        self._note("whole")
        return {}


# ---- aside ----


@pytest.mark.parametrize("length, in_thread", [(10, False), (LARGE_BODY_BYTES, True)])
def test_a_large_request_is_understood_tokenized_and_put_together_aside(
    length: int, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, int] = {}

    def note(step: str) -> None:
        threads[step] = threading.get_ident()

    def exchange(asked: Said, context: Context) -> Exchange:
        note("understood")
        return Exchange([JobRequest(prompt=[1, 2])], lambda job_id, prompts: Nothing(EVENTS, note))

    async def ask(hosted: Hosted) -> None:
        served: Any = ServedModel(hosted)
        dispatcher = RequestDispatcher(ApiConfig(ModelCatalog({"fake": served})))
        dispatcher.mailbox = Mailbox()
        body = json.dumps({"model": "fake", "text": "x" * length}).encode()
        messages = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.sleep(60)

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "state": {"caller": OWNER, "log": {}}}
        response = await dispatcher.answer(Said, exchange, Request(scope, receive))
        hosted.engine.start()
        await response(scope, receive, send)

    hosted = Hosted()
    prepare = hosted.jobs.prepare
    monkeypatch.setattr(hosted.jobs, "prepare", lambda *given: (note("tokenized"), prepare(*given))[1])
    try:
        asyncio.run(ask(hosted))
    finally:
        hosted.engine.stop()
    assert {step: thread != threading.get_ident() for step, thread in threads.items()} == dict.fromkeys(
        ("understood", "tokenized", "whole"), in_thread
    )


def test_a_key_has_no_more_work_done_than_it_may_have_answers() -> None:
    at_work, blocked, begun = threading.Event(), threading.Event(), list[str]()

    def exchange(asked: Said, context: Context) -> Exchange:
        begun.append(str(context.owner))
        at_work.set()
        blocked.wait(PATIENCE)
        return Exchange([], lambda job_id, prompts: Nothing(EVENTS))

    async def scene() -> None:
        served: Any = ServedModel(Hosted())
        dispatcher = RequestDispatcher(ApiConfig(ModelCatalog({"fake": served})))
        dispatcher.mailbox = Mailbox()
        body = json.dumps({"model": "fake", "text": "x" * LARGE_BODY_BYTES}).encode()

        async def ask(caller: Caller) -> None:
            scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "state": {"caller": caller, "log": {}}}

            async def receive() -> Any:
                return {"type": "http.request", "body": body}

            await dispatcher.answer(Said, exchange, Request(scope, receive))

        one = Caller("a" * 64, "one", KeyLimits(jobs=1))
        first = asyncio.create_task(ask(one))
        assert await asyncio.to_thread(at_work.wait, PATIENCE)
        for _ in range(5):
            with pytest.raises(KeyLimit, match="1 answers open at once"):
                await ask(one)
        second = asyncio.create_task(ask(Caller("b" * 64, "two", KeyLimits(jobs=1))))
        while len(begun) < 2:
            await asyncio.sleep(0.001)
        blocked.set()
        for request in (first, second):
            with pytest.raises(KeyRevoked):  # there is no folder of keys here; that they get so far is the point
                await request
        assert begun == ["a" * 16, "b" * 16]

    asyncio.run(scene())


@pytest.mark.parametrize("framing, comments", [(LINES, 0), (EVENTS, 3)])
def test_a_silent_stream_wakes_up_only_to_say_that_it_lives(framing: Framing, comments: int) -> None:
    """Where the format has nothing to say then, it does nothing, and the event loop is not kept busy."""

    class Running:
        job_id, usage, timings, error, done = "1_2_3", Usage(), Timings(), None, False

        def __init__(self) -> None:
            self.reads, self._updates = 0, Mailbox().open()
            self.wake = self._updates.wake

        async def read(self) -> list[Any]:
            self.reads += 1
            self.done = self.reads == 4
            return [] if self.done else await self._updates.read()

        def close(self) -> None:
            pass

    async def listen() -> None:
        answer, running, sent = Nothing(framing), Running(), []
        exchange = Exchange([], lambda job_id, prompts: answer, stream=True)
        response = AnswerResponse(running, answer, exchange, keep_alive=0.05)  # type: ignore[arg-type]

        async def receive() -> Any:
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            sent.append(message.get("body"))

        begin = asyncio.get_running_loop().time()
        await response({"type": "http"}, receive, send)
        assert sent.count(b": keep-alive\n\n") == comments
        assert asyncio.get_running_loop().time() - begin > 0.14, "it waits before each"

    asyncio.run(listen())


# ---- in time that grows with them ----


def test_a_message_of_many_blocks_is_joined_once() -> None:
    blocks = [{"type": "text", "text": "x" * 100}] * MANY
    asked = CountTokensRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": blocks}]})
    (message,) = conversation(asked).messages
    assert len(message["content"]) == MANY * 101 - 1


def test_many_calls_of_one_message_are_put_together_once() -> None:
    blocks = [{"type": "tool_use", "id": "a", "name": "f", "input": {}}] * MANY
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": blocks}, {"role": "user", "content": "!"}]
    output = conversation(CountTokensRequest.model_validate({"model": "m", "messages": turns})).messages
    assert len(output[1]["tool_calls"]) == MANY


def test_many_results_are_joined_once() -> None:
    results = [{"role": "tool", "tool_call_id": "a", "content": "x" * 1000}] * MANY
    (message,) = in_plain_text(results, DESCRIBED, (), system=True)
    assert message["content"].count("<tool_response>") == MANY


@pytest.mark.parametrize("result", [{}, {"tool_name": "last"}])
def test_each_of_many_results_finds_its_call_at_once(result: dict[str, str]) -> None:
    half = MANY // 4
    calls = [{"function": {"name": "first"}}] * half + [{"function": {"name": "last"}}] * half
    results = [OllamaMessage(role="tool", content="", **result)] * half  # type: ignore[arg-type]
    found = plain_messages([OllamaMessage.model_validate({"role": "assistant", "tool_calls": calls}), *results])
    wanted = [call["id"] for call in found[0]["tool_calls"]]
    assert [one["tool_call_id"] for one in found[1:]] == (wanted[half:] if result else wanted[:half])


def test_many_allowed_tools_are_found_at_once() -> None:
    tools = [{"type": "function", "name": f"f{i}"} for i in range(MANY // 2)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
    offered, _ = offered_tools(ResponseRequest.model_validate({"input": "?", "tools": tools, "tool_choice": choice}))
    assert len(offered) == len(tools)


# ---- in one place ----


def everybody(jobs: Sequence[Job]) -> Ticket:
    return Meter().admit(OWNER, outputs=1, prompt_tokens=0, max_tokens=0)


def test_a_long_list_of_texts_takes_one_place_and_goes_on_where_the_node_is_full() -> None:
    async def scene() -> None:
        hosted: Any = Hosted(max_jobs=2)
        mailbox = Mailbox()
        texts = RunningRequest(mailbox, hosted, everybody)
        await texts.start([JobRequest(prompt=[1], embed=True)] * (3 * MAX_CONCURRENT_JOBS))
        assert (hosted.jobs.counted_jobs, len(hosted.jobs.open_jobs)) == (1, MAX_CONCURRENT_JOBS)

        await RunningRequest(mailbox, hosted, everybody).start([JobRequest(prompt=[1])])  # they shut nobody out
        with pytest.raises(QueueFull):
            await RunningRequest(mailbox, hosted, everybody).start([JobRequest(prompt=[1], embed=True)] * 3)

        (held,) = [job for job in hosted.jobs.open_jobs if job.job_id == texts.job_id]
        held.emit(JobDone(Usage(), Timings()))
        await RunningRequest(mailbox, hosted, everybody).start([JobRequest(prompt=[1])])  # takes the place of the one that ended
        while not texts.done:
            await texts.read()
            assert len(hosted.jobs.open_jobs) <= MAX_CONCURRENT_JOBS + 2
            for job in hosted.jobs.open_jobs:
                if job.request.embed:
                    job.emit(JobDone(Usage(), Timings()))
        assert texts.error is None

    asyncio.run(scene())


def test_a_request_of_several_prompts_that_has_begun_goes_on_where_others_took_all_places() -> None:
    async def scene() -> None:
        hosted: Any = Hosted(max_jobs=2)
        mailbox = Mailbox()
        prompts = RunningRequest(mailbox, hosted, everybody)
        await prompts.start([JobRequest(prompt=[1])] * 3)
        for job in hosted.jobs.open_jobs:
            job.emit(JobDone(Usage(), Timings()))
        for _ in range(2):
            await RunningRequest(mailbox, hosted, everybody).start([JobRequest(prompt=[1])])
        await prompts.read()
        assert (prompts.error, hosted.jobs.counted_jobs, len(hosted.jobs.open_jobs)) == (None, 2, 3)

    asyncio.run(scene())
