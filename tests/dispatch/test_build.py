"""Building: objectives, chips, patterns, digests; and what ``choose`` promises on any evidence."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_toolkit.artifacts.dispatch_table import DispatchTable, MissReason, Objective
from loka_toolkit.artifacts.replay_results import Status
from loka_toolkit.dispatch import build_table, table_rows
from loka_toolkit.environment import current_environment
from loka_toolkit.errors import (
    ArtifactCorruptError,
    ArtifactMissingError,
    ArtifactVersionError,
    ConfigurationError,
    NoMatchError,
    UnknownNameError,
)
from loka_toolkit.kernels.catalog import catalog
from loka_toolkit.numerics.recipes import parse_recipe

FAST, STATIC = "e4m3/tensorwise/fast", "e4m3/static/fast"
CPU_KERNEL = "torch.scaled_mm/e4m3/tensorwise/fp32"
H200_KERNEL = "torch.scaled_mm/e4m3/tensorwise/fast"


def layer(made, fqn="a", **changes):
    """Return the cells of a layer of 4096 x 4096 with 16384 tokens, which pays on an H200."""
    shapes = {
        "fwd": {"m": 16384, "n": 4096, "k": 4096},
        "dgrad": {"m": 16384, "n": 4096, "k": 4096},
        "wgrad": {"m": 4096, "n": 4096, "k": 16384},
    }
    return [
        made.cell(f"{fqn}#0:{role}", FAST, **{"dtype": "bfloat16", **shape, **changes})
        for role, shape in shapes.items()
    ]


def dims(cell):
    return {"m": cell.m, "n": cell.n, "k": cell.k, "dtype": cell.dtype}


def test_a_cpu_builds_for_coverage_by_default(made):
    table = build_table(made.safety_map(*layer(made)), chip="cpu")
    assert (table.chip, table.objective) == ("cpu", Objective.COVERAGE)
    assert [e.candidate for e in table.entries] == [CPU_KERNEL] * 3
    assert {e.evidence.numerics for e in table.entries} == {"none"}
    assert len(table.layers) == 1 and not table.misses
    names = {v.name: v for v in table.validators}
    assert names["chip"].hard and names["kernel_abi"].hard
    assert names[f"kernel_abi/{CPU_KERNEL}"].hard and not names["torch"].hard
    assert names["torch"].expected == current_environment().libraries["torch"]


def test_a_replay_on_the_same_chip_is_evidence(made):
    cells = layer(made)
    rows = [made.row(c.site, CPU_KERNEL, **dims(c), latency_us=10.0) for c in cells]
    table = build_table(made.safety_map(*cells), made.replay_results(*rows), chip="cpu")
    assert {e.evidence.numerics for e in table.entries} == {"measured"}
    assert table.config["replay"] == "used" and table.replay_digest
    bad = [msgspec.structs.replace(rows[0], status=Status.WRONG_NUMERICS), *rows[1:]]
    table = build_table(made.safety_map(*cells), made.replay_results(*bad), chip="cpu")
    assert {m.reason for m in table.misses} == {MissReason.UNSAFE} and len(table.entries) == 2


def test_a_replay_on_another_chip_is_no_evidence_and_is_said_to_be_none(made):
    cells = layer(made)
    rows = [made.row(c.site, H200_KERNEL, **dims(c)) for c in cells]
    table = build_table(
        made.safety_map(*cells), made.replay_results(*rows), chip="H200", objective="coverage"
    )
    assert [e.candidate for e in table.entries] == [H200_KERNEL] * 3
    assert {e.evidence.numerics for e in table.entries} == {"none"}
    assert "it ran on cpu, not on H200" in table.config["replay"]
    assert "not replayed on this chip" in table.entries[0].evidence.statement
    # Nothing is known of that machine's driver and libraries.
    assert all(v.hard for v in table.validators)


def test_for_a_chip_that_is_not_here_the_objective_must_be_named(made):
    with pytest.raises(ConfigurationError, match=r"coverage .* roofline .* speed"):
        build_table(made.safety_map(*layer(made)), chip="H200")
    with pytest.raises(ConfigurationError, match="needs a replay measured on H200"):
        build_table(made.safety_map(*layer(made)), chip="H200", objective="speed")
    with pytest.raises(ConfigurationError, match="the one given ran on cpu"):
        build_table(
            made.safety_map(*layer(made)), made.replay_results(), chip="H200", objective="speed"
        )
    with pytest.raises(ConfigurationError, match="no data for cpu"):
        build_table(made.safety_map(*layer(made)), chip="cpu", objective="roofline")
    with pytest.raises(UnknownNameError, match="did you mean 'coverage'"):
        build_table(made.safety_map(*layer(made)), objective="covrage")
    with pytest.raises(UnknownNameError, match="did you mean 'H200'"):
        build_table(made.safety_map(*layer(made)), chip="H20", objective="coverage")


def test_a_replay_made_on_the_target_makes_speed_the_default(made):
    cells = layer(made)
    env = made.environment(chip="H200", capability="9.0", driver="570.1", cuda="13.0")
    rows = [
        made.row(c.site, name, **dims(c), chip="H200", latency_us=us, recipe=recipe)
        for c in cells
        for name, recipe, us in (
            (H200_KERNEL, FAST, 50.0 if c.role != "dgrad" else 99.0),
            ("torch.matmul/bf16", "bf16", 100.0),
        )
    ]
    results = made.replay_results(*rows, env=env)
    table = build_table(made.safety_map(*cells), results, chip="H200")
    assert table.objective is Objective.SPEED
    assert [e.role for e in table.entries] == ["fwd", "wgrad"]
    assert [m.reason for m in table.misses] == [MissReason.NOT_FASTER]
    soft = {v.name: v.expected for v in table.validators if not v.hard}
    assert soft["driver"] == "570.1" and soft["cuda"] == "13.0"


def test_roofline_predicts_large_layers_faster_and_small_ones_not(made):
    cells = [*layer(made, "large"), *layer(made, "small", m=48, n=32, k=64)]
    table = build_table(made.safety_map(*cells), chip="H200", objective="roofline")
    assert {e.fqn for e in table.entries} == {"large"}
    assert all(e.evidence.speed == "predicted" and e.evidence.speedup > 1.05 for e in table.entries)
    assert {m.reason for m in table.misses if m.fqn == "small"} == {MissReason.NOT_FASTER}


def test_patterns_leave_sites_out_and_must_match(made):
    cells = [*layer(made, "tower.a"), *layer(made, "tower.b")]
    safety = made.safety_map(*cells)
    table = build_table(safety, chip="cpu", include=["tower.*"], exclude=["*:wgrad", "tower.b"])
    assert {(e.fqn, e.role) for e in table.entries} == {("tower.a", "fwd"), ("tower.a", "dgrad")}
    assert {m.reason for m in table.misses} == {MissReason.EXCLUDED} and len(table.misses) == 4
    for patterns in ({"include": ["towr.a"]}, {"exclude": ["towr.a"]}):
        with pytest.raises(NoMatchError, match=r"no site matches 'towr\.a'; did you mean 'tower"):
            build_table(safety, chip="cpu", **patterns)


def test_files_are_read_and_named_by_their_digests(made, tmp_path):
    cells = layer(made)
    safety = made.safety_map(*cells)
    results = made.replay_results(*(made.row(c.site, CPU_KERNEL, **dims(c)) for c in cells))
    paths = safety.save(tmp_path / "safety.parquet"), results.save(tmp_path / "replay.parquet")
    table = build_table(*paths, chip="cpu")
    assert table.safety_digest == safety.digest == type(safety).load(paths[0]).digest
    assert table.replay_digest == results.digest == type(results).load(paths[1]).digest
    assert table.entries == build_table(safety, results, chip="cpu").entries
    with pytest.raises(ArtifactMissingError):
        build_table(tmp_path / "nothing.parquet")


def test_a_table_survives_its_file(made, tmp_path):
    scales = tuple(
        made.operand_scale("a#0", o, s) for o, s in (("x", 0.1), ("w", 0.3), ("g", 3e-9))
    )
    cells = [
        *(made.cell(c.site, STATIC, m=c.m, n=c.n, k=c.k) for c in layer(made)),
        made.cell("b#0:fwd", FAST, "unsafe"),
    ]
    table = build_table(made.safety_map(*cells, scales=scales), chip="cpu")
    assert {e.scale_policy for e in table.entries} == {"static"} and len(table.entries) == 3
    path = table.save(tmp_path / "table.json")
    assert DispatchTable.load(path) == table
    text = path.read_text()
    for damage, error in (
        ("", ArtifactCorruptError),
        (text[: len(text) // 2], ArtifactCorruptError),
        ('{"kind": "something", "schema_version": 1}', ArtifactCorruptError),
        (json.dumps({**json.loads(text), "more": 1}), ArtifactCorruptError),
        (text.replace('"reason": "unsafe"', '"reason": "dislike"'), ArtifactCorruptError),
        (json.dumps({**json.loads(text), "schema_version": 99}), ArtifactVersionError),
    ):
        path.write_text(damage)
        with pytest.raises(error, match=str(path)):
            DispatchTable.load(path)


def test_rows_for_printing_hold_every_site(made):
    cells = [*layer(made), made.cell("b#0:fwd", FAST, "unsafe")]
    rows = table_rows(build_table(made.safety_map(*cells), chip="cpu"))
    assert [(r["fqn"], r["role"], r["reason"]) for r in rows] == [
        ("a", "fwd", None),
        ("a", "dgrad", None),
        ("a", "wgrad", None),
        ("b", "fwd", "unsafe"),
    ]
    assert rows[0]["tokens"] == "1-32768" and rows[3]["candidate"] is None
    assert len({tuple(r) for r in rows}) == 1
    json.dumps(rows)


RECIPES = (FAST, "e4m3/rowwise/fast", STATIC, "e5m2/tensorwise/fast", "e5m2-e4m3/tensorwise/fast")
KERNELS = [c for c in catalog() if not c.recipe.endswith("promoted-128")]


@st.composite
def evidence(draw):
    """Any map of up to three modules with up to two calls, and any replay of it."""
    sites = [
        f"{fqn}#{call}:{role}"
        for fqn in ("a", "b", "c")[: draw(st.integers(1, 3))]
        for call in range(draw(st.integers(1, 2)))
        for role in ("fwd", "dgrad", "wgrad")
    ]
    verdicts = st.sampled_from(["safe", "safe", "unsafe", "insufficient-evidence"])
    judged = {site: {r: draw(verdicts) for r in RECIPES} for site in sites}
    statuses = st.sampled_from(["ok", "ok", "ok", "wrong-numerics", "crashed", None])
    times = st.sampled_from([None, 10.0, 99.0, 120.0])
    names = [c.name for c in KERNELS if c.recipe.endswith("fp32")]
    replayed = {(site, n): (draw(statuses), draw(times)) for site in sites for n in names}
    return judged, replayed if draw(st.booleans()) else None, draw(st.booleans())


@given(evidence(), st.sampled_from([Objective.COVERAGE, Objective.SPEED]))
@settings(max_examples=40)
def test_whatever_the_evidence_only_safe_and_right_kernels_enter(made, drawn, objective):
    judged, replayed, with_scales = drawn
    cells = [made.cell(s, r, v) for s, by_recipe in judged.items() for r, v in by_recipe.items()]
    layers = {s.split(":")[0] for s in judged}
    scales = tuple(made.operand_scale(name, o, 0.1) for name in layers for o in "xwg")
    results = None
    if replayed is not None:
        rows = [
            made.row(s, n, status, latency_us=us, emulated=n.startswith("emul"))
            for (s, n), (status, us) in replayed.items()
            if status
        ]
        rows += [made.row(s, "torch.matmul/fp32", latency_us=100.0, recipe="fp32") for s in judged]
        results = made.replay_results(*rows)
    elif objective is Objective.SPEED:
        objective = Objective.COVERAGE
    table = build_table(
        made.safety_map(*cells, scales=scales if with_scales else ()),
        results,
        chip="cpu",
        objective=objective,
        candidates=KERNELS,
    )
    decided = [f"{m.fqn}#{m.call}:{m.role}" for m in table.misses]
    for entry in table.entries:
        calls = [s for s in judged if s.startswith(f"{entry.fqn}#") and s.endswith(entry.role)]
        decided += calls
        assert not entry.candidate.startswith("emul")
        recipe = parse_recipe(entry.recipe)
        for site in calls:
            assert any(
                v == "safe" and parse_recipe(r).is_covered_by(recipe)
                for r, v in judged[site].items()
            )
            if replayed is not None:
                assert replayed[(site, entry.candidate)][0] == "ok"
        if entry.scale_policy == "static":
            assert with_scales and entry.scale_a and entry.scale_b
        if objective is Objective.SPEED:
            assert entry.evidence.speedup >= 1.05
            took = sum(replayed[(site, entry.candidate)][1] for site in calls)
            assert took * 1.05 <= 100.0 * len(calls)
    assert sorted(decided) == sorted(judged)  # every site once: an entry or a miss
    assert {(p.fqn, p.call) for p in table.layers} == {(e.fqn, e.call) for e in table.entries}
