"""A network in one process, on simulated time: nodes over fake layers, and messages that are lost, repeated, late or damaged.

Every message is encoded and decoded again, every node has its own idea of who is there, and time passes only when all that could
happen at one instant has happened: a run depends on its seed alone, and a minute of waiting costs nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.config.engine import EngineConfig
from penstock.domain.fsm import ComputeStep
from penstock.domain.job import HOLDS_KV, QUEUED, TERMINAL, Job
from penstock.domain.job import Sequence as Answer
from penstock.domain.messages import Mark, Message
from penstock.domain.sampling import SamplingParams
from penstock.domain.span import NetworkJob
from penstock.domain.updates import (
    FinishReason,
    JobDone,
    JobFailed,
    JobUpdate,
    OutputFinished,
    PromptLogprobs,
    TokenLogprob,
    TokensOut,
)
from penstock.engine.routing.origin import Origin
from penstock.errors import PenstockError
from penstock.network.codec import decode, decode_record, encode, encode_record
from tests.engine.fakes import make_job, oracle
from tests.engine.node import Node, Place
from tests.engine.sequences.test_properties import check_embedding, check_pool
from tests.network.faults import _flipped

TICK = 0.01  # seconds: how often a node looks at its clock when nothing comes
NEWS = 0.05  # seconds at most until a change has reached every node
Lane = tuple[str, str, bool]  # sender, destination, and whether it is the stream of hidden states
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@dataclass
class Faults:
    """Probabilities. Only messages that `hits` says yes to are harmed: it sees sender, destination and message."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    hits: Callable[[str, str, Message], bool] = lambda sender, destination, message: True
    hold: tuple[float, float] = (0.001, 0.08)  # seconds; some longer than a stage waits for what was overtaken
    part: tuple[float, float] = (0.0, 1.0)  # of a message that is damaged


@dataclass
class Asked:
    """A job under observation."""

    node: str
    at: Node
    job: Job
    updates: list[JobUpdate]
    room: int
    may_fail: bool = False
    checked: int = 0  # so many of its updates were looked at before

    @property
    def final(self) -> JobDone | JobFailed | None:
        last = self.updates[-1] if self.updates else None
        return last if isinstance(last, JobDone | JobFailed) else None

    @property
    def error(self) -> PenstockError:
        assert isinstance(self.final, JobFailed), self.final
        return self.final.error

    def said(self, index: int = 0) -> list[int]:
        return [token for u in self.updates if isinstance(u, TokensOut) and u.index == index for token in u.token_ids]

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        found: list[TokenLogprob] = []
        for update in self.updates:
            if isinstance(update, PromptLogprobs):
                assert update.start == len(found) + 1, "told in order, without holes, once"
                found += update.logprobs
        return found


