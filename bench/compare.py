"""Compares Penstock with transformers, and with --rivals with llama.cpp and vLLM: one run, this machine's CPU, all cores.

Only one system computes at a time, and they take turns, so that a slow minute of the machine hits all of them; what counts
are the ratios. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import random
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compare_tables import Results, all_tables, notes
from rivals import SCRATCH, has_bf16
from systems import SYSTEMS
from tables import markdown
from worker import Batch, Failure, Model, Sample, Worker

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/compare.json"
DOCUMENT = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
FIRST_TOKEN_ID = 100  # below lie special tokens


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    streams: int
    prompt_tokens: int
    new_tokens: int

    def batch(self, seed: str, vocab: int) -> Batch:
        """Make prompts that occur nowhere else in the run, the same for every system."""
        chance = random.Random(f"{self.name}/{seed}")
        prompts = [chance.choices(range(FIRST_TOKEN_ID, vocab), k=self.prompt_tokens) for _ in range(self.streams)]
        return Batch(prompts, self.new_tokens)

    def speed(self, wall: float) -> float:
        """Tokens per second: prompt tokens if only one new token is made, else the new tokens of all streams together."""
        return self.streams * (self.prompt_tokens if self.new_tokens == 1 else self.new_tokens) / wall


CASES = (
    Case("single", 1, 64, 128),
    Case("8", 8, 64, 128),
    Case("32", 32, 64, 128),
    Case("64", 64, 64, 128),
    Case("prefill-512", 1, 512, 1),
    Case("prefill-2048", 1, 2048, 1),
)
QUICK_CASES, QUICK_TOKENS = ("single", "8", "prefill-512"), 16


def measure(systems: Sequence[str], cases: Sequence[Case], rounds: int, model: Model, threads: int) -> Results:
    vocab = json.loads((model.folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    workers: dict[str, Worker] = {}
    about: dict[str, str] = {}
    failures: dict[str, dict[str, str]] = {case.name: {} for case in cases}
    samples: dict[str, dict[str, list[Sample]]] = {case.name: {name: [] for name in systems} for case in cases}

    def run(name: str, case: Case, seed: str) -> Sample | None:
        if name in failures[case.name]:
            return None
        found = workers[name].answer(case.batch(seed, vocab))
        if isinstance(found, Failure):
            failures[case.name][name] = found.reason
            say(f"{name} failed on {case.name}: {found.reason}")
            return None
        return found

    try:
        for name in systems:
            workers[name] = Worker(name, SYSTEMS[name].python(), model, threads)
            ready = workers[name].answer()
            if isinstance(ready, Failure):
                say(f"{name} cannot be used: {ready.reason}")
                for case in cases:
                    failures[case.name][name] = ready.reason
                continue
            about[name] = ready.about
            say(f"{name} is ready after {ready.seconds:.1f} s ({ready.about}), warming up")
            for case in cases:
                run(name, dataclasses.replace(case, new_tokens=min(case.new_tokens, 4)), "warm-up")
        for number in range(rounds):
            turn = number % len(systems)  # rotate which system goes first
            for case in cases:
                for name in (*systems[turn:], *systems[:turn]):
                    if sample := run(name, case, f"round {number}"):
                        samples[case.name][name].append(sample)
                        speed = f"{case.speed(sample.wall):8.1f} tokens/s"
                        say(f"round {number + 1} of {rounds}   {case.name:12}   {name:14}   {speed}")
        memory = {name: worker.answer("memory") for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.end()
    return {
        "about": about,
        "memory": {name: found for name, found in memory.items() if isinstance(found, dict)},
        "cases": {
            case.name: {
                **dataclasses.asdict(case),
                "failed": failures[case.name],
                "samples": {
                    name: [{"speed": case.speed(s.wall), "wall": s.wall, **s.more} for s in found]
                    for name, found in samples[case.name].items()
                    if name not in failures[case.name]
                },
            }
            for case in cases
        },
    }


def show(results: Results) -> None:
    from penstock.cli.ui.output import print_table

    print("\nTokens per second, median (lowest–highest)")
    for table in all_tables(results):
        print_table(table[0], table[1:])
        print()
    print("\n".join(notes(results)))
    if results["quick"]:
        print("A quick run only shows that everything works: it is too short to judge by, and is not kept.")


def keep(results: Results) -> None:
    """Store the results, next to those of other models."""
    RESULTS.parent.mkdir(exist_ok=True)
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(kept | {results["model"]: results}, indent=1) + "\n", encoding="utf-8")


def write_document(kept: dict[str, Results]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{DOCUMENT} lacks the lines {BEGIN} and {END}.")
    parts = []
    for name, results in kept.items():
        heading = f"### {name}\n\nTokens per second, median of the rounds (lowest–highest); then ratios, round by round."
        parts += [heading, *(markdown(table) for table in all_tables(results)), *notes(results)]
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}", encoding="utf-8")


def find_model(name: str, *, bf16: bool) -> Model:
    """Fetch it where needed. bf16: keep its weights in bf16, too."""
    import torch
    from safetensors.torch import load_file, save_file

    from penstock.model.files.cache import cache_dir
    from penstock.model.sources import resolve
    from penstock.model.sources.known_models import find

    published = resolve(name)
    known = find(name)
    gguf = cache_dir() / "gguf" / known.gguf if known else Path(name)
    if not bf16:
        return Model(name, published, gguf)
    folder = SCRATCH / "models" / published.name
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        weights = load_file(published / "model.safetensors")
        save_file(
            {key: value.to(torch.bfloat16) for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"}
        )
        for other in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(published / other, folder)
        config = json.loads((published / "config.json").read_text(encoding="utf-8")) | {"torch_dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")  # last: everything else exists by now
    return Model(name, folder, gguf)


def surroundings(threads: int) -> Results:
    from penstock import __version__
    from penstock.cli.machine.hardware import cores, cpu_name, memory

    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {
            "cpu": cpu_name(),
            "cores": cores().usable,
            "threads": threads,
            "memory": memory().total or 0,
            "load_before": os.getloadavg()[0],
        },
        "versions": {"Penstock": __version__, **versions, "Python": platform.python_version()},
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _chosen(kind: str, known: Sequence[str], default: Sequence[str], given: str | None) -> list[str]:
    names = given.split(",") if given else list(default)
    for name in names:
        if name not in known:
            sys.exit(f"There is no {kind} '{name}'. Known: {', '.join(known)}.")
    return [name for name in known if name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, help="how often everything is measured (default 3)")
    parser.add_argument("--quick", action="store_true", help="one round of few, short cases, to see that everything works")
    parser.add_argument("--rivals", action="store_true", help=f"also llama.cpp and vLLM, installed into {SCRATCH} the first time")
    parser.add_argument("--systems", help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--model", help="the name of a known model, or a .gguf file, such as those of bench/random_gguf.py")
    parser.add_argument("--cases", help=f"of {','.join(case.name for case in CASES)}")
    parser.add_argument("--tokens", type=int, help="new tokens of an answer at most (default 128)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file too")
    parser.add_argument("--write-docs", action="store_true", help=f"only fill {DOCUMENT.relative_to(ROOT)} from the last results")
    args = parser.parse_args()
    if args.write_docs:
        if len(sys.argv) > 2:
            parser.error("--write-docs measures nothing and stands alone")
        if not RESULTS.exists():
            sys.exit(f"No results are kept yet in {RESULTS}: run bench/compare.py first.")
        write_document(json.loads(RESULTS.read_text(encoding="utf-8")))
        return
    rounds = (1 if args.quick else 3) if args.rounds is None else args.rounds
    if rounds < 1 or (args.tokens is not None and args.tokens < 2):
        parser.error("--rounds must be 1 or more, --tokens 2 or more")
    names = [case.name for case in CASES]
    chosen = _chosen("case", names, QUICK_CASES if args.quick else names, args.cases)
    cases = [case for case in CASES if case.name in chosen]
    if most := args.tokens or (QUICK_TOKENS if args.quick else None):
        cases = [dataclasses.replace(case, new_tokens=min(case.new_tokens, most)) for case in cases]
    wanted = [name for name, entry in SYSTEMS.items() if args.rivals or entry.environment is None]
    if has_bf16():  # fp32 is the harder rival only where bf16 is emulated
        wanted = [name for name in wanted if not name.endswith("-fp32")]
    systems = _chosen("system", list(SYSTEMS), wanted, args.systems)

    from penstock.cli.machine.hardware import cores
    from penstock.model.sources import DEFAULT_MODEL

    name = args.model or DEFAULT_MODEL
    threads = max(1, int(cores().effective))
    about = {"command": shlex.join(["python", "bench/compare.py", *sys.argv[1:]]), "model": Path(name).stem, "rounds": rounds}
    results = {**about, "quick": args.quick, "systems": systems, **surroundings(threads)}
    if results["machine"]["load_before"] > 0.5:
        say(f"The machine is busy (load average {results['machine']['load_before']:.1f}): expect figures that mean little.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # on SIGTERM, the workers end too
    try:
        model = find_model(name, bf16=not all(SYSTEMS[system].as_published for system in systems))
        results |= measure(systems, cases, rounds, model, threads)
    except KeyboardInterrupt:
        sys.exit(130)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if not args.quick:
        keep(results)
    show(results)


if __name__ == "__main__":
    main()
