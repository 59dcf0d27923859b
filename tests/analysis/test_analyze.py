"""From a trace to a map: whole runs, with the sampler and without."""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from loka_toolkit.analysis import analyze
from loka_toolkit.artifacts.map_facts import FitHealth
from loka_toolkit.artifacts.safety_map import Cell, Criterion, SafetyMap, Verdict
from loka_toolkit.artifacts.trace import Event
from loka_toolkit.errors import (
    ConfigurationError,
    MissingDependencyError,
    NoEvidenceError,
    NoMatchError,
    UnknownNameError,
)
from loka_toolkit.numerics.posterior import (
    NormalInverseGamma,
    Statistics,
    exceedance,
    update,
)
from loka_toolkit.numerics.tolerance import Tolerance

TENSORWISE, ROWWISE = "e4m3/tensorwise/fast", "e4m3/rowwise/fast"
SITE = "a#0:fwd"
GOOD = {
    "sqnr_db": 28.6,
    "row_sqnr_db_p05": 26.0,
    "relative_frobenius": 0.037,
    "underflow_share_worst_group": 1e-5,
}


def noisy(level: float, count: int = 15, sd: float = 0.1, seed: int = 0) -> np.ndarray:
    return level + sd * np.random.default_rng(seed).normal(size=count)


def only(safety: SafetyMap, site: str = SITE, recipe: str = TENSORWISE) -> Cell:
    cell = safety.cell(site, recipe)
    assert cell is not None
    return cell


# --- with the sampler -----------------------------------------------------------------------------


def test_a_realistic_map_is_healthy_and_divided(small_map: SafetyMap) -> None:
    facts = small_map.facts
    assert facts.health.healthy, facts.health.problems
    assert facts.false_discovery_rate <= 0.05
    assert len(small_map.cells) == 180
    found = {cell.verdict for cell in small_map.cells}
    assert found == set(Verdict)
    for cell in small_map.cells:
        assert cell.reason and "\n" not in cell.reason
        assert 0 <= cell.p_exceed_lo <= cell.p_exceed_hi <= 1 and 0 <= cell.p_exceed <= 1
        if cell.verdict is Verdict.SAFE:
            # No safe verdict within two Monte Carlo errors of the limit.
            assert cell.p_exceed_hi + 2 * cell.p_exceed_mcse < facts.tolerance.exceedance_rate
    assert sum(cell.flops_share for cell in small_map.cells) / 6 == pytest.approx(1.0)
    assert len(facts.scales) == 30
    assert {h.name.split(".")[0] for h in facts.hyperparameters} >= {"sqnr", "row_sqnr"}
    recipe = {h.name: h.mean for h in facts.hyperparameters}
    gap = recipe[f"sqnr.recipe[{TENSORWISE}]"] - recipe["sqnr.recipe[e5m2/tensorwise/fast]"]
    assert gap == pytest.approx(6.0, abs=0.5)  # simulated: 28.6 and 22.6 dB


def test_flushed_embeddings_are_unsafe_though_sqnr_passes(small_map: SafetyMap) -> None:
    flushed = [c for c in small_map.cells if c.underflow_share_worst_group == 1.0]
    assert flushed
    for cell in flushed:
        assert cell.verdict is Verdict.UNSAFE
        assert cell.binding_criterion == "underflow"
        assert "100 % of the elements of x[" in cell.reason and "limit 25 %" in cell.reason
        assert "would have passed" in cell.reason


def test_the_map_survives_saving(small_map: SafetyMap, tmp_path: Path) -> None:
    path = small_map.save(tmp_path / "safety.parquet")
    loaded = SafetyMap.load(path)
    assert loaded == small_map
    frame = loaded.to_frame()
    assert len(frame) == 180
    assert set(frame["verdict"]) == {v.value for v in Verdict}


def test_the_same_trace_and_seed_give_the_same_map(small_trace: Path, small_map: SafetyMap) -> None:
    again = analyze(small_trace)
    assert again.cells == small_map.cells
    assert again.facts.hyperparameters == small_map.facts.hyperparameters
    assert again.facts.scales == small_map.facts.scales


