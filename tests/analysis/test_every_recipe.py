"""Recipes of every family are judged beside each other; baselines make no site safe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loka_toolkit.analysis import analyze
from loka_toolkit.artifacts.map_facts import FitHealth
from loka_toolkit.artifacts.safety_map import SpeedEvidence, Verdict

LEVELS = {
    "e4m3/tensorwise/fast": 28.0,
    "e4m3/tensorwise-rowwise/promoted-128": 28.4,
    "e4m3/blockwise/promoted-128": 28.8,
    "e4m3/mxfp8/fp32": 27.7,
    "e4m3fnuz/rowwise/fp32": 28.6,
    "e5m2-fp16/static/fp32": 12.0,
    "bf16-e4m3/blockwise/fp32": 31.8,
    "bf16": 52.5,
    "fp32": 150.0,
}


@pytest.fixture
def path(write_cells: Callable[..., Path]) -> Path:
    rng = np.random.default_rng(0)
    cells = {}
    for i in range(4):
        for name, level in LEVELS.items():
            values = level + 0.2 * rng.normal(size=15)
            cells[(f"layer{i}#0:fwd", name)] = {"sqnr_db": values, "row_sqnr_db_p05": values - 2}
    return write_cells(cells)


def test_every_family_gets_verdicts_and_predicted_times(
    path: Path, assumed_fit: Callable[[FitHealth], None]
) -> None:
    safety = analyze(path, chip="H200")
    assert len(safety.cells) == 4 * len(LEVELS)
    for cell in safety.cells:
        assert cell.verdict is (Verdict.SAFE if LEVELS[cell.recipe] > 20 else Verdict.UNSAFE)
        absent = "mxfp8" in cell.recipe or "fnuz" in cell.recipe  # not on a Hopper chip
        assert (cell.speedup is None) == absent, cell.recipe
        assert (cell.speedup_evidence is SpeedEvidence.NONE) == absent


def test_baselines_alone_make_no_site_safe(
    write_cells: Callable[..., Path], assumed_fit: Callable[[FitHealth], None]
) -> None:
    """Float32 is safe everywhere, which says nothing about FP8."""
    noise = 0.2 * np.random.default_rng(1).normal(size=15)
    bad = {"sqnr_db": 10.0 + noise, "row_sqnr_db_p05": 8.0 + noise}
    good = {"sqnr_db": 150.0 + noise, "row_sqnr_db_p05": 149.0 + noise}
    site = "layer0#0:fwd"
    mixed = analyze(write_cells({(site, "e4m3/rowwise/fast"): bad, (site, "fp32"): good}))
    assert {cell.verdict for cell in mixed.cells} == {Verdict.SAFE, Verdict.UNSAFE}
    assert [found.verdict for found in mixed.site_verdicts()] == [Verdict.UNSAFE]
    alone = analyze(write_cells({(site, "fp32"): good}, name="alone"))
    assert [found.verdict for found in alone.site_verdicts()] == [Verdict.SAFE]
