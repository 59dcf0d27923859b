from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest

from loka_toolkit.artifacts import dispatch_table as dt
from loka_toolkit.artifacts import storage
from loka_toolkit.artifacts import trace as tr
from loka_toolkit.artifacts.map_facts import Coverage
from loka_toolkit.artifacts.safety_map import SafetyMap, SpeedEvidence, Verdict
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.reporting.alert_view import Level
from loka_toolkit.reporting.view import Inputs, build_view

DASH = "\N{EN DASH}"
replace = msgspec.structs.replace


def texts(view, level=None):
    return [a.text for a in view.alerts if level is None or a.level is level]


def changed(safety: SafetyMap, **changes) -> SafetyMap:
    return SafetyMap(tuple(replace(c, **changes) for c in safety.cells), safety.facts)


@pytest.fixture
def view(artifacts):
    inputs = Inputs(artifacts.safety, artifacts.trace, artifacts.replay, artifacts.table)
    return build_view(inputs)


def test_tally_counts_sites_and_flops_as_counted_from_the_frame(artifacts, view):
    frame = artifacts.safety.to_frame()
    sites = frame.groupby("site").agg(
        safe=("verdict", lambda v: (v == "safe").any()),
        unsafe=("verdict", lambda v: (v == "unsafe").all()),
        flops=("flops_share", "first"),
        fast=("fast", "any"),
    )
    expected = {
        "safe": sites[sites.safe],
        "unsafe": sites[sites.unsafe],
        "insufficient-evidence": sites[~sites.safe & ~sites.unsafe],
    }
    for tally in view.overview.tallies:
        chosen = expected[tally.mark.name]
        assert tally.sites == len(chosen) > 0
        assert tally.flops.raw == pytest.approx(chosen.flops.sum())
        assert f"{len(chosen)} {tally.mark.name}" in view.overview.sentence
    assert view.overview.fast_sites == sites.fast.sum()
    assert view.overview.fast_flops.raw == pytest.approx(sites[sites.fast].flops.sum())


def test_bars_split_all_flops_over_roles(view):
    bars = view.overview.bars
    assert bars.labels == ("all", "fwd", "dgrad", "wgrad")
    for column in range(3):
        assert bars.shares[0][column] == pytest.approx(sum(row[column] for row in bars.shares[1:]))
    assert math.fsum(bars.shares[0]) == pytest.approx(1.0)


def test_budget_adds_forward_sites_under_their_recipes(artifacts, view):
    safe = [v for v in artifacts.safety.site_verdicts() if v.recipe and v.role == "fwd"]
    cells = [artifacts.safety.cell(v.site, v.recipe) for v in safe]
    budget = view.overview.budget
    assert budget.total.raw == pytest.approx(sum(c.impact for c in cells))
    assert budget.upper.raw == pytest.approx(sum(c.impact_hi for c in cells))
    assert budget.used.raw == pytest.approx(budget.total.raw / 2e-4)
    assert budget.within is True


def test_unknown_impacts_are_said_not_counted_as_none(make_map):
    view = build_view(Inputs(changed(make_map(), impact=None, impact_reason="grouping unknown")))
    assert view.overview.budget.total.raw is None
    assert "not known for any" in view.overview.budget.statement
    forward = next(c for c in view.cells if c.role == "fwd")
    assert (forward.impact, forward.impact_detail) == (DASH, "grouping unknown")


def test_overspent_budget_is_an_alert(make_map):
    view = build_view(Inputs(changed(make_map(), impact=1e-3)))
    assert view.overview.budget.within is False
    assert any("cost more than the budget" in text for text in texts(view, Level.WARNING))


def test_every_cell_has_one_row_with_its_own_anchor(artifacts, view):
    assert len(view.cells) == len(artifacts.safety.cells)
    assert len({c.anchor for c in view.cells}) == len(view.cells)
    for row, cell in zip(view.cells, artifacts.safety.cells, strict=True):
        assert (row.site, row.recipe, row.mark.name) == (cell.site, cell.recipe, cell.verdict)
        assert row.p_exceed.raw == cell.p_exceed
        assert row.mark.symbol == cell.verdict.symbol


