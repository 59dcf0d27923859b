"""Turns a step that counted into rows of the tables of the trace."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import torch

from loka_toolkit.artifacts.sites import Operand, Role
from loka_toolkit.recording.gradients import noise_ratio
from loka_toolkit.recording.impact import (
    ExampleTerms,
    Impact,
    example_changes,
    impact_of,
    impact_of_moves,
)
from loka_toolkit.recording.layers import Layer, SiteErrors, StepRecord
from loka_toolkit.recording.units import LossUnits
from loka_toolkit.recording.upstream import NOT_THIS_STEP
from loka_toolkit.recording.whatif import RecipeError

_ALIVE_SLOPE = 1e-3
"""Slopes above this are the same in float32 and in float64 to within 1e-4."""
_LARGEST_MISMATCH = 0.05

_NOT_A_LOSS = "a gradient site changes the update and not the loss"


def step_row(
    record: StepRecord, rank: int, status: str, reason: str | None, units: LossUnits
) -> dict[str, Any]:
    """Return the row of the table ``steps``."""
    return {
        "step": record.step,
        "rank": rank,
        "status": status,
        "reason": reason,
        "loss": units.loss,
        "mean_loss": units.mean_loss,
        "examples": units.examples,
        "reduction": None if units.reduction is None else str(units.reduction),
        "loss_scale": units.loss_scale,
        "seconds_recording": record.seconds,
        "gemm_flops_seen": record.flops_seen,
        "gemm_flops_unseen": sum(record.flops_unseen.values()),
        "unseen_reason": _by_reason(record.flops_unseen),
        "gemm_flops_not_judged": sum(record.flops_not_judged.values()),
        "not_judged_reason": _by_reason(record.flops_not_judged),
        "gemm_flops_repeated": sum(record.flops_repeated.values()),
        "repeated_reason": _by_reason(record.flops_repeated),
    }


def _by_reason(flops: dict[str, float]) -> str | None:
    return json.dumps(dict(sorted(flops.items()))) if flops else None


def site_rows(record: StepRecord) -> list[dict[str, Any]]:
    """Return the rows of the table ``sites``."""
    norms = {str(key): fqn for key, fqn in record.norm_after.items()}
    return [{**row, "norm_after": norms.get(row["site"])} for row in record.site_rows.values()]


def operand_rows(record: StepRecord, rank: int) -> list[dict[str, Any]]:
    """Return the rows of the table ``operands``."""
    rows = []
    for sample in record.operands:
        site = sample.site
        if sample.operand is Operand.G and sample.layer is not None:
            site = sample.layer.gradient_site
        head = {"step": record.step, "rank": rank, "site": str(site)}
        rows.append({**head, "operand": str(sample.operand), **sample.statistics})
    return rows


def error_rows(record: StepRecord, rank: int, units: LossUnits) -> list[dict[str, Any]]:
    """Return the rows of the table ``errors``: forward sites first, in order."""
    rows = []
    for layer in record.layers:
        if layer.forward_errors is None:
            continue
        impacts = forward_impacts(record, layer, units)
        for error in layer.forward_errors.errors:
            impact = impacts[error.recipe.name]
            rows.append(_row(record, rank, layer.forward_errors, error, impact, None))
    for site in record.site_errors:
        for error in site.errors:
            impact = Impact.unknown(_NOT_A_LOSS)
            rows.append(_row(record, rank, site, error, impact, units))
    return rows


def _row(
    record: StepRecord,
    rank: int,
    site: SiteErrors,
    error: RecipeError,
    impact: Impact,
    units: LossUnits | None,
) -> dict[str, Any]:
    name = error.recipe.name
    bias, noise, why = _gradient_values(record, site, name, units)
    return {
        "step": record.step,
        "rank": rank,
        "site": str(site.key),
        "recipe": name,
        **vars(error.metrics),
        **site.casts[name],
        "impact_first_order": impact.first_order,
        "impact_second_order": impact.second_order,
        "impact_standard_error": impact.standard_error,
        "impact_status": impact.status,
        "impact_reason": impact.reason,
        "gradient_bias": bias,
        "gradient_noise_ratio": noise,
        "gradient_reason": why,
        "sampled_rows": site.sampled_rows,
        "sampled_columns": site.sampled_columns,
    }


def _gradient_values(
    record: StepRecord, site: SiteErrors, recipe: str, units: LossUnits | None
) -> tuple[float | None, float | None, str | None]:
    if site.key.role is Role.FWD:
        return None, None, "a forward site changes the loss and not the update"
    columns = site.gradient or record.upstream.get(site.key)
    if columns is None or (columns.bias and recipe not in columns.bias):
        return None, None, record.upstream_reason or NOT_THIS_STEP
    if not columns.bias:
        return None, None, columns.reason or NOT_THIS_STEP
    bias = columns.bias[recipe]
    if not math.isfinite(bias):
        return None, None, "the emulated gradient is not finite"
    if columns.reason is not None:
        return bias, None, columns.reason
    if units is not None and units.examples is not None and columns.layout is not None:
        if units.row_examples is not None or units.examples != columns.layout.examples:
            return bias, None, "step(examples=) groups rows otherwise than was seen in backward"
    noise = noise_ratio(columns, recipe)
    if noise is None or not math.isfinite(noise):
        return bias, None, "the examples' gradients do not differ"
    return bias, noise, None


def forward_impacts(record: StepRecord, layer: Layer, units: LossUnits) -> dict[str, Impact]:
    """Return the impact of a layer's forward site, by recipe name."""
    errors = layer.forward_errors.errors if layer.forward_errors is not None else []
    grouped = _in_batch_product(record, units) or units.reason or _grouping(layer, units)
    if not isinstance(grouped, str):
        why = _why_not(layer, units)
        grouped = why if why is not None else grouped
    if isinstance(grouped, str):
        return {error.recipe.name: Impact.unknown(grouped) for error in errors}
    examples, example_of_row = grouped
    if not _are_separable(layer, examples, example_of_row, units):
        why = "examples are saturated, and the others' logits do not depend on their own rows alone"
        return {error.recipe.name: Impact.unknown(why) for error in errors}
    return {
        error.recipe.name: _impact(layer, error, examples, example_of_row, units)
        for error in errors
    }


