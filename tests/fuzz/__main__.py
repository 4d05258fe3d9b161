"""python -m tests.fuzz: a bounded soak over all targets, and a table at its end. 1 if anything was found."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

from tests.fuzz.soak import TARGETS, Found, fuzz, table, watch


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--minutes", type=float, default=60.0, help="for all targets together")
    options.add_argument("--only", action="append", choices=[*TARGETS], metavar="TARGET", help="may be given more than once")
    options.add_argument("--seed", type=int, help="for the same cases as in another run")
    options.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options.add_argument("--in", type=Path, dest="folder", help=argparse.SUPPRESS)
    given = options.parse_args()
    first_seed = random.randrange(1 << 30) if given.seed is None else given.seed
    if given.folder is not None:
        fuzz(TARGETS[given.only[0]](), given.seconds, first_seed, given.folder)
        return 0
    names = given.only or [*TARGETS]
    print(f"{len(names)} targets, {given.minutes:g} minutes in all, --seed {first_seed}", flush=True)
    found: dict[str, Found] = {}
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-", dir=in_memory) as folder:
        for name in names:
            found[name] = watch(name, 60 * given.minutes / len(names), first_seed, Path(folder) / "run")
            for kind, texts in (("CRASH", found[name].crashes), ("HANG", found[name].hangs)):
                for text in texts:
                    print(f"\n{kind} in {name}\n{text}", flush=True)
            print(table([(name, found[name])]).splitlines()[1], flush=True)
    print(f"\n{table(found.items())}")
    bad = sum(len(one.crashes) + len(one.hangs) for one in found.values())
    idle = [name for name, one in found.items() if not one.cases]
    for name in idle:
        print(f"{name}: not one case was tried")
    return 1 if bad or idle else 0


if __name__ == "__main__":
    sys.exit(main())
