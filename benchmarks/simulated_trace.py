"""Write traces whose errors are known: the writer that tests use, and a realistic simulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loka_toolkit.artifacts import storage
from loka_toolkit.artifacts.schema import ColumnType, TableSchema
from loka_toolkit.artifacts.sites import Role, SiteKey
from loka_toolkit.artifacts.trace import (
    ERRORS,
    HISTOGRAM_BINS,
    KIND,
    OPERANDS,
    SCHEMA_VERSION,
    SITES,
    STEPS,
    Event,
    Manifest,
    RunStatus,
    manifest_name,
)
from loka_toolkit.environment import current_environment
from loka_toolkit.numerics.recipes import DEFAULT_RECIPE_NAMES

Columns = Mapping[str, Sequence[Any] | np.ndarray]

_NEUTRAL = {
    ColumnType.STRING: "",
    ColumnType.BOOL: False,
    ColumnType.INT32: 0,
    ColumnType.INT64: 0,
    ColumnType.FLOAT64: 0.0,
    ColumnType.INT64_LIST: [0] * HISTOGRAM_BINS,
    ColumnType.FLOAT32_LIST: [0.0] * 7,
}


@dataclasses.dataclass(frozen=True)
class SimulatedSite:
    """A site to write; see the table ``sites``."""

    key: SiteKey
    module_type: str = "Linear"
    batch: int = 1
    m: int = 512
    n: int = 128
    k: int = 64
    dispatchable: bool = True

    @classmethod
    def named(cls, name: str, **more: Any) -> SimulatedSite:
        """Return the site of a name such as ``tower.0#0:fwd``."""
        return cls(SiteKey.parse(name), **more)


def write_trace(
    path: Path,
    sites: Sequence[SimulatedSite],
    errors: Columns,
    *,
    recipes: Sequence[str] = DEFAULT_RECIPE_NAMES,
    steps: Columns | None = None,
    operands: Columns | None = None,
    events: Sequence[Event] = (),
    closed: bool = True,
    rank: int = 0,
) -> Path:
    """Write one rank of a trace; columns not given are null, or neutral where they must be.

    Args:
        path: Directory of the trace.
        sites: Its sites.
        errors: Columns of the table ``errors``, equally long; ``step``, ``site`` and ``recipe``
            at least.
        recipes: Recipes that the manifest names.
        steps: Columns of the table ``steps``; by default one recorded row per step of ``errors``,
            with a mean loss of 0.5.
        operands: Columns of the table ``operands``.
        events: Events of the manifest.
        closed: Whether the recorder was closed.
        rank: The rank.
    """
    if steps is None:
        steps = {"step": np.unique(np.asarray(errors["step"], dtype=np.int64))}
    count = len(steps["step"])
    flops = sum(2.0 * s.batch * s.m * s.n * s.k for s in sites)
    defaults = {
        "status": ["recorded"] * count,
        "mean_loss": [0.5] * count,
        "loss": [0.5] * count,
        "loss_scale": [1.0] * count,
        "gemm_flops_seen": [flops] * count,
    }
    _write(path, SITES, _site_columns(sites), rank)
    _write(path, STEPS, {**defaults, **steps}, rank)
    _write(path, ERRORS, {"impact_status": ["unknown"] * len(errors["step"]), **errors}, rank)
    if operands is not None:
        _write(path, OPERANDS, operands, rank)
    manifest = Manifest(
        kind=KIND,
        schema_version=SCHEMA_VERSION,
        created="2026-01-01T00:00:00+00:00",
        rank=rank,
        world_size=1,
        environment=current_environment(),
        config={"simulated": True},
        recipes=tuple(recipes),
        status=RunStatus(closed=closed, steps_seen=count, steps_recorded=count),
        events=tuple(events),
    )
    storage.write_json(path / manifest_name(rank), manifest)
    return path


