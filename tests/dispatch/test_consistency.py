"""A table that no build could have written is refused; one that was built never is."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from loka_toolkit.artifacts.dispatch_table import DispatchTable
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch import build_table, check_table, install
from loka_toolkit.dispatch.consistency import check_consistency
from loka_toolkit.dispatch.runtime import RoutedLinear
from loka_toolkit.environment import current_environment
from loka_toolkit.errors import TableRefusedError

DYNAMIC, STATIC, WGRAD = 0, 1, 2
SMALLEST = 2.0**-126
"""Smallest normal float32: the reciprocal of anything less may overflow."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8))


def valid(made) -> DispatchTable:
    """Return a table of a dynamic and a static forward entry and a static wgrad entry."""
    model = net()
    scales = {"recipe": "e4m3/static/fp32", "scales": (0.01, SMALLEST)}
    return made.table_of(
        made.entry("0", model[0], Role.FWD),
        made.entry("1", model[1], Role.FWD, **scales),
        made.entry("1", model[1], Role.WGRAD, **scales),
    )


def edited(table: DispatchTable, *edits) -> DispatchTable:
    """Return the table as read from a file in which (path, value) were written."""
    document = json.loads(msgspec.json.encode(table))
    for path, value in edits:
        target = document
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value
    return msgspec.json.decode(json.dumps(document), type=DispatchTable)


def of_entry(number, **fields):
    return [(("entries", number, name), value) for name, value in fields.items()]


