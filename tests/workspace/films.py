"""Recordings ("films") of scenarios, and a power cut at every moment of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError
from tests.workspace.crashing import process
from tests.workspace.ledger import Broken, Ledger, look
from tests.workspace.lives import Life, everything_asked, restart
from tests.workspace.power_cut import Moves, Op, RecordingDisk, Remains, build
from tests.workspace.scenarios import Scenario, Stage

WORKSPACE = "folder/workspace"


@dataclass
class Film:
    """The operations on a disk, the position from which cuts are tested, and what was promised when."""

    log: list[Op]
    start: int
    promises: list[tuple[int, bool, Ledger]]
    syncs: list[str]

    def promised(self, position: int) -> Ledger:
        """All that was promised before the operation at `position` began."""
        just_told = [ledger for at, promised, ledger in self.promises if at == position and promised]
        return just_told[-1] if just_told else [ledger for at, _, ledger in self.promises if at < position][-1]


def film(scenario: Scenario, folder: Path, **faults: int | str) -> Film:
    """Record a scenario from start to end; or to a death or an error, after which another process continues."""
    folder.mkdir(parents=True)
    disk = RecordingDisk(folder, **faults)  # type: ignore[arg-type]
    promises: list[tuple[int, bool, Ledger]] = []
    with process():
        stage = Stage(scenario, folder / WORKSPACE, disk)
        disk.everything_is_safe()
        start = len(disk.log)
        stage.ledger.on_change = lambda promised: promises.append((len(disk.log), promised, stage.ledger.copy()))
        stage.ledger.on_change(True)
        stage.ledger.forgiving = bool(disk.fail)
        with suppress(PenstockError, OSError):
            stage.act()
    if disk.before or disk.fail:
        disk.revive()
        start = len(disk.log)
        go_on(Life(folder / WORKSPACE, stage.ledger, disk, name="second"))
    return Film(disk.log, start, promises, disk.syncs)


def go_on(life: Life) -> None:
    """Let another process recover and submit, while whatever the dead process did not sync is still unsafe."""
    found = look(life.path)
    keys = {asked.key: asked.prompt.decode() for asked in everything_asked(life.ledger) if asked.key}
    life.ledger.check(found)
    life.ledger.adopt_for_now(found)
    life.recover()
    for key, prompt in keys.items():
        life.submit(prompt, key)
    life.submit("another")
    life.end()


def cut_everywhere(film: Film, folder: Path, *, moves: Moves = Moves.BOTH, limit: int = 32) -> int:
    """Cut the power at every position; return the number of disk states checked. Raises Broken if one breaks a promise."""
    return cut(film, folder, range(film.start, len(film.log) + 1), moves=moves, limit=limit)


def cut_after_promises(film: Film, folder: Path, *, moves: Moves = Moves.BOTH, limit: int = 32) -> int:
    """Cut only right after a promise: most violations show there."""
    output = {at for at, promised, _ in film.promises if promised and at >= film.start}
    return cut(film, folder, sorted(output), moves=moves, limit=limit)


def cut(film: Film, folder: Path, positions: Iterable[int], *, moves: Moves, limit: int) -> int:
    chance, seen, numbers = random.Random(1), set(), itertools.count()
    for position in positions:
        promised = film.promised(position)
        for tree in Remains(film.log[:position], moves).trees(limit, chance):
            state = repr(tree), id(promised)
            if state in seen:
                continue
            seen.add(state)
            path = folder / str(next(numbers))
            folder.mkdir(exist_ok=True)
            build(tree, path)
            try:
                restart(path / WORKSPACE, promised.copy(), tidy=False)
            except Broken as error:
                done = film.log[film.start : position]
                raise Broken(error.check, f"{error} after {len(done)} operations, the last {done[-1:]}; in {path}") from error
    return len(seen)
