"""What a disk can hold after a power cut: every operation is recorded, and the states that it could leave are enumerated.

The model, which promises less than any file system in use:

- The bytes of a file are safe up to its last sync. Those written later can be missing, present in part, replaced by as many
  zeros, or by zeros and then a part.
- An entry of a folder (a file or folder made, moved or removed) is safe once that folder is synced afterwards. Of the others any
  set can survive, as long as changes of the same name in the same folder survive in order. Syncing a file does not make its name
  safe, and syncing a folder does not make the bytes of its files safe.
- A move is atomic: it has happened in both folders or in neither. `Moves` defines when it becomes safe.
- After a failed sync, the bytes that it should have saved are lost, even if later syncs succeed: Linux counts them as written.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.workspace.crashing import KillingDisk


class Moves(Enum):
    """When a move is safe: from the usual case to one that no journaling file system allows."""

    EITHER = "the sync of one of the two folders makes a move safe"
    BOTH = "it takes the syncs of both"
    SPLIT = "a move is not atomic: its halves are entries like any others, and a job may be in both folders, or in none"


Inode = int
Tree = dict[str, "Tree | bytes"]

ROOT: Inode = 0


@dataclass(frozen=True, slots=True)
class Op:
    """One change of a folder or file. entries: (folder, name, child); a child of None removes the name. A move has two."""

    kind: str  # create, entries (others than a new file), write, cut, sync, lost (a sync that failed) or everything
    inode: Inode = ROOT
    entries: tuple[tuple[Inode, str, Inode | None], ...] = ()
    offset: int = 0
    data: bytes = b""


class RecordingDisk(KillingDisk):
    """Records the operations below a folder. `omit` names a sync to skip, `fail` is the number of a sync that fails."""

    def __init__(self, root: Path, *, kill: int = 0, omit: str = "", fail: int = 0) -> None:
        super().__init__(before=kill)
        self.log: list[Op] = []
        self.syncs: list[str] = []  # those since `arm`
        self.omit, self.fail = omit, fail
        self._inodes: dict[int, Inode] = {root.stat().st_ino: ROOT}
        self._folders: dict[Inode, dict[str, Inode]] = {ROOT: {}}
        self._names: dict[Inode, tuple[Inode, str]] = {}
        self._numbers = itertools.count(1)

    def revive(self) -> None:
        """The process is dead, or has got the error; another one can now use the disk."""
        self.armed = self.dead = False

    def everything_is_safe(self) -> None:
        self.log.append(Op("everything"))

    # ---- recording ----

    def make_folder(self, name: str, folder: int) -> None:
        super().make_folder(name, folder)
        child = self._new(os.stat(name, dir_fd=folder).st_ino)
        self._folders[child] = {}
        above, _, own = name.rpartition("/")
        parent = self._inodes[os.stat(above, dir_fd=folder).st_ino] if above else self._of(folder)
        self._enter((parent, own, child))

    def create(self, name: str, folder: int) -> int:
        file = super().create(name, folder)
        self._enter((self._of(folder), name, self._new(os.fstat(file).st_ino)), kind="create")
        return file

    def write_part(self, file: int, part: bytes) -> None:
        appends = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_APPEND
        offset = os.fstat(file).st_size if appends else os.lseek(file, 0, os.SEEK_CUR)
        super().write_part(file, part)
        self.log.append(Op("write", self._of(file), offset=offset, data=part))

    def cut(self, file: int, length: int) -> None:
        super().cut(file, length)
        self.log.append(Op("cut", self._of(file), offset=length))

    def sync(self, file: int) -> None:
        if os.fstat(file).st_ino not in self._inodes:
            return super().sync(file)  # a folder above ours
        label = f"{_caller()}: {self._label(self._of(file))}"
        if self.armed:
            self.syncs.append(label)
        if label == self.omit:
            return None
        if self.armed and len(self.syncs) == self.fail:
            self.log.append(Op("lost", self._of(file)))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(file)
        self.log.append(Op("sync", self._of(file)))
        return None

    def move(self, name: str, source: int, target: int) -> None:
        super().move(name, source, target)
        child = self._folders[self._of(source)][name]
        self._enter((self._of(target), name, child), (self._of(source), name, None))

    def replace(self, name: str, other: str, folder: int) -> None:
        super().replace(name, other, folder)
        parent = self._of(folder)
        self._enter((parent, other, self._folders[parent][name]), (parent, name, None))

    def remove(self, name: str, folder: int) -> None:
        super().remove(name, folder)
        self._enter((self._of(folder), name, None))

    def remove_empty(self, name: str, folder: int) -> None:
        super().remove_empty(name, folder)
        self._enter((self._of(folder), name, None))

    def _new(self, number: int) -> Inode:
        inode = self._inodes[number] = next(self._numbers)
        return inode

    def _of(self, descriptor: int) -> Inode:
        return self._inodes[os.fstat(descriptor).st_ino]

    def _enter(self, *entries: tuple[Inode, str, Inode | None], kind: str = "entries") -> None:
        self.log.append(Op(kind, entries=entries))
        for folder, name, child in reversed(entries):
            if child is None:
                self._folders[folder].pop(name, None)
            else:
                self._folders[folder][name] = child
                self._names[child] = folder, name

    def _label(self, inode: Inode) -> str:
        """Name what is synced, in the same way for every job."""
        _, name = self._names.get(inode, (ROOT, "the folder above"))
        if inode in self._folders:
            return "the job" if name.count("_") == 2 else name
        return "the key" if len(name) == 64 else name


def _caller() -> str:
    """The workspace function that requests a sync, skipping the small helpers that it calls."""
    frame = sys._getframe(2)
    while (
        frame.f_code.co_name in ("put_file", "rewrite_file", "_fill", "_move", "_sync", "grow_file", "_put")
        and frame.f_back is not None
    ):
        frame = frame.f_back
    return frame.f_code.co_name.strip("_")


# ---- what may be left ----


@dataclass(slots=True)
class _Change:
    entries: tuple[tuple[Inode, str, Inode | None], ...]
    needs: set[int]  # the changes of the same names before it
    waits_for: set[Inode]  # the folders whose sync makes it safe
    safe: bool = False


@dataclass(slots=True)
class _File:
    saved: bytes = b""
    now: bytes = b""

    def possible(self) -> list[bytes]:
        """The possible contents: from nothing written after the last sync to all of it."""
        pairs = zip(self.saved, self.now, strict=False)
        common = next((at for at, (old, new) in enumerate(pairs) if old != new), min(len(self.saved), len(self.now)))
        kept, new = self.now[:common], self.now[common:]
        half = len(new) // 2
        return list(
            dict.fromkeys([self.saved, self.now, kept + new[:half], kept + bytes(len(new)), kept + bytes(half) + new[half:]])
        )


class Remains:
    """All states that a power cut after these operations could leave."""

    def __init__(self, log: Sequence[Op], moves: Moves = Moves.EITHER) -> None:
        self.changes: list[_Change] = []
        self.files: dict[Inode, _File] = {}
        last: dict[tuple[Inode, str], int] = {}
        for op in log:
            if op.kind in ("entries", "create"):
                if op.kind == "create":
                    self.files |= {child: _File() for _, _, child in op.entries if child is not None}
                for entries in [(entry,) for entry in op.entries] if moves is Moves.SPLIT else [op.entries]:
                    needs = {last[entry[:2]] for entry in entries if entry[:2] in last}
                    last |= {entry[:2]: len(self.changes) for entry in entries}
                    self.changes.append(_Change(entries, needs, {folder for folder, _, _ in entries}))
            elif op.kind == "everything":
                for change in self.changes:
                    change.safe = True
                for file in self.files.values():
                    file.saved = file.now
            elif op.inode in self.files:
                _change(self.files[op.inode], op)
            elif op.kind == "sync":
                for change in self.changes:
                    if op.inode in change.waits_for:
                        change.waits_for.discard(op.inode)
                        change.safe |= moves is not Moves.BOTH or not change.waits_for
        for number in reversed(range(len(self.changes))):
            if self.changes[number].safe:
                for needed in self.changes[number].needs:
                    self.changes[needed].safe = True
        self.open = [number for number, change in enumerate(self.changes) if not change.safe]

    def trees(self, limit: int, chance: random.Random) -> Iterator[Tree]:
        """Yield trees: sets of surviving entries, each with possible file contents. All combinations if at most `limit`, else
        the edge cases and a sample."""
        for survived in self._sets(limit, chance):
            folders: dict[Inode, dict[str, Inode]] = {}
            for number, change in enumerate(self.changes):
                if change.safe or number in survived:
                    for folder, name, child in change.entries:
                        if child is None:
                            folders.setdefault(folder, {}).pop(name, None)
                        else:
                            folders.setdefault(folder, {})[name] = child
                            folders.setdefault(child, {})
            files = {inode: self.files[inode].possible() for inode in _reachable(folders) if inode in self.files}
            for choice in _choices(list(files.values()), limit, chance):
                yield _tree(folders, dict(zip(files, choice, strict=True)))

    def _sets(self, limit: int, chance: random.Random) -> Iterator[frozenset[int]]:
        if 2 ** len(self.open) <= limit:
            candidates = (set(itertools.compress(self.open, bits)) for bits in itertools.product((0, 1), repeat=len(self.open)))
        else:
            edges = [set(), set(self.open)]
            edges += [set(self.open) - {number} for number in self.open] + [{number} for number in self.open]
            edges += [set(self.open[:end]) for end in range(len(self.open))]
            random_ones = (set(chance.sample(self.open, chance.randrange(len(self.open)))) for _ in range(limit // 4))
            candidates = itertools.chain(edges, random_ones)
        seen: set[frozenset[int]] = set()
        for candidate in candidates:
            chosen = frozenset(self._closed(candidate))
            if chosen not in seen:
                seen.add(chosen)
                yield chosen

    def _closed(self, chosen: set[int]) -> set[int]:
        """Drop changes whose predecessor for the same name is missing."""
        kept: set[int] = set()
        for number in sorted(chosen):
            if all(self.changes[needed].safe or needed in kept for needed in self.changes[number].needs):
                kept.add(number)
        return kept


def _choices(files: list[list[bytes]], limit: int, chance: random.Random) -> Iterator[tuple[bytes, ...]]:
    if math.prod(map(len, files)) <= limit:
        yield from itertools.product(*files)
    else:
        yield tuple(possible[0] for possible in files)
        yield tuple(possible[min(1, len(possible) - 1)] for possible in files)
        for _ in range(limit // 2):
            yield tuple(map(chance.choice, files))


def _change(file: _File, op: Op) -> None:
    if op.kind == "write":
        file.now = file.now[: op.offset].ljust(op.offset, b"\0") + op.data + file.now[op.offset + len(op.data) :]
    elif op.kind == "cut":
        file.now = file.now[: op.offset]
    elif op.kind == "lost":  # the kernel counts what it could not write as written: only what is written again is ever saved
        file.now = file.saved[: len(file.now)].ljust(len(file.now), b"\0")
    else:
        file.saved = file.now


def _reachable(folders: dict[Inode, dict[str, Inode]], root: Inode = ROOT) -> list[Inode]:
    found = [root]
    for child in folders.get(root, {}).values():
        found += _reachable(folders, child)
    return list(dict.fromkeys(found))


def _tree(folders: dict[Inode, dict[str, Inode]], files: dict[Inode, bytes], root: Inode = ROOT) -> Tree:
    entries = sorted(folders.get(root, {}).items())
    return {name: files[child] if child in files else _tree(folders, files, child) for name, child in entries}


def build(tree: Tree, path: Path | str) -> None:
    os.mkdir(path)
    for name, inside in tree.items():
        if isinstance(inside, bytes):
            file = os.open(f"{path}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            os.write(file, inside)
            os.close(file)
        else:
            build(inside, f"{path}/{name}")
