"""The planner's figures, as SVG: utilisation over bandwidth, and schedules as in Figure 3 of arXiv 2501.18512."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from opendiloco.plan.schedule import Kind, Node

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 840, 64, 36, 40, 44
CURVES_HEIGHT, LANE, PANEL = 320, 26, 104
COLORS = ("#777777", "#d9772b", "#3a8f5c", "#2a6fbb", "#8a5bb5")
NODE_COLORS = {
    Kind.FORWARD: "#2a6fbb",
    Kind.ACTIVATIONS: "#9ad0a4",
    Kind.PARAMETERS: "#3a8f5c",
    Kind.REDUCTION: "#8a5bb5",
}
STYLE = "text{font:12px sans-serif;fill:#333}.faint{fill:#777}"
Point = tuple[float, float]


def curves(lines: Mapping[str, Sequence[Point]], marks: Mapping[str, float]) -> str:
    """Return the plot of utilisations over bits a second, on a logarithmic axis; `marks` are bandwidths to mark."""
    every = [math.log10(bandwidth) for line in lines.values() for bandwidth, _ in line]
    least, most, height = min(every), max(every), CURVES_HEIGHT

    def across(bandwidth: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(bandwidth) - least) / (most - least)

    def down(share: float) -> float:
        return TOP + height * (1 - share)

    parts = [_text(LEFT, TOP - 22, "compute utilisation")]
    for tenth in range(0, 11, 2):
        parts.append(_line((LEFT, down(tenth / 10)), (WIDTH - RIGHT, down(tenth / 10)), "#e4e4e4"))
        parts.append(_text(LEFT - 6, down(tenth / 10) + 4, f"{tenth * 10} %", "end"))
    for exponent in range(math.ceil(least), math.floor(most) + 1):
        parts.append(_line((across(10**exponent), TOP), (across(10**exponent), TOP + height), "#e4e4e4"))
        parts.append(_text(across(10**exponent), TOP + height + 16, bandwidth_words(10**exponent), "middle"))
    for words, bandwidth in marks.items():
        if least <= math.log10(bandwidth) <= most:
            parts.append(_line((across(bandwidth), TOP), (across(bandwidth), TOP + height), "#999", "3 3"))
            parts.append(_text(across(bandwidth) + 4, TOP + 12, words))
    for place, (name, line) in enumerate(lines.items()):
        color = COLORS[place % len(COLORS)]
        points = " ".join(f"{across(bandwidth):.1f},{down(share):.1f}" for bandwidth, share in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        y = TOP + height - 14 * (len(lines) - place)
        parts.append(_line((WIDTH - 250, y - 4), (WIDTH - 230, y - 4), color))
        parts.append(_text(WIDTH - 224, y, name))
    return _document(TOP + height + BOTTOM, parts)


def schedules(rows: Mapping[str, Sequence[Node]]) -> str:
    """Return one panel for each method, computing above and reductions below, each with its own axis of time."""
    parts = list(_legend())
    for place, (name, nodes) in enumerate(rows.items()):
        parts += _schedule(TOP + place * PANEL, name, nodes)
    return _document(TOP + len(rows) * PANEL + 8, parts)


def bandwidth_words(bits_per_second: float) -> str:
    """Return a bandwidth as a person writes it."""
    for factor, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:.3g} {unit}"
    return f"{bits_per_second / 1e3:.3g} kbit/s"


def _schedule(y: float, name: str, nodes: Sequence[Node]) -> Iterator[str]:
    first, last = min(node.start for node in nodes), max(node.end for node in nodes)

    def across(moment: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (moment - first) / (last - first)

    yield _text(LEFT, y + 10, name)
    yield _text(LEFT - 6, y + 16 + LANE / 2, "compute", "end")
    yield _text(LEFT - 6, y + 20 + LANE * 1.5, "link", "end")
    for node in nodes:
        top = y + 16 + (LANE + 4 if node.kind is Kind.REDUCTION else 0)
        width = max(across(node.end) - across(node.start), 0.3)
        yield (
            f'<rect x="{across(node.start):.2f}" y="{top:.1f}" width="{width:.2f}" height="{LANE}"'
            f' fill="{NODE_COLORS[node.kind]}"><title>step {node.step}, layer {node.layer + 1}, {node.kind}</title>'
            "</rect>"
        )
    yield _text(LEFT, y + 36 + 2 * LANE, "0 s")
    yield _text(WIDTH - RIGHT, y + 36 + 2 * LANE, f"{last - first:,.{0 if last - first >= 100 else 2}f} s", "end")


def _legend() -> Iterator[str]:
    for place, (kind, color) in enumerate(NODE_COLORS.items()):
        x = LEFT + 180 * place
        yield f'<rect x="{x}" y="10" width="12" height="12" fill="{color}"/>'
        yield _text(x + 18, 20, str(kind))


def _document(height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}"'
    start = [f'{head} height="{height:g}">', f"<style>{STYLE}</style>"]
    return "\n".join([*start, f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>', *parts, "</svg>", ""])


def _line(start: Point, end: Point, color: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{dashed}/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
