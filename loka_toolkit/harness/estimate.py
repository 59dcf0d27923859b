"""What the GEMMs of a trace would cost on a chip that is not here, by roofline."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.harness.ceiling import BASELINE, Ceiling, ceiling
from loka_toolkit.harness.workloads import Workload, workloads_of
from loka_toolkit.numerics.chips import ChipData, chip_data
from loka_toolkit.numerics.recipes import Recipe, parse_recipe
from loka_toolkit.numerics.roofline import (
    cast_time_us,
    gemm_time_us,
    native_recipe,
    unsupported,
)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A prediction for one site and recipe; nothing was run.

    Attributes:
        site: Site name.
        role: Its role.
        batch: Number of products.
        m: Rows of the output.
        n: Columns of the output.
        k: Contraction length.
        recipe: Recipe name.
        chip: Chip name.
        gemm_us: Predicted time of the product alone, in microseconds; None if the chip does not
            compute the recipe.
        cast_a_us: Predicted time of the cast of A alone; 0 for a baseline.
        cast_b_us: The same of B.
        baseline: The recipe compared with.
        baseline_us: Its predicted time.
        speedup: baseline_us over the sum of the others, every cast charged in full; None if
            nothing is computed.
        measured: Whether the chip's constants come from measurements on it.
        reason: Why the chip does not compute the recipe; None if it does.
    """

    site: str
    role: str
    batch: int
    m: int
    n: int
    k: int
    recipe: str
    chip: str
    gemm_us: float | None
    cast_a_us: float
    cast_b_us: float
    baseline: str
    baseline_us: float
    speedup: float | None
    measured: bool
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What FP8 could gain on a chip that need not be present.

    Attributes:
        ceiling: The most it could gain on the whole model.
        sites: One estimate per workload and recipe.
    """

    ceiling: Ceiling
    sites: tuple[Estimate, ...]


def estimate(
    trace: Trace | str | Path,
    *,
    chip: str,
    recipes: Sequence[str] | None = None,
    step_ms: float | None = None,
) -> Forecast:
    """Predict every GEMM of a trace on a chip, without running anything.

    Args:
        trace: A trace or its directory.
        chip: Name of a chip with roofline data, for example ``H200``.
        recipes: Recipe names; by default those of the trace. On a chip with fnuz formats their
            twins are taken.
        step_ms: Time of one optimizer step in 16 bits on that chip, in milliseconds, if it is
            known: the ceiling then also speaks of the whole step.

    Returns:
        The ceiling, and one estimate per workload and recipe. Operands and output are taken in 16
        bits: a model in float32 would be compared with BF16 just the same.

    Raises:
        UnknownNameError: If the chip or a recipe is unknown; near misses are listed.
        ReplayError: If the trace holds no GEMM.
        ConfigurationError: If the step is shorter than its own products.
    """
    trace = trace if isinstance(trace, Trace) else Trace.open(trace)
    data = chip_data(chip)
    names = tuple(trace.manifest.recipes if recipes is None else recipes)
    considered = tuple(dict.fromkeys(native_recipe(parse_recipe(name), data) for name in names))
    usable = [r for r in considered if not r.is_baseline and unsupported(r, data) is None]
    return Forecast(
        ceiling=ceiling(trace, data, usable, step_ms),
        sites=tuple(
            _estimate(workload, recipe, data)
            for workload in workloads_of(trace).workloads
            for recipe in considered
        ),
    )


def _estimate(workload: Workload, parsed: Recipe, chip: ChipData) -> Estimate:
    p, recipe = workload.problem, parsed.name
    reason = unsupported(parsed, chip)
    baseline = gemm_time_us(p.batch, p.m, p.n, p.k, BASELINE, chip)
    gemm, cast_a, cast_b = None, 0.0, 0.0
    if reason is None:
        gemm = gemm_time_us(p.batch, p.m, p.n, p.k, recipe, chip)
        cast_a = cast_time_us(p.batch * p.m, p.k, parsed.scaling_a, chip)
        cast_b = cast_time_us(p.batch * p.n, p.k, parsed.scaling_b, chip)
    return Estimate(
        site=str(workload.site),
        role=workload.site.role.value,
        batch=p.batch,
        m=p.m,
        n=p.n,
        k=p.k,
        recipe=recipe,
        chip=chip.name,
        gemm_us=gemm,
        cast_a_us=cast_a,
        cast_b_us=cast_b,
        baseline=BASELINE,
        baseline_us=baseline,
        speedup=baseline / (gemm + cast_a + cast_b) if gemm else None,
        measured=chip.measured,
        reason=reason,
    )
