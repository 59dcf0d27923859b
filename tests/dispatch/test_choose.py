"""Choosing, case by case, from evidence made by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_toolkit.artifacts.dispatch_table import MissReason, Objective
from loka_toolkit.artifacts.sites import Operand, Role
from loka_toolkit.dispatch.choose import choose, token_interval
from loka_toolkit.dispatch.options import Evidence, problem_of
from loka_toolkit.dispatch.plans import Cast, casts_of, layer_plan, shared_cast_saving_us
from loka_toolkit.kernels.contract import Chip
from loka_toolkit.numerics.recipes import parse_recipe

CHIP = Chip("cpu", None)
FAST, EXACT = "e4m3/tensorwise/fast", "e4m3/tensorwise/fp32"
ROWWISE = "e4m3/rowwise/fast"
STATIC = "e4m3/static/fast"


def decide(cells, candidates, objective=Objective.COVERAGE, rows=None, scales=(), **options):
    evidence = Evidence(
        chip=CHIP,
        candidates=candidates,
        rows=None if rows is None else {(r.site, r.candidate): r for r in rows},
        scales={(s.layer, s.operand): s for s in scales},
        check_installed=options.pop("check_installed", True),
    )
    return choose(cells, evidence, objective, baselines=rows or (), **options)


def reasons(choice):
    return {f"{m.fqn}#{m.call}:{m.role}": m.reason for m in choice.misses}


def test_a_safe_site_gets_the_candidate_whose_recipe_is_covered(made):
    choice = decide([made.cell("a#0:fwd", FAST)], [made.FakeCandidate(EXACT)])
    (entry,) = choice.entries
    assert entry.candidate == f"fake.gemm/{EXACT}" and entry.recipe == EXACT
    assert entry.evidence.recipe_judged == FAST
    assert (entry.fqn, entry.call, entry.role) == ("a", "*", "fwd")
    assert (entry.m, entry.n, entry.k, entry.token_axis) == (None, 48, 32, "m")
    assert (entry.tokens_min, entry.tokens_max) == (1, 128)
    assert entry.evidence.statement.startswith("not measured as faster")
    assert entry.evidence.numerics == "none" and entry.library_version == "1.0"
    assert not choice.misses


@pytest.mark.parametrize("judged", [EXACT, ROWWISE, "e5m2/tensorwise/fast", STATIC])
def test_a_verdict_on_another_recipe_lets_nothing_in(made, judged):
    choice = decide([made.cell("a#0:fwd", judged)], [made.FakeCandidate(FAST)])
    assert not choice.entries
    assert reasons(choice) == {"a#0:fwd": MissReason.KERNEL_ABSENT}


CASES = {
    "unsafe": ([("a#0:fwd", FAST, "unsafe", {})], {}, MissReason.UNSAFE),
    "insufficient": (
        [("a#0:fwd", FAST, "insufficient-evidence", {}), ("a#0:fwd", ROWWISE, "unsafe", {})],
        {},
        MissReason.INSUFFICIENT,
    ),
    "convolution": (
        [("a#0:fwd", FAST, "safe", {"module_type": "Conv1d", "dispatchable": False})],
        {},
        MissReason.NOT_REPLACEABLE,
    ),
    "activations": (
        [("a#0:fwd", FAST, "safe", {"weight": None, "batch": 8})],
        {},
        MissReason.NOT_REPLACEABLE,
    ),
    "fused": (
        [("a#0:fwd", FAST, "safe", {"dispatchable": False})],
        {},
        MissReason.NOT_REPLACEABLE,
    ),
    "emulated": ([("a#0:fwd", FAST, "safe", {})], {"emulated": True}, MissReason.KERNEL_ABSENT),
    "role": (
        [("a#0:fwd", FAST, "safe", {})],
        {"roles": frozenset((Role.WGRAD,))},
        MissReason.KERNEL_ABSENT,
    ),
    "absent": ([("a#0:fwd", FAST, "safe", {})], {"installed": None}, MissReason.KERNEL_ABSENT),
    "shape": ([("a#0:fwd", FAST, "safe", {})], {"refusal": "K % 16"}, MissReason.SHAPE),
    "no scale": ([("a#0:fwd", STATIC, "safe", {})], {"recipe": STATIC}, MissReason.INSUFFICIENT),
    "two calls, one safe": (
        [("a#0:fwd", FAST, "safe", {}), ("a#1:fwd", FAST, "unsafe", {})],
        {},
        MissReason.CONFLICT,
    ),
    "two calls, no recipe in common": (
        [("a#0:fwd", FAST, "safe", {}), ("a#1:fwd", ROWWISE, "safe", {})],
        {},
        MissReason.CONFLICT,
    ),
    "two calls, two widths": (
        [("a#0:fwd", FAST, "safe", {}), ("a#1:fwd", FAST, "safe", {"k": 33})],
        {},
        MissReason.CONFLICT,
    ),
    "two calls, two dtypes": (
        [("a#0:fwd", FAST, "safe", {}), ("a#1:fwd", FAST, "safe", {"dtype": "bfloat16"})],
        {},
        MissReason.CONFLICT,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_site_without_an_entry_is_a_miss_with_its_reason(made, name):
    sites, changes, expected = CASES[name]
    cells = [made.cell(site, recipe, verdict, **more) for site, recipe, verdict, more in sites]
    choice = decide(cells, [made.FakeCandidate(**{"recipe": FAST, **changes})])
    assert not choice.entries and not choice.layers
    assert reasons(choice) == dict.fromkeys((c.site for c in cells), expected)
    assert all(len(miss.detail) > 10 for miss in choice.misses)


def test_details_name_the_numbers(made):
    cells = [made.cell("a#0:fwd", FAST, "unsafe", p_exceed=0.4, reason="SQNR 12 dB < 20 dB")]
    (miss,) = decide(cells, [made.FakeCandidate(FAST)]).misses
    assert miss.detail == f"{FAST}, its best recipe: SQNR 12 dB < 20 dB"
    (miss,) = decide(
        [made.cell("a#0:fwd", FAST)], [made.FakeCandidate(FAST, refusal="K = 13 % 16")]
    ).misses
    assert "K = 13 % 16" in miss.detail and "fake.gemm" in miss.detail


def test_every_call_of_a_module_says_what_it_is_itself(made):
    root = {"module_type": "DLRM", "batch": 1}
    cells = [
        made.cell("(root)#0:fwd", FAST, "unsafe", **root, weight="raw"),
        made.cell("(root)#1:fwd", ROWWISE, **root, weight=None),
        made.cell("(root)#2:fwd", FAST, **root, weight=None, dispatchable=False),
        made.cell("a#0:fwd", FAST),
        made.cell("a#1:fwd", FAST, weight=None),
        made.cell("b#0:fwd", FAST, batch=8),
    ]
    choice = decide(cells, [made.FakeCandidate(FAST)])
    assert not choice.entries
    found = {f"{m.fqn}#{m.call}": (m.reason, m.detail) for m in choice.misses}
    for layer, reason, detail in (
        ("(root)#0", MissReason.UNSAFE, "its best recipe"),
        ("(root)#1", MissReason.KERNEL_ABSENT, "no candidate computes fwd in e4m3/rowwise/fast"),
        ("(root)#2", MissReason.NOT_REPLACEABLE, "no kernel can stand in"),
        ("a#0", MissReason.CONFLICT, "run together, and call 1 cannot be replaced"),
        ("a#1", MissReason.NOT_REPLACEABLE, "a product of two activations in an nn.Linear"),
        ("b#0", MissReason.NOT_REPLACEABLE, "fwd with a batch of 8"),
    ):
        assert found[layer][0] is reason and detail in found[layer][1]
    assert "activations" not in found["(root)#0"][1]


def test_the_candidate_that_came_furthest_says_why(made):
    cells = [made.cell("a#0:fwd", FAST)]
    gone = made.FakeCandidate(FAST, library="gone", installed=None)
    picky = made.FakeCandidate(FAST, library="picky", refusal="exists on CUDA only")
    wrong = made.FakeCandidate(FAST, library="wrong")
    rows = [made.row("a#0:fwd", wrong.name, "wrong-numerics")]
    for kernels, reason, name in (
        ([gone], MissReason.KERNEL_ABSENT, "gone"),
        ([gone, gone, picky], MissReason.SHAPE, "picky"),
        ([gone, picky, picky, wrong], MissReason.UNSAFE, "wrong"),
    ):
        (miss,) = decide(cells, kernels, rows=rows).misses
        assert miss.reason is reason and miss.detail.startswith(f"{name}.gemm")


def test_an_absent_library_counts_only_where_the_table_is_used(made):
    absent = made.FakeCandidate(FAST, installed=None)
    cells = [made.cell("a#0:fwd", FAST)]
    assert not decide(cells, [absent]).entries
    (entry,) = decide(cells, [absent], check_installed=False).entries
    assert entry.library_version is None


def test_calls_that_agree_become_one_entry(made):
    cells = [
        made.cell("a#0:fwd", FAST, m=64, p_exceed=0.001),
        made.cell("a#1:fwd", FAST, m=10, p_exceed=0.02),
        made.cell("a#0:wgrad", FAST, m=48, n=32, k=64),
        made.cell("a#1:wgrad", FAST, m=48, n=32, k=11),
    ]
    fwd, wgrad = decide(cells, [made.FakeCandidate(FAST)]).entries
    assert (fwd.call, fwd.tokens_min, fwd.tokens_max) == ("*", 1, 128)
    assert fwd.evidence.p_exceed == 0.02
    assert (wgrad.tokens_min, wgrad.tokens_max, wgrad.k, wgrad.m) == (6, 128, None, 48)


def test_coverage_prefers_the_least_exceedance_rate_then_the_name(made):
    cells = [
        made.cell("a#0:fwd", FAST, p_exceed=0.01),
        made.cell("a#0:fwd", ROWWISE, p_exceed=0.002),
    ]
    kernels = [made.FakeCandidate(FAST), made.FakeCandidate(ROWWISE)]
    (entry,) = decide(cells, kernels).entries
    assert entry.recipe == ROWWISE
    tied = [made.FakeCandidate(FAST, library="b"), made.FakeCandidate(FAST, library="a")]
    for order in (tied, tied[::-1]):
        assert decide(cells[:1], order).entries[0].library == "a"


def test_gradients_may_mix_formats(made):
    mixed = "e5m2-e4m3/tensorwise/fast"
    cells = [made.cell("a#0:wgrad", mixed), made.cell("a#0:wgrad", FAST, "unsafe")]
    choice = decide(cells, [made.FakeCandidate(FAST), made.FakeCandidate(mixed)])
    assert choice.entries[0].recipe == mixed
    g = choice.layers[0].operands["g"]
    assert g.formats == ("e5m2",) and choice.layers[0].operands["x"].formats == ("e4m3",)


def test_static_scales_come_from_the_map_in_the_format_of_each_operand(made):
    recipe = "e5m2-e4m3/static/fast"
    cells = [made.cell("a#0:dgrad", recipe), made.cell("a#1:dgrad", recipe)]
    scales = [
        made.operand_scale("a#0", "g", 2.0),
        made.operand_scale("a#1", "g", 3.0),
        made.operand_scale("a#0", "w", 0.5),
        made.operand_scale("a#1", "w", 0.5),
    ]
    (entry,) = decide(cells, [made.FakeCandidate(recipe)], scales=scales).entries
    assert entry.scale_policy == "static"
    assert (entry.scale_a, entry.scale_b) == (3.0 / 128, 0.5)
    scales[1] = made.operand_scale("a#1", "g", 5.0)
    choice = decide(cells, [made.FakeCandidate(recipe)], scales=scales)
    assert set(reasons(choice).values()) == {MissReason.CONFLICT}
    assert "by 2.5; the limit is 2" in choice.misses[0].detail


def test_excluded_sites_are_misses_of_their_own(made):
    cells = [made.cell("a#0:fwd", FAST), made.cell("b#0:fwd", FAST), made.cell("b#1:fwd", FAST)]
    choice = decide(cells, [made.FakeCandidate(FAST)], excluded=frozenset({"a#0:fwd", "b#1:fwd"}))
    assert not choice.entries
    assert set(reasons(choice).values()) == {MissReason.EXCLUDED}
    assert "the calls of a module run together" in choice.misses[1].detail


STATUSES = {
    "wrong-numerics": MissReason.UNSAFE,
    "unsupported": MissReason.SHAPE,
    "kernel-absent": MissReason.KERNEL_ABSENT,
    "failed-to-compile": MissReason.KERNEL_ABSENT,
    "out-of-memory": MissReason.KERNEL_ABSENT,
    "crashed": MissReason.KERNEL_ABSENT,
    "timed-out": MissReason.KERNEL_ABSENT,
}


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("objective", [Objective.COVERAGE, Objective.SPEED])
def test_a_candidate_that_failed_replay_never_enters(made, status, objective):
    kernel = made.FakeCandidate(FAST)
    cells = [made.cell("a#0:fwd", FAST)]
    rows = [made.row("a#0:fwd", kernel.name, status, detail="12 dB of 28", latency_us=1.0)]
    choice = decide(cells, [kernel], objective, rows)
    assert reasons(choice) == {"a#0:fwd": STATUSES[status]}
    assert status in choice.misses[0].detail and "12 dB of 28" in choice.misses[0].detail


def test_where_there_is_a_replay_every_call_must_be_in_it(made):
    kernel = made.FakeCandidate(FAST)
    cells = [made.cell("a#0:fwd", FAST), made.cell("a#1:fwd", FAST)]
    rows = [made.row("a#0:fwd", kernel.name)]
    assert set(reasons(decide(cells, [kernel], rows=rows)).values()) == {MissReason.INSUFFICIENT}
    rows.append(made.row("a#1:fwd", kernel.name, n=49))
    assert "n=49" in decide(cells, [kernel], rows=rows).misses[0].detail
    rows[1] = made.row("a#1:fwd", kernel.name)
    (entry,) = decide(cells, [kernel], rows=rows).entries
    assert entry.evidence.numerics == "measured"
    assert entry.evidence.replay_row == "a#0:fwd|fake.gemm/e4m3/tensorwise/fast,a#1:fwd|" + (
        kernel.name
    )
    assert entry.library_version == "2.13.0"


def timed(made, site, times, default=100.0, **parts):
    """Return cells, kernels and rows for one site: kernel time by recipe, and the default's."""
    kernels = [made.FakeCandidate(recipe) for recipe in times]
    cells = [made.cell(site, recipe, p_exceed=0.001 * i) for i, recipe in enumerate(times)]
    rows = [
        made.row(site, kernel.name, latency_us=times[kernel.recipe], recipe=kernel.recipe, **parts)
        for kernel in kernels
    ]
    rows += [
        made.row(site, "torch.matmul/fp32", latency_us=default, recipe="fp32"),
        made.row(site, "torch.matmul/tf32", "unsupported", latency_us=None, recipe="tf32"),
        made.row(site, "torch.matmul/bf16", latency_us=1.0, recipe="bf16"),
        made.row(site, "emulated/fp32", latency_us=0.1, recipe="fp32", emulated=True),
    ]
    return cells, kernels, rows


