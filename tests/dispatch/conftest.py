"""Synthetic evidence, tables made without analysis, and an independent truth for FP8 products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from loka_toolkit.artifacts.dispatch_table import (
    KIND,
    SCHEMA_VERSION,
    DispatchTable,
    Entry,
    Evidence,
    Objective,
)
from loka_toolkit.artifacts.map_facts import Coverage, FitHealth, MapFacts, OperandScale
from loka_toolkit.artifacts.replay_results import ReplayFacts, ReplayResults, ReplayRow, Status
from loka_toolkit.artifacts.safety_map import Cell, SafetyMap, SpeedEvidence, Verdict
from loka_toolkit.artifacts.sites import Role, token_axis
from loka_toolkit.dispatch.choose import token_interval
from loka_toolkit.dispatch.validate import validators_for
from loka_toolkit.environment import Environment, current_environment
from loka_toolkit.kernels.catalog import find_candidate
from loka_toolkit.kernels.contract import Chip, Prepared, Problem, Side
from loka_toolkit.numerics.tolerance import Tolerance

CREATED = "2026-01-01T00:00:00+00:00"


def cell(site: str, recipe: str, verdict: str = "safe", **changes: Any) -> Cell:
    fqn, rest = site.split("#")
    call, role = rest.split(":")
    values: dict[str, Any] = dict(
        site=site,
        fqn=fqn,
        call=int(call),
        role=role,
        recipe=recipe,
        module_type="Linear",
        weight=f"{fqn}.weight",
        dispatchable=True,
        batch=1,
        m=64,
        n=48,
        k=32,
        dtype="float32",
        flops_share=0.1,
        evidence_steps=20,
        evidence_effective=15.0,
        underflow_share_worst_group=0.0,
        saturation_share=0.0,
        impact_allotment=1e-5,
        p_exceed=0.001,
        verdict=Verdict(verdict),
        reason=f"{recipe} is {verdict} here",
        fast=False,
        speedup=None,
        speedup_evidence=SpeedEvidence.NONE,
        posteriors={},
    )
    values.update(changes)
    for field in msgspec.structs.fields(Cell):
        values.setdefault(field.name, None)
    return Cell(**values)


def environment(**changes: Any) -> Environment:
    base = current_environment()
    return msgspec.structs.replace(base, **changes)


def safety_map(*cells: Cell, scales: tuple[OperandScale, ...] = ()) -> SafetyMap:
    health = FitHealth(True, (), 1.0, 1000.0, 0, 1.0, 4, 500, 1.0)
    facts = MapFacts(
        created=CREATED,
        environment=current_environment(),
        trace_environment=current_environment(),
        trace_digest="trace",
        config={},
        tolerance=Tolerance(),
        tolerance_reasons={},
        recipes=tuple(dict.fromkeys(c.recipe for c in cells)),
        baseline_loss=0.5,
        false_discovery_rate=0.01,
        health=health,
        hyperparameters=(),
        scales=scales,
        coverage=Coverage(1.0, 0.0, {}, 20, 0),
        alerts=(),
    )
    return SafetyMap(cells, facts)


def operand_scale(layer: str, operand: str, scale: float) -> OperandScale:
    scales = {"e4m3": scale, "e5m2": scale / 128}
    return OperandScale(layer, operand, 1.0, 0.1, 8.0, scales, {"e4m3": 1e-9, "e5m2": 1e-9}, 20)


def row(site: str, candidate: str, status: str = "ok", **changes: Any) -> ReplayRow:
    fqn, rest = site.split("#")
    call, role = rest.split(":")
    values: dict[str, Any] = dict(
        site=site,
        fqn=fqn,
        call=int(call),
        role=role,
        batch=1,
        m=64,
        n=48,
        k=32,
        dtype="float32",
        candidate=candidate,
        library="torch",
        version="2.13.0",
        recipe=candidate.split("/", 1)[1],
        emulated=False,
        status=Status(status),
        draws=8,
        repetitions=10,
        inputs="moments",
        chip="cpu",
        workload_digest=f"{site}|{candidate}",
    )
    values.update(changes)
    for field in msgspec.structs.fields(ReplayRow):
        values.setdefault(field.name, None)
    return ReplayRow(**values)


def replay_results(*rows: ReplayRow, env: Environment | None = None) -> ReplayResults:
    facts = ReplayFacts(
        created=CREATED,
        environment=env or current_environment(),
        trace_digest="trace",
        config={},
        policy="cpu-median",
        policy_description="",
        complete=True,
    )
    return ReplayResults(rows, facts)


@dataclasses.dataclass(frozen=True)
class FakeCandidate:
    """A candidate for choosing: it has a name and constraints and cannot run."""

    recipe: str
    library: str = "fake"
    roles: frozenset[Role] = frozenset((Role.FWD, Role.DGRAD, Role.WGRAD))
    emulated: bool = False
    abi: int = 1
    refusal: str | None = None
    installed: str | None = "1.0"

    @property
    def name(self) -> str:
        return f"{self.library}.gemm/{self.recipe}"

    def version(self) -> str | None:
        return self.installed

    def supports(self, problem: Problem, chip: Chip) -> str | None:
        return self.refusal

    def prepare(
        self, operand: torch.Tensor, side: Side, scale: torch.Tensor | None = None
    ) -> Prepared:
        raise AssertionError("a fake candidate cannot run")

    def run(self, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> torch.Tensor:
        raise AssertionError("a fake candidate cannot run")


CPU_RECIPE = "e4m3/tensorwise/fp32"


def entry(
    fqn: str,
    linear: nn.Linear,
    role: Role,
    *,
    recipe: str = CPU_RECIPE,
    tokens: int = 64,
    dtype: str = "float32",
    scales: tuple[float, float] | None = None,
    numerics: str = "measured",
    **changes: Any,
) -> Entry:
    """Make the entry that ``choose`` would make for a layer, without a safety map."""
    width, height = linear.in_features, linear.out_features
    m, n, k = {
        Role.FWD: (None, height, width),
        Role.DGRAD: (None, width, height),
        Role.WGRAD: (height, width, None),
    }[role]
    least, most = token_interval(role, [tokens])
    made = Entry(
        fqn=fqn,
        call="*",
        role=role.value,
        token_axis=token_axis(role),
        tokens_min=least,
        tokens_max=most,
        m=m,
        n=n,
        k=k,
        batch=1,
        dtype=dtype,
        layout="row,column",
        candidate=f"torch.scaled_mm/{recipe}",
        library="torch",
        library_version=str(torch.__version__),
        recipe=recipe,
        scale_policy="static" if scales else "dynamic",
        scale_a=scales[0] if scales else None,
        scale_b=scales[1] if scales else None,
        fallback="default",
        evidence=Evidence("safe", 0.001, recipe, numerics, "none", None, None, "a test"),
    )
    return msgspec.structs.replace(made, **changes)


def table_of(*entries: Entry, **changes: Any) -> DispatchTable:
    env = current_environment()
    known = {}
    for one in entries:
        if one.candidate.startswith("torch."):
            known[one.candidate] = find_candidate(one.candidate)
    listed = [one for one in entries if one.candidate in known]
    made = DispatchTable(
        kind=KIND,
        schema_version=SCHEMA_VERSION,
        created=CREATED,
        chip="cpu",
        objective=Objective.COVERAGE,
        environment=env,
        config={},
        tolerance=Tolerance(),
        safety_digest="safety",
        replay_digest=None,
        validators=validators_for("cpu", env, listed, known),
        entries=entries,
        layers=(),
        misses=(),
    )
    return msgspec.structs.replace(made, **changes)


def full_table(
    model: nn.Module,
    roles: tuple[Role, ...] = (Role.FWD, Role.DGRAD, Role.WGRAD),
    **options: Any,
) -> DispatchTable:
    """Route every nn.Linear of a model in the given roles."""
    return table_of(
        *(
            entry(name, module, role, **options)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            for role in roles
        )
    )


def ml_cast(x: np.ndarray, name: str, scale: np.ndarray | float) -> np.ndarray:
    """Cast by ml_dtypes and return what the code stands for, float64."""
    kind, largest = {
        "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
        "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    }[name]
    scale32 = np.asarray(scale, np.float32)
    stored = np.clip(x.astype(np.float32) / scale32, -largest, largest).astype(kind)
    return stored.astype(np.float64) * scale32.astype(np.float64)


def ml_product(
    a: torch.Tensor,
    b: torch.Tensor,
    formats: tuple[str, str] = ("e4m3", "e4m3"),
    scales: tuple[float, float] | None = None,
    rowwise: bool = False,
) -> np.ndarray:
    """Return the float64 product of operands cast by ml_dtypes; scales from amax unless given."""
    factors = []
    for side, (x, name) in enumerate(zip((a, b), formats, strict=True)):
        value = x.detach().double().numpy()
        largest = {"e4m3": 448.0, "e5m2": 57344.0}[name]
        if scales is not None:
            scale: Any = scales[side]
        else:
            axis = (1 if side == 0 else 0) if rowwise else None
            amax = np.abs(value).max(axis=axis, keepdims=rowwise)
            scale = np.where(amax == 0, 1.0, amax / largest)
        factors.append(ml_cast(value, name, scale))
    return factors[0] @ factors[1]


@pytest.fixture(scope="session")
def made() -> Any:
    """Every maker of this file under one name, since test files cannot import each other."""

    class Makers:
        CPU_RECIPE = CPU_RECIPE
        FakeCandidate = FakeCandidate

    makers: dict[str, Callable[..., Any]] = {
        "cell": cell,
        "environment": environment,
        "safety_map": safety_map,
        "operand_scale": operand_scale,
        "row": row,
        "replay_results": replay_results,
        "entry": entry,
        "table_of": table_of,
        "full_table": full_table,
        "ml_product": ml_product,
    }
    for name, maker in makers.items():
        setattr(Makers, name, staticmethod(maker))
    return Makers
