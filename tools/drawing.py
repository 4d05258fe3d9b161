"""A few shapes as SVG text: what the pictures in docs/img/ are made of (tools/pictures.py, bench/plots.py).

Pictures have their own light background, so that they are readable on pages of any colour. The same input gives the same bytes,
so that a test can check that they are up to date.
"""

from __future__ import annotations

from html import escape

INK, SOFT, LINE, GROUND = "#1f2f3a", "#5b6b76", "#b9c6cf", "#fbfdfe"
BLUE, TEAL, AMBER, ROSE, VIOLET, GREY = "#2f7fb5", "#2a9d8f", "#d9902f", "#c8553d", "#7a6bb8", "#93a1ab"
FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', 'Liberation Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', 'DejaVu Sans Mono', 'Liberation Mono', monospace"


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


class Drawing:
    """Shapes from back to front, in pixels from the left and from the top."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = width, height
        self._title = title
        self._shapes: list[str] = []
        self._heads: set[str] = set()

    def box(
        self, x: float, y: float, w: float, h: float, *, fill: str = "#ffffff", stroke: str = LINE, radius: float = 8
    ) -> None:
        place = f'x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}" rx="{number(radius)}"'
        self._shapes.append(f'<rect {place} fill="{fill}" stroke="{stroke}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 14,
        color: str = INK,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        style = f'font-size="{number(size)}" fill="{color}"'
        style += f' text-anchor="{anchor}"' if anchor != "start" else ""
        style += ' font-weight="600"' if bold else ""
        style += f' font-family="{MONO}"' if mono else ""
        self._shapes.append(f'<text x="{number(x)}" y="{number(y)}" {style}>{escape(text)}</text>')

    def line(self, *points: tuple[float, float], color: str = LINE, width: float = 1, dashed: bool = False) -> None:
        self._path("M" + " L".join(f"{number(x)} {number(y)}" for x, y in points), color, width, dashed, head=False)

    def arrow(self, *points: tuple[float, float], color: str = SOFT, width: float = 1.6, dashed: bool = False) -> None:
        """Draw an arrow along straight lines."""
        self._path("M" + " L".join(f"{number(x)} {number(y)}" for x, y in points), color, width, dashed, head=True)

    def curve(self, path: str, *, color: str = SOFT, width: float = 1.6, dashed: bool = False) -> None:
        """Draw an arrow along an SVG path."""
        self._path(path, color, width, dashed, head=True)

    def dot(self, x: float, y: float, *, color: str = BLUE, radius: float = 4) -> None:
        self._shapes.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" fill="{color}"/>')

    def _path(self, path: str, color: str, width: float, dashed: bool, *, head: bool) -> None:
        style = f'stroke="{color}" stroke-width="{number(width)}" fill="none"' + (' stroke-dasharray="5 4"' if dashed else "")
        if head:
            self._heads.add(color)
            style += f' marker-end="url(#head{color[1:]})"'
        self._shapes.append(f'<path d="{path}" {style}/>')

    def render(self) -> str:
        width, height = self._size
        heads = "".join(
            f'<marker id="head{color[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{color}"/></marker>'
            for color in sorted(self._heads)
        )
        frame = f'viewBox="0 0 {width} {height}" width="{width}" role="img" font-family="{FONT}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>',
                f"<title>{escape(self._title)}</title>",
                *([f"<defs>{heads}</defs>"] if heads else []),
                f'<rect width="{width}" height="{height}" rx="10" fill="{GROUND}"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )
