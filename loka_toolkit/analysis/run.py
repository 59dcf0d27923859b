"""``analyze``: from a trace to a safety map."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from loka_toolkit.analysis.alerts import alerts
from loka_toolkit.analysis.cells import Judge, costs
from loka_toolkit.analysis.design import Design, Factor, build
from loka_toolkit.analysis.evidence import RESOLUTION_DB, Evidence, gather, varies
from loka_toolkit.analysis.exceedance import constant_draws, exceedance
from loka_toolkit.analysis.fit import Fit, HyperDraws, SamplerSettings, fit, nothing_to_fit
from loka_toolkit.analysis.model import require_sampler
from loka_toolkit.analysis.observations import Observations, observe, read_sites, select_recipes
from loka_toolkit.analysis.scales import amax_series, static_scales
from loka_toolkit.analysis.speed import SpeedBook
from loka_toolkit.artifacts.map_facts import Coverage, MapFacts
from loka_toolkit.artifacts.replay_results import ReplayResults
from loka_toolkit.artifacts.safety_map import Criterion, SafetyMap
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.environment import current_environment, timestamp
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.numerics.tolerance import REASONS, Tolerance

Progress: TypeAlias = Callable[[str, int, int], object]
"""Told of the stage, the parts done and the parts there are."""

DEFAULTS = SamplerSettings()

_CENTERS_ABOVE_LIMIT = {Criterion.UNDERFLOW: 15.0, Criterion.SATURATION: 15.0}
_CENTERS = {Criterion.SQNR: 25.0, Criterion.ROW_SQNR: 22.0}
_PARTS = 4


def analyze(
    trace: Trace | str | Path,
    *,
    tolerance: Tolerance = Tolerance(),  # noqa: B008 - frozen
    recipes: Sequence[str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    replay: ReplayResults | None = None,
    chip: str | None = None,
    seed: int = 0,
    chains: int = DEFAULTS.chains,
    tune: int = DEFAULTS.tune,
    draws: int = DEFAULTS.draws,
    progress: bool | Progress = False,
) -> SafetyMap:
    """Say of every site and recipe of a trace whether FP8 is safe there.

    The same trace, seed and versions give the same verdicts and numbers.

    Args:
        trace: A trace or its directory.
        tolerance: What the error of a step may be.
        recipes: Names of the recipes to consider; None means all that the trace answers for.
        include: Globs over ``FQN#CALL:ROLE`` or ``FQN`` of the sites to consider; none means all.
        exclude: Globs of sites to leave out.
        replay: Results of a replay: speed-ups are then measured.
        chip: Chip for which speed-ups are predicted where they are not measured.
        seed: Seed of the sampler and of every draw.
        chains: Chains of the sampler.
        tune: Warm-up steps per chain.
        draws: Draws kept per chain.
        progress: Called with ``"analyze"``, parts done and parts there are; True prints a line per
            part to standard error.

    Raises:
        NoEvidenceError: If the trace holds nothing to judge; the message says why.
        UnknownNameError: If a recipe or chip does not exist; near misses are listed.
        NoMatchError: If a glob matches no site.
        ConfigurationError: If another argument makes no sense.
        ArtifactError: If the trace cannot be read.
        MissingDependencyError: If PyMC, nutpie or ArviZ are absent.
    """
    require_sampler()
    tolerance.validated()
    settings = SamplerSettings(seed=seed, chains=chains, tune=tune, draws=draws)
    _check(settings)
    tell = _teller(progress)
    trace = trace if isinstance(trace, Trace) else Trace.open(trace)
    trace.require_evidence()
    speeds = SpeedBook.of(replay, chip)

    tell("analyze", 0, _PARTS)
    chosen = select_recipes(trace, recipes)
    observed = observe(trace, tolerance, chosen, include, exclude)
    evidence = gather(observed)
    coverage, baseline, loss_scales = _read_steps(trace)
    tell("analyze", 1, _PARTS)
    fitted, design, hyper = _fit(observed, evidence, settings)
    tell("analyze", 2, _PARTS)
    rates = exceedance(
        design,
        hyper,
        evidence,
        observed.limits,
        tolerance.exceedance_rate,
        seed=seed,
        effective_draws=fitted.health.min_ess,
    )
    cost = costs(observed, tolerance, baseline, seed=seed)
    tell("analyze", 3, _PARTS)
    every_site = read_sites(trace.sites)
    cells, false_discoveries = Judge(
        observed=observed,
        evidence=evidence,
        rates=rates,
        costs=cost,
        speeds=speeds,
        tolerance=tolerance,
        health=fitted.health,
        step_flops=sum(s.flops for s in every_site) + coverage.flops_unseen,
        loss_known=baseline is not None,
    ).cells()
    layers = {site.key.layer for site in observed.sites}
    series = amax_series(trace.operands, loss_scales, layers)
    facts = MapFacts(
        created=timestamp(),
        environment=current_environment(),
        trace_environment=trace.manifest.environment,
        trace_digest=trace.digest,
        config={
            "recipes": list(chosen),
            "include": list(include),
            "exclude": list(exclude),
            "replay_of_trace": replay.facts.trace_digest if replay else None,
            "chip": chip,
            **dataclasses.asdict(fitted.settings),
            "fitted": [criterion.value for criterion in design.criteria] if hyper else [],
            "constant": [c.value for c in hyper if c not in fitted.draws],
            "retried_because": fitted.retried,
            "autocorrelation": evidence.autocorrelation,
        },
        tolerance=tolerance,
        tolerance_reasons=dict(REASONS),
        recipes=chosen,
        baseline_loss=baseline,
        false_discovery_rate=false_discoveries,
        health=fitted.health,
        hyperparameters=fitted.hyperparameters,
        scales=static_scales(series),
        coverage=coverage,
        alerts=alerts(
            trace, cells, fitted.health, coverage, series, tolerance, observed.unknown_sites
        ),
    )
    tell("analyze", _PARTS, _PARTS)
    return SafetyMap(cells=cells, facts=facts)


def factors_of(observed: Observations) -> tuple[Factor, ...]:
    """Return how cells are grouped: by role, recipe and module type."""
    sites = [observed.sites[i] for i in observed.site_of]
    return (
        Factor.of("role", [site.key.role.value for site in sites]),
        Factor.of("recipe", [observed.recipes[i] for i in observed.recipe_of]),
        Factor.of("module_type", [site.module_type for site in sites]),
    )


def _fit(
    observed: Observations, evidence: Evidence, settings: SamplerSettings
) -> tuple[Fit, Design, dict[Criterion, HyperDraws]]:
    """Fit the criteria that vary; those that do not are known and left out of the sampler."""
    statistics, constants = {}, {}
    for criterion, found in evidence.statistics.items():
        mean = found.mean[found.count > 0]
        if not mean.size:
            continue
        resolution = RESOLUTION_DB[criterion]
        spread = mean.max() - mean.min()
        if criterion is Criterion.SQNR or spread > resolution or varies(found, resolution):
            statistics[criterion] = found
        else:
            constants[criterion] = float(mean.mean())
    centers = {
        criterion: _CENTERS.get(
            criterion, observed.limits[criterion] + _CENTERS_ABOVE_LIMIT.get(criterion, 0.0)
        )
        for criterion in observed.values
    }
    design = build(statistics or evidence.statistics, centers, factors_of(observed))
    fitted = fit(design, settings) if statistics else nothing_to_fit(settings)
    hyper = dict(fitted.draws)
    for criterion, value in constants.items():
        hyper[criterion] = constant_draws(value, design.groups, RESOLUTION_DB[criterion])
    return fitted, design, hyper


def _read_steps(trace: Trace) -> tuple[Coverage, float | None, dict[tuple[int, int], float]]:
    """Return the coverage, the baseline loss, and the loss scale by step and rank."""
    rows: list[dict[str, Any]] = trace.steps.to_pylist()
    recorded = [row for row in rows if row["status"] == "recorded"]
    done = {row["step"] for row in recorded}
    each = 1.0 / max(len(recorded), 1)

    def total(part: str) -> float:
        return each * float(sum(row[f"gemm_flops_{part}"] for row in recorded))

    def reasons(part: str) -> dict[str, float]:
        found: Counter[str] = Counter()
        for row in recorded:
            text = row[f"{part}_reason"] or "{}"
            found.update(msgspec.json.decode(text, type=dict[str, float]))
        return {reason: each * flops for reason, flops in found.items()}

    losses = [row["mean_loss"] for row in recorded if row["mean_loss"] is not None]
    baseline = float(np.mean(losses)) if losses else None
    coverage = Coverage(
        flops_seen=total("seen"),
        flops_unseen=total("unseen"),
        unseen_reasons=reasons("unseen"),
        steps_recorded=len(done),
        steps_skipped=len({row["step"] for row in rows} - done),
        flops_not_judged=total("not_judged"),
        not_judged_reasons=reasons("not_judged"),
        flops_repeated=total("repeated"),
        repeated_reasons=reasons("repeated"),
    )
    scales = {(row["step"], row["rank"]): row["loss_scale"] for row in rows}
    usable = baseline is not None and np.isfinite(baseline) and baseline > 0
    return coverage, baseline if usable else None, scales


def _check(settings: SamplerSettings) -> None:
    least = {"chains": 2, "tune": 100, "draws": 100, "seed": 0}
    for name, limit in least.items():
        value = getattr(settings, name)
        if value < limit:
            raise ConfigurationError(
                f"{name} = {value} must be at least {limit}; leave it out for "
                f"{getattr(DEFAULTS, name)}"
            )


def _teller(progress: bool | Progress) -> Progress:
    if callable(progress):
        return progress
    if progress:
        return lambda stage, done, total: print(
            f"{stage}: {done}/{total}", file=sys.stderr, flush=True
        )
    return lambda stage, done, total: None