def simulate(
    path: Path, *, sites: int, recipes: int, steps: int, seed: int = 0, every: int = 100
) -> Path:
    """Write a trace as a training run of a recommendation model leaves it.

    Layers are linear, cross and interaction products with their gradients. SQNR depends on format,
    scaling, role and site, with Student-t noise of 4 degrees of freedom over steps; one layer in
    twenty mixes raw counts with embeddings, which tensorwise scaling flushes to zero; gradients are
    heavy-tailed; static scales overflow at rare steps.

    Args:
        path: Directory of the trace.
        sites: Number of sites.
        recipes: Number of recipes, of those considered by default.
        steps: Sampled steps.
        seed: Seed.
        every: Optimizer steps between sampled ones.
    """
    rng = np.random.default_rng(seed)
    names = DEFAULT_RECIPE_NAMES[:recipes]
    simulated = _sites(sites, rng)
    layers = sorted({s.key.layer for s in simulated})
    layer_of = np.array([layers.index(s.key.layer) for s in simulated])
    mixed = rng.random(len(layers)) < 0.05
    gradient = np.array([s.key.role.is_gradient for s in simulated])
    narrow = np.array([min(s.m, s.n, s.k) for s in simulated])

    cells = (len(simulated), len(names))
    base = np.array([_base_db(name) for name in names])
    tensorwise = np.array(["rowwise" not in name for name in names])
    site_db = rng.normal(0.0, 0.8, len(simulated)) - 1.5 * gradient
    mean = base + site_db[:, None] + 0.3 * rng.standard_t(4, cells)
    spread = 0.08 * np.sqrt(256.0 / narrow)[:, None] * np.exp(0.4 * rng.normal(size=cells))
    sqnr = mean[..., None] + spread[..., None] * rng.standard_t(4, (*cells, steps))
    row = sqnr - 2.0 - 3.0 * gradient[:, None, None] + 0.2 * rng.standard_t(4, sqnr.shape)

    share = 10.0 ** rng.normal(np.where(gradient, -2.2, -5.0), 0.6)[:, None, None]
    share = share * np.where(np.array(["e5m2" in n for n in names]), 0.05, 1.0)[:, None]
    underflow = np.minimum(share * np.exp(0.3 * rng.normal(size=sqnr.shape)), 1.0)
    flushed = (mixed[layer_of] & ~gradient)[:, None] & tensorwise
    underflow[flushed] = 1.0
    static = np.array(["static" in name for name in names])
    overflow = static[:, None] & (rng.random(sqnr.shape) < 0.003)
    saturation = np.where(overflow, 10.0 ** rng.normal(-3.0, 1.0, sqnr.shape), 0.0)
    sqnr = np.where(overflow, sqnr - 12.0, sqnr)

    relative = 10.0 ** (-sqnr / 20.0)
    second = 2e-5 * np.square(relative) * rng.gamma(4.0, 0.25, sqnr.shape)
    first = 0.5 * np.sqrt(2.0 * second / 8192) * rng.normal(size=sqnr.shape)
    forward = ~np.broadcast_to(gradient[:, None, None], sqnr.shape)
    noise = 0.2 * np.square(relative) * rng.gamma(4.0, 0.25, sqnr.shape)

    s, r, t = (index.ravel() for index in np.indices(sqnr.shape))
    site_names = np.array([str(site.key) for site in simulated], dtype=object)
    group = np.array([f"x[{16 * i}:{16 * i + 16}]" for i in range(4)], dtype=object)
    unknown = np.where(forward.ravel(), None, "a gradient changes the update and not the loss")
    errors = {
        "step": t * every,
        "site": site_names[s],
        "recipe": np.array(names, dtype=object)[r],
        "relative_frobenius": relative.ravel(),
        "sqnr_db": sqnr.ravel(),
        "row_sqnr_db_p05": row.ravel(),
        "element_error_median": 0.5 * relative.ravel(),
        "element_error_mean": 5.0 * relative.ravel(),
        "underflow_share": 0.1 * underflow.ravel(),
        "underflow_share_worst_group": underflow.ravel(),
        "underflow_worst_group": group[s % len(group)],
        "saturation_share": saturation.ravel(),
        "impact_first_order": _masked(first, forward),
        "impact_second_order": _masked(second, forward),
        "impact_standard_error": _masked(np.abs(first), forward),
        "impact_status": np.where(forward.ravel(), "ok", "unknown"),
        "impact_reason": unknown,
        "gradient_bias": _masked(1e-3 * rng.normal(size=sqnr.shape), ~forward),
        "gradient_noise_ratio": _masked(noise, ~forward),
        "sampled_rows": np.full(sqnr.size, 256),
        "sampled_columns": np.full(sqnr.size, 256),
    }
    return write_trace(
        path,
        simulated,
        errors,
        recipes=names,
        operands=_operands(layers, simulated, steps, every, rng),
    )