def test_grid_has_a_place_for_every_recipe(make_map):
    safety = make_map()
    thinned = SafetyMap(safety.cells[1:], safety.facts)
    view = build_view(Inputs(thinned))
    assert view.sites[0].cells[0] is None
    assert all(len(site.cells) == len(view.recipes) for site in view.sites)
    strange = SafetyMap((replace(safety.cells[0], recipe="bf16"),), safety.facts)
    assert build_view(Inputs(strange)).recipes[-1] == "bf16"


def test_spent_share_of_a_gradient_site_is_the_larger_of_bias_and_noise(make_map):
    safety = changed(make_map(), gradient_bias=-0.01, gradient_noise_ratio=0.01)
    row = next(c for c in build_view(Inputs(safety)).cells if c.role == "dgrad")
    assert row.impact_share.raw == pytest.approx(0.01 / 0.02)
    assert row.impact.startswith("bias \N{MINUS SIGN}1.0")


def test_healthy_complete_measured_map_raises_no_alert(make_map):
    coverage = Coverage(1e9, 0.0, {}, 40, 0)
    safety = make_map(alerts=(), coverage=coverage)
    safety = changed(safety, speedup_evidence=SpeedEvidence.MEASURED)
    assert build_view(Inputs(safety)).alerts == ()


def test_coverage_tells_seen_not_judged_repeated_and_unseen_apart(make_map):
    unseen, not_judged = {"custom op": 1e9}, {"fused attention": 3e9}
    coverage = Coverage(5e9, 1e9, unseen, 40, 0, 3e9, not_judged, 1e9, {"micro-batch": 1e9})
    view = build_view(Inputs(make_map(coverage=coverage)))
    for part in ("50", "30", "belong to sites that are not judged", "10", "running again"):
        assert part in view.coverage
    assert view.not_judged[0].startswith("fused attention: 30")
    assert view.repeated[0].startswith("micro-batch: 10")
    assert view.unseen[0].startswith("custom op: 10")
    whole = build_view(Inputs(make_map(coverage=Coverage(1e9, 0.0, {}, 40, 0))))
    assert "not judged" not in whole.coverage and "again" not in whole.coverage
    assert whole.not_judged == whole.repeated == ()


def test_unhealthy_fit_comes_first(make_map):
    health = replace(
        make_map().facts.health, healthy=False, problems=("R-hat 1.2 of tau",), max_r_hat=1.2
    )
    view = build_view(Inputs(make_map(health=health)))
    first = view.alerts[0]
    assert (first.level, first.items, first.target) == (Level.DANGER, health.problems, "trust")
    assert [g.passed for g in view.health.gates] == [False, True, True, True]


def test_fit_problems_are_said_once_and_nothing_else_is_dropped(make_map):
    health = replace(make_map().facts.health, healthy=False, problems=("R-hat 1.2", "ESS 6"))
    alerts = ("Unhealthy: R-hat 1.2; ESS 6.", "R-hat 1.2 only", "another")
    found = texts(build_view(Inputs(make_map(health=health, alerts=alerts))))
    assert "Unhealthy: R-hat 1.2; ESS 6." not in found
    assert {"R-hat 1.2 only", "another"} <= set(found)


def test_cell_that_is_unsafe_for_its_impact_alone_is_marked(make_map):
    safety = make_map()
    low = changed(safety, verdict=Verdict.UNSAFE, p_exceed=0.014, p_exceed_lo=0.001)
    assert all(cell.by_impact for cell in build_view(Inputs(low)).cells)
    high = changed(safety, verdict=Verdict.UNSAFE, p_exceed=0.9, p_exceed_lo=0.5)
    assert not any(cell.by_impact for cell in build_view(Inputs(high)).cells)
    fine = changed(safety, verdict=Verdict.SAFE, p_exceed_lo=0.001)
    assert not any(cell.by_impact for cell in build_view(Inputs(fine)).cells)


def test_alerts_of_the_map_and_what_was_not_seen_are_alerts(view):
    assert any("N = 1 is not a multiple" in text for text in texts(view, Level.WARNING))
    unseen = next(a for a in view.alerts if "were not seen" in a.text)
    assert "6.0" in unseen.text
    assert [item.split(":")[0] for item in unseen.items] == [
        "aten._scaled_dot_product_attention",
        "custom op",
    ]
    assert any("2 sampled steps skipped" in text for text in texts(view))
    assert any("No speed was measured" in text for text in texts(view, Level.NOTE))
    order = [list(Level).index(a.level) for a in view.alerts]
    assert order == sorted(order)


