"""Sample the hyperparameters and decide whether the sample can be trusted."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from loka_toolkit.analysis.design import Design, basis
from loka_toolkit.analysis.model import build_model, require_sampler, within_between
from loka_toolkit.artifacts.map_facts import FitHealth, Hyperparameter
from loka_toolkit.artifacts.safety_map import Criterion
from loka_toolkit.numerics.posterior import FloatArray

MAX_R_HAT = 1.01
MIN_ESS = 400.0
MAX_DIVERGENCES = 0
MIN_BFMI = 0.3
"""Gates on the hyperparameters: Vehtari et al., "Rank-normalization, folding, and localization"
(2021), for the first two; Betancourt, "Diagnosing suboptimal cotangent disintegrations" (2016), for
the last. They are not put on cells: the maximum over thousands of them exceeds 1.01 by chance."""

RETRY_TARGET_ACCEPT = 0.98


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """How to sample.

    Attributes:
        seed: Seed of the sampler.
        chains: Number of chains.
        tune: Warm-up steps per chain.
        draws: Draws kept per chain.
        target_accept: Acceptance rate that the step size aims at.
    """

    seed: int = 0
    chains: int = 4
    tune: int = 600
    draws: int = 1000
    target_accept: float = 0.9


@dataclasses.dataclass(frozen=True)
class HyperDraws:
    """Draws of the hyperparameters of one criterion, D of them.

    Attributes:
        location: [D, G] mean of every group, dB.
        within: [D] typical standard deviation over steps, dB.
        between: [D] standard deviation of cells around their group, dB.
        shape: [D] shape of the inverse gamma of the variances.
    """

    location: FloatArray
    within: FloatArray
    between: FloatArray
    shape: FloatArray


@dataclasses.dataclass(frozen=True)
class Fit:
    """What the sampler returned.

    Attributes:
        draws: Criterion -> draws, chains concatenated.
        hyperparameters: Summaries.
        health: Whether the sample can be trusted.
        settings: Those of the attempt that is kept.
        retried: Why a first attempt was thrown away; None if there was none.
    """

    draws: dict[Criterion, HyperDraws]
    hyperparameters: tuple[Hyperparameter, ...]
    health: FitHealth
    settings: SamplerSettings
    retried: str | None


def fit(design: Design, settings: SamplerSettings) -> Fit:
    """Compile the model once and sample it; an unhealthy sample is drawn anew once, for longer.

    Raises:
        MissingDependencyError: If PyMC, nutpie or ArviZ are absent.
    """
    _, nutpie, _ = require_sampler()
    start = time.perf_counter()
    compiled = nutpie.compile_pymc_model(build_model(design))
    first = _attempt(design, compiled, settings, lambda: time.perf_counter() - start)
    if first.health.healthy:
        return first
    longer = dataclasses.replace(
        settings,
        tune=2 * settings.tune,
        draws=2 * settings.draws,
        target_accept=max(settings.target_accept, RETRY_TARGET_ACCEPT),
    )
    second = _attempt(design, compiled, longer, lambda: time.perf_counter() - start)
    return dataclasses.replace(second, retried="; ".join(first.health.problems))


def nothing_to_fit(settings: SamplerSettings) -> Fit:
    """Return the fit of a map without a single value: nothing was sampled, nothing can be wrong."""
    health = FitHealth(
        healthy=True,
        problems=(),
        max_r_hat=1.0,
        min_ess=float(settings.chains * settings.draws),
        divergences=0,
        min_bfmi=1.0,
        chains=settings.chains,
        draws=0,
        seconds=0.0,
    )
    return Fit({}, (), health, settings, retried=None)


def _attempt(
    design: Design, compiled: Any, settings: SamplerSettings, elapsed: Callable[[], float]
) -> Fit:
    sampled = sample(compiled, settings)
    chains = hyperparameter_chains(design, posterior_arrays(sampled))
    hyperparameters = summarize(chains)
    health = judge(
        hyperparameters,
        divergences=int(sampled.sample_stats["diverging"].sum()),
        bfmi=bfmi(sampled.sample_stats["energy"].to_numpy()),
        settings=settings,
        seconds=elapsed(),
    )
    draws = criterion_draws(design, posterior_arrays(sampled))
    return Fit(draws, hyperparameters, health, settings, retried=None)


def sample(compiled: Any, settings: SamplerSettings) -> Any:
    """Draw from a compiled model with nutpie; return ArviZ inference data."""
    _, nutpie, _ = require_sampler()
    return nutpie.sample(
        compiled,
        chains=settings.chains,
        cores=min(settings.chains, os.cpu_count() or 1),
        tune=settings.tune,
        draws=settings.draws,
        seed=settings.seed,
        target_accept=settings.target_accept,
        # Roles and module types may nearly coincide; a diagonal mass matrix then crawls.
        low_rank_modified_mass_matrix=True,
        progress_bar=False,
    )


def posterior_arrays(sampled: Any) -> dict[str, FloatArray]:
    """Return variable -> draws [chain, draw, ...]."""
    return {str(name): array.to_numpy() for name, array in sampled.posterior.data_vars.items()}


def hyperparameter_chains(design: Design, posterior: Mapping[str, FloatArray]) -> dict[str, Any]:
    """Return name -> draws [chain, draw] of every hyperparameter, on the scale where it is read."""
    chains: dict[str, FloatArray] = {}
    for j, criterion in enumerate(design.criteria):
        chains[f"{criterion}.grand_mean_db"] = posterior["grand"][:, :, j]
        within, between = within_between(
            posterior["log_spread"][:, :, j], posterior["log_ratio"][:, :, j]
        )
        chains[f"{criterion}.within_sd_db"] = within
        chains[f"{criterion}.between_sd_db"] = between
        chains[f"{criterion}.shape"] = np.exp(posterior["log_shape"][:, :, j])
        for i, factor in enumerate(design.factors):
            scale = np.exp(posterior["log_scale"][:, :, j, i])
            chains[f"{criterion}.{factor.name}.scale_db"] = scale
            coefficients = posterior["effects"][:, :, j, design.blocks == i]
            effects = coefficients @ basis(len(factor.levels)).T
            for level, name in enumerate(factor.levels):
                chains[f"{criterion}.{factor.name}[{name}]"] = effects[:, :, level]
    return chains


def criterion_draws(
    design: Design, posterior: Mapping[str, FloatArray]
) -> dict[Criterion, HyperDraws]:
    """Return the draws of every criterion, chains concatenated."""
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in posterior.items()}
    found = {}
    for j, criterion in enumerate(design.criteria):
        location = np.repeat(flat["grand"][:, j, None], design.groups, axis=1)
        if design.factors:
            location = location + flat["effects"][:, j] @ design.contrasts.T
        within, between = within_between(flat["log_spread"][:, j], flat["log_ratio"][:, j])
        found[criterion] = HyperDraws(
            location=location,
            within=within,
            between=between,
            shape=np.exp(flat["log_shape"][:, j]),
        )
    return found


def summarize(chains: Mapping[str, FloatArray]) -> tuple[Hyperparameter, ...]:
    """Return mean, spread, 90 % interval, R-hat and effective sample sizes per hyperparameter."""
    _, _, arviz = require_sampler()
    found = []
    for name, draws in chains.items():
        lo, hi = np.quantile(draws, (0.05, 0.95))
        found.append(
            Hyperparameter(
                name=name,
                mean=float(draws.mean()),
                sd=float(draws.std()),
                lo=float(lo),
                hi=float(hi),
                r_hat=float(arviz.rhat(draws)),
                ess_bulk=float(arviz.ess(draws, method="bulk")),
                ess_tail=float(arviz.ess(draws, method="tail")),
            )
        )
    return tuple(found)


def bfmi(energy: FloatArray) -> FloatArray:
    """Return the Bayesian fraction of missing information of every chain, from [chain, draw]."""
    change = np.square(np.diff(energy, axis=1)).mean(axis=1)
    return np.asarray(change / np.maximum(energy.var(axis=1), np.finfo(np.float64).tiny))


def judge(
    hyperparameters: tuple[Hyperparameter, ...],
    *,
    divergences: int,
    bfmi: FloatArray,
    settings: SamplerSettings,
    seconds: float,
) -> FitHealth:
    """Hold a fit against the gates; a figure that is not finite fails its gate."""
    r_hat = max(hyperparameters, key=lambda h: _or(h.r_hat, np.inf))
    ess = min(hyperparameters, key=lambda h: _or(min(h.ess_bulk, h.ess_tail), -np.inf))
    least_ess = min(ess.ess_bulk, ess.ess_tail)
    problems = []
    if not r_hat.r_hat <= MAX_R_HAT:
        problems.append(
            f"R-hat of {r_hat.name} is {r_hat.r_hat:.3f}, above {MAX_R_HAT}: chains disagree"
        )
    if not least_ess >= MIN_ESS:
        problems.append(
            f"effective sample size of {ess.name} is {least_ess:.0f}, below {MIN_ESS:.0f}"
        )
    if divergences > MAX_DIVERGENCES:
        problems.append(f"{divergences} draws diverged; none may")
    if not bfmi.min() >= MIN_BFMI:
        problems.append(f"BFMI is {bfmi.min():.2f}, below {MIN_BFMI}: the energy mixes badly")
    return FitHealth(
        healthy=not problems,
        problems=tuple(problems),
        max_r_hat=r_hat.r_hat,
        min_ess=least_ess,
        divergences=divergences,
        min_bfmi=float(bfmi.min()),
        chains=settings.chains,
        draws=settings.draws,
        seconds=seconds,
    )


def _or(value: float, otherwise: float) -> float:
    return float(value) if np.isfinite(value) else float(otherwise)
