"""A node that cannot answer now says so with 503, and an error that nobody expected with 500 and without its words."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from penstock.config.engine import EngineConfig
from penstock.domain.job import Job
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.doors.access.gate import AccessLog
from penstock.doors.access.keys import OWNER
from penstock.doors.access.meter import Meter, Ticket
from penstock.doors.app.readiness import Readiness
from penstock.doors.dispatch.answering import AnswerResponse
from penstock.doors.dispatch.mailbox import Mailbox
from penstock.doors.dispatch.running import RunningRequest
from penstock.doors.generation.exchange import Exchange
from penstock.doors.http.errors import DialectOfPath, headers_of, send_error, status_of
from penstock.doors.openai.answers import ChunkHeader, TextAnswer
from penstock.doors.openai.errors import OPENAI, openai_body
from penstock.engine.engine import Engine
from penstock.engine.job_factory import JobFactory
from penstock.errors import ComputeFailed, NotReady
from penstock.pipes.pipe import Pipe
from tests.engine.fakes import VOCAB, FakeEnds, FakeSegment, FakeStream

SECRET = "the words of a prompt"


def everybody(jobs: Sequence[Job]) -> Ticket:
    return Meter().admit(OWNER, outputs=len(jobs), prompt_tokens=0, max_tokens=0)


class Hosted:
    """As much of a HostedModel as the door looks at, over fake stages."""

    name = "fake"

    def __init__(self, *ranges: tuple[int, int]) -> None:
        segments = [FakeSegment(start, end, 32, 16) for start, end in ranges]
        self.engine = Engine(EngineConfig(), Pipe("fake", 4, segments), FakeEnds(), lambda skip_special: FakeStream())
        self.jobs = JobFactory(self.engine, None, context=100, vocab=VOCAB)  # type: ignore[arg-type]


def test_missing_layers_are_503_with_a_time_to_come_back() -> None:
    async def ask() -> None:
        hosted: Any = Hosted((0, 2))
        await RunningRequest(Mailbox(), hosted, everybody).start([])

    with pytest.raises(NotReady) as caught:
        asyncio.run(ask())
    assert status_of(caught.value) == 503
    assert "retry-after" in headers_of(caught.value)
    assert "fake" in openai_body(caught.value)["error"]["message"]


def test_a_node_is_ready_when_a_token_comes_out_and_not_before() -> None:
    whole: Any = Hosted((0, 2), (2, 4))
    whole.engine.start()
    asyncio.run(Readiness([whole], within=30).check())
    assert whole.engine.stats.first_token.count == 1
    asyncio.run(Readiness([whole], within=30).check())
    assert whole.engine.stats.first_token.count == 1  # the token of a moment ago will do
    asyncio.run(Readiness([whole], within=0.0).check())
    assert whole.engine.stats.first_token.count == 2
    whole.engine.stop()
    with pytest.raises(NotReady):
        asyncio.run(Readiness([whole], within=0.0).check())
    half: Any = Hosted((0, 2))
    with pytest.raises(NotReady, match="Layers of fake are missing"):
        asyncio.run(Readiness([half], within=30).check())


def test_a_node_that_loses_layers_is_not_ready_at_once_though_a_token_came_a_moment_ago() -> None:
    hosted: Any = Hosted((0, 2), (2, 4))
    hosted.engine.start()
    readiness = Readiness([hosted], within=30)
    asyncio.run(readiness.check())
    hosted.engine.pipe.segments = hosted.engine.pipe.segments[:1]
    with pytest.raises(NotReady, match="Layers of fake are missing"):
        asyncio.run(readiness.check())
    hosted.engine.stop()


def test_many_who_ask_whether_a_node_is_ready_wait_for_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.doors.app.readiness.PROBE_TIMEOUT_S", 0.1)
    silent: Any = Hosted((0, 4))  # its engine does not run
    probes = []
    start_job = silent.jobs.start_job
    monkeypatch.setattr(silent.jobs, "start_job", lambda *args: probes.append(args) or start_job(*args))

    async def ask() -> list[BaseException | None]:
        readiness = Readiness([silent], within=30)
        return await asyncio.gather(*(readiness.check() for _ in range(20)), return_exceptions=True)

    assert [type(found) for found in asyncio.run(ask())] == [NotReady] * 20
    assert len(probes) == 1


def test_after_an_error_a_stream_says_nothing_more() -> None:
    """The other jobs of the request are cancelled, and their ends must not look like answers."""

    async def feed() -> bytes:
        hosted: Any = Hosted((0, 2), (2, 4))
        running = RunningRequest(Mailbox(), hosted, everybody)
        sampling = SamplingParams(max_tokens=50, ignore_eos=True)
        await running.start([JobRequest(prompt=[1, 2], sampling=sampling), JobRequest(prompt=[3], sampling=sampling)])
        hosted.engine.take_commands(wait=False)
        hosted.engine.turn()
        hosted.engine.sequences.fail(hosted.jobs.open_jobs[0], ComputeFailed("The computation failed."))
        head = ChunkHeader("cmpl-1", "fake", "f")
        answer = TextAnswer(
            head,
            [[1, 2], [3]],
            1,
            token_bytes=lambda ids: [b"x"] * len(ids),
            hidden=frozenset(),
            echo=None,
            logprobs=None,
            include_usage=True,
        )
        response = AnswerResponse(running, answer, Exchange([], lambda *_: answer, stream=True), keep_alive=9.0)
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            hosted.engine.take_commands(wait=False)  # where the cancelling arrives

        async def receive() -> Any:
            await asyncio.sleep(60)

        task = asyncio.create_task(response({"type": "http"}, receive, send))
        while not task.done():
            await asyncio.sleep(0.01)
            hosted.engine.take_commands(wait=False)
        return b"".join(sent)

    heard = asyncio.run(feed())
    after = heard[heard.index(b'"error"') :]
    assert after.count(b"data: ") == 1
    assert heard.endswith(b"data: [DONE]\n\n")


def test_an_unexpected_error_is_500_and_its_words_stay_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError(SECRET)

    with caplog.at_level(logging.DEBUG):
        answer = TestClient(DialectOfPath(AccessLog(broken, refuse=send_error), dialects=[("/", OPENAI)])).get("/")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "ValueError" in caplog.text
    assert SECRET not in caplog.text + answer.text
