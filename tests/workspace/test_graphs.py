"""Graphs of jobs, while clients cancel and clean, and two servers come, go and die: every job ends, each after its parents."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.domain.updates import FinishReason, JobDone, JobFailed, JobUpdate, OutputFinished, Timings, TokensOut, Usage
from penstock.errors import RequestError, UnknownJob
from penstock.workspace.flow import Flow, Status
from penstock.workspace.store import workspace as layout
from penstock.workspace.store.files import FINISHED, Outcome, Place
from penstock.workspace.store.job_id import order
from penstock.workspace.store.recovery import cancel_unowned, recover
from penstock.workspace.store.request import WorkRequest
from penstock.workspace.store.workspace import Workspace
from penstock.workspace.work import Work
from penstock.workspace.worker.processor import Processor
from penstock.workspace.worker.runner import Sink, TextWriter
from penstock.workspace.worker.scanner import Scanner
from tests.workspace.crashing import quick_folder

NAMES = ("left", "right", "third")
BROKEN = JobFailed(RequestError("The model will not say it."))

some_server = st.sampled_from(["A", "B"])
some_one = st.integers(0, 30)  # of those that there are
some_parents = st.lists(some_one, max_size=len(NAMES))


@dataclass(frozen=True)
class Asked:
    words: str
    after: dict[str, str]
    mentions: bool

    def prompt(self, results: Mapping[str, str]) -> str:
        return " ".join([self.words, *(f"<{results[name]}>" for name in self.after if self.mentions)])


class Silent:
    """A task that sends no updates itself: a rule decides how the job ends."""

    model, fingerprint, seed, resumable = "fake", bytes(16), None, True

    def __init__(self, server: Server, prompt: str) -> None:
        self._server, self._prompt, self.writer = server, prompt, TextWriter()

    def start(self, job_id: str, seed: int, said: Sequence[int], sink: Sink) -> Callable[[], None]:
        self._server.on_start(job_id, self._prompt)
        self._server.sinks[job_id] = sink
        return lambda: None


@dataclass
class Server:
    """A pool's work, step by step and without threads: the real scanner chooses jobs, real processors run them."""

    workspace: Workspace
    on_start: Callable[[str, str], None]
    running: dict[str, Processor] = field(default_factory=dict)
    sinks: dict[str, Sink] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scanner = Scanner(self.workspace, lambda: None)

    def accepts(self, model: str | None) -> bool:
        return True

    ready = accepts

    def check(self) -> None:
        pass

    def prepare(self, request: WorkRequest, prompt: str, aborted: threading.Event) -> Silent:
        return Silent(self, prompt)

    def look(self) -> None:
        self.scanner.scan()
        self.scanner.read_new_jobs(seconds=10.0)

    def take(self) -> bool:
        """Take the next job; if it ends before it begins, end it here."""
        self.scanner.read_new_jobs(seconds=10.0)
        waiting = self.scanner.first(self.accepts)
        if waiting is None:
            return False
        self.scanner.forget(waiting.job_id)
        held = self.workspace.claim(waiting.job_id)
        if held is not None:
            processor = Processor(self.workspace, held, self, lambda: None, isolated=False, max_deaths=3)
            self.running[waiting.job_id] = processor
            processor.begin()
            if processor.ended:
                self.end(waiting.job_id)
        return True

    def hear(self, job_id: str, *updates: JobUpdate) -> bool:
        """Deliver updates; return whether the job ended, rather than going back to the queue."""
        for update in updates:
            self.sinks[job_id](update)
        return self.end(job_id)

    def end(self, job_id: str) -> bool:
        if self.workspace.is_cancel_requested(job_id):
            self.running[job_id].cancel()
        verdict = self.running.pop(job_id).end()
        if isinstance(verdict, Outcome):
            self.scanner.on_end(job_id)
        else:
            self.scanner.refresh([job_id])
        return isinstance(verdict, Outcome)

    def die(self) -> None:
        for processor in self.running.values():
            processor.abandon()


