"""Simulation: runs a scenario, and tracks its jobs."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from functools import partial

from penstock.domain.job import Job
from penstock.domain.messages import Message
from penstock.domain.meta_model import Link
from penstock.domain.request import JobRequest
from penstock.domain.sampling import SamplingParams
from penstock.domain.updates import JobDone, JobFailed, JobUpdate, TokensOut
from penstock.engine.engine import RECALL_INTERVAL_S
from penstock.simulate.letter import Letter
from penstock.simulate.link_table import LinkTable
from penstock.simulate.network import MAX_SLEEP_S, TICK_S, Lane, SimulatedNetwork
from penstock.simulate.node import SimulatedNode
from penstock.simulate.scenario import Amount, EventKind, JobLoad, NetworkEvent, Scenario

WARM_UP_S = 5.0  # before the scenario begins, for nodes to find each other
MAX_OVERTIME_S = 600.0  # after its end, for jobs that are still running
LEAVE_POLL_S = 0.1
MAX_LEAVE_S = 30.0  # a leaving node goes after this, even if routes still use it
RETRY_S = 1.0  # until a closed-loop client retries after a failure
PROGRESS_S = 1.0  # of simulated time between two calls of `progress`
FIRST_TOKEN_ID = 2


class WatchedJob:
    """A job of the load, and when its tokens came. Times count from the beginning of the scenario."""

    __slots__ = ("_clock", "answer", "done", "ended", "error", "node", "number", "on_end", "prompt", "started", "tokens")

    def __init__(
        self,
        number: int,
        node: SimulatedNode,
        prompt: int,
        answer: int,
        started: float,
        clock: Callable[[], float],
        on_end: Callable[[], None],
    ) -> None:
        """clock: of the node's compute thread, to time tokens. During a pass it is ahead of `started`."""
        self.number = number
        self.node = node
        self.prompt = prompt
        self.answer = answer
        self._clock = clock
        self.on_end = on_end
        self.started = started
        self.tokens: list[float] = []  # when each came
        self.ended: float | None = None
        self.done = False
        self.error = ""

    def take(self, update: JobUpdate) -> None:
        if isinstance(update, TokensOut):
            self.tokens += [self._clock()] * len(update.token_ids)
        elif isinstance(update, JobDone):
            self.end(done=True)
        elif isinstance(update, JobFailed):
            self.end(error=str(update.error))

    def end(self, *, done: bool = False, error: str = "") -> None:
        assert self.ended is None, "a job ends once"
        self.ended, self.done, self.error = self._clock(), done, error
        self.on_end()


class ScenarioNetwork(SimulatedNetwork):
    """The machines of a scenario, on its links."""

    def __init__(self, scenario: Scenario) -> None:
        self.table = LinkTable(scenario)
        self._measured: dict[str, tuple[Link, ...]] = {}
        self._names = [machine.name for machine in scenario.machines]
        absent = scenario.absent
        present = [machine for machine in scenario.machines if machine.name not in absent]
        super().__init__(
            present,
            layers=scenario.model.layers,
            config=scenario.engine,
            width=scenario.model.hidden,
            hidden_format=scenario.hidden_format,
            seed=scenario.seed,
        )

    def links_of(self, node: SimulatedNode) -> tuple[Link, ...]:
        found = self._measured.get(node.name)
        if found is None:
            found = self._measured[node.name] = self.table.measured(node.name, self._names)
        return found

    def idle_seconds(self, node: SimulatedNode) -> float:
        """Longer than in reality, or a simulation would spend most of its time on idle wake-ups. Losses are noticed up to 40 ms
        later, and leases end up to 200 ms later."""
        if node.engine.host.reordering:
            return super().idle_seconds(node)
        return MAX_SLEEP_S if node.machine.ends else RECALL_INTERVAL_S

    def arrivals(self, lane: Lane, message: Message, letter: Letter, now: float) -> Iterator[tuple[float, Letter]]:
        sender, destination, is_data = lane
        table = self.table
        speed = table.speed(sender, destination)
        if is_data:
            now = table.transferred(sender, destination, len(letter), speed, now)
        else:
            now += len(letter) / speed.bytes_per_second
        if table.cut and frozenset((sender, destination)) in table.cut:
            return
        if speed.loss and self.dice.random() < speed.loss:
            return
        yield self.in_order(lane, now + table.latency(speed)), letter


