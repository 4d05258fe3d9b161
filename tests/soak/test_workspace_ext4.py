"""A real ext4 loses its power at random moments, with all that was not synced. Needs root: it makes and mounts a small disk."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.workspace.store.files import Place
from tests.workspace.busy import receive, send
from tests.workspace.crashing import KillingDisk, process
from tests.workspace.ledger import Broken, Ledger, look
from tests.workspace.lives import Life, restart
from tests.workspace.scenarios import BY_NAME, Scenario, Stage, count_steps

ROOT = Path(__file__).parents[2]
ROUNDS = 30
SHUTDOWN, KEEP_NO_LOG = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN: everything after this fails, and what the journal has not, is lost

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("mkfs.ext4"), reason="needs Linux, root and mkfs.ext4"
    ),
]


class Ext4:
    """A file system in a file, that can be taken away."""

    def __init__(self, folder: Path) -> None:
        self.image, self.mounted = folder / "image", folder / "mounted"
        self.mounted.mkdir()
        with self.image.open("wb") as file:
            file.truncate(128 << 20)
        run("mkfs.ext4", "-q", "-F", str(self.image))
        self.mount()

    def mount(self) -> None:
        run("mount", "-o", "loop", str(self.image), str(self.mounted))

    def unmount(self) -> None:
        run("umount", str(self.mounted))

    def cut(self) -> None:
        folder = os.open(self.mounted, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, SHUTDOWN, struct.pack("I", KEEP_NO_LOG))
        finally:
            os.close(folder)

    def restore(self) -> None:
        """As a machine that starts again: the journal is replayed, and then nothing is wrong."""
        self.unmount()
        self.mount()
        self.unmount()
        run("e2fsck", "-f", "-n", str(self.image))
        self.mount()


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Ext4]:
    try:
        disk = Ext4(tmp_path)
    except AssertionError as error:
        pytest.skip(f"no disk can be made here: {error}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk.mounted)], capture_output=True)


def work_until_cut(disk: Ext4, ledger: Ledger, seed: int, *options: str) -> Ledger:
    """What was promised when the power went."""
    busy = subprocess.Popen(
        [sys.executable, "-m", "tests.workspace.busy", disk.mounted / "workspace", str(seed), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert busy.stdin is not None
    assert busy.stdout is not None
    assert busy.stderr is not None
    output, started = [ledger], threading.Event()

    def listen() -> None:
        while (now := receive(busy.stdout)) is not None:  # type: ignore[arg-type]
            output[0] = now
            started.set()

    listener = threading.Thread(target=listen)
    listener.start()
    send(ledger, busy.stdin)
    busy.stdin.close()
    assert started.wait(60)
    time.sleep(random.Random(seed).uniform(0.05, 1.0))
    disk.cut()
    listener.join()
    error = busy.stderr.read().decode()
    assert busy.wait() == 0, error
    busy.stdout.close()
    busy.stderr.close()
    return output[0]


def cut_and_restart(disk: Ext4, rounds: int, *options: str) -> dict[str, int]:
    seen = {"jobs": 0, "ended": 0, "ran": 0}
    ledger = Ledger()
    for seed in range(rounds):
        ledger = work_until_cut(disk, ledger, seed, *options)
        disk.restore()
        seen["jobs"] += len(ledger.jobs)
        seen["ended"] += sum(job.end is not None for job in ledger.jobs.values())
        seen["ran"] += len(restart(disk.mounted / "workspace", ledger, tidy=False))
        ledger.attempts = ()
    return seen


def test_nothing_that_was_promised_is_lost_with_the_power(ext4: Ext4) -> None:
    seen = cut_and_restart(ext4, ROUNDS)
    print(f"\n{ROUNDS} cuts: {seen}")
    assert seen["ended"] > ROUNDS


def test_without_syncs_it_is(ext4: Ext4) -> None:
    """Or the test above would show nothing."""
    with pytest.raises(Broken) as output:
        cut_and_restart(ext4, ROUNDS, "--careless")
    print(f"\n{output.value.check}")


# ---- the power goes after a process died, and others went on with what it had not synced ----


def recover(life: Life) -> None:
    life.recover()


def submit_again(life: Life) -> None:
    life.submit("new", key="the key")


@pytest.mark.parametrize(
    "scenario, go_on",
    [
        ("finish", recover),
        ("submit with a key", submit_again),
        ("create and submit", lambda life: life.submit("another")),
        ("recover an orphan", recover),
        ("clean up", Life.gc),
    ],
)
def test_the_power_may_go_after_a_death(ext4: Ext4, scenario: str, go_on: Callable[[Life], object]) -> None:
    steps = len(count_steps(BY_NAME[scenario], ext4.mounted / "counted" / "workspace"))
    broken = {}
    for step in range(1, steps + 1):
        path = ext4.mounted / str(step) / "workspace"
        ledger = die_and_go_on(BY_NAME[scenario], path, step, go_on)
        ext4.cut()
        ext4.restore()
        try:
            restart(path, ledger, tidy=False)
        except Broken as error:
            broken[step] = str(error)
    assert not broken


def die_and_go_on(scenario: Scenario, path: Path, step: int, go_on: Callable[[Life], object]) -> Ledger:
    with process():
        stage = Stage(scenario, path, disk := KillingDisk(step))
        os.sync()
        stage.act()
    assert disk.dead
    stage.ledger.adopt_for_now(look(path))
    life = Life(path, stage.ledger, name="second")
    go_on(life)
    life.end()
    return stage.ledger


def fill(path: Path) -> None:
    """To the last block."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


def test_a_disk_without_room_loses_nothing(ext4: Ext4) -> None:
    """The real thing: the disk is full, and later it is not."""
    ledger = Ledger()
    life = Life(ext4.mounted / "workspace", ledger)
    jobs = [life.submit(f"prompt {number}") for number in range(5)]
    for job in jobs:
        assert life.claim(job)
    life.sync_claims()
    fill(ext4.mounted / "ballast")
    refused = []
    for job in jobs:
        try:
            life.finish(job)
        except OSError:
            refused.append(job)
    assert refused
    ledger.check(look(life.path))
    (ext4.mounted / "ballast").unlink()
    for job in refused:
        life.finish(job)
    assert all(look(life.path)[job].keys() == {Place.OUTPUT} for job in jobs)
    life.end()
    restart(life.path, ledger)
