"""A process that does everything to a workspace until the disk is taken away: `python -m tests.workspace.busy WORKSPACE SEED`.

Reads a ledger from stdin, and writes each change of it to stdout: what was begun and what was promised, each before anything else
is done. `--careless` skips every sync.
"""

from __future__ import annotations

import pickle
import random
import struct
import sys
from pathlib import Path
from typing import BinaryIO

from penstock.errors import PenstockError
from penstock.workspace.store.files import FINISHED, Place
from tests.workspace.crashing import KillingDisk, SteppingDisk, process
from tests.workspace.ledger import Ledger
from tests.workspace.lives import TOKENS, Life

MOST = 15  # jobs, before the finished ones are cleaned away
_SIZE = struct.Struct("<I")


class CarelessDisk(SteppingDisk):
    def sync(self, file: int) -> None:
        pass


def send(ledger: Ledger, pipe: BinaryIO) -> None:
    data = pickle.dumps((ledger.jobs, ledger.attempts))
    pipe.write(_SIZE.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: BinaryIO) -> Ledger | None:
    """The next ledger; None when there are no more whole ones."""
    head = pipe.read(_SIZE.size)
    if len(head) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack(head)
    data = pipe.read(size)
    return Ledger(*pickle.loads(data)) if len(data) == size else None


class Busy:
    def __init__(self, path: Path, ledger: Ledger, disk: SteppingDisk, chance: random.Random) -> None:
        self.path, self.ledger, self.disk, self.chance = path, ledger, disk, chance
        self.client = Life(path, ledger, disk, name="client")
        self.server = Life(path, ledger, disk, name=f"server {chance.random()}")

    def step(self) -> None:
        acts = [
            self.submit,
            self.submit,
            self.submit_and_die,
            self.claim,
            self.claim,
            self.claim,
            self.go_on,
            self.cancel,
            self.die,
        ]
        if self.server.held:
            acts += [self.go_on, self.go_on, self.end, self.end, self.end]
        self.chance.choice(acts)()
        if len(self.ledger.jobs) > MOST:
            self.client.gc()
            for job_id in [job_id for job_id, job in self.ledger.jobs.items() if job.places == {None}]:
                del self.ledger.jobs[job_id]

    def submit(self) -> None:
        key = self.chance.choice([None, None, "blue", "red"])
        self.client.submit(f"what is {key}?" if key else f"prompt {self.chance.random()}", key)

    def submit_and_die(self) -> None:
        disk = KillingDisk(self.chance.randint(1, 13))
        with process():
            client = Life(self.path, self.ledger, disk, name="dying client")
            assert client.workspace
            disk.arm()
            client.submit(f"prompt {self.chance.random()}")

    def claim(self) -> None:
        ready = [job_id for job_id in sorted(self.server.workspace.names(Place.READY)) if job_id in self.ledger.jobs]
        for job_id in self.chance.sample(ready, min(2, len(ready))):
            self.server.claim(job_id)
        self.server.sync_claims()

    def go_on(self) -> None:
        for job_id in self.server.held:
            self.server.say(job_id, 0)
            self.server.say(job_id, min(2, len(TOKENS) - self.server.said[job_id]))

    def end(self) -> None:
        job_id = self.chance.choice(sorted(self.server.held))
        how = self.chance.choice(["finish", "finish", "fail", "back"])
        if how == "finish":
            self.server.finish(job_id)
        elif how == "fail":
            self.server.fail(job_id)
        else:
            self.server.give_back(job_id, suspect=self.chance.random() < 0.3)

    def cancel(self) -> None:
        waiting = [job_id for job_id, job in self.ledger.jobs.items() if not job.places & {None, *FINISHED}]
        if waiting and self.chance.random() < 0.3:
            self.client.cancel(self.chance.choice(waiting))

    def die(self) -> None:
        self.server.end()
        self.server = Life(self.path, self.ledger, self.disk, name=f"server {self.chance.random()}")
        self.server.recover()


def main() -> None:
    path, seed, *careless = sys.argv[1:]
    ledger = receive(sys.stdin.buffer)
    assert ledger is not None
    ledger.forgiving = True  # a submit interrupted by the cut reports an error, but may have succeeded
    disk = CarelessDisk() if careless else SteppingDisk()
    busy = Busy(Path(path), ledger, disk, random.Random(seed))
    ledger.on_change = lambda _: send(ledger, sys.stdout.buffer)
    send(ledger, sys.stdout.buffer)
    try:
        while True:
            busy.step()
    except (OSError, PenstockError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
