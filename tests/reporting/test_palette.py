from __future__ import annotations

import itertools

import numpy as np
import pytest

from loka_toolkit.reporting import palette

# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision
# deficiency" (2009), severity 1.0, on linear RGB.
DEFICIENCIES = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(colour: str) -> np.ndarray:
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(
    ("one", "other", "ratio"),
    [("#000000", "#ffffff", 21.0), ("#777777", "#ffffff", 4.48), ("#767676", "#ffffff", 4.54)],
)
def test_contrast_ratio_agrees_with_published_values(one, other, ratio):
    assert palette.contrast_ratio(one, other) == pytest.approx(ratio, abs=0.005)
    assert palette.contrast_ratio(other, one) == palette.contrast_ratio(one, other)


@pytest.mark.parametrize("theme", palette.THEMES)
@pytest.mark.parametrize("pair", palette.TEXT_PAIRS, ids="/".join)
def test_text_reaches_wcag_aa(theme, pair):
    colours = palette.THEMES[theme]
    assert palette.contrast_ratio(colours[pair[0]], colours[pair[1]]) >= 4.5


@pytest.mark.parametrize("theme", palette.THEMES)
@pytest.mark.parametrize("pair", palette.GRAPHIC_PAIRS, ids="/".join)
def test_marks_reach_wcag_aa_for_graphics(theme, pair):
    colours = palette.THEMES[theme]
    assert palette.contrast_ratio(colours[pair[0]], colours[pair[1]]) >= 3.0


@pytest.mark.parametrize("theme", palette.THEMES)
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_verdicts_stay_apart_for_every_kind_of_colour_vision(theme, deficiency):
    matrix = np.array(DEFICIENCIES[deficiency])
    seen = {
        name: lab(matrix @ linear(palette.THEMES[theme][name])) for name in palette.VERDICT_MARKS
    }
    for one, other in itertools.combinations(seen, 2):
        # 2.3 is a just noticeable difference in CIE 1976 Lab; ten of them is told at a glance.
        assert np.linalg.norm(seen[one] - seen[other]) > 23, (one, other)


def test_themes_define_the_same_colours():
    assert palette.LIGHT.keys() == palette.DARK.keys()
    assert palette.css_variables("dark").count("--") == len(palette.DARK)
