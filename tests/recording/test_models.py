"""Third-party models, seen whole: the benchmark of coverage on small batches."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIBRARIES = {
    "dcn_vector": "deepctr_torch",
    "dcn_matrix": "deepctr_torch",
    "deepfm": "deepctr_torch",
    "deepctr_autoint": "deepctr_torch",
    "hstu": "torch_rechub",
    "dcn_v2": "torch_rechub",
    "torchfm_autoint": "torchfm",
    "decoder": "x_transformers",
    "everything": "torch",
}


@pytest.fixture(scope="module")
def coverage():
    """The benchmark as a module."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("coverage_bench", BENCHMARKS / "coverage.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))
        sys.modules.pop("coverage_bench", None)


def test_every_model_is_here(coverage):
    assert {make.__name__ for make in coverage.CASES} == set(LIBRARIES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LIBRARIES)
def test_sites_equal_an_independent_count(coverage, name):
    """None missing, none double, every name that of an existing module and parameter."""
    pytest.importorskip(LIBRARIES[name])
    make = next(make for make in coverage.CASES if make.__name__ == name)
    row = coverage.compare(make, 6)
    assert row.problems == ()
    assert row.executions == row.calls > 10
    assert row.unseen == {}
    accounted = row.seen + sum(row.not_judged.values()) + sum(row.repeated.values())
    assert accounted == pytest.approx(row.flops, rel=1e-12)


@pytest.mark.filterwarnings("ignore")
def test_the_comparison_notices_what_is_missing(coverage, monkeypatch):
    """A recorder that overlooks an operator must fail the comparison."""
    from loka_toolkit.recording import interception

    seen = interception.work_of

    def blind(func, *rest):
        return None if "bmm" in str(func) else seen(func, *rest)

    monkeypatch.setattr(interception, "work_of", blind)
    pytest.importorskip("deepctr_torch")
    make = next(make for make in coverage.CASES if make.__name__ == "deepctr_autoint")
    problems = coverage.compare(make, 6).problems
    assert any("aten.bmm.default: 0 executions recorded" in problem for problem in problems)
