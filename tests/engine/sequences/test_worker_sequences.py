"""A stage's KV log: appends, repetitions, gaps, stale incarnations, rewinds, and notices that come twice."""

from __future__ import annotations

import pytest

from penstock.domain.blocks import BlockPool
from penstock.domain.route import RouteId
from penstock.domain.span import NetworkJob, Notice, NoticeKind, Span, Verdict, verdict_on
from penstock.engine.sequences.worker_sequences import WorkerSequenceManager


def span(
    start: int, n: int, *, seq: int = 1, incarnation: int = 0, attempt: int = 0, base: int = 0, keys: tuple[bytes, ...] = ()
) -> Span:
    return Span(seq, incarnation, attempt, base, start, n, 1, keys)


def deliver(manager: WorkerSequenceManager, *spans: Span, notices: tuple[Notice, ...] = ()) -> list[Verdict]:
    return manager.on_schedule(NetworkJob(RouteId("origin", 0, 0), 0, list(spans), list(notices)))


@pytest.fixture
def manager() -> WorkerSequenceManager:
    return WorkerSequenceManager(BlockPool(8, 4))


@pytest.mark.parametrize(
    "kv_len,start,n,expected",
    [
        (10, 10, 3, Verdict.APPEND),
        (10, 4, 6, Verdict.DUPLICATE),
        (10, 0, 1, Verdict.DUPLICATE),
        (10, 11, 1, Verdict.GAP),
        (10, 8, 3, Verdict.MALFORMED),
    ],
)
def test_where_a_span_falls_in_the_log(kv_len: int, start: int, n: int, expected: Verdict) -> None:
    assert verdict_on(kv_len, span(start, n)) is expected


def test_a_span_delivered_twice_changes_nothing(manager: WorkerSequenceManager) -> None:
    assert deliver(manager, span(0, 5)) == [Verdict.APPEND]
    table = list(manager.replicas[1].table)
    assert deliver(manager, span(0, 5)) == [Verdict.DUPLICATE]
    assert list(manager.replicas[1].table) == table
    assert manager.pool.held == 2


def test_an_unknown_sequence_that_does_not_start_at_zero_is_a_gap(manager: WorkerSequenceManager) -> None:
    assert deliver(manager, span(4, 1)) == [Verdict.GAP]
    assert manager.pool.held == 0


def test_a_late_span_of_an_older_incarnation_changes_nothing(manager: WorkerSequenceManager) -> None:
    deliver(manager, span(0, 5))
    deliver(manager, span(0, 2, incarnation=1))
    assert deliver(manager, span(5, 1)) == [Verdict.STALE]
    assert manager.replicas[1].kv_len == 2


def test_a_newer_incarnation_frees_the_blocks_of_the_older(manager: WorkerSequenceManager) -> None:
    deliver(manager, span(0, 20))
    assert manager.pool.held == 5
    deliver(manager, span(0, 1, incarnation=3))
    assert manager.pool.held == 1


def test_a_newer_attempt_cuts_the_log_back_to_its_base(manager: WorkerSequenceManager) -> None:
    deliver(manager, span(0, 10))
    assert deliver(manager, span(6, 2, attempt=1, base=6)) == [Verdict.APPEND]
    assert manager.replicas[1].kv_len == 8
    assert deliver(manager, span(10, 1)) == [Verdict.STALE]


def test_a_stage_without_blocks_says_so_and_holds_nothing_for_it(manager: WorkerSequenceManager) -> None:
    assert deliver(manager, span(0, 20), span(0, 20, seq=2)) == [Verdict.APPEND, Verdict.NO_ROOM]
    assert manager.pool.held == 5


def test_a_notice_that_comes_twice_acts_once(manager: WorkerSequenceManager) -> None:
    deliver(manager, span(0, 4))
    freed = Notice(0, NoticeKind.FREED, 1, 0)
    deliver(manager, span(0, 4, seq=2), notices=(freed,))
    deliver(manager, span(0, 4, incarnation=0), notices=(freed,))
    assert set(manager.replicas) == {1, 2}, "the repetition must not free the sequence that came after it"


def test_a_committed_prefix_is_shared_with_the_next_sequence(manager: WorkerSequenceManager) -> None:
    deliver(manager, span(0, 9))
    done = Notice(0, NoticeKind.STEP_COMPLETED, 1, 0, 0, (b"a", b"b"))
    assert deliver(manager, span(8, 3, seq=2, base=8, keys=(b"a", b"b")), notices=(done,)) == [Verdict.APPEND]
    assert manager.replicas[2].table[:2] == manager.replicas[1].table[:2]


def test_a_prefix_that_the_stage_does_not_hold_is_a_gap(manager: WorkerSequenceManager) -> None:
    assert deliver(manager, span(8, 3, base=8, keys=(b"a", b"b"))) == [Verdict.GAP]


def test_one_span_cannot_evict_the_prefix_of_another_in_the_same_job(manager: WorkerSequenceManager) -> None:
    deliver(manager, span(0, 4))
    notices = (Notice(0, NoticeKind.STEP_COMPLETED, 1, 0, 0, (b"a",)), Notice(1, NoticeKind.FREED, 1, 0))
    greedy, sharer = span(0, 28, seq=2), span(4, 1, seq=3, base=4, keys=(b"a",))
    assert deliver(manager, greedy, sharer, notices=notices) == [Verdict.APPEND, Verdict.NO_ROOM]
    assert list(manager.replicas[sharer.seq_id].table) == [1], "the hit was kept"


def test_a_key_that_comes_twice_makes_no_long_text_of_few_blocks(manager: WorkerSequenceManager) -> None:
    deliver(manager, span(0, 9))
    done = Notice(0, NoticeKind.STEP_COMPLETED, 1, 0, 0, (b"a", b"b"))
    assert deliver(manager, span(4000, 1, seq=2, keys=(b"a",) * 1000), notices=(done,)) == [Verdict.MALFORMED]
    assert deliver(manager, span(12, 1, seq=2, keys=(b"a", b"b", b"a"))) == [Verdict.MALFORMED]
    assert set(manager.replicas) == {1}


def test_a_prefix_lies_before_its_span(manager: WorkerSequenceManager) -> None:
    deliver(manager, span(0, 9))
    done = Notice(0, NoticeKind.STEP_COMPLETED, 1, 0, 0, (b"a", b"b"))
    assert deliver(manager, span(7, 3, seq=2, keys=(b"a", b"b")), notices=(done,)) == [Verdict.MALFORMED]
    assert set(manager.replicas) == {1}


@pytest.mark.parametrize("windows", [(None,), (4,), (None, 4)])
def test_no_text_is_longer_than_the_context_of_the_model(windows: tuple[int | None, ...]) -> None:
    manager = WorkerSequenceManager(BlockPool(8, 4, windows=windows), context=12)
    assert deliver(manager, span(0, 12)) == [Verdict.APPEND]
    assert deliver(manager, span(12, 1)) == [Verdict.MALFORMED]
    done = Notice(0, NoticeKind.STEP_COMPLETED, 1, 0, 0, (b"a", b"b", b"c"))
    unseen = tuple(f"{i}".encode() for i in range(1000))  # where no layer sees them, only the last blocks of a prefix count
    assert deliver(manager, span(4012, 1, seq=2, keys=(*unseen, b"a", b"b", b"c")), notices=(done,)) == [Verdict.MALFORMED]
    assert set(manager.replicas) == {1}