class Simulation:
    """progress: called with the simulated seconds so far."""

    def __init__(self, scenario: Scenario, progress: Callable[[float], None] = lambda seconds: None) -> None:
        self.scenario = scenario
        self.jobs: list[WatchedJob] = []
        self.events: list[tuple[float, str]] = []  # what happened, and when
        self.alive: list[tuple[float, int]] = []  # time, and the number of live nodes from then on
        self._machines = {machine.name: machine for machine in scenario.machines}
        self._dice = random.Random(f"load {scenario.seed}")
        self._open = 0
        self._progress = progress
        self.cpu_seconds = 0.0  # spent by this process
        began = time.process_time()
        self.network = ScenarioNetwork(scenario)
        self.network.run(WARM_UP_S)
        self._start = self.network.now
        self._busy_before = {id(node): node.busy for node in self.network.all_starts}
        self._count_nodes()
        self.cpu_seconds = time.process_time() - began

    def now(self) -> float:
        return self.network.now - self._start

    # ---- running ----

    def run(self) -> None:
        """Run until the scenario is over and its jobs have ended."""
        logger = logging.getLogger("penstock")  # its engines' log lines about routes and nodes are just noise
        level = logger.level
        logger.setLevel(logging.ERROR)
        began = time.process_time()
        try:
            self._run()
        finally:
            self.cpu_seconds += time.process_time() - began
            logger.setLevel(level)

    def _run(self) -> None:
        network, seconds = self.network, self.scenario.seconds
        for load in self.scenario.loads:
            for origin in self.scenario.members(load.origin):
                self._begin(load, origin)
        for event in self.scenario.events:
            if event.at <= seconds:
                network.at(self._start + event.at, partial(self._happen, event))
        while self.now() < seconds:
            network.run(min(PROGRESS_S, seconds - self.now()))
            self._progress(self.now())
        while self._open and self.now() < seconds + MAX_OVERTIME_S:
            network.run(PROGRESS_S)
            self._progress(seconds)

    def busy_seconds(self, node: SimulatedNode) -> float:
        """Seconds of compute since the scenario began."""
        return node.busy - self._busy_before.get(id(node), 0.0)

    def lifetime(self, node: SimulatedNode, until: float) -> float:
        """Seconds that a node was live since the scenario began."""
        gone = until if node.gone_at is None else min(until, node.gone_at - self._start)
        return max(0.0, gone - max(0.0, node.started_at - self._start))

    # ---- load ----

    def _begin(self, load: JobLoad, origin: str) -> None:
        at = self.network.at
        for when in load.at:
            if when < self.scenario.seconds:
                at(self._start + when, partial(self._submit, load, origin))
        for _ in range(load.streams):
            at(self._start, partial(self._submit, load, origin))
        if load.per_second:
            self._await_next(load, origin)

    def _await_next(self, load: JobLoad, origin: str) -> None:
        """Schedule the next arrival of a Poisson process."""
        when = self.network.now + self._dice.expovariate(load.per_second)
        if when - self._start < self.scenario.seconds:
            self.network.at(when, partial(self._arrive, load, origin))

    def _arrive(self, load: JobLoad, origin: str) -> None:
        self._submit(load, origin)
        self._await_next(load, origin)

    def _submit(self, load: JobLoad, origin: str) -> None:
        node = self.network.nodes.get(origin)
        if node is None or not node.alive or self.now() >= self.scenario.seconds:
            return  # its clients cannot reach it
        prompt, answer = (self._draw(amount) for amount in (load.prompt, load.answer))

        def on_end() -> None:
            self._open -= 1
            if load.streams and node.alive:
                took_time = watched.ended is not None and watched.ended > watched.started  # else simulated time would stop
                pause = RETRY_S if not watched.done else 0.0 if took_time else TICK_S
                self.network.at(node.clock() + pause, partial(self._submit, load, origin))

        watched = WatchedJob(len(self.jobs), node, prompt, answer, self.now(), lambda: node.clock() - self._start, on_end)
        self.jobs.append(watched)
        self._open += 1
        tokens = [FIRST_TOKEN_ID + watched.number, *[1] * (prompt - 1)]  # none shares a prefix with another
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        request = JobRequest(prompt=tokens, sampling=sampling)
        job = Job(f"job-{watched.number}", request, tokens, answer, watched.number, self.network.now, watched.take)
        self.network.submit(origin, job)

    def _draw(self, amount: Amount) -> int:
        return self._dice.randint(*amount)

    # ---- events ----

    def _happen(self, event: NetworkEvent) -> None:
        if event.what in (EventKind.CUT, EventKind.HEAL):
            ends = [{*self.scenario.members(name)} for name in event.names]
            pairs = {frozenset((one, other)) for one in ends[0] for other in ends[1] if one != other}
            cut = self.network.table.cut
            cut.difference_update(pairs) if event.what is EventKind.HEAL else cut.update(pairs)
            self._note(event, " – ".join(event.names))
            return
        name = self._member(event)
        if name is None:
            return  # no machine fits the event
        node = self.network.nodes.get(name)
        match event.what:
            case EventKind.KILL:
                self.network.kill(name)
                self._fail_jobs_of(name)
            case EventKind.FREEZE:
                self.network[name].stopped = True
            case EventKind.THAW:
                self.network[name].stopped = False
            case EventKind.LEAVE:
                self.network.drain(name)
                assert node is not None
                self._await_leaving(node, self.network.now + MAX_LEAVE_S)
            case EventKind.JOIN:
                self.network.start(self._machines[name])
        self._note(event, name)
        self._count_nodes()

    def _member(self, event: NetworkEvent) -> str | None:
        """Choose the machine that an event affects: of a group, a random one that fits."""
        fitting = [name for name in self.scenario.members(event.names[0]) if self._fits(name, event.what)]
        return self._dice.choice(fitting) if fitting else None

    def _fits(self, name: str, what: EventKind) -> bool:
        node = self.network.nodes.get(name)
        alive = node is not None and node.alive
        if what is EventKind.JOIN:
            return not alive
        return alive and (what is not EventKind.THAW or self.network[name].stopped)

    def _await_leaving(self, node: SimulatedNode, until: float) -> None:
        """Let a node leave as soon as no route or job needs it."""
        if not node.alive:
            return
        engine = node.engine
        if self.network.now < until and (engine.host.routes or engine.origin.has_jobs):
            self.network.at(self.network.now + LEAVE_POLL_S, partial(self._await_leaving, node, until))
            return
        self.network.leave(node.name)
        self._fail_jobs_of(node.name)
        self._count_nodes()

    def _fail_jobs_of(self, name: str) -> None:
        for job in self.jobs:
            if job.ended is None and job.node.name == name and not job.node.alive:
                job.end(error="Its node is gone.")

    def _note(self, event: NetworkEvent, name: str) -> None:
        self.events.append((self.now(), f"{event.what.value} {name}"))

    def _count_nodes(self) -> None:
        self.alive.append((self.now(), sum(1 for _ in self.network)))