def test_speed_takes_the_fastest_and_says_by_how_much(made):
    cells, kernels, rows = timed(made, "a#0:fwd", {FAST: 80.0, ROWWISE: 50.0})
    (entry,) = decide(cells, kernels, Objective.SPEED, rows).entries
    assert entry.recipe == ROWWISE and entry.evidence.speedup == pytest.approx(2.0)
    assert entry.evidence.speed == "measured"
    assert entry.evidence.statement == "measured 2.00x of the default, casts included"


@pytest.mark.parametrize(("time", "enters"), [(95.0, True), (95.3, False), (100.0, False)])
def test_speed_wants_five_per_cent_over_the_models_own_precision(made, time, enters):
    cells, kernels, rows = timed(made, "a#0:fwd", {FAST: time})
    choice = decide(cells, kernels, Objective.SPEED, rows)
    assert bool(choice.entries) == enters
    if not enters:
        assert reasons(choice) == {"a#0:fwd": MissReason.NOT_FASTER}
        assert f"{time:.1f} us" in choice.misses[0].detail and "100.0 us" in choice.misses[0].detail


def test_without_times_nothing_is_faster(made):
    cells, kernels, rows = timed(made, "a#0:fwd", {FAST: None})
    assert reasons(decide(cells, kernels, Objective.SPEED, rows)) == {
        "a#0:fwd": MissReason.NOT_FASTER
    }
    cells, kernels, rows = timed(made, "a#0:fwd", {FAST: 1.0}, default=None)
    choice = decide(cells, kernels, Objective.SPEED, rows)
    assert "no measured time of the default" in choice.misses[0].detail


