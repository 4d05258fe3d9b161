"""A film of a batch's life, and the power cut at every moment of it."""

from __future__ import annotations

import itertools
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError
from tests.workspace.batch.batch_worlds import Ledger, Server, jsonl, line
from tests.workspace.ledger import Broken
from tests.workspace.power_cut import Moves, Op, RecordingDisk, Remains, build

WORKSPACE = "folder/workspace"
LINES = [line("a"), line("b", stream=True), line("c")]
GOOD, BAD = ["a", "c"], ["b"]


class TimedLedger(Ledger):
    """Knows also when a line was done, as a position in the log of a disk."""

    def __init__(self, disk: RecordingDisk) -> None:
        super().__init__()
        self._disk, self._times = disk, dict[str, int]()

    def end(self, custom_id: str) -> None:
        super().end(custom_id)
        self._times[custom_id] = len(self._disk.log)

    def before(self, position: int) -> Ledger:
        """As it was before the operation at `position`."""
        found = Ledger()
        found.done = [custom_id for custom_id, at in self._times.items() if at <= position]
        return found


@dataclass
class BatchFilm:
    log: list[Op]
    start: int
    batch: str
    ledger: TimedLedger
    syncs: list[str]


def film(folder: Path, *, fail: int = 0, omit: str = "") -> BatchFilm:
    """From the moment that its client was told of it to its end. When a line is done, another driver takes over; and so it is
    when a sync fails."""
    folder.mkdir()
    disk = RecordingDisk(folder, fail=fail, omit=omit)
    ledger = TimedLedger(disk)
    server = Server(folder / WORKSPACE, ledger, disk, room=4)
    batch = server.submit(jsonl(LINES))
    disk.everything_is_safe()
    start, relieved = len(disk.log), False
    disk.arm()
    while (view := server.batches.get(batch)).end is None:
        if view.counts.completed and not relieved:
            relieved = True
            server.end()
            server = Server(folder / WORKSPACE, ledger, disk, room=4)
        try:
            server.turn()
        except (OSError, PenstockError):
            start = len(disk.log)
            server.recover()
    server.end()
    return BatchFilm(disk.log, start, batch, ledger, disk.syncs)


def cut_everywhere(film: BatchFilm, folder: Path, *, moves: Moves = Moves.EITHER, limit: int = 4) -> int:
    """How many states of the disk there were. Broken if in one of them a line is lost or done twice, or an end is undone."""
    folder.mkdir(exist_ok=True)
    chance, seen, numbers = random.Random(1), set(), itertools.count()
    for position in range(len(film.log), film.start - 1, -1):  # most that can be broken is seen at the end
        for tree in Remains(film.log[:position], moves).trees(limit, chance):
            known, over = film.ledger.before(position), position == len(film.log)
            state = repr(tree), tuple(known.done), over
            if state in seen:
                continue
            seen.add(state)
            path = folder / f"cut {next(numbers)}"
            build(tree, path)
            check(Server(path / WORKSPACE, known, room=4), film.batch, over=over)
            shutil.rmtree(path)
    return len(seen)


def check(server: Server, batch: str, *, over: bool) -> None:
    try:
        if over and server.batches.get(batch).end is None:
            raise Broken("an end is whole", "it is open again")
        server.run()
        end = server.batches.get(batch).end
        if end is None:
            raise Broken("every line ends once", "it does not end")
        files = [[one["custom_id"] for one in server.lines_of(file)] for file in (end.output_file, end.error_file)]
        if files != [GOOD, BAD]:
            raise Broken("every line ends once", f"it ends with {files}")
    except PenstockError as error:
        raise Broken("nothing half-written", str(error)) from error
    finally:
        server.end()
