"""Gradient sites: predicted and measured bias and noise of the parameter gradients they reach.

One product of the backward pass is replaced by its emulation in a float64 copy of the model, on
fresh batches; the change of the gradient of every weight and table is what is measured. The noise
of a minibatch is the variance of the gradient from batch to batch, over the same parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from impact_models import Case, Rows
from impact_replacement import ReplacedProducts, Replacement
from torch import nn

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.numerics.recipes import parse_recipe

GRADIENT_RECIPES = (
    "e4m3/tensorwise/fp32",
    "e4m3/static/fp32",
    "e5m2/rowwise/fp32",
    "e4m3-e5m2/tensorwise/fp32",
)
"""Of the recorded recipes, those measured in backward."""

Cell = dict[str, Any]


def predicted_gradients(trace: Trace) -> list[Cell]:
    """Return one row per gradient site and recipe, from the trace alone."""
    last = max(row["step"] for row in trace.steps.to_pylist())
    cells: dict[tuple[str, str], list[Cell]] = {}
    for row in trace.errors.to_pylist():
        settled = "static" not in row["recipe"] or row["step"] >= (last + 1) // 2
        wanted = settled and row["recipe"] in GRADIENT_RECIPES
        if wanted and not row["site"].endswith(":fwd"):
            cells.setdefault((row["site"], row["recipe"]), []).append(row)
    found = []
    for (site, recipe), rows in cells.items():
        biases = [row["gradient_bias"] for row in rows if row["gradient_bias"] is not None]
        ratios = [r["gradient_noise_ratio"] for r in rows if r["gradient_noise_ratio"] is not None]
        reasons = {row["gradient_reason"] for row in rows if row["gradient_bias"] is None}
        found.append(
            {
                "site": site,
                "recipe": recipe,
                "steps": len(biases),
                "reason": "; ".join(sorted(map(str, reasons))) if not biases else None,
                "bias_predicted": float(np.mean(biases)) if biases else None,
                "bias_predicted_se": _standard_error(biases),
                "noise_predicted": float(np.mean(ratios)) if ratios else None,
                "relative_error": float(np.mean([r["relative_frobenius"] or 0.0 for r in rows])),
                "scale_a": rows[-1]["scale_a"] if "static" in recipe else None,
                "scale_b": rows[-1]["scale_b"] if "static" in recipe else None,
            }
        )
    return found


def _standard_error(values: list[float]) -> float | None:
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def measure_gradients(
    case: Case,
    model: nn.Module,
    cells: list[Cell],
    order: list[str],
    weights: Sequence[str],
    batches: Iterable[Rows],
    loss_scale: float,
) -> None:
    """Fill in the measured bias, with its standard error, and the measured noise ratio.

    Args:
        case: The case.
        model: Its trained model.
        cells: Rows of :func:`predicted_gradients`.
        order: Layers (FQN#CALL) in the order of their forward products.
        weights: Names of the parameters that are multiplied; tables are looked at besides.
        batches: Fresh batches.
        loss_scale: Factor that a gradient scaler multiplies the loss by.
    """
    double = copy.deepcopy(model).double()
    named = dict(double.named_parameters())
    tables = [m.weight for m in double.modules() if isinstance(m, nn.Embedding)]
    parameters = list(dict.fromkeys([*(named[name] for name in weights), *tables]))
    replacements = [_replacement(cell, order) for cell in cells]

    def gradients(rows: Rows, replacement: Replacement | None) -> list[torch.Tensor]:
        with ReplacedProducts(replacement):
            loss = case.loss(double(rows), rows) * loss_scale
        found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        return [part for g in found for part in (g.unbind(0) if g.ndim == 3 else (g,))]

    count = 0
    # A stack of matrices is several parameters in one: each is multiplied by itself.
    stacked = [p.detach().unbind(0) if p.ndim == 3 else (p.detach(),) for p in parameters]
    sums = [torch.zeros_like(part) for parts in stacked for part in parts]
    squares = np.zeros(len(sums))
    products: list[list[np.ndarray]] = [[] for _ in cells]
    energies = [np.zeros(len(sums)) for _ in cells]
    norms: list[np.ndarray] = []
    for batch in batches:
        count += 1
        rows = batch.double()
        exact = gradients(rows, None)
        norms.append(np.asarray([float(g.square().sum()) for g in exact]))
        squares += norms[-1]
        for total, g in zip(sums, exact, strict=True):
            total += g
        for i, replacement in enumerate(replacements):
            changed = gradients(rows, replacement)
            pairs = [(new - old, old) for new, old in zip(changed, exact, strict=True)]
            products[i].append(np.asarray([float((d * g).sum()) for d, g in pairs]))
            energies[i] += [float(d.square().sum()) for d, _ in pairs]
    mean_squares = np.asarray([float(total.square().sum()) for total in sums]) / count
    traces = (squares - mean_squares) / (count - 1)
    for cell, product, energy in zip(cells, products, energies, strict=True):
        # A product written otherwise rounds otherwise, by 1e-16 of the gradient.
        reached = energy > 1e-20 * squares
        if not reached.any():
            cell |= {"bias_measured": 0.0, "bias_measured_se": 0.0, "noise_measured": 0.0}
            continue
        ratios = [p[reached].sum() / n[reached].sum() for p, n in zip(product, norms, strict=True)]
        cell["bias_measured"] = float(np.mean(ratios))
        cell["bias_measured_se"] = _standard_error([float(ratio) for ratio in ratios])
        cell["noise_measured"] = float(energy[reached].sum() / count / traces[reached].sum())


def _replacement(cell: Cell, order: list[str]) -> Replacement:
    layer, _, role = cell["site"].rpartition(":")
    recipe = parse_recipe(cell["recipe"])
    return Replacement(order.index(layer), role, recipe, cell["scale_a"], cell["scale_b"])