def _are_separable(
    layer: Layer, examples: torch.Tensor, example_of_row: torch.Tensor, units: LossUnits
) -> bool:
    """Whether slope times logit derivative is the gradient, where examples are not saturated.

    The pass from the logits adds them all up, so it says nothing of single examples where they
    depend on each other, as through batch normalization; the gradient of the loss tells.
    """
    if layer.logit_rows is None or layer.gradient_rows is None:
        return True
    if units.slope is None or units.divisor is None or units.examples is None:
        return True
    slope = units.slope[examples][example_of_row].to(layer.logit_rows.device)
    alive = slope.abs() > _ALIVE_SLOPE
    if units.saturated is not None:
        alive &= ~units.saturated[examples][example_of_row].to(alive.device)
    gradient = layer.gradient_rows[alive].to(torch.float64) / units.divisor
    expected = layer.logit_rows[alive].to(torch.float64) * slope[alive].unsqueeze(1)
    difference = gradient - expected / units.examples
    return bool(difference.norm() <= _LARGEST_MISMATCH * gradient.norm())


def _why_not(layer: Layer, units: LossUnits) -> str | None:
    if layer.was_passed_twice:
        return "two backward passes went through this product: the loss is a sum of two"
    if layer.gradient_rows is None:
        return "no gradient reached this output"
    if layer.sequence in units.bypassing:
        return "the loss depends on this product other than through the loss that was recognized"
    if units.divisor is None:
        return "the scale of the loss is not known; pass step(reduction=)"
    return None


