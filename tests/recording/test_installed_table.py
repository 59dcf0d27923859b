"""Products that an installed dispatch table runs are sites that are not judged, and said so."""

from __future__ import annotations

import contextlib
import json

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loka_toolkit.artifacts.dispatch_table import (
    KIND,
    SCHEMA_VERSION,
    DispatchTable,
    Entry,
    Evidence,
    Objective,
)
from loka_toolkit.artifacts.sites import Role, token_axis
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.dispatch import install
from loka_toolkit.dispatch.counters import Bank, Outcome, Slot
from loka_toolkit.dispatch.validate import validators_for
from loka_toolkit.environment import current_environment
from loka_toolkit.kernels.catalog import find_candidate
from loka_toolkit.numerics.tolerance import Tolerance
from loka_toolkit.recording import Schedule, record

TOKENS = 13
SIZES = {"0": (39, 16), "2": (16, 7)}
ROLES = (Role.FWD, Role.DGRAD, Role.WGRAD)
REASON = "run by an installed dispatch table: record inside installation.paused()"
RECIPE = "e4m3/tensorwise/fp32"


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(39, 16), nn.ReLU(), nn.Linear(16, 7))


def entry(fqn: str, role: Role, tokens_min: int) -> Entry:
    width, height = SIZES[fqn]
    m, n, k = {
        Role.FWD: (None, height, width),
        Role.DGRAD: (None, width, height),
        Role.WGRAD: (height, width, None),
    }[role]
    return Entry(
        fqn=fqn,
        call="*",
        role=role.value,
        token_axis=token_axis(role),
        tokens_min=tokens_min,
        tokens_max=1 << 20,
        m=m,
        n=n,
        k=k,
        batch=1,
        dtype="float32",
        layout="row,column",
        candidate=f"torch.scaled_mm/{RECIPE}",
        library="torch",
        library_version=str(torch.__version__),
        recipe=RECIPE,
        scale_policy="dynamic",
        scale_a=None,
        scale_b=None,
        fallback="default",
        evidence=Evidence("safe", 0.001, RECIPE, "measured", "none", None, None, "a test"),
    )


def table(layers: tuple[str, ...], tokens_min: int = 1) -> DispatchTable:
    entries = tuple(entry(fqn, role, tokens_min) for fqn in layers for role in ROLES)
    here = current_environment()
    name = entries[0].candidate
    return DispatchTable(
        kind=KIND,
        schema_version=SCHEMA_VERSION,
        created="2026-01-01T00:00:00+00:00",
        chip="cpu",
        objective=Objective.COVERAGE,
        environment=here,
        config={},
        tolerance=Tolerance(),
        safety_digest="safety",
        replay_digest=None,
        validators=validators_for("cpu", here, list(entries), {name: find_candidate(name)}),
        entries=entries,
        layers=(),
        misses=(),
    )


def train(model: nn.Module, path, around=contextlib.nullcontext, steps: int = 2) -> Trace:
    x, y = torch.randn(TOKENS, 39) ** 3, torch.randint(0, 2, (TOKENS, 7)).float()
    with record(model, path, schedule=Schedule.always()) as recorder, around():
        for _ in range(steps):
            F.binary_cross_entropy_with_logits(model(x), y).backward()
            recorder.step()
    return Trace.open(path)


def flops(layer: str, products: int) -> float:
    """Each product of a layer has the same FLOPs."""
    width, height = SIZES[layer]
    return float(products * 2 * TOKENS * width * height)


ALL = flops("0", 2) + flops("2", 3)  # the first layer has no dgrad


