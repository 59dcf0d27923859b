"""The figures: view data in, SVG out, the same bytes for the same data.

Figures are drawn with Matplotlib's own objects and its SVG writer, so that no window, no backend
and no setting of the caller is touched. Colours are CSS variables, so that one figure serves both
themes; text stays text, so that it can be read, searched and scaled. Labels are fixed words and
numbers: nothing that an artifact says becomes part of a figure.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from loka_toolkit.errors import MissingDependencyError
from loka_toolkit.reporting import formatting as fmt
from loka_toolkit.reporting.calibration_view import Calibration
from loka_toolkit.reporting.histogram_view import Histogram, Window
from loka_toolkit.reporting.overview_view import FlopBars
from loka_toolkit.reporting.palette import LIGHT
from loka_toolkit.reporting.series_view import LEAST_SHARE, Series, Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STANDINS = {name: f"#{0xA0B000 + index:06x}" for index, name in enumerate(LIGHT)}
"""A colour that stands in for each CSS variable while Matplotlib draws."""
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "loka",
    "font.family": "sans-serif",
    "font.size": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.edgecolor": _STANDINS["control"],
    "axes.labelcolor": _STANDINS["muted"],
    "xtick.color": _STANDINS["control"],
    "ytick.color": _STANDINS["control"],
    "xtick.labelcolor": _STANDINS["muted"],
    "ytick.labelcolor": _STANDINS["muted"],
    "text.color": _STANDINS["ink"],
    "text.parse_math": False,
}
_PANEL = (4.0, 2.1)
_LEFT, _BOTTOM, _MARGIN = 0.52, 0.42, 0.12
"""Room in inches for the labels on the left and below, and for nothing on the other sides."""
_POINTS_TO_PIXELS = 4.0 / 3.0


def flop_bars(bars: FlopBars, identifier: str) -> str:
    """Return the SVG of the FLOP shares per verdict."""

    def draw(axes: Axes) -> None:
        verdicts = (("safe", "✓"), ("insufficient", "?"), ("unsafe", "✗"))
        for row, triple in enumerate(bars.shares):
            left = 0.0
            for (name, symbol), value in zip(verdicts, triple, strict=True):
                axes.barh(
                    row,
                    100 * value,
                    left=left,
                    height=0.68,
                    color=_STANDINS[f"{name}-wash"],
                    edgecolor=_STANDINS[f"{name}-mark"],
                    linewidth=0.8 if value else 0.0,
                )
                if value >= 0.09:
                    label = f"{symbol} {fmt.share(value).text}"
                    axes.text(
                        left + 50 * value,
                        row,
                        label,
                        ha="center",
                        va="center",
                        color=_STANDINS[name],
                        fontsize=8,
                    )
                left += 100 * value
        axes.set_yticks(range(len(bars.labels)), bars.labels)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of GEMM FLOPs, %")
        axes.spines["left"].set_visible(False)

    return _svg(draw, (5.6, 0.62 + 0.36 * len(bars.labels)), identifier, bars.alt)


def histogram(data: Histogram, identifier: str) -> str:
    """Return the SVG of an operand's distribution with the windows of the formats."""

    def draw(axes: Axes) -> None:
        edges = [data.edges_from + 0.5 * i for i in range(len(data.shares) + 1)]
        peak = 100 * max(data.shares)
        chosen = data.windows[0] if data.windows else None
        for name, first, last in _runs(data, chosen):
            axes.stairs(
                [100 * value for value in data.shares[first:last]],
                edges[first : last + 1],
                fill=True,
                color=_STANDINS[name],
                linewidth=0,
            )
        low, high = edges[0], edges[-1]
        if chosen is not None:
            low, high = min(low, chosen.subnormal), max(high, chosen.top)
        if data.top_spread is not None:
            high = max(high, data.top_spread[1])
        axes.set_xlim(low - 1, high + 1)
        axes.set_ylim(0, peak * (1.0 + 0.19 * len(data.windows)))
        for row, window in enumerate(data.windows):
            _strip(axes, window, peak * (1.11 + 0.18 * row), peak, (low - 1, high + 1))
        for position in data.top_spread or ():
            axes.axvline(
                position,
                ymax=1.0 / (1.0 + 0.19 * len(data.windows)),
                color=_STANDINS["ink"],
                linewidth=0.8,
                linestyle=":",
            )
        _powers_of_two(axes, low, high)
        axes.set_xlabel("magnitude of non-zero elements")
        axes.set_ylabel("% per half octave")
        axes.yaxis.set_major_locator(_few_ticks(4, top=peak))

    return _svg(draw, _PANEL, identifier, data.alt)


