"""Line plots as SVG: panels below one another with the same horizontal axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

Point = tuple[float, float]

WIDTH, PANEL_HEIGHT, GAP = 760, 170, 46
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 44
COLORS = ("#2a6fbb", "#d9772b", "#3a8f5c", "#8a5bb5")
STYLE = "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}.faint{fill:#777}"


@dataclass(frozen=True)
class Panel:
    """One panel of a plot: lines by label, a horizontal level for comparison, and points of the horizontal axis to
    mark."""

    title: str
    lines: Mapping[str, Sequence[Point]]
    level: tuple[str, float]
    moments: Mapping[str, float] = field(default_factory=dict)


def svg(panels: Sequence[Panel], x_label: str, bottom: float = 0.0) -> str:
    """Return the plot as SVG text. All panels have the same axes, and the vertical axis begins at `bottom`."""
    right = max(x for panel in panels for line in panel.lines.values() for x, _ in line)
    top = max(y for panel in panels for line in panel.lines.values() for _, y in line)
    top = bottom + 1.05 * (max(top, *(panel.level[1] for panel in panels)) - bottom)
    height = TOP + len(panels) * (PANEL_HEIGHT + GAP) - GAP + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for place, panel in enumerate(panels):
        parts += _panel(panel, TOP + place * (PANEL_HEIGHT + GAP), right, (bottom, top))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 8, x_label, "middle"))
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, y: float, right: float, heights: Point) -> list[str]:
    def across(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / right

    def down(value: float) -> float:
        bottom, top = heights
        return y + PANEL_HEIGHT * (1 - (value - bottom) / (top - bottom))

    parts = [_text(LEFT, y - 8, panel.title, "start", "title")]
    for tick in _ticks(*heights):
        parts.append(_line((LEFT, down(tick)), (WIDTH - RIGHT, down(tick)), "#e4e4e4"))
        parts.append(_text(LEFT - 6, down(tick) + 4, f"{tick:g}", "end", "faint"))
    for tick in _ticks(0.0, right):
        parts.append(_text(across(tick), y + PANEL_HEIGHT + 16, f"{tick:g}", "middle", "faint"))
    name, level = panel.level
    parts.append(_line((LEFT, down(level)), (WIDTH - RIGHT, down(level)), "#777", "6 4"))
    parts.append(_text(WIDTH - RIGHT, down(level) - 4, name, "end", "faint"))
    for moment, at in panel.moments.items():
        parts.append(_line((across(at), y), (across(at), y + PANEL_HEIGHT), "#999", "2 3"))
        anchor, beside = ("start", 4) if at < right / 2 else ("end", -4)
        parts.append(_text(across(at) + beside, y + 12, moment, anchor, "faint"))
    for place, (label, line) in enumerate(panel.lines.items()):
        color = COLORS[place % len(COLORS)]
        points = " ".join(f"{across(at):.1f},{down(value):.1f}" for at, value in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        x = LEFT + 330 + 95 * place
        parts.append(_line((x, y - 12), (x + 18, y - 12), color))
        parts.append(_text(x + 23, y - 8, label, "start"))
    return parts


def _ticks(start: float, end: float, count: int = 5) -> list[float]:
    """Return round numbers for an axis from `start` to `end`, at most `count` of them besides the first."""
    step = next(
        base * 10.0**exponent
        for exponent in range(-6, 12)
        for base in (1, 2, 5)
        if base * 10.0**exponent * count >= end - start
    )
    return [step * number for number in range(math.ceil(start / step - 1e-9), int(end / step + 1e-9) + 1)]


def _line(start: Point, end: Point, color: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{dashed}/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'