def test_posteriors_can_be_updated_without_the_analysis(small_map: SafetyMap) -> None:
    """What a training job does: start from the stored cell and add a step."""
    cell = next(c for c in small_map.cells if c.verdict is Verdict.SAFE)
    stored = cell.posteriors[Criterion.SQNR.value]
    before = NormalInverseGamma(
        *(np.asarray(getattr(stored, name)) for name in ("mu", "kappa", "alpha", "beta"))
    )
    after = before
    for _ in range(30):
        after = update(after, Statistics.of([stored.limit - 5.0]))
    assert exceedance(before, stored.limit) < 0.05 < exceedance(after, stored.limit)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 12])
def test_a_single_cell_is_sampled_too(write_cells, steps: int) -> None:
    path = write_cells({(SITE, TENSORWISE): GOOD}, count=steps)
    safety = analyze(path, chains=2, tune=300, draws=1000)
    assert safety.facts.health.healthy, safety.facts.health.problems
    cell = only(safety)
    assert cell.evidence_steps == steps
    expected = Verdict.SAFE if steps == 12 else Verdict.INSUFFICIENT
    assert cell.verdict is expected, cell.reason
    assert all(not h.name.startswith("sqnr.role") for h in safety.facts.hyperparameters)


# --- without the sampler --------------------------------------------------------------------------

AssumedFit = Callable[[FitHealth], None]


def test_raw_counts_beside_embeddings(assumed_fit: AssumedFit, write_cells) -> None:
    """Tensorwise E4M3 flushes every embedding, and the product still shows 29.6 dB."""
    flushed = GOOD | {
        "sqnr_db": noisy(29.6),
        "underflow_share_worst_group": 1.0,
        "underflow_worst_group": "x[0:16]",
    }
    path = write_cells({(SITE, TENSORWISE): flushed, (SITE, ROWWISE): GOOD})
    safety = analyze(path)
    cell = only(safety)
    assert cell.verdict is Verdict.UNSAFE
    assert cell.reason == (
        "underflow: 100 % of the elements of x[0:16] are flushed to zero, limit 25 %; "
        "SQNR 29.6 dB would have passed"
    )
    assert only(safety, recipe=ROWWISE).verdict is Verdict.SAFE
    (verdict,) = safety.site_verdicts()
    assert verdict.verdict is Verdict.SAFE and verdict.recipe == ROWWISE


def test_an_unhealthy_fit_calls_nothing_safe(
    assumed_fit: AssumedFit, unhealthy: FitHealth, write_cells
) -> None:
    bad = GOOD | {"sqnr_db": noisy(5.0)}
    path = write_cells({(SITE, TENSORWISE): GOOD, (SITE, ROWWISE): bad})
    assert only(analyze(path)).verdict is Verdict.SAFE
    assumed_fit(unhealthy)
    safety = analyze(path)
    assert only(safety).verdict is Verdict.INSUFFICIENT
    assert "R-hat of sqnr.shape is 1.070" in only(safety).reason
    assert only(safety, recipe=ROWWISE).verdict is Verdict.UNSAFE
    assert "nothing is called safe" in safety.facts.alerts[0]
    assert not safety.facts.health.healthy


def test_a_null_impact_neither_passes_nor_fails(assumed_fit: AssumedFit, write_cells) -> None:
    unknown = GOOD | {"impact_reason": "the loss is not separable"}
    known = GOOD | {"impact_first_order": 0.0, "impact_second_order": 1e-6, "impact_status": "ok"}
    costly = known | {"impact_second_order": 1e-2}
    path = write_cells(
        {("a#0:fwd", TENSORWISE): unknown, ("b#0:fwd", TENSORWISE): known,
         ("c#0:fwd", TENSORWISE): costly}
    )  # fmt: skip
    safety = analyze(path)
    null, cheap, dear = (only(safety, f"{name}#0:fwd") for name in "abc")
    assert null.verdict is Verdict.SAFE and null.impact is None
    assert "impact unknown (the loss is not separable), which decides nothing" in null.reason
    assert cheap.verdict is Verdict.SAFE
    assert cheap.impact == pytest.approx(1e-6 / 0.5)  # relative to the mean loss
    assert cheap.impact_allotment == pytest.approx(2e-4 / 3)
    assert dear.verdict is Verdict.UNSAFE and "surely more than the allotment" in dear.reason


