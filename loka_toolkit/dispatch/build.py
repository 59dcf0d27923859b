"""Build a dispatch table from a safety map and, where there is one, a replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from loka_toolkit.artifacts.dispatch_table import KIND, SCHEMA_VERSION, DispatchTable, Objective
from loka_toolkit.artifacts.replay_results import ReplayResults, ReplayRow
from loka_toolkit.artifacts.safety_map import FAST_SPEEDUP, Cell, SafetyMap
from loka_toolkit.artifacts.sites import select_sites
from loka_toolkit.dispatch.choose import choose
from loka_toolkit.dispatch.objectives import Predict
from loka_toolkit.dispatch.options import Evidence
from loka_toolkit.dispatch.validate import validators_for
from loka_toolkit.environment import CPU_CHIP, Environment, current_environment, timestamp
from loka_toolkit.errors import ConfigurationError, UnknownNameError
from loka_toolkit.kernels.catalog import catalog
from loka_toolkit.kernels.contract import Candidate, Chip, Problem
from loka_toolkit.numerics.chips import CHIPS
from loka_toolkit.numerics.recipes import DEFAULT_RECIPES, Recipe
from loka_toolkit.numerics.roofline import predicted_speedup


def build_table(
    safety: SafetyMap | str | Path,
    replay: ReplayResults | str | Path | None = None,
    *,
    chip: str | None = None,
    objective: Objective | str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    candidates: Sequence[Candidate] | None = None,
) -> DispatchTable:
    """Join safety and replay: what runs where, and why not where not.

    A candidate enters at a site and role only if the map judged a recipe safe there whose verdict
    holds for the candidate's, the candidate takes the product on the chip and, where a replay of
    that chip is given, it was right there.

    Args:
        safety: The safety map or its file.
        replay: Replay results or their file. Rows from another chip say nothing about this one
            and are not used; every entry's evidence says whether it was replayed.
        chip: Chip the table is for; this machine's by default.
        objective: ``speed`` (fastest measured; the default on a GPU with its own replay),
            ``roofline`` (fastest predicted) or ``coverage`` (every safe site in FP8; the default
            on a CPU).
        include: Globs of site names or module paths; without any, all sites.
        exclude: Globs of those to leave out.
        candidates: Kernels considered; the catalog by default.

    Raises:
        ArtifactError: If a file is missing, damaged, foreign or newer.
        ConfigurationError: If the objective must be named, or cannot be met from what is given.
        UnknownNameError: If chip or objective do not exist.
        NoMatchError: If a pattern matches no site.
    """
    safety_map, results = _load_map(safety), _load_replay(replay)
    environment = current_environment()
    target = _chip(chip or environment.chip, environment)
    rows = _rows_on(target.name, results)
    wanted = _objective(objective, target, rows, results)
    known = catalog() if candidates is None else tuple(candidates)
    evidence = Evidence(
        chip=target,
        candidates=known,
        rows=None if rows is None else {(row.site, row.candidate): row for row in rows},
        scales={(scale.layer, scale.operand): scale for scale in safety_map.facts.scales},
        check_installed=target.name in (CPU_CHIP, environment.chip),
    )
    choice = choose(
        safety_map.cells,
        evidence,
        wanted,
        baselines=rows or (),
        predict=_roofline(target.name),
        excluded=excluded_sites(safety_map.cells, include, exclude),
    )
    return DispatchTable(
        kind=KIND,
        schema_version=SCHEMA_VERSION,
        created=timestamp(),
        chip=target.name,
        objective=wanted,
        environment=environment,
        config=_config(target, wanted, include, exclude, results, rows),
        tolerance=safety_map.facts.tolerance,
        safety_digest=safety_map.digest,
        replay_digest=None if results is None else results.digest,
        validators=validators_for(
            target.name,
            _known_environment(target, environment, results, rows),
            choice.entries,
            {candidate.name: candidate for candidate in known},
        ),
        entries=choice.entries,
        layers=choice.layers,
        misses=choice.misses,
    )


def excluded_sites(
    cells: Iterable[Cell], include: Sequence[str], exclude: Sequence[str]
) -> frozenset[str]:
    """Return the sites that the patterns leave out.

    Args:
        cells: Cells of the map.
        include: Globs matched against site names and module paths; none means all.
        exclude: The same; what it matches is left out.

    Raises:
        NoMatchError: If a pattern matches no site; near misses are listed.
    """
    sites = dict.fromkeys(cell.site for cell in cells)
    return frozenset(sites) - set(select_sites(sites, include, exclude, may_be_empty=True))


def _load_map(safety: SafetyMap | str | Path) -> SafetyMap:
    return safety if isinstance(safety, SafetyMap) else SafetyMap.load(safety)


def _load_replay(replay: ReplayResults | str | Path | None) -> ReplayResults | None:
    if replay is None or isinstance(replay, ReplayResults):
        return replay
    return ReplayResults.load(replay)


def _chip(name: str, environment: Environment) -> Chip:
    if name == CPU_CHIP:
        return Chip(CPU_CHIP, None)
    if name == environment.chip and environment.capability is not None:
        major, minor = environment.capability.split(".")
        return Chip(name, (int(major), int(minor)))
    if name in CHIPS:
        data = CHIPS[name]
        if data.capability is None:
            raise ConfigurationError(
                f"no candidate runs on {name} ({data.architecture}) yet, so no table can be built "
                f"for it; `loka estimate --chip {name}` says what FP8 could gain there"
            )
        return Chip(name, data.capability)
    raise UnknownNameError("chip", name, {CPU_CHIP, environment.chip, *CHIPS})


def _rows_on(chip: str, results: ReplayResults | None) -> tuple[ReplayRow, ...] | None:
    if results is None:
        return None
    return tuple(row for row in results.rows if row.chip == chip) or None


def _objective(
    objective: Objective | str | None,
    chip: Chip,
    rows: Sequence[ReplayRow] | None,
    results: ReplayResults | None,
) -> Objective:
    if objective is None:
        if chip.name == CPU_CHIP:
            return Objective.COVERAGE
        if rows is not None:
            return Objective.SPEED
        raise ConfigurationError(
            f"no replay measured on {chip.name} is given, so the objective must be named: "
            "coverage (every safe site in FP8, not measured as faster), roofline (fastest "
            f"predicted), or speed with results of a replay on {chip.name}"
        )
    try:
        wanted = Objective(objective)
    except ValueError:
        raise UnknownNameError("objective", str(objective), [o.value for o in Objective]) from None
    if wanted is Objective.SPEED and rows is None:
        have = "none is given"
        if results is not None:
            have = f"the one given ran on {results.facts.environment.chip}"
        raise ConfigurationError(
            f"the objective speed needs a replay measured on {chip.name} and {have}; replay there, "
            "or choose coverage or roofline"
        )
    if wanted is Objective.ROOFLINE and chip.name not in CHIPS:
        raise ConfigurationError(
            f"the objective roofline has no data for {chip.name}, only for "
            f"{', '.join(sorted(CHIPS))}; choose coverage, or speed with a replay"
        )
    return wanted


def _roofline(chip: str) -> Predict:
    def predict(problem: Problem, recipe: Recipe) -> float | None:
        dtype = str(problem.dtype).removeprefix("torch.")
        return predicted_speedup(
            problem.role,
            problem.batch,
            problem.m,
            problem.n,
            problem.k,
            recipe,
            chip,
            baseline=DEFAULT_RECIPES.get(dtype, ("fp32",))[0],
        )

    return predict


def _known_environment(
    chip: Chip,
    environment: Environment,
    results: ReplayResults | None,
    rows: Sequence[ReplayRow] | None,
) -> Environment | None:
    if results is not None and rows is not None:
        return results.facts.environment
    return environment if chip.name in (CPU_CHIP, environment.chip) else None


def _config(
    chip: Chip,
    objective: Objective,
    include: Sequence[str],
    exclude: Sequence[str],
    results: ReplayResults | None,
    rows: Sequence[ReplayRow] | None,
) -> dict[str, Any]:
    used = "none given"
    if results is not None:
        ran_on = results.facts.environment.chip
        used = "used" if rows is not None else f"not used: it ran on {ran_on}, not on {chip.name}"
    return {
        "chip": chip.name,
        "objective": objective.value,
        "include": list(include),
        "exclude": list(exclude),
        "min_speedup": FAST_SPEEDUP,
        "replay": used,
    }
