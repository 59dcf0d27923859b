"""Workloads, estimates and clocks."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

from loka_toolkit.artifacts.sites import GEMM_OPERANDS, Role
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import ArtifactCorruptError, ConfigurationError, UnknownNameError
from loka_toolkit.harness import POLICIES, Method, TimingPolicy, estimate
from loka_toolkit.harness.timing import copies_needed, measure, policy_for
from loka_toolkit.harness.workloads import select, workloads_of
from loka_toolkit.numerics.chips import H200
from loka_toolkit.numerics.recipes import parse_recipe
from loka_toolkit.numerics.roofline import cast_time_us, gemm_time_us, predicted_speedup

CPU = torch.device("cpu")


def test_every_role_multiplies_the_operands_of_the_convention(writer: Any) -> None:
    writer.linear("layer", tokens=50, width=12, outputs=9)
    for role in ("fwd", "grad_a", "grad_b"):
        writer.site("dot", role, (3, 4, 5, 6))
    workloads = {str(w.site): w for w in workloads_of(writer.write()).workloads}
    for name, workload in workloads.items():
        expected = GEMM_OPERANDS[workload.site.role, name.startswith("layer")]
        assert (workload.a.operand, workload.b.operand) == expected
        assert workload.batched == name.startswith("dot")
    shape = {name: ((w.a.rows, w.a.width), (w.b.rows, w.b.width)) for name, w in workloads.items()}
    assert shape["layer#0:fwd"] == ((50, 12), (9, 12))  # x[T,I], w[O,I]
    assert shape["layer#0:dgrad"] == ((50, 9), (9, 12))  # g[T,O], w[O,I]
    assert shape["layer#0:wgrad"] == ((50, 9), (50, 12))  # g[T,O], x[T,I]
    assert shape["dot#0:fwd"] == ((4, 6), (6, 5))


def test_shapes_of_a_ragged_site_are_thinned_and_said(writer: Any) -> None:
    for tokens in (7, 100, 3, 50, 20, 100):
        writer.site("l", "fwd", (1, tokens, 8, 16), weight="l.weight", first_step=tokens)
    writer.site("l", "fwd", (1, 50, 8, 16), weight="l.weight")  # another rank saw it too
    trace = writer.write()
    plan = workloads_of(trace)
    assert [w.problem.m for w in plan.workloads] == [3, 20, 100]
    assert plan.shapes_left_out == {"l#0:fwd": 2}
    assert [w.problem.m for w in workloads_of(trace, shapes_per_site=1).workloads] == [20]
    assert len(workloads_of(trace, shapes_per_site=99).workloads) == 5


def test_selection_by_site_and_module(linear_trace: Trace) -> None:
    workloads = workloads_of(linear_trace).workloads
    assert len(select(workloads)) == 3
    assert [w.site.role for w in select(workloads, ["*:fwd"])] == [Role.FWD]
    assert len(select(workloads, ["tower.0"])) == 3
    assert {w.site.role for w in select(workloads, (), ["*#0:[dw]grad"])} == {Role.FWD}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype_a": "int64"}, "'int64', no floating-point dtype"),
        ({"dtype_out": "flaot32"}, "'flaot32', no floating-point dtype"),
        ({"m": -4}, "negative dimension"),
        ({"site": "l#0:grad_a"}, "role grad_a although its layer multiplies"),
    ],
)
def test_damaged_sites_are_named(writer: Any, changes: dict[str, Any], words: str) -> None:
    writer.site("l", "fwd", (1, 4, 4, 4), **({"weight": "l.weight"} | changes))
    with pytest.raises(ArtifactCorruptError, match=words):
        workloads_of(writer.write())


def test_estimates_are_the_roofline_with_all_casts_charged(linear_trace: Trace) -> None:
    rows = estimate(linear_trace, chip="H200").sites
    assert len(rows) == 3 * len(linear_trace.manifest.recipes)
    for row in rows:
        recipe = parse_recipe(row.recipe)
        assert row.gemm_us == gemm_time_us(1, row.m, row.n, row.k, recipe, H200)
        assert row.cast_a_us == cast_time_us(row.m, row.k, recipe.scaling, H200)
        assert row.speedup == pytest.approx(
            predicted_speedup(Role(row.role), 1, row.m, row.n, row.k, recipe, "H200")
        )
        assert row.measured and row.chip == "H200" and row.baseline == "bf16"
    (bf16,) = {row.speedup for row in estimate(linear_trace, chip="H200", recipes=["bf16"]).sites}
    assert bf16 == 1.0
    with pytest.raises(UnknownNameError, match="H100"):
        estimate(linear_trace, chip="H20O")
    with pytest.raises(UnknownNameError, match="rowwise"):
        estimate(linear_trace, chip="H200", recipes=["e4m3/rowise/fast"])


def test_an_empty_product_has_no_speedup(writer: Any) -> None:
    writer.linear("l", tokens=0, width=8, outputs=8, roles=("fwd", "dgrad"))
    rows = estimate(writer.write(), chip="H100", recipes=["e4m3/static/fast"]).sites
    assert [row.speedup for row in rows] == [None, None]


def policy(**changes: Any) -> TimingPolicy:
    values: dict[str, Any] = {
        "name": "test",
        "description": "test",
        "method": Method.HOST_CLOCK,
        "warmups": 2,
        "repetitions": 9,
        "seconds": 5.0,
        "row_seconds": 10.0,
    }
    return TimingPolicy(**(values | changes))


def test_the_host_clock_measures_sleeps_and_counts_calls() -> None:
    durations = itertools.cycle([0.002, 0.02])
    calls = [0]

    def call() -> None:
        calls[0] += 1
        time.sleep(next(durations))

    times = measure([call], policy(), CPU)
    assert calls[0] == 2 + 9 and times.repetitions == 9
    # Five of nine timed calls sleep 2 ms and four 20 ms: the median is the short sleep. A sleep
    # never ends early; late it ends by at most the scheduler's slice.
    assert 2000 <= times.median_us < 15_000
    assert times.p10_us <= times.median_us
    assert times.p90_us >= 20_000


def test_repetitions_end_with_the_time_allowed() -> None:
    times = measure([lambda: time.sleep(0.02)], policy(seconds=0.05, repetitions=10**6), CPU)
    assert 1 <= times.repetitions <= 4


def test_copies_rotate() -> None:
    seen: list[int] = []
    measure([lambda i=i: seen.append(i) for i in range(3)], policy(warmups=0), CPU)  # type: ignore[misc]
    assert seen == [0, 1, 2] * 3


def test_policies_belong_to_devices() -> None:
    assert policy_for(None, CPU).name == "cpu-median"
    assert policy_for(None, torch.device("cuda", 0)).name == "cuda-graph"
    assert policy_for("cuda-events", torch.device("cuda", 0)) is POLICIES["cuda-events"]
    with pytest.raises(ConfigurationError, match=r"host-clock.*choose cuda-graph"):
        policy_for("cpu-median", torch.device("cuda", 0))
    assert copies_needed(10, POLICIES["cpu-median"], CPU) == 1
    for name, found in POLICIES.items():
        assert found.name == name and found.description and found.validated() is found