def _sites(count: int, rng: np.random.Generator) -> list[SimulatedSite]:
    kinds = (
        ("Linear", (Role.FWD, Role.DGRAD, Role.WGRAD)),
        ("CrossLayer", (Role.FWD, Role.DGRAD, Role.WGRAD)),
        ("Interaction", (Role.FWD, Role.GRAD_A, Role.GRAD_B)),
        ("Linear", (Role.FWD, Role.DGRAD, Role.WGRAD)),
    )
    found: list[SimulatedSite] = []
    layer = 0
    while len(found) < count:
        module_type, roles = kinds[layer % len(kinds)]
        n, k = (int(2 ** rng.integers(4, 11)) for _ in range(2))
        for role in roles:
            key = SiteKey(f"blocks.{layer}.{module_type.lower()}", 0, role)
            found.append(SimulatedSite(key, module_type, m=8192, n=n, k=k))
        layer += 1
    return found[:count]


def _base_db(recipe: str) -> float:
    """Least SQNR of i.i.d. normal operands: 28.6 dB in E4M3, 22.6 dB in E5M2."""
    formats, scaling, _ = recipe.split("/")
    db = {"e4m3": 28.6, "e5m2": 22.6}.get(formats, 24.6)
    return db + {"rowwise": 0.6, "static": -0.3}.get(scaling, 0.0)


def _operands(
    layers: Sequence[str],
    sites: Sequence[SimulatedSite],
    steps: int,
    every: int,
    rng: np.random.Generator,
) -> Columns:
    activations = {s.key.layer for s in sites if s.key.role in (Role.GRAD_A, Role.GRAD_B)}
    kinds = [
        (f"{layer}:{role}", operand)
        for layer in layers
        for role, operand in (
            (("fwd", "a"), ("fwd", "b"), ("grad_a", "g"))
            if layer in activations
            else (("fwd", "x"), ("fwd", "w"), ("dgrad", "g"))
        )
    ]
    location = rng.normal(1.0, 2.0, len(kinds))
    noise = np.array([0.05 if operand == "w" else 0.4 for _, operand in kinds])
    log2 = location[:, None] + noise[:, None] * rng.standard_t(5, (len(kinds), steps))
    amax = np.exp2(log2).ravel()
    which, step = (index.ravel() for index in np.indices(log2.shape))
    return {
        "step": step * every,
        "site": np.array([site for site, _ in kinds], dtype=object)[which],
        "operand": np.array([operand for _, operand in kinds], dtype=object)[which],
        "amax": amax,
        "mean": np.zeros_like(amax),
        "variance": np.square(amax / 4.0),
    }


def _masked(values: np.ndarray, keep: np.ndarray) -> list[float | None]:
    return np.where(keep, values, None).ravel().tolist()


def _site_columns(sites: Sequence[SimulatedSite]) -> Columns:
    return {
        "site": [str(s.key) for s in sites],
        "fqn": [s.key.fqn for s in sites],
        "call": [s.key.call for s in sites],
        "role": [s.key.role.value for s in sites],
        "op": ["aten.mm.default"] * len(sites),
        "batch": [s.batch for s in sites],
        "m": [s.m for s in sites],
        "n": [s.n for s in sites],
        "k": [s.k for s in sites],
        **{f"dtype_{side}": ["float32"] * len(sites) for side in ("a", "b", "out")},
        **{f"layout_{side}": ["row"] * len(sites) for side in ("a", "b")},
        "module_type": [s.module_type for s in sites],
        "dispatchable": [s.dispatchable for s in sites],
    }


def _write(path: Path, schema: TableSchema, columns: Columns, rank: int) -> None:
    unknown = set(columns) - set(schema.column_names)
    if unknown:
        raise ValueError(f"table {schema.name!r} has no columns {sorted(unknown)}")
    count = len(next(iter(columns.values())))
    filled = {}
    for column in schema.columns:
        neutral = column.default
        if neutral is None and not column.nullable:
            neutral = _NEUTRAL[column.type]
        filled[column.name] = columns.get(column.name, [neutral] * count)
    if "rank" in filled:
        filled["rank"] = [rank] * count
    table = storage.table_from_columns(schema, filled)
    name = storage.part_path(path / schema.name, rank, 0)
    storage.write_table(name, table, schema, kind=storage.part_kind(schema))