def test_coverage_says_what_was_measured(made):
    cells, kernels, rows = timed(made, "a#0:fwd", {FAST: 200.0})
    (entry,) = decide(cells, kernels, Objective.COVERAGE, rows).entries
    assert entry.evidence.speedup == pytest.approx(0.5) and entry.evidence.speed == "measured"
    assert entry.evidence.statement.startswith("not measured as faster: 0.50x")


def test_roofline_uses_the_prediction_of_the_slowest_call(made):
    cells = [made.cell("a#0:fwd", FAST, m=64), made.cell("a#1:fwd", FAST, m=8)]
    kernel = made.FakeCandidate(FAST)
    seen = []

    def predict(problem, recipe):
        seen.append((problem.m, recipe.name))
        return {64: 1.6, 8: 1.2}[problem.m]

    (entry,) = decide(cells, [kernel], Objective.ROOFLINE, predict=predict).entries
    assert entry.evidence.speedup == 1.2 and entry.evidence.speed == "predicted"
    assert set(seen) == {(64, FAST), (8, FAST)}
    choice = decide(cells, [kernel], Objective.ROOFLINE, predict=lambda p, r: 1.04)
    assert set(reasons(choice).values()) == {MissReason.NOT_FASTER}
    choice = decide(cells, [kernel], Objective.ROOFLINE, predict=lambda p, r: None)
    assert set(reasons(choice).values()) == {MissReason.NOT_FASTER}


