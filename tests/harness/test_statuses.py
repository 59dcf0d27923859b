"""Every way to fail is a status of a row, with its reason; none ends the run."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from loka_toolkit.artifacts.replay_results import ReplayRow, Status
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.harness import POLICIES, replay

EXPECTED = {
    "good": (Status.OK, None),
    "absent": (Status.KERNEL_ABSENT, "fake is not installed"),
    "picky": (Status.UNSUPPORTED, "K = 13 is no multiple of 16"),
    "forward-only": (Status.OK, None),
    "raises": (Status.CRASHED, "ValueError while judging: bad tile"),
    "exits": (Status.CRASHED, "SystemExit while judging: 7"),
    "no-memory": (Status.OUT_OF_MEMORY, "OutOfMemoryError while judging: CUDA out of memory."),
    "no-host-memory": (Status.OUT_OF_MEMORY, "DefaultCPUAllocator"),
    "no-compiler": (Status.FAILED_TO_COMPILE, "no such op"),
    "nan": (Status.WRONG_NUMERICS, "1 outputs are Inf or NaN where the reference is finite"),
    "transposed": (Status.WRONG_NUMERICS, "returned [48, 96] float32, expected [96, 48] float32"),
    "garbage": (Status.WRONG_NUMERICS, "kernel error of the product"),
    "unwritten": (Status.WRONG_NUMERICS, "1 outputs are Inf or NaN where the reference"),
    "lost-k-tile": (Status.WRONG_NUMERICS, "kernel error of the product"),
    "stale-tile": (Status.WRONG_NUMERICS, "kernel error of the product"),
    "unscaled": (Status.WRONG_NUMERICS, "kernel error of the product"),
    "racing": (Status.WRONG_NUMERICS, "run 3 on the same operands differs from run 1"),
    "wrong-format": (Status.WRONG_NUMERICS, "times that of the recipe's emulation"),
    "wrong-dtype": (Status.WRONG_NUMERICS, "returned [96, 48] bfloat16, expected"),
    "hides-nan": (Status.OK, None),
}


@pytest.mark.usefixtures("fake_kernels")
def test_every_behavior_gets_its_status(forward_trace: Trace) -> None:
    results = replay(
        forward_trace,
        catalog="fake_kernels:catalog",
        include=["*:fwd"],
        device="cpu",
        isolate=False,
    )
    rows = {row.candidate: row for row in results.rows}
    assert set(rows) == set(EXPECTED)
    for name, (status, words) in EXPECTED.items():
        assert rows[name].status is status, (name, rows[name].detail)
        assert words is None or words in (rows[name].detail or ""), (name, rows[name].detail)
        assert (rows[name].latency_us is not None) == (status is Status.OK)
    assert results.facts.complete


@pytest.mark.usefixtures("fake_kernels")
def test_a_role_that_is_not_served_is_unsupported(forward_trace: Trace) -> None:
    results = replay(
        forward_trace,
        catalog="fake_kernels:catalog",
        candidates=["forward-only"],
        device="cpu",
        isolate=False,
    )
    statuses = {row.role: (row.status, row.detail) for row in results.rows}
    assert statuses["fwd"][0] is Status.OK
    assert statuses["wgrad"] == (Status.UNSUPPORTED, "does not serve the role wgrad")


@pytest.mark.usefixtures("fake_kernels")
def test_hanging_and_dying_kernels_cost_their_row_only(forward_trace: Trace) -> None:
    policy = dataclasses.replace(POLICIES["cpu-median"], row_seconds=5.0)
    results = replay(
        forward_trace,
        catalog="fake_kernels:deadly_catalog",
        include=["*:fwd"],
        device="cpu",
        policy=policy,
    )
    rows: dict[str, ReplayRow] = {row.candidate: row for row in results.rows}
    assert {name: row.status for name, row in rows.items()} == {
        "good": Status.OK,
        "hangs": Status.TIMED_OUT,
        "segfaults": Status.CRASHED,
        "leaves": Status.CRASHED,
        "good-after": Status.OK,
    }
    assert rows["hangs"].detail == "gave no answer within 5 s while judging"
    assert "was killed by SIGSEGV" in (rows["segfaults"].detail or "")
    assert "ended with code 3" in (rows["leaves"].detail or "")
    assert "a library's last words" in (rows["leaves"].detail or "")
    assert rows["hangs"].inputs == "moments"
    # A new process draws the same inputs and finds the same errors.
    assert rows["good"].total_sqnr_db == rows["good-after"].total_sqnr_db
    assert "fake_kernels" in sys.modules
