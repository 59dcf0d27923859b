"""Speed-ups: measured before predicted, casts included, at the same shape."""

from __future__ import annotations

import pytest

from loka_toolkit.analysis.observations import SiteFacts
from loka_toolkit.analysis.speed import NO_SPEED, SpeedBook, measured_speedup
from loka_toolkit.artifacts.replay_results import ReplayFacts, ReplayResults, ReplayRow, Status
from loka_toolkit.artifacts.safety_map import SpeedEvidence
from loka_toolkit.artifacts.sites import SiteKey
from loka_toolkit.environment import current_environment
from loka_toolkit.errors import UnknownNameError

RECIPE = "e4m3/rowwise/fast"


def row(recipe: str, latency_us: float | None, **more: object) -> ReplayRow:
    values: dict[str, object] = dict.fromkeys(ReplayRow.__struct_fields__)
    values |= {"site": "a#0:fwd", "fqn": "a", "call": 0, "role": "fwd", "batch": 1}
    values |= {"m": 4096, "n": 1024, "k": 1024, "dtype": "bfloat16", "emulated": False}
    values |= {"candidate": recipe, "library": "torch", "recipe": recipe, "status": Status.OK}
    values |= {"draws": 2, "repetitions": 9, "inputs": "moments", "chip": "H200"}
    values |= {"workload_digest": "0", "latency_us": latency_us, **more}
    return ReplayRow(**values)  # type: ignore[arg-type]


def site(dtype: str = "bfloat16", **more: int) -> SiteFacts:
    shape = {"m": 16384, "n": 4096, "k": 4096, **more}
    key = SiteKey.parse("a#0:fwd")
    return SiteFacts(key, "Linear", "a.weight", True, 1, dtype=dtype, flops=1.0, **shape)


def results(*rows: ReplayRow) -> ReplayResults:
    facts = ReplayFacts("", current_environment(), "0", {}, "policy", "", True)
    return ReplayResults(tuple(rows), facts)


def test_the_fastest_default_is_what_must_be_beaten() -> None:
    rows = (row("bf16", 14.5), row("bf16", 16.0), row(RECIPE, 13.9), row(RECIPE, 20.0))
    assert measured_speedup(rows, RECIPE) == pytest.approx(14.5 / 13.9)


def test_more_exact_sums_serve_and_other_casts_do_not() -> None:
    rows = (
        row("bf16", 14.0),
        row("e4m3/rowwise/fp32", 10.0),
        row("e4m3/tensorwise/fast", 1.0),
        row("fp32", 100.0),
    )
    assert measured_speedup(rows, RECIPE) == pytest.approx(1.4)
    assert measured_speedup(rows, "e4m3/rowwise/fp32") == pytest.approx(1.4)
    exact_only = (row("bf16", 14.0), row(RECIPE, 10.0))
    assert measured_speedup(exact_only, "e4m3/rowwise/fp32") is None


def test_times_of_different_shapes_are_not_compared() -> None:
    small = {"m": 64}
    rows = (row("bf16", 4.0, **small), row(RECIPE, 5.0, **small), row("bf16", 90.0))
    assert measured_speedup(rows, RECIPE) == pytest.approx(0.8)
    assert measured_speedup(rows[:1] + rows[2:], RECIPE) is None


def test_measured_wins_over_predicted_and_failures_do_not_count() -> None:
    good = results(row("bf16", 14.0), row(RECIPE, 10.0))
    found = SpeedBook.of(good, "H200").speed(site(), RECIPE)
    assert found.evidence is SpeedEvidence.MEASURED and found.fast
    failed = results(row("bf16", 14.0), row(RECIPE, 1.0, status=Status.WRONG_NUMERICS))
    found = SpeedBook.of(failed, "H200").speed(site(), RECIPE)
    assert found.evidence is SpeedEvidence.PREDICTED
    emulated = results(row("bf16", 14.0), row(RECIPE, 1.0, emulated=True))
    assert SpeedBook.of(emulated, None).speed(site(), RECIPE) == NO_SPEED


def test_prediction_knows_large_from_small() -> None:
    book = SpeedBook.of(None, "H200")
    assert book.speed(site(), RECIPE).fast
    small = book.speed(site(m=256, n=64, k=64), RECIPE)
    assert small.evidence is SpeedEvidence.PREDICTED and not small.fast
    assert book.speed(site(dtype="float64"), RECIPE) == NO_SPEED


def test_unknown_chip_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="H200"):
        SpeedBook.of(None, "H20")