def test_gradients_have_a_budget_of_their_own(assumed_fit: AssumedFit, write_cells) -> None:
    biased = GOOD | {"gradient_bias": noisy(-0.2, sd=0.001), "gradient_noise_ratio": 0.001}
    fine = GOOD | {"gradient_bias": noisy(0.0, sd=0.001), "gradient_noise_ratio": 0.001}
    path = write_cells({("a#0:wgrad", TENSORWISE): biased, ("b#0:wgrad", TENSORWISE): fine})
    safety = analyze(path)
    cell = only(safety, "a#0:wgrad")
    assert cell.verdict is Verdict.UNSAFE and "gradient bias -20 %, limit 2 %" in cell.reason
    assert cell.impact is None and cell.impact_allotment == 0.0
    assert only(safety, "b#0:wgrad").verdict is Verdict.SAFE


def test_beyond_validity_is_never_safe(assumed_fit: AssumedFit, write_cells) -> None:
    status = ["ok"] * 15
    beyond = GOOD | {"impact_second_order": 1e-7, "impact_first_order": 0.0}
    always = beyond | {"impact_status": "beyond-validity", "impact_reason": "a logit changes by 3"}
    once = beyond | {"impact_status": ["beyond-validity", *status[1:]]}
    path = write_cells({(SITE, TENSORWISE): always, (SITE, ROWWISE): once})
    safety = analyze(path)
    assert only(safety).verdict is Verdict.UNSAFE
    assert "a logit changes by 3" in only(safety).reason
    assert only(safety, recipe=ROWWISE).verdict is not Verdict.SAFE


@pytest.mark.parametrize("lost", [1, 15])
def test_non_finite_products_count_as_broken_steps(
    assumed_fit: AssumedFit, write_cells, lost: int
) -> None:
    sqnr = np.where(np.arange(15) < lost, -100.0, noisy(28.6))
    path = write_cells({(SITE, TENSORWISE): GOOD | {"sqnr_db": sqnr}, (SITE, ROWWISE): GOOD})
    cell = only(analyze(path))
    assert cell.evidence_steps == 15
    assert cell.verdict is (Verdict.UNSAFE if lost == 15 else Verdict.INSUFFICIENT)
    assert f"{lost} of 15 steps" in cell.reason and "non-finite" in cell.reason


def test_a_map_of_lost_products_needs_no_sampler(write_cells) -> None:
    lost = {"sqnr_db": -100.0, "row_sqnr_db_p05": None}
    safety = analyze(write_cells({(SITE, TENSORWISE): lost}))
    assert only(safety).verdict is Verdict.UNSAFE
    assert safety.facts.health.healthy


def test_products_that_are_zero_are_no_evidence(assumed_fit: AssumedFit, write_cells) -> None:
    zero = {"sqnr_db": None, "row_sqnr_db_p05": None}
    path = write_cells({(SITE, TENSORWISE): zero, (SITE, ROWWISE): GOOD})
    cell = only(analyze(path))
    assert cell.verdict is Verdict.INSUFFICIENT
    assert cell.p_exceed is None and cell.sqnr_db is None
    assert "no error of this product" in cell.reason


@pytest.mark.parametrize("count", [1, 2])
def test_few_steps_are_never_safe(assumed_fit: AssumedFit, write_cells, count: int) -> None:
    cell = only(analyze(write_cells({(SITE, TENSORWISE): GOOD}, count=count)))
    assert cell.verdict is Verdict.INSUFFICIENT
    assert f"{count} sampled step" in cell.reason


@pytest.mark.parametrize(("level", "verdict"), [(28.6, Verdict.SAFE), (2.0, Verdict.UNSAFE)])
def test_maps_of_one_verdict(
    assumed_fit: AssumedFit, write_cells, level: float, verdict: Verdict
) -> None:
    cells = {
        (f"layer{i}#0:fwd", recipe): GOOD | {"sqnr_db": noisy(level, seed=i)}
        for i in range(5)
        for recipe in (TENSORWISE, ROWWISE)
    }
    safety = analyze(write_cells(cells))
    assert {cell.verdict for cell in safety.cells} == {verdict}
    assert {site.verdict for site in safety.site_verdicts()} == {verdict}
    share = safety.facts.false_discovery_rate
    assert share == 0.0 if verdict is Verdict.UNSAFE else 0.0 <= share < 0.01
    named = [a for a in safety.facts.alerts if a.startswith("Unsafe under every recipe")]
    assert bool(named) == (verdict is Verdict.UNSAFE)


