"""The gate on the sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loka_toolkit.analysis.fit import SamplerSettings, bfmi, judge, nothing_to_fit
from loka_toolkit.artifacts.map_facts import FitHealth, Hyperparameter

GOOD = Hyperparameter("sqnr.shape", 2.0, 0.1, 1.8, 2.2, r_hat=1.002, ess_bulk=900.0, ess_tail=700.0)


def gate(change: dict[str, float], divergences: int = 0, energy: float = 0.9) -> FitHealth:
    import msgspec

    return judge(
        (GOOD, msgspec.structs.replace(GOOD, name="sqnr.grand_mean_db", **change)),
        divergences=divergences,
        bfmi=np.array([0.9, energy]),
        settings=SamplerSettings(),
        seconds=1.0,
    )


def test_a_good_fit_passes() -> None:
    found = gate({})
    assert found.healthy and not found.problems
    assert found.min_ess == 700.0


@pytest.mark.parametrize(
    ("change", "divergences", "energy", "word"),
    [
        ({"r_hat": 1.011}, 0, 0.9, "R-hat of sqnr.grand_mean_db is 1.011"),
        ({"ess_bulk": 399.0}, 0, 0.9, "399, below 400"),
        ({"ess_tail": 12.0}, 0, 0.9, "12, below 400"),
        ({"r_hat": math.nan}, 0, 0.9, "R-hat of sqnr.grand_mean_db is nan"),
        ({"ess_bulk": math.nan}, 0, 0.9, "nan, below"),
        ({}, 1, 0.9, "1 draws diverged"),
        ({}, 0, 0.29, "BFMI is 0.29"),
    ],
)
def test_every_gate_closes(
    change: dict[str, float], divergences: int, energy: float, word: str
) -> None:
    found = gate(change, divergences, energy)
    assert not found.healthy
    assert len(found.problems) == 1 and word in found.problems[0]


def test_bfmi_of_independent_energies_is_two_and_of_a_random_walk_near_zero() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2, 4000))
    np.testing.assert_allclose(bfmi(noise), 2.0, rtol=0.1)
    assert (bfmi(np.cumsum(noise, axis=1)) < 0.05).all()


def test_nothing_to_fit_is_no_problem() -> None:
    assert nothing_to_fit(SamplerSettings()).health.healthy
