"""The picture of the `http` part: how long people wait, and how many are served well, as more of them come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

INK = "#7d8590"  # readable on white and on black
BLUE, ORANGE = "#3b82f6", "#f0883e"


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    loads, slo, capacity = results["loads"], results["slo"], results["capacity"]
    rates = [load["rate"] for load in loads]
    style = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "penstock",  # the same results give the same file
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
    }
    with plt.rc_context(style):
        figure, (first, gap, good) = plt.subplots(1, 3, figsize=(10.5, 3.2), layout="constrained")
        for axes, title, names, limit in (
            (first, "Time to first token", ("first_p50", "first_p99"), slo["first"]),
            (gap, "Between two tokens", ("gap_p50", "gap_p99"), slo["gap"]),
        ):
            for name, color, label in zip(names, (BLUE, ORANGE), ("p50", "p99"), strict=True):
                points = [(load["rate"], load[name]) for load in loads if load[name] is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4)
                    axes.annotate(label, points[-1], color=color, xytext=(6, -3), textcoords="offset points")
            axes.axhline(limit, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
            axes.annotate("wanted", (0.0, limit), xycoords=("axes fraction", "data"), xytext=(3, 3), textcoords="offset points")
            axes.set_yscale("log")
            axes.set_title(title)
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(_seconds))
            axes.yaxis.set_minor_formatter(NullFormatter())
        good.plot(rates, [100 * load["good"] / load["offered"] for load in loads], color=BLUE, marker="o", markersize=4)
        good.set_title("Answered in time")
        good.set_ylim(0, 105)
        good.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
        for axes in (first, gap, good):
            axes.set_xlim(0, 1.12 * max(rates))
            axes.set_xlabel("requests per second offered")
            axes.grid(axis="y", color=INK, alpha=0.2, linewidth=0.6)
            if capacity is not None:
                axes.axvline(capacity, color=INK, linewidth=0.8, linestyle=":")
        if capacity is not None:
            where = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            good.annotate("capacity", (capacity, 0.03), xytext=(-4, 0), ha="right", **where)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def _seconds(value: float, _: int) -> str:
    return f"{1000 * value:g} ms" if value < 1 else f"{value:g} s"