def series(data: Series, identifier: str) -> str:
    """Return the SVG of a quantity over steps with its band and limit."""

    def draw(axes: Axes) -> None:
        unit = 100.0 if data.unit is Unit.LOSS else 1.0
        least = LEAST_SHARE if data.unit is Unit.SHARE else -math.inf
        low, middle, high, limit, *values = (
            max(unit * value, least) for value in (*data.band, data.limit, *data.values)
        )
        axes.axhspan(low, high, color=_STANDINS["safe-wash"], linewidth=0)
        axes.axhline(middle, color=_STANDINS["safe-mark"], linewidth=0.9)
        axes.axhline(limit, color=_STANDINS["unsafe-mark"], linewidth=1.3, linestyle=(0, (5, 2)))
        breaks = [_breaks(value, limit, data.unit) for value in values]
        for broken, name, marker in ((False, "ink", "o"), (True, "unsafe-mark", "X")):
            chosen = [i for i, is_broken in enumerate(breaks) if is_broken is broken]
            axes.plot(
                [data.steps[i] for i in chosen],
                [values[i] for i in chosen],
                linestyle="none",
                marker=marker,
                markersize=2.6 if not broken else 4.2,
                markeredgewidth=0,
                color=_STANDINS[name],
            )
        if data.unit is Unit.SHARE:
            _share_axis(axes)
        else:
            _linear_axis(axes, [*values, low, high, limit])
        axes.set_ylabel({Unit.LOSS: "% of the loss", Unit.DECIBEL: "dB"}.get(data.unit, ""))
        if min(data.steps) == max(data.steps):
            axes.set_xlim(data.steps[0] - 1, data.steps[0] + 1)
        axes.xaxis.set_major_locator(_few_ticks(6, whole=True))
        axes.set_xlabel("step")

    return _svg(draw, _PANEL, identifier, data.alt)


def calibration(data: Calibration, identifier: str) -> str:
    """Return the SVG of the steps' predicted probabilities."""

    def draw(axes: Axes) -> None:
        number = len(data.shares)
        edges = [index / number for index in range(number + 1)]
        axes.stairs(
            [100 * value for value in data.shares],
            edges,
            fill=True,
            color=_STANDINS["safe-mark"],
            linewidth=0,
        )
        axes.axhline(100 / number, color=_STANDINS["ink"], linewidth=0.9, linestyle="--")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.08 * max(100 * max(data.shares), 200 / number))
        axes.yaxis.set_major_locator(_few_ticks(4))
        axes.set_xlabel("predicted probability of a lower SQNR")
        axes.set_ylabel("% of steps")

    return _svg(draw, _PANEL, identifier, data.alt)


def _breaks(value: float, limit: float, unit: Unit) -> bool:
    """Whether a single step breaks the limit; a step's impact breaks nothing, only the mean's."""
    return (unit is Unit.SHARE and value > limit) or (unit is Unit.DECIBEL and value < limit)


def _share_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_ylim(LEAST_SHARE / 2, 1.5)
    axes.set_yticks([1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1], ["", "0.01 %", "", "1 %", "", "100 %"])
    axes.minorticks_off()


def _linear_axis(axes: Axes, shown: list[float]) -> None:
    span = max(shown) - min(shown)
    margin = 0.12 * span if span > 0 else 0.1 * abs(shown[0]) or 1.0
    axes.set_ylim(min(shown) - margin, max(shown) + margin)
    locator = _few_ticks(5)
    axes.yaxis.set_major_locator(locator)
    ticks = locator.tick_values(*axes.get_ylim())
    axes.set_yticks(ticks, [fmt.tick(value) for value in ticks])
    axes.set_ylim(min(shown) - margin, max(shown) + margin)


def _runs(data: Histogram, window: Window | None) -> list[tuple[str, int, int]]:
    """Return runs of bins of one colour: colour, first bin, bin after the last."""

    def colour(index: int) -> str:
        center = data.edges_from + 0.5 * index + 0.25
        if window is None or data.top_spread is not None:
            return "safe-mark"
        if center < window.flushed or (center > window.top and data.clips):
            return "unsafe-mark"
        return "insufficient-mark" if center < window.normal else "safe-mark"

    runs: list[tuple[str, int, int]] = []
    for index in range(len(data.shares)):
        name = colour(index)
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1], index + 1)
        else:
            runs.append((name, index, index + 1))
    return runs


