"""A simulated network under observation: nodes over fake layers, messages that are lost, repeated, late or damaged, and the
invariants checked at every instant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.config.engine import EngineConfig
from penstock.domain.fsm import ComputeStep
from penstock.domain.job import HOLDS_KV, QUEUED, TERMINAL, Job
from penstock.domain.job import Sequence as Answer
from penstock.domain.messages import Message
from penstock.domain.sampling import SamplingParams
from penstock.domain.span import NetworkJob
from penstock.domain.topology import LayerRange
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
from penstock.engine.routing.host.stage import Stage
from penstock.engine.routing.origin.origin import Origin
from penstock.errors import PenstockError
from penstock.network.codec import decode, encode
from penstock.simulate.letter import Letter
from penstock.simulate.network import Lane, SimulatedNetwork
from penstock.simulate.node import Machine, SimulatedNode
from tests.engine.fakes import FakeEnds, FakeLayers, FakeStream, make_job, oracle
from tests.engine.sequences.test_properties import check_embedding, check_pool
from tests.network.faults import _flipped

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@dataclass
class Faults:
    """Probabilities of faults. Only messages that `hits` accepts are affected."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    hits: Callable[[str, str, Message], bool] = lambda sender, destination, message: True
    hold: tuple[float, float] = (0.001, 0.08)  # seconds; sometimes longer than a stage waits for an overtaken message
    part: tuple[float, float] = (0.0, 1.0)  # range of a message in which it is damaged


@dataclass
class Asked:
    """A job under observation."""

    node: str
    at: SimulatedNode
    job: Job
    updates: list[JobUpdate]
    room: int
    may_fail: bool = False
    checked: int = 0  # number of its updates already checked

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


