from __future__ import annotations

import re

import matplotlib
import pytest

from loka_toolkit.reporting import figures
from loka_toolkit.reporting.calibration_view import Calibration
from loka_toolkit.reporting.histogram_view import Fates, Histogram, Window
from loka_toolkit.reporting.overview_view import FlopBars
from loka_toolkit.reporting.palette import LIGHT
from loka_toolkit.reporting.series_view import Series, Unit

WINDOW = Window("e4m3", -11.0, -10.0, -7.0, 8.0, True)
HISTOGRAM = Histogram(
    operand="x",
    title="input x",
    edges_from=-14.0,
    shares=tuple([0.01] * 10 + [0.0125] * 40 + [0.1] * 4),
    windows=(WINDOW, Window("e5m2", -24.0, -23.0, -21.0, 8.0, False)),
    fates=Fates(0.06, 0.1, 0.1),
    clips=True,
    top_spread=None,
    caption="caption",
    alt='<script>"alt" & more</script>',
)
SERIES = Series(
    title="SQNR of the product",
    unit=Unit.DECIBEL,
    steps=(10, 20, 30),
    values=(19.0, 27.25, 28.125),
    band=(25.0, 27.0, 29.0),
    limit=20.0,
    caption="caption",
    alt="alt",
)
BARS = FlopBars(("all", "fwd"), ((0.6, 0.3, 0.1), (0.2, 0.1, 0.0)), "alt")
CALIBRATION = Calibration((0.05,) * 20, 0.5, 0.9, 100, "caption", "alt")
DRAWN = {
    "histogram": lambda: figures.histogram(HISTOGRAM, "one"),
    "series": lambda: figures.series(SERIES, "one"),
    "calibration": lambda: figures.calibration(CALIBRATION, "one"),
    "bars": lambda: figures.flop_bars(BARS, "one"),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_same_data_give_the_same_bytes(draw):
    assert draw() == draw()


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_callers_settings_neither_change_nor_matter(draw):
    expected = draw()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "lines.marker": "s"}):
        before = dict(matplotlib.rcParams)
        backend = matplotlib.rcParams._get("backend")
        assert draw() == expected
        assert dict(matplotlib.rcParams) == before
        assert matplotlib.rcParams._get("backend") == backend


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_svg_stands_in_a_page_without_a_request_or_a_clash(draw):
    svg = draw()
    assert "http" not in svg
    assert "<style" not in svg
    assert "<?xml" not in svg
    identifiers = re.findall(r' id="([^"]+)"', svg)
    assert len(identifiers) == len(set(identifiers))
    assert all(name.startswith("one-") for name in identifiers)
    referenced = re.findall(r'(?:href="|url\()#([^")]+)', svg)
    assert set(referenced) == set(identifiers)


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
def test_colours_are_variables_of_the_palette(draw):
    svg = draw()
    used = set(re.findall(r"var\(--([a-z-]+)\)", svg))
    assert used <= set(LIGHT)
    assert used
    assert not re.findall(r"#[0-9a-f]{6}\b", svg)


def test_alternative_text_is_escaped_into_the_label():
    svg = DRAWN["histogram"]()
    assert "<script>" not in svg
    assert "&lt;script&gt;&quot;alt&quot; &amp; more" in svg
    assert 'role="img"' in svg


def test_elements_outside_the_window_are_marked():
    assert "var(--unsafe-mark)" in DRAWN["histogram"]()
    inside = Histogram(**(vars(HISTOGRAM) | {"edges_from": -6.0, "shares": (0.5, 0.5)}))
    assert "var(--unsafe-mark)" not in figures.histogram(inside, "one")
    above = Histogram(**(vars(HISTOGRAM) | {"edges_from": 9.0, "shares": (0.5, 0.5)}))
    assert "var(--unsafe-mark)" in figures.histogram(above, "one")
    follows = Histogram(**(vars(above) | {"clips": False}))
    assert "var(--unsafe-mark)" not in figures.histogram(follows, "one")


def test_text_keeps_its_decimals():
    narrow = Series(
        **(vars(SERIES) | {"values": (20.02, 20.03, 20.04), "band": (20.01, 20.02, 20.03)})
    )
    labels = re.findall(r"<text[^>]*>([^<]+)</text>", figures.series(narrow, "one"))
    assert {"step", "dB"} <= set(labels)
    wide = Series(**(vars(SERIES) | {"values": (27.0, 28.0, 29.0), "band": (26.0, 27.0, 28.0)}))
    numbers = re.findall(r"<text[^>]*>([\d.]+)</text>", figures.series(wide, "one"))
    assert {"22.5", "27.5"} & set(numbers)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": (5,), "values": (20.0,), "band": (20.0, 20.0, 20.0)},
        {"unit": Unit.SHARE, "values": (0.0, 0.3, 1.0), "band": (0.0, 0.1, 1.0), "limit": 0.25},
        {"unit": Unit.SHARE, "values": (0.0, 0.0, 0.0), "band": (0.0, 0.0, 0.0), "limit": 0.0},
        {"unit": Unit.LOSS, "values": (0.0, 0.0, 0.0), "band": (0.0, 0.0, 0.0), "limit": 0.0},
        {"unit": Unit.LOSS, "values": (-1e-9, 3e-7, 0.0), "band": (0.0, 1e-9, 2e-9), "limit": 1e-9},
        {"values": (-40.0, 200.0, 0.0), "band": (-1e3, 0.0, 1e3)},
    ],
)
def test_awkward_series_are_drawn(changes):
    assert figures.series(Series(**(vars(SERIES) | changes)), "one").endswith("</svg>")


@pytest.mark.parametrize(
    "changes",
    [
        {"shares": (1.0,), "windows": ()},
        {"shares": (1.0,), "edges_from": -80.0},
        {"shares": (1.0,) + (0.0,) * 254 + (1e-9,), "edges_from": -80.0},
        {"top_spread": (7.0, 9.0), "fates": None},
    ],
)
def test_awkward_histograms_are_drawn(changes):
    assert figures.histogram(Histogram(**(vars(HISTOGRAM) | changes)), "one").endswith("</svg>")


def test_only_criteria_mark_single_steps():
    for unit, broken in ((Unit.DECIBEL, False), (Unit.SHARE, True), (Unit.LOSS, False)):
        one = Series(**(vars(SERIES) | {"unit": unit, "values": (0.9,) * 3, "limit": 0.5}))
        marks = figures.series(one, "one").count("fill: var(--unsafe-mark)")
        assert (marks > 0) is broken


def test_impact_is_drawn_in_per_cent():
    one = Series(
        **(
            vars(SERIES)
            | {"unit": Unit.LOSS, "values": (0.0, 1e-4, 2e-4), "band": (0.0, 1e-4, 2e-4)}
            | {"limit": 2e-4}
        )
    )
    labels = re.findall(r"<text[^>]*>([^<]+)</text>", figures.series(one, "one"))
    assert {"0", "0.01", "0.02", "% of the loss"} <= set(labels)
