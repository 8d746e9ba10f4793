"""The pictures of a report as inline SVG, which need no script and no font: line charts and stacked bars.

Elements have classes for their colours. The page's style gives these classes a colour for its light and one
for its dark mode. Each picture has a title and a description for readers that do not see it; the page shows
the numbers in a table below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.reports.markup import Markup, element, joined, text

NUM_COLOURS = 8
_WIDTH, _HEIGHT = 720.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 26.0, 44.0
_BAR, _BAR_GAP, _NAME_WIDTH = 18.0, 10.0, 190.0
_TICKS = 4
_DASHES = (None, "7 4", "2 3", "9 3 2 3")
_MOST_LABELS = 12  # of an axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a chart.

    Attributes:
        points: x and y, by rising x.
        colour: number of the line's colour; after `NUM_COLOURS` colours they come again, with dashes.
        is_dashed: whether the line shows a prediction, which is drawn with dots.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of a chart: the names and lengths of its parts."""

    name: str
    parts: Sequence[tuple[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """The positions of numbers in a line chart. The x axis is logarithmic where its numbers allow that."""

    xs: Sequence[float]
    y_ticks: Sequence[float]

    def x(self, value: float) -> float:
        places = [self._place(each) for each in self.xs]
        low, high = min(places), max(places)
        share = 0.5 if high == low else (self._place(value) - low) / (high - low)
        return _LEFT + 14.0 + share * (_WIDTH - _LEFT - _RIGHT - 28.0)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self.y_ticks[-1] * (_HEIGHT - _TOP - _BOTTOM)

    def _place(self, value: float) -> float:
        return math.log2(value) if min(self.xs) > 0 else value


def line_chart(title: str, x_name: str, y_name: str, lines: Sequence[Line], key: str) -> Markup:
    """Return a picture of lines over an x axis, with a legend.

    Args:
        key: beginning of the ids of its elements; each picture of the page has another one.
    """
    points = [point for line in lines for point in line.points]
    frame = _Frame(
        xs=sorted({x for x, _ in points}) or [1.0], y_ticks=ticks(max((y for _, y in points), default=0.0))
    )
    drawn = [
        *(_grid_line(frame, tick) for tick in frame.y_ticks),
        *(_x_label(frame, x) for x in _few(frame.xs)),
        element("text", text(y_name), x=8, y=14, class_="axis"),
        element("text", text(x_name), x=_WIDTH - _RIGHT, y=_HEIGHT - 6, text_anchor="end", class_="axis"),
        *(_drawn_line(frame, line) for line in lines),
    ]
    svg = _picture(title, f"{y_name} over {x_name}: {_described(lines)}", _HEIGHT, drawn, key)
    return _figure(title, svg, [(line.name, _line_sample(line)) for line in lines])


def bar_chart(title: str, unit: str, bars: Sequence[Bar], key: str, *, whole: float | None = None) -> Markup:
    """Return a picture of horizontal bars of stacked parts, with a legend.

    Args:
        unit: unit of the lengths.
        key: beginning of the ids of its elements; each picture of the page has another one.
        whole: length at which the axis ends; None: a round number not below the longest bar.
    """
    names = list(dict.fromkeys(name for bar in bars for name, _ in bar.parts))
    colours = {name: number for number, name in enumerate(names)}
    longest = max((sum(length for _, length in bar.parts) for bar in bars), default=0.0)
    axis = [0.0, whole / 2, whole] if whole else ticks(longest)
    bottom = _TOP + len(bars) * (_BAR + _BAR_GAP)

    def x(value: float) -> float:
        return _NAME_WIDTH + value / axis[-1] * (_WIDTH - _NAME_WIDTH - 40.0)

    drawn = [element("text", text(unit), x=8, y=14, class_="axis")]
    for tick in axis:
        drawn.append(element("line", x1=x(tick), x2=x(tick), y1=_TOP - 6, y2=bottom, class_="grid"))
        drawn.append(element("text", text(_short(tick)), x=x(tick), y=14, text_anchor="middle"))
    for number, bar in enumerate(bars):
        top, start = _TOP + number * (_BAR + _BAR_GAP), 0.0
        drawn.append(
            element("text", text(bar.name), x=_NAME_WIDTH - 8, y=top + 0.75 * _BAR, text_anchor="end")
        )
        for name, length in bar.parts:
            hint = element("title", text(f"{bar.name}, {name}: {_short(length)} {unit}"))
            width = x(start + length) - x(start)
            drawn.append(
                element(
                    "rect", hint, x=x(start), y=top, width=width, height=_BAR, class_=_fill(colours[name])
                )
            )
            start += length
    described = "; ".join(
        f"{bar.name}: {', '.join(f'{name} {_short(length)}' for name, length in bar.parts if length)}"
        for bar in bars
    )
    svg = _picture(title, f"{unit}: {described}", bottom + 6, drawn, key)
    return _figure(title, svg, [(name, _bar_sample(colours[name])) for name in names])


def ticks(most: float) -> list[float]:
    """Return round numbers in equal steps, from 0 to one that is not below `most`.

    If `most` is not finite or not above 0, it counts as 1.
    """
    most = most if most > 0 and math.isfinite(most) else 1.0
    rough = most / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * (1 - 1e-9))
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def _few(values: Sequence[float]) -> Sequence[float]:
    """Return as many values as have room as labels of an axis, the last value among them."""
    every = -(-len(values) // _MOST_LABELS)
    return values[::-1][::every]


def _grid_line(frame: _Frame, tick: float) -> Markup:
    y = frame.y(tick)
    line = element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid")
    return joined([line, element("text", text(_short(tick)), x=_LEFT - 8, y=y + 4, text_anchor="end")])


def _x_label(frame: _Frame, value: float) -> Markup:
    return element("text", text(_short(value)), x=frame.x(value), y=_HEIGHT - 24, text_anchor="middle")


def _drawn_line(frame: _Frame, line: Line) -> Markup:
    places = [(frame.x(x), frame.y(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [element("polyline", points=path, stroke_dasharray=_dash(line))]
    for (x, y), (at_x, at_y) in zip(line.points, places, strict=True):
        hint = element("title", text(f"{line.name}: {_short(y)} at {_short(x)}"))
        parts.append(element("circle", hint, cx=at_x, cy=at_y, r=3.5))
    return element("g", *parts, class_=_stroke(line.colour) + (" predicted" if line.is_dashed else ""))


def _dash(line: Line) -> str | None:
    """Return the dashes of a line. Lines of the same colour differ by them; predictions are dotted."""
    return "3 5" if line.is_dashed else _DASHES[line.colour // NUM_COLOURS % len(_DASHES)]


def _stroke(colour: int) -> str:
    return f"line c{colour % NUM_COLOURS}"


def _fill(colour: int) -> str:
    return f"bar c{colour % NUM_COLOURS}"


def _line_sample(line: Line) -> Markup:
    stroke = element("line", x1=1, x2=27, y1=6, y2=6, stroke_dasharray=_dash(line))
    classes = _stroke(line.colour) + (" predicted" if line.is_dashed else "")
    return element("svg", stroke, viewBox="0 0 28 12", class_=f"sample {classes}", aria_hidden="true")


def _bar_sample(colour: int) -> Markup:
    box = element("rect", x=4, y=1, width=20, height=10, class_=_fill(colour))
    return element("svg", box, viewBox="0 0 28 12", class_="sample", aria_hidden="true")


def _picture(title: str, description: str, height: float, drawn: Sequence[Markup], key: str) -> Markup:
    return element(
        "svg",
        element("title", text(title), id=f"{key}-title"),
        element("desc", text(description), id=f"{key}-text"),
        *drawn,
        viewBox=f"0 0 {_WIDTH:.0f} {height:.0f}",
        role="img",
        aria_labelledby=f"{key}-title {key}-text",
        class_="chart",
    )


def _figure(title: str, svg: Markup, legend: Sequence[tuple[str, Markup]]) -> Markup:
    entries = [element("li", sample, text(name)) for name, sample in legend]
    return element(
        "figure",
        element("figcaption", text(title)),
        svg,
        element("ul", *entries, class_="legend") if len(entries) > 1 else Markup(""),
    )


def _described(lines: Sequence[Line]) -> str:
    return "; ".join(
        f"{line.name}: {', '.join(f'{_short(y)} at {_short(x)}' for x, y in line.points)}" for line in lines
    )


def _short(value: float) -> str:
    """Return a number as text, rounded to three digits or to an integer, without trailing zeros."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    shown = f"{value:,.{min(digits, 6)}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown
