"""Two servers and many clients do anything in any order, and die at any step: every job comes to one end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.workspace.flow import STATUS, Flow, Status
from penstock.workspace.store.files import FINISHED, Place
from penstock.workspace.store.job_id import order
from tests.workspace.crashing import KillingDisk, SteppingDisk, process, quick_folder
from tests.workspace.dying import make_repeatable
from tests.workspace.ledger import Found, Ledger, look, seals
from tests.workspace.lives import HOURS, TOKENS, Life, check_sealed, restart

some_server = st.sampled_from(["A", "B"])
some_one = st.integers(0, 20)  # of those that there are
some_step = st.one_of(st.just(0), st.integers(1, 25))  # before which a process dies; 0: it survives
some_end = st.sampled_from(["finish", "finish", "fail", "give back", "give back a suspect"])
some_key = st.sampled_from([None, None, "blue", "red"])


class Queue(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.resources = ExitStack()
        make_repeatable(self.resources.enter_context(pytest.MonkeyPatch.context()))  # or a walk could not be reproduced
        self.path = self.resources.enter_context(quick_folder()) / "workspace"
        self.ledger = Ledger()
        self.client = Life(self.path, self.ledger, name="client")
        self.servers = {name: Life(self.path, self.ledger, name=name) for name in "AB"}
        self.ran_alone: set[str] = set()
        self.prompts = 0
        self.flow = Flow(self.client.workspace)
        self.found: Found = {}
        self.sealed = seals(self.path)

    def prompt(self, key: str | None) -> str:
        self.prompts += 1
        return f"what is {key}?" if key else f"prompt {self.prompts}"

    def at(self, *places: Place) -> list[str]:
        return sorted((job_id for job_id, found in self.found.items() if found.keys() & set(places)), key=order)

    def has_ready(self) -> bool:
        return bool(self.at(Place.READY))

    def has_ended(self) -> bool:
        return bool(self.at(*FINISHED))

    def is_anyone_running(self) -> bool:
        return any(server.held for server in self.servers.values())

    def running(self, which: int) -> tuple[Life, str]:
        held = [(server, job_id) for server in self.servers.values() for job_id in sorted(server.held, key=order)]
        return held[which % len(held)]

    @initialize()
    def begin_with_a_running_job(self) -> None:
        job_id = self.client.submit("first")
        self.client.submit("second")
        assert self.servers["A"].claim(job_id)

    # ---- clients; each may die at a step ----

    @contextmanager
    def a_client(self, dies: int) -> Iterator[Life]:
        client = Life(self.path, self.ledger, disk := KillingDisk(dies), name="client")
        with process():
            assert client.workspace
            disk.arm()
            yield client
            client.end()

    @rule(key=some_key, dies=some_step)
    def submit(self, key: str | None, dies: int) -> None:
        with self.a_client(dies) as client:
            job_id = client.submit(self.prompt(key), key)
            assert self.flow.status(job_id) is not Status.MISSING

    @precondition(lambda self: self.found)
    @rule(which=some_one, dies=some_step)
    def cancel(self, which: int, dies: int) -> None:
        job_id = sorted(self.found, key=order)[which % len(self.found)]
        is_held = any(job_id in server.held for server in self.servers.values())
        with self.a_client(dies) as client:
            place = client.cancel(job_id)
            assert place is Place.PROCESSING if is_held else place in FINISHED

    @precondition(has_ended)
    @rule(which=some_one, dies=some_step)
    def retry(self, which: int, dies: int) -> None:
        ended = self.at(*FINISHED)
        with self.a_client(dies) as client:
            client.retry(ended[which % len(ended)])

    @precondition(has_ended)
    @rule(dies=some_step)
    def clean_up(self, dies: int) -> None:
        with self.a_client(dies) as client:
            client.workspace.sweep(now=time.time() + HOURS)
            assert client.gc() == len(self.at(*FINISHED))
        self.sealed = {}

    # ---- servers ----

    @precondition(has_ready)
    @rule(server=some_server, which=some_one, settled=st.booleans())
    def claim(self, server: str, which: int, settled: bool) -> None:
        ready = self.at(Place.READY)
        assert self.servers[server].claim(ready[which % len(ready)])
        if settled:
            self.servers[server].sync_claims()

    @precondition(is_anyone_running)
    @rule(which=some_one, count=st.integers(0, 3), alone=st.booleans())
    def go_on(self, which: int, count: int, alone: bool) -> None:
        server, job_id = self.running(which)
        if alone and job_id not in self.ran_alone:
            server.run_alone(job_id)
            self.ran_alone.add(job_id)
        server.say(job_id, min(count, len(TOKENS) - server.said.get(job_id, len(TOKENS))))

    @precondition(has_ready)
    @rule(server=some_server, which=some_one, count=st.integers(0, 3), how=some_end, dies=some_step)
    def serve(self, server: str, which: int, count: int, how: str, dies: int) -> None:
        ready = self.at(Place.READY)
        job_id = ready[which % len(ready)]
        self.claim(server, which, settled=True)
        self.servers[server].say(job_id, 0)
        self.servers[server].say(job_id, min(count, len(TOKENS) - self.servers[server].said[job_id]))
        self.end(self.servers[server], job_id, how, dies)

    @precondition(is_anyone_running)
    @rule(which=some_one, how=some_end, dies=some_step)
    def end_one(self, which: int, how: str, dies: int) -> None:
        self.end(*self.running(which), how, dies)

    def end(self, server: Life, job_id: str, how: str, dies: int) -> None:
        """If the server dies here, all that it holds loses its owner."""
        server.disk = server.workspace.disk = disk = KillingDisk(dies)
        with process():
            disk.arm()
            if how == "finish":
                server.finish(job_id)
            elif how == "fail":
                server.fail(job_id)
            else:
                suspect = how == "give back a suspect"
                server.give_back(job_id, suspect=suspect, survived=job_id in self.ran_alone and not suspect)
        self.ran_alone.discard(job_id)
        if disk.dead:
            self.die(server.name)
        else:
            server.disk = server.workspace.disk = SteppingDisk()

    @rule(server=some_server)
    def die(self, server: str) -> None:
        self.ran_alone -= self.servers[server].held.keys()
        self.servers[server].end()
        self.servers[server] = Life(self.path, self.ledger, name=server)

    @rule(server=some_server)
    def recover(self, server: str) -> None:
        held = {job_id for one in self.servers.values() for job_id in one.held}
        moved = self.servers[server].recover()
        assert moved.keys() == set(self.at(Place.PROCESSING)) - held

    @precondition(has_ready)
    @rule(server=some_server, which=some_one, deaths=st.integers(1, 3))
    def die_alone_with_a_job(self, server: str, which: int, deaths: int) -> None:
        """Let a job kill its server in an isolated run; a random walk would hardly get that far."""
        ready = self.at(Place.READY)
        job_id = ready[which % len(ready)]
        for _ in range(deaths):
            if job_id in self.at(Place.READY):
                self.claim(server, self.at(Place.READY).index(job_id), settled=True)
                self.servers[server].run_alone(job_id)
                self.die(server)
                self.nothing_is_broken()
                self.recover(server)
                self.nothing_is_broken()

    # ---- always ----

    @invariant()
    def nothing_is_broken(self) -> None:
        found = look(self.path)
        self.ledger.check(found)
        self.sealed = check_sealed(self.sealed, self.path)
        for job_id, places in found.items():
            assert self.flow.status(job_id) is STATUS[next(iter(places))]
        for server in self.servers.values():
            for job_id in server.held:
                assert self.client.workspace.claim(job_id) is None
                assert self.client.workspace.hold(job_id, Place.PROCESSING) is None, "somebody else could have it too"
        self.ledger.adopt(found)
        self.found = found

    def teardown(self) -> None:
        try:
            for life in (self.client, *self.servers.values()):
                life.end()
            restart(self.path, self.ledger)
        finally:
            self.resources.close()


WALKS = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=8,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)


class LongQueue(Queue):
    """The same, with many more random walks."""


Queue.TestCase.settings = WALKS
LongQueue.TestCase.settings = settings(WALKS, max_examples=100)
TestQueue = Queue.TestCase
TestLongQueue = pytest.mark.slow(LongQueue.TestCase)