class World:
    def __init__(
        self,
        *places: Place,
        layers: int = 4,
        config: EngineConfig | None = None,
        faults: Faults | None = None,
        seed: int = 0,
        lease: float = 10.0,
        recovery_timeout: float = 30.0,
        latency: float = 0.0005,
        tokens_per_second: float = math.inf,
        window: int | None = None,
    ) -> None:
        """tokens_per_second: hidden states that each link carries, one NetworkJob after the other.
        window: positions that a token sees in every layer; None for all."""
        self.window = window
        self.layers, self.lease, self.recovery_timeout = layers, lease, recovery_timeout
        self.config = config or EngineConfig(block_size=4, chunk=8, policy="fcfs")
        self.faults, self.latency, self.tokens_per_second = faults or Faults(), latency, tokens_per_second
        self._free: dict[Lane, float] = {}  # when a link has sent what it was given
        self.dice = random.Random(seed)
        random.seed(seed)  # how long origins wait before they try again
        self.now = 1000.0
        self.nodes: dict[str, Node] = {}
        self.asked: list[Asked] = []
        self.refusals: Counter[str] = Counter()  # by verdict, as they came home
        self.seen: list[tuple[str, str, Message]] = []  # sender, destination, message; kept if `watching`
        self.watching = False
        self._order = itertools.count()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._due: dict[Lane, float] = {}  # when the last message arrives, by stream
        self._epochs = itertools.count(1)
        self._before: dict[tuple[str, int, int], tuple[int, int, int, int, int]] = {}
        self._next_news = self.now + 1.0
        for place in places:
            self.start(place)
        self.run(NEWS + TICK)

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def __iter__(self) -> Iterator[Node]:
        return iter([node for node in self.nodes.values() if node.alive])

    # ---- what happens ----

    def start(self, place: Place) -> Node:
        node = self.nodes[place.name] = Node(self, place, next(self._epochs))
        self._spread_the_news()
        return node

    def kill(self, name: str, *, noticed: float = 0.2) -> None:
        """It dies at once; the others hear of it after some time."""
        node = self.nodes[name]
        node.alive = False
        for asked in self.asked:
            if asked.at is node and asked.final is None:
                asked.may_fail = True
        self.at(self.now + noticed, self._spread_the_news)

    def restart(self, name: str, **changes: Any) -> Node:
        """Gone and back again in one instant, knowing nothing."""
        self.kill(name)
        return self.start(replace(self.nodes[name].place, **changes))

    def drain(self, name: str) -> None:
        node = self.nodes[name]
        node.draining = node.engine.host.draining = True
        self._spread_the_news()

    def ask(
        self, name: str, prompt: Sequence[int], sampling: SamplingParams = GREEDY, *, may_fail: bool = False, **more: Any
    ) -> Asked:
        node = self.nodes[name]
        reach = max(p.blocks for p in self._places()) * self.config.block_size
        room = (node.engine.max_tokens or reach) - len(prompt)
        job, updates = make_job(prompt, sampling, seed=len(self.asked), arrival=node.clock(), room=max(1, room), **more)
        asked = Asked(name, node, job, updates, job.max_tokens, may_fail)
        self.asked.append(asked)
        node.engine.submit(job)
        return asked

    def embed(self, name: str, prompt: Sequence[int], **more: Any) -> Asked:
        return self.ask(name, prompt, SamplingParams(), embed=True, **more)

    def cancel(self, asked: Asked) -> None:
        asked.may_fail = True
        self.nodes[asked.node].engine.cancel(asked.job)

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (when, next(self._order), action))

    def _places(self) -> list[Place]:
        return [node.place for node in self]

    def _spread_the_news(self) -> None:
        records = tuple(decode_record(encode_record(node.record())) for node in self)
        issue = next(self._order)
        for node in self:
            self.at(self.now + self.dice.uniform(0, NEWS), partial(node.hear, issue, records))

    # ---- messages ----

    def post(self, sender: Node, destination: str, message: Message) -> None:
        data = encode(message, sender.clock())
        if self.watching:
            self.seen.append((sender.name, destination, decode(data)))
        if destination not in {record.node for record in sender.records}:
            if isinstance(message, NetworkJob):
                sender.engine.on_unsent(destination, message)
            return
        dice, faults, now = self.dice, self.faults, sender.clock()
        drop, duplicate, delay, reorder, corrupt = (dice.random() for _ in range(5))
        if not faults.hits(sender.name, destination, message):
            drop = duplicate = delay = reorder = corrupt = 1.0
        if drop < faults.drop:
            return
        if corrupt < faults.corrupt:
            data = _flipped(data, [(dice.uniform(*faults.part), dice.randrange(1, 256)) for _ in range(dice.randint(1, 4))])
        lane = self._lane(sender, destination, message)
        due = self._transferred(lane, message, now) + self.latency * (1 + 2 * dice.random())
        if reorder < faults.reorder:
            due += dice.uniform(*faults.hold)
        else:
            due = max(due, self._due.get(lane, 0.0))
            if delay < faults.delay:
                due += dice.uniform(*faults.hold)
            self._due[lane] = due
        for _ in range(2 if duplicate < faults.duplicate else 1):
            self.at(due, lambda: self.deliver(sender.name, destination, data))
            due += dice.uniform(0, 2 * self.latency)

    def _transferred(self, lane: Lane, message: Message, now: float) -> float:
        tokens = 0
        if isinstance(message, NetworkJob):
            tokens = sum(span.n if message.step is ComputeStep.LAYER else span.rows for span in message.spans)
        self._free[lane] = max(now, self._free.get(lane, 0.0)) + tokens / self.tokens_per_second
        return self._free[lane]

    @staticmethod
    def _lane(sender: Node, destination: str, message: Message) -> Lane:
        """Hidden states do not hold up other messages, nor the other way round."""
        return sender.name, destination, isinstance(message, NetworkJob | Mark)

    def deliver(self, sender: str, destination: str, data: bytes) -> None:
        node = self.nodes.get(destination)
        if node is not None and node.alive and node.stopped:
            self.at(self.now + TICK, lambda: self.deliver(sender, destination, data))  # its machine keeps it
        elif node is not None and node.alive:
            self._count_refusals(destination, data)
            node.receive(sender, data)

    def _count_refusals(self, destination: str, data: bytes) -> None:
        try:
            message = decode(data)
        except PenstockError:
            return
        if isinstance(message, NetworkJob) and message.route.origin == destination:
            self.refusals.update(refusal.verdict.name for refusal in message.refusals)

    # ---- time ----

    def step(self) -> None:
        while self._later and self._later[0][0] <= self.now:
            heapq.heappop(self._later)[2]()
        for node in self:
            if node.stopped:
                continue
            node.keep_alive()
            if node.local <= self.now:
                node.work()
        if self.now >= self._next_news:
            self._next_news = self.now + 1.0
            self._spread_the_news()
        self.check()
        waits = [self.now + TICK, *(node.local for node in self if node.local > self.now)]
        if self._later:
            waits.append(self._later[0][0])
        self.now = max(min(waits), self.now + 1e-6)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.step()

    def run_until(self, condition: Callable[[], bool], seconds: float = 120.0, what: str = "it") -> None:
        until = self.now + seconds
        while not condition():
            assert self.now < until, f"{what} does not come to an end: {self.describe()}"
            self.step()

    def open_routes(self, *names: str) -> None:
        """Until these origins have a route."""
        self.run_until(lambda: all(self[name].origin.route is not None for name in names), 30.0, "opening a route")

    def finish(self, seconds: float = 240.0) -> None:
        """Until every job has ended and its memory is free everywhere; then until nothing is leased any more."""
        self.run_until(lambda: all(asked.final or not asked.at.alive for asked in self.asked), seconds, "a job")
        for asked in self.asked:
            self.check_outcome(asked)
        self.run_until(self._is_quiet, 60.0, "giving memory back")
        for node in self:
            if isinstance(node.engine.origin, Origin):
                node.engine.origin.leave()
                node.engine.origin.tick = lambda: None  # type: ignore[method-assign]
        self.run_until(self._is_unleased, 4 * self.lease + 10.0, "a lease")

    def all_answered(self, asked: Sequence[Asked]) -> None:
        """Until these are done, rightly."""
        self.run_until(lambda: all(one.final for one in asked), 120.0, "an honest job")
        for one in asked:
            assert isinstance(one.final, JobDone), one.final
            self.check_outcome(one)

    def _is_quiet(self) -> bool:
        for node in self:
            origin = node.engine.origin
            if isinstance(origin, Origin):
                assert not origin.sequences.queued
                assert not origin.sequences.holders
                assert origin.sequences.pool.held == 0
                if origin.in_flight or origin.returned:
                    return False
            if node.engine._processor.in_flight:
                return False
        return not any(lease.pool.held or lease.replicas for _, lease in self._leases())

    def _is_unleased(self) -> bool:
        return all(stage.unleased == stage.segment.kv_blocks for node in self for stage in node.engine.stages.values())

    def _leases(self) -> Iterator[tuple[Node, Any]]:
        """Those whose origin lives and still uses them: what belongs to a former one ends with its lease."""
        ids = {route.id for node in self if (route := node.engine.origin.route) is not None}
        for node in self:
            for stage in node.engine.stages.values():
                for route, lease in stage.leases.items():
                    if route in ids:
                        yield node, lease

    # ---- what must hold ----

    def check(self) -> None:
        for node in self:
            for stage in node.engine.stages.values():
                leased = [block for lease in stage.leases.values() for block in lease.all_blocks()]
                assert sorted(leased + stage._unleased) == list(range(1, stage.segment.kv_blocks + 1)), "blocks are lost"
                for lease in stage.leases.values():
                    replicas = lease.replicas.values()
                    check_pool(lease.pool, [replica.table for replica in replicas])
                    assert all(len(r.table) == lease.pool.blocks_for(r.kv_len) for r in replicas)
            if isinstance(node.engine.origin, Origin):
                self._check_origin(node.origin, node)
        for asked in self.asked:
            from_here = max(0, asked.checked - 1)  # the last one may have been the end
            assert not any(isinstance(u, JobDone | JobFailed) for u in asked.updates[from_here:-1]), "nothing comes after the end"
            asked.checked = len(asked.updates)
            if asked.final is not None:
                assert all(seq.state in TERMINAL for seq in asked.job.sequences)

    def _check_origin(self, origin: Origin, node: Node) -> None:
        manager = origin.sequences
        check_pool(manager.pool, [seq.table for seq in manager.holders.values()])
        assert all(seq.state in QUEUED and not seq.table for seq in manager.queued.values())
        current = Counter(
            span.seq_id
            for sent in origin.in_flight.values()
            for span in sent.spans
            if (seq := manager.get(span)) is not None and span.end > seq.step_processed
        )
        for seq in manager.holders.values():
            assert seq.state in HOLDS_KV
            self._check_cursors(seq, node)
            if seq.generated and seq.decoding:
                assert current[seq.seq_id] <= 1, "one decode span in flight"

    def _check_cursors(self, seq: Answer, node: Node) -> None:
        assert node.origin.route is not None
        assert len(seq.stages_processed) == len(node.origin.route.hops)
        cursors = [seq.scheduled, *seq.stages_processed, seq.step_processed, seq.base]
        assert cursors == sorted(cursors, reverse=True), cursors
        assert len(seq.table) >= node.origin.sequences.pool.blocks_for(seq.scheduled)
        assert seq.in_flight >= 0
        now = (seq.incarnation, seq.attempt, seq.scheduled, seq.stage_processed, seq.step_processed)
        key = (node.name, node.epoch, seq.seq_id)
        old = self._before.get(key)
        if old is not None and old[:2] == now[:2]:
            assert all(a <= b for a, b in zip(old, now, strict=True)), "cursors never go back within an attempt"
        self._before[key] = now

    def check_outcome(self, asked: Asked) -> None:
        job = asked.job
        if isinstance(asked.final, JobFailed):
            assert asked.may_fail, asked.final.error
        for index in range(job.sampling.n):
            said = asked.said(index)
            ends = [u.reason for u in asked.updates if isinstance(u, OutputFinished) and u.index == index]
            assert len(ends) <= 1
            done = bool(ends) and ends[0] is not FinishReason.CANCELLED
            right: list[int] = []
            if job.request.embed:
                check_embedding(job, asked.updates, self.layers, self.window, done=done)
            else:
                alone = {"stages": self.layers, "seed": job.seed, "output": index, "room": asked.room}
                right = oracle(job.prompt_ids, job.sampling, **alone, window=self.window)
            if done:
                assert said == right, f"{said} is not {right}"
            else:
                assert asked.may_fail
                assert said == right[: len(said)], "what was said before the end was right"

    def describe(self) -> str:
        lines = [f"at {self.now:.2f}, {len(self._later)} under way, refusals {dict(self.refusals)}"]
        for node in self:
            origin = node.engine.origin
            if isinstance(origin, Origin):
                opening = origin.opener.opening
                seqs = [*origin.sequences.queued.values(), *origin.sequences.holders.values()]
                lines.append(
                    f"{node.name}: route {origin.route and origin.route.id}, opening {opening and opening.id},"
                    f" trouble {origin.opener.trouble!r}, in flight {dict(origin.in_flight)}, at home {origin.returned},"
                    f" pool {origin.sequences.pool.held}/{origin.sequences.pool.capacity}, last {origin.stats.last_break!r}, "
                    + "; ".join(
                        f"{s.seq_id} {s.state.name} {s.incarnation}.{s.attempt} {s.scheduled}/{s.step_processed}/{len(s.tokens)}"
                        for s in seqs
                    )
                )
            for stage in node.engine.stages.values():
                leases = {
                    str(route): f"{lease.pool.held}/{lease.granted} {lease.replicas}" for route, lease in stage.leases.items()
                }
                lines.append(f"{node.name} {stage.segment.layers}: {stage.unleased} unleased, {leases}")
        return "\n".join(lines)