def test_casts_read_along_the_contraction():
    recipe = parse_recipe("e5m2-e4m3/rowwise/fast")
    x_row, w_row = casts_of(Role.FWD, recipe)
    assert (x_row.operand, x_row.layout, x_row.format) == (Operand.X, "row", "e5m2")
    assert (w_row.operand, w_row.layout, w_row.format) == (Operand.W, "row", "e4m3")
    g_row, w_column = casts_of(Role.DGRAD, recipe)
    assert (g_row.operand, g_row.layout) == (Operand.G, "row")
    assert (w_column.operand, w_column.layout) == (Operand.W, "column")
    g_column, x_column = casts_of(Role.WGRAD, recipe)
    assert (g_column.operand, g_column.layout) == (Operand.G, "column")
    assert (x_column.operand, x_column.layout) == (Operand.X, "column")


def test_equal_casts_are_charged_once():
    x = Cast(Operand.X, "e4m3", "tensorwise", "row")
    other = Cast(Operand.X, "e4m3", "tensorwise", "column")
    assert shared_cast_saving_us([(x, 3.0), (x, 4.0), (x, 1.0), (other, 9.0)]) == 4.0
    assert shared_cast_saving_us([(x, None), (x, 4.0)]) == 0.0
    assert shared_cast_saving_us([]) == 0.0


