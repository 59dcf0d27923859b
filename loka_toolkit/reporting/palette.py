"""The colours of a report, as data: one palette per theme, and the pairs that must contrast.

Verdicts are blue, vermilion and grey, hues that stay apart under protanopia, deuteranopia and
tritanopia (after M. Okabe and K. Ito, Color Universal Design, 2008), darkened or lightened until
text on them reaches WCAG 2.2 level AA. A verdict is always written out beside its colour.
"""

from __future__ import annotations

LIGHT: dict[str, str] = {
    "page": "#f6f7f9",
    "surface": "#ffffff",
    "raised": "#eef1f4",
    "line": "#d5dae1",
    "ink": "#171b21",
    "muted": "#545d69",
    "link": "#0b5cad",
    "focus": "#0b5cad",
    "control": "#767f8b",
    "safe": "#00578a",
    "safe-wash": "#dcedf8",
    "safe-mark": "#0072b2",
    "unsafe": "#963800",
    "unsafe-wash": "#fce5d8",
    "unsafe-mark": "#d55e00",
    "insufficient": "#4b535e",
    "insufficient-wash": "#e7eaee",
    "insufficient-mark": "#8a929d",
    "danger": "#8c1d2f",
    "danger-wash": "#fbe4e6",
    "warning": "#6b4a00",
    "warning-wash": "#fcf0cf",
    "note": "#00578a",
    "note-wash": "#dcedf8",
}

DARK: dict[str, str] = {
    "page": "#12151a",
    "surface": "#1a1e25",
    "raised": "#242a33",
    "line": "#353d48",
    "ink": "#e9ecf0",
    "muted": "#a8b1bd",
    "link": "#83bff5",
    "focus": "#83bff5",
    "control": "#7d8794",
    "safe": "#8dccf5",
    "safe-wash": "#12354c",
    "safe-mark": "#4aa8e0",
    "unsafe": "#ffb088",
    "unsafe-wash": "#4a2410",
    "unsafe-mark": "#f07a2b",
    "insufficient": "#c9d0d9",
    "insufficient-wash": "#323943",
    "insufficient-mark": "#7f8895",
    "danger": "#ffb3bc",
    "danger-wash": "#4b1822",
    "warning": "#f3cd72",
    "warning-wash": "#423208",
    "note": "#8dccf5",
    "note-wash": "#12354c",
}

THEMES: dict[str, dict[str, str]] = {"light": LIGHT, "dark": DARK}

TEXT_PAIRS: tuple[tuple[str, str], ...] = (
    ("ink", "page"),
    ("ink", "surface"),
    ("ink", "raised"),
    ("muted", "page"),
    ("muted", "surface"),
    ("muted", "raised"),
    ("link", "page"),
    ("link", "surface"),
    ("link", "raised"),
    ("safe", "surface"),
    ("safe", "safe-wash"),
    ("ink", "safe-wash"),
    ("unsafe", "surface"),
    ("unsafe", "unsafe-wash"),
    ("ink", "unsafe-wash"),
    ("insufficient", "surface"),
    ("insufficient", "insufficient-wash"),
    ("ink", "insufficient-wash"),
    ("danger", "danger-wash"),
    ("warning", "warning-wash"),
    ("note", "note-wash"),
)
"""Text colour and what it stands on: at least 4.5 to 1 (WCAG 2.2, criterion 1.4.3)."""

GRAPHIC_PAIRS: tuple[tuple[str, str], ...] = (
    ("safe-mark", "surface"),
    ("unsafe-mark", "surface"),
    ("insufficient-mark", "surface"),
    ("control", "surface"),
    ("focus", "page"),
    ("focus", "surface"),
    ("focus", "raised"),
)
"""Marks in figures and borders of controls: at least 3 to 1 (WCAG 2.2, criterion 1.4.11)."""
VERDICT_MARKS: tuple[str, ...] = ("safe-mark", "unsafe-mark", "insufficient-mark")


def relative_luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``, in [0, 1] (WCAG 2.2, definitions)."""

    def linear(channel: int) -> float:
        share = channel / 255.0
        return share / 12.92 if share <= 0.04045 else float(((share + 0.055) / 1.055) ** 2.4)

    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)


def contrast_ratio(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21 (WCAG 2.2, definitions)."""
    brighter, darker = sorted((relative_luminance(one), relative_luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def css_variables(theme: str) -> str:
    """Return the custom properties of a theme, as CSS declarations."""
    return "".join(f"--{name}:{value};" for name, value in THEMES[theme].items())
