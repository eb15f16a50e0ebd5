"""Show reward over time and over samples, as a table for the terminal and as a chart (SVG)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import msgspec

#: Size of one panel in pixels, and the margins for the labels of its axes.
WIDTH, HEIGHT, MARGIN = 420, 260, 48
#: Okabe and Ito's colours, which colour-blind people can distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")


class Point(msgspec.Struct, frozen=True):
    """After a training step: seconds and samples since the start, and the mean reward in it."""

    seconds: float
    samples: int
    reward: float


#: The points of each policy, in order.
Curves = dict[str, list[Point]]


def table(curves: Curves, rows: int = 8) -> str:
    """For each policy the rewards at `rows` steps, spread over the run, and their times."""
    lines = [f"{'policy':20}{'step':>6}{'seconds':>10}{'samples':>10}{'reward':>9}"]
    for name, points in curves.items():
        picked = sorted({round(n * (len(points) - 1) / (rows - 1)) for n in range(rows)})
        for step in picked:
            point = points[step]
            bar = "#" * round(30 * point.reward)
            lines.append(
                f"{name:20}{step + 1:6}{point.seconds:10.1f}{point.samples:10}"
                f"{point.reward:9.3f}  {bar}"
            )
    return "\n".join(lines)


def svg(curves: Curves, title: str) -> str:
    """Two panels, over wall time and over samples; rewards lie between 0 and 1."""
    by_time = {name: [(p.seconds, p.reward) for p in points] for name, points in curves.items()}
    by_samples = {
        name: [(float(p.samples), p.reward) for p in points] for name, points in curves.items()
    }
    full = WIDTH + MARGIN
    legend = [
        f'<text x="{MARGIN + 150 * n}" y="{HEIGHT + 2 * MARGIN + 12}" fill="{COLOURS[n]}">'
        f"{escape(name)}</text>"
        for n, name in enumerate(curves)
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * full + MARGIN}" '
        f'height="{HEIGHT + 2 * MARGIN + 24}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="14">{escape(title)}</text>',
        *_panel(by_time, "seconds", left=MARGIN),
        *_panel(by_samples, "samples", left=MARGIN + full),
        *legend,
        "</svg>",
    ]
    return "\n".join(parts)


def _panel(lines: dict[str, list[tuple[float, float]]], unit: str, left: float) -> list[str]:
    most = max((x for points in lines.values() for x, _ in points), default=1.0)
    bottom = MARGIN + HEIGHT
    frame = (
        f'<rect x="{left}" y="{MARGIN}" width="{WIDTH}" height="{HEIGHT}" fill="none" '
        'stroke="#999"/>'
    )
    marks = [
        f'<text x="{left - 6}" y="{bottom - HEIGHT * y + 4:.1f}" text-anchor="end">{y:g}</text>'
        for y in (0, 0.5, 1)
    ]
    below = (
        f'<text x="{left + WIDTH}" y="{bottom + 18}" text-anchor="end">{most:,.0f} {unit}</text>'
    )
    drawn = [
        f'<polyline fill="none" stroke="{COLOURS[n]}" stroke-width="2" points="'
        + " ".join(_placed(points, most, left, bottom))
        + '"/>'
        for n, points in enumerate(lines.values())
    ]
    return [frame, *marks, below, *drawn]


def _placed(
    points: Sequence[tuple[float, float]], most: float, left: float, bottom: float
) -> list[str]:
    return [f"{left + WIDTH * x / most:.1f},{bottom - HEIGHT * y:.1f}" for x, y in points]
