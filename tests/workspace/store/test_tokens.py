"""tokens.bin: whatever happened to the file, what is read from it is what was said, up to some token."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workspace.store.disk import Disk
from penstock.workspace.store.files import PARTIAL, TOKENS
from penstock.workspace.store.tokens import SavedTokens, Transcript, read_tokens
from tests.workspace.crashing import FailingDisk, quick_folder

SAID = SavedTokens(seed=7, fingerprint=b"sixteen bytes ..", tokens=(1, 2, 3, 4, 5))
NOBODY = SavedTokens(SAID.seed, SAID.fingerprint)
RECORD, HEADER = 8, 36  # bytes


@pytest.fixture
def path() -> Iterator[Path]:
    with quick_folder() as folder:
        yield folder


@pytest.fixture
def folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture(scope="module")
def whole() -> bytes:
    with quick_folder() as path:
        folder = os.open(path, os.O_RDONLY)
        say(folder, NOBODY, SAID.tokens)
        os.close(folder)
        return (path / TOKENS).read_bytes()


def say(folder: int, said: SavedTokens, tokens: tuple[int, ...], text: bytes = b"", disk: Disk | None = None) -> None:
    transcript = Transcript(disk or Disk(), folder, said)
    transcript.append(tokens, text)


def test_what_was_said_is_read(path: Path, folder: int) -> None:
    say(folder, NOBODY, SAID.tokens, b"five words")
    assert read_tokens(folder) == SAID
    assert (path / PARTIAL).read_bytes() == b"five words"
    assert (path / TOKENS).stat().st_size == HEADER + RECORD * len(SAID.tokens)


def test_nothing_is_read_where_nothing_is(folder: int) -> None:
    assert read_tokens(folder) is None


# ---- damage ----


def read_from(data: bytes) -> SavedTokens | None:
    with quick_folder() as path:
        (path / TOKENS).write_bytes(data)
        folder = os.open(path, os.O_RDONLY)
        try:
            return read_tokens(folder)
        finally:
            os.close(folder)


def is_beginning(found: SavedTokens | None) -> bool:
    return found is None or found == SavedTokens(SAID.seed, SAID.fingerprint, SAID.tokens[: len(found.tokens)])


def test_a_file_that_was_cut_anywhere_holds_a_beginning(whole: bytes) -> None:
    for length in range(len(whole) + 1):
        found = read_from(whole[:length])
        assert is_beginning(found)
        assert len(found.tokens if found else ()) == max(0, length - HEADER) // RECORD


def test_a_file_with_any_bit_flipped_holds_the_beginning_before_it(whole: bytes) -> None:
    for at in range(len(whole)):
        for bit in range(8):
            found = read_from(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            assert is_beginning(found)
            assert (found is None) == (at < HEADER)
            assert found is None or len(found.tokens) == (at - HEADER) // RECORD


@settings(derandomize=True, deadline=None, max_examples=200)
@given(data=st.data())
def test_whatever_a_crash_puts_in_the_place_of_a_tail_is_not_taken_for_tokens(whole: bytes, data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, len(whole)))
    tail = data.draw(st.one_of(st.binary(max_size=40), st.integers(0, 60).map(bytes), st.just(whole[HEADER:]), st.just(whole)))
    found = read_from(whole[:kept] + tail)
    assert is_beginning(found)


def test_records_of_another_life_are_not_taken_for_ours(folder: int, path: Path, whole: bytes) -> None:
    say(folder, SavedTokens(8, SAID.fingerprint), SAID.tokens)
    other = (path / TOKENS).read_bytes()
    assert read_from(whole[: HEADER + RECORD] + other[HEADER + RECORD :]) == SavedTokens(
        SAID.seed, SAID.fingerprint, SAID.tokens[:1]
    )


@pytest.mark.parametrize(
    "make",
    [lambda at: at.symlink_to("elsewhere"), lambda at: os.mkfifo(at), lambda at: at.mkdir()],
    ids=["a link", "a pipe", "a folder"],
)
def test_what_is_no_plain_file_has_no_tokens(folder: int, path: Path, make: Callable[[Path], None]) -> None:
    make(path / TOKENS)
    assert read_tokens(folder) is None


# ---- going on ----


def test_a_resume_goes_on_in_the_same_file(folder: int, path: Path, whole: bytes) -> None:
    say(folder, NOBODY, SAID.tokens[:3])
    inode = (path / TOKENS).stat().st_ino
    found = read_tokens(folder)
    assert found is not None
    say(folder, found, SAID.tokens[3:])
    assert (path / TOKENS).read_bytes() == whole
    assert (path / TOKENS).stat().st_ino == inode


@pytest.mark.parametrize(
    "other",
    [
        SavedTokens(8, SAID.fingerprint, SAID.tokens),
        SavedTokens(7, b"another question", SAID.tokens),
        SavedTokens(7, SAID.fingerprint, (1, 2)),
    ],
    ids=["another seed", "another question", "fewer tokens"],
)
def test_a_resume_from_anything_else_begins_a_new_file(folder: int, other: SavedTokens) -> None:
    say(folder, NOBODY, SAID.tokens)
    say(folder, other, (9,))
    assert read_tokens(folder) == SavedTokens(other.seed, other.fingerprint, (*other.tokens, 9))


def test_the_text_for_people_begins_anew_with_each_life(folder: int, path: Path) -> None:
    say(folder, NOBODY, (1, 2), b"one two ")
    say(folder, SavedTokens(7, SAID.fingerprint, (1, 2)), (3,), b"one two three ")
    assert (path / PARTIAL).read_bytes() == b"one two three "


@settings(derandomize=True, deadline=None, max_examples=100)
@given(kept=st.integers(HEADER, HEADER + RECORD * 5), tail=st.one_of(st.binary(max_size=20), st.integers(0, 20).map(bytes)))
def test_a_resume_after_a_torn_tail_is_read_by_the_next(whole: bytes, kept: int, tail: bytes) -> None:
    with quick_folder() as path:
        (path / TOKENS).write_bytes(whole[:kept] + tail)
        folder = os.open(path, os.O_RDONLY)
        found = read_tokens(folder)
        assert found is not None
        say(folder, found, SAID.tokens[len(found.tokens) :])
        assert read_tokens(folder) == SAID
        os.close(folder)


# ---- errors ----


def steps_of_two_calls(folder: int) -> int:
    disk = FailingDisk(0)
    speak_with_errors(folder, disk)
    return len(disk.steps)


def speak_with_errors(folder: int, disk: FailingDisk) -> None:
    """As a server does: what could not be written is written the next time, with what was said meanwhile."""
    transcript = Transcript(disk, folder, NOBODY)
    disk.arm()
    tokens: tuple[int, ...] = ()
    text = b""
    for token in SAID.tokens:
        tokens, text = (*tokens, token), text + b"word %d " % token
        with suppress(OSError):
            transcript.append(tokens, text)
            tokens, text = (), b""
    transcript.append(tokens, text)


def test_no_token_and_no_word_is_lost_or_said_twice_when_a_call_failed(path: Path) -> None:
    (path / "counted").mkdir()
    counted = os.open(path / "counted", os.O_RDONLY)
    for number in range(1, steps_of_two_calls(counted) + 1):
        (path / str(number)).mkdir()
        folder = os.open(path / str(number), os.O_RDONLY)
        speak_with_errors(folder, FailingDisk(number))
        assert read_tokens(folder) == SAID, f"after an error at step {number}"
        assert (path / str(number) / PARTIAL).read_bytes() == b"".join(b"word %d " % token for token in SAID.tokens)
        os.close(folder)
    os.close(counted)


def test_a_half_written_record_that_cannot_be_cut_off_is_written_over(path: Path, folder: int) -> None:
    class Stubborn(Disk):
        """Writes half, and then refuses to write and to cut, once."""

        broken = True

        def write(self, file: int, data: bytes) -> None:
            if self.broken and len(data) == RECORD:
                super().write(file, data[: RECORD // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(file, data)

        def cut(self, file: int, length: int) -> None:
            if self.broken:
                self.broken = False
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().cut(file, length)

    transcript = Transcript(disk := Stubborn(), folder, NOBODY)
    while disk.broken:
        with suppress(OSError):
            transcript.append((1,), b"")
    transcript.append((1,), b"")
    assert read_tokens(folder) == SavedTokens(SAID.seed, SAID.fingerprint, (1,))


def test_only_who_wants_a_sync_waits_for_one(folder: int) -> None:
    disk = FailingDisk(0)
    transcript = Transcript(disk, folder, NOBODY)
    disk.arm()
    transcript.append((1, 2), b"one two ")
    assert "sync " not in disk.steps
    transcript.append((3,), b"three ", sync=True)
    assert disk.steps.count("sync ") == 1
