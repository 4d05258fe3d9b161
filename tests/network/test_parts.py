"""Parts of messages: those of a message that all arrive are that message, and nothing else ever is one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadMessage
from penstock.network import parts
from penstock.network.parts import PART_BYTES, Assembler, Part, Source, offsets, read_part
from penstock.network.router import MAX_MESSAGE_BYTES
from penstock.network.stream import Stream

A = Source("a", 1, Stream.DATA)


def cut(number: int, data: bytes) -> list[bytes]:
    view = memoryview(data)
    return [Part(False, number, start, len(data), view[start : start + parts.PART_BYTES]).pack() for start in offsets(len(data))]


@pytest.fixture
def five(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of five bytes."""
    monkeypatch.setattr(parts, "PART_BYTES", 5)


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 7])
def test_a_message_is_put_together_from_its_parts(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    pieces, assembler = cut(7, data), Assembler()
    assert len(pieces) == max(1, -(-size // PART_BYTES))
    *before, last = [assembler.add(A, read_part(piece)) for piece in pieces]
    assert before == [None] * len(before)
    assert last == data


sources = st.sampled_from([A, A._replace(stream=Stream.BULK), A._replace(epoch=2), A._replace(node="b")])


@given(data=st.data(), sent=st.lists(st.tuples(sources, st.binary(max_size=12)), max_size=12), size=st.integers(1, 5))
def test_whatever_is_lost_only_whole_messages_arrive_in_order(data: st.DataObject, sent: list, size: int) -> None:
    """Messages of several sources mix, and any part may be lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_BYTES", size)
        play(data, sent)


def play(data: st.DataObject, sent: list) -> None:
    waiting: dict[Source, list[tuple[int, bytes]]] = {}
    for number, (source, message) in enumerate(sent):
        waiting.setdefault(source, []).extend((number, piece) for piece in cut(number, message))
    assembler, lost, arrived = Assembler(), set(), []
    while any(waiting.values()):
        source = data.draw(st.sampled_from([source for source in waiting if waiting[source]]))
        number, piece = waiting[source].pop(0)
        if data.draw(st.integers(0, 9)) == 0:
            lost.add(number)
            continue
        message = assembler.add(source, read_part(piece))
        if message is not None:
            arrived.append((source, message))
    for source in waiting:
        expected = [message for number, (whose, message) in enumerate(sent) if whose == source and number not in lost]
        assert [message for whose, message in arrived if whose == source] == expected


def test_the_beginning_of_one_message_and_the_end_of_another_are_none(five: None) -> None:
    assembler = Assembler()
    first, second = cut(1, b"red blue"), cut(2, b"old news")
    assert assembler.add(A, read_part(first[0])) is None
    assert assembler.add(A, read_part(second[1])) is None
    assert assembler.add(A, read_part(first[1])) is None, "nor is it continued later"


@given(st.binary(max_size=40))
def test_nonsense_is_refused_or_a_part_within_its_message(nonsense: bytes) -> None:
    try:
        part = read_part(nonsense)
    except BadMessage:
        return
    assert part.offset + len(part.data) <= part.total <= MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "part",
    [
        Part(False, 0, 0, MAX_MESSAGE_BYTES + 1, memoryview(b"x")),
        Part(False, 0, 3, 3, memoryview(b"x")),
        Part(False, 0, 0, 3, memoryview(b"long")),
        Part(False, 0, 1, 3, memoryview(b"")),
        Part(False, 0, 0, 3, memoryview(b"xx")),  # cut short: a million tiny parts would take far more memory than they count
        Part(False, 0, 1, 3, memoryview(b"xx")),  # from where no part begins
        Part(False, 0, PART_BYTES, PART_BYTES, memoryview(b"")),
    ],
)
def test_a_part_that_does_not_fit_into_its_message_is_refused(part: Part) -> None:
    with pytest.raises(BadMessage, match="of a message of"):
        read_part(part.pack())


def test_unfinished_messages_are_bounded_and_the_one_that_stands_still_goes(five: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_UNFINISHED_BYTES", 20)
    assembler = Assembler()
    still, moving = A, A._replace(stream=Stream.BULK)
    first, moves = cut(1, bytes(20)), cut(2, bytes(range(15)))
    assert assembler.add(still, read_part(first[0])) is None
    assert assembler.add(still, read_part(first[1])) is None
    assert assembler.add(moving, read_part(moves[0])) is None
    assert assembler.add(moving, read_part(moves[1])) is None
    assert assembler.add(A._replace(epoch=2), read_part(cut(3, bytes(9))[0])) is None
    assert assembler.add(still, read_part(first[2])) is None, "it was dropped"
    assert assembler.add(moving, read_part(moves[2])) == bytes(range(15))


def test_members_that_begin_messages_without_end_drop_nothing_of_a_slow_honest_one(
    five: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MAX_UNFINISHED_BYTES", 100)
    assembler, honest = Assembler(), cut(1, bytes(range(20)))
    for number, piece in enumerate(honest):
        whole = assembler.add(A, read_part(piece))
        for flooder in "bc":
            for epoch in range(20):
                for begun in cut(number, bytes(40))[:-1]:
                    assembler.add(Source(flooder, epoch, Stream.DATA), read_part(begun))
                    assert assembler.size <= 100
    assert whole == bytes(range(20))
    for flooder in "bc":
        for epoch in range(20):
            assembler.forget(flooder, epoch)
    assert assembler.size == 0


def test_what_is_forgotten_is_not_continued(five: None) -> None:
    assembler, pieces = Assembler(), [read_part(piece) for piece in cut(1, bytes(10))]
    assembler.add(A, pieces[0])
    assembler.forget("a", 2)
    assert assembler.add(A, pieces[1]) == bytes(10), "another session of that node"
    assembler.add(A, pieces[0])
    assembler.forget("a", 1)
    assert assembler.add(A, pieces[1]) is None
    assembler.add(A, pieces[0])
    assembler.clear()
    assert assembler.add(A, pieces[1]) is None
