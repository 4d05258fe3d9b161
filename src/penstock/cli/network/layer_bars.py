"""A picture of which node holds which layers: rows of bars for each node, drawn to scale, with the gaps marked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import NamedTuple

from penstock.cli.ui.columns import INDENT, Ink, breadth, labels, padded

HELD, LAST, DRAINING, HOLE, MARK = "█", "▉", "░", "·", "^"  # LAST is narrower, so that neighbouring ranges stay apart
STYLES = {HELD: "green", LAST: "green", DRAINING: "yellow", HOLE: "red", MARK: "red"}
MISSING = "missing"


class Held(NamedTuple):
    node: str
    start: int
    end: int
    draining: bool = False


class Scale(NamedTuple):
    """Maps layers to columns: a whole number of columns for each layer, if there is room."""

    layers: int
    width: int

    def column(self, layer: int) -> int:
        return min(max(layer, 0), self.layers) * self.width // self.layers

    def columns(self, start: int, end: int) -> range:
        """Return the columns of a range, at least one, so that it can be seen."""
        first = min(self.column(start), self.width - 1)
        return range(first, max(self.column(end), first + 1))


def layer_bars(num_layers: int, held: Sequence[Held], holes: Sequence[tuple[int, int]], width: int, ink: Ink) -> list[str]:
    num_layers = max(num_layers, 1)
    names = labels([found.node for found in held], width // 4)
    margin = max((breadth(name) for name in [*names.values(), *([MISSING] if holes else [])]), default=0)
    room = max(width - 2 * len(INDENT) - margin - len(str(num_layers)), 10)
    scale = Scale(num_layers, num_layers * (room // num_layers) or room)

    def line(name: str, drawn: str) -> str:
        return (INDENT + padded(name, margin) + INDENT + drawn).rstrip()

    lines = [line("", ink("dim", _ruler(scale, held, holes)))]
    lines += [line(names[node], _inked(_bar(scale, row, holes), ink)) for node, row in _rows(held)]
    if holes:
        lines.append(line(MISSING, _inked(_marks(scale, holes), ink)))
    if any(found.draining for found in held):
        lines.append(line("", ink("dim", f"{DRAINING} draining: finishes running work, accepts nothing new")))
    return lines


def _rows(held: Sequence[Held]) -> Iterator[tuple[str, list[Held]]]:
    """Return the rows node by node, in the order in which tokens pass them. Overlapping ranges of a node get separate rows."""
    nodes: dict[str, list[list[Held]]] = {}
    for found in sorted(held, key=lambda found: (found.start, found.end, found.node)):
        rows = nodes.setdefault(found.node, [])
        row = next((row for row in rows if row[-1].end <= found.start), None)
        if row is None:
            rows.append([found])
        else:
            row.append(found)
    for node, rows in nodes.items():
        yield from ((node, row) for row in rows)


def _bar(scale: Scale, row: Iterable[Held], holes: Iterable[tuple[int, int]]) -> str:
    cells = [" "] * scale.width
    for start, end in holes:
        for column in scale.columns(start, end):
            cells[column] = HOLE
    for found in row:
        columns = scale.columns(found.start, found.end)
        for column in columns:
            cells[column] = DRAINING if found.draining else HELD
        if not found.draining and columns[-1] + 1 < scale.width:
            cells[columns[-1]] = LAST
    return "".join(cells)


def _marks(scale: Scale, holes: Iterable[tuple[int, int]]) -> str:
    marked = set(chain.from_iterable(scale.columns(start, end) for start, end in holes))
    return "".join(MARK if column in marked else " " for column in range(scale.width))


def _ruler(scale: Scale, held: Iterable[Held], holes: Iterable[tuple[int, int]]) -> str:
    """Draw layer numbers where ranges start and end, as far as there is room; the ends of the model and gaps come first."""
    edges = [0, scale.layers, *sorted(chain.from_iterable(holes)), *sorted({edge for found in held for edge in found[1:3]})]
    cells = [" "] * (scale.width + len(str(scale.layers)))
    for edge in dict.fromkeys(edges):
        text, place = str(edge), scale.column(edge)
        if 0 <= edge <= scale.layers and not "".join(cells[max(place - 1, 0) : place + len(text) + 1]).strip():
            cells[place : place + len(text)] = text
    return "".join(cells).rstrip()


def _inked(cells: str, ink: Ink) -> str:
    runs = ("".join(run) for _, run in groupby(cells.rstrip(), key=lambda cell: STYLES.get(cell, "")))
    return "".join(ink(STYLES[run[0]], run) if run[0] in STYLES else run for run in runs)
