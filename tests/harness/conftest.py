"""A small trace, synthetic but consistent: what a recorder would have written for these layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loka_toolkit.artifacts import storage
from loka_toolkit.artifacts.trace import (
    AMAX_QUANTILES,
    ERRORS,
    HISTOGRAM_BINS,
    KIND,
    MOMENTS,
    OPERANDS,
    SCHEMA_VERSION,
    SITES,
    STEPS,
    Manifest,
    RunStatus,
    Trace,
)
from loka_toolkit.environment import current_environment
from loka_toolkit.numerics.recipes import DEFAULT_RECIPE_NAMES

HERE = Path(__file__).parent


@dataclasses.dataclass
class TraceWriter:
    """Collects rows and writes them as one flush of rank 0."""

    path: Path
    rng: np.random.Generator
    sites: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    operands: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    moments: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def site(self, fqn: str, role: str, dims: tuple[int, int, int, int], **changes: Any) -> None:
        batch, m, n, k = dims
        row = {
            "site": f"{fqn}#0:{role}",
            "fqn": fqn,
            "call": 0,
            "role": role,
            "op": "aten.bmm.default" if batch > 1 else "aten.mm.default",
            "batch": batch,
            "m": m,
            "n": n,
            "k": k,
            "dtype_a": "float32",
            "dtype_b": "float32",
            "dtype_out": "float32",
            "layout_a": "strided",
            "layout_b": "strided",
            "module_type": "Linear",
            "weight": None,
            "norm_after": None,
            "dispatchable": True,
            "first_step": 0,
        }
        self.sites.append(row | changes)

    def operand(
        self,
        site: str,
        operand: str,
        sample: np.ndarray,
        *,
        with_moments: bool = True,
        rank: int = 0,
    ) -> None:
        """Record the operand whose rows are ``sample`` [rows, width]."""
        flat = np.abs(sample)
        self.operands.append(
            {
                "step": 0,
                "rank": rank,
                "site": site,
                "operand": operand,
                "dtype": "float32",
                "numel": sample.size,
                "width": sample.shape[1],
                "mean": float(sample.mean()),
                "variance": float(sample.var()),
                "amax": float(flat.max()),
                "smallest_nonzero": float(flat[flat > 0].min()),
                "zero_share": float((sample == 0).mean()),
                "nonfinite_count": 0,
                "histogram_log2": [0] * HISTOGRAM_BINS,
                "row_amax_quantiles": _quantiles(flat.max(axis=1)),
                "column_amax_quantiles": _quantiles(flat.max(axis=0)),
                "block128_amax_quantiles": _quantiles(flat.max(axis=1)),
            }
        )
        if not with_moments:
            return
        covariance = np.cov(sample, rowvar=False, bias=True).reshape(sample.shape[1], -1)
        self.moments.append(
            {
                "rank": rank,
                "site": site,
                "operand": operand,
                "count": sample.shape[0],
                "steps": 1,
                "width": sample.shape[1],
                "kind": "full",
                "mean": sample.mean(axis=0).tolist(),
                "covariance": covariance.ravel().tolist(),
                "row_norm_quantiles": _quantiles(np.linalg.norm(sample, axis=1)),
                "zero_share": float((sample == 0).mean()),
            }
        )

    def step(self, step: int, loss_scale: float) -> None:
        row: dict[str, Any] = {column.name: column.default for column in STEPS.columns}
        fixed = {
            "step": step,
            "rank": 0,
            "status": "recorded",
            "loss_scale": loss_scale,
            "seconds_recording": 0.0,
            "gemm_flops_seen": 0.0,
            "gemm_flops_unseen": 0.0,
        }
        self.steps.append(row | fixed)

    def linear(
        self,
        fqn: str,
        tokens: int,
        width: int,
        outputs: int,
        *,
        x: np.ndarray | None = None,
        dtype: str = "float32",
        roles: tuple[str, ...] = ("fwd", "dgrad", "wgrad"),
        without_moments: tuple[str, ...] = (),
    ) -> None:
        """Record a layer x[tokens, width] w^T as nn.Linear has it, forward and backward."""
        dims = {
            "fwd": (1, tokens, outputs, width),
            "dgrad": (1, tokens, width, outputs),
            "wgrad": (1, outputs, width, tokens),
        }
        dtypes = {"dtype_a": dtype, "dtype_b": dtype, "dtype_out": dtype}
        for role in roles:
            self.site(fqn, role, dims[role], weight=f"{fqn}.weight", **dtypes)
        x = self.correlated(512, width) if x is None else x
        scale = np.exp(self.rng.normal(size=(512, 1))) * 1e-4
        samples = {
            ("fwd", "x"): x,
            ("fwd", "w"): self.rng.normal(0, width**-0.5, (outputs, width)),
            ("dgrad" if "dgrad" in roles else "wgrad", "g"): scale
            * self.rng.normal(size=(512, outputs)),
        }
        for (role, operand), sample in samples.items():
            self.operand(
                f"{fqn}#0:{role}",
                operand,
                sample,
                with_moments=operand not in without_moments,
            )

    def correlated(self, rows: int, width: int) -> np.ndarray:
        """Return rows with a mean and strongly correlated, unlike features."""
        mixing = self.rng.normal(size=(width, width)) * np.exp(self.rng.normal(size=(width, 1)))
        return self.rng.normal(size=(rows, width)) @ mixing.T + self.rng.normal(size=width)

    def write(self) -> Trace:
        tables = {
            SITES: self.sites,
            OPERANDS: self.operands,
            MOMENTS: self.moments,
            STEPS: self.steps,
            ERRORS: [],
        }
        for schema, rows in tables.items():
            if rows:
                table = storage.table_from_rows(schema, rows)
                part = storage.part_path(self.path / schema.name, 0, 0)
                storage.write_table(part, table, schema, kind=storage.part_kind(schema))
        manifest = Manifest(
            kind=KIND,
            schema_version=SCHEMA_VERSION,
            created="2026-01-01T00:00:00+00:00",
            rank=0,
            world_size=1,
            environment=current_environment(),
            config={},
            recipes=DEFAULT_RECIPE_NAMES,
            status=RunStatus(closed=True, steps_seen=1, steps_recorded=1),
        )
        storage.write_json(self.path / "manifest.json", manifest)
        return Trace.open(self.path)


def _quantiles(values: np.ndarray) -> list[float]:
    return np.quantile(values, AMAX_QUANTILES).tolist()


@pytest.fixture
def writer(tmp_path: Path) -> TraceWriter:
    return TraceWriter(tmp_path / "trace", np.random.default_rng(7))


@pytest.fixture
def new_writer(tmp_path: Path) -> Callable[[str, int], TraceWriter]:
    return lambda name, seed: TraceWriter(tmp_path / name, np.random.default_rng(seed))


@pytest.fixture
def linear_trace(writer: TraceWriter) -> Trace:
    """One layer, forward and backward, dims of which none is a multiple of 16."""
    writer.linear("tower.0", tokens=117, width=39, outputs=70)
    return writer.write()


@pytest.fixture
def forward_trace(writer: TraceWriter) -> Trace:
    """One forward product."""
    writer.linear("tower.0", tokens=96, width=64, outputs=48, roles=("fwd", "wgrad"))
    return writer.write()


@pytest.fixture
def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``fake_kernels:...`` importable here and in worker processes."""
    monkeypatch.syspath_prepend(str(HERE))