def _strip(axes: Axes, window: Window, y: float, peak: float, limits: tuple[float, float]) -> None:
    height = 0.13 * peak
    kind = "safe" if window.chosen else "insufficient"
    for left, right, alpha in (
        (window.subnormal, window.normal, 0.45),
        (window.normal, window.top, 1.0),
    ):
        axes.barh(
            y,
            right - left,
            left=left,
            height=height,
            color=_STANDINS[f"{kind}-wash"],
            edgecolor=_STANDINS[f"{kind}-mark"],
            linewidth=0.7,
            alpha=alpha,
        )
    left, right = max(window.normal, limits[0]), min(window.top, limits[1])
    name = f"{window.format.upper()} range"
    axes.text(
        (left + right) / 2, y, name, ha="center", va="center", fontsize=7, color=_STANDINS[kind]
    )
    if window.chosen:
        for position in (window.subnormal, window.top):
            axes.axvline(
                position,
                ymax=(y + height / 2) / axes.get_ylim()[1],
                color=_STANDINS["safe-mark"],
                linewidth=0.8,
                linestyle="--",
            )


def _powers_of_two(axes: Axes, low: float, high: float) -> None:
    spacing = next(s for s in (1, 2, 4, 5, 8, 10, 16, 20, 32, 64) if (high - low) / s <= 8)
    first = int(-(-low // spacing)) * spacing
    ticks = list(range(first, int(high) + 1, spacing))
    axes.set_xticks(ticks, [fmt.power_of_two(tick) for tick in ticks])


def _few_ticks(number: int, *, whole: bool = False, top: float | None = None) -> Any:
    from matplotlib.ticker import FixedLocator, MaxNLocator

    locator = MaxNLocator(nbins=number, integer=whole)
    if top is None:
        return locator
    return FixedLocator([tick for tick in locator.tick_values(0, top) if 0 <= tick <= top])


def _svg(draw: Callable[[Axes], None], size: tuple[float, float], identifier: str, alt: str) -> str:
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("matplotlib", "analyze", "drawing the report") from None
    buffer = io.StringIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        figure = Figure(figsize=size, facecolor="none")
        FigureCanvasSVG(figure)
        width, height = size
        left, bottom, margin = _LEFT, _BOTTOM, _MARGIN
        axes = figure.add_axes(
            (
                left / width,
                bottom / height,
                (width - left - margin) / width,
                (height - bottom - margin) / height,
            )
        )
        axes.patch.set_visible(False)
        draw(axes)
        _write(figure, buffer)
    return _inlined(buffer.getvalue(), identifier, alt)


def _write(figure: Figure, buffer: io.StringIO) -> None:
    figure.savefig(
        buffer,
        format="svg",
        transparent=True,
        metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
    )


def _inlined(svg: str, identifier: str, alt: str) -> str:
    """Return an SVG document as an element that can stand in a page beside others."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->|<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"<defs>\s*</defs>", "", body)
    body = body.replace("xlink:href", "href")
    referenced = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    body = re.sub(
        r' id="([^"]+)"',
        lambda m: f' id="{identifier}-{m[1]}"' if m[1] in referenced else "",
        body,
    )
    body = re.sub(r'(href="#|url\(#)', lambda m: f"{m[1]}{identifier}-", body)
    body = re.sub(r"font: ([\d.]+)px [^;\"]*", lambda m: f"font-size: {m[1]}px", body)
    body = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda m: _rounded(m[0]), body)
    for name, color in _STANDINS.items():
        body = body.replace(color, f"var(--{name})")
    width, height = (
        round(float(value) * _POINTS_TO_PIXELS)
        for value in re.findall(r"[\d.]+", re.findall(r'viewBox="0 0 ([^"]*)"', body)[0])
    )
    view_box = re.findall(r'viewBox="[^"]*"', body)[0]
    root = (
        f'<svg {view_box} width="{width}" height="{height}" role="img" '
        f'aria-label="{html.escape(alt)}">'
    )
    body = re.sub(r"^<svg[^>]*>", lambda _: root, body)
    return re.sub(r"\s*\n\s*", "\n", body).strip()


def _rounded(attribute: str) -> str:
    """Return an attribute of coordinates, rounded to a tenth of a point."""
    return re.sub(r"\d+\.\d{2,}", lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), attribute)
