"""Draw the plots of docs/benchmarks.md and docs/privacy.md from the stored results: python bench/plots.py writes docs/img/.

A bar or a dot is the median of the rounds, a thin line spans the lowest to the highest. A test fails if a plot does not match
the results.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.drawing import AMBER, BLUE, GREY, ROSE, SOFT, TEAL, VIOLET, Drawing, number  # noqa: E402

FOLDER = ROOT / "docs/img"
LEFT, BOTTOM = 56, 44  # room for the axes, in pixels


def results(name: str) -> Any:
    return json.loads((ROOT / f"bench/results/{name}.json").read_text(encoding="utf-8"))


def source(found: dict[str, Any]) -> str:
    """The source of the figures, for the last line of a plot."""
    machine = found["machine"]
    return f"{found['command']}, {found['date'][:10]}, {machine['cpu'].replace('(R)', '')}, {machine['cores']} cores"


class Plot:
    """Axes in a part of a drawing, with a scale from 0 to `top`."""

    def __init__(self, drawing: Drawing, x: float, y: float, w: float, h: float, title: str, top: float, steps: int = 4) -> None:
        self._drawing = drawing
        self._left, self._right = x + LEFT, x + w
        self._top_y, self._base = y + 34, y + h - BOTTOM
        self._top = top
        drawing.text(x + 4, y + 14, title, bold=True, size=14)
        for i in range(steps + 1):
            value = top * i / steps
            drawing.line((self._left, self.y(value)), (self._right, self.y(value)), color="#e3eaee")
            drawing.text(
                self._left - 8,
                self.y(value) + 4,
                f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}",
                size=11,
                color=SOFT,
                anchor="end",
            )

    def x(self, share: float) -> float:
        return self._left + share * (self._right - self._left)

    def y(self, value: float) -> float:
        return self._base - (self._base - self._top_y) * min(value, self._top) / self._top

    def label(self, share: float, text: str) -> None:
        self._drawing.text(self.x(share), self._base + 18, text, size=12, color=SOFT, anchor="middle")

    def caption(self, text: str) -> None:
        self._drawing.text((self._left + self._right) / 2, self._base + 36, text, size=11, color=SOFT, anchor="middle")

    def range(self, share: float, values: Sequence[float], shift: float = 0) -> None:
        x = self.x(share) + shift
        self._drawing.line((x, self.y(min(values))), (x, self.y(max(values))), color="#33414b", width=1.2)

    def bars(self, groups: Sequence[Sequence[Sequence[float]]], colors: Sequence[str]) -> None:
        """Groups of bars side by side; each bar is the rounds that were measured."""
        room = 1 / len(groups)
        w = min(30.0, room * (self._right - self._left) / (len(colors) + 1))
        for i, group in enumerate(groups):
            for k, (values, color) in enumerate(zip(group, colors, strict=True)):
                shift = (k - (len(group) - 1) / 2) * (w + 2)
                middle = statistics.median(values)
                x = self.x((i + 0.5) * room) + shift
                self._drawing.box(x - w / 2, self.y(middle), w, self._base - self.y(middle), fill=color, stroke=color, radius=2)
                self.range((i + 0.5) * room, values, shift)
                self._drawing.text(
                    x,
                    self.y(max(values)) - 5,
                    number(round(middle, 1 if middle < 100 else 0)),
                    size=10,
                    color=SOFT,
                    anchor="middle",
                )

    def lines(self, points: Sequence[tuple[float, Sequence[float]]], color: str, *, dashed: bool = False) -> None:
        """Medians joined by a line; a point is a position on the axis (0 to 1) and the rounds."""
        medians = [(self.x(share), self.y(statistics.median(values))) for share, values in points]
        self._drawing.line(*medians, color=color, width=2, dashed=dashed)
        for (share, values), (x, y) in zip(points, medians, strict=True):
            if min(values) < max(values):
                self.range(share, values)
            self._drawing.dot(x, y, color=color)


def legend(drawing: Drawing, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
    for text, color in entries:
        drawing.box(x, y - 9, 12, 10, fill=color, stroke=color, radius=2)
        drawing.text(x + 18, y, text, size=12, color=SOFT)
        x += 34 + 6.6 * len(text)


def compare() -> Drawing:
    found = results("compare")["smollm2-135m"]
    known = {
        "penstock": ("Penstock, 4 bits", BLUE),
        "penstock-bf16": ("Penstock, bf16", TEAL),
        "llama.cpp-q4_0": ("llama.cpp, Q4_0", AMBER),
        "vllm-fp32": ("vLLM, fp32", ROSE),
        "generate-fp32": ("transformers, fp32", GREY),
    }
    colors = [color for _, color in known.values()]
    drawing = Drawing(860, 330, "Tokens per second of Penstock and others, for one to 64 requests at once and for prompts")
    parts: list[tuple[float, float, str, list[str], list[str]]] = [
        (10, 520, "Answers: tokens per second", ["single", "8", "32", "64"], ["1", "8", "32", "64"]),
        (550, 300, "Prompts: tokens per second", ["prefill-512", "prefill-2048"], ["512 tokens", "2,048 tokens"]),
    ]
    for x, w, title, cases, labels in parts:
        speeds = [[[run["speed"] for run in found["cases"][case]["samples"][name]] for name in known] for case in cases]
        most = max(speed for case in speeds for runs in case for speed in runs)
        plot = Plot(drawing, x, 10, w, 270, title, 200 * math.ceil(most / 200))
        plot.bars(speeds, colors)
        for i, text in enumerate(labels):
            plot.label((i + 0.5) / len(labels), text)
        plot.caption("requests at once" if "1" in labels else "one prompt")
    legend(drawing, 66, 298, list(known.values()))
    drawing.text(10, 320, source(found), size=10, color=SOFT)
    return drawing


def nodes() -> Drawing:
    two, pipes = results("network")["two"], results("network")["language-pipes"]
    drawing = Drawing(860, 330, "Tokens per second of one node and of two, and of Penstock and Language Pipes over two nodes")
    most = max(run["tokens"] / run["wall"] for kind in two["runs"].values() for runs in kind.values() for run in runs)
    plot = Plot(drawing, 10, 10, 470, 270, "The same two cores as one node or two", 200 * math.ceil(most / 200))
    kinds = {"one node, 2 threads": BLUE, "two nodes, 1 thread each": TEAL, "two nodes, pinned": AMBER}
    streams = ["1", "4", "8", "16", "32"]
    for kind, color in kinds.items():
        runs = two["runs"][kind]
        plot.lines([((i + 0.5) / 5, [run["tokens"] / run["wall"] for run in runs[n]]) for i, n in enumerate(streams)], color)
    for i, n in enumerate(streams):
        plot.label((i + 0.5) / 5, n)
    plot.caption("requests at once; tokens per second, prompts included")
    other = Plot(drawing, 510, 10, 340, 270, "Two nodes on one machine", 500)
    speeds = pipes["speeds"]
    other.bars([[speeds[system][n] for system in speeds] for n in ("1", "8")], [BLUE, TEAL, GREY])
    for i, text in enumerate(("1 request", "8 at once")):
        other.label((i + 0.5) / 2, text)
    other.caption("tokens per second")
    legend(drawing, 66, 298, [("one node", BLUE), ("two nodes", TEAL), ("two nodes, pinned", AMBER)])
    legend(drawing, 520, 298, [("Penstock", BLUE), ("Penstock, bf16", TEAL), ("Language Pipes", GREY)])
    drawing.text(66, 320, source(two), size=11, color=SOFT)
    return drawing


def gpu() -> Drawing:
    found = results("gpu")
    kinds = {"bf16": BLUE, "fp8": TEAL, "int4": AMBER, "transformers": GREY}
    drawing = Drawing(860, 330, "Tokens per second of an 8B model on an H200: Penstock in three precisions, and transformers")
    cases = [
        ("One answer", "1 ", 400),
        ("64 answers at once", "64 ", 16_000),
        ("A prompt of 8,192 tokens", "prefill 8192", 80_000),
    ]
    for i, (title, case, top) in enumerate(cases):
        plot = Plot(drawing, 10 + 285 * i, 10, 270, 270, title, top)
        rows = [next(row for row in found[kind]["rows"] if row["case"].startswith(case)) for kind in kinds]
        speeds = [[row["tokens_per_s"] * statistics.median(row["seconds"]) / took for took in row["seconds"]] for row in rows]
        plot.bars([speeds], list(kinds.values()))
        plot.caption("tokens per second")
    names = ["Penstock, bf16", "Penstock, fp8", "Penstock, 4 bits", "transformers, bf16"]
    legend(drawing, 66, 298, list(zip(names, kinds.values(), strict=True)))
    about = (
        f"bench/engine.py and engine_transformers.py, {found['bf16']['date'][:10]}, one {found['bf16']['device']}, random weights"
    )
    drawing.text(66, 320, about, size=11, color=SOFT)
    return drawing


def leaks() -> Drawing:
    found = results("audit")
    drawing = Drawing(860, 320, "Share of tokens that a peer with the weights recovers, by the number of layers kept at home")
    sides: list[tuple[float, str, str, list[tuple[str, str, Callable[[dict[str, Any]], float]]], str]] = [
        (
            10,
            "Tokens of a prompt, %",
            "front",
            [
                ("nearest embedding", BLUE, lambda row: row["nearest"]),
                ("linear map", AMBER, lambda row: row["mapped"]),
                ("search", ROSE, lambda row: row["search"]["recovered"]),
            ],
            "first layers kept at home",
        ),
        (
            440,
            "Tokens of an answer, %",
            "back",
            [
                ("norm and head", TEAL, lambda row: row["head_answer"]),
                ("linear map", VIOLET, lambda row: row["mapped_answer"]),
            ],
            "last layers kept at home",
        ),
    ]
    for x, title, side, attacks, caption in sides:
        plot = Plot(drawing, x, 10, 402, 270, title, 100)
        rows = found[side]
        for _, color, share in attacks:
            plot.lines([(row["kept"] / 12, [100 * share(row)]) for row in rows], color)
        for row in rows:
            plot.label(row["kept"] / 12, str(row["kept"]))
        plot.caption(caption)
        legend(drawing, x + LEFT, 302, [(name, color) for name, color, _ in attacks])
    return drawing


PLOTS = {"compare.svg": compare, "gpu.svg": gpu, "nodes.svg": nodes, "leaks.svg": leaks}


def main() -> None:
    for name, draw in PLOTS.items():
        (FOLDER / name).write_text(draw().render(), encoding="utf-8")


if __name__ == "__main__":
    main()
