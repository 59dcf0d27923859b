"""Where an operand's magnitudes lie, and the window of magnitudes that FP8 can hold."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loka_toolkit.artifacts.map_facts import OperandScale
from loka_toolkit.artifacts.safety_map import Cell
from loka_toolkit.artifacts.sites import GEMM_OPERANDS, Operand, Role
from loka_toolkit.artifacts.trace import AMAX_QUANTILES, HISTOGRAM_LOG2_MIN, check_histogram
from loka_toolkit.numerics.formats import E4M3, E5M2, FloatFormat
from loka_toolkit.numerics.recipes import Recipe, Scaling
from loka_toolkit.reporting import formatting as fmt

_BINS_PER_OCTAVE = 2
_ROW_AMAX = frozenset(
    {
        (Role.FWD, "a", True),
        (Role.FWD, "b", True),
        (Role.FWD, "a", False),
        (Role.DGRAD, "a", True),
        (Role.GRAD_A, "a", False),
        (Role.GRAD_A, "b", False),
    }
)
"""Factors that are contracted along the operand's last logical dimension, so that rowwise scales
follow its row amax; the others are contracted across it and follow the column amax."""
_TAIL = 1e-6
_MEDIAN = AMAX_QUANTILES.index(0.5)
_LOW, _HIGH = AMAX_QUANTILES.index(0.05), AMAX_QUANTILES.index(0.95)


@dataclasses.dataclass(frozen=True)
class Window:
    """The magnitudes that a format holds at a scale, as log2.

    Attributes:
        format: Name of the format.
        flushed: Below this everything rounds to zero: half the smallest subnormal.
        subnormal: From here to ``normal`` precision fades.
        normal: The smallest normal value.
        top: The largest finite value.
        chosen: Whether it is the recipe's format for this operand.
    """

    format: str
    flushed: float
    subnormal: float
    normal: float
    top: float
    chosen: bool


@dataclasses.dataclass(frozen=True)
class Fates:
    """What becomes of the non-zero finite elements, read off the histogram: shares in [0, 1].

    Within a half octave elements are taken to be spread evenly, so each is off by at most the share
    of the bin that its limit falls into.

    Attributes:
        flushed: Below half the smallest subnormal: they become zero.
        subnormal: Below the smallest normal, but not flushed: they lose precision.
        clipped: Above the largest finite value; none where the scale follows each step's amax.
    """

    flushed: float
    subnormal: float
    clipped: float


@dataclasses.dataclass(frozen=True)
class Histogram:
    """The distribution of an operand's magnitudes over the sampled steps.

    Attributes:
        operand: ``x``, ``w``, ``g``, ``a`` or ``b``.
        title: The operand and what it is.
        edges_from: log2 of the lower edge of the first bin drawn; bins are half octaves.
        shares: Share of the non-zero finite elements per bin.
        windows: Windows of the formats, the recipe's first; empty where no scale is known.
        fates: What becomes of the elements in the recipe's window; None without a window and where
            each row has its own.
        clips: Whether elements above the window are clipped: only where the scale was fixed before.
        top_spread: 5 % and 95 % quantile of the window's top over rows, for rowwise scales.
        caption: What is to be seen, in sentences.
        alt: The figure in words.
    """

    operand: str
    title: str
    edges_from: float
    shares: tuple[float, ...]
    windows: tuple[Window, ...]
    fates: Fates | None
    clips: bool
    top_spread: tuple[float, float] | None
    caption: str
    alt: str


_NAMES = {
    Operand.X: "input x",
    Operand.W: "weight w",
    Operand.G: "output gradient g",
    Operand.A: "left factor a",
    Operand.B: "right factor b",
    Operand.INPUT: "input",
    Operand.OUTPUT: "output",
}


def factors(cell: Cell) -> tuple[Operand, Operand] | None:
    """Return the left and the right operand of a cell's product; None for an unknown role."""
    try:
        return GEMM_OPERANDS[(Role(cell.role), _is_parametric(cell))]
    except (KeyError, ValueError):
        return None