def test_nothing_seen_is_a_danger(make_map):
    view = build_view(Inputs(make_map(coverage=Coverage(0.0, 0.0, {}, 0, 0))))
    assert "No GEMM was seen at any sampled step." in texts(view, Level.DANGER)


def test_false_discovery_rate_above_the_limit_is_an_alert(make_map):
    view = build_view(Inputs(make_map(false_discovery_rate=0.08)))
    assert any("share of wrong safe verdicts" in text for text in texts(view, Level.WARNING))


def test_artifacts_that_do_not_belong_together_are_alerts(artifacts, make_map):
    other = make_map(trace_digest="f" * 64)
    inputs = Inputs(
        other,
        artifacts.trace,
        artifacts.replay,
        artifacts.table,
        digests={"safety map": "2" * 64},
    )
    found = texts(build_view(inputs), Level.WARNING)
    assert any("The trace given is not the one" in text for text in found)
    assert any("replay results belong to another trace" in text for text in found)
    assert any("built from another safety map" in text for text in found)


def test_artifacts_that_belong_together_raise_no_such_alert(artifacts):
    inputs = Inputs(artifacts.safety, artifacts.trace, artifacts.replay, artifacts.table)
    inputs = dataclasses.replace(inputs, digests={"safety map": artifacts.table.safety_digest})
    assert not [a for a in build_view(inputs).alerts if a.target == "provenance"]


def test_events_of_the_trace_and_a_broken_replay_are_alerts(
    tmp_path, make_map, make_trace, make_replay
):
    safety = make_map()
    event = tr.Event("nonfinite-step", "the loss was NaN", step=7, count=3)
    trace = make_trace(tmp_path / "t", safety, steps=(1, 2), events=(event,))
    replay = make_replay(safety, complete=False)
    found = texts(build_view(Inputs(safety, trace, replay)), Level.WARNING)
    assert "nonfinite-step at step 7: the loss was NaN (3 times)" in found
    assert any("broken off" in text for text in found)


def test_empty_map_says_so():
    from loka_toolkit.artifacts.safety_map import SafetyMap as Map

    facts = _facts_of_nothing()
    view = build_view(Inputs(Map((), facts)))
    assert texts(view, Level.DANGER) == ["The map holds no cells: nothing was judged."]
    assert view.overview.bars is None
    assert view.cells == view.sites == ()
    assert "No site was judged" in view.overview.sentence


def _facts_of_nothing():
    from loka_toolkit.artifacts.map_facts import FitHealth, MapFacts
    from loka_toolkit.environment import current_environment
    from loka_toolkit.numerics.tolerance import Tolerance

    here = current_environment()
    return MapFacts(
        "2025-01-01", here, here, "0" * 64, {}, Tolerance(), {}, (), None, 0.0,
        FitHealth(True, (), 1.0, 1000.0, 0, 0.9, 4, 1000, 1.0), (), (),
        Coverage(1.0, 0.0, {}, 1, 0), (),
    )  # fmt: skip


def test_details_show_what_is_not_safe_first_and_say_what_was_cut(artifacts):
    inputs = Inputs(artifacts.safety, artifacts.trace)
    view = build_view(inputs, top=4)
    names = [card.row.mark.name for card in view.details.cards]
    assert sorted(names[:2]) == ["insufficient-evidence", "unsafe"]
    assert names[2:] == ["safe", "safe"]
    rest = [card.row.flops.raw for card in view.details.cards[2:]]
    assert (
        rest == sorted((s.flops.raw for s in view.sites if s.mark.name == "safe"), reverse=True)[:2]
    )
    assert "4 sites of 18" in view.details.note
    assert "Cut: 14 sites (14 safe)" in view.details.note
    assert "None was cut" in build_view(inputs, top=18).details.note
    assert build_view(inputs, top=0).details.cards == ()


def test_negative_top_is_refused(artifacts):
    with pytest.raises(ConfigurationError, match="top = -1"):
        build_view(Inputs(artifacts.safety), top=-1)