class World(SimulatedNetwork):
    """A simulated network whose layers compute something that can be checked, on faulty links.

    tokens_per_second: bandwidth of each link in hidden states; it carries one NetworkJob after the other.
    """

    def __init__(
        self,
        *machines: Machine,
        layers: int = 4,
        config: EngineConfig | None = None,
        faults: Faults | None = None,
        latency: float = 0.0005,
        tokens_per_second: float = math.inf,
        recovery_timeout: float = 30.0,
        **more: Any,
    ) -> None:
        self.faults, self.latency, self.tokens_per_second = faults or Faults(), latency, tokens_per_second
        self.asked: list[Asked] = []
        self.refusals: Counter[str] = Counter()  # by verdict, as sent to the origin
        self.seen: list[tuple[str, str, Message]] = []  # sender, destination, message; kept if `watching`
        self.watching = False
        self._free: dict[Lane, float] = {}  # when a link's queued transfers are done
        self._touched: set[SimulatedNode] = set()  # since the last check
        self._before: dict[tuple[str, int, int], tuple[int, int, int, int, int]] = {}
        config = config or EngineConfig(block_size=4, chunk=8, policy="fcfs")
        super().__init__(machines, layers=layers, config=config, recovery_timeout=recovery_timeout, **more)

    # ---- what nodes are made of ----

    def segment(self, node: SimulatedNode, layers: LayerRange) -> Any:
        machine = node.machine
        size = (machine.config or self.config).block_size
        return FakeLayers(*layers, machine.blocks, size, node.compute_pass, self.windows)

    def ends(self, node: SimulatedNode) -> Any:
        return FakeEnds()

    @property
    def text(self) -> Any:
        return lambda skip_special: FakeStream()

    def published_seconds(self, stage: Stage) -> float:
        return 0.001

    # ---- what happens ----

    def kill(self, name: str, *, noticed: float = 0.2) -> None:
        node = self.nodes[name]
        for asked in self.asked:
            if asked.at is node and asked.final is None:
                asked.may_fail = True
        super().kill(name, noticed=noticed)

    def restart(self, name: str, **changes: Any) -> SimulatedNode:
        """Kill a node and start it again at the same instant, without its state."""
        self.kill(name)
        return self.start(replace(self.nodes[name].machine, **changes))

    def ask(
        self, name: str, prompt: Sequence[int], sampling: SamplingParams = GREEDY, *, may_fail: bool = False, **more: Any
    ) -> Asked:
        node = self.nodes[name]
        reach = max(other.machine.blocks for other in self) * self.config.block_size
        room = (node.engine.max_tokens or reach) - len(prompt)
        job, updates = make_job(prompt, sampling, seed=len(self.asked), arrival=node.clock(), room=max(1, room), **more)
        asked = Asked(name, node, job, updates, job.max_tokens, may_fail)
        self.asked.append(asked)
        self.submit(name, job)
        return asked

    def embed(self, name: str, prompt: Sequence[int], **more: Any) -> Asked:
        return self.ask(name, prompt, SamplingParams(), embed=True, **more)

    def withdraw(self, asked: Asked) -> None:
        asked.may_fail = True
        self.cancel(asked.node, asked.job)

    # ---- messages ----

    def post(self, sender: SimulatedNode, destination: str, message: Message) -> None:
        if self.watching:
            self.seen.append((sender.name, destination, decode(encode(message, sender.clock()))))
        if isinstance(message, NetworkJob) and message.route.origin == destination:
            self.refusals.update(refusal.verdict.name for refusal in message.refusals)
        super().post(sender, destination, message)

    def arrivals(self, lane: Lane, message: Message, letter: Letter, now: float) -> Iterator[tuple[float, Letter]]:
        dice, faults = self.dice, self.faults
        drop, duplicate, delay, reorder, corrupt = (dice.random() for _ in range(5))
        if not faults.hits(lane[0], lane[1], message):
            drop = duplicate = delay = reorder = corrupt = 1.0
        if drop < faults.drop:
            return
        if corrupt < faults.corrupt:
            flips = [(dice.uniform(*faults.part), dice.randrange(1, 256)) for _ in range(dice.randint(1, 4))]
            letter = replace(letter, data=_flipped(letter.data, flips))
        due = self._transferred(lane, message, now) + self.latency * (1 + 2 * dice.random())
        if reorder < faults.reorder:
            due += dice.uniform(*faults.hold)
        else:
            due = self.in_order(lane, due, dice.uniform(*faults.hold) if delay < faults.delay else 0.0)
        yield due, letter
        if duplicate < faults.duplicate:
            yield due + dice.uniform(0, 2 * self.latency), letter

    def _transferred(self, lane: Lane, message: Message, now: float) -> float:
        tokens = 0
        if isinstance(message, NetworkJob):
            tokens = sum(span.n if message.step is ComputeStep.LAYER else span.rows for span in message.spans)
        self._free[lane] = max(now, self._free.get(lane, 0.0)) + tokens / self.tokens_per_second
        return self._free[lane]

    def deliver(self, sender: str, destination: str, letter: Letter | bytes) -> None:
        super().deliver(sender, destination, Letter.of(letter) if isinstance(letter, bytes) else letter)

    # ---- time ----

    def wake(self, node: SimulatedNode, when: float) -> None:
        """Mark a node for checking: every event wakes its node, so the others have not changed since their last check."""
        self._touched.add(node)
        super().wake(node, when)

    def run_until(self, condition: Callable[[], bool], seconds: float = 120.0, what: str = "it") -> None:
        until = self.now + seconds
        while not condition():
            assert self.now < until, f"{what} does not come to an end: {self.describe()}"
            self.step()

    def open_routes(self, *names: str) -> None:
        """Run until these origins have a route, and a moment longer for their first notices."""
        self.run_until(lambda: all(self[name].origin.route is not None for name in names), 30.0, "opening a route")
        self.run(0.01)

    def finish(self, seconds: float = 240.0) -> None:
        """Run until every job has ended and its memory is free everywhere; then until no blocks are leased."""
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
        """Run until these jobs are done, and check their answers."""
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
            if node.engine._processor.visits:
                return False
        return not any(lease.pool.held or lease.replicas for _, lease in self._leases())

    def _is_unleased(self) -> bool:
        return all(stage.unleased == stage.segment.kv_blocks for node in self for stage in node.engine.stages.values())

    def _leases(self) -> Iterator[tuple[SimulatedNode, Any]]:
        """The leases of current routes; those of former routes simply expire."""
        ids = {route.id for node in self if (route := node.engine.origin.route) is not None}
        for node in self:
            for stage in node.engine.stages.values():
                for route, lease in stage.leases.items():
                    if route in ids:
                        yield node, lease

    # ---- what must hold ----

    def check(self) -> None:
        for node in filter(self._is_running, self._touched):
            for stage in node.engine.stages.values():
                blocks = stage.segment.kv_blocks * len(self.windows)
                leased = [block for lease in stage.leases.values() for block in lease.all_blocks()]
                assert sorted(leased + stage._unleased) == list(range(1, blocks + 1)), "blocks are lost"
                for lease in stage.leases.values():
                    replicas = lease.replicas.values()
                    check_pool(lease.pool, [replica.table for replica in replicas])
                    assert all(lease.pool.rows_of(r.table) == lease.pool.rows_for(r.kv_len) for r in replicas)
            if isinstance(node.engine.origin, Origin):
                self._check_origin(node.origin, node)
        self._touched.clear()
        for asked in self.asked:
            from_here = max(0, asked.checked - 1)  # the last one checked may have been the end
            assert not any(isinstance(u, JobDone | JobFailed) for u in asked.updates[from_here:-1]), "nothing comes after the end"
            asked.checked = len(asked.updates)
            if asked.final is not None:
                assert all(seq.state in TERMINAL for seq in asked.job.sequences)

    def _check_origin(self, origin: Origin, node: SimulatedNode) -> None:
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

    def _check_cursors(self, seq: Answer, node: SimulatedNode) -> None:
        assert node.origin.route is not None
        assert len(seq.stages_processed) == len(node.origin.route.hops)
        cursors = [seq.scheduled, *seq.stages_processed, seq.step_processed, seq.base]
        assert cursors == sorted(cursors, reverse=True), cursors
        pool = node.origin.sequences.pool
        assert pool.rows_of(seq.table) >= pool.rows_for(seq.scheduled)
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
                check_embedding(job, asked.updates, self.layers, self.windows, done=done)
            else:
                alone = {"stages": self.layers, "seed": job.seed, "output": index, "room": asked.room}
                right = oracle(job.prompt_ids, job.sampling, **alone, windows=self.windows)
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