MUTATIONS = {
    "verdict": (
        [(("entries", 0, "evidence", "verdict"), "unsafe")],
        "0#*:fwd verdict: expected 'safe', actual 'unsafe'",
    ),
    "verdict junk": (
        [(("entries", 2, "evidence", "verdict"), "")],
        "1#*:wgrad verdict: expected 'safe', actual ''",
    ),
    "call negative": (of_entry(0, call=-1), "0#-1:fwd call: expected '*' or at least 0, actual -1"),
    "call text": (of_entry(0, call="0"), "0#0:fwd call: expected '*' or at least 0, actual '0'"),
    "axis of another role": (
        of_entry(0, token_axis="k"),
        "0#*:fwd token_axis: expected 'm', actual 'k'",
    ),
    "axis of wgrad": (
        of_entry(WGRAD, token_axis="m"),
        "1#*:wgrad token_axis: expected 'k', actual 'm'",
    ),
    "no axis": (of_entry(0, token_axis=None), "0#*:fwd token_axis: expected 'm', actual null"),
    "axis none": (of_entry(0, token_axis="n"), "0#*:fwd token_axis: expected 'm', actual 'n'"),
    "another role": (of_entry(0, role="wgrad"), "0#*:wgrad token_axis: expected 'k', actual 'm'"),
    "activations": (of_entry(0, role="grad_a"), "token_axis: expected 'batch', actual 'm'"),
    "activations with a weight": (
        of_entry(0, role="grad_b", token_axis="batch", m=16, weight="0.weight"),
        "0#*:grad_b weight: expected null, for it multiplies two activations, actual '0.weight'",
    ),
    "activations by tokens": (
        of_entry(0, token_axis="batch", m=None),
        "0#*:fwd m: expected at least 1, actual null",
    ),
    "wgrad of activations": (
        of_entry(WGRAD, token_axis="batch"),
        "1#*:wgrad token_axis: expected 'k', actual 'batch'",
    ),
    "no tokens": (of_entry(0, tokens_min=0), "0#*:fwd tokens_min: expected at least 1, actual 0"),
    "tokens reversed": (
        of_entry(0, tokens_min=129),
        "0#*:fwd tokens_max: expected at least tokens_min = 129, actual 128",
    ),
    "m of fwd": (of_entry(0, m=64), "0#*:fwd m: expected null, the tokens, actual 64"),
    "k of fwd": (of_entry(0, k=None), "0#*:fwd k: expected at least 1, actual null"),
    "k of fwd 0": (of_entry(0, k=0), "0#*:fwd k: expected at least 1, actual 0"),
    "k of wgrad": (of_entry(WGRAD, k=64), "1#*:wgrad k: expected null, the tokens, actual 64"),
    "m of wgrad": (of_entry(WGRAD, m=None), "1#*:wgrad m: expected at least 1, actual null"),
    "m of wgrad negative": (of_entry(WGRAD, m=-8), "1#*:wgrad m: expected at least 1, actual -8"),
    "n": (of_entry(0, n=0), "0#*:fwd n: expected at least 1, actual 0"),
    "batch": (of_entry(0, batch=0), "0#*:fwd batch: expected at least 1, actual 0"),
    "static to dynamic": (
        of_entry(STATIC, scale_policy="dynamic"),
        "1#*:fwd scale_policy: expected 'static' for e4m3/static/fp32, actual 'dynamic'",
    ),
    "dynamic to static": (
        of_entry(DYNAMIC, scale_policy="static", scale_a=1.0, scale_b=1.0),
        "0#*:fwd scale_policy: expected 'dynamic' for e4m3/tensorwise/fp32, actual 'static'",
    ),
    "policy junk": (of_entry(0, scale_policy="no"), "scale_policy: expected 'dynamic' for"),
    "scale of dynamic": (
        of_entry(0, scale_b=1.0),
        "0#*:fwd scale_b: expected null, for",
    ),
    "scale absent": (of_entry(STATIC, scale_a=None), "1#*:fwd scale_a: expected a float32 from"),
    "scale 0": (
        of_entry(STATIC, scale_b=0.0),
        "scale_b: expected a float32 from 1.175e-38",
    ),
    "scale negative": (of_entry(WGRAD, scale_a=-1.0), "1#*:wgrad scale_a: expected a float32 from"),
    "scale subnormal": (of_entry(STATIC, scale_a=SMALLEST * 0.999), "1#*:fwd scale_a: expected"),
    "scale beyond float32": (of_entry(STATIC, scale_a=1e39), "to 3.403e+38, actual 1e+39"),
    "fallback": (of_entry(0, fallback="tf32"), "fallback: expected 'default', actual 'tf32'"),
    "chip field": (
        [(("chip",), "H200")],
        "validator chip: expected 'H200', the table's chip, actual 'cpu'",
    ),
    "chip soft": (
        [(("validators", 0, "hard"), False)],
        "validator chip: expected hard, actual soft",
    ),
    "abi soft": (
        [(("validators", 1, "hard"), False)],
        "validator kernel_abi: expected hard, actual soft",
    ),
    "chip renamed": (
        [(("validators", 0, "name"), "torch"), (("validators", 0, "hard"), False)],
        "validator chip: expected a hard validator, actual none in the table",
    ),
    "no validators": (
        [(("validators",), [])],
        "validator kernel_abi: expected a hard validator, actual none in the table",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.filterwarnings("ignore:the dispatch table was built elsewhere")
def test_an_edit_that_no_build_writes_is_refused_and_shown(made, name):
    edits, line = MUTATIONS[name]
    model, table = net(), edited(valid(made), *edits)
    for found in (check_table(table, model), check_table(table)):
        assert any(line in refusal for refusal in found.refusals) and not found.usable
    with pytest.raises(TableRefusedError, match=re.escape(line)):
        install(model, table, allow_unmeasured=True)
    assert not any(isinstance(module, RoutedLinear) for module in model.modules())


def test_the_table_before_the_edits_is_accepted(made):
    table = valid(made)
    assert edited(table) == table
    assert not check_consistency(table) and check_table(table, net()).usable
    with install(net(), table) as handle:
        assert [site.candidate is not None for site in handle.sites()] == [True] * 3


def test_a_scale_that_is_not_a_number_is_refused(made):
    table = valid(made)
    for scale in (float("nan"), float("inf")):
        odd = msgspec.structs.replace(table.entries[STATIC], scale_a=scale)
        with pytest.raises(TableRefusedError, match=f"1#\\*:fwd scale_a: .* actual {scale}"):
            install(net(), made.table_of(odd))


def test_an_emulated_candidate_is_refused(made):
    model = net()
    name = "torch.scaled_mm/e4m3/tensorwise/fp32"
    fake = made.FakeCandidate("e4m3/tensorwise/fp32", emulated=True)
    table = made.table_of(made.entry("0", model[0], Role.FWD, candidate=fake.name))
    with pytest.raises(TableRefusedError, match="emulated"):
        install(model, table, candidates=[fake])
    odd = made.table_of(made.entry("0", model[0], Role.FWD, recipe="e4m3/rowwise/fp32"))
    entry = msgspec.structs.replace(odd.entries[0], candidate=name)
    with pytest.raises(TableRefusedError, match="expected e4m3/rowwise/fp32, actual e4m3/tensor"):
        install(model, made.table_of(entry))


@given(
    intervals=st.tuples(*[st.tuples(st.integers(1, 9), st.integers(0, 4))] * 2),
    calls=st.tuples(*[st.sampled_from(["*", 0, 1])] * 2),
    same_role=st.booleans(),
)
def test_two_entries_for_one_product_are_refused(made, intervals, calls, same_role):
    first, last = Role.FWD, Role.FWD if same_role else Role.DGRAD
    entries = [
        made.entry("0", net()[0], role, call=call, tokens_min=least, tokens_max=least + more)
        for role, call, (least, more) in zip((first, last), calls, intervals, strict=True)
    ]
    keys = [
        {
            (entry.role, call, tokens)
            for call in ((0, 1) if entry.call == "*" else (entry.call,))
            for tokens in range(entry.tokens_min, entry.tokens_max + 1)
        }
        for entry in entries
    ]
    overlap = keys[0] & keys[1]
    found = [str(check) for check in check_consistency(made.table_of(*entries))]
    assert bool(found) == bool(overlap)
    if overlap:
        tokens = sorted({key[2] for key in overlap})
        assert f"actual entries 0 and 1 for {tokens[0]} to {tokens[-1]} tokens" in found[0]


@given(
    shape=st.tuples(*[st.sampled_from([1, 13, 39, 117, 128, 4096])] * 3),
    scale=st.sampled_from([SMALLEST * 2**7, 3e-9, 0.3, 1e30]),
    recipe=st.sampled_from(["e4m3/static/fast", "e4m3/tensorwise/fast", "e5m2-e4m3/static/fast"]),
    chip=st.sampled_from(["H200", "H100", "cpu"]),
)
def test_every_table_that_is_built_is_consistent(made, shape, scale, recipe, chip):
    tokens, width, height = shape
    dims = {
        "fwd": {"m": tokens, "n": height, "k": width},
        "dgrad": {"m": tokens, "n": width, "k": height},
        "wgrad": {"m": height, "n": width, "k": tokens},
    }
    cells = [
        made.cell(f"{fqn}#{call}:{role}", recipe, dtype="bfloat16", **dims[role])
        for fqn, calls in (("a", 1), ("b", 2))
        for call in range(calls)
        for role in dims
    ]
    layers = {cell.site.split(":")[0] for cell in cells}
    scales = tuple(made.operand_scale(layer, o, scale) for layer in layers for o in "xwg")
    safety = made.safety_map(*cells, scales=scales)
    table = build_table(safety, chip=chip, objective="coverage")
    if chip == "cpu":
        assert len(table.entries) == 6  # the reference kernel takes every shape
    assert not check_consistency(edited(table))


def test_a_coverage_table_for_an_h200_with_static_scales_is_usable_there(made):
    sides = {"m": 256, "n": 256, "k": 256}
    cells = [
        made.cell(f"a#0:{role}", "e4m3/static/fast", dtype="bfloat16", **sides)
        for role in ("fwd", "dgrad", "wgrad")
    ]
    scales = tuple(made.operand_scale("a#0", operand, 0.3) for operand in "xwg")
    table = build_table(made.safety_map(*cells, scales=scales), chip="H200", objective="coverage")
    assert {e.scale_policy for e in table.entries} == {"static"} and len(table.entries) == 3
    there = made.environment(
        chip="H200",
        capability="9.0",
        driver="570",
        cuda="13.0",
        libraries=current_environment().libraries,
    )
    found = check_table(table, environment=there)
    assert found.usable and found.unmeasured == 3
