"""What the format of hidden states gains on a narrow link: a wide random model over two nodes, and a bandwidth-limited proxy.

The model is 4096 wide and has two layers, one on each node, so that the link is what takes time. `a` has the ends. Each format
has a pipe and a link of its own; they take turns. A prompt of 2,000 words is read, which crosses the link once on its way to `b`;
then 16 streams are answered, each token of which crosses it there and back.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from child import Answer, Child
from compare import ROOT, say
from pipes_of_nodes import PipeOfNodes, Run, answer, free_port
from tables import mark, markdown, spread
from traffic import equal_chats

WIRES = ("fp32", "bf16", "int8")
TARGETS = {"bf16": 1.8, "int8": 3.2}
WRITE = """
import sys
from pathlib import Path
from tests.small_model import write_small_model
folder, default, width = sys.argv[1:]
write_small_model(Path(folder), Path(default), width=int(width), inner=256, head=32, tied=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WirePlan:
    penstock: tuple[str, ...]
    default: Path  # the folder of the default model, whose tokenizer the wide one has
    mbits: tuple[float, ...] = (100.0, 20.0)
    width: int = 4096
    streams: int = 16
    new_tokens: int = 24
    prompt_words: int = 2000
    rounds: int = 3
    seed: str = "network"

    @classmethod
    def quick(cls, **more: Any) -> WirePlan:
        return cls(**{"rounds": 1, "new_tokens": 6, "prompt_words": 400, "mbits": (100.0,), **more})


def slow_link(port: int, target: int, bytes_per_second: float) -> Answer:
    """The bandwidth-limited proxy, for a `Child` process."""
    sys.path.insert(0, str(ROOT))
    from tests.network.slow_link import SlowLink

    link = SlowLink(target, bytes_per_second, port=port)
    return lambda _: link.connections


def measure(plan: WirePlan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "wide"
        # in a process of its own, which needs two gigabytes for it
        subprocess.run([sys.executable, "-c", WRITE, model, plan.default, str(plan.width)], cwd=ROOT, check=True)
        return {
            "width": plan.width,
            "streams": plan.streams,
            "new_tokens": plan.new_tokens,
            "prompt_words": plan.prompt_words,
            "links": [_on_link(plan, str(model), mbit) for mbit in plan.mbits],
        }


def _on_link(plan: WirePlan, model: str, mbit: float) -> dict[str, Any]:
    prompts: dict[str, list[dict[str, Any]]] = {wire: [] for wire in WIRES}
    streams: dict[str, list[dict[str, Any]]] = {wire: [] for wire in WIRES}
    with ExitStack() as stack:
        pipes = {wire: stack.enter_context(_pipe(stack, plan, model, wire, mbit)) for wire in WIRES}
        for wire in WIRES:
            answer(pipes[wire].a, equal_chats(f"{plan.seed}/{wire}/warm-up", plan.streams, question_words=8, new_tokens=4))
        for number in range(plan.rounds):
            long = equal_chats(f"{plan.seed}/long/{number}", 1, question_words=plan.prompt_words, new_tokens=2)
            many = equal_chats(f"{plan.seed}/many/{number}", plan.streams, question_words=8, new_tokens=plan.new_tokens)
            for wire in WIRES if number % 2 else reversed(WIRES):  # alternate the order
                prompts[wire].append(asdict(answer(pipes[wire].a, long)))
                streams[wire].append(asdict(answer(pipes[wire].a, many)))
                took, run = prompts[wire][-1]["wall"], Run(**streams[wire][-1])
                say(f"{mbit:g} Mbit/s, round {number + 1}   {wire}   prompt {took:5.1f} s   {run.decoding:6.1f} tokens/s")
        lost = sum(pipe.route()["lost"] for pipe in pipes.values())
    return {"mbit": mbit, "prompts": prompts, "streams": streams, "lost": lost}


def _pipe(stack: ExitStack, plan: WirePlan, model: str, wire: str, mbit: float) -> PipeOfNodes:
    near, far = free_port(), free_port()
    stack.enter_context(Child(slow_link, near, far, mbit * 1e6 / 8, threads=1))
    flags = ("--wire", wire, "--quant", "int8", "--kv-memory", "300MB")
    return PipeOfNodes(plan.penstock, model, cut=1, layers=2, b_port=far, through=near, flags=flags)


def show(results: dict[str, Any]) -> str:
    table = [["link", "wire", "prompt read in", "fp32 ÷ it", "aim", f"{results['streams']} streams, tokens/s", "÷ fp32", "lost"]]
    for link in results["links"]:
        for wire in WIRES:
            reading = [run["wall"] for run in link["prompts"][wire]]
            speeds = [run["decoding"] for run in link["streams"][wire]]
            base = [run["wall"] for run in link["prompts"]["fp32"]], [run["decoding"] for run in link["streams"]["fp32"]]
            shorter = [a / b for a, b in zip(base[0], reading, strict=True)]
            faster = [a / b for a, b in zip(speeds, base[1], strict=True)]
            aim = TARGETS.get(wire)
            reached = aim and f"≥ {aim}× {mark(statistics.median(shorter) >= aim)}"
            table.append(
                [
                    f"{link['mbit']:g} Mbit/s",
                    wire,
                    spread(reading, ".1f", " s"),
                    spread(shorter, ".2f", "×") if aim else "–",
                    reached or "–",
                    spread(speeds, ".1f"),
                    spread(faster, ".2f", "×") if aim else "–",
                    str(link["lost"]),
                ]
            )
    about = (
        f"A random model {results['width']} wide with two layers over two nodes, int8 weights, one compute thread each; a "
        f"prompt of {results['prompt_words']:,} words, and streams of {results['new_tokens']} tokens while decoding; the aim is "
        f"for prompts, since the link is not what streams wait for most; median of "
        f"{len(results['links'][0]['prompts']['fp32'])} rounds (lowest–highest)."
    )
    return f"{markdown(table)}\n\n{about}"