@pytest.mark.parametrize("tokens_min", [1, TOKENS + 1], ids=["hits", "misses"])
def test_every_product_of_an_installed_table_is_a_site_not_judged(tmp_path, model, tokens_min):
    installation = install(model, table(("0", "2"), tokens_min))
    with pytest.warns(UserWarning, match=r"installation.paused\(\)") as shown:
        trace = train(model, tmp_path / "run")
    assert len(shown) == 1
    installation.uninstall()
    for row in trace.steps.to_pylist():
        assert json.loads(row["not_judged_reason"]) == {REASON: ALL}
        assert row["gemm_flops_not_judged"] == ALL
        assert row["gemm_flops_seen"] == row["gemm_flops_unseen"] == 0
        assert row["status"] == "recorded"
    sites = {site["site"]: site for site in trace.sites.to_pylist()}
    assert set(sites) == {"0#0:fwd", "0#0:wgrad", "2#0:fwd", "2#0:dgrad", "2#0:wgrad"}
    assert all(site["op"].startswith("loka.") for site in sites.values())
    assert {site["weight"] for site in sites.values()} == {"0.weight", "2.weight"}
    dims = {name: (site["m"], site["n"], site["k"]) for name, site in sites.items()}
    assert dims["2#0:fwd"] == (TOKENS, 7, 16)
    assert dims["2#0:dgrad"] == (TOKENS, 16, 7)
    assert dims["2#0:wgrad"] == (7, 16, TOKENS)
    assert trace.errors.num_rows == 0
    events = {e.kind: e for e in trace.manifest.events}
    assert set(events) == {"installed-table"}
    assert (events["installed-table"].step, events["installed-table"].count) == (0, 2)


@pytest.mark.parametrize(("routed", "plain"), [("0", "2"), ("2", "0")])
def test_other_layers_are_recorded_beside_it(tmp_path, model, routed, plain):
    installation = install(model, table((routed,)))
    with pytest.warns(UserWarning, match="installed dispatch table"):
        trace = train(model, tmp_path / "run", steps=1)
    installation.uninstall()
    row = trace.steps.to_pylist()[0]
    products = {"0": 2, "2": 3}
    assert json.loads(row["not_judged_reason"]) == {REASON: flops(routed, products[routed])}
    assert row["gemm_flops_seen"] == flops(plain, products[plain])
    assert row["gemm_flops_unseen"] == 0
    assert {s.partition("#")[0] for s in trace.errors["site"].to_pylist()} == {plain}


def test_everything_is_judged_inside_of_paused(tmp_path, model):
    installation = install(model, table(("0", "2")))
    trace = train(model, tmp_path / "run", installation.paused)
    installation.uninstall()
    assert trace.steps["gemm_flops_unseen"].to_pylist() == [0.0, 0.0]
    assert trace.steps["gemm_flops_not_judged"].to_pylist() == [0.0, 0.0]
    assert trace.steps["gemm_flops_seen"].to_pylist() == [ALL, ALL]
    assert trace.manifest.events == ()


def test_a_role_left_in_default_precision_is_not_lost(tmp_path, model):
    """Only dgrad and wgrad are routed: forward products are aten's, backward the table's."""
    chosen = table(("0", "2"))
    backward = tuple(e for e in chosen.entries if e.role != Role.FWD.value)
    installation = install(model, msgspec.structs.replace(chosen, entries=backward))
    with pytest.warns(UserWarning, match="installed dispatch table"):
        trace = train(model, tmp_path / "run", steps=1)
    installation.uninstall()
    row = trace.steps.to_pylist()[0]
    assert json.loads(row["not_judged_reason"]) == {REASON: flops("0", 1) + flops("2", 2)}
    assert row["gemm_flops_seen"] == flops("0", 1) + flops("2", 1)
    assert row["gemm_flops_unseen"] == 0
    judged = set(trace.errors["site"].to_pylist())
    assert judged == {"0#0:fwd", "2#0:fwd"}
    assert {s["site"] for s in trace.sites.to_pylist()} - judged == {
        "0#0:wgrad",
        "2#0:dgrad",
        "2#0:wgrad",
    }


def test_operators_called_by_hand_with_named_arguments(tmp_path, model):
    slot = Slot(find_candidate(f"torch.scaled_mm/{RECIPE}"), None, None, False)
    bank = Bank([slot], torch.device("cpu"))
    x, w = torch.randn(2, 5, 39), torch.randn(16, 39)
    miss = {"bank_id": bank.id, "slot": 0, "outcome": int(Outcome.SHAPE)}
    with (
        pytest.warns(UserWarning, match="installed dispatch table"),
        record(model, tmp_path / "run", schedule=Schedule.always()) as recorder,
    ):
        torch.ops.loka.missed_linear(x=x, weight=w, bias=None, **miss)
        torch.ops.loka.missed_mm(a=x[0], b=w.t(), **miss)
        recorder.step()
    row = Trace.open(tmp_path / "run").steps.to_pylist()[0]
    assert json.loads(row["not_judged_reason"]) == {REASON: 2.0 * (10 + 5) * 39 * 16}
