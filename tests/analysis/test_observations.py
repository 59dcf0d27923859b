"""From rows to cells: ranks, nulls, non-finite products, choices."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest

from loka_toolkit.analysis.evidence import gather
from loka_toolkit.analysis.observations import observe, read_sites, select_recipes
from loka_toolkit.artifacts.safety_map import Criterion
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import (
    ConfigurationError,
    NoEvidenceError,
    UnknownNameError,
)
from loka_toolkit.numerics.tolerance import Tolerance

TENSORWISE, ROWWISE = "e4m3/tensorwise/fast", "e4m3/rowwise/fast"
NAMES = ("tower.0#0:fwd", "tower.0#0:wgrad", "tower.1#0:fwd", "head#0:fwd")


def test_ranks_join_as_the_worst_error_and_the_mean_impact(simulator: ModuleType, tmp_path) -> None:
    site = simulator.SimulatedSite.named("a#0:fwd")
    for rank, sqnr, share, first in ((0, 28.0, 0.1, 1e-5), (1, 24.0, 0.3, 3e-5)):
        errors = {
            "step": [0, 10],
            "site": ["a#0:fwd"] * 2,
            "recipe": [TENSORWISE] * 2,
            "sqnr_db": [sqnr, 30.0],
            "row_sqnr_db_p05": [20.0, 20.0],
            "underflow_share_worst_group": [share, 0.0],
            "impact_first_order": [first, None],
            "impact_second_order": [first, None],
        }
        simulator.write_trace(tmp_path / "t", [site], errors, recipes=[TENSORWISE], rank=rank)
    found = observe(Trace.open(tmp_path / "t"), Tolerance(), (TENSORWISE,))
    np.testing.assert_array_equal(found.values[Criterion.SQNR], [[24.0, 30.0]])
    assert found.values[Criterion.UNDERFLOW][0, 0] < found.limits[Criterion.UNDERFLOW]
    np.testing.assert_allclose(found.first_order, [[2e-5, np.nan]])
    assert found.seen.sum() == 2


def test_null_is_no_evidence_and_a_lost_product_is_a_broken_step(write_cells) -> None:
    sqnr = [28.0, None, float("nan"), -100.0, 27.0, 28.0]
    relative = [0.04, None, float("inf"), 1e5, 0.04, float("inf")]
    cells = {("a#0:fwd", TENSORWISE): {"sqnr_db": sqnr, "relative_frobenius": relative}}
    found = observe(Trace.open(write_cells(cells, count=6)), Tolerance(), (TENSORWISE,))
    np.testing.assert_array_equal(
        found.values[Criterion.SQNR], [[28.0, np.nan, np.nan, np.nan, 27.0, np.nan]]
    )
    np.testing.assert_array_equal(found.destroyed, [[False, False, True, True, False, True]])
    evidence = gather(found)
    assert evidence.events[0] == 3 and evidence.trials[0] == 6
    assert evidence.statistics[Criterion.SQNR].count[0] == 2


def test_cells_are_every_site_under_every_recipe(simulator: ModuleType, tmp_path) -> None:
    sites = [simulator.SimulatedSite.named(name) for name in NAMES]
    errors = {"step": [0], "site": ["head#0:fwd"], "recipe": [ROWWISE], "sqnr_db": [29.0]}
    path = simulator.write_trace(
        tmp_path / "t", sites, errors, recipes=[TENSORWISE, ROWWISE], events=()
    )
    found = observe(Trace.open(path), Tolerance(), (TENSORWISE, ROWWISE))
    assert found.cells == 8 and found.seen.sum() == 1
    assert found.values[Criterion.SQNR][7, 0] == 29.0


def test_a_site_takes_its_largest_shape_and_all_of_its_work(
    simulator: ModuleType, tmp_path
) -> None:
    sites = [simulator.SimulatedSite.named("a#0:fwd", m=m, n=8, k=4) for m in (13, 512, 39)]
    errors = {"step": [0], "site": ["a#0:fwd"], "recipe": [TENSORWISE], "sqnr_db": [29.0]}
    path = simulator.write_trace(tmp_path / "t", sites, errors, recipes=[TENSORWISE])
    (site,) = observe(Trace.open(path), Tolerance(), (TENSORWISE,)).sites
    assert (site.m, site.flops) == (512, 2.0 * (13 + 512 + 39) * 8 * 4)


def test_what_cannot_be_judged_has_no_cells_and_what_may_be_has(
    simulator: ModuleType, tmp_path
) -> None:
    """Fused attention is left out; a judged convolution is not, nor a site without evidence."""
    sites = [
        simulator.SimulatedSite.named("attention#0:fwd", dispatchable=False),
        simulator.SimulatedSite.named("convolution#0:fwd", dispatchable=False),
        simulator.SimulatedSite.named("late#0:fwd"),
    ]
    errors = {"step": [0], "site": ["convolution#0:fwd"], "recipe": [TENSORWISE]}
    path = simulator.write_trace(tmp_path / "t", sites, errors | {"sqnr_db": [29.0]})
    found = observe(Trace.open(path), Tolerance(), (TENSORWISE,))
    assert [str(site.key) for site in found.sites] == ["convolution#0:fwd", "late#0:fwd"]
    assert not found.sites[0].dispatchable


def test_flops_of_a_site_are_those_of_all_its_executions(simulator: ModuleType, tmp_path) -> None:
    """Two shapes of one step add up; the step with most of them counts; a formula where unsaid."""
    trace = Trace.open(
        simulator.write_trace(
            tmp_path / "t",
            [simulator.SimulatedSite.named("a#0:fwd", m=4, n=8, k=4)],
            {"step": [0], "site": ["a#0:fwd"], "recipe": [TENSORWISE], "sqnr_db": [29.0]},
        )
    )
    (row,) = trace.sites.to_pylist()
    rows = [
        {**row, "flops": 100.0, "executions": 3},
        {**row, "m": 2, "flops": 50.0, "executions": 1},
        {**row, "m": 6, "flops": 200.0, "executions": 1, "first_step": 7},
    ]
    (site,) = read_sites(pa.Table.from_pylist(rows, trace.sites.schema))
    assert site.flops == 350.0 and site.m == 6
    (site,) = read_sites(pa.Table.from_pylist([{**row, "flops": None}], trace.sites.schema))
    assert site.flops == 2.0 * 4 * 8 * 4


def test_errors_of_undescribed_sites_are_named(simulator: ModuleType, tmp_path) -> None:
    errors = {
        "step": [0, 0],
        "site": ["a#0:fwd", "ghost#0:fwd"],
        "recipe": [TENSORWISE] * 2,
        "sqnr_db": [29.0, 29.0],
    }
    site = simulator.SimulatedSite.named("a#0:fwd")
    path = simulator.write_trace(tmp_path / "t", [site], errors, recipes=[TENSORWISE])
    found = observe(Trace.open(path), Tolerance(), (TENSORWISE,))
    assert found.unknown_sites == ("ghost#0:fwd",) and found.cells == 1


def test_recipes_must_exist_and_be_recorded(small_trace) -> None:
    trace = Trace.open(small_trace)
    assert select_recipes(trace, [ROWWISE, ROWWISE]) == (ROWWISE,)
    with pytest.raises(UnknownNameError, match=r"did you mean .*e4m3/rowwise/fast"):
        select_recipes(trace, ["e4m3/rowise/fast"])
    with pytest.raises(ConfigurationError, match=r"no errors under e4m3/static/fp32"):
        select_recipes(trace, ["e4m3/static/fp32"])
    with pytest.raises(ConfigurationError, match="no recipe was named"):
        select_recipes(trace, [])


def test_nothing_for_the_sites_chosen_is_an_error(simulator: ModuleType, tmp_path) -> None:
    sites = [simulator.SimulatedSite.named(name) for name in NAMES]
    errors = {"step": [0], "site": ["head#0:fwd"], "recipe": [TENSORWISE], "sqnr_db": [29.0]}
    path = simulator.write_trace(tmp_path / "t", sites, errors, recipes=[TENSORWISE])
    with pytest.raises(NoEvidenceError, match="3 sites"):
        observe(Trace.open(path), Tolerance(), (TENSORWISE,), include=("tower*",))