def histogram(
    cell: Cell,
    side: str,
    operand: Operand,
    recipe: Recipe | None,
    rows: Sequence[Mapping[str, Any]],
    decode_scales: Sequence[float],
    static: OperandScale | None,
    loss_scale: float = 1.0,
) -> Histogram | str:
    """Return an operand's distribution, or a sentence saying why there is none.

    Args:
        cell: The site under the recipe shown.
        side: ``a`` or ``b``: which factor of the product the operand is.
        operand: The operand.
        recipe: The recipe; None if its name is not that of an FP8 recipe.
        rows: Rows of the trace's table ``operands`` for it.
        decode_scales: Decode scales of the recipe at sampled steps, where one is for all elements.
        static: The static scale, if the map holds one.
        loss_scale: Factor by which recorded gradients exceed those that static scales speak of.
    """
    name = _NAMES[operand]
    if not rows:
        return f"No distribution of the {name}: the trace holds no statistics of it."
    counts = np.zeros(0)
    for row in rows:
        check_histogram(row["histogram_log2"])
        values = np.asarray(row["histogram_log2"], dtype=np.float64)
        counts = values if counts.size == 0 else counts + values
    total = float(counts.sum())
    steps = len({row["step"] for row in rows})
    if total == 0:
        return f"No distribution of the {name}: it had no non-zero finite element in {steps} steps."
    windows: tuple[Window, ...] = ()
    spread = None
    note = "The recipe is not an FP8 recipe of this version, so no window is drawn."
    if recipe is not None:
        unit = loss_scale if operand is Operand.G else 1.0
        form = recipe.formats[0 if side == "a" else 1]
        top, spread, note = _top(cell, side, form, recipe, rows, decode_scales, static, unit)
        windows = _windows(form, top) if top is not None else ()
    first, last = _drawn(counts, total)
    shares = counts / total
    cut = float(shares[:first].sum() + shares[last:].sum())
    clips = recipe is not None and _scaling(recipe, side) is Scaling.STATIC
    fates = _fates(shares, windows[0], clips) if windows and spread is None else None
    form_name = windows[0].format if windows else ""
    caption = _caption(name, rows, steps, form_name, fates, note, cut)
    return Histogram(
        operand=operand.value,
        title=name,
        edges_from=HISTOGRAM_LOG2_MIN + first / _BINS_PER_OCTAVE,
        shares=tuple(float(f"{value:.6g}") for value in shares[first:last]),
        windows=windows,
        fates=fates,
        clips=clips,
        top_spread=spread,
        caption=caption,
        alt=f"Histogram of log2 of the magnitude of the {name}. {caption}",
    )


def _is_parametric(cell: Cell) -> bool:
    if cell.role in (Role.DGRAD, Role.WGRAD):
        return True
    if cell.role in (Role.GRAD_A, Role.GRAD_B):
        return False
    return cell.weight is not None


def _windows(chosen: FloatFormat, top: float) -> tuple[Window, ...]:
    forms = [chosen, *(form for form in (E4M3, E5M2) if form is not chosen)]
    return tuple(
        Window(
            format=form.name,
            flushed=top - math.log2(form.max) + math.log2(form.smallest_subnormal) - 1.0,
            subnormal=top - math.log2(form.max) + math.log2(form.smallest_subnormal),
            normal=top - math.log2(form.max) + math.log2(form.smallest_normal),
            top=top,
            chosen=form is chosen,
        )
        for form in forms
    )


def _scaling(recipe: Recipe, side: str) -> Scaling:
    return recipe.scalings[0 if side == "a" else 1]