@pytest.mark.parametrize("value", [200.0, 28.6, 0.0, -99.0])
def test_constant_errors_are_judged(assumed_fit: AssumedFit, write_cells, value: float) -> None:
    constant = {"sqnr_db": value, "row_sqnr_db_p05": value, "saturation_share": 0.0}
    safety = analyze(write_cells({(SITE, TENSORWISE): constant, (SITE, ROWWISE): constant}))
    assert only(safety).verdict is (Verdict.SAFE if value > 20 else Verdict.UNSAFE)
    assert "saturation" in safety.facts.config["constant"]


def test_clipping_at_rare_steps_is_an_event(assumed_fit: AssumedFit, write_cells) -> None:
    clipped = np.where(np.arange(15) == 7, 0.02, 0.0)
    cells = {(f"layer{i}#0:fwd", TENSORWISE): GOOD for i in range(30)}
    cells[(SITE, TENSORWISE)] = GOOD | {"saturation_share": clipped}
    cell = only(analyze(write_cells(cells)))
    assert cell.verdict is Verdict.INSUFFICIENT
    assert cell.posteriors["saturation"].outlying_steps == 1
    assert "1 of 15 steps broke it as outliers" in cell.reason


def test_clipping_at_every_step_is_unsafe(assumed_fit: AssumedFit, write_cells) -> None:
    cell = only(analyze(write_cells({(SITE, TENSORWISE): GOOD | {"saturation_share": 0.02}})))
    assert cell.verdict is Verdict.UNSAFE
    assert cell.reason.startswith("saturation: 2 % of the elements are clipped, limit 0.1 %")


def test_a_fall_towards_the_limit_is_not_safe(assumed_fit: AssumedFit, write_cells) -> None:
    falling = noisy(0.0, sd=0.02) + np.linspace(25.0, 22.0, 15)
    cells = {(SITE, TENSORWISE): GOOD | {"sqnr_db": falling}, (SITE, ROWWISE): GOOD}
    cell = only(analyze(write_cells(cells)))
    assert cell.drift_db_per_1000_steps == pytest.approx(-3.0 / 1.4, abs=0.05)
    assert cell.verdict is Verdict.INSUFFICIENT


def test_other_seeds_flip_no_verdict_to_its_opposite(assumed_fit: AssumedFit, write_cells) -> None:
    cells = {
        (f"layer{i}#0:fwd", TENSORWISE): GOOD | {"sqnr_db": noisy(20.5 + 0.1 * i, sd=1.0, seed=i)}
        for i in range(40)
    }
    path = write_cells(cells)
    first, second = (analyze(path, seed=seed) for seed in (0, 1))
    assert first.cells != second.cells
    changed = [
        {a.verdict, b.verdict}
        for a, b in zip(first.cells, second.cells, strict=True)
        if a.verdict is not b.verdict
    ]
    assert {Verdict.SAFE, Verdict.UNSAFE} not in changed
    assert len(changed) <= 3


def test_what_happened_is_told_first(assumed_fit: AssumedFit, write_cells) -> None:
    steps = {
        "step": [0, 100, 200, 300],
        "status": ["recorded", "recorded", "nonfinite", "recorded"],
        "mean_loss": [0.5, 0.7, None, None],
        "loss": [0.5, 0.7, None, None],
        "loss_scale": [1.0] * 4,
        "gemm_flops_seen": [1e9] * 4,
        "gemm_flops_unseen": [1e9, 1e9, 0.0, 1e9],
        "unseen_reason": ['{"scatter": 1e9}'] * 4,
    }
    path = write_cells(
        {(SITE, TENSORWISE): GOOD},
        count=4,
        steps=steps,
        events=[Event("nonfinite-step", "step 200 is not finite")],
        closed=False,
    )
    facts = analyze(path).facts
    assert facts.coverage.steps_recorded == 3 and facts.coverage.steps_skipped == 1
    assert facts.coverage.unseen_reasons == {"scatter": 1e9}
    assert facts.baseline_loss == pytest.approx(0.6)
    text = "\n".join(facts.alerts)
    for part in ("not closed", "step 200 is not finite", "1 sampled step was skipped", "Only 3"):
        assert part in text
    assert "50% of the GEMM FLOPs were not seen: scatter 50%" in text


