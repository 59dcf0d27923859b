"""Forward sites: predicted change of the mean loss, and the measured one on fresh rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from impact_models import Case, Rows
from impact_replacement import ReplacedProducts, Replacement
from torch import nn

from loka_toolkit.analysis.impact import loss_impact
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.numerics.recipes import parse_recipe

Row = dict[str, Any]


def predicted_losses(trace: Trace) -> list[Row]:
    """Return one row per forward cell, from the trace alone.

    ``predicted`` is the posterior mean that the safety map holds: first orders shrunk over steps
    and floored at zero, second orders averaged. ``predicted_raw`` is the mean of both over steps.
    """
    steps = trace.steps.to_pylist()
    baseline = float(np.mean([row["mean_loss"] for row in steps]))
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in trace.errors.to_pylist():
        # A static scale grows with the largest amax seen; take the steps where it has settled.
        is_settled = "static" not in row["recipe"] or row["step"] >= len(steps) // 2
        if row["site"].endswith(":fwd") and is_settled:
            cells.setdefault((row["site"], row["recipe"]), []).append(row)
    first = np.full((len(cells), len(steps)), np.nan)
    second = first.copy()
    found = []
    for number, ((site, recipe), rows) in enumerate(cells.items()):
        known = [row for row in rows if row["impact_first_order"] is not None]
        ones = np.asarray([row["impact_first_order"] for row in known])
        twos = np.asarray([row["impact_second_order"] for row in known])
        first[number, : len(ones)], second[number, : len(twos)] = ones, twos
        total = ones + twos
        spread = float(total.std(ddof=1)) / math.sqrt(len(total)) if len(total) > 1 else None
        is_static = "static" in recipe
        found.append(
            {
                "site": site,
                "recipe": recipe,
                "steps": len(known),
                "reason": rows[0]["impact_reason"] if not known else None,
                "beyond_validity": float(
                    np.mean([row["impact_status"] == "beyond-validity" for row in rows])
                ),
                "first_order": float(ones.mean()) if known else None,
                "second_order": float(twos.mean()) if known else None,
                "predicted_raw": float(total.mean()) if known else None,
                "predicted_raw_se": spread,
                "relative_error": float(np.mean([row["relative_frobenius"] for row in rows])),
                "scale_a": rows[-1]["scale_a"] if is_static else None,
                "scale_b": rows[-1]["scale_b"] if is_static else None,
            }
        )
    posterior = loss_impact(first / baseline, second / baseline, np.ones(len(found)), seed=0)
    for row, mean in zip(found, posterior.mean, strict=True):
        row["predicted"] = None if math.isnan(mean) else float(mean) * baseline
    return found


def measure_losses(
    case: Case, model: nn.Module, cells: list[Row], sites: list[Row], fresh: Iterable[Rows]
) -> None:
    """Fill in the measured change of the mean loss, its standard error, and the ratio.

    The losses of the exact and of the changed model are paired row by row; scales are those of a
    batch, so the standard error is over batches.

    Args:
        case: The case.
        model: Its trained model.
        cells: Rows of :func:`predicted_losses`.
        sites: Forward sites of the trace, in order.
        fresh: Fresh batches.
    """
    double = copy.deepcopy(model).double()  # in training mode, as it was recorded
    order = [row["site"] for row in sites]
    dims = [(row["batch"], row["m"], row["n"], row["k"]) for row in sites]
    replacements = [_replacement(cell, order) for cell in cells]
    changes: list[list[float]] = [[] for _ in cells]
    with torch.no_grad():
        for batch in fresh:
            rows = batch.double()
            with ReplacedProducts() as plain:
                before = case.fresh_losses(double, rows)
            if plain.seen != dims:
                raise RuntimeError(f"{case.name}: {plain.seen} is multiplied, {dims} was recorded")
            for change, replacement in zip(changes, replacements, strict=True):
                with ReplacedProducts(replacement):
                    after = case.fresh_losses(double, rows)
                change.append(float((after - before).mean()))
    for cell, change in zip(cells, changes, strict=True):
        mean, error = np.mean(change), np.std(change, ddof=1) / math.sqrt(len(change))
        cell["measured"], cell["measured_se"] = float(mean), float(error)
        has_ratio = cell["predicted"] is not None and mean > 0
        cell["ratio"] = cell["predicted"] / float(mean) if has_ratio else None


def _replacement(cell: Row, order: list[str]) -> Replacement:
    recipe = parse_recipe(cell["recipe"])
    scales = cell["scale_a"], cell["scale_b"]
    return Replacement(order.index(cell["site"]), "fwd", recipe, *scales)