def _grouping(layer: Layer, units: LossUnits) -> tuple[torch.Tensor, torch.Tensor] | str:
    """Return the sampled examples and, for every sampled row, its position among them."""
    flat = layer.sampled.flat(layer.products, layer.rows)
    total = layer.products * layer.rows
    if units.row_examples is not None:
        of_row = units.row_examples.reshape(-1).to(torch.int64).cpu()
        if len(of_row) == total:
            return _ragged(of_row, flat, layer)
    layout = units.layout(layer.leading)
    if isinstance(layout, str):
        return layout
    example = (flat // layout.inner) % layout.examples
    examples, position = torch.unique(example, return_inverse=True)
    per_example = layout.outer * layout.inner
    if len(flat) != len(examples) * per_example:
        return (
            "rows were sub-sampled before it was known which of them make up an example; "
            f"record with max_rows={total}"
        )
    return examples, position


def _ragged(
    of_row: torch.Tensor, flat: torch.Tensor, layer: Layer
) -> tuple[torch.Tensor, torch.Tensor] | str:
    count = int(of_row.max()) + 1
    if not layer.sampled.is_complete and len(torch.unique(of_row)) != len(of_row):
        return (
            "rows were sub-sampled before it was known which of them make up an example; "
            f"record with max_rows={len(of_row)}"
        )
    if layer.sampled.is_complete:
        return torch.arange(count), of_row  # an example without rows changes nothing
    return of_row[flat], torch.arange(len(flat))


def _impact(
    layer: Layer,
    error: RecipeError,
    examples: torch.Tensor,
    example_of_row: torch.Tensor,
    units: LossUnits,
) -> Impact:
    assert layer.gradient_rows is not None and units.divisor is not None
    total = units.examples or len(examples)
    # Through a batch normalization a row's gradient is not its own example's slope alone.
    known = layer.sequence not in units.mixed or layer.logit_rows is not None
    known = known and units.slope is not None and units.curvature is not None
    terms = ExampleTerms(
        total=total,
        slope=units.slope[examples] if known and units.slope is not None else None,
        curvature=units.curvature[examples] if known and units.curvature is not None else None,
        is_log_loss=units.is_log_loss,
        mean_over=units.mean_over,
        terms=units.terms,
        dispersion=units.dispersion,
        is_residual_loss=units.is_residual_loss,
        saturated=units.saturated_count,
    )
    if layer.logit_rows is not None and terms.slope is not None:
        moved = layer.logit_rows.to(torch.float64) * layer.alpha
        moves = example_changes(moved, error.error, example_of_row, len(examples))
        impact = impact_of_moves(moves, terms)
        gradient = moved * (terms.slope[example_of_row] / total).unsqueeze(1).to(moved.device)
    else:
        gradient = layer.gradient_rows.to(torch.float64) * (layer.alpha / units.divisor)
        changes = example_changes(gradient, error.error, example_of_row, len(examples))
        impact = impact_of(changes, terms)
    if error.probe_rows is None or error.probe_error is None or impact.first_order is None:
        return impact
    return _with_accumulator(impact, gradient, error, total / len(examples))


def _with_accumulator(
    impact: Impact, gradient: torch.Tensor, error: RecipeError, scale: float
) -> Impact:
    """Add what the accumulator does, measured on the probe rows: a difference estimator."""
    rows, added = error.probe_rows, error.probe_error
    assert rows is not None and added is not None and impact.first_order is not None
    assert impact.second_order is not None and impact.standard_error is not None
    changes = (gradient[rows] * added.to(torch.float64)).sum(-1)
    every, probed = len(gradient), len(rows)
    first = scale * every * float(changes.mean())
    spread = float(changes.std(unbiased=True)) if probed > 1 else math.nan
    noise = scale * every * spread * math.sqrt((1 - probed / every) / probed)
    before = error.error[rows].to(torch.float64)
    energy = float(before.square().sum())
    after = float((before + added).square().sum())
    return dataclasses.replace(
        impact,
        first_order=impact.first_order + first,
        second_order=impact.second_order * (after / energy if energy else 1.0),
        standard_error=math.hypot(impact.standard_error, noise),
    )


def _in_batch_product(record: StepRecord, units: LossUnits) -> str | None:
    """Return why examples share terms, if activations were multiplied example by example."""
    for layer in record.layers:
        forward = layer.forward
        if layer.weight is None and not forward.is_batched and units.examples is not None:
            if forward.m == forward.n == units.examples > 1:
                return (
                    f"{layer.site(Role.FWD)} multiplies all examples with all examples: the loss "
                    "is not a mean over separable examples"
                )
    return None