def test_work_that_was_not_judged_or_repeated_is_told(assumed_fit: AssumedFit, write_cells) -> None:
    steps = {
        "step": [0, 100],
        "status": ["recorded"] * 2,
        "loss_scale": [1.0] * 2,
        "gemm_flops_seen": [4e9] * 2,
        "gemm_flops_not_judged": [2e9, 4e9],
        "not_judged_reason": ['{"fused attention": 2e9}', '{"fused attention": 4e9}'],
        "gemm_flops_repeated": [3e9] * 2,
        "repeated_reason": ['{"micro-batch": 1e9, "recompute": 2e9}'] * 2,
    }
    facts = analyze(write_cells({(SITE, TENSORWISE): GOOD}, count=2, steps=steps)).facts
    coverage = facts.coverage
    assert coverage.flops_not_judged == 3e9 and coverage.flops == 10e9
    assert coverage.not_judged_reasons == {"fused attention": 3e9}
    assert coverage.repeated_reasons == {"micro-batch": 1e9, "recompute": 2e9}
    text = "\n".join(facts.alerts)
    assert "30% of the GEMM FLOPs were seen and not judged: fused attention 30%." in text
    assert "not seen" not in text and "micro-batch" not in text


def test_progress_is_told(assumed_fit: AssumedFit, write_cells) -> None:
    told: list[tuple[str, int, int]] = []
    path = write_cells({(SITE, TENSORWISE): GOOD})
    analyze(path, progress=lambda *what: told.append(what))
    assert told == [("analyze", done, 4) for done in range(5)]


# --- refusals -------------------------------------------------------------------------------------


def test_bad_arguments_are_named(small_trace: Path) -> None:
    with pytest.raises(UnknownNameError, match="e4m3/rowwise/fast"):
        analyze(small_trace, recipes=["e4m3/rowise/fast"])
    with pytest.raises(NoMatchError, match="nothing-like-it"):
        analyze(small_trace, include=["nothing-like-it"])
    with pytest.raises(UnknownNameError, match="chip"):
        analyze(small_trace, chip="B9000")
    with pytest.raises(ConfigurationError, match="chains = 1"):
        analyze(small_trace, chains=1)
    with pytest.raises(ConfigurationError, match="seed = -1"):
        analyze(small_trace, seed=-1)
    with pytest.raises(ConfigurationError, match="exceedance_rate"):
        analyze(small_trace, tolerance=Tolerance(exceedance_rate=2.0))


def test_a_trace_without_evidence_says_why(simulator, tmp_path: Path) -> None:
    nothing = {"step": [], "site": [], "recipe": []}
    site = simulator.SimulatedSite.named(SITE)
    event = Event("schedule-never-active", "the schedule was active at no step")
    path = simulator.write_trace(tmp_path / "t", [site], nothing, events=[event])
    with pytest.raises(NoEvidenceError, match="the schedule was active at no step"):
        analyze(path)


@pytest.mark.parametrize("package", ["pymc", "nutpie", "arviz"])
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, small_trace: Path, package: str
) -> None:
    real = builtins.__import__

    def blocked(name: str, *args: object, **kwargs: object) -> object:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=package)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(MissingDependencyError, match=rf"{package}.*loka-toolkit\[analyze\]"):
        analyze(small_trace)


def test_facts_of_a_verdict_are_plain_numbers(small_map: SafetyMap) -> None:
    """Maps are written and read strictly: no NumPy scalar may hide in a cell."""
    for cell in small_map.cells[:20]:
        for name in cell.__struct_fields__:
            value = getattr(cell, name)
            assert not isinstance(value, np.generic), name
    assert dataclasses.is_dataclass(small_map)