def _top(
    cell: Cell,
    side: str,
    form: FloatFormat,
    recipe: Recipe,
    rows: Sequence[Mapping[str, Any]],
    decode_scales: Sequence[float],
    static: OperandScale | None,
    unit: float,
) -> tuple[float | None, tuple[float, float] | None, str]:
    """Return log2 of the largest value held, its spread over rows, and where the scale is from."""
    scaling = _scaling(recipe, side)
    if scaling.block_length is not None:
        return None, None, "Every block has a window of its own, so none is drawn."
    if scaling is Scaling.UNSCALED:
        return math.log2(form.max), None, "Nothing is scaled: the window is that of the format."
    if scaling is Scaling.ROWWISE:
        along_rows = (Role(cell.role), side, _is_parametric(cell)) in _ROW_AMAX
        column = "row_amax_quantiles" if along_rows else "column_amax_quantiles"
        lists = [row[column] for row in rows if len(row[column]) == len(AMAX_QUANTILES)]
        low, median, high = (
            statistics.median([values[i] for values in lists]) if lists else 0.0
            for i in (_LOW, _MEDIAN, _HIGH)
        )
        if median <= 0 or high <= 0:
            return None, None, "No window is drawn: at least half of its rows are all zero."
        bounds = (math.log2(low if low > 0 else median), math.log2(high))
        what = "row" if along_rows else "column"
        return (
            math.log2(median),
            bounds,
            f"Scaled per {what}: the window of the median {what} is drawn; its top moves between "
            "the two dotted lines for nine in ten of them.",
        )
    if scaling is Scaling.STATIC and static is not None and form.name in static.scale:
        scale = static.scale[form.name] * unit
        if math.isfinite(scale) and scale > 0:
            return math.log2(scale * form.max), None, "The window is that of the static scale."
    is_static = scaling is Scaling.STATIC
    follows = "." if is_static else "; the scale follows each step's amax, so nothing is clipped."
    usable = [value for value in decode_scales if math.isfinite(value) and value > 0]
    if usable:
        return (
            math.log2(statistics.median(usable) * form.max),
            None,
            "The window is that of the median scale over the sampled steps" + follows,
        )
    amaxes = [row["amax"] for row in rows if row["amax"] is not None and row["amax"] > 0]
    if scaling is Scaling.TENSORWISE and amaxes:
        return (
            math.log2(statistics.median(amaxes)),
            None,
            "The window is that of a scale from the median amax over the sampled steps" + follows,
        )
    return None, None, "No window is drawn: the trace holds no scale of this recipe."


def _drawn(counts: np.ndarray[Any, Any], total: float) -> tuple[int, int]:
    """Return the range of bins drawn: all but tails of at most one element in a million."""
    below = np.cumsum(counts) / total
    first = int(np.searchsorted(below, _TAIL, side="right"))
    last = int(np.searchsorted(below, 1.0 - _TAIL, side="left")) + 1
    return min(first, counts.size - 1), max(min(last, counts.size), first + 1)


def _share_below(shares: np.ndarray[Any, Any], limit: float) -> float:
    """Return the share of elements below a log2 magnitude, linear within the bin it falls in."""
    position = (limit - HISTOGRAM_LOG2_MIN) * _BINS_PER_OCTAVE
    position = min(max(position, 0.0), float(shares.size))
    whole = math.floor(position)
    rest = float(shares[whole]) * (position - whole) if whole < shares.size else 0.0
    return float(shares[:whole].sum()) + rest


def _fates(shares: np.ndarray[Any, Any], window: Window, clips: bool) -> Fates:
    flushed, faded, held = (
        _share_below(shares, limit) for limit in (window.flushed, window.normal, window.top)
    )
    tiny = 1e-12
    found = (flushed, faded - flushed, 1.0 - held if clips else 0.0)
    return Fates(*(0.0 if value < tiny else min(value, 1.0) for value in found))


def _caption(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    steps: int,
    form_name: str,
    fates: Fates | None,
    note: str,
    cut: float,
) -> str:
    zeros = statistics.fmean(row["zero_share"] for row in rows)
    nonfinite = sum(row["nonfinite_count"] for row in rows)
    amaxes = [row["amax"] for row in rows if row["amax"] is not None]
    parts = [f"{name[:1].upper()}{name[1:]}, {fmt.plural(steps, 'step')}; {rows[0]['dtype']}"]
    if amaxes:
        parts[0] += f"; amax {fmt.significant(min(amaxes))} to {fmt.significant(max(amaxes))}"
    parts[0] += f"; zeros {fmt.share(zeros).text}."
    if nonfinite:
        parts.append(f"{fmt.plural(nonfinite, 'Inf or NaN element')}.")
    parts.append(note)
    if fates is not None:
        text = (
            f"Of the non-zero elements about {fmt.share(fates.flushed).text} are flushed to zero "
            f"by {form_name}, {fmt.share(fates.subnormal).text} become subnormal"
        )
        if fates.clipped > 5e-4:
            text += f", {fmt.share(fates.clipped).text} are clipped"
        parts.append(f"{text}.")
    if cut > 0:
        parts.append(f"Tails holding {fmt.share(cut).text} are not drawn.")
    return " ".join(parts)
