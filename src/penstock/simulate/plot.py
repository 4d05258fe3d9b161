"""Draws the timeline of a simulation as SVG: throughput, jobs, waiting times, live nodes and their load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from penstock.simulate.report import SimulationReport
from penstock.units import format_seconds

WIDTH, LEFT, RIGHT, TOP = 960, 70, 24, 84
PANEL, GAP, BOTTOM = 120, 34, 46
INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = {"tokens": "#2f6fde", "running": "#d9822b", "waits": "#7048e8", "nodes": "#2b8a3e"}
EVENT_COLOURS = {"kill": "#c92a2a", "freeze": "#c92a2a", "cut": "#c92a2a", "leave": "#e8890c"}
MAX_LABELS = 12  # of events; more are only marked
BARS = 24  # at most, in the chart of node load; for more nodes, a curve


@dataclass(frozen=True, slots=True)
class _Panel:
    """Values over time; None for a gap. pale: a second series, drawn behind."""

    name: str
    colour: str
    values: Sequence[float | None]
    pale: Sequence[float | None] = ()
    floor: float = 0.0  # where the axis begins

    @property
    def top(self) -> float:
        known = [value for value in (*self.values, *self.pale) if value is not None]
        return self.floor + _round_up(max(known, default=0.0) - self.floor)


def plot(report: SimulationReport) -> str:
    """Return an SVG document."""
    timeline = report.timeline
    waits = timeline.first_token_s
    panels = [
        _Panel("tokens per second", COLOURS["tokens"], timeline.tokens_per_second),
        _Panel("jobs running or waiting", COLOURS["running"], timeline.running),
        _Panel(
            "seconds to the first token: median, and pale p99",
            COLOURS["waits"],
            [wait.p50 for wait in waits],
            [wait.p99 for wait in waits],
        ),
        _Panel("nodes", COLOURS["nodes"], timeline.nodes, floor=_floor(timeline.nodes)),
    ]
    bottom = TOP + len(panels) * (PANEL + GAP)
    height = bottom + PANEL + BOTTOM
    parts = [*_title(report), *_events(report, bottom - GAP)]
    for number, panel in enumerate(panels):
        parts += _draw(panel, TOP + number * (PANEL + GAP))
    parts += _time_axis(report.seconds, bottom - GAP)
    parts += _use(report, bottom + 22)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *parts, "</svg>\n"])


def _title(report: SimulationReport) -> Iterable[str]:
    jobs, first, between = report.jobs, report.first_token_s, report.between_tokens_s
    summary = [
        f"{report.tokens_per_second:,.1f} tokens/s",
        f"{jobs.done:,} of {jobs.started:,} jobs done",
        f"first token {_seconds(first.p50)} (p99 {_seconds(first.p99)})",
        f"between tokens {_seconds(between.p50)} (p99 {_seconds(between.p99)})",
        f"recoveries: {report.recoveries:,}",
    ]
    yield _text(LEFT, 28, f"{report.scenario}: {len(report.nodes):,} nodes, {report.seconds:g} s", size=17, weight=600)
    yield _text(LEFT, 48, " · ".join(summary), colour=FAINT)


def _seconds(seconds: float | None) -> str:
    return "none" if seconds is None else format_seconds(seconds)


def _draw(panel: _Panel, top: int) -> Iterable[str]:
    base, span = top + PANEL, panel.top - panel.floor
    for share in (0.0, 0.5, 1.0):
        y = base - share * PANEL
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield _text(LEFT - 8, y + 4, _number(panel.floor + span * share), anchor="end", colour=FAINT)
    for values, opacity in ((panel.pale, 0.35), (panel.values, 1.0)):
        step = (WIDTH - LEFT - RIGHT) / max(1, len(values))
        for run in _runs(values):
            known = [(LEFT + (number + 0.5) * step, base - (value - panel.floor) / span * PANEL) for number, value in run]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in known)
            if not panel.pale and not panel.floor:
                area = f"{known[0][0]:.1f},{base} {points} {known[-1][0]:.1f},{base}"
                yield f'<polygon points="{area}" fill="{panel.colour}" fill-opacity="0.14"/>'
            yield (
                f'<polyline points="{points}" fill="none" stroke="{panel.colour}" stroke-opacity="{opacity}" stroke-width="1.8"'
                ' stroke-linejoin="round"/>'
            )
            if len(known) == 1:
                x, y = known[0]
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{panel.colour}" fill-opacity="{opacity}"/>'
    yield _text(LEFT, top - 7, panel.name, weight=600)


def _runs(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Split the values into runs at their gaps: a line across a gap would show values that were never measured."""
    runs: list[list[tuple[int, float]]] = [[]]
    for number, value in enumerate(values):
        if value is not None:
            runs[-1].append((number, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _events(report: SimulationReport, bottom: int) -> Iterable[str]:
    events = report.timeline.events
    few = len(events) <= MAX_LABELS
    for at, what in events:
        x = LEFT + at / report.seconds * (WIDTH - LEFT - RIGHT)
        colour = EVENT_COLOURS.get(what.split()[0], COLOURS["nodes"])
        yield (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="{colour}" stroke-opacity="{0.7 if few else 0.25}"'
            f' stroke-dasharray="3 3"><title>{escape(f"{at:g} s: {what}")}</title></line>'
        )
        if few:
            yield _text(x + 4, TOP + 12, what, colour=colour, size=10)


def _time_axis(seconds: float, y: int) -> Iterable[str]:
    step = _round_up(seconds / 6)
    for number in range(int(seconds / step) + 1):
        x = LEFT + number * step / seconds * (WIDTH - LEFT - RIGHT)
        yield _text(x, y + 18, f"{number * step:.6g} s", anchor="middle", colour=FAINT)


def _use(report: SimulationReport, top: int) -> Iterable[str]:
    """Draw how busy nodes were: a bar for each, or a sorted curve if there are many."""
    yield _text(LEFT, top - 7, "share of time that nodes compute", weight=600)
    base, space = top + PANEL - 20, PANEL - 20
    room = WIDTH - LEFT - RIGHT
    nodes = report.nodes if len(report.nodes) <= BARS else sorted(report.nodes, key=lambda node: -node.busy)
    each = room / len(nodes)
    for share in (0.0, 0.5, 1.0):
        y = base - share * space
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield _text(LEFT - 8, y + 4, f"{share:.0%}", anchor="end", colour=FAINT)
    if len(nodes) > BARS:
        points = " ".join(f"{LEFT + number * each:.1f},{base - node.busy * space:.1f}" for number, node in enumerate(nodes))
        yield f'<polygon points="{LEFT},{base} {points} {WIDTH - RIGHT},{base}" fill="{COLOURS["nodes"]}" fill-opacity="0.5"/>'
        yield _text(LEFT, base + 16, "the busiest", colour=FAINT)
        yield _text(WIDTH - RIGHT, base + 16, "the idlest", anchor="end", colour=FAINT)
        return
    for number, node in enumerate(nodes):
        x, high = LEFT + (number + 0.15) * each, node.busy * space
        yield (
            f'<rect x="{x:.1f}" y="{base - high:.1f}" width="{0.7 * each:.1f}" height="{high:.1f}" fill="{COLOURS["nodes"]}"'
            f' fill-opacity="0.7"><title>{escape(node.node)}: {node.busy:.0%}</title></rect>'
        )
        yield _text(x + 0.35 * each, base + 16, node.node, anchor="middle", colour=FAINT, size=11 if len(nodes) <= 12 else 8)


def _floor(values: Sequence[float]) -> float:
    """Where an axis begins: at zero, unless the values vary too little to be visible."""
    low, high = min(values), max(values)
    return 0.0 if low == high or high - low > high / 20 else low - (high - low)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _round_up(most: float) -> float:
    """The end of an axis: the value rounded up to one digit, or to 1.5 times a power of ten."""
    if most <= 0:
        return 1.0
    unit = 1.0
    while unit * 10 <= most:
        unit *= 10
    while unit > most:
        unit /= 10
    return next(factor * unit for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if factor * unit >= most)


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = INK, size: int = 12, weight: int = 400) -> str:
    style = f'text-anchor="{anchor}" fill="{colour}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
