"""What a safety map says of itself: the fit, static scales, coverage, and what they rest on."""

from __future__ import annotations

from typing import Any

import msgspec

from loka_toolkit.environment import Environment
from loka_toolkit.numerics.tolerance import Tolerance


class OperandScale(msgspec.Struct, frozen=True):
    """A static scale for one operand of a layer.

    Attributes:
        layer: Layer name, FQN#CALL.
        operand: ``x``, ``w``, ``g``, ``a`` or ``b``.
        amax: Predictive location of the amax (for g: per unit of loss scale).
        log2_amax_sd: Predictive standard deviation of log2 amax.
        headroom: Factor above ``amax`` that the scale leaves before saturation.
        scale: Decode scale: a stored value times it gives the original; keyed by format.
        overflow_probability: P(a step's amax exceeds the largest representable value); keyed by
            format.
        steps: Sampled steps it rests on.
    """

    layer: str
    operand: str
    amax: float
    log2_amax_sd: float
    headroom: float
    scale: dict[str, float]
    overflow_probability: dict[str, float]
    steps: int


class Hyperparameter(msgspec.Struct, frozen=True):
    """Posterior summary and sampler health of one hyperparameter."""

    name: str
    mean: float
    sd: float
    lo: float
    hi: float
    r_hat: float
    ess_bulk: float
    ess_tail: float


class FitHealth(msgspec.Struct, frozen=True):
    """Whether the sampler can be trusted.

    Attributes:
        healthy: All gates passed.
        problems: One sentence per gate that failed.
        max_r_hat: Over hyperparameters; the gate is 1.01.
        min_ess: Over hyperparameters, bulk and tail; the gate is 400.
        divergences: After warm-up; the gate is 0.
        min_bfmi: Over chains; the gate is 0.3.
        chains: Chains.
        draws: Draws kept per chain.
        seconds: Time the fit took, compilation included.
    """

    healthy: bool
    problems: tuple[str, ...]
    max_r_hat: float
    min_ess: float
    divergences: int
    min_bfmi: float
    chains: int
    draws: int
    seconds: float


class Coverage(msgspec.Struct, frozen=True):
    """What share of the work was seen; all FLOPs are those of GEMMs, per sampled step.

    Attributes:
        flops_seen: FLOPs recorded as sites and judged.
        flops_unseen: FLOPs that no site accounts for.
        unseen_reasons: The same by reason.
        steps_recorded: Sampled steps with rows.
        steps_skipped: Sampled steps skipped, for example as non-finite.
        flops_not_judged: FLOPs of sites without errors, such as fused attention.
        not_judged_reasons: The same by reason.
        flops_repeated: FLOPs of sites that ran again, in micro-batches or recomputed.
        repeated_reasons: The same by reason.
    """

    flops_seen: float
    flops_unseen: float
    unseen_reasons: dict[str, float]
    steps_recorded: int
    steps_skipped: int
    flops_not_judged: float = 0.0
    not_judged_reasons: dict[str, float] = {}
    flops_repeated: float = 0.0
    repeated_reasons: dict[str, float] = {}

    @property
    def flops(self) -> float:
        """All of them."""
        return self.flops_seen + self.flops_not_judged + self.flops_repeated + self.flops_unseen


class MapFacts(msgspec.Struct, frozen=True):
    """What holds for the whole map.

    Attributes:
        created: UTC, ISO 8601.
        environment: Where the analysis ran.
        trace_environment: Where the trace was recorded.
        trace_digest: SHA-256 of the trace.
        config: Arguments of the analysis.
        tolerance: The tolerance used.
        tolerance_reasons: Why each number is what it is.
        recipes: Recipes considered.
        baseline_loss: Mean loss over the sampled steps, in mean-loss units, or null.
        false_discovery_rate: Expected share of wrong ``safe`` verdicts.
        health: The sampler's.
        hyperparameters: Posterior summaries.
        scales: Static scales.
        coverage: What was seen.
        alerts: Sentences to be read first.
    """

    created: str
    environment: Environment
    trace_environment: Environment
    trace_digest: str
    config: dict[str, Any]
    tolerance: Tolerance
    tolerance_reasons: dict[str, str]
    recipes: tuple[str, ...]
    baseline_loss: float | None
    false_discovery_rate: float
    health: FitHealth
    hyperparameters: tuple[Hyperparameter, ...]
    scales: tuple[OperandScale, ...]
    coverage: Coverage
    alerts: tuple[str, ...]
