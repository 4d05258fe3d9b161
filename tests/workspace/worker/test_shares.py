"""Jobs of several keys in one queue: slots are shared, and a key that has reached its limits holds up no other."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import KeyLimit, NotReady
from penstock.workspace.batch.batches import BatchStatus
from penstock.workspace.store.request import WorkRequest
from penstock.workspace.worker import batch_supervisor as supervisor_module
from penstock.workspace.worker.runner import Sink
from tests.workspace.batch.batch_worlds import Ledger, Server, jsonl, line
from tests.workspace.queues import Queue, prompts, until
from tests.workspace.runners import FakeRunner, FakeTask

pytestmark = [pytest.mark.usefixtures("impatient"), pytest.mark.timeout(120)]


def submit(queue: Queue, owner: str | None, *texts: str, **details: Any) -> list[str]:
    """As lines of a batch of that key become jobs."""
    requests = [WorkRequest(owner=owner, submitted=time.time(), **details) for _ in texts]
    return [queue.work.submit_request(request, text).job_id for request, text in zip(requests, texts, strict=True)]


class Preparing(FakeRunner):
    """Compiles the grammars of one owner for as long as they are wanted, and knows the owners of all that it was given."""

    def __init__(self, queue: Queue, slow: str | None = None) -> None:
        super().__init__(step=0.001, made=queue.made)
        self.slow = slow
        self.given: list[str | None] = []
        queue.runners.append(self)

    def prepare(self, request: WorkRequest, prompt: str, aborted: threading.Event) -> FakeTask:
        self.given.append(request.owner)
        if self.slow is not None and request.owner == self.slow:
            aborted.wait()
            raise NotReady("It was stopped.")
        return super().prepare(request, prompt, aborted)


def test_jobs_of_one_key_that_hold_all_slots_do_not_keep_another_waiting(queue: Queue) -> None:
    runner, texts = Preparing(queue, slow="flooder"), prompts(5)
    submit(queue, "flooder", *(f"grammar {i}" for i in range(20)))
    with queue.pool(runner, max_running=4):
        until(lambda: runner.given.count("flooder") == 4, "all slots to be taken")
        queue.check(submit(queue, "other", *texts), texts)
        queue.check(submit(queue, None, *texts), texts)
        assert runner.given.count("flooder") == 4, "it gets no more slots than there are"


def test_a_key_alone_has_all_slots(queue: Queue) -> None:
    runner = Preparing(queue, slow="flooder")
    submit(queue, "flooder", *(f"grammar {i}" for i in range(6)))
    with queue.pool(runner, max_running=4):
        until(lambda: runner.given.count("flooder") == 4, "all slots to be taken")


def test_free_slots_go_to_the_key_that_has_fewest(queue: Queue) -> None:
    """Although the other's jobs are older."""
    runner = Preparing(queue)
    runner.holds_at = 1
    many, few = prompts(12, longer_than=3, name="many"), prompts(3, longer_than=3, name="few")
    submit(queue, "ada", *many)
    submit(queue, "bob", *few)
    with queue.pool(runner, max_running=6):
        until(lambda: len(runner.given) == 6, "all slots to be taken")
        assert Counter(runner.given) == {"ada": 3, "bob": 3}
        runner.holds_at = None
        until(lambda: len(queue.ends) == 15, "all to end")


def test_priority_counts_more_than_shares(queue: Queue) -> None:
    runner = Preparing(queue)
    submit(queue, "bob", *prompts(3, name="bob"), priority=-10)
    submit(queue, "ada", *prompts(3, name="ada"), priority=0)
    queue.drain(runner, max_running=1)
    assert runner.given == ["ada"] * 3 + ["bob"] * 3


class Metered(FakeRunner):
    """Lets one key begin a job only when it is told so, like one that has used up its tokens of the minute."""

    def __init__(self, queue: Queue, owner: str) -> None:
        super().__init__(step=0.001, made=queue.made)
        self.owner, self.room, self.refused, self.beginning, self.most = owner, 0, 0, 0, 0
        queue.runners.append(self)

    def prepare(self, request: WorkRequest, prompt: str, aborted: threading.Event) -> FakeTask:
        return _MeteredTask(self, prompt, request.owner)


class _MeteredTask(FakeTask):
    def __init__(self, runner: Metered, prompt: str, owner: str | None) -> None:
        super().__init__(runner, prompt)
        self._metered = runner if owner == runner.owner else None

    def start(self, job_id: str, seed: int, said: Sequence[int], sink: Sink) -> Any:
        if self._metered is not None:
            if not self._metered.room:
                self._metered.refused += 1
                raise KeyLimit("Not now.", retry_after=0)
            self._metered.room -= 1
        return super().start(job_id, seed, said, sink)


def test_a_key_without_tokens_waits_and_the_others_go_on(queue: Queue) -> None:
    runner = Metered(queue, "ada")
    texts, own = prompts(30, name="other"), prompts(4, name="own")
    waiting = submit(queue, "ada", *own)
    with queue.pool(runner, max_running=2):
        until(lambda: runner.refused > 3, "it to be tried again")
        queue.check(submit(queue, "bob", *texts), texts)
        assert not any(end.job_id in waiting for end in queue.ends)
        runner.room = 4
        queue.check(waiting, own)


def test_a_key_without_tokens_is_tried_with_one_job_at_a_time(queue: Queue) -> None:
    runner = Metered(queue, "ada")
    waiting = submit(queue, "ada", *prompts(50, name="own"))
    with queue.pool(runner, max_running=50) as pool:
        until(lambda: runner.refused >= 50 and pool.describe()["running"] <= 1, "all that were taken at first to be refused")
        before = runner.refused
        until(lambda: runner.refused >= before + 5, "further attempts")
        assert pool.describe()["running"] <= 1
        runner.room = 50
        queue.wait(waiting)


# ---- batches ----


def test_many_batches_of_one_key_leave_another_its_share_of_the_lines(folder: Path) -> None:
    server = Server(folder / "workspace", Ledger(), room=16)
    for number in range(12):
        server.submit(jsonl([line(f"{number}/{n}") for n in range(20)]), owner="flooder")
    server.driver.turn()
    server.driver.turn()
    other = server.submit(jsonl([line(f"other {n}") for n in range(20)]), owner="other")
    server.driver.turn()
    server.driver.turn()
    server.answer_jobs()
    server.driver.turn()
    assert server.batches.get(other, "other").counts.completed >= 4
    server.run()
    assert server.batches.get(other, "other").status is BatchStatus.COMPLETED
    server.end()


def test_a_key_whose_batches_hold_all_places_gives_one_to_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although they have something to do all the time."""
    monkeypatch.setattr(supervisor_module, "MAX_OPEN_BATCHES", 2)
    server = Server(folder / "workspace", Ledger(), room=4)
    busy = [server.submit(jsonl([line(f"{number}/{n}") for n in range(60)]), owner="flooder") for number in range(3)]
    for _ in range(4):
        server.turn()
    other = server.submit(jsonl([line("other")]), owner="other")
    while server.batches.get(other, "other").end is None:
        assert server.turn()
    assert not any(server.batches.get(batch, "flooder").end for batch in busy), "it did not have to wait for their end"
    server.run()
    assert all(server.batches.get(batch, "flooder").counts.completed == 60 for batch in busy)
    server.end()