def test_a_shared_cast_can_make_two_roles_pay_that_neither_pays_alone(made, monkeypatch):
    """With a kernel that reads x as fwd wrote it, the layer is chosen and not its roles."""
    import loka_toolkit.dispatch.objectives as objectives

    def one_layout(role, recipe, *, has_parameter):
        a, b = casts_of(role, recipe, has_parameter=has_parameter)
        return Cast(a.operand, a.format, a.scaling, "both"), Cast(
            b.operand, b.format, b.scaling, "both"
        )

    cells, rows = [], []
    kernel = made.FakeCandidate(FAST)
    for role, cast_of_x in (("fwd", "cast_a_us"), ("wgrad", "cast_b_us")):
        made_cells, _, made_rows = timed(made, f"a#0:{role}", {FAST: 110.0}, **{cast_of_x: 40.0})
        cells += made_cells
        rows += made_rows
    assert not decide(cells, [kernel], Objective.SPEED, rows).entries
    monkeypatch.setattr(objectives, "casts_of", one_layout)
    choice = decide(cells, [kernel], Objective.SPEED, rows)
    # Alone each takes 110 > 100 us; together 110 + 110 - 40 = 180 < 200 us.
    assert {e.role for e in choice.entries} == {"fwd", "wgrad"}


def test_layer_plans_tell_what_is_cast_by_whom():
    plan = layer_plan("a", "*", {Role.FWD: parse_recipe(ROWWISE), Role.WGRAD: parse_recipe(STATIC)})
    assert plan.producer_chain is None
    x, w, g = (plan.operands[name] for name in ("x", "w", "g"))
    assert (x.cast_by, x.scaling, x.layouts) == ("kernel", "rowwise,static", ("row", "column"))
    assert (w.cast_by, w.scaling, w.layouts) == ("kernel", "rowwise", ("row",))
    assert (g.cast_by, g.layouts, g.kept_for_backward) == ("kernel", ("column",), "original")
    only_forward = layer_plan("a", "*", {Role.FWD: parse_recipe(ROWWISE)})
    assert only_forward.operands["g"].cast_by == "none"
    assert only_forward.operands["g"].scaling is None


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=5))
def test_token_intervals_hold_what_was_recorded(tokens):
    for role in (Role.FWD, Role.DGRAD, Role.WGRAD):
        least, most = token_interval(role, tokens)
        assert least >= 1 and least <= most
        assert all(least <= t <= most for t in tokens if t > 0)
        assert most == max(1, 2 * max(tokens))
        lower = 1 if role is not Role.WGRAD else max(1, math.ceil(min(tokens) / 2))
        assert least == lower


@pytest.mark.parametrize(("weight", "expected"), [("layer.weight", True), (None, False)])
def test_block_scales_are_told_whether_a_site_multiplies_a_parameter(weight, expected):
    cell = SimpleNamespace(role="fwd", batch=1, m=8, n=16, k=128, dtype="float32", weight=weight)
    assert problem_of(cell).multiplies_parameter is expected