class Graphs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.resources = ExitStack()
        patch = self.resources.enter_context(pytest.MonkeyPatch.context())
        numbers = itertools.count(1)  # as from many machines: an id can sort before an earlier one
        patch.setattr(layout, "new_job_id", lambda: f"1700000000_{(number := next(numbers)) * 7 % 13}_{number}")
        path = self.resources.enter_context(quick_folder()) / "workspace"
        self.workspace = Workspace(path, create=True)
        self.resources.callback(self.workspace.close)
        self.work, self.flow = Work(self.workspace), Flow(self.workspace)
        self.asked: dict[str, Asked] = {}
        self.ends: dict[str, tuple[Status, str, str]] = {}  # status, text and code of each job seen to have ended
        self.completed: Counter[str] = Counter()
        self.started: set[str] = set()
        self.broken: list[str] = []  # violations found while starting a job, where an exception would fail the job
        self.servers = {name: Server(self.workspace, self.on_start) for name in "AB"}

    def ids(self) -> list[str]:
        return sorted(self.asked, key=order)

    def running(self) -> list[tuple[Server, str]]:
        return [(server, job) for server in self.servers.values() for job in sorted(server.running, key=order)]

    def is_anyone_running(self) -> bool:
        return bool(self.running())

    def is_anybody_there(self) -> bool:
        return bool(self.asked)

    def on_start(self, job_id: str, prompt: str) -> None:
        asked = self.asked[job_id]
        self.started.add(job_id)
        open_parents = [parent for parent in asked.after.values() if self.flow.status(parent) is not Status.DONE]
        if open_parents:
            self.broken.append(f"{job_id} began before {open_parents} were done")
        elif prompt != asked.prompt({name: self.flow.get(parent).text for name, parent in asked.after.items()}):
            self.broken.append(f"{job_id} was asked {prompt!r}")

    # ---- clients ----

    @initialize()
    def begin_with_a_diamond(self) -> None:
        self.submit([], True)
        self.submit([0], True)
        self.submit([0], True)
        self.submit([1, 2], True)
        for server in self.servers.values():
            server.look()  # so each holds three of them back

    @rule(parents=some_parents, mentions=st.booleans())
    def submit(self, parents: list[int], mentions: bool) -> None:
        ids = self.ids()
        after = dict(zip(NAMES, [ids[which % len(ids)] for which in parents], strict=False)) if ids else {}
        asked = Asked(f"prompt {len(self.asked)}", after, mentions)
        gone = [parent for parent in after.values() if self.flow.status(parent) is Status.MISSING]
        before = self.workspace.open_jobs()
        try:
            job_id = self.work.submit(asked.prompt({name: f"{{{{{name}}}}}" for name in after}), after=after)
        except UnknownJob:
            assert gone
            assert self.workspace.open_jobs() == before
            return
        assert not gone
        assert all(order(parent) < order(job_id) for parent in after.values())
        self.asked[job_id] = asked

    @precondition(is_anybody_there)
    @rule(which=some_one)
    def cancel(self, which: int) -> None:
        job_id = self.ids()[which % len(self.asked)]
        if self.flow.status(job_id) is not Status.MISSING:
            self.work.cancel(job_id)

    @rule()
    def clean_up(self) -> None:
        wanted = {parent for job in self.workspace.open_jobs() for parent in self.asked[job].after.values()}
        there = {job for job in wanted if self.workspace.find(job) is not None}
        self.flow.gc(older_than=-1)
        assert there == {job for job in wanted if self.workspace.find(job) is not None}, "an open job needs its parents"

    # ---- servers ----

    @rule(server=some_server, count=st.integers(1, 3))
    def take(self, server: str, count: int) -> None:
        for _ in range(count):
            self.servers[server].take()

    @rule(server=some_server)
    def look(self, server: str) -> None:
        recover(self.workspace)
        self.pass_on_cancels()
        self.servers[server].look()

    @rule(server=some_server, count=st.integers(1, 3))
    def serve(self, server: str, count: int) -> None:
        """Run jobs to their ends: a random walk would seldom get through a graph."""
        self.take(server, count)
        for job_id in sorted(self.servers[server].running, key=order):
            self.say_all(self.servers[server], job_id)

    @precondition(is_anyone_running)
    @rule(which=some_one)
    def finish(self, which: int) -> None:
        running = self.running()
        self.say_all(*running[which % len(running)])

    def say_all(self, server: Server, job_id: str) -> None:
        answer = f"{job_id} says {{{{left}}}} <{{{{right}}}}>"  # what a careless second pass would replace
        cancelled = self.workspace.is_cancel_requested(job_id)
        reason = FinishReason.CANCELLED if cancelled else FinishReason.STOP
        last = (TokensOut(0, answer, (1, 2)), OutputFinished(0, reason), JobDone(Usage(1, 2), Timings()))
        self.completed[job_id] += server.hear(job_id, *last) and not cancelled

    @precondition(is_anyone_running)
    @rule(which=some_one)
    def fail(self, which: int) -> None:
        running = self.running()
        server, job_id = running[which % len(running)]
        server.hear(job_id, BROKEN)

    @precondition(is_anyone_running)
    @rule(which=some_one)
    def give_back(self, which: int) -> None:
        running = self.running()
        server, job_id = running[which % len(running)]
        server.running.pop(job_id).hand_back()
        server.scanner.refresh([job_id])

    @rule(server=some_server)
    def die(self, server: str) -> None:
        self.servers[server].die()
        self.servers[server] = Server(self.workspace, self.on_start)

    def pass_on_cancels(self) -> None:
        for job_id in self.workspace.cancel_requests():
            if self.workspace.find(job_id) is Place.READY:
                cancel_unowned(self.workspace, job_id)

    # ---- always ----

    @invariant()
    def what_ended_stays_and_says_why(self) -> None:
        assert not self.broken
        for job_id in self.asked:
            status = self.flow.status(job_id)
            if status not in (Status.DONE, Status.FAILED):
                assert status is Status.MISSING or job_id not in self.ends, f"{job_id} had ended"
                continue
            result = self.flow.get(job_id)
            code = "" if result.done else result.usage["error"]["code"]
            found = (result.status, result.text, code)
            assert self.ends.setdefault(job_id, found) == found
            assert code in ("", "cancelled", "parent_failed", BROKEN.error.code), result.text
            if code == "parent_failed":
                assert job_id not in self.started
                self.check_reason(job_id, result.text)

    def check_reason(self, job_id: str, message: str) -> None:
        """The reason names an ancestor that failed by itself, or is gone, and a direct parent."""
        above = self.above(job_id)
        guilty = [job for job in above if self.ends.get(job, ("", "", ""))[2] not in ("", "parent_failed")]
        failed = any(f"The job {job} failed: " in message for job in guilty)
        assert failed or any(f"There is no job {job} any more" in message for job in above), message
        assert len(message) < 300, "it does not grow"

    def above(self, job_id: str) -> set[str]:
        found: set[str] = set()
        ahead = [job_id]
        while ahead:
            more = set(self.asked[ahead.pop()].after.values()) - found
            found |= more
            ahead += more
        return found

    def teardown(self) -> None:
        try:
            self.die("A")
            self.serve_until_nothing_is_open("B")  # which may hold back jobs because of parents that A has ended
            self.what_ended_stays_and_says_why()
            for job_id, asked in self.asked.items():
                parents = [self.ends[parent][0] for parent in asked.after.values()]
                status, _, code = self.ends[job_id]
                assert self.completed[job_id] == (status is Status.DONE), "done once, or not at all"
                if status is Status.DONE:
                    assert set(parents) <= {Status.DONE}
                elif Status.FAILED in parents:
                    assert code in ("parent_failed", "cancelled")
        finally:
            self.resources.close()

    def serve_until_nothing_is_open(self, name: str) -> None:
        server = self.servers[name]
        for _ in range(2 * len(self.asked) + 2):
            self.look(name)
            self.take(name, len(self.asked))
            for job_id in list(server.running):
                self.say_all(server, job_id)
            self.what_ended_stays_and_says_why()
            if not self.workspace.open_jobs():
                return
        places = {job: place for job in self.asked if (place := self.workspace.find(job)) not in (None, *FINISHED)}
        raise AssertionError(f"these wait for ever: {places}")


WALKS = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=15,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)


class LongGraphs(Graphs):
    """The same, with many more random walks."""


Graphs.TestCase.settings = WALKS
LongGraphs.TestCase.settings = settings(WALKS, max_examples=60)
TestGraphs = Graphs.TestCase
TestLongGraphs = pytest.mark.slow(LongGraphs.TestCase)
