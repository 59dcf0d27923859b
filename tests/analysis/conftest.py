"""Synthetic traces, and a fit that costs nothing, for the tests of the analysis."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from loka_toolkit.analysis import run
from loka_toolkit.analysis.design import Design
from loka_toolkit.analysis.fit import Fit, HyperDraws, SamplerSettings, judge
from loka_toolkit.artifacts.map_facts import FitHealth, Hyperparameter
from loka_toolkit.artifacts.safety_map import SafetyMap

ROOT = Path(__file__).resolve().parents[2]

TENSORWISE, ROWWISE = "e4m3/tensorwise/fast", "e4m3/rowwise/fast"


@pytest.fixture(scope="session")
def simulator() -> ModuleType:
    """The module benchmarks/simulated_trace.py, which writes traces."""
    path = ROOT / "benchmarks" / "simulated_trace.py"
    spec = importlib.util.spec_from_file_location("simulated_trace", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulated_trace"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small_trace(simulator: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace as a training run leaves it: 30 sites, 6 recipes, 15 steps."""
    path = tmp_path_factory.mktemp("traces") / "small"
    return simulator.simulate(path, sites=30, recipes=6, steps=15, seed=0)


@pytest.fixture(scope="session")
def small_map(small_trace: Path) -> SafetyMap:
    """Its map, sampled for real."""
    return run.analyze(small_trace)


_ABSENT = {
    "impact_status": "unknown",
    "underflow_share_worst_group": 0.0,
    "saturation_share": 0.0,
}

WriteCells = Callable[..., Path]


@pytest.fixture
def write_cells(simulator: ModuleType, tmp_path: Path) -> WriteCells:
    """A writer of small traces: ``write_cells({(site, recipe): {column: values per step}}, ...)``.

    A scalar stands for the same value at every step; ``steps`` defaults to 0, 100, 200, ...
    """

    def write(
        cells: dict[tuple[str, str], dict[str, Any]],
        *,
        count: int = 15,
        sites: Sequence[Any] | None = None,
        name: str = "trace",
        **more: Any,
    ) -> Path:
        columns: dict[str, list[Any]] = {"step": [], "site": [], "recipe": []}
        names = list(dict.fromkeys(key for values in cells.values() for key in values))
        columns.update({key: [] for key in names})
        for (site, recipe), values in cells.items():
            columns["step"] += [100 * i for i in range(count)]
            columns["site"] += [site] * count
            columns["recipe"] += [recipe] * count
            for key in names:
                value = values.get(key, _ABSENT.get(key))
                is_series = isinstance(value, list | np.ndarray)
                columns[key] += list(value) if is_series else [value] * count
        written = sites or [
            simulator.SimulatedSite.named(site) for site in dict.fromkeys(s for s, _ in cells)
        ]
        recipes = tuple(dict.fromkeys(recipe for _, recipe in cells))
        return simulator.write_trace(tmp_path / name, written, columns, recipes=recipes, **more)

    return write


HEALTHY = FitHealth(
    healthy=True,
    problems=(),
    max_r_hat=1.001,
    min_ess=1500.0,
    divergences=0,
    min_bfmi=0.9,
    chains=4,
    draws=500,
    seconds=0.0,
)


def hyperparameter(name: str = "sqnr.grand_mean_db", **more: float) -> Hyperparameter:
    values = {"mean": 25.0, "sd": 1.0, "lo": 23.0, "hi": 27.0}
    values |= {"r_hat": 1.001, "ess_bulk": 1500.0, "ess_tail": 1200.0, **more}
    return Hyperparameter(name=name, **values)


@pytest.fixture
def unhealthy() -> FitHealth:
    """A fabricated fit in which chains disagree and one draw diverged."""
    return judge(
        (hyperparameter(), hyperparameter("sqnr.shape", r_hat=1.07, ess_bulk=63.0)),
        divergences=1,
        bfmi=np.array([0.9, 0.8]),
        settings=SamplerSettings(),
        seconds=1.0,
    )


@pytest.fixture
def assumed_fit(monkeypatch: pytest.MonkeyPatch) -> Callable[[FitHealth], None]:
    """Replace the sampler by hyperparameters that are simply assumed; returns how to set health."""
    state = {"health": HEALTHY}

    def fit(design: Design, settings: SamplerSettings) -> Fit:
        draws = {
            criterion: HyperDraws(
                location=np.full((50, design.groups), design.centers[j]),
                within=np.full(50, 0.5),
                between=np.full(50, 5.0),
                shape=np.full(50, 1.0),
            )
            for j, criterion in enumerate(design.criteria)
        }
        return Fit(draws, (), state["health"], settings, retried=None)

    monkeypatch.setattr(run, "fit", fit)
    return lambda health: state.update(health=health)