def test_cards_hold_both_operands_and_the_errors(view):
    roles = {
        "fwd": ["x", "w"],
        "dgrad": ["g", "w"],
        "wgrad": ["g", "x"],
    }
    assert len(view.details.cards) == 18
    for card in view.details.cards:
        assert [h.operand for h in card.histograms] == roles[card.row.role]
        assert card.series
        assert card.absent == ()


def test_card_of_a_safe_site_shows_the_recipe_that_made_it_safe(artifacts, view):
    verdicts = {v.site: v for v in artifacts.safety.site_verdicts()}
    for card in view.details.cards:
        verdict = verdicts[card.row.site]
        if verdict.verdict is Verdict.SAFE:
            assert card.recipe == verdict.recipe
        assert card.reason == artifacts.safety.cell(card.row.site, card.recipe).reason


def test_without_a_trace_the_sections_say_so(artifacts):
    view = build_view(Inputs(artifacts.safety))
    assert view.norms is None
    assert view.unjudged is None
    assert "none was given" in view.details.note
    assert view.replay is None
    assert view.table is None


def test_site_that_the_trace_does_not_hold_gets_sentences(artifacts, make_map):
    other = make_map(modules=(("elsewhere", "Linear", (13, 117, 39)),))
    view = build_view(Inputs(other, artifacts.trace))
    for card in view.details.cards:
        assert card.histograms == card.series == ()
        assert len(card.absent) >= 3
        assert all(text.startswith("No ") for text in card.absent)


def test_norm_sites_and_products_without_a_verdict_are_listed(view):
    (norm,) = view.norms
    assert norm.site == "query_tower.1#0:norm"
    # One of forty steps has six times the spread: its variance is 36 times the median's.
    assert norm.spike.raw == pytest.approx(36, rel=0.25)
    (unjudged,) = view.unjudged
    assert unjudged.site == "attention#0:fwd"
    assert not unjudged.dispatchable
    assert unjudged.reason == "fused attention"


def test_tolerance_has_a_reason_for_each_number(artifacts, view):
    fields = artifacts.safety.facts.tolerance.__struct_fields__
    assert [row.name for row in view.tolerance] == list(fields)
    reasons = artifacts.safety.facts.tolerance_reasons
    for row in view.tolerance:
        assert row.reason == reasons.get(row.name, "No reason was recorded for this number.")
    assert {row.name: row.value for row in view.tolerance}["relative_log_loss"] == "0.020 %"


def test_scales_have_a_row_per_format_with_its_overflow(artifacts, view):
    assert len(view.scales) == 2 * len(artifacts.safety.facts.scales)
    assert {row.format for row in view.scales} == {"e4m3", "e5m2"}
    assert all(row.overflow.raw == 1.3e-9 for row in view.scales)


def test_no_overflow_is_ever_called_impossible(make_map):
    scales = tuple(
        replace(s, overflow_probability={"e4m3": 0.0, "e5m2": 1e-300})
        for s in make_map().facts.scales
    )
    view = build_view(Inputs(make_map(scales=scales)))
    assert {row.overflow.text for row in view.scales} == {"<\N{NARROW NO-BREAK SPACE}10⁻¹²"}


def test_replay_counts_every_row_once(artifacts, view):
    assert sum(view.replay.totals) == len(artifacts.replay.rows)
    for candidate in view.replay.candidates:
        rows = [r for r in artifacts.replay.rows if r.candidate == candidate.candidate]
        assert sum(candidate.statuses) == len(rows)
        good = [r.kernel_sqnr_db for r in rows if r.kernel_sqnr_db is not None]
        assert candidate.kernel_sqnr.raw == (min(good) if good else None)
    assert sum(c.emulated for c in view.replay.candidates) == 1


def test_table_counts_entries_and_misses_per_role_and_reason(artifacts, view):
    table = artifacts.table
    assert sum(row.entries for row in view.table.roles) == len(table.entries)
    assert sum(row.misses for row in view.table.roles) == len(table.misses)
    assert [row.role for row in view.table.roles] == ["fwd", "dgrad", "wgrad"]
    counted = {row.reason: row.sites for row in view.table.misses}
    for reason, number in counted.items():
        assert number == sum(miss.reason == reason for miss in table.misses)
    assert view.table.validators[0] == ("chip", "H200", "refused")
    assert view.table.validators[1] == ("driver", DASH, "used with a warning")


