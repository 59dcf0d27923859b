"""Choosing for products that are not those of an nn.Linear, by what they are known."""

from __future__ import annotations

from loka_toolkit.artifacts.dispatch_table import MissReason, Objective
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch.choose import choose
from loka_toolkit.dispatch.options import Evidence
from loka_toolkit.kernels.contract import Chip

FAST, STATIC = "e4m3/tensorwise/fast", "e4m3/static/fast"


def decide(cells, kernel, objective=Objective.COVERAGE, scales=(), **options):
    by_operand = {(s.layer, s.operand): s for s in scales}
    evidence = Evidence(Chip("cpu", None), [kernel], None, by_operand, check_installed=True)
    return choose(cells, evidence, objective, **options)


def reasons(choice):
    return {f"{m.fqn}#{m.call}:{m.role}": m.reason for m in choice.misses}


PAIR = {"module_type": "Cross", "batch": 1}


def test_products_that_can_be_told_apart_are_judged_apart(made):
    """Two parameters, and two activations of two sizes: a verdict on one says nothing of others."""
    activations = {"module_type": "Cross", "weight": None, "batch": 8, "k": 32}
    cells = [
        made.cell("a#0:fwd", FAST, **PAIR, weight="a.u"),
        made.cell("a#1:fwd", FAST, "unsafe", **PAIR, weight="a.v"),
        made.cell("a#2:fwd", FAST, **PAIR, weight="a.u", m=20, p_exceed=0.02),
        made.cell("a#2:wgrad", FAST, **PAIR, weight="a.u", m=48, n=32, k=20),
        made.cell("a#0:wgrad", FAST, **PAIR, weight="a.u", m=48, n=32, k=64),
        made.cell("a#3:fwd", FAST, **activations),
        made.cell("a#3:grad_b", FAST, **{**activations, "m": 32, "n": 48, "k": 64}),
        made.cell("a#4:fwd", FAST, "unsafe", **{**activations, "n": 49}),
        made.cell("a#5:fwd", FAST, **activations, dispatchable=False),
    ]
    kernel = made.FakeCandidate(FAST, roles=frozenset(Role))
    choice = decide(cells, kernel)
    entries = {f"{e.fqn}#{e.call}:{e.role}": e for e in choice.entries}
    assert set(entries) == {
        "a#0:fwd", "a#2:fwd", "a#0:wgrad", "a#2:wgrad", "a#3:fwd", "a#3:grad_b",
    }  # fmt: skip
    assert reasons(choice) == {
        "a#1:fwd": MissReason.UNSAFE,
        "a#4:fwd": MissReason.UNSAFE,
        "a#5:fwd": MissReason.NOT_REPLACEABLE,
    }
    first, again = entries["a#0:fwd"], entries["a#2:fwd"]
    assert (first.weight, first.token_axis, first.m, first.n, first.k) == ("a.u", "m", None, 48, 32)
    assert (first.tokens_min, first.tokens_max) == (again.tokens_min, again.tokens_max) == (1, 128)
    assert (first.evidence.p_exceed, again.evidence.p_exceed) == (0.001, 0.02)
    assert entries["a#2:wgrad"].tokens_min == 10
    product = entries["a#3:grad_b"]
    assert (product.weight, product.token_axis, product.batch) == (None, "batch", 8)
    assert (product.tokens_min, product.tokens_max) == (1, 16)
    assert (product.m, product.n, product.k) == (32, 48, 64)
    unsafe = next(miss for miss in choice.misses if miss.call == 1)
    assert (unsafe.weight, unsafe.batch, unsafe.m, unsafe.n, unsafe.k) == ("a.v", 1, 64, 48, 32)
    assert {(plan.call, *plan.operands) for plan in choice.layers} == {
        (0, "x", "w", "g"), (2, "x", "w", "g"), (3, "a", "b", "g"),
    }  # fmt: skip


def test_products_that_cannot_be_told_apart_are_judged_together(made):
    cells = [
        made.cell("a#0:fwd", FAST, **PAIR, weight="a.u"),
        made.cell("a#1:fwd", FAST, "unsafe", **PAIR, weight="a.u"),
    ]
    choice = decide(cells, made.FakeCandidate(FAST))
    assert set(reasons(choice).values()) == {MissReason.CONFLICT}


def test_static_scales_and_casts_of_activations_are_those_of_a_and_b(made):
    sizes = {"fwd": (64, 48, 32), "grad_a": (64, 32, 48), "grad_b": (32, 48, 64)}
    cells = [
        made.cell(f"a#0:{role}", STATIC, module_type="Cross", weight=None, batch=8, m=m, n=n, k=k)
        for role, (m, n, k) in sizes.items()
    ]
    scales = [
        made.operand_scale("a#0", name, s) for name, s in {"a": 1.0, "b": 2.0, "g": 4.0}.items()
    ]
    choice = decide(cells, made.FakeCandidate(STATIC, roles=frozenset(Role)), scales=scales)
    found = {e.role: (e.scale_a, e.scale_b) for e in choice.entries}
    assert found == {"fwd": (1.0, 2.0), "grad_a": (4.0, 2.0), "grad_b": (1.0, 4.0)}
    (plan,) = choice.layers
    # Both factors are read along the contraction: K for fwd, N for grad_a, M for grad_b.
    assert plan.operands["a"].layouts == ("row", "column")
    assert plan.operands["b"].layouts == ("column", "row")
    assert plan.operands["g"].layouts == ("row", "column")


def test_the_roofline_says_nothing_of_products_computed_one_by_one(made):
    cells = [made.cell("a#0:fwd", FAST, module_type="Cross", weight=None, batch=8)]
    choice = decide(
        cells, made.FakeCandidate(FAST), Objective.ROOFLINE, predict=lambda problem, recipe: 1.9
    )
    assert reasons(choice) == {"a#0:fwd": MissReason.NOT_FASTER}
    assert "batch" in choice.misses[0].detail
