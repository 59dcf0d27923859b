from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loka_toolkit.artifacts.safety_map import SafetyMap, Verdict
from loka_toolkit.errors import ArtifactMissingError, ConfigurationError
from loka_toolkit.workflows.gate import Condition, judge_gate, parse_fail_on

ROOT = Path(__file__).resolve().parents[2]
A, B = "e4m3/tensorwise/fast", "e4m3/rowwise/fast"
SAFE, UNSAFE, UNCLEAR = Verdict.SAFE, Verdict.UNSAFE, Verdict.INSUFFICIENT


@pytest.mark.parametrize(
    ("verdicts", "healthy", "fail_on", "code"),
    [
        ({("s#0:fwd", A): UNSAFE}, True, None, 0),
        ({("s#0:fwd", A): UNSAFE}, True, "unsafe", 3),
        ({("s#0:fwd", A): UNSAFE, ("s#0:fwd", B): SAFE}, True, "unsafe", 0),
        ({("s#0:fwd", A): UNSAFE, ("s#0:fwd", B): UNCLEAR}, True, "unsafe", 0),
        ({("s#0:fwd", A): UNSAFE, ("s#0:fwd", B): UNCLEAR}, True, "insufficient", 4),
        ({("s#0:fwd", A): UNSAFE, ("t#0:fwd", A): UNCLEAR}, True, "insufficient,unsafe", 3),
        ({("s#0:fwd", A): SAFE}, False, None, 4),
        ({("s#0:fwd", A): UNSAFE}, False, "unsafe", 4),
    ],
)
def test_exit_codes_and_their_precedence(make_map, verdicts, healthy, fail_on, code):
    result = judge_gate(parse_fail_on(fail_on), make_map(verdicts, healthy=healthy))
    assert result.exit_code == code
    assert bool(result.reasons) == bool(code)


def test_with_a_table_the_gate_is_about_the_recipes_it_uses(make_map):
    safety = make_map({("s#0:fwd", A): UNSAFE, ("s#0:fwd", B): SAFE})
    gate = parse_fail_on("unsafe,insufficient")
    assert judge_gate(gate, safety).exit_code == 0
    assert judge_gate(gate, safety, {"s#0:fwd": A}).exit_code == 3
    assert judge_gate(gate, safety, {"s#0:fwd": "e5m2/rowwise/fast"}).exit_code == 4


def test_a_site_that_is_safe_no_longer_is_a_regression(make_map, tmp_path):
    baseline = tmp_path / "before.parquet"
    make_map({("s#0:fwd", A): SAFE, ("t#0:fwd", A): UNSAFE}).save(baseline)
    gate = parse_fail_on(f"regression:{baseline}")
    same = make_map({("s#0:fwd", A): SAFE, ("t#0:fwd", A): SAFE})
    assert judge_gate(gate, same).exit_code == 0
    for worse in (make_map({("s#0:fwd", A): UNCLEAR}), make_map({("t#0:fwd", A): SAFE})):
        result = judge_gate(gate, worse)
        assert result.exit_code == 3
        assert "s#0:fwd" in result.reasons[0]
    with pytest.raises(ArtifactMissingError):
        judge_gate(parse_fail_on(f"regression:{tmp_path / 'none'}"), same)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("unsave", "did you mean 'unsafe'"),
        ("regression", "regression:BASELINE"),
        ("unsafe:x", "takes no argument"),
    ],
)
def test_mistakes_in_fail_on_are_named(text, words):
    with pytest.raises(ConfigurationError, match=words):
        parse_fail_on(text)


@pytest.mark.parametrize(("healthy", "code"), [(True, 0), (False, 4)])
def test_a_report_of_an_unhealthy_fit_leaves_with_4_without_being_asked(
    make_map, tmp_path, healthy, code
):
    safety = make_map({("s#0:fwd", A): UNCLEAR}, healthy=healthy).save(tmp_path / "s.parquet")
    arguments = ["report", str(safety), "-o", str(tmp_path / "r.html"), "--quiet"]
    result = subprocess.run(
        [sys.executable, "-m", "loka_toolkit.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == code, result.stderr
    assert (tmp_path / "r.html").stat().st_size > 10_000


def test_fail_on_is_parsed():
    spec = parse_fail_on(" unsafe , regression:a/b.parquet,")
    assert spec.conditions == (Condition.UNSAFE, Condition.REGRESSION)
    assert str(spec.baseline) == "a/b.parquet"
    assert parse_fail_on(None).conditions == ()


def test_maps_survive_the_disk(make_map, tmp_path):
    safety = make_map({("s#0:fwd", A): UNSAFE, ("<b>ü#1:wgrad", B): SAFE})
    path = safety.save(tmp_path / "safety.parquet")
    assert SafetyMap.load(path) == safety
    frame = safety.to_frame()
    assert list(frame["verdict"]) == ["unsafe", "safe"]
    assert [v.verdict for v in safety.site_verdicts()] == [UNSAFE, SAFE]