def test_environments_stand_side_by_side_and_differences_are_marked(view):
    rows = {name: differs for name, _, differs in view.environments.rows}
    assert rows["chip"] is True
    assert rows["python"] is False
    assert view.environments.columns == ("recording", "analysis", "replay", "dispatch table")


def test_missing_numbers_everywhere_are_dashes(make_map):
    safety = changed(
        make_map(),
        sqnr_db=None, sqnr_db_lo=None, sqnr_db_hi=None, p_exceed=None, p_exceed_lo=None,
        p_exceed_hi=None, impact=None, impact_hi=None, impact_lo=None, speedup=None,
        gradient_bias=None, gradient_noise_ratio=None, drift_db_per_1000_steps=math.nan,
        binding_criterion=None, flops_share=math.nan, evidence_effective=math.nan,
        speedup_evidence=SpeedEvidence.NONE, posteriors={},
    )  # fmt: skip
    view = build_view(Inputs(safety))
    for cell in view.cells:
        assert {cell.p_exceed.text, cell.sqnr.text, cell.speedup.text, cell.impact} == {DASH}
        assert cell.speed_evidence == "not measured"
        assert "nan" not in " ".join(cell.notes)
    assert "No speed-up is known" in view.overview.speed_sentence


def test_roles_are_in_the_order_of_the_step_and_unknown_ones_last(make_map):
    safety = make_map()
    cells = tuple(replace(c, role="<odd>") if c.role == "dgrad" else c for c in safety.cells)
    view = build_view(Inputs(SafetyMap(cells, safety.facts)))
    assert view.roles == ("fwd", "wgrad", "<odd>")
    assert view.overview.bars.labels == ("all", "fwd", "wgrad", "other")
    assert Role.FWD == view.roles[0]


def test_reasons_of_skipped_steps_stand_under_the_alert(tmp_path, make_map, make_trace):
    safety = make_map()
    trace = make_trace(tmp_path / "t", safety, steps=(1, 2))
    rows = trace.steps.to_pylist()
    for row, step in zip(rows, (3, 4), strict=True):
        row |= {"step": step, "status": "nonfinite", "reason": "the loss is NaN"}
    part = storage.part_path(trace.path / "steps", 0, 1)
    table = storage.table_from_rows(tr.STEPS, rows)
    storage.write_table(part, table, tr.STEPS, kind=storage.part_kind(tr.STEPS))
    view = build_view(Inputs(safety, tr.Trace.open(trace.path)))
    alert = next(a for a in view.alerts if "2 sampled steps skipped" in a.text)
    assert alert.items == ("nonfinite: the loss is NaN (2)",)


def test_cast_plans_are_summed_up(artifacts, make_table):
    def operand(by):
        return dt.OperandPlan(by, "static", ("e4m3",), ("row",), "fp8")

    layers = (
        dt.LayerPlan("a", 0, {"x": operand("producer"), "w": operand("kernel")}, ("norm",)),
        dt.LayerPlan("b", "*", {"x": operand("kernel"), "g": operand("none")}),
    )
    table = make_table(artifacts.safety, layers=layers)
    view = build_view(Inputs(artifacts.safety, table=table))
    casts = "2 cast by kernel and 1 cast by producer"
    assert view.table.plans == f"2 layers with a cast plan: {casts}; 1 producer fused."
    without = build_view(Inputs(artifacts.safety, table=artifacts.table))
    assert without.table.plans == ""


def test_what_the_map_says_itself_is_not_said_twice(tmp_path, make_map, make_trace):
    alerts = (
        "6% of the GEMM FLOPs were not seen: custom op 6%.",
        "2 sampled steps were skipped as non-finite or failed; 40 were recorded.",
        "Recorder, rank 0: the loss was NaN (3 times)",
    )
    safety = make_map(alerts=alerts)
    event = tr.Event("nonfinite-step", "the loss was NaN", step=7, count=3)
    trace = make_trace(tmp_path / "t", safety, steps=(1, 2), events=(event,))
    safety = make_map(alerts=alerts, trace_digest=trace.digest)
    assert texts(build_view(Inputs(safety, trace)), Level.WARNING) == list(alerts)
