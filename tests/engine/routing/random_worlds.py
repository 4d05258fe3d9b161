"""Random networks in which everything goes wrong that may: every job must still end once, with the right tokens.

    python -m tests.engine.routing.random_worlds 2000

runs so many, and prints the seeds of those that failed.
"""

from __future__ import annotations

import itertools
import logging
import random
import sys
import time
import traceback
from dataclasses import replace

from penstock.config.engine import EngineConfig
from penstock.domain.updates import JobDone
from penstock.simulate.node import Machine
from tests.engine.world import GREEDY, Faults, World

LAYERS = 6


def random_world(dice: random.Random) -> World:
    """One to three origins. All layers are on nodes that nothing happens to; the others may die, hang or stop."""
    safe = _places("s", dice, cover=True)
    risky = _places("r", dice, cover=False)
    origins = [
        Machine(f"o{number}", ((0, 2),) if dice.random() < 0.3 else (), ends=True, blocks=60)
        for number in range(dice.randint(1, 3))
    ]
    bad = dice.choice([0.0, 0.0, 0.02, 0.1])
    faults = Faults(
        drop=bad * dice.random(),
        duplicate=bad * dice.random(),
        delay=bad * dice.random(),
        reorder=bad * dice.random(),
        corrupt=bad * dice.random(),
    )
    config = EngineConfig(
        block_size=4, chunk=dice.choice([4, 8, 32]), policy=dice.choice(["fcfs", "edf", "lrs"]), prefix_cache=dice.random() < 0.7
    )
    return World(
        *dice.sample([*safe, *risky, *origins], len(safe) + len(risky) + len(origins)),
        layers=LAYERS,
        config=config,
        faults=faults,
        seed=dice.randrange(1 << 30),
        latency=dice.choice([0.0005, 0.01, 0.1]),
        # no slower: a link that takes four seconds for what may be under way before its speed is known counts as broken
        tokens_per_second=dice.choice([float("inf"), 200.0, 60.0]),
        recovery_timeout=60.0,
        windows=dice.choice([(None,), (None,), (1,), (6,), (13,), (None, 6), (5, None, 5)]),
    )


def _places(name: str, dice: random.Random, *, cover: bool) -> list[Machine]:
    cuts = sorted({0, LAYERS, *(dice.randint(1, LAYERS - 1) for _ in range(dice.randint(0, 3)))})
    ranges = list(itertools.pairwise(cuts))
    if not cover:
        ranges = [one for one in ranges if dice.random() < 0.7]
    return [
        Machine(
            f"{name}{number}",
            (layers,),
            blocks=60,
            seconds=dice.choice([0.0, 0.001, 0.05, 1.5 if dice.random() < 0.2 else 0.0]),
            per_token=dice.choice([0.0, 0.001]),
        )
        for number, layers in enumerate(ranges)
    ]


def something_happens(world: World, name: str, dice: random.Random) -> None:
    node = world[name]
    match dice.choice(["kill", "restart", "hang", "stop"]):
        case "kill":
            world.kill(name, noticed=dice.choice([0.0, 0.2, 3.0, 20.0]))
        case "restart":
            world.restart(name)
        case "hang":
            node.busy_until = world.now + dice.choice([2.0, 20.0, 300.0])
        case "stop":
            node.stopped = True
            world.at(world.now + dice.choice([1.0, 8.0, 30.0]), lambda: setattr(node, "stopped", False))


def run(seed: int) -> World:
    dice = random.Random(seed)
    world = random_world(dice)
    origins = [node.name for node in world if node.machine.ends]
    risky = [node.name for node in world if node.name.startswith("r")]
    for _ in range(dice.randint(2, 8)):
        prompt = [dice.randint(1, 40) for _ in range(dice.randint(1, 24))]
        world.ask(dice.choice(origins), prompt, replace(GREEDY, max_tokens=dice.randint(1, 16)))
        world.run(dice.choice([0.0, 0.01, 0.3]))
        if risky and dice.random() < 0.5 and world[name := dice.choice(risky)].alive:
            something_happens(world, name, dice)
    world.run_until(lambda: all(asked.final for asked in world.asked), 1200.0, "a job")
    for name in risky:
        world[name].busy_until, world[name].stopped = world.now, False
    world.finish()
    assert all(isinstance(asked.final, JobDone) for asked in world.asked)
    return world


def main(count: int, first: int = 0) -> None:
    logging.disable(logging.WARNING)
    started, failed, lost, waits = time.monotonic(), [], 0, {}
    for seed in range(first, first + count):
        try:
            world = run(seed)
            lost += sum(node.engine.stats.lost_jobs for node in world.nodes.values())
            waits[seed] = max(node.engine.stats.longest_wait for node in world.nodes.values())
        except Exception:
            failed.append(seed)
            print(f"seed {seed}:\n{traceback.format_exc(limit=-3)[-1500:]}", flush=True)
    took = time.monotonic() - started
    longest = sorted(waits.items(), key=lambda wait: -wait[1])[:5]
    print("longest outages:", ", ".join(f"{seconds:.1f} s (seed {seed})" for seed, seconds in longest))
    print(f"{count} worlds in {took:.0f} s, {lost} NetworkJobs lost and sent again, {len(failed)} failed: {failed}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
